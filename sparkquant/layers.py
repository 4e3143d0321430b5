"""What a tensor is: the closed set of layer classes, and the rules that put each name into exactly one of them.

Everything downstream asks for the class, never for the name: a pattern list that forgets `in_proj_a` cannot exist here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from sparkquant.errors import CheckpointError, Problem, UnknownTensor


class LayerClass(StrEnum):
    """The class of a tensor. Region wins over kind: everything of the draft head is `mtp`, norms included."""

    EMBED = "embed"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ATTENTION_QKV = "attention.qkv"
    ATTENTION_OUT = "attention.out"
    MLA_Q = "mla.q"
    MLA_KV = "mla.kv"
    MLA_OUT = "mla.out"
    LINEAR_ATTENTION_QKVZ = "linear_attention.qkvz"
    LINEAR_ATTENTION_OUT = "linear_attention.out"
    LINEAR_ATTENTION_CONV = "linear_attention.conv"
    LINEAR_ATTENTION_GATES = "linear_attention.gates"
    SSM_IN = "ssm.in"
    SSM_OUT = "ssm.out"
    SSM_DT = "ssm.dt"
    SSM_CONV = "ssm.conv"
    SHORT_CONV = "short_conv"
    MLP_GATE_UP = "mlp.gate_up"
    MLP_DOWN = "mlp.down"
    EXPERTS_GATE_UP = "experts.gate_up"
    EXPERTS_DOWN = "experts.down"
    SHARED_EXPERT_GATE_UP = "shared_expert.gate_up"
    SHARED_EXPERT_DOWN = "shared_expert.down"
    ROUTER = "router"
    ADAPTER = "adapter"
    VISION = "vision"
    AUDIO = "audio"
    MTP = "mtp"
    STATE = "state"


PROTECTED: Mapping[LayerClass, str] = {
    LayerClass.LINEAR_ATTENTION_GATES: "recurrence control: errors here accumulate over the whole context",
    LayerClass.LINEAR_ATTENTION_CONV: "the engine builds the convolution without a quantization config",
    LayerClass.VISION: "odd widths, and a damaged tower reads images wrongly without an error",
    LayerClass.AUDIO: "odd widths, and a damaged tower hears wrongly without an error",
    LayerClass.MTP: "a 4-bit draft head is accepted rarely or never, slower than no draft at all",
    LayerClass.ROUTER: "a rounded router sends tokens to other experts; the engine keeps it 16-bit",
    LayerClass.ADAPTER: "a thin path beside the large matrices, passed by every token: much to lose, little to gain",
    LayerClass.NORM: "one-dimensional; nothing to gain",
    LayerClass.STATE: "buffers, scalars and biases; nothing to gain",
    LayerClass.EMBED: "a lookup, not a matrix product: the engine does not quantize it",
    LayerClass.SSM_DT: "time step of the recurrence: errors accumulate over the whole context",
    LayerClass.SSM_CONV: "the engine builds the convolution without a quantization config",
}
"""Classes that no recipe may quantize, with the reason."""

UNPROTECTABLE = frozenset({LayerClass.MTP})
"""Protected classes that `unprotect:` may move to 8 bits (an official release with an FP8 draft head drafts well)."""

MINIMUM_BITS: Mapping[LayerClass, tuple[int, str]] = {
    LayerClass.SSM_IN: (8, "the last rows of Mamba-2's in_proj are the time step of the recurrence"),
}
"""Classes that recipes may quantize, but not below so many bits, with the reason."""

ENGINES = ("0.25", "0.26", "0.33")
"""Versions of vLLM whose model classes were read, oldest first. What differs among them is data: see `Limit`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Engine versions that cannot do something, and why."""

    versions: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One line of a layout: which names, which class, and where the engine loads the tensor.

    pattern   matched with `re.fullmatch` on the checkpoint's tensor name
    fused     leaf name of the module that the engine fuses this tensor into (`qkv_proj`); "" for a module of its own
    linear    a matrix [out, in] (or [experts, out, in]) of a Linear, the only kind that can take a scheme
    parts     of a fused 3-D expert tensor: leaf names of the per-expert modules that its rows hold, in order
    module    the module's name where it is not the tensor's own: a template of `match.expand` on `pattern`
    aliases   other spellings of the path in front of the leaf (regexes): `layers\\.{n}\\.mixer`, where `{n}` is the
              layer's number and `{n+24}` that number in an engine that counts on from 24
    row_parallel  the engine shards the input dimension over tensor-parallel ranks (out_proj, down_proj)
    plain     engine versions that load this tensor in 16 bits only
    optional  some layers of the family lack this part of the fused module by design
    required  no model of the family works without this tensor (lm_head: unless it is tied)
    groups    how many equal groups its rows hold, where ranks must share them evenly once it is quantized; 0 is any
    shape     its shape in the letters of `sparkquant.sizes` (`2*A*D|A*D, H`); "" where it is not checked
    """

    pattern: str
    layer_class: LayerClass
    fused: str = ""
    linear: bool = False
    parts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    row_parallel: bool = False
    module: str = ""
    plain: tuple[Limit, ...] = ()
    optional: bool = False
    groups: int = 0
    required: bool = False
    shape: str = ""

    def plain_in(self, version: str) -> str:
        """Why an engine version loads this tensor in 16 bits only; "" when it takes a scheme."""
        return next((limit.reason for limit in self.plain if version in limit.versions), "")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor belongs.

    group        the fusion group: tensors that the engine loads into one module and that must share one scheme
    scale_group  tensors that share one NVFP4 global scale: the fusion group, but one expert's part of it in a MoE layer
    module       checkpoint name without `.weight`: the module's name in quantization configs
    """

    name: str
    layer_class: LayerClass
    layer: int | None
    module: str
    group: str
    scale_group: str
    rule: TensorRule


@dataclass(frozen=True, slots=True)
class MtpRule:
    """How a family declares its in-checkpoint draft head, and how its modules are told from the decoder's.

    region   regex inside a module's name, in every spelling: `mtp\\.`, or the layer numbers behind the last one
    plain    ignore entries for its Linears that stay 16-bit even in an 8-bit draft head
    by_index its blocks are layers behind the last one, not a region of their own
    """

    declared: bool
    config_key: str
    region: str = r"mtp\."
    plain: tuple[str, ...] = (r"re:.*mtp\.fc$",)
    by_index: bool = False


NO_DRAFT_HEAD = MtpRule(declared=False, config_key="", region="", plain=())
"""Families whose checkpoints hold no draft head."""


@dataclass(frozen=True)
class Layout:
    """Everything known of one family for one config: rules, draft head, engine names.

    ignore_always   regexes (`re:` form, fitting checkpoint and engine spelling) of modules that never take a scheme
    tied_head       the checkpoint has no lm_head of its own: it reads the embedding
    experts         (total, active per token); (0, 0) for dense models
    live_names      (regex, replacement): other names that a checkpoint tensor has in a live transformers model;
                    `[a:b]` at the end of a replacement means those rows of the live tensor, `[i/n]` the i-th of n
                    equal pieces of it
    absent          engine versions without this model class
    architectures   model classes that load this family; the first is the usual one
    activation      what config.json calls the function inside MLPs and experts; "" when it does not say
    sizes           letter of a shape -> (what config.json calls it, its value), for `sparkquant.sizes`
    """

    family: str
    rules: tuple[TensorRule, ...]
    mtp: MtpRule
    ignore_always: tuple[str, ...]
    tied_head: bool = False
    experts: tuple[int, int] = (0, 0)
    live_names: tuple[tuple[str, str], ...] = ()
    absent: tuple[Limit, ...] = ()
    architectures: tuple[str, ...] = ()
    activation: str = ""
    sizes: Mapping[str, tuple[str, Any]] = field(default_factory=dict)

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """Supported engine versions that have this model class."""
        return tuple(version for version in ENGINES if not self.absent_in(version))

    def absent_in(self, version: str) -> str:
        """Why an engine version cannot run this family; "" when it can."""
        return next((limit.reason for limit in self.absent if version in limit.versions), "")

    @cached_property
    def never_quantized(self) -> Mapping[LayerClass, str]:
        """Linear classes whose every tensor is 16-bit in every version that has the family, with the reason."""
        found: dict[LayerClass, str] = {}
        for layer_class in self.linear_classes if self.engines else ():
            rules = [rule for rule in self.rules if rule.linear and rule.layer_class is layer_class]
            if all(rule.plain_in(version) for rule in rules for version in self.engines):
                found[layer_class] = rules[0].plain_in(self.engines[-1])
        return found

    @cached_property
    def classes(self) -> frozenset[LayerClass]:
        """Classes that can occur in this family."""
        return frozenset(rule.layer_class for rule in self.rules)

    @cached_property
    def linear_classes(self) -> frozenset[LayerClass]:
        """Classes of which at least one tensor can take a scheme."""
        return frozenset(rule.layer_class for rule in self.rules if rule.linear)

    @cached_property
    def _dispatch(self) -> re.Pattern[str]:
        # One alternation instead of a loop: 1,199 names against 40 rules in a few milliseconds.
        # ASCII: a layer number is 0-9, not any digit of Unicode.
        return re.compile("|".join(f"(?P<r{i}>{rule.pattern})" for i, rule in enumerate(self.rules)), re.ASCII)

    def rule_of(self, name: str) -> TensorRule | None:
        """The rule that matches a name, or None."""
        match = self._dispatch.fullmatch(name)
        if match is None or match.lastgroup is None:
            return None
        return self.rules[int(match.lastgroup[1:])]

    def place(self, name: str) -> Placement | None:
        """Class, fusion group and module of one tensor; None when the layout does not know the name."""
        rule = self.rule_of(name)
        return None if rule is None else _placement(name, rule)


def classify(layout: Layout, names: Iterable[str], *, source: str = "the checkpoint") -> dict[str, Placement]:
    """Put every name into exactly one class; all unknown names are reported at once."""
    placements: dict[str, Placement] = {}
    unknown: list[Problem] = []
    for name in names:
        placement = layout.place(name)
        if placement is None:
            unknown.append(Problem(name, f"no rule of layout {layout.family!r} matches this tensor"))
        else:
            placements[name] = placement
    if unknown:
        raise UnknownTensor(
            f"{len(unknown)} tensor{'s' if len(unknown) > 1 else ''} of {source} cannot be classified",
            hint=f"is this really a {layout.family} checkpoint? If the family has new tensors, add a rule for them"
            f" in sparkquant/layouts/{layout.family}.py",
            problems=unknown,
        )
    return placements


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)$")


def _placement(name: str, rule: TensorRule) -> Placement:
    layer = _LAYER.search(name)
    index = int(layer.group(1)) if layer else None
    module = name.removesuffix(".weight")
    if rule.module and (match := re.fullmatch(rule.pattern, name)):
        module = match.expand(rule.module)
    if not rule.linear:
        return Placement(name, rule.layer_class, index, module, "", "", rule)
    expert = _EXPERT.match(module)
    parent, _, leaf = module.rpartition(".")
    if expert is not None:
        # The engine keeps one scheme for all experts of a layer, but one global scale per expert.
        part = rule.fused or leaf
        return Placement(name, rule.layer_class, index, module, expert.group(1), f"{parent}.{part}", rule)
    if rule.parts:
        return Placement(name, rule.layer_class, index, module, parent, module, rule)
    group = f"{parent}.{rule.fused}" if rule.fused else module
    return Placement(name, rule.layer_class, index, module, group, group, rule)


def config_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of a model config; a clear error when it is missing or something else."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(
            f"config.json: {key!r} is {value!r}, an integer is needed",
            hint="check that config.json belongs to this checkpoint",
        )
    return value
