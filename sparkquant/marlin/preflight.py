"""Before a server is started: the static gate by the rules of that engine on that chip, and what follows from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkquant import events
from sparkquant.checkpoint import Checkpoint
from sparkquant.engine.kernels import atomic_add_applies
from sparkquant.marlin.dialect import ATOMIC_ADD
from sparkquant.marlin.predicted import scheme_of
from sparkquant.report import Report

DRAFT_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


@dataclass(frozen=True)
class Preflight:
    """`table` is what `rules.kernel` predicts: kernel, padding and atomic adds of every module.

    schemes, experts  quantized dense layers and experts, as server logs call them
    """

    report: Report
    table: Mapping[str, Any]

    @property
    def schemes(self) -> frozenset[str]:
        """Of dense layers."""
        return frozenset(scheme_of(row["scheme"]) for row in self._rows if not _is_moe(row))

    @property
    def experts(self) -> frozenset[str]:
        """Of experts."""
        return frozenset(scheme_of(row["scheme"]) for row in self._rows if _is_moe(row))

    @property
    def wanted(self) -> dict[str, str]:
        """Schemes that Marlin takes, by itself or when it is asked for."""
        found = {}
        for row in self._rows:
            if _marlin(row):
                found[scheme_of(row["scheme"])] = "marlin"
        return found

    @property
    def atomic_layers(self) -> list[Mapping[str, Any]]:
        """Rows of dense layers that the flag can affect once Marlin runs them, as the gate makes it do."""
        return [row for row in self._rows if _marlin(row) and not _is_moe(row) and self._acts(row)]

    @property
    def atomic_add(self) -> str:
        """What the flag changes here, in words; experts never use it."""
        rows = [f"{row['count']} x {row['class']} {row['size']}" for row in self.atomic_layers]
        told = f"acts on {', '.join(rows)}" if rows else "changes nothing here: no dense Marlin layer has n < 2048 <= k"
        moe = "; Marlin MoE ignores it" if self.experts else ""
        return f"{ATOMIC_ADD}=1 {told}{moe}"

    def _acts(self, row: Mapping[str, Any]) -> bool:
        n, k = row["padded"] or row["size"]
        return atomic_add_applies(n, k, capability=str(self.table.get("capability") or "12.1"))

    @property
    def _rows(self) -> list[Mapping[str, Any]]:
        return list(self.table.get("rows", ()))


def _marlin(row: Mapping[str, Any]) -> bool:
    """Marlin takes it, by itself or when it is asked for."""
    return scheme_of(row["scheme"]) in ("int", "nvfp4") and "marlin" in f"{row['kernel']} {row['reason']}".lower()


def _is_moe(row: Mapping[str, Any]) -> bool:
    return str(row["class"]).startswith("experts") or "MoE" in str(row["kernel"])


def preflight(
    out: str | os.PathLike[str], version: str, tp: int, capability: str, listener: events.Listener
) -> Preflight:
    """`verify` by the rules of a version, for a number of ranks and a chip ("" for the default)."""
    from sparkquant.verification.gate import verify

    report = verify(out, engine=version or None, tp=(tp,), capability=capability or None, listener=listener)
    table = next((check.measured for check in report.checks if check.id == "rules.kernel"), None)
    return Preflight(report, table if isinstance(table, Mapping) else {})


def has_draft_head(checkpoint: Checkpoint) -> bool:
    """The config announces a draft head, and its tensors are there."""
    announced = any(checkpoint.text_config.get(key) for key in DRAFT_KEYS)
    if not announced:
        return False
    if checkpoint.text_config.get("num_nextn_predict_layers"):
        return True
    return any(name.startswith(("mtp.", "model.mtp.")) for name in checkpoint.tensors)
