"""Break one thing in a good result, and exactly that is found."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sparkquant.verification.catalogue import CATALOGUE
from sparkquant.verification.gate import verify
from tests.checkpoints import read_raw
from tests.verification.conftest import Draft, findings

L0 = "model.language_model.layers.0."
L3 = "model.language_model.layers.3."
NAN, ZERO, MINUS, DENORMAL = b"\xc0\x7f", b"\x00\x00", b"\x80\xbf", b"\x01\x00"

Edit = Callable[[Draft], None]


@dataclass(frozen=True)
class Case:
    """`ids` are all findings expected; `after` edits the folder once config and tensors are written."""

    ids: str
    edit: Edit = lambda draft: None
    recipe: str = "qwen-hybrid-w4a16"
    after: Edit = lambda draft: None
    source: bool = False
    plan: bool = False
    level: str = "default"
    options: dict[str, Any] = field(default_factory=dict)


MIXED = "qwen-hybrid-nvfp4-fp8"
FP8 = "qwen-hybrid-fp8"


def inputs(arguments: dict[str, Any] | None) -> Edit:
    """Other activations for every group."""

    def edit(draft: Draft) -> None:
        for group in draft.block["config_groups"].values():
            group["input_activations"] = arguments

    return edit


def drop(*names: str) -> Edit:
    """Remove the tensors that begin with one of these."""

    def edit(draft: Draft) -> None:
        for name in [n for n in draft.tensors if n.startswith(names)]:
            del draft.tensors[name]

    return edit


def store(name: str, dtype: str, shape: tuple[int, ...], byte: bytes = b"\x01") -> Edit:
    """Add a tensor, or replace one."""
    width = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1}[dtype]

    def edit(draft: Draft) -> None:
        count = width
        for size in shape:
            count *= size
        draft.tensors[name] = (dtype, shape, byte * count)

    return edit


def put(name: str, raw: bytes, *, at: int = 0) -> Edit:
    return lambda draft: draft.put(name, raw, at=at)


def ignore(*entries: Any, without: str = "") -> Edit:
    """Extend the ignore list, and drop entries that contain a text."""

    def edit(draft: Draft) -> None:
        kept = [entry for entry in draft.block["ignore"] if not without or without not in entry]
        draft.block["ignore"] = [*kept, *entries]

    return edit


def target(format: str, *entries: str) -> Edit:
    return lambda draft: draft.group(format)["targets"].extend(entries)


def weights(**fields: Any) -> Edit:
    return lambda draft: draft.group("pack-quantized")["weights"].update(fields)


def config(**fields: Any) -> Edit:
    return lambda draft: draft.config.update(fields)


def text(**fields: Any) -> Edit:
    return lambda draft: draft.config["text_config"].update(fields)


def several(*edits: Edit) -> Edit:
    def edit(draft: Draft) -> None:
        for each in edits:
            each(draft)

    return edit


def side(name: str, content: str | None) -> Edit:
    """Write a side file, or remove it."""

    def edit(draft: Draft) -> None:
        path = draft.path / name
        if content is None:
            path.unlink()
        else:
            path.write_text(content, encoding="utf-8")

    return edit


def generation(**fields: Any) -> Edit:
    def edit(draft: Draft) -> None:
        path = draft.path / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def plain(module: str, shape: tuple[int, int]) -> Edit:
    return several(drop(f"{module}.weight"), store(f"{module}.weight", "BF16", shape))


def int4(module: str, n: int, k: int, bits: int = 4) -> Edit:
    words = k * bits // 32
    shape = struct.pack("<2q", n, k)
    return several(
        drop(f"{module}.weight"),
        store(f"{module}.weight_packed", "I32", (n, words), b"\x9a"),
        store(f"{module}.weight_scale", "BF16", (n, k // 128), b"\x3c"),
        lambda draft: draft.tensors.update({f"{module}.weight_shape": ("I64", (2,), shape)}),
    )


def gates_int4(draft: Draft) -> None:
    for layer in range(3):
        for leaf in ("in_proj_a", "in_proj_b"):
            int4(f"model.language_model.layers.{layer}.linear_attn.{leaf}", 2, 256)(draft)


def wide_scale(draft: Draft) -> None:
    name = f"{L0}mlp.down_proj.weight_scale"
    _, shape, raw = draft.tensors[name]
    wide = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
    draft.tensors[name] = ("F32", shape, wide)


def narrow_groups(draft: Draft) -> None:
    """Groups of 16, which no kernel takes."""
    draft.group("pack-quantized")["weights"]["group_size"] = 16
    for name, (dtype, shape, raw) in list(draft.tensors.items()):
        if name.endswith("weight_scale"):
            spread = b"".join(raw[i : i + 2] * 8 for i in range(0, len(raw), 2))
            draft.tensors[name] = (dtype, (shape[0], shape[1] * 8), spread)


def bfloat16_global(draft: Draft) -> None:
    name = f"{L0}mlp.down_proj.weight_global_scale"
    draft.tensors[name] = ("BF16", (1,), draft.tensors[name][2][2:])


def scaled(name: str, factor: float) -> Edit:
    def edit(draft: Draft) -> None:
        (value,) = struct.unpack("<f", draft.tensors[name][2])
        draft.put(name, struct.pack("<f", value * factor))

    return edit


def louder(draft: Draft) -> None:
    """All scales of one module 1.5 times as large: 0.25 more than rounding ever costs."""
    name = f"{L0}mlp.down_proj.weight_scale"
    raw = draft.tensors[name][2]
    values = [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] * 1.5 for i in range(0, len(raw), 2)]
    draft.put(name, b"".join(struct.pack("<f", value)[2:] for value in values))


def transposed_scale(draft: Draft) -> None:
    name = f"{L0}linear_attn.in_proj_z.weight_scale"
    dtype, shape, raw = draft.tensors[name]
    draft.tensors[name] = (dtype, shape[::-1], raw)


def split_qkv(draft: Draft) -> None:
    """v gets eight bits in a group of its own; the engine would read it with the scheme of q."""
    group = draft.group("pack-quantized")
    attention = next(t for t in group["targets"] if "self_attn" in t)
    group["targets"].remove(attention)
    group["targets"] += [r"re:.*layers\.\d+\.self_attn\.(?:q_proj|k_proj|o_proj)$"]
    eight = {**group["weights"], "num_bits": 8}
    draft.block["config_groups"]["group_1"] = {
        **group,
        "targets": [r"re:.*layers\.\d+\.self_attn\.v_proj$"],
        "weights": eight,
    }
    int4(f"{L3}self_attn.v_proj", 128, 256, bits=8)(draft)


def class_before_fused(draft: Draft) -> None:
    """The names of the parts alone, beside a class: 0.26 and 0.33 disagree on gate_up_proj."""
    draft.group("float-quantized")["targets"] = ["Linear"]
    draft.group("nvfp4-pack-quantized")["targets"] = [r"re:.*mlp\.(?:gate|up|down)_proj$", "re:.*lm_head$"]


def other_scheme(draft: Draft) -> None:
    group = draft.group("pack-quantized")
    group["weights"] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group["format"] = draft.block["format"] = "nvfp4-pack-quantized"


def other_headers(draft: Draft) -> None:
    path = draft.path / "sparkquant" / "plan.json"
    plan = json.loads(path.read_text())
    plan["source"]["headers"] = "0" * 64
    path.write_text(json.dumps(plan))


def index_lies(draft: Draft) -> None:
    weight_map = dict.fromkeys(draft.tensors, "model.safetensors") | {"ghost.weight": "model.safetensors"}
    (draft.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def nothing_quantized(draft: Draft) -> None:
    """The source's own config and tensors."""
    draft.config.pop("quantization_config")
    draft.tensors = read_raw(draft.source)


def quantized_in_part(draft: Draft) -> None:
    draft.block["ignore"].append(r"re:.*layers\.3\.self_attn\.q_proj$")


CASES = [
    Case("files.index", after=index_lies),
    Case("files.pickle", after=side("pytorch_model.bin", "x")),
    Case("files.link", after=lambda draft: (draft.path / "notes.txt").symlink_to("/etc/hostname")),
    Case("files.link", after=lambda draft: (draft.path / "more").symlink_to("/etc")),
    Case("files.missing", after=side("tokenizer.json", None)),
    Case("files.missing", after=side("preprocessor_config.json", None)),
    Case("files.json", after=side("tokenizer_config.json", "[")),
    Case("files.json", after=side("generation_config.json", "[]")),
    Case("plan.readable", after=side("sparkquant/plan.json", "{}"), plan=True),
    Case("plan.source", after=other_headers, plan=True, source=True),
    Case("tensors.missing", drop(f"{L3}self_attn.q_proj.weight_scale")),
    Case("tensors.missing", drop(f"{L3}self_attn.q_proj.weight_packed")),
    Case("tensors.missing", drop(f"{L3}self_attn.q_proj.weight_scale"), recipe=MIXED),
    Case("tensors.missing", drop(f"{L0}mlp.gate_proj.weight_global_scale"), recipe=MIXED),
    Case("tensors.missing tensors.required", drop("model.language_model.norm."), plan=True),
    Case("tensors.extra", store(f"{L0}mlp.up_proj.weight_zero_point", "I32", (64, 2))),
    Case("tensors.extra", store("model.visual.merger.extra.weight", "BF16", (2,)), plan=True),
    Case("tensors.dtype", bfloat16_global, recipe=MIXED),
    Case("tensors.shape", transposed_scale),
    Case("tensors.shape", transposed_scale, plan=True),
    Case("tensors.unknown", store(f"{L0}strange.weight", "BF16", (2,))),
    Case("tensors.layers", drop(f"{L0}mlp.up_proj")),
    Case("tensors.layers", drop(L3), level="headers"),
    Case("tensors.g_idx", store(f"{L0}mlp.up_proj.weight_g_idx", "I32", (256,))),
    Case("tensors.scale_dtype", wide_scale),
    Case("config.float16", text(dtype="float16")),
    Case("config.family rules.dead_ignore", config(model_type="qwen9")),
    Case("config.sizes", text(layer_types=["linear_attention"] * 3)),
    Case("tensors.layers", text(num_hidden_layers=3), level="headers"),
    Case("mtp.undeclared", text(mtp_num_hidden_layers=0)),
    Case("config.sizes", text(intermediate_size=640)),
    Case("config.sizes", text(hidden_size="256")),
    Case("config.sizes", text(num_attention_heads=True)),
    Case("config.sizes", text(num_hidden_layers=-4)),
    Case("config.sizes", config(text_config=[1])),
    Case("config.sizes source.config", text(head_dim=64), source=True),
    Case("config.nonfinite", text(rope_theta=float("nan"))),
    Case("config.malformed", ignore(7)),
    Case("config.malformed", lambda draft: draft.block.pop("quant_method")),
    Case("config.unsupported", weights(strategy="tensor")),
    Case("config.unsupported", lambda draft: draft.block.update(quantization_status="frozen")),
    Case("config.unsupported", inputs({"num_bits": 8, "type": "int", "dynamic": True}), recipe=FP8),
    Case("config.plan", inputs(None), recipe=FP8, plan=True),
    Case("config.format", lambda draft: draft.block.update(format="dense")),
    Case("config.format", lambda draft: draft.block.update(format="pack-quantized"), recipe=MIXED),
    Case("config.format", lambda draft: draft.group("float-quantized").pop("format"), recipe=MIXED),
    Case("config.actorder", weights(actorder="group")),
    Case("config.kv_cache", lambda draft: draft.block.update(kv_cache_scheme={"num_bits": 8})),
    Case("config.absent", plain(f"{L0}mlp.down_proj", (256, 512))),
    Case("config.undeclared", ignore(r"re:.*layers\.0\.mlp\.down_proj$")),
    Case("config.undeclared", lambda draft: draft.config.pop("quantization_config")),
    Case("config.plain", nothing_quantized),
    Case("config.scheme", other_scheme),
    Case("config.architectures", config(architectures=["Qwen3_5ForCausalLM"])),
    Case("config.architectures source.config", config(architectures=["Qwen3_5ForCausalLM"]), source=True),
    Case("config.architectures", config(architectures=None)),
    Case("config.architectures", config(architectures=["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"])),
    Case("config.architectures", config(architectures=["Lfm2ForCausalLM"])),
    Case("config.architectures", config(architectures=["Qwen3_5MoeForConditionalGeneration"])),
    Case("config.architectures source.config", config(architectures=["Lfm2ForCausalLM"]), source=True),
    Case("rules.pattern", ignore("re:(")),
    Case("rules.pattern", target("pack-quantized", "re:" + "(a{99}" * 50 + "){99}" * 50)),
    Case("rules.glob", ignore("mtp.*")),
    Case("rules.unanchored", ignore(r"re:linear_attn\.in_proj_[ab]$")),
    Case("rules.class_target", target("float-quantized", "Linear"), recipe=MIXED),
    Case("rules.class_target rules.order", class_before_fused, recipe=MIXED),
    Case("rules.overlap", target("nvfp4-pack-quantized", r"re:.*self_attn\.o_proj$"), recipe=MIXED),
    Case("rules.partial_ignore", quantized_in_part),
    Case("rules.split_scheme", split_qkv),
    Case("rules.dead_target", target("pack-quantized", "re:.*nothing$")),
    Case("rules.dead_ignore", ignore("re:.*nothing$")),
    Case("rules.dead_ignore", ignore(r"re:^model\.language_model\.layers\.0\.mlp\.down_proj$")),
    Case("rules.kernel", narrow_groups),
    Case("protected.quantized", several(gates_int4, ignore(without="in_proj_"), target(
        "pack-quantized", r"re:.*linear_attn\.in_proj_(?:a|b|ba)$"))),
    Case("protected.quantized", several(int4("mtp.layers.0.mlp.down_proj", 256, 512), ignore(
        r"re:.*mtp\.(?!layers\.0\.mlp\.down_proj).*", without="mtp"))),
    Case("protected.targeted", ignore(r"re:.*mtp\.fc$", without="mtp")),
    Case("protected.unlisted", ignore(without="in_proj_")),
    Case("protected.unlisted", ignore(r"re:model\.visual.*", without="visual")),
    Case("mtp.missing", drop("mtp.")),
    Case("mtp.missing", drop("mtp.fc")),
    Case("mtp.missing", drop("mtp.layers.0.self_attn.q_norm")),
    Case("mtp.missing source.missing", drop("mtp."), source=True),
    Case("vision.missing", drop("model.visual.")),
    Case("vision.missing", drop("model.visual.blocks.0.")),
    Case("vision.missing", drop("model.visual.merger.")),
    Case("tensors.required", drop("model.language_model.embed_tokens.")),
    Case("vision.undeclared", lambda draft: draft.config.pop("vision_config")),
    Case("head.missing", drop("lm_head")),
    Case("head.tied_quantized", config(tie_word_embeddings=True), recipe="qwen-hybrid-w4a16-head"),
    Case("head.tied_stored", config(tie_word_embeddings=True)),
    Case("tokens.eos", after=generation(eos_token_id=[501])),
    Case("tokens.pad_bos", after=generation(pad_token_id=503)),
    Case("tokens.source source.files_differ", after=generation(eos_token_id=503), source=True),
    Case("source.config", text(rms_norm_eps=1e-5), source=True),
    Case("source.config", config(extra=1), source=True),
    Case("source.files_missing", after=side("chat_template.jinja", None), source=True),
    Case("source.files_differ", after=side("chat_template.jinja", "{{ messages }}"), source=True),
    Case("source.missing tensors.required", drop("model.language_model.norm."), source=True),
    Case("source.extra", store("model.visual.merger.extra.weight", "BF16", (2,)), source=True),
    Case("source.shape", store(f"{L0}linear_attn.A_log", "F32", (2,)), source=True),
    Case("config.sizes source.shape", int4(f"{L0}mlp.down_proj", 256, 256), source=True),
    Case("source.bytes", put("mtp.fc.weight", b"\x11\x11", at=64), source=True),
    Case("source.bytes", put("mtp.fc.weight", b"\x11\x11", at=64), source=True, plan=True),
    Case("scales.finite", put(f"{L0}mlp.up_proj.weight_scale", NAN, at=10)),
    Case("scales.finite", put(f"{L0}mlp.up_proj.weight_scale", b"\x7f", at=10), recipe=MIXED),
    Case("scales.zero", put(f"{L0}mlp.up_proj.weight_scale", ZERO, at=10)),
    Case("scales.zero", put(f"{L0}mlp.up_proj.weight_scale", b"\0", at=10), recipe=MIXED),
    Case("scales.zero", put(f"{L3}self_attn.q_proj.weight_scale", ZERO, at=10), recipe=MIXED),
    Case("scales.zero", put(f"{L0}mlp.up_proj.weight_scale", ZERO, at=2), recipe="qwen-hybrid-fp8"),
    Case("scales.zero", put(f"{L0}mlp.down_proj.weight_global_scale", b"\0\0\0\0"), recipe=MIXED),
    Case("scales.sign", put(f"{L3}self_attn.q_proj.weight_scale", MINUS, at=10), recipe=MIXED),
    Case("scales.sign", put(f"{L0}mlp.up_proj.weight_scale", b"\xb8", at=10), recipe=MIXED),
    Case("scales.denormal", put(f"{L0}mlp.up_proj.weight_scale", DENORMAL, at=10)),
    Case("scales.flush", put(f"{L0}mlp.up_proj.weight_scale", b"\x01", at=10), recipe=MIXED),
    Case("scales.global", scaled(f"{L0}mlp.gate_proj.weight_global_scale", 1.3), recipe=MIXED),
    Case("scales.global", scaled("model.language_model.layers.0.mlp.experts.1.up_proj.weight_global_scale", 1.3),
         recipe=MIXED, options={"model_type": "qwen3_5_moe"}),
    Case("scales.shape_value", put(f"{L0}mlp.up_proj.weight_shape", struct.pack("<q", 7))),
    Case("values.fp8_nan", put(f"{L3}self_attn.q_proj.weight", b"\x7f", at=5), recipe=MIXED, level="deep"),
    Case("values.finite", put("mtp.norm.weight", NAN), level="deep"),
    Case("values.error", louder, level="deep", source=True, plan=True),
    Case("values.error", put(f"{L0}mlp.up_proj.weight_packed", b"\x5a" * 4096), level="deep", source=True),
    Case("tensors.layers", drop("model.language_model.layers.1.mlp.experts.1.up_proj"),
         options={"model_type": "qwen3_5_moe"}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case.ids}" for number, case in enumerate(CASES)])
def test_one_fault_is_found_and_nothing_else(case: Case, draft: Callable[..., Draft]) -> None:
    broken = draft(case.recipe, **case.options)
    if not case.plan:
        broken.forget_plan()
    case.edit(broken)
    broken.save()
    case.after(broken)
    report = verify(broken.path, source=broken.source if case.source else None, level=case.level)
    assert findings(report) == set(case.ids.split()), report.to_json()
    for check in report.checks:
        if check.id in case.ids.split():
            assert check.status == ("warn" if CATALOGUE[check.id].warns else "fail")
            assert check.message


def test_every_check_has_a_sabotage() -> None:
    elsewhere = {"scales.order", "rules.engine", "rules.ranks"}  # test_producer_faults, test_engine
    assert {id for case in CASES for id in case.ids.split()} | elsewhere == set(CATALOGUE)
