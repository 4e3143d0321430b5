"""Which kernel vLLM takes for a dense Linear, as read from its candidate lists; per version and compute capability.

Sizes are those that one rank holds of the fused module: n = rows (outputs), k = columns (inputs). What a checkpoint
cannot show is not judged: the alignment of activations, `VLLM_MARLIN_INPUT_DTYPE`, the all-to-all backend of experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK, Scheme

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


@dataclass(frozen=True, slots=True)
class Form:
    """How a producer stores a scheme, as far as kernels care.

    producer    the storage: `compressed-tensors`, `modelopt`, `gptq`, `gptq_v2`, `awq`, `fp8`
    inputs      `none`, `dynamic` or `static`; "" is what the scheme has by itself (dynamic for FP8, none otherwise)
    per_tensor  FP8 with one scale for the whole matrix
    ordered     integers whose groups follow an activation order that is stored (g_idx)
    """

    producer: str = "compressed-tensors"
    inputs: str = ""
    per_tensor: bool = False
    ordered: bool = False


OURS = Form()


def route(
    scheme: Scheme,
    n: int,
    k: int,
    *,
    capability: str = "12.1",
    version: str = "0.25",
    k_full: int | None = None,
    form: Form = OURS,
) -> Route:
    """The kernel for one dense Linear. `k_full` is the unsharded k when ranks share the inputs."""
    cc = parse_capability(capability)
    if cc < (7, 5):
        return Route("", None, f"compute capability {capability} is below 7.5")
    if min(n, k) < 1:
        return Route("", None, f"an empty shape [{n}, {k}]")
    if scheme.is_integer:
        return _integer(scheme, n, k, k_full or k, cc, version, form)
    if scheme.name == "nvfp4a16":
        return _nvfp4(n, k, cc, version, form)
    return _fp8(scheme, n, k, cc, version, form)


def _marlin(n: int, k: int, group: int, reason: str) -> Route:
    padded = marlin_padding(n, k, group)
    if padded is not None:
        reason += f"; [{n}, {k}] is padded with zeros to {list(padded)} at load"
    return Route("Marlin", padded, reason)


def integer_fault(scheme: Scheme, form: Form) -> str:
    """Why the engine's config refuses these integers whatever their shape; "" when it takes them."""
    if form.producer in ("gptq", "gptq_v2") and not scheme.symmetric:
        return "GPTQ packing is taken with symmetric 4- and 8-bit codes alone"
    if form.producer == "awq" and scheme.bits != 4:
        return "AWQ packing is taken with 4 bits alone"
    if scheme.bits not in (4, 8) or (scheme.bits == 8 and not scheme.symmetric):
        return "Marlin takes symmetric 4- and 8-bit codes, and zero points with 4 bits alone"
    if scheme.group_size not in MARLIN_GROUPS:
        return f"group size {scheme.group_size} is not one of {', '.join(map(str, MARLIN_GROUPS))}"
    return ""


def _integer(scheme: Scheme, n: int, k: int, k_full: int, cc: tuple[int, int], version: str, form: Form) -> Route:
    group = scheme.group_size
    if reason := integer_fault(scheme, form):
        return Route("", None, reason)
    if group != -1 and group < k_full and k % group:
        return Route("", None, f"k={k} is not a multiple of the group size {group}: a group would straddle two ranks")
    if form.ordered:
        return _ordered(n, k, k_full, version)
    if cc == (9, 0):
        if k % 64 == 0 and n % 128 == 0 and group in (-1, 64, 128):
            return Route("Machete", None, "first in the list on 9.0; `--linear-backend marlin` gives Marlin")
        if version == "0.33":
            return Route("Humming", None, "before Marlin on 9.0; `--linear-backend marlin` gives Marlin")
    if cc[0] == 8 and scheme.bits == 8 and group == -1 and version != "0.33" and n % 16 == 0 and k % 16 == 0:
        return Route("AllSpark", None, "before Marlin for 8-bit codes with one scale a row")
    return _marlin(n, k, group, "packed integer weights")


def _ordered(n: int, k: int, k_full: int, version: str) -> Route:
    """Groups in an activation order: every rank needs all inputs, and nothing is padded."""
    if version == "0.33":
        return Route("", None, "an activation order of groups is no longer read")
    if k != k_full:
        return Route("", None, "an activation order cannot be divided over ranks that share the inputs")
    if n % 64 or k % 128:
        return Route("", None, f"with an activation order [{n}, {k}] must be multiples of [64, 128]: nothing is padded")
    return Route("Marlin", None, "packed integer weights in an activation order")


def _nvfp4(n: int, k: int, cc: tuple[int, int], version: str, form: Form) -> Route:
    if k % NVFP4_BLOCK:
        return Route("", None, f"k={k} is not a multiple of {NVFP4_BLOCK}")
    if form.inputs in ("static", "dynamic"):
        if cc >= (10, 0):
            return Route("FlashInfer Cutlass or Cutlass", None, "NVFP4 weights and activations: Marlin is not used")
        return _marlin(n, k, NVFP4_BLOCK, "NVFP4 activations need 10.0 or newer: weights alone are NVFP4")
    direct = form.producer == "modelopt" and version != "0.33"  # built as Marlin, the backend option is not asked
    if version == "0.33" and cc == (9, 0):
        return Route("Humming", None, "weight-only NVFP4 on 9.0; `--linear-backend marlin` gives Marlin")
    if version == "0.33" and cc in ((10, 0), (10, 3)):
        return Route("FlashInferCuteDslW4A16", None, "weight-only NVFP4 on 10.x")
    return _marlin(n, k, NVFP4_BLOCK, "weight-only NVFP4" + (", whatever --linear-backend says" if direct else ""))


def _fp8(scheme: Scheme, n: int, k: int, cc: tuple[int, int], version: str, form: Form) -> Route:
    if form.producer == "modelopt" and cc < ((8, 0) if version == "0.33" else (8, 9)):
        return Route("", None, "ModelOpt FP8 needs 8.0 with vLLM 0.33, 8.9 before")
    if cc >= (8, 9):
        if scheme.name == "fp8_block":
            return Route("DeepGEMM or Cutlass", None, "block FP8; which of the two is decided when the engine starts")
        if form.inputs == "none":
            return Route("Humming", None, "FP8 weights alone: Marlin is refused from 8.9 on, or comes later")
        if form.per_tensor:
            return Route("FlashInfer or Cutlass", None, "FP8 by tensor; FlashInfer where it is installed")
        return Route("Cutlass", None, "FP8 weights with dynamic FP8 activations")
    if scheme.name == "fp8_block":
        return _marlin(n, k, 128, "no FP8 units below 8.9: weights alone are FP8")
    marlin = _marlin(n, k, -1, "no FP8 units below 8.9: weights alone are FP8; Humming comes first where installed")
    return Route("Humming or Marlin", marlin.padded, marlin.reason)


MARLIN_ACTIVATIONS = frozenset({
    "silu", "swish", "swiglu", "gelu", "gelu_new", "gelu_tanh", "gelu_pytorch_tanh", "gelu_pytorch", "relu2",
    "swigluoai",
})  # fmt: skip
"""Activations between the two products of an expert that Marlin's MoE kernel computes, as configs spell them."""


def route_experts(
    scheme: Scheme,
    hidden: int,
    inner: int,
    *,
    capability: str = "12.1",
    version: str = "0.25",
    form: Form = OURS,
    activation: str = "",
) -> Route:
    """The kernel for all experts of a layer; `inner` is what one rank holds of their inner size.

    `activation` is what config.json calls the function between the two products; "" is not judged.
    """
    cc = parse_capability(capability)
    if cc < (7, 5):
        return Route("", None, f"compute capability {capability} is below 7.5")
    if min(hidden, inner) < 1:
        return Route("", None, f"an empty shape [{inner}, {hidden}]")
    taken = _experts(scheme, hidden, inner, cc, version, form)
    if taken.kernel == "Marlin MoE" and activation and activation not in MARLIN_ACTIVATIONS:
        return Route("", None, f"Marlin's MoE kernel does not compute the activation {activation[:40]!r}")
    return taken


def _experts(scheme: Scheme, hidden: int, inner: int, cc: tuple[int, int], version: str, form: Form) -> Route:
    if scheme.is_integer:
        return _integer_experts(scheme, hidden, inner, version, form)
    block = {"nvfp4a16": NVFP4_BLOCK, "fp8_block": FP8_BLOCK}.get(scheme.name, 1)
    if inner % block:
        what = f"the inner size of a rank, {inner}, is not a multiple of {block}: a block of scales would be cut"
        return Route("", None, what)
    if scheme.name == "nvfp4a16":
        if form.inputs in ("static", "dynamic") and cc >= (10, 0):
            return Route("FlashInfer Cutlass", None, "NVFP4 activations; `--moe-backend marlin` gives Marlin")
        if hidden % 128 and hidden % 64:
            return Route("", None, f"hidden size {hidden} is not a multiple of 64")
        wide = -(-inner // 128) * 128
        reason = "weight-only NVFP4 experts" + (f"; the inner size is padded to {wide}" if wide != inner else "")
        return Route("Marlin MoE", (wide, hidden) if wide != inner else None, reason)
    if cc < (8, 9):
        return Route("Marlin MoE", None, "no FP8 units below 8.9: weights alone are FP8")
    if cc[0] == 12:
        return Route("Triton MoE", None, "FP8 experts on 12.x; `--moe-backend marlin` gives Marlin")
    return Route("DeepGEMM, Cutlass or Triton MoE", None, "FP8 experts; decided when the engine starts")


def _cut_group(group: int, hidden: int, inner: int, form: Form) -> str:
    """Why the engine cannot load the scales of experts; GPTQ's and AWQ's are repeated for groups of half the size."""
    sizes = [group] if group != -1 else []
    if form.producer in ("gptq", "gptq_v2", "awq"):
        while sizes and sizes[-1] // 2 >= HALVED_TO:
            sizes.append(sizes[-1] // 2)
    if not sizes or any(hidden % size == 0 and inner % size == 0 for size in sizes):
        return ""
    what = f"the inner size of a rank, {inner}," if inner % sizes[-1] else f"the hidden size {hidden}"
    return f"{what} is not a multiple of the group size {group}: a group would straddle two ranks or lie outside"


HALVED_TO = 32
"""The smallest group that the engine makes of GPTQ's and AWQ's groups of experts."""


def _integer_experts(scheme: Scheme, hidden: int, inner: int, version: str, form: Form) -> Route:
    """Experts that Marlin cannot take run in Triton, slower and without an error, where their groups are whole."""
    if form.producer == "awq" and scheme.bits != 4:
        return Route("", None, "AWQ experts are taken with 4 bits alone")
    if cut := _cut_group(scheme.group_size, hidden, inner, form):
        return Route("", None, cut)
    slower = "`--moe-backend marlin` raises" if version == "0.33" else "slower, without an error"
    fault = integer_fault(scheme, form)
    group = scheme.group_size
    if not fault and form.ordered:
        fault = "the experts' groups are in an activation order"
    if not fault and hidden % 128:
        fault = f"hidden size {hidden} is not a multiple of 128"
    if not fault and group != -1 and inner % group:
        fault = f"the inner size of a rank, {inner}, is not a multiple of the group size {group}, which is halved"
    if not fault and form.producer in ("gptq", "awq") and version != "0.33" and inner % max(64, group):
        fault = f"the inner size of a rank, {inner}, is not a multiple of {max(64, group)}"
    if fault:
        return Route("Triton MoE", None, f"{fault}: {slower}")
    return Route("Marlin MoE", None, "packed integer experts; atomic adds are always off here")
