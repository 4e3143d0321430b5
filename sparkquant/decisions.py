"""The nouns of planning: one tensor's fate, one output file, the whole plan. Pure data with a byte-stable JSON form."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparkquant.errors import UsageError
from sparkquant.footprint import Footprint
from sparkquant.layers import LayerClass, Layout
from sparkquant.recipe import Recipe
from sparkquant.schemes import OutputTensor, Scheme

PLAN_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """One source tensor's fate.

    outputs  stored tensors; of a fused 3-D expert tensor the names hold `{expert}` and stand for `experts` tensors
    because  the reason, in words
    """

    tensor: str
    shard: str
    dtype: str
    shape: tuple[int, ...]
    layer_class: LayerClass
    layer: int | None
    module: str
    group: str
    scale_group: str
    parts: tuple[str, ...]
    scheme: Scheme | None
    because: str
    outputs: tuple[OutputTensor, ...]
    experts: int = 1

    @property
    def parameters(self) -> int:
        """Elements of the source tensor."""
        return math.prod(self.shape)

    @property
    def output_bytes(self) -> int:
        """Stored payload in bytes."""
        return self.experts * sum(tensor.bytes for tensor in self.outputs)

    @property
    def modules(self) -> int:
        """How many Linears of the engine's world this tensor holds."""
        return self.experts * max(1, len(self.parts))

    def stored(self) -> Iterator[OutputTensor]:
        """Every stored tensor under its real name."""
        if self.scheme is None or not self.parts:
            yield from self.outputs
            return
        for expert in range(self.experts):
            for tensor in self.outputs:
                yield OutputTensor(tensor.name.format(expert=expert), tensor.dtype, tensor.shape)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; empty fields are left out."""
        fields: dict[str, Any] = {
            "tensor": self.tensor,
            "shard": self.shard,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "class": str(self.layer_class),
            "scheme": self.scheme.as_json() if self.scheme else "keep",
            "because": self.because,
        }
        if self.group:
            fields["group"] = self.group
        if self.scheme:
            fields["outputs"] = [[t.name, t.dtype, list(t.shape)] for t in self.outputs]
        if self.experts != 1:
            fields["experts"] = self.experts
        return fields


_json = json.JSONEncoder(ensure_ascii=False).encode
"""Without an indent: with one, the encoder is ten times slower."""


def _lines(value: Any) -> str:
    return "[\n  " + ",\n  ".join(map(_json, value)) + "\n ]" if isinstance(value, list) and value else _json(value)


@dataclass(frozen=True, slots=True)
class OutputShard:
    """One file of the result: the source tensors that it takes, and its payload in bytes."""

    name: str
    tensors: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """All decisions, the shard map, totals and notes.

    layout   the family's table for this config
    engines  the supported vLLM versions that load the result; `notes` say why others do not
    """

    source: Mapping[str, Any]
    recipe: Recipe
    layout: Layout
    decisions: Mapping[str, Decision]
    shards: tuple[OutputShard, ...]
    footprint: Footprint
    notes: tuple[str, ...]
    engines: tuple[str, ...] = ()

    @cached_property
    def totals(self) -> dict[str, Any]:
        """Counts and sizes of source and result; bytes are tensor payloads."""
        decisions = self.decisions.values()
        parameters = sum(d.parameters for d in decisions)
        output_bytes = sum(d.output_bytes for d in decisions)
        return {
            "tensors": len(self.decisions),
            "output_tensors": sum(d.experts * len(d.outputs) for d in decisions),
            "parameters": parameters,
            "source_bytes": sum(source_bytes(d) for d in decisions),
            "output_bytes": output_bytes,
            "bits_per_weight": round(8 * output_bytes / max(1, parameters), 3),
            "modules": self._modules(),
            "draft_head_tensors": sum(d.layer_class is LayerClass.MTP for d in decisions),
        }

    def _modules(self) -> dict[str, int]:
        """Modules per scheme; `keep` counts weights of two or more dimensions outside the draft head."""
        counts: dict[str, int] = defaultdict(int)
        for d in self.decisions.values():
            if d.scheme is not None:
                counts[d.scheme.label] += d.modules
            elif len(d.shape) > 1 and d.layer_class is not LayerClass.MTP:
                counts["keep"] += d.modules
        return dict(sorted(counts.items()))

    @cached_property
    def by_class(self) -> list[dict[str, Any]]:
        """One row per class and scheme: tensors, parameters, bytes, reason."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for d in self.decisions.values():
            label = d.scheme.label if d.scheme else "keep"
            row = rows.setdefault(
                (str(d.layer_class), label),
                {
                    "class": str(d.layer_class),
                    "scheme": label,
                    "tensors": 0,
                    "parameters": 0,
                    "source_bytes": 0,
                    "output_bytes": 0,
                    "because": d.because,
                },
            )
            row["tensors"] += 1
            row["parameters"] += d.parameters
            row["source_bytes"] += source_bytes(d)
            row["output_bytes"] += d.output_bytes
        return [rows[key] for key in sorted(rows)]

    def as_json(self) -> dict[str, Any]:
        """The whole plan as plain JSON."""
        return {
            "format": PLAN_FORMAT,
            "source": dict(self.source),
            "recipe": self.recipe.as_json(),
            "totals": self.totals,
            "footprint": self.footprint.as_json(),
            "classes": self.by_class,
            "notes": list(self.notes),
            "engines": list(self.engines),
            "shards": [{"name": s.name, "bytes": s.bytes, "tensors": list(s.tensors)} for s in self.shards],
            "decisions": [decision.as_json() for decision in self.decisions.values()],
        }

    def to_json(self, **beside: Any) -> str:
        """Stable text, one decision a line: the same checkpoint headers and recipe give the same bytes.

        `beside` are further keys, for what is said about a plan: `digest` does not depend on them.
        """
        fields = {**self.as_json(), **beside}
        return "{\n" + ",\n".join(f" {_json(key)}: {_lines(value)}" for key, value in fields.items()) + "\n}\n"

    @cached_property
    def digest(self) -> str:
        """sha256 of the plan's JSON, without what is said beside it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def explain(self, name: str) -> str:
        """Why one tensor (or module) is treated so, step by step."""
        if not isinstance(name, str):
            raise UsageError(f"a tensor is named by text, not by {type(name).__name__}", hint="pass its name")
        decision = self.decisions.get(name) or self.decisions.get(f"{name}.weight")
        if decision is None:
            near = difflib.get_close_matches(name, self.decisions, n=3, cutoff=0.4)
            raise UsageError(
                f"no tensor {name!r} in this checkpoint", hint=f"near: {', '.join(near)}" if near else "see plan --json"
            )
        rule = self.layout.rule_of(decision.tensor)
        partners = [d.tensor for d in self.decisions.values() if d.group and d.group == decision.group]
        lines = [
            f"{decision.tensor}  {decision.dtype} {list(decision.shape)}  in {decision.shard}",
            f"  layout   {self.layout.family}: matches {rule.pattern if rule else '?'}",
            f"  class    {decision.layer_class}" + (f" (layer {decision.layer})" if decision.layer is not None else ""),
        ]
        if decision.group:
            lines.append(f"  group    {decision.group}: {len(partners)} tensors in one engine module")
            lines += [f"             {partner}" for partner in partners[:6]]
            lines += [f"             and {len(partners) - 6} more"] if len(partners) > 6 else []
        lines.append(f"  scheme   {decision.scheme.label if decision.scheme else 'keep'}: {decision.because}")
        lines += [f"  stores   {t.name}  {t.dtype} {list(t.shape)}" for t in decision.outputs]
        lines.append(f"  bytes    {source_bytes(decision):,} -> {decision.output_bytes:,}")
        return "\n".join(lines)


def source_bytes(decision: Decision) -> int:
    """Payload of the source tensor in bytes."""
    return OutputTensor("", decision.dtype, decision.shape).bytes
