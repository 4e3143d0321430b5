"""Where blocks run, and in which precision."""

from __future__ import annotations

import torch

from sparkquant.errors import EnvironmentMissing

AUTO = "auto"


def usable_device(asked: str) -> str:
    """The torch device to use, CUDA for `auto` where there is one; EnvironmentMissing when it cannot be used."""
    if asked == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=asked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        raise EnvironmentMissing(f"device {asked!r} cannot be used: {first}", hint="pass auto, cpu or cuda") from None
    return asked


def compute_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, float32 elsewhere."""
    fast = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
