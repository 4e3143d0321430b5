"""Which kernel vLLM takes for a dense Linear, as read from its candidate lists; per version and compute capability.

Sizes are those that one rank holds of the fused module: n = rows (outputs), k = columns (inputs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkquant.schemes import NVFP4_BLOCK, Scheme

MARLIN_GROUPS = (-1, 32, 64, 128)
ATOMIC_ADD_N = 2048
"""Marlin reduces with atomics below this n, from this k on (the same number bounds both)."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a Linear runs.

    kernel  `Marlin`, another kernel's name, or "" when the engine refuses the layer
    padded  sizes (n, k) after the zero padding that Marlin applies at load, None when the shape fits
    reason  why, in words
    """

    kernel: str
    padded: tuple[int, int] | None
    reason: str


def parse_capability(capability: str) -> tuple[int, int]:
    """`12.1` -> (12, 1); ValueError for anything else."""
    major, dot, minor = capability.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"compute capability {capability!r} is not like 12.1")
    return int(major), int(minor)


def atomic_add_applies(n: int, k: int, *, capability: str = "12.1", bfloat16: bool = True) -> bool:
    """Whether `VLLM_MARLIN_USE_ATOMIC_ADD=1` changes this dense layer at all (Marlin MoE turns it off for experts)."""
    if n >= ATOMIC_ADD_N or k < ATOMIC_ADD_N:
        return False
    return not (bfloat16 and parse_capability(capability)[0] < 9)


def marlin_padding(n: int, k: int, group: int) -> tuple[int, int] | None:
    """The sizes that Marlin pads to, None when its thread tiles fit."""
    if (n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0):
        return None
    step = max(1, group)
    wide = (_up(n, 64), _up(k, math.lcm(128, step)))
    tall = (_up(n, 128), _up(k, math.lcm(64, step)))
    return min(wide, tall, key=lambda size: size[0] * size[1])


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def route(
    scheme: Scheme, n: int, k: int, *, capability: str = "12.1", version: str = "0.25", k_full: int | None = None
) -> Route:
    """The kernel for one dense Linear. `k_full` is the unsharded k when ranks share the inputs."""
    cc = parse_capability(capability)
    if cc < (7, 5):
        return Route("", None, f"compute capability {capability} is below 7.5")
    if min(n, k) < 1:
        return Route("", None, f"an empty shape [{n}, {k}]")
    if scheme.is_integer:
        return _integer(scheme, n, k, k_full or k, cc, version)
    if scheme.name == "nvfp4a16":
        return _nvfp4(n, k, cc, version)
    return _fp8(scheme, n, k, cc)


def _marlin(n: int, k: int, group: int, reason: str) -> Route:
    padded = marlin_padding(n, k, group)
    if padded is not None:
        reason += f"; [{n}, {k}] is padded with zeros to {list(padded)} at load"
    return Route("Marlin", padded, reason)


def _integer(scheme: Scheme, n: int, k: int, k_full: int, cc: tuple[int, int], version: str) -> Route:
    group = scheme.group_size
    if group not in MARLIN_GROUPS:
        return Route("", None, f"group size {group} is not one of {', '.join(map(str, MARLIN_GROUPS))}")
    if scheme.bits not in (4, 8) or (scheme.bits == 8 and not scheme.symmetric):
        return Route("", None, "Marlin takes symmetric 4- and 8-bit codes, and zero points with 4 bits alone")
    if group != -1 and group < k_full and k % group:
        return Route("", None, f"k={k} is not a multiple of the group size {group}: a group would straddle two ranks")
    if cc == (9, 0):
        if k % 64 == 0 and n % 128 == 0 and group in (-1, 64, 128):
            return Route("Machete", None, "first in the list on 9.0; `--linear-backend marlin` gives Marlin")
        if version == "0.33":
            return Route("Humming", None, "before Marlin on 9.0; `--linear-backend marlin` gives Marlin")
    if cc[0] == 8 and scheme.bits == 8 and group == -1 and version != "0.33" and n % 16 == 0 and k % 16 == 0:
        return Route("AllSpark", None, "before Marlin for 8-bit codes with one scale a row")
    return _marlin(n, k, group, "packed integer weights")


def _nvfp4(n: int, k: int, cc: tuple[int, int], version: str) -> Route:
    if k % NVFP4_BLOCK:
        return Route("", None, f"k={k} is not a multiple of {NVFP4_BLOCK}")
    if version == "0.33" and cc == (9, 0):
        return Route("Humming", None, "weight-only NVFP4 on 9.0; `--linear-backend marlin` gives Marlin")
    if version == "0.33" and cc in ((10, 0), (10, 3)):
        return Route("FlashInferCuteDslW4A16", None, "weight-only NVFP4 on 10.x")
    return _marlin(n, k, NVFP4_BLOCK, "weight-only NVFP4")


def _fp8(scheme: Scheme, n: int, k: int, cc: tuple[int, int]) -> Route:
    if cc >= (8, 9):
        if scheme.name == "fp8_block":
            return Route("DeepGEMM or Cutlass", None, "block FP8; which of the two is decided when the engine starts")
        return Route("Cutlass", None, "FP8 weights with dynamic FP8 activations")
    if scheme.name == "fp8_block":
        return _marlin(n, k, 128, "no FP8 units below 8.9: weights alone are FP8")
    marlin = _marlin(n, k, -1, "no FP8 units below 8.9: weights alone are FP8; Humming comes first where installed")
    return Route("Humming or Marlin", marlin.padded, marlin.reason)
