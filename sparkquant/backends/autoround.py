"""AutoRound: roundings and ranges tuned block by block, for exactly the modules of the plan.

It takes rows of one length without a mask (it reuses the first block's arguments for every block, and drops shorter
rows), so rows are cut into pieces, never joined. Scales are made in BF16 at once: rounding them afterwards would move
every weight that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparkquant.backends.native import stored_tensors
from sparkquant.backends.work import Result, Target, Work
from sparkquant.numerics.integer import IntegerWeights
from sparkquant.numerics.pack import pack_int32, pack_zero_points
from sparkquant.schemes import Scheme

KEPT_TOKENS = 0.75
"""Share of the calibration tokens that pieces of one length must hold; the longest such length is taken."""

KEEP = {"bits": 16, "act_bits": 16, "data_type": "float", "act_data_type": "float"}


def quantize(work: Work) -> Result:
    """Tune every block on the rows."""
    from auto_round import AutoRound

    length = piece_length([len(row) for row in work.rows])
    pieces = [row[i : i + length] for row in work.rows for i in range(0, len(row) - length + 1, length)]
    lost = 1 - length * len(pieces) / sum(map(len, work.rows))
    work.say(f"{len(pieces)} pieces of {length} tokens, {lost:.0%} of the tokens left out: it takes rows of one length")
    planned = {target.live: target.scheme for target in work.targets}
    names = [name for name, module in work.model.named_modules() if isinstance(module, nn.Linear)]
    base = work.targets[0].scheme
    # What is not named takes the base scheme, so every Linear is named.
    layers = {name: _layer(planned[name]) if name in planned else KEEP for name in names}
    tuner = AutoRound(
        work.model,
        tokenizer=_Tokenizer(),
        scheme=f"W{base.bits}A16",
        layer_config=layers,
        dataset=[{"input_ids": torch.tensor([piece]), "attention_mask": None} for piece in pieces],
        nsamples=len(pieces),
        seqlen=length,
        iters=work.options["iters"],
        batch_size=min(work.options["batch_rows"], len(pieces)),
        device_map=work.device,
        scale_dtype="bf16",
        enable_torch_compile=False,
    )
    model, _ = tuner.quantize()
    found = {name: module for name, module in model.named_modules() if _is_quantized(module)}
    notes = {"piece_tokens": length, "pieces": len(pieces), "tokens_left_out": round(lost, 4)}
    return Result(frozenset(found), _stored(work.targets, found), notes)


def piece_length(lengths: Sequence[int]) -> int:
    """The longest length of which whole pieces of the rows hold enough of all tokens."""
    total = sum(lengths)
    fitting = (n for n in sorted(set(lengths), reverse=True) if sum(k // n * n for k in lengths) >= KEPT_TOKENS * total)
    return next(fitting, min(lengths))


def _layer(scheme: Scheme) -> dict[str, Any]:
    fields = {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric, "data_type": "int"}
    return {**fields, "act_bits": 16}


class _Tokenizer:
    """Stands in for a tokenizer: rows are ids already. Without a padding id no token is taken for padding."""

    pad_token_id = None
    pad_token = None


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(getattr(module, "scale", None), Tensor) and getattr(module, "bits", 16) <= 8


def _stored(targets: Sequence[Target], found: dict[str, nn.Module]) -> Iterator[tuple[str, str, Tensor]]:
    for target in targets:
        if target.live not in found:
            continue
        module: Any = found[target.live]
        weights = encoded(module.weight.detach().float().cpu(), module.scale, module.zp, target.scheme)
        for suffix, tensor in stored_tensors(target.scheme, weights, module.weight.shape, None):
            yield target.module, suffix, tensor


def encoded(weight: Tensor, scale: Tensor, zero: Any, scheme: Scheme) -> IntegerWeights:
    """Codes of a tuned weight [N, K], which lies on the grid of its scales [N, G] but for the rounding to BF16."""
    n, k = weight.shape
    scale = scale.reshape(n, -1).to(torch.bfloat16)
    group = k // scale.shape[1]
    spread = scale.float().repeat_interleave(group, dim=1)
    middle = 2 ** (scheme.bits - 1)
    steps = torch.where(spread == 0, 0, weight / spread)
    points = None
    if not scheme.symmetric:
        points = (zero.reshape(n, -1).round() - middle).to(torch.int8)  # signed, as codes are packed
        steps += points.repeat_interleave(group, dim=1)
    codes = steps.round().clamp(-middle, middle - 1).to(torch.int8)
    packed_points = None if points is None else pack_zero_points(points, scheme.bits)
    return IntegerWeights(pack_int32(codes, scheme.bits), scale, packed_points)
