"""Verdicts, server logs and machines as text for people. Nothing here decides anything, and nothing here prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sparkquant.cli.shell import clean
from sparkquant.cli.tables import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sparkquant.marlin.diagnosis import Diagnosis
    from sparkquant.marlin.doctor import Examination
    from sparkquant.marlin.known_bad import KnownBad
    from sparkquant.marlin.server_log import ServerLog
    from sparkquant.marlin.verdict import Verdict

LEVELS = {"fault": "bold red", "warning": "yellow", "note": "dim"}


def rows(pairs: Iterable[tuple[str, str]]) -> Table:
    """Two columns, the first never broken."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for left, right in pairs:
        grid.add_row(left, clean(right))
    return grid


def verdict_text(verdict: Verdict) -> Iterator[RenderableType]:
    """The evidence, then the outcome."""
    if verdict.evidence:
        yield Text("Evidence", "bold")
        pairs = ((item.where or item.source, item.what) for item in verdict.evidence)
        yield Padding(rows(pairs), (0, 0, 0, 2))
        yield Text()
    style = "green" if verdict.outcome == "pass" else "yellow" if verdict.outcome == "inconclusive" else "bold red"
    yield Text(f"{verdict.outcome}: {clean(verdict.summary)}", style)


def next_text(verdict: Verdict) -> Text:
    """The next command in one line, however long: it is there to be copied."""
    return Text(f"next: {clean(verdict.next)}")


def log_text(log: ServerLog) -> Iterator[RenderableType]:
    """What a log says of its server."""
    name = {"vllm": "vLLM", "sglang": "SGLang"}.get(log.engine, "no engine that is known")
    yield Text(clean(f"{name} {log.version}: {log.model or 'no model named'}"), "bold")
    yield Padding(rows(_log_rows(log)), (0, 0, 0, 2))
    yield Text()


def _log_rows(log: ServerLog) -> Iterator[tuple[str, str]]:
    if log.quantization:
        yield "checkpoint", f"{log.quantization}, {log.dtype or 'dtype unknown'}, tensor parallel {log.tensor_parallel}"
    asked = f"linear backend {log.linear_backend or '?'}, expert backend {log.moe_backend or '?'}"
    yield "asked for", asked if log.linear_backend or log.moe_backend else "not said"
    ran = [f"{k.kernel} for {k.layers}{' (drafter)' if k.model == 'drafter' else ''}" for k in log.kernels]
    yield "ran", "; ".join(ran) or "no line names a kernel"
    graphs = "captured" if log.graphs else "off (eager)" if log.eager else "not captured"
    yield "CUDA graphs", graphs if log.eager is not None or log.graphs else "not said"
    if log.speculation:
        tokens = f", {log.speculation.tokens} a step" if log.speculation.tokens else ""
        yield "speculation", f"{log.speculation.method}{tokens}"
    for draft in log.drafting[-1:]:
        rates = ", ".join(f"{rate:.0%}" for rate in draft.rates)
        yield "acceptance", f"mean length {draft.mean_length}" + (f", by position {rates}" if rates else "")
    yield "weights", "not said" if log.load_gib is None else f"{log.load_gib:g} GiB in {log.load_seconds:.1f} s"
    yield "KV cache", _cache(log)
    end = {"orderly": "ended in order", "failed": "ended with a fault", "none": "its end is not in the log"}[log.end]
    yield "process", f"{'start-up complete' if log.started else 'start-up NOT complete'}; {end}"


def _cache(log: ServerLog) -> str:
    if log.kv_cache_tokens is None:
        return "not said"
    memory = f" in {log.kv_cache_gib:g} GiB" if log.kv_cache_gib is not None else ""
    room = f": {log.max_concurrency:g} requests of {log.max_model_len:,} tokens" if log.max_concurrency else ""
    return f"{log.kv_cache_tokens:,} tokens{memory}{room}"


def diagnosis_text(found: Diagnosis) -> Iterator[RenderableType]:
    """The log's facts, what a CUDA error means, the evidence, the outcome and the suspect."""
    if found.log is not None:
        yield from log_text(found.log)
    if found.explanation:
        yield Text("The CUDA error", "bold")
        for sentence in found.explanation:
            yield Padding(Text(clean(f"- {sentence}")), (0, 0, 0, 2))
        yield Text()
    yield from verdict_text(found.verdict)
    if found.suspect != "none":
        yield Text(f"suspect: {found.suspect}")


def examination_text(found: Examination) -> Iterator[RenderableType]:
    """A machine, its vLLM, what its compiled code holds, findings, and known faults of the pair."""
    yield Text("Machine", "bold")
    yield Padding(rows(_machine_rows(found)), (0, 0, 0, 2))
    if found.installation is not None:
        yield Text(f"\nCompiled code on {found.capability} (fat binaries, one per source file)", "bold")
        yield Padding(_extensions(found), (0, 0, 0, 2))
        yield Padding(_architectures(found), (1, 0, 0, 2))
    if found.findings:
        yield Text("\nFindings", "bold")
        for finding in found.findings:
            text = Text(f"{finding.level}: ", LEVELS[finding.level])
            text.append(clean(finding.what) + (f"; {clean(finding.do)}" if finding.do else ""), "default")
            yield Padding(text, (0, 0, 0, 2))
    yield from known_bad_text(found.known_bad, f"on {found.capability}", found.dated)


def _machine_rows(found: Examination) -> Iterator[tuple[str, str]]:
    machine = found.machine
    for gpu in machine.gpus:
        memory = "memory not told" if gpu.memory_bytes is None else size(gpu.memory_bytes)
        kind = "shared with the processor" if gpu.unified else "its own"
        yield "GPU", f"{gpu.name}, capability {gpu.capability}, {memory}, {kind}"
    if not machine.gpus:
        yield "GPU", "none"
    if machine.driver or machine.cuda:
        yield "driver", f"{machine.driver or 'version unknown'}, CUDA {machine.cuda or 'unknown'}"
    memory = "unknown" if machine.memory_bytes is None else size(machine.memory_bytes)
    free = "" if machine.available_bytes is None else f", {size(machine.available_bytes)} available"
    swap = "" if machine.swap_bytes is None else f", swap {size(machine.swap_bytes)}"
    yield "memory", f"{memory}{free}{swap}, {machine.architecture}"
    yield "judged for", f"{found.capability} ({found.because})"
    if found.installation is not None:
        yield "vLLM", f"{found.installation.version or 'version unknown'} in {found.installation.folder}"
        others = [f"{name} {version}" for name, version in found.installation.versions.items() if name != "vllm"]
        yield "beside it", ", ".join(others) or "none of the packages that decide over kernels"
    for note in machine.notes:
        yield "note", note


def _extensions(found: Examination) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("extension", "native", "family", "same x", "PTX", "none"):
        grid.add_column(column, justify="left" if column == "extension" else "right", no_wrap=True)
    assert found.installation is not None
    for extension in found.installation.cuda:
        fits = extension.fit(found.capability)
        counts = [str(fits.get(name, "")) for name in ("native", "family", "compatible", "ptx", "none")]
        name = extension.path.removeprefix(found.installation.folder).lstrip("/").partition(".abi3")[0]
        grid.add_row(clean(name), *counts)
    return grid


def _architectures(found: Examination) -> Table:
    """What the extensions with kernels of quantized layers hold, whatever the chip."""
    from sparkquant.marlin.installation import core

    cuda = found.installation.cuda if found.installation is not None else ()
    held = ((Path(e.path).name.partition(".")[0], e) for e in cuda if core(e.path))
    return rows((name, e.problem or " ".join(code.name for code in e.codes)) for name, e in held)


def known_bad_text(known: Iterable[KnownBad], where: str, dated: str) -> Iterator[RenderableType]:
    """Rows of the table, with their sources."""
    known = list(known)
    if not known:
        return
    yield Text(f"\nKnown faults {where} (table of {dated}; a row belongs to the builds that it was seen on)", "bold")
    for row in known:
        kinds = [row.scheme or "any scheme", {True: "experts", False: "dense", None: ""}[row.experts]]
        kernel = ", ".join(row.families) or "any kernel"
        yield Padding(Text(f"{row.id} ({row.status}; {' '.join(filter(None, kinds))}; {kernel})"), (0, 0, 0, 2))
        yield Padding(Text(clean(f"{row.what}. Do: {row.do}. Source: {row.source}"), "dim"), (0, 0, 0, 4))
