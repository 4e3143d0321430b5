"""Sources that are odd but good go through; faults that verification would find are found before any work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparkquant
from sparkquant.errors import CheckpointError, PlanError, SparkquantError, UsageError
from tests.checkpoints import RawTensors, build, read_raw

RECIPE = "qwen-hybrid-w4a16"


def quantize(source: Path, out: Path, **options: Any) -> Any:
    return sparkquant.quantize(source, RECIPE, out, method="rtn", **options)


def test_shards_on_another_disk_are_a_source(tmp_path: Path) -> None:
    source = build("qwen3_5_text", tmp_path / "m")
    (tmp_path / "disk").mkdir()
    for shard in source.glob("*.safetensors"):
        shutil.move(shard, tmp_path / "disk")
        shard.symlink_to(tmp_path / "disk" / shard.name)
    done = quantize(source, tmp_path / "out")
    assert done.report.ok
    assert sparkquant.verify(done.out, source=source, level="deep").ok
    with pytest.raises(CheckpointError, match="no regular file of this folder"):
        sparkquant.verify(source)


def test_infinity_in_the_config_is_carried_through(tmp_path: Path) -> None:
    limits = [0.0, float("inf")]
    change = _config(time_step_limit=limits)
    done = quantize(build("qwen3_5_text", tmp_path / "m", change=change), tmp_path / "out")
    assert json.loads((done.out / "config.json").read_text())["time_step_limit"] == limits
    assert not sparkquant.verify(done.out).ok


@pytest.mark.parametrize("dtype", ["torch.float16", "half"])
def test_float16_in_another_spelling_is_refused_by_the_plan(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="float16"):
        quantize(build("qwen3_5_text", tmp_path / "m", change=_config(torch_dtype=dtype)), tmp_path / "out")


def test_weights_near_the_denormal_numbers_become_zero(tmp_path: Path) -> None:
    def shrink(config: dict[str, Any], tensors: RawTensors) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        dtype, shape, _ = tensors[name]
        bits = np.full(shape, 1e-38, np.float32).view(np.uint32) >> 16
        tensors[name] = (dtype, shape, bits.astype("<u2").tobytes())

    done = quantize(build("qwen3_5_text", tmp_path / "m", change=shrink), tmp_path / "out")
    raw = read_raw(done.out)["model.layers.1.mlp.down_proj.weight_scale"][2]
    assert (np.frombuffer(raw, "<u2") >= 0x0080).all()


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "{", ""])
def test_a_broken_side_file_is_found_before_the_work(text: str, tmp_path: Path) -> None:
    source = build("qwen3_5_text", tmp_path / "m")
    (source / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        quantize(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_linked_folder_of_side_files_is_refused(tmp_path: Path) -> None:
    source = build("qwen3_5_text", tmp_path / "m")
    (tmp_path / "elsewhere").mkdir()
    (source / "extra").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="extra"):
        quantize(source, tmp_path / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["README.md", "extra", "."])
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    source = build("qwen3_5_text", tmp_path / "m")
    (source / "extra").mkdir()
    (source / name).chmod(0)
    try:
        with pytest.raises(SparkquantError, match=r"(?i)permission|readable"):
            quantize(source, tmp_path / "out")
    finally:
        (source / name).chmod(0o755)


@pytest.mark.parametrize("options", [{"tp": "1,2"}, {"tp": 2}, {"folder": None}, {"folder": "~nosuch-user/x"}])
def test_verify_refuses_arguments_that_cannot_be(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SparkquantError) as caught:
        sparkquant.verify(**{"folder": tmp_path, **options})
    assert caught.value.exit_code in (2, 3)


@pytest.mark.parametrize("inside", [False, True])
def test_restart_never_clears_its_own_source(inside: bool, tmp_path: Path) -> None:
    source = build("qwen3_5_text", tmp_path / "out.partial" / ("m" if inside else ""))
    (tmp_path / "out.partial.journal").write_text("")
    with pytest.raises(UsageError, match="work folder"):
        quantize(source, tmp_path / "out", restart=True)
    assert len(read_raw(source)) > 10


def _config(**fields: Any) -> Callable[[dict[str, Any], RawTensors], None]:
    return lambda config, _: config.update(fields)
