"""What must stay as it was: protected classes, draft head, vision tower, lm_head, the model class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sparkquant.completeness import incomplete_draft, incomplete_tower
from sparkquant.engine.rules import Ignored
from sparkquant.layers import PROTECTED, LayerClass
from sparkquant.report import Check
from sparkquant.structure import architecture_fault
from sparkquant.verification.catalogue import finding, skipped
from sparkquant.verification.resolution import resolve
from sparkquant.verification.schemes_stored import stored_bits
from sparkquant.verification.subject import Subject

LISTED = (LayerClass.LINEAR_ATTENTION_GATES, LayerClass.VISION, LayerClass.AUDIO, LayerClass.MTP)
"""Protected classes whose matrices the engine asks its config about: an ignore entry must answer."""


def check_protected(subject: Subject) -> Iterator[Check]:
    """protected.*, mtp.*, vision.*, head.* and config.architectures"""
    yield from _architectures(subject)
    if subject.layout is None:
        ids = (
            "protected.quantized", "protected.targeted", "protected.unlisted", "mtp.missing", "mtp.undeclared",
            "vision.missing", "vision.undeclared", "head.missing", "head.tied_quantized", "head.tied_stored",
        )  # fmt: skip
        yield from skipped("no layout knows this model_type", *ids)
        return
    yield from _quantized(subject)
    yield from _listed(subject)
    yield from _draft_head(subject)
    yield from _vision(subject)
    yield from _head(subject)


def _quantized(subject: Subject) -> Iterator[Check]:
    wrong = []
    for name, module in subject.modules.items():
        layer_class = subject.class_of(name)
        if not module.is_quantized or layer_class not in PROTECTED:
            continue
        placement = subject.place(name)
        head = layer_class is LayerClass.MTP and placement is not None and placement.rule.linear
        if not head or stored_bits(module, subject.schemes.get(name)) < 8:
            wrong.append(name)
    if wrong:
        layer_class = subject.class_of(wrong[0])
        reason = PROTECTED[layer_class] if layer_class else ""
        yield finding("protected.quantized", f"{layer_class} is quantized: {reason}", wrong)


def _listed(subject: Subject) -> Iterator[Check]:
    if subject.declared is None:
        yield from skipped("config.json has no quantization_config", "protected.targeted", "protected.unlisted")
        return
    targeted: list[str] = []
    unlisted: list[str] = []
    for module in subject.engine_modules:
        plain = [m for m in module.members if not subject.modules[m].is_quantized and subject.class_of(m) in PROTECTED]
        if not plain:
            continue
        resolution = resolve(subject, module, subject.version)
        if resolution.group is not None:
            targeted += plain
        elif resolution.ignored is Ignored.NO:
            unlisted += [member for member in plain if subject.class_of(member) in LISTED]
    if targeted:
        yield finding("protected.targeted", "16-bit in the file, but a target reaches it and no ignore entry", targeted)
    if unlisted:
        yield finding("protected.unlisted", "not in the ignore list in the engine's spelling", unlisted)


def _draft_head(subject: Subject) -> Iterator[Check]:
    assert subject.layout is not None
    stored = set(subject.of_class(LayerClass.MTP))
    in_source = {name for name in subject.source_modules if subject.class_of(name) is LayerClass.MTP}
    lost = {_experts_as_one(name) for name in in_source} - {_experts_as_one(name) for name in stored}
    missing = sorted(lost)
    inherited = False
    if subject.layout.mtp.declared and not stored and not in_source:
        missing, inherited = ["mtp"], subject.source is not None
    elif stored and not missing:
        text = subject.checkpoint.text_config
        missing = sorted(incomplete_draft(subject.layout, text, subject.modules, stored))
        inherited = subject.source is not None
    rule = subject.layout.mtp
    if stored and not rule.declared and (rule.by_index or rule.config_key in subject.checkpoint.text_config):
        what = f"a draft head is stored, yet config.json says that there is none ({rule.config_key})"
        # Engines leave a region of its own out; layers behind the last one stop them.
        id = "tensors.layers" if rule.by_index else "mtp.undeclared"
        yield finding(id, what, sorted(stored), inherited=bool(in_source))
    if missing:
        what = "the draft head is incomplete: speculative decoding drafts garbage or nothing"
        yield finding("mtp.missing", what, missing, inherited=inherited)


def _experts_as_one(name: str) -> str:
    return re.sub(r"\.experts\..*", ".experts", name)


def _vision(subject: Subject) -> Iterator[Check]:
    tower = subject.config.get("vision_config")
    stored = set(subject.of_class(LayerClass.VISION))
    if stored and not isinstance(tower, Mapping):
        what = "vision tensors are stored, config.json has no vision_config"
        yield finding("vision.undeclared", what, sorted(stored))
    in_source = {name for name in subject.source_modules if subject.class_of(name) is LayerClass.VISION}
    missing = in_source - stored
    if isinstance(tower, Mapping) and not stored and not in_source:
        missing = {"model.visual"}
    if stored:
        assert subject.layout is not None
        missing |= set(incomplete_tower(subject.layout, tower if isinstance(tower, Mapping) else {}, stored))
    if missing:
        inherited = subject.source is not None and not missing & in_source
        what = "the vision tower is incomplete: images are read wrongly without an error"
        yield finding("vision.missing", what, sorted(missing), inherited=inherited)


def _head(subject: Subject) -> Iterator[Check]:
    assert subject.layout is not None
    head = next(iter(subject.of_class(LayerClass.LM_HEAD)), None)
    inherited = any(subject.class_of(name) is LayerClass.LM_HEAD for name in subject.source_modules)
    if head is None:
        if not subject.layout.tied_head:
            what = "lm_head is not stored, and config.json does not tie it to the embedding"
            lost = subject.source is not None and not inherited
            yield finding("head.missing", what, ["lm_head.weight"], inherited=lost)
    elif subject.layout.tied_head and subject.modules[head].is_quantized:
        yield finding("head.tied_quantized", "lm_head is tied to the embedding, yet stored quantized", [head])
    elif subject.layout.tied_head:
        yield finding("head.tied_stored", "lm_head is tied to the embedding, yet stored again", [f"{head}.weight"])


def _architectures(subject: Subject) -> Iterator[Check]:
    named = subject.config.get("architectures")
    wanted = subject.source.config.get("architectures") if subject.source is not None else None
    if subject.source is not None and named != wanted:
        what = f"architectures is {str(named)[:100]}, the source has {str(wanted)[:100]}"
        yield finding("config.architectures", what, measured=str(named)[:200], expected=str(wanted)[:200])
        return
    inherited = subject.source is not None
    if not isinstance(named, list) or not named:
        what = "config.json names no model class"
        yield finding("config.architectures", what, measured=str(named)[:200], inherited=inherited)
    elif subject.layout is not None:
        sees = bool(subject.of_class(LayerClass.VISION))
        if fault := architecture_fault(subject.config, subject.layout, sees=sees):
            expected = list(subject.layout.architectures)
            yield finding(
                "config.architectures", fault, measured=str(named)[:200], expected=expected, inherited=inherited
            )
    elif any("visual." in name for name in subject.modules) and str(named[0]).endswith("ForCausalLM"):
        what = f"{str(named[0])[:100]} is a text-only class, yet vision tensors are stored"
        yield finding("config.architectures", what, measured=str(named)[:200], inherited=inherited)
