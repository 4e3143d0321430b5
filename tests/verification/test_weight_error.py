"""`verify --deep --source`: local damage to quantized weights is found, and named by tensor and row."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sparkquant.report import Check
from sparkquant.verification.gate import verify
from tests.verification.conftest import Draft

UP = "model.language_model.layers.0.mlp.up_proj"
Q = "model.language_model.layers.3.self_attn.q_proj"
ROW = 5
NVFP4_FP8 = "qwen-hybrid-nvfp4-fp8"


@dataclass(frozen=True)
class Damage:
    """`change` maps a row's values of one tensor; `part` is the piece of the row that it is applied to."""

    module: str
    tensor: str
    change: Callable[[bytes], bytes]
    recipe: str = "qwen-hybrid-w4a16"
    part: tuple[int | None, int | None] = (None, None)


def _bf16(factor: float) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        values = [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] * factor for i in range(0, len(raw), 2)]
        return b"".join(struct.pack("<f", value)[2:] for value in values)

    return change


def _xor(mask: int) -> Callable[[bytes], bytes]:
    return lambda raw: bytes(byte ^ mask for byte in raw)


def _fill(byte: int) -> Callable[[bytes], bytes]:
    return lambda raw: bytes([byte]) * len(raw)


CASES = {
    "int4 row zeroed": Damage(UP, "weight_packed", _fill(0x88)),
    "int4 row negated": Damage(UP, "weight_scale", _bf16(-1)),
    "int4 row doubled": Damage(UP, "weight_scale", _bf16(2)),
    "int4 row halved": Damage(UP, "weight_scale", _bf16(0.5)),
    "int4 group negated": Damage(UP, "weight_scale", _bf16(-1), part=(2, 4)),
    "int4 group halved": Damage(UP, "weight_scale", _bf16(0.5), part=(2, 4)),
    "int4 bit of a scale": Damage(UP, "weight_scale", _xor(0x01), part=(3, 4)),
    "int4 group zeroed": Damage(UP, "weight_packed", _fill(0x88), part=(64, 128)),
    "nvfp4 row zeroed": Damage(UP, "weight_packed", _fill(0), NVFP4_FP8),
    "nvfp4 block doubled": Damage(UP, "weight_scale", lambda raw: bytes([raw[0] + 8]), NVFP4_FP8, (3, 4)),
    "nvfp4 block halved": Damage(UP, "weight_scale", lambda raw: bytes([raw[0] - 8]), NVFP4_FP8, (3, 4)),
    "nvfp4 block zeroed": Damage(UP, "weight_packed", _fill(0), NVFP4_FP8, (8, 16)),
    "nvfp4 codes negated": Damage(UP, "weight_packed", _xor(0x88), NVFP4_FP8),
    "fp8 row zeroed": Damage(Q, "weight", _fill(0), NVFP4_FP8),
    "fp8 row negated": Damage(Q, "weight", _xor(0x80), NVFP4_FP8),
    "fp8 row a quarter larger": Damage(Q, "weight_scale", _bf16(1.25), NVFP4_FP8),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_row_is_found(case: str, draft: Callable[..., Draft]) -> None:
    damage = CASES[case]
    copy = draft(damage.recipe)
    name = f"{damage.module}.{damage.tensor}"
    _, shape, raw = copy.tensors[name]
    width = len(raw) // shape[0]
    row = raw[ROW * width : (ROW + 1) * width]
    start, stop, _ = slice(*damage.part).indices(width)
    copy.put(name, damage.change(row[start:stop]), at=ROW * width + start)
    copy.save()
    found = _error(copy)
    assert found.status == "fail"
    assert found.tensors == (damage.module,)
    assert found.message.startswith(f"{damage.module}: row {ROW}")
    assert found.measured.keys() == {damage.module}


def test_the_number_of_rows_is_named(draft: Callable[..., Draft]) -> None:
    copy = draft()
    name = f"{UP}.weight_scale"
    copy.put(name, _bf16(-1)(copy.tensors[name][2][:40]))
    copy.save()
    assert _error(copy).message.endswith("(10 rows are off)")


def _error(draft: Draft) -> Check:
    report = verify(draft.path, source=draft.source, level="deep")
    return next(check for check in report.checks if check.id == "values.error")
