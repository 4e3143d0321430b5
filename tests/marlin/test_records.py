"""The runs that were made for real (vLLM 0.25.1, one H200): every verdict follows again from its logs and numbers."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparkquant.marlin.bench_compare import compare
from sparkquant.marlin.bench_record import BenchRecord, load_record
from sparkquant.marlin.comparing import Comparisons
from sparkquant.marlin.controls import Observation, Role
from sparkquant.marlin.decision import Case, decide
from sparkquant.marlin.dialect import Settings
from sparkquant.marlin.log import read_log
from sparkquant.marlin.log_verdict import judge_log
from sparkquant.marlin.metrics import Acceptance
from sparkquant.marlin.numbers import Divergence
from sparkquant.marlin.replies import Completion
from sparkquant.marlin.server_log import End, Phase, ServerLog
from sparkquant.marlin.thresholds import CONTROL_KL, Thresholds
from sparkquant.marlin.validation import run_json
from sparkquant.marlin.verdict import Outcome, Verdict
from tests.cli.running import invoke

RECORDS = Path(__file__).parent / "records"
FIRST = "nvfp4a16-mlp-first"
"""It was recorded as inconclusive: the reader took the engine's end, which we asked for, for a fault."""
VERDICTS = {
    "w4a16": "pass", "nvfp4-fp8": "pass", "nvfp4a16-mlp": "pass", FIRST: "inconclusive",
    "bad-scale": "checkpoint-fault", "bad-mtp": "checkpoint-fault", "bad-kernel": "kernel-fault",
}  # fmt: skip
LOGS = sorted(str(path.relative_to(RECORDS)) for path in RECORDS.glob("*/*.log.gz"))


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / name / "record.json").read_text(encoding="utf-8"))
    return found


def text(name: str) -> str:
    return gzip.decompress((RECORDS / name).read_bytes()).decode()


@cache
def log(name: str) -> ServerLog:
    return read_log(text(name).splitlines(keepends=True))


def observed(name: str, role: Role, run: dict[str, Any], answers: dict[str, Any]) -> Observation:
    """A run as it was seen, its answers and its log from their own files."""
    path = f"{name}/{role}.log.gz"
    given = {
        int(width): [Completion.model_validate({k: v for k, v in a.items() if k not in ("kind", "prompt_tokens")})
                     for a in several]
        for width, several in answers.items()
    }  # fmt: skip
    accepted = run["acceptance"]
    if accepted is not None:
        accepted = Acceptance.model_validate({k: v for k, v in accepted.items() if k != "length"})
    return Observation(
        role, Settings(tuple(run["arguments"]), run["environment"]), log(path) if path in LOGS else None,
        failed=run["failed"], answers=given, scoring=run["scoring"], acceptance=accepted, died=run["died"],
    )  # fmt: skip


def again(name: str) -> tuple[Verdict, dict[Role, Observation]]:
    """The verdict that the code gives today on what was seen then."""
    told, stored = record(name), json.loads(text(f"{name}/answers.json.gz"))
    if "reference" not in stored:  # it came from the record that the first run made
        stored["reference"] = json.loads(text("w4a16/answers.json.gz"))["reference"]
    seen = {Role(role): observed(name, Role(role), run, stored[role]) for role, run in told["runs"].items()}
    numbers = {
        kind: {Role(role): None if found is None else Divergence.model_validate(found)
               for role, found in told[kind].items()}
        for kind in ("to_controls", "to_reference")
    }  # fmt: skip
    schemes = [kernel["scheme"] for kernel in told["runs"]["candidate"]["kernels"]]
    case = Case(
        out=told["out"], seen=seen, compared=Comparisons(
            numbers["to_controls"], numbers["to_reference"], {}, tuple(told["reference_lengths"])
        ),
        thresholds=Thresholds.model_validate(told["thresholds"]),
        wanted={scheme: "marlin" for scheme in schemes if scheme != "fp8"}, expected=tuple(seen), drafts=True,
        capability=told["conditions"]["capability"], reference_acceptance=seen[Role.REFERENCE].acceptance,
    )  # fmt: skip
    return decide(case), seen


@pytest.mark.parametrize("name", VERDICTS)
def test_every_verdict_follows_again(name: str) -> None:
    told = record(name)
    assert told["verdict"]["outcome"] == VERDICTS[name]
    found, seen = again(name)
    if name == FIRST:
        assert found.outcome is Outcome.PASS
        assert told["verdict"]["missing"] == ["why the engine ended"]
        return
    assert found.model_dump(mode="json") == {k: v for k, v in told["verdict"].items() if k != "exit_code"}
    for role, run in seen.items():
        shown = json.loads(json.dumps(run_json(run)))
        unlike = {key for key, value in told["runs"][str(role)].items() if shown[key] != value}
        # Kept with their records alone: what a log does not say.
        assert unlike <= {"version", "start_seconds", "acceptance_by_kind", "corrupted_requests", "preemptions"}, role


@pytest.mark.parametrize("name", VERDICTS)
def test_a_record_states_where_it_was_measured(name: str) -> None:
    told = record(name)
    assert told["conditions"]["capability"] == "9.0"
    assert told["conditions"]["version"] == "0.25.1"
    assert "measured on capability 9.0: says nothing of a GB10" in told["notes"]


@pytest.mark.parametrize("name", LOGS)
def test_every_server_ended_in_order(name: str) -> None:
    found = log(name)
    assert (found.version, found.complete, found.end, found.faults) == ("0.25.1", True, End.ORDERLY, ())
    assert found.load_gib is not None
    assert found.kv_cache_tokens is not None
    # Machete is the control, and was forced once.
    quantized = [kernel.family for kernel in found.kernels if kernel.scheme != "fp8"]
    other = name.startswith("bad-kernel/") or (name.endswith("/backend.log.gz") and not name.startswith("atomic/"))
    reference = name.endswith("/reference.log.gz")
    assert quantized == ([] if reference else ["machete"] if other else ["marlin"])


DYING = [name for name in LOGS if "EngineDeadError" in text(name)]


@pytest.mark.parametrize("name", DYING)
def test_the_end_that_was_asked_for_is_no_fault(name: str) -> None:
    """vLLM's client may still wait for the engine that the same signal ended."""
    lines = text(name).splitlines(keepends=True)
    assert judge_log(log(name)).outcome is not Outcome.ENVIRONMENT_FAULT
    assert log(name).end is End.ORDERLY
    # Without the signal to the server, or after the engine had died by itself, it is one.
    unasked = read_log(line for line in lines if "API server: shutdown triggered" not in line)
    assert unasked.end is End.FAILED
    assert unasked.fatal[0].phase is Phase.SHUTDOWN
    start = next(i for i, line in enumerate(lines) if "[shutdown]" in line)
    dead = [line for line in lines if "async_llm.py" in line]
    before = read_log([*lines[:start], *dead, *lines[start:]])
    assert before.fatal[0].phase is Phase.SERVING
    assert judge_log(before).missing == ("why the engine ended",)


def test_the_first_log_of_the_mlp_only_run_passes_by_itself() -> None:
    assert f"{FIRST}/candidate.log.gz" in DYING
    assert judge_log(log(f"{FIRST}/candidate.log.gz"), wanted={"nvfp4": "marlin"}).outcome is Outcome.PASS


def test_a_kernel_that_faults_during_the_shutdown_still_counts() -> None:
    lines = text(DYING[0]).splitlines(keepends=True)
    stop = next(i for i, line in enumerate(lines) if "exiting busy loop" in line)
    header = re.match(r".*?\[core\.py:\d+\] ", lines[stop])
    assert header is not None
    error = header[0].replace("INFO", "ERROR") + "torch.AcceleratorError: CUDA error: an illegal instruction was"
    found = read_log([*lines[:stop], f"{error} encountered\n", *lines[stop:]])
    assert judge_log(found).outcome is Outcome.KERNEL_FAULT
    other = read_log([*lines[:stop], header[0].replace("INFO", "ERROR") + "ValueError: closed\n", *lines[stop:]])
    assert other.end is End.ORDERLY
    assert not other.faults[0].fatal


def test_what_sabotage_changed_is_what_is_named() -> None:
    scale, drafts, kernel = (record(name) for name in ("bad-scale", "bad-mtp", "bad-kernel"))
    good = record("w4a16")["to_reference"]["candidate"]["kl"]
    assert scale["to_reference"]["candidate"]["kl"] > 5 * good
    assert scale["to_controls"]["backend"]["kl"] < 0.001
    assert drafts["to_reference"]["candidate"]["kl"] == pytest.approx(good, rel=0.01)
    assert drafts["runs"]["drafting"]["acceptance"]["rates"][0] < 0.01
    assert drafts["runs"]["reference"]["acceptance"]["rates"][0] > 0.9
    assert kernel["to_reference"]["candidate"]["kl"] == pytest.approx(good, rel=0.01)
    assert "machete ran" in kernel["verdict"]["summary"]


def test_the_default_between_controls_is_far_from_noise_and_from_a_fault() -> None:
    numbers = [found["kl"] for name in VERDICTS for found in record(name)["to_controls"].values() if found is not None]
    noise = max(numbers)
    assert 10 * noise < CONTROL_KL < record("bad-scale")["to_reference"]["candidate"]["kl"] / 10
    assert record("w4a16")["to_controls"]["repeat"]["kl"] == 0


def test_atomic_adds_make_equal_runs_differ() -> None:
    told = record("atomic")
    assert "acts on 4 x mlp.down [1024, 2560]" in told["preflight"]
    on, off, across = told["on_on"], told["off_off"], told["on_off"]
    assert off["bit_equal"] == off["positions"] == 9120
    assert (off["kl"]["kl"], off["answers"]["equal"]) == (0, 16)
    assert on["bit_equal"] == across["bit_equal"] == 0
    assert on["answers"]["equal"] < 16
    assert 0 < on["kl"]["kl"] < CONTROL_KL / 10
    # Two runs with the variable differ as much as one with and one without: it adds noise, and nothing else.
    assert across["kl"]["kl"] == pytest.approx(on["kl"]["kl"], rel=0.1)
    # hybrid-32m has no such layer, and there the variable changes nothing at all.
    assert record("w4a16")["to_controls"]["atomic-off"]["kl"] == 0


@pytest.mark.parametrize("k", [0, 2])
def test_a_benchmark_is_complete(k: int) -> None:
    path = RECORDS / f"bench-k{k}" / "record.json"
    found = load_record(path)
    assert isinstance(found, BenchRecord)
    assert found.as_json() == json.loads(path.read_text(encoding="utf-8"))
    assert found.speculation.k == k
    assert found.kv_cache_tokens == log(f"bench-k{k}/server.log.gz").kv_cache_tokens
    assert list(found.warnings())


def test_the_two_benchmarks_compare() -> None:
    paths = [RECORDS / f"bench-k{k}" / "record.json" for k in (0, 2)]
    found = compare(*map(load_record, paths))
    assert len(found.rows) == 8
    assert set(found.differing) == {"arguments", "speculation", "kv_cache_tokens"}
    assert any("compare steps a second" in warning for warning in found.warnings)
    shown = invoke("bench", "compare", *paths)
    assert shown.exit_code == 0
    assert "decode edit, tok/s" in shown.stdout


README = (RECORDS.parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in VERDICTS if name != FIRST])
def test_the_readme_states_what_was_measured(name: str) -> None:
    told = record(name)
    (row,) = re.findall(rf"^\| `{name}`[^|]*\|(.*)$", README, re.MULTILINE)
    verdict, kernel, kl, drafts, _ = (cell.strip() for cell in row.strip("|").split("|"))
    assert verdict == told["verdict"]["outcome"]
    ran = {found["kernel"].removesuffix("LinearKernel") for found in told["runs"]["candidate"]["kernels"]}
    assert all(any(short in long for long in ran) for short in re.findall("Marlin|Machete|Cutlass", kernel))
    assert kl == f"{told['to_reference']['candidate']['kl']:.4f}"
    assert drafts == ", ".join(f"{rate:.1%}" for rate in told["runs"]["drafting"]["acceptance"]["rates"])


@pytest.mark.parametrize("k", [0, 2])
def test_the_readme_states_what_the_benchmarks_gave(k: int) -> None:
    found = load_record(RECORDS / f"bench-k{k}" / "record.json")
    names = ("| one stream, ", "| 2, 4, 8 streams", "| prefill", "| first token", "| KV cache |")
    rows = [row for row in re.findall(r"^\| .*$", README, re.MULTILINE) if row.startswith(names)]
    shown = [row.strip("|").split("|")[1 + k // 2].strip() for row in rows]
    spread = [f"{m.median:,.0f} ({min(m.rounds):,.0f} to {max(m.rounds):,.0f})"
              for m in (found.decode["edit"], found.decode["fresh"], found.prefill)]  # fmt: skip
    together = ", ".join(f"{found.aggregate[width].median:,.0f}" for width in ("2", "4", "8"))
    first = f"{1000 * found.first_token.median:.1f} ms"
    assert shown == [*spread[:2], together, spread[2], first, f"{found.kv_cache_tokens:,} tokens"]


def test_nothing_of_a_machine_is_kept() -> None:
    for path in sorted(RECORDS.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            told = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
            assert not re.search(r"/(?:root|home|work|opt|tmp|mnt)/", told), path
    assert sum(path.stat().st_size for path in RECORDS.rglob("*") if path.is_file()) < 1_500_000
