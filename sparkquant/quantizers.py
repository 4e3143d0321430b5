"""The quantizers of others: which package they are, and what each can do for a plan. Data, known before any import.

`refusal` is asked for every quantized tensor when a plan is made; `table` is what it answers for all combinations.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from sparkquant import layouts
from sparkquant.decisions import Decision
from sparkquant.errors import EnvironmentMissing, Problem
from sparkquant.layers import LayerClass
from sparkquant.methods import Method
from sparkquant.schemes import SCHEMES, Scheme

UNTRIED = "its blocks were never run through {title}: this project tests only what the table says"


@dataclass(frozen=True, slots=True)
class Quantizer:
    """One package behind a method.

    distribution, version, module   how pip calls it, the release that the adapter was made for, and its import name
    schemes    scheme names that it can do, with the reason where it cannot
    families   families whose blocks run through it
    options    options of the method that it refuses, with the reason: "modifier awq"
    pairs      schemes that it refuses with one option
    cuda       schemes that need a CUDA device with one option
    """

    method: str
    title: str
    distribution: str
    version: str
    module: str
    schemes: Mapping[str, str]
    families: frozenset[str]
    options: Mapping[str, str] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    cuda: frozenset[tuple[str, str]] = frozenset()

    @property
    def install(self) -> str:
        """The line that installs it."""
        return f'pip install "sparkquant[{self.method}]"'

    def refusal(self, scheme: Scheme, family: str) -> str:
        """Why it cannot store this scheme in this family; "" when it can."""
        if reason := self.schemes.get(scheme.name, f"{self.title} has no such scheme"):
            return reason
        if scheme.is_integer and not scheme.symmetric and self.method == "modelopt":
            return f"{self.title} has no zero points"
        return "" if family in self.families else UNTRIED.format(title=self.title)

    def lacks(self, scheme: Scheme, method: Method) -> str:
        """Why it cannot do this scheme with these options; "" when it can."""
        found = (self.pairs.get((scheme.name, f"{name} {value}")) for name, value in method.options.items())
        return next(filter(None, found), "")

    def require(self) -> None:
        """EnvironmentMissing when it is not installed, or in another release."""
        try:
            found = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            what = f"method {self.method} needs {self.distribution}, which is not installed"
            raise EnvironmentMissing(what, hint=self.install) from None
        if found != self.version:
            what = f"method {self.method} needs {self.distribution} {self.version}, and {found} is installed"
            raise EnvironmentMissing(what, hint=f"{self.install}; its adapter relies on what that release does")


_HYBRIDS = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next"})
_AWQ = "AWQ moves scales into norms, gates and routers, which a plan keeps byte for byte"
_AWQ_LITE = (
    "ModelOpt stores its scales of inputs beside the weights, compressed-tensors has no tensor for them, and in norms"
    " and gates they would change what a plan keeps byte for byte"
)

QUANTIZERS: Mapping[str, Quantizer] = {
    quantizer.method: quantizer
    for quantizer in (
        Quantizer(
            method="autoround",
            title="AutoRound",
            distribution="auto-round",
            version="0.15.1",
            module="auto_round",
            schemes={
                "w4a16": "",
                "w8a16": "",
                "nvfp4a16": "AutoRound declares 4-bit activations with NVFP4, and gives in_proj_qkv and in_proj_z"
                " global scales of their own",
                "fp8": "AutoRound stores FP8 with static activations and no input scale",
                "fp8_block": "AutoRound tunes integers; its block FP8 is rounding to nearest",
            },
            families=_HYBRIDS,
        ),
        Quantizer(
            method="modelopt",
            title="ModelOpt",
            distribution="nvidia-modelopt",
            version="0.47.0",
            module="modelopt",
            schemes={
                "w4a16": "ModelOpt packs int4 along the outputs, for kernels other than Marlin",
                "w8a16": "ModelOpt has 8-bit integers with one scale a row alone",
                "nvfp4a16": "",
                "fp8": "",
                "fp8_block": "",
            },
            families=_HYBRIDS,
            options={"algorithm awq_lite": _AWQ_LITE},
            cuda=frozenset({("nvfp4a16", "algorithm mse")}),
        ),
        Quantizer(
            method="llmcompressor",
            title="llm-compressor",
            distribution="llmcompressor",
            version="0.14.0.1",
            module="llmcompressor",
            schemes=dict.fromkeys(SCHEMES, ""),
            families=_HYBRIDS,
            options={"modifier awq": _AWQ},
            pairs={("fp8_block", "modifier imatrix"): "its imatrix observer has rows and groups, no blocks"},
        ),
    )
}
"""By method name."""


def quantizer_of(method: Method) -> Quantizer | None:
    """The package behind a method; None for a native one."""
    return QUANTIZERS.get(method.name)


def quantizer_faults(decisions: Iterable[Decision], family: str, method: Method) -> Iterator[Problem]:
    """What the method's quantizer cannot do in this plan: one problem for every class and reason, and per option."""
    quantizer = quantizer_of(method)
    if quantizer is None:
        return
    for option, value in method.options.items():
        if reason := quantizer.options.get(f"{option} {value}"):
            yield Problem(f"method {method.name}", f"{option} {value}: {reason}", _instead(quantizer, option))
    told: set[tuple[LayerClass, str]] = set()
    for decision in decisions:
        if decision.scheme is None or decision.layer_class is LayerClass.MTP:
            continue  # a draft head is in no live model: it is quantized natively
        reason = quantizer.refusal(decision.scheme, family) or quantizer.lacks(decision.scheme, method)
        if reason and (decision.layer_class, reason) not in told:
            told.add((decision.layer_class, reason))
            able = [name for name, other in QUANTIZERS.items() if not other.refusal(decision.scheme, family)]
            hint = f"method {', '.join(['mse', 'gptq', *able])} can do it"
            yield Problem(str(decision.layer_class), f"{decision.scheme.label} with {quantizer.title}: {reason}", hint)


def _instead(quantizer: Quantizer, option: str) -> str:
    """What to choose where a value of an option is refused."""
    values = get_args(Method.model_fields[option].annotation)
    able = [str(value) for value in values if f"{option} {value}" not in quantizer.options]
    return f"use {option} {' or '.join(able)}"


def require_device(decisions: Iterable[Decision], method: Method, device: str) -> None:
    """EnvironmentMissing when the method's quantizer needs a CUDA device for one of these schemes."""
    quantizer = quantizer_of(method)
    if quantizer is None or device != "cpu":
        return
    options = {f"{name} {value}" for name, value in method.options.items()}
    for scheme in {d.scheme.name for d in decisions if d.scheme is not None}:
        if wanted := sorted(option for name, option in quantizer.cuda if name == scheme and option in options):
            what = f"{quantizer.title} does {scheme} with {wanted[0]} on a CUDA device alone"
            raise EnvironmentMissing(what, hint="pass --device cuda, or use another algorithm")


def capabilities() -> list[dict[str, str]]:
    """The table `scheme x family x backend`: one row for each, `reason` "" where it can be done."""
    return [
        {"method": name, "scheme": scheme.name, "family": family, "reason": quantizer.refusal(scheme, family)}
        for name, quantizer in QUANTIZERS.items()
        for scheme in SCHEMES.values()
        for family in layouts.family_names()
    ]


@dataclass(frozen=True, slots=True)
class Capability:
    """What one quantizer does with one scheme or option: `families`, or the `reason` why it does nothing."""

    method: str
    subject: str
    families: tuple[str, ...]
    reason: str


def capability_rows() -> list[Capability]:
    """`capabilities`, with the families of a scheme together, and the options that are refused."""
    rows = []
    for name, quantizer in QUANTIZERS.items():
        for scheme in SCHEMES.values():
            able = tuple(family for family in layouts.family_names() if not quantizer.refusal(scheme, family))
            rows.append(Capability(name, scheme.name, able, quantizer.schemes.get(scheme.name, "")))
        rows += [Capability(name, option, (), reason) for option, reason in quantizer.options.items()]
    return rows
