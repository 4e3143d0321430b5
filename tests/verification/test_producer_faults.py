"""Break one thing in another producer's checkpoint, and exactly that is found."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkquant.verification.gate import verify
from tests.checkpoints import read_raw, write_json
from tests.verification.conftest import Draft, findings
from tests.verification.producers import Made, fp8_tensor, gptq, produce, rewrite
from tests.verification.test_sabotage import Edit, drop, plain, put, several

L0 = "model.language_model.layers.0."
L3 = "model.language_model.layers.3."
DOWN = f"{L0}mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Each producer's checkpoint, written once."""
    known: dict[str, Made] = {}

    def get(producer: str) -> Made:
        if producer not in known:
            known[producer] = produce(tmp_path_factory.mktemp("made"), producer)
        return known[producer]

    return get


def block(**fields: Any) -> Edit:
    return lambda draft: draft.block.update(fields)


def listed(key: str, *names: str, without: str = "") -> Edit:
    """Extend a list of the config, and drop entries that contain a text."""

    def edit(draft: Draft) -> None:
        kept = [entry for entry in draft.block[key] if not without or without not in entry]
        draft.block[key] = [*kept, *names]

    return edit


def side(**fields: Any) -> Edit:
    content = {"producer": {"name": "modelopt"}, "quantization": fields}
    return lambda draft: write_json(draft.path / "hf_quant_config.json", content)


def gates_quantized(draft: Draft) -> None:
    for layer in range(3):
        for leaf in ("in_proj_a", "in_proj_b"):
            name = f"model.language_model.layers.{layer}.linear_attn.{leaf}"
            del draft.tensors[f"{name}.weight"]
            draft.tensors |= {
                f"{name}.qweight": ("I32", (32, 2), b"\x99" * 256),
                f"{name}.qzeros": ("I32", (2, 0), b""),
                f"{name}.scales": ("F16", (2, 2), b"\x00\x30" * 4),
            }


def turned(draft: Draft) -> None:
    """Inputs in an order that the config does not admit."""
    order = struct.pack("<512i", *(3 - i // 128 for i in range(512)))
    draft.tensors[f"{DOWN}.g_idx"] = ("I32", (512,), order)


def wide(draft: Draft) -> None:
    name = f"{DOWN}.scales"
    _, shape, raw = draft.tensors[name]
    values = struct.unpack(f"<{len(raw) // 2}e", raw)
    draft.tensors[name] = ("F32", shape, struct.pack(f"<{len(values)}f", *values))


def reencoded(module: str, encode: Any, source_of: Callable[[Draft], Path] = lambda draft: draft.source) -> Edit:
    """Store one module in another way."""

    def edit(draft: Draft) -> None:
        from tests.verification.producers import bfloat16

        weight = bfloat16(read_raw(source_of(draft))[f"{module}.weight"])
        for name in [n for n in draft.tensors if n.startswith(f"{module}.")]:
            del draft.tensors[name]
        parts, _ = encode(module, weight, abs(weight).max())
        draft.tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}

    return edit


def mixed_group(draft: Draft) -> None:
    draft.block["quantized_layers"][f"{L3}self_attn.v_proj"] = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    name = f"{L3}self_attn.v_proj.weight_scale"
    rows = draft.tensors[f"{L3}self_attn.v_proj.weight"][1][0]
    draft.tensors[name] = ("F32", (rows,), draft.tensors[name][2] * rows)
    del draft.tensors[f"{L3}self_attn.v_proj.input_scale"]


def scaled(name: str, factor: float) -> Edit:
    def edit(draft: Draft) -> None:
        dtype, shape, raw = draft.tensors[name]
        draft.tensors[name] = (dtype, shape, struct.pack("<f", struct.unpack("<f", raw)[0] * factor))

    return edit


def all_listed(draft: Draft) -> None:
    """The list that vLLM would derive, spelled out."""
    names = [name.removesuffix(".qweight") for name in draft.tensors if name.endswith(".qweight")]
    draft.block["modules_in_block_to_quantize"] = [names]


def zero_group(draft: Draft) -> None:
    draft.put(f"{DOWN}.scales", b"\0\0", at=6)


@dataclass(frozen=True)
class Case:
    """`ids` are all findings expected."""

    producer: str
    ids: str
    edit: Edit


NVFP4, MIXED, BLOCK = "modelopt w4a16 nvfp4", "modelopt mixed", "fp8 block"
CASES = [
    Case(NVFP4, "tensors.missing", drop(f"{DOWN}.weight_scale_2")),
    Case("modelopt nvfp4", "tensors.missing", drop(f"{DOWN}.input_scale")),
    Case(NVFP4, "scales.global", scaled(f"{L0}mlp.gate_proj.weight_scale_2", 1.3)),
    Case("modelopt nvfp4", "scales.global", scaled(f"{L0}mlp.gate_proj.input_scale", 1.3)),
    Case(NVFP4, "scales.sign", scaled(f"{DOWN}.weight_scale_2", -1.0)),
    Case(NVFP4, "scales.zero", put(f"{DOWN}.weight_scale_2", b"\0\0\0\0")),
    Case(NVFP4, "scales.finite", put(f"{DOWN}.weight_scale", b"\x7f", at=9)),
    Case(NVFP4, "config.absent", plain(DOWN, (256, 512))),
    Case(NVFP4, "config.undeclared", listed("ignore", DOWN)),
    Case(NVFP4, "config.undeclared", listed("ignore", "*layers.0.mlp.down_proj")),
    Case(NVFP4, "rules.partial_ignore", listed("ignore", f"{L0}mlp.up_proj")),
    Case(NVFP4, "protected.targeted", listed("ignore", without="mtp")),
    Case(NVFP4, "protected.targeted", listed("ignore", without="visual")),
    Case(NVFP4, "protected.targeted", listed("ignore", without="in_proj_")),
    Case(NVFP4, "rules.dead_ignore", listed("ignore", "model.language_model.layers.77.mlp")),
    Case(NVFP4, "config.format", side(quant_algo="FP8")),
    Case(NVFP4, "config.kv_cache", block(kv_cache_scheme={"num_bits": 8, "type": "float"})),
    Case(NVFP4, "config.unsupported", block(quant_algo="W4A8_AWQ")),
    Case(NVFP4, "tensors.missing", block(quant_algo="NVFP4")),
    Case(NVFP4, "config.malformed config.absent protected.targeted", block(ignore="lm_head")),
    Case("modelopt fp8", "config.scheme", block(quant_algo="W4A16_NVFP4")),
    Case(MIXED, "rules.split_scheme", mixed_group),
    Case(MIXED, "rules.partial_ignore", lambda draft: draft.block["quantized_layers"].pop(f"{L0}mlp.up_proj")),
    Case(MIXED, "config.undeclared", lambda draft: draft.block["quantized_layers"].pop(DOWN)),
    Case(MIXED, "config.malformed config.undeclared", lambda draft: draft.block.pop("quantized_layers")),
    Case("gptq", "tensors.missing", drop(f"{DOWN}.scales")),
    Case("gptq", "scales.order", turned),
    Case("gptq 8 bits, plain order", "config.actorder", block(desc_act=True)),
    Case("gptq", "tensors.scale_dtype", wide),
    Case("gptq", "scales.zero", zero_group),
    Case("gptq", "scales.finite", put(f"{DOWN}.scales", b"\x00\x7e", at=6)),
    Case("gptq", "config.unsupported", block(bits=3)),
    Case("gptq", "protected.quantized", gates_quantized),
    Case("gptq", "config.absent", several(all_listed, drop(f"{DOWN}."), plain(DOWN, (256, 512)))),
    Case("gptq", "config.undeclared", block(dynamic={r"-:.*layers\.0\.mlp\.down_proj": {}})),
    Case("awq", "scales.zero", zero_group),
    Case("awq", "tensors.missing", drop(f"{DOWN}.qzeros")),
    Case("awq", "config.undeclared", listed("modules_to_not_convert", "layers.0.mlp.down_proj")),
    Case("awq", "config.unsupported", block(version="gemv")),
    Case("auto-round", "tensors.missing", drop(f"{DOWN}.qweight")),
    Case("auto-round", "config.unsupported", block(packing_format="auto_round:llm_compressor")),
    Case("auto-round", "config.undeclared", lambda d: d.block["extra_config"].update({DOWN: {"bits": 16}})),
    Case("auto-round", "rules.partial_ignore",
         lambda d: d.block["extra_config"].update({f"{L0}mlp.up_proj": {"bits": 16}})),
    Case("auto-round", "config.sizes tensors.shape", lambda d: d.block["extra_config"].update({DOWN: {"bits": 8}})),
    Case("auto-round", "protected.targeted", block(block_name_to_quantize="model.language_model.layers,mtp.layers")),
    Case("auto-round", "config.malformed", lambda d: d.block["extra_config"].update({"re:(": {"bits": 16}})),
    Case("auto-round", "config.scheme", reencoded(DOWN, fp8_tensor(inputs=True))),
    Case(BLOCK, "tensors.missing", drop(f"{DOWN}.weight_scale_inv")),
    Case(BLOCK, "scales.zero", put(f"{DOWN}.weight_scale_inv", b"\0\0\0\0", at=4)),
    Case(BLOCK, "protected.targeted", listed("modules_to_not_convert", without="visual")),
    Case(BLOCK, "protected.targeted", listed("modules_to_not_convert", without="mtp.fc")),
    Case(BLOCK, "rules.partial_ignore", listed("modules_to_not_convert", without="in_proj_a")),
    Case(BLOCK, "config.undeclared", listed("modules_to_not_convert", DOWN)),
    Case(BLOCK, "config.scheme", reencoded(DOWN, gptq())),
    Case("fp8 tensor", "tensors.missing", drop(f"{DOWN}.input_scale")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.producer}: {case.ids}")
def test_a_fault_is_found_and_nothing_else(case: Case, made: Callable[[str], Made], tmp_path: Path) -> None:
    good = made(case.producer)
    path = tmp_path / "draft"
    shutil.copytree(good.out, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    draft = Draft(path, good.source, config, read_raw(path))
    case.edit(draft)
    write_json(path / "config.json", draft.config)
    rewrite(path, draft.tensors)
    report = verify(path)
    assert findings(report) == set(case.ids.split()), report.to_json()
