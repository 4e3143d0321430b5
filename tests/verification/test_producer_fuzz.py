"""Configs and headers of strangers through every reader: an error or findings, in bounded time and memory."""

from __future__ import annotations

import fnmatch
import json
import math
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.checkpoint import MAX_JSON_BYTES, Checkpoint
from sparkquant.engine.skipping import Wildcards
from sparkquant.errors import SparkquantError
from sparkquant.formats import dequantize, stored_modules
from sparkquant.formats.stored import SUFFIXES
from sparkquant.requantizing import as_16_bit
from sparkquant.schemes import DTYPE_BYTES
from sparkquant.verification.gate import verify
from tests.checkpoints import RawTensors, config_of, write_json
from tests.verification.producers import PRODUCERS, rewrite

MODULE = "model.language_model.layers.0.mlp.down_proj"
METHODS = ("modelopt", "gptq", "awq", "auto-round", "fp8", "compressed-tensors")
KEYS = (
    "quant_algo", "ignore", "exclude_modules", "quantized_layers", "config_groups", "kv_cache_scheme", "group_size",
    "bits", "w_bit", "sym", "desc_act", "dynamic", "lm_head", "modules_in_block_to_quantize", "checkpoint_format",
    "modules_to_not_convert", "zero_point", "version", "packing_format", "extra_config", "block_name_to_quantize",
    "data_type", "act_bits", "weight_block_size", "activation_scheme", "ignored_layers", "fmt", "format",
    "quantization", "to_quant_block_names", "backend", "quant_method",
)  # fmt: skip
GOOD = (
    "NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION", [128, 128], "gptq_v2", "gemm", "auto_round:auto_gptq", MODULE,
    "static", [MODULE], {MODULE: {"quant_algo": "FP8"}}, {MODULE: {"bits": 16}}, {".*down.*": {"bits": 8}}, 4, 8, True,
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(GOOD),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just(MODULE), inner, max_size=3)
    ),
    max_leaves=6,
)
blocks = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)


def tensors_of(producer: str) -> RawTensors:
    """One module as a producer stores it."""
    weight = np.random.default_rng(1).standard_normal((128, 256))
    stored, _ = PRODUCERS[producer][0](MODULE, weight, float(np.abs(weight).max()))
    return {f"{MODULE}.{suffix}": part for suffix, part in stored.items()}


def write(folder: Path, block: Any, tensors: RawTensors) -> Path:
    """A folder with one module."""
    folder.mkdir(exist_ok=True)
    rewrite(folder, tensors)
    config = config_of("qwen3_5", layers=1)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    return folder


def survive(folder: Path, level: str = "default") -> None:
    """Everything that reads a quantized folder."""
    with suppress(SparkquantError):
        verify(folder, level=level)
    with suppress(SparkquantError):
        verify(folder, level="headers", engine="0.33", tp=(1, 3), capability="9.0")
    with suppress(SparkquantError):
        checkpoint = Checkpoint.open(folder)
        for module in stored_modules(checkpoint).values():
            with suppress(SparkquantError):
                dequantize(checkpoint, module)
    with suppress(SparkquantError):
        view = as_16_bit(Checkpoint.open(folder))
        for computed in view.computed.values():
            with suppress(SparkquantError):
                computed.load(0, None)


@pytest.mark.parametrize("producer", ["modelopt nvfp4", "gptq", "awq", "fp8 block"])
@given(block=blocks, method=st.sampled_from(METHODS))
def test_any_block(producer: str, block: dict[str, Any], method: str, tmp_path: Path) -> None:
    said = {"quant_method": method, **block}
    survive(write(tmp_path / "m", said, tensors_of(producer)), "headers")


@given(block=blocks, beside=values)
def test_any_side_file(block: dict[str, Any], beside: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", None, tensors_of("modelopt nvfp4"))
    write_json(folder / "hf_quant_config.json", {"quantization": {**block}, "producer": beside})
    survive(folder, "headers")
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    survive(folder, "headers")


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
headers = st.dictionaries(
    st.sampled_from(("weight", *SUFFIXES)), st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), max_size=5
)


@given(replaced=headers, dropped=st.sets(st.sampled_from(SUFFIXES)), producer=st.sampled_from(sorted(PRODUCERS)))
def test_any_header(
    replaced: dict[str, tuple[str, tuple[int, ...]]], dropped: set[str], producer: str, tmp_path: Path
) -> None:
    tensors = {name: value for name, value in tensors_of(producer).items() if name.rpartition(".")[2] not in dropped}
    for suffix, (dtype, shape) in replaced.items():
        tensors[f"{MODULE}.{suffix}"] = (dtype, shape, b"\x81" * (math.prod(shape) * DTYPE_BYTES[dtype]))
    names = [name.rpartition(".")[0] for name in tensors]
    if not tensors:
        return
    survive(write(tmp_path / "m", PRODUCERS[producer][1]([], names), tensors), "deep")


@pytest.mark.parametrize("shape", [(2**46, 0), (0, 2**46), (2**46,), (0,), ()])
@pytest.mark.parametrize("producer", ["modelopt nvfp4", "modelopt fp8", "gptq", "awq", "fp8 block"])
def test_huge_empty_shapes_cost_nothing(producer: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = tensors_of(producer)
    for name, (dtype, _, _) in list(tensors.items()):
        if math.prod(shape) * DTYPE_BYTES[dtype] < 16:
            tensors[name] = (dtype, shape, bytes(math.prod(shape) * DTYPE_BYTES[dtype]))
    folder = write(tmp_path / "m", PRODUCERS[producer][1]([], [MODULE]), tensors)
    survive(folder, "deep")
    tracemalloc.start()
    survive(folder, "deep")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MAX_JSON_BYTES + 64 * 2**20  # config.json is read into a buffer of its largest size


@pytest.fixture
def quick() -> Iterator[None]:
    """A test that may not take long."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 30


BOMBS: list[dict[str, Any]] = [
    {"quant_method": "auto-round", "extra_config": {"(a*)*b": {"bits": 16}, "(.*.*.*.*)*x": {"bits": 16}}},
    {"quant_method": "auto-round", "extra_config": {f"(?=(a+)+){i}": {"bits": 16} for i in range(2_000)}},
    {"quant_method": "auto-round", "block_name_to_quantize": ["m" * 100] * 10_000},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*a*a*a*a*a*a*b" * 100] * 1_000},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*" + "?*" * 900 + "b"] * 1_000},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["x" * i for i in range(2_000)]},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
     "quantized_layers": {"a." * 2_000 + str(i): {"quant_algo": "FP8"} for i in range(100)}},
    {"quant_method": "gptq", "dynamic": {f"-:(a|a)*{i}$": {} for i in range(500)}},
    {"quant_method": "awq", "modules_to_not_convert": [str(i) * 50 for i in range(20_000)]},
    {"quant_method": "fp8", "modules_to_not_convert": ["experts" * 100] * 100_000},
]  # fmt: skip


@pytest.mark.parametrize("block", BOMBS, ids=lambda block: block["quant_method"])
@pytest.mark.usefixtures("quick")
def test_bombs_take_bounded_time(block: dict[str, Any], tmp_path: Path) -> None:
    tensors = tensors_of("gptq")
    for layer in range(60):
        for leaf in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "a" * 200):
            tensors[f"model.language_model.layers.{layer}.{leaf}.weight"] = ("BF16", (2, 2), bytes(8))
    survive(write(tmp_path / "m", block, tensors), "headers")


@given(pattern=st.text("ab.*?[]!-", max_size=9), name=st.text("ab.-]", max_size=9))
def test_wildcards_are_those_of_fnmatch(pattern: str, name: str) -> None:
    assert Wildcards([pattern]).fits(name) == fnmatch.fnmatchcase(name, pattern)
