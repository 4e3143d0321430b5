"""Compiled kernels and plain torch give the same bytes; what happens without numba or its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkquant import numerics
from tests.numerics.formats import FORMATS, Format, adversarial, same_bytes, weights

SEARCH = pytest.mark.parametrize("search", [False, True], ids=["rtn", "mse"])
ADVERSARIAL = adversarial()


def in_plain_torch(
    monkeypatch: pytest.MonkeyPatch, format: Format, weight: Tensor, **options: Any
) -> tuple[Tensor | None, ...]:
    with monkeypatch.context() as patch:
        patch.setenv("SPARKQUANT_NUMBA", "0")
        assert not numerics.uses_kernels()
        return format.quantize(weight, **options)


@SEARCH
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_same_bytes(format: Format, search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numerics.uses_kernels()
    for name, weight in ADVERSARIAL.items():
        compiled = format.quantize(weight, search=search)
        assert same_bytes(compiled, in_plain_torch(monkeypatch, format, weight, search=search)), name


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_same_bytes_with_importance(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    importance = (torch.arange(256) % 13).float() ** 3
    for name in ("bfloat16", "float32", "spread", "huge", "denormal"):
        options = {"search": True, "importance": importance}
        compiled = format.quantize(ADVERSARIAL[name], **options)
        assert same_bytes(compiled, in_plain_torch(monkeypatch, format, ADVERSARIAL[name], **options)), name


@SEARCH
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_same_bytes_over_chunks(format: Format, search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # More than one chunk of 2**18 elements, the last one short, and a ragged block edge.
    weight = weights(140, 2048)
    compiled = format.quantize(weight, search=search)
    assert same_bytes(compiled, in_plain_torch(monkeypatch, format, weight, search=search))
    tail = format.quantize(weight[128:].contiguous(), search=search)
    if format.name != "nvfp4":  # its global scale is of the whole tensor
        assert torch.equal(tail[0].float(), compiled[0][128:].float())  # type: ignore[union-attr,index]


@pytest.mark.parametrize("columns", [100, 8, 1])
@SEARCH
def test_same_bytes_for_odd_rows(columns: int, search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(70, columns)
    for format in FORMATS:
        if format.name in ("int4-symmetric-g-1", "fp8-channel", "fp8-block"):
            compiled = format.quantize(weight, search=search)
            assert same_bytes(compiled, in_plain_torch(monkeypatch, format, weight, search=search)), format


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_thread_count_does_not_matter(format: Format) -> None:
    weight = weights(140, 2048)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            results.append(format.quantize(weight, search=True))
        finally:
            torch.set_num_threads(threads)
    assert same_bytes(*results)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@SEARCH
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_same_bytes_on_gpu(format: Format, search: bool) -> None:
    for name, weight in ADVERSARIAL.items():
        on_gpu = format.quantize(weight.cuda(), search=search)
        on_gpu = tuple(tensor if tensor is None else tensor.cpu() for tensor in on_gpu)
        assert same_bytes(format.quantize(weight, search=search), on_gpu), name


PROGRAM = """
import sys, torch
from sparkquant import numerics
assert "numba" not in sys.modules, "numba is imported when first used"
weight = torch.arange(512.0).view(2, 256).bfloat16()
print(numerics.absmax(weight).amax, numerics.uses_kernels())
"""
EXPECTED = "512.0 True"


def run_program(program: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.slow
def test_an_unusable_cache_folder_does_not_matter(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    # Neither the folder of the source, nor the user's, nor the one asked for can be written.
    program = "import os; os.makedirs = lambda *a, **k: (_ for _ in ()).throw(PermissionError())\n" + PROGRAM
    assert run_program(program, NUMBA_CACHE_DIR=str(blocked / "cache"), HOME=str(blocked)) == EXPECTED


@pytest.mark.slow
def test_a_corrupt_cache_does_not_matter(tmp_path: Path) -> None:
    assert run_program(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path)) == EXPECTED
    files = [path for path in tmp_path.rglob("*.nb*") if path.is_file()]
    assert files, "the cache is used"
    for path in files:
        path.write_bytes(b"\x00garbage")
    assert run_program(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path)) == EXPECTED


def test_without_numba() -> None:
    program = "import sys; sys.modules['numba'] = None\n" + PROGRAM.replace('"numba" not in', '"-" not in')
    assert run_program(program) == "512.0 False"
