"""`quantization_config` of the result: the plan said in the engine's language (compressed-tensors).

Targets are anchored regexes over layer numbers that fit both a projection's own name and the fused module's, never a
class name: engine versions resolve class names and fused names in opposite orders. Groups are disjoint by construction.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkquant.decisions import Decision
from sparkquant.layers import LayerClass, Layout
from sparkquant.schemes import FP8_BLOCK, NVFP4_BLOCK, Scheme

COMPRESSED_TENSORS_VERSION = "0.19.0"
"""The format version that the result follows (readable by the releases that vLLM 0.25 to 0.33 pin)."""

_LAYER_PATH = re.compile(r"(?P<region>.*?)\blayers\.(?P<layer>\d+)\.(?P<suffix>.+)$")
_EXPERTS = re.compile(r"(?P<path>(?:.+\.)?experts)\.(?:\d+\.)?\w+")
_NUMBER = re.compile(r"\{n(?:\+(\d+))?\}")


class Decided(Protocol):
    """What a config is written from: a plan, or the modules of a finished checkpoint."""

    @property
    def decisions(self) -> Mapping[str, Decision]: ...

    @property
    def layout(self) -> Layout: ...


@dataclass
class _Suffix:
    """One module path in one region (decoder or draft head), and the layers where it has each scheme.

    heads  regexes of the path in front of the leaf, in every engine's spelling; `{n}` stands for the layer's number
    """

    mtp: bool
    heads: tuple[str, ...]
    leaf: str
    numbered: bool
    layers: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def head(self, label: str) -> str:
        """The path of the layers that have this scheme: any number where all layers have it."""
        layers = self.layers[label]
        uniform = len(self.layers) == 1 and not self.numbered

        def number(match: re.Match[str]) -> str:
            shift = int(match[1] or 0)
            return r"\d+" if uniform else "(?:" + "|".join(str(n + shift) for n in sorted(layers)) + ")"

        spelled = [_NUMBER.sub(number, head) for head in self.heads]
        return spelled[0] if len(spelled) == 1 else f"(?:{'|'.join(spelled)})"


def _suffixes(plan: Decided) -> tuple[dict[tuple[bool, tuple[str, ...], str], _Suffix], dict[str, str]]:
    """Module paths below the layers, and the Linears outside any layer with their scheme label."""
    found: dict[tuple[bool, tuple[str, ...], str], _Suffix] = {}
    top: dict[str, str] = {}
    for decision in plan.decisions.values():
        rule = plan.layout.rule_of(decision.tensor)
        if rule is None or not rule.linear:
            continue
        label = decision.scheme.label if decision.scheme else "keep"
        match = _LAYER_PATH.match(decision.module)
        if match is None:
            # Engines and live models put it below other parents: the leaf is what all have in common.
            top[decision.module.rpartition(".")[2]] = label
            continue
        mtp = decision.layer_class is LayerClass.MTP
        head, leaves = _spellings(match["suffix"], rule.fused)
        heads = (head, *rule.aliases)
        for leaf in leaves:
            numbered = mtp and plan.layout.mtp.by_index
            suffix = found.setdefault((mtp, heads, leaf), _Suffix(mtp, heads, leaf, numbered))
            suffix.layers[label].add(int(match["layer"]))
    return found, top


def _spellings(suffix: str, fused: str) -> tuple[str, tuple[str, ...]]:
    """Regexes of the path below a layer and of the leaves under which engines look a module up: its own, the fused one.

    Experts are looked up by fixed names that need not be those of the file (0.25 asks every family for gate_proj,
    up_proj and down_proj of expert 0), and all experts of a layer have one scheme: any leaf below any expert.
    """
    experts = _EXPERTS.fullmatch(suffix)
    if experts is not None:
        return rf"layers\.{{n}}\.{re.escape(experts['path'])}", (r"\d+\.\w+",)
    *parents, leaf = [r"\d+" if part.isdigit() else re.escape(part) for part in suffix.split(".")]
    return r"\.".join([r"layers\.{n}", *parents]), (leaf, fused) if fused else (leaf,)


def _patterns(suffixes: Iterable[_Suffix], label: str, layout: Layout, *, exclude_mtp: bool) -> list[str]:
    """Regexes of one scheme, leaves with a common parent merged: `layers\\.\\d+\\.mlp\\.(?:gate_proj|up_proj)$`."""
    merged: dict[tuple[bool, str], set[str]] = defaultdict(set)
    for suffix in suffixes:
        if label in suffix.layers:
            merged[(suffix.mtp, suffix.head(label))].add(suffix.leaf)
    patterns = []
    for (mtp, head), leaves in sorted(merged.items()):
        tail = "|".join(sorted(leaves))
        tail = f"(?:{tail})" if len(leaves) > 1 else tail
        guard = rf"(?!.*{layout.mtp.region}).*" if exclude_mtp and not mtp else ".*"
        if mtp and not layout.mtp.by_index:
            guard = rf".*{layout.mtp.region}"
        patterns.append(rf"re:{guard}{head}\.{tail}$")
    return patterns


def scheme_arguments(scheme: Scheme) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Weight and activation arguments as compressed-tensors spells them."""
    if scheme.is_integer:
        width = {"strategy": "group", "group_size": scheme.group_size}
        if scheme.group_size == -1:
            width = {"strategy": "channel"}
        fields = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, **width, "dynamic": False}
        return fields, None
    base = {"type": "float", "symmetric": True}
    if scheme.name == "nvfp4a16":
        fields = {"num_bits": 4, **base, "strategy": "tensor_group", "group_size": NVFP4_BLOCK, "dynamic": False}
        return {**fields, "scale_dtype": "torch.float8_e4m3fn"}, None
    activations: dict[str, Any] = {"num_bits": 8, **base, "strategy": "token", "dynamic": True}
    if scheme.name == "fp8":
        return {"num_bits": 8, **base, "strategy": "channel", "dynamic": False}, activations
    blocks = {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
    grouped = {**activations, "strategy": "group", "group_size": FP8_BLOCK}
    return {"num_bits": 8, **base, **blocks, "dynamic": False}, grouped


def quantization_config(plan: Decided) -> dict[str, Any] | None:
    """The `quantization_config` of a plan; None when the plan quantizes nothing."""
    schemes = {d.scheme.label: d.scheme for d in plan.decisions.values() if d.scheme is not None}
    if not schemes:
        return None
    suffixes, top = _suffixes(plan)
    mtp_labels = {label for suffix in suffixes.values() if suffix.mtp for label in suffix.layers if label != "keep"}
    groups: dict[str, Any] = {}
    for index, label in enumerate(sorted(schemes)):
        scheme = schemes[label]
        targets = _patterns(suffixes.values(), label, plan.layout, exclude_mtp=bool(mtp_labels))
        targets += [rf"re:.*{re.escape(module)}$" for module, has in sorted(top.items()) if has == label]
        weights, activations = scheme_arguments(scheme)
        groups[f"group_{index}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": scheme.format,
        }
    formats = {scheme.format for scheme in schemes.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore_list(plan.layout, suffixes.values(), top, mtp_quantized=bool(mtp_labels)),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": COMPRESSED_TENSORS_VERSION,
    }


def ignore_list(
    layout: Layout, suffixes: Iterable[_Suffix], top: Mapping[str, str], *, mtp_quantized: bool
) -> list[str]:
    """Everything that stays 16-bit, in spellings that fit checkpoint names and engine names alike."""
    ignore = list(layout.ignore_always)
    suffixes = list(suffixes)
    if layout.mtp.region and (not layout.mtp.by_index or any(suffix.mtp for suffix in suffixes)):
        ignore += layout.mtp.plain if mtp_quantized else (rf"re:.*{layout.mtp.region}.*",)
    ignore += [rf"re:.*{re.escape(module)}$" for module, label in sorted(top.items()) if label == "keep"]
    if layout.tied_head and not any(module.endswith("lm_head") for module in top):
        ignore.append("re:.*lm_head$")
    kept = [suffix for suffix in suffixes if "keep" in suffix.layers and (mtp_quantized or not suffix.mtp)]
    return ignore + _patterns(kept, "keep", layout, exclude_mtp=mtp_quantized)


def result_config(source: Mapping[str, Any], plan: Decided) -> str:
    """config.json of the result: every field of the source in its order, and the quantization_config."""
    fields = dict(source)
    block = quantization_config(plan)
    if block is not None:
        fields["quantization_config"] = block
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
