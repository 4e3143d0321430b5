"""Plans, reports and differences as text for people. Nothing here decides anything, and nothing here prints."""

from __future__ import annotations

import os
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sparkquant.footprint import MARGIN_BYTES
from sparkquant.printable import clean
from sparkquant.printable import size as size
from sparkquant.report import Status

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sparkquant.decisions import Plan
    from sparkquant.engine.routing import Routes
    from sparkquant.recipe import Recipe
    from sparkquant.report import Check, Report

CHIPS = {"12.1": "GB10"}
SHARDS_SHOWN = 12
STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.WARN: "yellow",
    Status.INCONCLUSIVE: "yellow",
    Status.SKIPPED: "dim",
}

_ORDER = (Status.PASS, Status.SKIPPED, Status.INCONCLUSIVE, Status.WARN, Status.FAIL)


def parameters(count: int) -> str:
    """A parameter count: `27.78 B`."""
    for unit, step in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= step:
            return f"{count / step:,.2f} {unit}"
    return str(count)


def _grid(*columns: str, right: Iterable[str] = (), header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=header, header_style="bold")
    for column in columns:
        fixed = column in right
        table.add_column(column, justify="right" if fixed else "left", no_wrap=fixed, overflow="fold")
    return table


def plan_text(
    plan: Plan, name: str, *, written: Path | None = None, routes: Routes | None = None
) -> Iterator[RenderableType]:
    """The whole plan: classes, totals, what stays 16-bit and why, files, costs, kernels, notes."""
    totals = plan.totals
    yield Text(clean(f"{name}: {plan.source['model_type']}, {totals['tensors']:,} tensors"), "bold")
    yield Text(clean(f"recipe {plan.recipe.name}, method {plan.recipe.method.name}: {plan.recipe.summary}") + "\n")
    yield _classes(plan)
    kept = {
        row["class"]: row["because"].removeprefix("protected: ") for row in plan.by_class if row["scheme"] == "keep"
    }
    if kept:
        yield Text("\nKept as stored, and why", "bold")
        yield Padding(_pairs(kept.items()), (0, 0, 0, 2))
    special = {row["class"]: row["because"] for row in plan.by_class if row["because"].startswith(("over", "unprot"))}
    if special:
        yield Text("\nExceptions, and why", "bold")
        yield Padding(_pairs(special.items()), (0, 0, 0, 2))
    yield Text()
    yield _pairs(_facts(plan, written))
    if routes is not None and routes.rows:
        yield from routes_text(routes.as_json())
    if plan.notes:
        yield Text("\nNotes", "bold")
        yield from (Padding(Text(clean(note)), (0, 0, 0, 2)) for note in plan.notes)


def _classes(plan: Plan) -> Table:
    table = _grid(
        "class", "scheme", "tensors", "weights", "before", "after", right=("tensors", "weights", "before", "after")
    )
    rows = [*plan.by_class, {"class": "total", "scheme": "", **plan.totals}]
    for row in rows:
        style = "bold" if row["class"] == "total" else "" if row["scheme"] == "keep" else "cyan"
        table.add_row(
            row["class"], row["scheme"], f"{row['tensors']:,}", parameters(row["parameters"]),
            size(row["source_bytes"]), size(row["output_bytes"]), style=style,
        )  # fmt: skip
    return table


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in rows:
        table.add_row(left, right)
    return table


def _facts(plan: Plan, written: Path | None) -> Iterator[tuple[str, str]]:
    totals, cost = plan.totals, plan.footprint
    yield (
        "result",
        f"{size(totals['output_bytes'])} ({totals['output_bytes']:,} bytes) in {totals['output_tensors']:,} tensors,"
        f" {totals['bits_per_weight']} bits per weight",
    )
    yield "modules", ", ".join(f"{count:,} {label}" for label, count in totals["modules"].items())
    yield "draft head", _draft_head(totals["draft_head_tensors"])
    yield "files", "\n".join(_files(plan))
    yield "memory", _fit(cost.working_bytes, available_memory(), "free now", "close other programs")
    free = shutil.disk_usage(Path.cwd()).free
    yield "disk", _fit(cost.disk_bytes + MARGIN_BYTES, free, "free in this folder", "choose another disk for OUT")
    yield "decoding", _decoding(plan)
    yield "plan", f"sha256 {plan.digest[:16]}" + (f", written to {written}" if written else "")


def _draft_head(tensors: int) -> str:
    return f"{tensors} tensors (mtp.*)" if tensors else "this checkpoint has none"


def _files(plan: Plan) -> Iterator[str]:
    for shard in plan.shards[:SHARDS_SHOWN]:
        yield f"{shard.name}  {size(shard.bytes)}, source tensors: {len(shard.tensors):,}"
    if len(plan.shards) > SHARDS_SHOWN:
        yield f"and {len(plan.shards) - SHARDS_SHOWN} more (--json lists all)"


def _fit(needed: int, there: int | None, where: str, otherwise: str) -> str:
    if there is None:
        return f"{size(needed)} needed; how much is {where} could not be read"
    verdict = "fits" if needed <= there else f"does NOT fit, {size(needed - there)} short: {otherwise}"
    return f"{size(needed)} needed, {size(there)} {where}: {verdict}"


def _decoding(plan: Plan) -> str:
    cost, capability = plan.footprint, plan.recipe.target.capability
    read = f"{size(cost.decode_bytes)} of weights read per token"
    if cost.decode_ceiling_tps is None:
        return f"{read}; no bandwidth is known for capability {capability}, so no ceiling"
    ceiling = f"{cost.decode_ceiling_tps:,.{1 if cost.decode_ceiling_tps < 100 else 0}f}"
    return (
        f"{read}; at {cost.bandwidth_gbps:g} GB/s ({CHIPS.get(capability, capability)}) at most"
        f" {ceiling} tokens/s: arithmetic, not a measurement; KV cache and speculation not counted"
    )


def available_memory() -> int | None:
    """MemAvailable of this machine in bytes, None where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def report_text(report: Report, *, every: bool = False, routes: bool = False) -> Iterator[RenderableType]:
    """Findings in full and last, where a terminal shows them; passed checks by area, or `every` one in full too.

    `routes` adds the table of kernels.
    """
    table = _grid("status", "check", "what was found")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    quiet = () if every else (Status.PASS, Status.SKIPPED)
    for status, area, text in _by_area(check for check in report.checks if check.status in quiet):
        table.add_row(Text(str(status), STYLES[status]), area, text)
    findings = [check for check in report.checks if check.status not in quiet]
    for check in sorted(findings, key=lambda check: _ORDER.index(check.status)):
        table.add_row(Text(str(check.status), STYLES[check.status]), check.id, _finding(check))
    yield table
    kernels = next((check.measured for check in report.checks if check.id == "rules.kernel"), None)
    if routes and isinstance(kernels, Mapping) and kernels.get("rows"):
        yield from routes_text(kernels)
    yield Text()
    yield Text(verdict(report), "green" if report.ok else "bold red")


def routes_text(table: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Where modules run: the `measured` of `rules.kernel`, equal rows of all sizes as one."""
    sizes = ", ".join(map(str, table["tp"]))
    capability = table["capability"]
    chip = f" ({CHIPS[capability]})" if capability in CHIPS else ""
    yield Text(f"\nEngine {table['engine']}, capability {capability}{chip}, tensor parallel {sizes}", "bold")
    grid = _grid("class", "scheme", "tp", "kernel", "modules", right=("tp", "modules"))
    counts: dict[tuple[str, str, str], Counter[int]] = {}
    apart = table["unsplittable"]
    for row in _split(table["rows"], apart):
        padded = f", padded to {row['padded']}" if row["padded"] else ""
        kernel = row["kernel"] + padded + (f": {row['reason']}" if row["kernel"] == "refused" else "")
        counts.setdefault((row["class"], row["scheme"], kernel), Counter())[row["tp"]] += row["count"]
    for (label, scheme, kernel), by_size in sorted(counts.items()):
        for count in sorted(set(by_size.values())):
            ranks = ", ".join(str(tp) for tp, found in by_size.items() if found == count)
            style = "bold red" if kernel.startswith("refused") else ""
            grid.add_row(label, scheme, ranks, kernel, f"{count:,}", style=style)
    yield Padding(grid, (0, 0, 0, 2))
    refused = (f"tensor parallel {size} is refused: {reason}" for size, reason in apart.items())
    elsewhere = {key: _split(rows, apart) for key, rows in table["elsewhere"].items()}
    notes = (*refused, *_elsewhere(elsewhere), table["atomic_add"], *table["notes"])
    yield from (Padding(Text(clean(note)), (0, 0, 0, 2)) for note in notes)


def _split(rows: Iterable[Mapping[str, Any]], apart: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Rows of the sizes over which the model can be split: of the others one line says all."""
    return [row for row in rows if str(row["tp"]) not in apart]


def _elsewhere(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """One line per other capability: how many modules run where."""
    for capability, rows in tables.items():
        by_size: dict[str, Counter[int]] = {}
        for row in rows:
            by_size.setdefault(row["kernel"], Counter())[row["tp"]] += row["count"]
        counts = Counter({kernel: max(found.values()) for kernel, found in by_size.items()})
        chip = f" ({CHIPS[capability]})" if capability in CHIPS else ""
        yield f"on {capability}{chip}: " + ", ".join(f"{kernel} {count:,}" for kernel, count in counts.most_common())


def _by_area(checks: Iterable[Check]) -> Iterator[tuple[Status, str, str]]:
    """Checks of one area (the part of an id before the dot) and one reason in one row."""
    rows: dict[tuple[int, str, str], list[str]] = {}
    for check in checks:
        area, _, rest = check.id.partition(".")
        reason = f" ({clean(check.message)})" if check.status is Status.SKIPPED else ""
        rows.setdefault((_ORDER.index(check.status), area, reason), []).append(rest)
    for (order, area, reason), names in sorted(rows.items(), key=lambda row: row[0][0]):
        yield _ORDER[order], f"{area}.*" if names != [""] else area, ", ".join(names) + reason


def verdict(report: Report) -> str:
    """One line: `12 pass, 1 warn`."""
    counts = Counter(str(check.status) for check in report.checks)
    listed = ", ".join(f"{counts[status]} {status}" for status in map(str, Status) if counts[status])
    return f"{'ok' if report.ok else 'FAILED'}: {listed or 'no checks'}"


def warnings(report: Report) -> Iterator[str]:
    """One line per finding of a report that is good all the same."""
    for check in report.checks:
        if check.status in (Status.WARN, Status.INCONCLUSIVE):
            yield f"{check.status}: {check.id}: {clean(check.message)}"


def _finding(check: Check) -> str:
    lines = [clean(check.message)]
    if check.status in (Status.FAIL, Status.WARN):
        if check.measured is not None and not isinstance(check.measured, Mapping):
            lines.append(
                clean(f"measured {check.measured}")
                + ("" if check.expected is None else clean(f", expected {check.expected}"))
            )
        lines += map(clean, check.tensors)
    return "\n".join(lines)


def recipes_text(recipes: Iterable[Recipe]) -> Table:
    """Names and summaries."""
    table = _grid("recipe", "what it does")
    table.columns[0].no_wrap = True
    for recipe in recipes:
        table.add_row(recipe.name, recipe.summary)
    return table


def rate(count: float, seconds: float) -> str:
    """Bytes per second in words."""
    return f"{size(count / seconds)}/s" if seconds > 0 else "-"


def shown_path(path: Path) -> str:
    """A path relative to the current folder where that is shorter."""
    try:
        return min(str(path), os.path.relpath(path), key=len)
    except ValueError:
        return str(path)


def shell_word(path: str) -> str:
    """A path as one word of a shell command, never taken for an option."""
    path = f"./{path}" if path.startswith("-") else path
    if not path.isprintable():
        return "$'" + "".join(map(_ansi_c, path)) + "'"
    return shlex.quote(path)


def _ansi_c(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    return character if character.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
