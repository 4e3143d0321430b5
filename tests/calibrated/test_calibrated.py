"""Calibrated methods: better than data-free ones, resumable, private, and honest about what they did not know."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sparkquant
from sparkquant import events
from sparkquant.checkpoint import Checkpoint
from sparkquant.device import compute_dtype
from sparkquant.errors import CalibrationError, UsageError
from sparkquant.memory import memory_plan
from sparkquant.planning import make_plan
from sparkquant.recipe_files import load_recipe
from sparkquant.stream import StreamedModel
from sparkquant.weights import StoredWeights
from tests.checkpoints import RawTensors, build
from tests.execution.folders import digests
from tests.execution.runs import set_values

Checkpoints = Callable[..., Path]
ALLOW = ("few-tokens", "no-thinking", "truncated")
RECIPE = "qwen-hybrid-nvfp4-fp8"


def quantized(source: Path, out: Path, method: str, rows: Path | None = None, **options: Any) -> Path:
    calibration = {} if rows is None else {"calibration": rows, "allow": ALLOW}
    return sparkquant.quantize(source, options.pop("recipe", RECIPE), out, method=method, **calibration, **options).out


def output_error(result: Path, source: Path) -> float:
    """Relative error of the hidden states behind the last block, on rows that calibration did not see."""
    generator = torch.Generator().manual_seed(9)
    ids = [torch.randint(0, 256, (40,), generator=generator).tolist() for _ in range(6)]
    ends = []
    for folder in (source, result):
        checkpoint = Checkpoint.open(folder)
        with StoredWeights(checkpoint) as weights:
            model = StreamedModel(checkpoint, weights)
            batches = list(model.embed(ids))
            for index in range(model.depth):
                with model.block(index) as block:
                    for batch in batches:
                        batch.hidden = model.run(block, index, batch.hidden)
        ends.append(torch.cat([batch.hidden.flatten(0, 1) for batch in batches]))
    return float((ends[1] - ends[0]).norm() / ends[0].norm())


@pytest.mark.parametrize(
    ("model_type", "recipe"),
    [
        ("qwen3_5", "qwen-hybrid-w4a16"),
        ("qwen3_5_moe", RECIPE),
        pytest.param("qwen3_5", RECIPE, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "qwen-hybrid-w4a16", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "qwen-hybrid-w4a16", marks=pytest.mark.slow),
        pytest.param("qwen3_next", RECIPE, marks=pytest.mark.slow),
    ],
)
def test_gptq_loses_less_than_data_free_methods(
    model_type: str, recipe: str, checkpoints: Checkpoints, rows: Path, tmp_path: Path
) -> None:
    source = checkpoints(model_type)
    errors = {
        method: output_error(quantized(source, tmp_path / method, method, data, recipe=recipe), source)
        for method, data in (("rtn", None), ("mse", None), ("gptq", rows))
    }
    assert errors["gptq"] < 0.97 * errors["mse"] < errors["rtn"]


def test_importance_is_used(checkpoints: Checkpoints, rows: Path, tmp_path: Path) -> None:
    source = checkpoints("qwen3_5")
    weighted = quantized(source, tmp_path / "imatrix", "imatrix", rows)
    plain = quantized(source, tmp_path / "mse", "mse")
    assert digests(weighted) != digests(plain)
    assert output_error(weighted, source) < output_error(quantized(source, tmp_path / "rtn", "rtn"), source)


def test_the_same_rows_give_the_same_bytes_and_spilling_changes_nothing(
    checkpoints: Checkpoints, rows: Path, tmp_path: Path, cache: Path
) -> None:
    source = checkpoints("qwen3_5")
    first = quantized(source, tmp_path / "first", "gptq", rows)
    plan = make_plan(Checkpoint.open(source), load_recipe(RECIPE).with_method("gptq"))
    lengths = [len(row) for row in json.loads(rows.read_text())]
    roomy = memory_plan(plan, lengths, compute_dtype("cpu"))  # machines without bfloat16 compute in float32
    tight = quantized(source, tmp_path / "tight", "gptq", rows, max_memory=roomy.needed_bytes - 1)
    weights = {name: digest for name, digest in digests(first).items() if name.endswith(".safetensors")}
    assert weights == {name: digest for name, digest in digests(tight).items() if name.endswith(".safetensors")}
    assert json.loads((tight / "sparkquant" / "calibration.json").read_text())["memory"]["spill"] is True
    assert not list(cache.glob("*"))  # work folders are gone


def test_batches_let_go_of_states(checkpoints: Checkpoints) -> None:
    """An empty slice of them would keep the states of all rows in memory."""
    checkpoint = Checkpoint.open(checkpoints("qwen3_5"))
    with StoredWeights(checkpoint) as weights:
        batches = list(StreamedModel(checkpoint, weights).embed([[1, 2, 3], [4, 5]]))
    for batch in batches:
        without = batch.without_states()
        assert without.hidden.untyped_storage().nbytes() == 0
        assert (without.rows, without.ids is batch.ids, without.valid is batch.valid) == (batch.rows, True, True)


def test_too_little_memory_is_refused_with_numbers(checkpoints: Checkpoints, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"calibration needs \d+ MiB even with statistics in files, 10 MiB"):
        quantized(checkpoints("qwen3_5"), tmp_path / "out", "gptq", rows, max_memory=10 * 2**20)
    assert not (tmp_path / "out").exists()


def test_the_record_tells_counts_and_never_ids(checkpoints: Checkpoints, rows: Path, tmp_path: Path) -> None:
    out = quantized(checkpoints("qwen3_5_moe"), tmp_path / "out", "gptq", rows)
    text = (out / "sparkquant" / "calibration.json").read_text()
    record = json.loads(text)
    assert record["method"] == {"name": "gptq", "correction": 0.0}
    assert [block["index"] for block in record["blocks"]] == [0, 1, 2, 3, None]
    for block in record["blocks"]:
        assert 0 < block["error"] < block["nearest_error"]
    tokens = sum(len(row) for row in json.loads(rows.read_text()))
    for block in record["blocks"][:-1]:
        (counts,) = block["expert_tokens"].values()
        assert sum(counts) == 2 * tokens  # two experts a token, padding never counted
    first = json.loads(rows.read_text())[0]
    assert ", ".join(map(str, first[:6])) not in text


def test_an_expert_that_saw_few_tokens_is_quantized_without_them_and_named(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    short = tmp_path / "short.json"
    short.write_text(json.dumps([[1, 2, 3, 4, 5, 6, 7, 8]] * 2))
    out = quantized(checkpoints("qwen3_5_moe"), tmp_path / "out", "gptq", short)
    record = json.loads((out / "sparkquant" / "calibration.json").read_text())
    assert all(any(".experts." in name for name in block["fallbacks"]) for block in record["blocks"][:-1])


KILLED = """
import os, signal, sys
from sparkquant import blockwise
import sparkquant, torch
torch.set_num_threads(1)
source, rows, out, after = sys.argv[1:]
save = blockwise.Progress.save
count = 0
def counted(self, folder):
    global count
    save(self, folder)
    count += 1
    if count == int(after):
        os.kill(os.getpid(), signal.SIGKILL)
blockwise.Progress.save = counted
sparkquant.quantize(source, "qwen-hybrid-nvfp4-fp8", out, method="gptq", calibration=rows,
                    allow=("few-tokens", "no-thinking", "truncated"))
"""


@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_killed_run_goes_on_behind_its_last_block(
    blocks: int, checkpoints: Checkpoints, rows: Path, tmp_path: Path, cache: Path
) -> None:
    source = checkpoints("qwen3_5")
    whole = quantized(source, tmp_path / "whole", "gptq", rows)
    out = tmp_path / "out"
    arguments = [sys.executable, "-c", KILLED, str(source), str(rows), str(out), str(blocks)]
    assert subprocess.run(arguments, check=False, env=dict(os.environ)).returncode == -signal.SIGKILL
    assert not out.exists()
    (work,) = cache.iterdir()
    assert work.stat().st_mode & 0o777 == 0o700
    said: list[str] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Said):
            said.append(event.message)

    quantized(source, out, "gptq", rows, listener=listen)
    assert f"resuming: {blocks} of 4 blocks are done already" in said
    weights = {name: digest for name, digest in digests(out).items() if name.endswith(".safetensors")}
    assert weights == {name: digest for name, digest in digests(whole).items() if name.endswith(".safetensors")}
    assert not list(cache.iterdir())


def test_other_rows_are_another_job(checkpoints: Checkpoints, rows: Path, tmp_path: Path, cache: Path) -> None:
    source = checkpoints("qwen3_5")
    arguments = [sys.executable, "-c", KILLED, str(source), str(rows), str(tmp_path / "out"), "1"]
    subprocess.run(arguments, check=False, env=dict(os.environ))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(rows.read_text())[:-1]))
    with pytest.raises(UsageError, match="belongs to another job") as raised:
        quantized(source, tmp_path / "out", "gptq", other)
    assert "calibration" in [problem.where for problem in raised.value.problems]
    assert len(list(cache.iterdir())) == 1
    quantized(source, tmp_path / "out", "gptq", other, restart=True)
    assert not list(cache.iterdir())


def _overflowing(config: Mapping[str, Any], tensors: RawTensors) -> None:
    """The last token alone reaches dimension 0, where a norm is finite but larger than activations can take."""
    for name, (dtype, shape, data) in list(tensors.items()):
        if name.endswith("embed_tokens.weight"):
            table = np.frombuffer(data, np.uint16).reshape(shape).copy()
            table[:, 0] = 0
            table[-1] = 0
            table[-1, 0] = 0x4180  # 16.0
            tensors[name] = (dtype, shape, table.tobytes())
    norm = next(name for name in tensors if name.endswith("language_model.layers.0.input_layernorm.weight"))
    set_values(tensors, norm, 0, (0x7EFF).to_bytes(2, "little"))  # 1.7e38


def test_rows_that_overflow_are_left_out_and_recorded(tmp_path: Path) -> None:
    source = build("qwen3_5", tmp_path / "m", change=_overflowing)
    last = Checkpoint.open(source).text_config["vocab_size"] - 1
    rows = [[i % 200 for i in range(start, start + 32)] for start in range(30)] + [[3, last, 4] * 10]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    out = quantized(source, tmp_path / "out", "gptq", data)
    assert json.loads((out / "sparkquant" / "calibration.json").read_text())["excluded_rows"] == [30]
    data.write_text(json.dumps([*rows, *[[last, start, last] * 9 for start in range(4)]]))
    with pytest.raises(CalibrationError, match="5 of 35 calibration rows"):
        quantized(source, tmp_path / "again", "gptq", data)
    assert not (tmp_path / "again").exists()


def test_data_free_methods_take_no_calibration(checkpoints: Checkpoints, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="method mse takes no calibration"):
        quantized(checkpoints("qwen3_5"), tmp_path / "out", "mse", rows)


def test_a_batch_is_never_padded_by_more_than_a_tenth() -> None:
    from sparkquant.stream import group_rows

    lengths = [7, 100, 96, 91, 50, 49, 48, 3, 1]
    groups = group_rows(lengths, tokens=300)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        padding = sum(longest - lengths[index] for index in group)
        assert padding <= 0.1 * longest * len(group)
        assert len(group) == 1 or longest * len(group) <= 300
