"""Small real checkpoints of the Qwen hybrid families, written without torch or network: same arguments, same bytes.

    folder = build("qwen3_5", tmp_path / "model", shards=2)

Tensor names are the published ones and the shapes take every scheme (int4 g128, NVFP4, FP8). The transformers class
named in `architectures` loads each; the draft head stays outside it, as in the published models.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparkquant.recipe_files import load_recipe, recipe_names
from tests.data.shapes import Shapes, tensor_shapes

HIDDEN, INNER, VOCAB = 256, 512, 512
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}

RawTensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""name -> dtype as safetensors spells it, shape, bytes."""

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_FIRST_SPECIAL = VOCAB - len(_SPECIAL)
_END_OF_TEXT, _IM_END = _FIRST_SPECIAL, _FIRST_SPECIAL + 2

_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16",
    "eos_token_id": _IM_END, "full_attention_interval": 4, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": HIDDEN, "initializer_range": 0.02, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_value_head_dim": 128, "max_position_embeddings": 4096, "num_attention_heads": 2, "num_hidden_layers": 4,
    "num_key_value_heads": 1, "pad_token_id": _END_OF_TEXT, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": VOCAB,
}  # fmt: skip
_QWEN3_5 = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [6, 5, 5], "partial_rotary_factor": 0.25, "rope_theta": 10000000.0,
        "rope_type": "default",
    },
}  # fmt: skip
_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_TOWER = {
    "depth": 2, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 64, "in_channels": 3, "initializer_range": 0.02,
    "intermediate_size": 176, "num_heads": 2, "num_position_embeddings": 64, "out_hidden_size": HIDDEN, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _qwen3_next() -> dict[str, Any]:
    rope = {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"}}
    return {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_TEXT, **_MOE, **rope,
            "intermediate_size": INNER}  # fmt: skip


def _qwen3_5_text() -> dict[str, Any]:
    return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **_TEXT, **_QWEN3_5,
            "intermediate_size": INNER}  # fmt: skip


def _qwen3_5_moe_text() -> dict[str, Any]:
    return {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **_TEXT, **_QWEN3_5, **_MOE}


def _multimodal(text: Mapping[str, Any], model_type: str, architecture: str) -> dict[str, Any]:
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "image_token_id": VOCAB - 2,
        "video_token_id": VOCAB - 1,
        "vision_start_token_id": VOCAB - 4,
        "vision_end_token_id": VOCAB - 3,
        "tie_word_embeddings": False,
        "text_config": inner,
        "vision_config": {**_TOWER, "model_type": f"{model_type}_vision"},
    }


def _qwen3_5() -> dict[str, Any]:
    return _multimodal(_qwen3_5_text(), "qwen3_5", "Qwen3_5ForConditionalGeneration")


def _qwen3_5_moe() -> dict[str, Any]:
    return _multimodal(_qwen3_5_moe_text(), "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")


CONFIGS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_text": _qwen3_5_moe_text,
}
"""Every `model_type` that `build` can write."""


def hybrid_recipes() -> list[str]:
    """Shipped recipes for the families that are built here."""
    built = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
    return [name for name in recipe_names() if built & set(load_recipe(name).families)]


def config_of(
    model_type: str,
    *,
    layers: int = 4,
    hidden: int = HIDDEN,
    experts: int | None = None,
    tied: bool = False,
    mtp: bool = True,
    vision: bool = True,
) -> dict[str, Any]:
    """The config.json of a small checkpoint."""
    config = CONFIGS[model_type]()
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": layers, "hidden_size": hidden}
    text["layer_types"] = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    if experts is not None and "num_experts" in text:
        text["num_experts"] = experts
    for part in (config, text):
        part["tie_word_embeddings"] = tied
    if "vision_config" in config:
        config["vision_config"]["out_hidden_size"] = hidden
        if not vision:
            del config["vision_config"]
    if "mtp_num_hidden_layers" in text and not mtp:
        text["mtp_num_hidden_layers"] = 0
    return config


def shapes_of(config: Mapping[str, Any], *, fused_experts: bool | None = None, mtp: bool = True) -> Shapes:
    """Names and shapes of a config; Qwen3-Next configs do not declare the draft head that their files hold."""
    if config["model_type"] == "qwen3_next" and mtp:
        config = {**config, "mtp_num_hidden_layers": 1}
    return tensor_shapes(config, fused_experts=fused_experts)


def build(
    model_type: str,
    folder: Path,
    *,
    shards: int = 2,
    seed: int = 0,
    dtype: str = "BF16",
    float32_state: bool = False,
    fused_experts: bool | None = None,
    side_files: bool = True,
    change: Callable[[dict[str, Any], RawTensors], None] | None = None,
    **options: Any,
) -> Path:
    """Write one checkpoint and return its folder.

    float32_state  A_log and the gated norm of the delta net in F32, as some releases store them
    fused_experts  3-D expert tensors or one Linear per expert; the default is what the family publishes
    change         edits config and tensors in place before they are written, for broken or odd checkpoints
    options        layers, hidden, experts, tied, mtp, vision: see `config_of`
    """
    config = config_of(model_type, **options)
    tensors: RawTensors = {}
    for name, shape in shapes_of(config, fused_experts=fused_experts, mtp=options.get("mtp", True)).items():
        state = float32_state and name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        kind = "F32" if state else dtype
        tensors[name] = (kind, shape, _encode(_values(name, shape, seed), kind))
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_shards(folder, tensors, shards=shards)
    if side_files:
        _write_side_files(folder, vision="vision_config" in config)
    return folder


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values by role, seeded by name alone: adding a tensor does not change the others."""
    random = np.random.default_rng(zlib.crc32(f"{seed}:{name}".encode()))
    normal = random.standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        return np.log(1 + 15 * random.random(shape, dtype=np.float32))
    if len(shape) == 1:
        centre = (
            1.0
            if name.endswith(("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight"))
            else 0.0
        )
        return np.float32(centre) + np.float32(0.02) * normal
    return normal / np.float32(shape[-1] ** 0.5)


def _encode(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def wide_mlp(inner: int) -> Callable[[dict[str, Any], RawTensors], None]:
    """A `change` of `build`: one matrix of this intermediate size for every MLP, so that large models are made fast."""

    def change(config: dict[str, Any], tensors: RawTensors) -> None:
        config["intermediate_size"], hidden = inner, config["hidden_size"]
        raw = _encode(np.random.default_rng(0).standard_normal((inner, hidden), dtype=np.float32) / 32, "BF16")
        for name in [name for name in tensors if name.startswith(("model.layers.", "mtp.")) and ".mlp." in name]:
            tensors[name] = ("BF16", (hidden, inner) if "down_proj" in name else (inner, hidden), raw)

    return change


def write_json(path: Path, value: Any) -> None:
    """A JSON file as model repositories write it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: RawTensors) -> None:
    """One safetensors file; wide dtypes first, so that every tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload: list[bytes] = []
    position = 0
    for name in sorted(tensors, key=lambda n: (-WIDTHS.get(tensors[n][0], 1), n)):
        dtype, shape, raw = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(raw)]}
        position += len(raw)
        payload.append(raw)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *payload]))


def write_shards(folder: Path, tensors: RawTensors, *, shards: int = 1) -> None:
    """Tensors in name order over `shards` files of about equal size with an index; one file has none."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    total = sum(len(raw) for _, _, raw in tensors.values())
    parts: list[RawTensors] = [{} for _ in range(shards)]
    done = 0
    for name in sorted(tensors):
        parts[min(shards - 1, done * shards // total)][name] = tensors[name]
        done += len(tensors[name][2])
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        shard = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def read_raw(folder: Path) -> RawTensors:
    """Every stored tensor of a folder's safetensors files, read without the code under test."""
    tensors: RawTensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + length + start : 8 + length + end])
    return tensors


def _write_side_files(folder: Path, *, vision: bool) -> None:
    write_json(folder / "generation_config.json", {
        "do_sample": True, "eos_token_id": [_IM_END, _END_OF_TEXT], "pad_token_id": _END_OF_TEXT, "temperature": 0.6,
        "top_k": 20, "top_p": 0.95,
    })  # fmt: skip
    write_json(folder / "tokenizer.json", _tokenizer())
    write_json(folder / "tokenizer_config.json", {
        "add_bos_token": False, "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
        "model_max_length": 4096, "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    })  # fmt: skip
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "README.md").write_text("A small random checkpoint for tests.\n", encoding="utf-8")
    (folder / "LICENSE").write_text("Public domain.\n", encoding="utf-8")
    if vision:
        sizes = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor",
                 "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}  # fmt: skip
        image = {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
        }
        video = {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 65536},
        }
        write_json(folder / "preprocessor_config.json", {**sizes, **image})
        write_json(folder / "video_preprocessor_config.json", {**sizes, **video})


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: one id per byte, unused fillers, chat tokens at the end."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = sorted([chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))])
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary |= {f"<|unused{index}|>": index for index in range(len(alphabet), _FIRST_SPECIAL)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": _FIRST_SPECIAL + index, "content": token, **flags, "special": token[1] == "|"}
            for index, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip


CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n<tool_call>\\n' + ({'name': function.name, 'arguments': function.arguments} | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
