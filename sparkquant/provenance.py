"""What `quantize` says of its own result before it appears: evidence of the work and of its checks, and the card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkquant.card import card_text
from sparkquant.decisions import Plan
from sparkquant.evidence import CARD, FOLDER, checkpoint_digest, document_of, read
from sparkquant.report import Report
from sparkquant.writer import StagedCheckpoint

_CACHED = re.compile(r"models--([A-Za-z0-9][\w.-]*)--([A-Za-z0-9][\w.-]*)")


def kept_name(name: str) -> str:
    """The name under which a side file of the source is kept: its card must not stand where ours will."""
    return f"SOURCE_{name}" if re.fullmatch(rf"(SOURCE_)*{re.escape(CARD)}", name) else name


def origin_of(folder: Path) -> dict[str, str]:
    """What a source can be called in public: hub id and revision of a snapshot, else the folder's name."""
    path = folder.resolve()
    cached = _CACHED.fullmatch(path.parent.parent.name)
    if path.parent.name == "snapshots" and cached:
        return {"source": f"{cached[1]}/{cached[2]}", "revision": path.name}
    return {"source": path.name}


def write_provenance(
    staged: StagedCheckpoint, plan: Plan, source: Path, report: Report, records: Mapping[str, Any]
) -> None:
    """Evidence of `quantize` and `verify`, with the backend's `records` of its work.

    The shards' digests are those of the journal, so no shard is read again.
    """
    digest = checkpoint_digest(staged.path, known=staged.digests)
    inputs = origin_of(source)
    quantized = {"plan": plan.digest, "recipe": plan.recipe.name, "method": plan.recipe.method.name}
    result: dict[str, Any] = {**quantized, "totals": plan.totals, "engines": list(plan.engines)}
    if "calibration" in records:
        result["calibration"] = records["calibration"]["calibration"]
    if "backend" in records:
        result["backend"] = records["backend"]["package"]
    checks = {"ok": report.ok, "checks": report.as_json()}
    texts = {
        "quantize": document_of(staged.path, "quantize", result, digest, inputs=inputs),
        "verify": document_of(staged.path, "verify", checks, digest, inputs={**inputs, "level": "default"}),
    }
    for verb, text in texts.items():
        staged.write_text(f"{FOLDER}/{verb}.json", text)
    staged.write_text(CARD, card_text(staged.path, read(staged.path, digest=digest), digest))
