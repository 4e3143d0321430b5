"""Every check by its stable id: what it proves, when it runs, and whether a finding is red or a warning.

A check that ran and found nothing is reported as passed; one that could not run as skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkquant.report import Check, Status

LEVELS = ("headers", "default", "deep")
MAX_NAMED = 24
"""Tensors or entries that one finding lists."""


@dataclass(frozen=True, slots=True)
class Entry:
    """proves: the sentence that is true when the check passes; source: it compares with the source checkpoint."""

    proves: str
    level: str = "headers"
    source: bool = False
    warns: bool = False


CATALOGUE: Mapping[str, Entry] = {
    # the folder
    "files.index": Entry("the index and the shards name the same tensors, each stored once"),
    "files.pickle": Entry("no weights are stored as pickle files"),
    "files.link": Entry("no link leaves the folder (links of the hub cache lead to its own blobs)"),
    "files.missing": Entry("tokenizer and, with a vision tower, preprocessor files are there", warns=True),
    "files.json": Entry("the JSON side files can be read"),
    # what must be stored
    "plan.readable": Entry("sparkquant/plan.json can be read"),
    "plan.source": Entry("the plan was made for this source's headers", source=True),
    "tensors.missing": Entry("every tensor that the plan or the declared scheme needs is stored"),
    "tensors.extra": Entry("nothing is stored that the plan or the declared scheme does not need"),
    "tensors.dtype": Entry("every tensor has the dtype that the plan or the scheme demands"),
    "tensors.shape": Entry("every tensor has the shape that the plan or the scheme demands"),
    "tensors.unknown": Entry("the family's layout knows every stored name"),
    "tensors.layers": Entry("all layers of config.json are stored, those of one type with the same modules"),
    "tensors.required": Entry("the embedding and the final norm are stored"),
    "tensors.g_idx": Entry("no activation order (g_idx) is stored"),
    "tensors.scale_dtype": Entry("integer scales are 16-bit: the engine rounds wider ones", warns=True),
    # the quantization config and the tensors
    "config.float16": Entry("config.json does not ask for float16, in which these families overflow"),
    "config.nonfinite": Entry("config.json holds no NaN or infinity, which strict JSON readers refuse"),
    "config.plain": Entry("something is quantized: this is no plain 16-bit checkpoint", warns=True),
    "config.malformed": Entry("quantization_config has the types that engines read"),
    "config.unsupported": Entry("every group of quantization_config is a scheme that can be checked"),
    "config.format": Entry("format fits the schemes: one for all groups, or mixed-precision and one each"),
    "config.actorder": Entry("no group uses an activation order that newer engines refuse"),
    "config.plan": Entry("the groups are those of sparkquant/plan.json, their activations too"),
    "config.kv_cache": Entry("no KV cache scales are declared: engines do not load them here", warns=True),
    "config.absent": Entry("every module that the config declares quantized is stored quantized"),
    "config.undeclared": Entry("every module that is stored quantized is declared, and not ignored"),
    "config.scheme": Entry("every module is stored in the scheme that the config declares"),
    "config.architectures": Entry(
        "architectures names the class of the source, one that loads the family, a multimodal one for vision tensors"
    ),
    "config.family": Entry("a layout knows the family: names, shapes and protected parts are judged", warns=True),
    "config.sizes": Entry("the widths, heads and expert counts in config.json are those of the stored weights"),
    # names by the engine's rules
    "rules.pattern": Entry("every pattern is a regular expression that can be matched in bounded time"),
    "rules.glob": Entry("no entry is a glob: the engine compares entries without `re:` letter by letter"),
    "rules.unanchored": Entry("no `re:` entry misses its names because matching starts at their beginning"),
    "rules.class_target": Entry("no class name is a target beside other groups: engine versions differ there"),
    "rules.overlap": Entry("no module is matched by the targets of two groups"),
    "rules.order": Entry("all supported engine versions resolve every module alike"),
    "rules.partial_ignore": Entry("no engine module is ignored in part: the engine stops there"),
    "rules.split_scheme": Entry("all parts of an engine module have one scheme: the engine takes the first part's"),
    "rules.dead_target": Entry("every target matches a module", warns=True),
    "rules.dead_ignore": Entry("every ignore entry matches a module", warns=True),
    "rules.engine": Entry("the engine version that was named has the model class, and a scheme wherever one is stored"),
    "rules.ranks": Entry("heads, groups, inner widths and vocabulary divide over the ranks that were named"),
    "rules.kernel": Entry("some kernel takes every quantized module, on the capability and the ranks that were named"),
    # what must stay as it was
    "protected.quantized": Entry("gates, convolutions, vision, router and embedding are 16-bit; MTP at least 8"),
    "protected.targeted": Entry("no target reaches a protected module that is stored 16-bit"),
    "protected.unlisted": Entry("gates, vision and draft head are in the ignore list in engine spelling", warns=True),
    "mtp.missing": Entry("the draft head that config.json declares is stored, complete"),
    "mtp.undeclared": Entry("a draft head that is stored is declared in config.json: engines leave it out", warns=True),
    "vision.missing": Entry("the vision tower that config.json declares is stored, complete"),
    "vision.undeclared": Entry("vision tensors come with a vision_config"),
    "head.missing": Entry("lm_head is stored unless it is tied to the embedding"),
    "head.tied_quantized": Entry("a tied lm_head is not quantized"),
    "head.tied_stored": Entry("a tied lm_head is not stored a second time", warns=True),
    # token ids
    "tokens.eos": Entry("the tokenizer's end token stops generation"),
    "tokens.pad_bos": Entry("pad and bos ids agree over config, generation_config and tokenizer", warns=True),
    "tokens.source": Entry("eos, pad and bos ids are the source's", source=True),
    # against the source
    "source.config": Entry("config.json keeps every field of the source", source=True),
    "source.files_missing": Entry("tokenizer, template, processor and licence files are there", source=True),
    "source.files_differ": Entry("those files are the source's, byte for byte", source=True),
    "source.missing": Entry("every source tensor is stored, as it was or quantized", source=True),
    "source.extra": Entry("nothing is stored that the source does not have", source=True),
    "source.shape": Entry("every weight has the source's shape, and a kept one its dtype", source=True),
    "source.bytes": Entry("every kept tensor equals the source bit for bit", level="default", source=True),
    # values
    "scales.finite": Entry("no scale is NaN or infinite", level="default"),
    "scales.zero": Entry("no scale is zero where its weights are not", level="default"),
    "scales.sign": Entry("scales that the engine takes as positive are positive", level="default"),
    "scales.denormal": Entry("no scale is denormal: its reciprocal overflows", level="default"),
    "scales.flush": Entry("no NVFP4 block scale is small enough for Marlin to flush it", level="default", warns=True),
    "scales.global": Entry("the parts of an engine module share one NVFP4 global scale", level="default"),
    "scales.order": Entry("every stored g_idx is the plain order that the config promises", level="default"),
    "scales.shape_value": Entry("every weight_shape states the real shape", level="default"),
    "values.fp8_nan": Entry("no FP8 weight is NaN", level="deep"),
    "values.finite": Entry("no stored 16- or 32-bit value is NaN or infinite", level="deep"),
    "values.error": Entry(
        "every row and scale group of the dequantized weights is the source's within the scheme's error",
        level="deep", source=True,
    ),
}  # fmt: skip


def finding(
    id: str,
    message: str,
    tensors: Iterable[str] = (),
    *,
    measured: Any = None,
    expected: Any = None,
    inherited: bool = False,
    warns: bool = False,
) -> Check:
    """A finding under an id of the table, red or a warning as the table says.

    Long lists are cut, with their length in the message. `inherited`: the source has the same fault, so it only warns;
    `warns`: it does for another reason, which the message says.
    """
    names = [name[:300] for name in tensors]
    if len(names) > MAX_NAMED:
        message += f" ({len(names)} in all)"
    if inherited:
        message += "; the source has the same fault"
    status = Status.WARN if inherited or warns or CATALOGUE[id].warns else Status.FAIL
    return Check(id, status, message, tuple(names[:MAX_NAMED]), measured, expected)


def passed(id: str, *, measured: Any) -> Check:
    """A passed check that has something to show."""
    return Check(id, Status.PASS, CATALOGUE[id].proves, measured=measured)


def skipped(reason: str, *ids: str) -> list[Check]:
    """Checks that cannot run on this folder."""
    return [Check(id, Status.SKIPPED, reason) for id in ids]


def settled(found: Iterable[Check], level: str, *, with_source: bool) -> list[Check]:
    """All checks of the table in its order: the findings, and what passed or did not run."""
    by_id: dict[str, list[Check]] = {id: [] for id in CATALOGUE}
    for check in found:
        by_id[check.id].append(check)
    checks: list[Check] = []
    for id, entry in CATALOGUE.items():
        if LEVELS.index(entry.level) > LEVELS.index(level):
            checks += skipped(f"needs level {entry.level!r}", id)
        elif entry.source and not with_source:
            checks += skipped("needs the source checkpoint", id)
        elif findings := [check for check in by_id[id] if check.status is not Status.SKIPPED]:
            checks += findings
        else:
            checks += by_id[id][:1] or [Check(id, Status.PASS, entry.proves)]
    return checks
