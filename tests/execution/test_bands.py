"""Bands of rows give the bytes of whole matrices, whatever their size; and a data-free run never loads torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparkquant
from sparkquant.backends import Unit, bands
from sparkquant.backends.bands import BandBackend, constants, linears, needs_peaks, peak, peaks_by_expert
from sparkquant.backends.native import NativeBackend
from sparkquant.decisions import Decision
from sparkquant.errors import NonFiniteWeight
from sparkquant.layers import LayerClass
from sparkquant.reading import DTYPE_NAMES, raw_bytes
from sparkquant.schemes import Scheme, make_scheme
from tests.execution.folders import digests
from tests.execution.runs import Checkpoints, in_a_child, source_of
from tests.numerics.formats import weights

SCHEMES = (
    make_scheme("w4a16"),
    make_scheme("w4a16", group_size=32, symmetric=False),
    make_scheme("w4a16", group_size=-1, symmetric=False),
    make_scheme("w8a16", group_size=64),
    make_scheme("nvfp4a16"),
    make_scheme("fp8"),
    make_scheme("fp8_block"),
)


def _decision(scheme: Scheme, name: str, weight: Tensor, parts: tuple[str, ...] = ()) -> Decision:
    return Decision(
        name, "x", DTYPE_NAMES[weight.dtype], tuple(weight.shape), LayerClass.MLP_DOWN, 0, name, name, "group", parts,
        scheme, "", (), experts=len(weight) if parts else 1,
    )  # fmt: skip


def _by_bands(unit: Unit, sources: dict[str, Tensor], method: str) -> Iterator[tuple[str, bytes]]:
    backend = BandBackend(method)
    found = []
    for linear in linears(unit) if needs_peaks(unit) else ():
        for band in bands.bands(linear):
            found.append((band, peak(band, _raw(band, sources))))
    peaks = peaks_by_expert(found)
    for linear in linears(unit):
        value = peaks.get(linear.expert)
        outputs = linear.scheme.outputs((linear.rows, linear.columns))
        stored = {tensor.name: bytearray(tensor.bytes) for tensor in outputs}
        for suffix, data in constants(linear, value):
            stored[suffix][:] = data
        for band in bands.bands(linear):
            for suffix, offset, piece in backend.encode(band, _raw(band, sources), value):
                stored[suffix][offset : offset + piece.nbytes] = piece.cast("B")
        assert all(len(stored[tensor.name]) == tensor.bytes for tensor in outputs)
        yield from ((f"{linear.module}.{suffix}", bytes(data)) for suffix, data in stored.items())


def _raw(band: bands.Band, sources: dict[str, Tensor]) -> memoryview:
    return raw_bytes(sources[band.linear.decision.tensor])[band.offset : band.offset + band.bytes]


def _whole(unit: Unit, sources: dict[str, Tensor], method: str) -> dict[str, bytes]:
    given = {d.tensor: sources[d.tensor] for d in unit.decisions}
    if unit.decisions[0].parts:
        given = {name: tensor[unit.first : unit.last] for name, tensor in given.items()}
    return {name: bytes(raw_bytes(tensor)) for name, tensor in NativeBackend(method).quantize(unit, given)}


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_a_matrix_in_bands(scheme: Scheme, dtype: torch.dtype, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "ELEMENTS", 5000)
    sources = {"a": weights(328, 384).to(dtype), "b": (weights(72, 384, seed=1) * 3).to(dtype)}
    unit = Unit(tuple(_decision(scheme, name, weight) for name, weight in sources.items()))
    assert dict(_by_bands(unit, sources, method)) == _whole(unit, sources, method)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_fused_experts_in_bands(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "ELEMENTS", 5000)
    fused = weights(5 * 512, 128).view(5, 512, 128)
    fused[3] *= 2
    unit = Unit((_decision(scheme, "layers.0.experts.gate_up_proj", fused, ("gate_proj", "up_proj")),), 2, 5)
    sources = {"layers.0.experts.gate_up_proj": fused}
    made = dict(_by_bands(unit, sources, "rtn"))
    assert made == _whole(unit, sources, "rtn")
    assert {name.split(".")[3] for name in made} == {"2", "3", "4"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_what_is_not_finite_is_named(scheme: Scheme, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "ELEMENTS", 5000)
    weight = weights(328, 384).to(dtype)
    unit = Unit((_decision(scheme, "a", weight),))
    for value, shown in ((float("inf"), "inf"), (float("-inf"), "-inf"), (float("nan"), "nan")):
        weight[300, 17] = weight[301, 3] = value
        for make in (_by_bands, _whole):
            with pytest.raises(NonFiniteWeight) as caught:
                dict(make(unit, {"a": weight}, "rtn"))
            assert caught.value.what == f"a: element [300, 17] is {shown}"


def test_every_recipe_gives_the_bytes_of_plain_torch(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of("moe", checkpoints)
    classes = ("attention.qkv", "attention.out", "linear_attention.qkvz", "experts.gate_up", "experts.down")
    for scheme in SCHEMES:
        spelled = scheme.as_json()
        recipe = {
            "name": "bands",
            "summary": "one scheme on most classes",
            "families": ["qwen3_5_moe"],
            "schemes": dict.fromkeys(classes, spelled),
        }
        for numba in ("1", "0"):
            monkeypatch.setenv("SPARKQUANT_NUMBA", numba)
            sparkquant.quantize(source, recipe, tmp_path / numba / scheme.label, method="rtn")
    assert digests(tmp_path / "1") == digests(tmp_path / "0")


def test_quantizing_without_data_never_loads_torch(checkpoints: Checkpoints, tmp_path: Path) -> None:
    code = (
        "import sys, sparkquant\n"
        "for method in ('rtn', 'mse'):\n"
        "    sparkquant.quantize(sys.argv[1], 'qwen-hybrid-nvfp4-fp8', f'{sys.argv[2]}-{method}', method=method)\n"
        "print({'torch', 'transformers', 'numba'} & set(sys.modules))\n"
    )
    assert in_a_child(code, source_of("vision", checkpoints), tmp_path / "out").stdout == "{'numba'}\n"
