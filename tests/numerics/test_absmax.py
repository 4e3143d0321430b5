"""The scan: largest magnitude and the first element that is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from sparkquant.numerics import absmax
from tests.numerics.formats import adversarial

ENGINES = pytest.mark.parametrize("numba", ["0", "1"], ids=["torch", "kernels"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@ENGINES
def test_largest_magnitude(numba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKQUANT_NUMBA", numba)
    for name, tensor in adversarial().items():
        assert absmax(tensor) == (float(tensor.float().abs().max()), None), name
    assert absmax(torch.tensor(-2.5)) == (2.5, None)
    assert absmax(torch.empty(0, 4)) == (0.0, None)


@ENGINES
@DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_first_non_finite(dtype: torch.dtype, value: float, numba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKQUANT_NUMBA", numba)
    tensor = torch.ones(3, 700, 1024, dtype=dtype)  # several chunks
    assert absmax(tensor) == (1.0, None)
    tensor[2, 699, 1023] = value
    assert absmax(tensor) == (math.inf, (2, 699, 1023))
    tensor[1, 5, 6] = value
    tensor[1, 5, 7] = -value
    assert absmax(tensor) == (math.inf, (1, 5, 6))


@ENGINES
@DTYPES
def test_largest_finite_number_is_finite(dtype: torch.dtype, numba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKQUANT_NUMBA", numba)
    most = torch.finfo(dtype).max
    assert absmax(torch.tensor([1.0, -most], dtype=dtype)) == (most, None)


def test_refused() -> None:
    with pytest.raises(ValueError, match="got torch"):
        absmax(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous"):
        absmax(torch.zeros(4, 4).T[:, ::2])
