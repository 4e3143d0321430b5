"""What a model cannot do without, by its own layers and names alone: for folders whose source is not given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sparkquant.layers import LayerClass, Layout, TensorRule
from sparkquant.report import Check
from sparkquant.verification.catalogue import finding, skipped
from sparkquant.verification.subject import Subject


def check_required(subject: Subject) -> Iterator[Check]:
    """tensors.required: embedding and final norm."""
    layout = subject.layout
    if layout is None:
        yield from skipped("no layout knows this model_type", "tensors.required")
        return
    lost = [rule for rule in _required(layout) if not _holds(subject.checkpoint.tensors, rule)]
    if lost:
        inherited = subject.source is not None and not any(_holds(subject.source.tensors, rule) for rule in lost)
        names = [_name(subject, rule) for rule in lost]
        yield finding("tensors.required", "not stored: no model runs without it", names, inherited=inherited)


def _required(layout: Layout) -> Iterator[TensorRule]:
    for layer_class in (LayerClass.EMBED, LayerClass.NORM):
        yield from [r for r in layout.rules if r.layer_class is layer_class and "layers" not in r.pattern][:1]


def _holds(names: Iterable[str], rule: TensorRule) -> bool:
    """Whether the weight is there; a quantized embedding is, by whatever its module holds."""
    module = re.compile(rule.pattern.removesuffix(r"\.weight") + r"\.[a-z_0-9]+")
    return any(module.fullmatch(name) for name in names)


def _name(subject: Subject, rule: TensorRule) -> str:
    """The rule's name under the prefix of the stored layers."""
    leaf = re.findall(r"\w+", rule.pattern.removesuffix(r"\.weight"))[-1]
    parent = next((found[0] for name in subject.modules if (found := re.match(r".*?(?=layers\.)", name))), "")
    return f"{parent}{leaf}.weight"
