"""Logs as they come: packed, redirected, cut, prefixed by what runs the server, of several processes."""

from __future__ import annotations

import gzip
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkquant.errors import UsageError
from sparkquant.marlin.log import MAX_PROCESSES, read_log, read_log_file
from sparkquant.marlin.log_verdict import judge_log
from sparkquant.marlin.server_log import Engine, Model, ServerLog
from sparkquant.marlin.verdict import Outcome
from tests.cli.running import invoke
from tests.marlin.synthetic import GOOD, NEW, OLD, recorded

MARLIN = "Using MarlinLinearKernel for CompressedTensorsWNA16"
MACHETE = "Using MacheteLinearKernel for CompressedTensorsWNA16"
RUN = OLD.run(MARLIN)
IMPORT = "".join([*OLD.start(MARLIN)[:3], "Traceback (most recent call last):\n",
                  '  File "/opt/vllm/entrypoints/cli/main.py", line 3, in <module>\n', "    import vllm._C\n",
                  "ImportError: libcudart.so.13: cannot open shared object file\n"])  # fmt: skip
PREFIXES: dict[str, str] = {
    "compose": "vllm-1  | ",
    "docker": "2026-11-30T21:11:10.123456789Z ",
    "kubernetes": "2026-11-30T21:11:10.123456789+01:00 stdout F ",
    "journald": "Nov 30 21:11:10 spark-01 vllm[4711]: ",
    "journald of compose": "Nov  3 21:11:10 spark-01 docker[12]: vllm-1  | ",
}


def outcome(log: ServerLog) -> Outcome:
    return judge_log(log).outcome


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_what_runs_the_server_may_write_before_every_line(prefix: str) -> None:
    for text in (RUN, NEW.run(MARLIN), IMPORT, *map(recorded, GOOD)):
        plain = read_log(text.splitlines(keepends=True))
        found = read_log([prefix + line for line in text.splitlines(keepends=True)])
        assert (outcome(found), found.missing) == (outcome(plain), plain.missing)
        assert [k.kernel for k in found.kernels] == [k.kernel for k in plain.kernels]
        assert [(f.id, f.fatal, f.at) for f in found.faults] == [(f.id, f.fatal, f.at) for f in plain.faults]


PACKED: dict[str, Callable[[str], bytes]] = {
    "utf-8": str.encode,
    "with a mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "windows": lambda text: text.replace("\n", "\r\n").encode(),
    "gzip": lambda text: gzip.compress(text.encode()),
    "coloured": lambda text: "".join(f"\x1b[36m{line}\x1b[0m\n" for line in text.splitlines()).encode(),
}


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_a_log_is_read_however_it_was_kept(packed: Callable[[str], bytes], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_bytes(packed(RUN))
    assert outcome(read_log_file(file)) is Outcome.PASS


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(RUN))
    writer.start()
    assert outcome(read_log_file(pipe)) is Outcome.PASS
    writer.join()


def test_what_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(random.Random(0).randbytes(4000))[:2000])
    wrong = tmp_path / "wrong.gz"
    wrong.write_bytes(b"\x1f\x8b" + bytes(50))
    for path in (cut, wrong, tmp_path, tmp_path / "none", f"{tmp_path}/a\0b"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_log_file(path)
    shown = invoke("diagnose", "--server-log", cut)
    assert shown.exit_code == 2
    assert "hint: " in shown.stderr


@pytest.mark.parametrize("size", [0, 1, 100, 200_000])
def test_bytes_of_anything_prove_nothing(size: int, tmp_path: Path) -> None:
    file = tmp_path / "core"
    for seed in range(5):
        file.write_bytes(b"\x7fELF" + random.Random(seed).randbytes(size))
        found = read_log_file(file)
        assert outcome(found) is Outcome.INCONCLUSIVE
        assert found.engine is Engine.UNKNOWN
    result = invoke("diagnose", "--server-log", file, "--json")
    assert result.exit_code == 7
    assert json.loads(result.stdout)["outcome"] == "inconclusive"
    assert "\x00" not in result.stdout


def test_a_run_among_bytes_of_anything_is_still_found(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_bytes(random.Random(1).randbytes(5000) + b"\n" + RUN.encode() + b"\n")
    assert outcome(read_log_file(file)) is Outcome.PASS


def test_no_cut_makes_a_fault_pass() -> None:
    """Wherever a log ends or begins: what ended in a fault, or ran on another kernel, is never proven right."""
    for text in (IMPORT, OLD.run(MACHETE, linear="marlin"), "".join([*OLD.start(MARLIN), OLD.served()])):
        for at in range(0, len(text), 37):
            for part in (text[:at], text[at:]):
                assert outcome(read_log(part.splitlines(keepends=True))) is not Outcome.PASS


def ranks(*told: list[str], lag: int = 2) -> list[str]:
    """Lines of several workers, a later one some lines behind."""
    found = []
    for moment in range(max(map(len, told)) + lag * len(told)):
        for rank, lines in enumerate(told):
            at = moment - lag * rank
            if 0 <= at < len(lines):
                found.append(f"(Worker_TP{rank} pid={100 + rank}) {lines[at]}")
    return found


def loading(kernel: str, gib: str, drafter: str = "") -> list[str]:
    return [
        OLD.line("Starting to load model CKPT/m...", file="gpu_model_runner.py"),
        OLD.line(kernel),
        *([OLD.line("Loading drafter model...", file="gpu_model_runner.py"), OLD.line(drafter)] if drafter else []),
        OLD.line(f"Model loading took {gib} GiB memory and 3.250000 seconds"),
        OLD.line(f"Available KV cache memory: {50 - float(gib):.2f} GiB"),
    ]


def served(*workers: list[str]) -> ServerLog:
    start = OLD.start(quantization="compressed-tensors")
    before = start[:2]
    after = [line for line in start[2:] if "KV cache size" in line or "Maximum" in line or "init engine" in line]
    return read_log([*before, *ranks(*workers), *after, OLD.served(), OLD.end()])


def test_workers_are_told_apart_though_their_lines_are_mixed() -> None:
    drafter = "Using MacheteLinearKernel for CompressedTensorsWNA16"
    found = served(loading(MARLIN, "6.5", drafter), loading(MARLIN, "7.25", drafter), loading(MARLIN, "6.5", drafter))
    assert [(k.family, k.model) for k in found.kernels] == [("marlin", Model.MAIN), ("machete", Model.DRAFTER)]
    assert found.load_gib == 7.25
    assert found.kv_cache_gib == 42.75
    assert outcome(found) is Outcome.PASS


def test_one_rank_with_another_kernel_is_enough() -> None:
    found = served(loading(MARLIN, "6.5"), loading(MACHETE, "6.5"))
    told = judge_log(found, wanted={"int": "marlin"})
    assert told.outcome is Outcome.KERNEL_FAULT
    assert "machete ran" in told.summary


def test_traces_of_several_workers_are_read_apart() -> None:
    """The same error on two ranks, line by line in turns: one fault, at its own frame."""
    frames = ("/opt/vllm/model_executor/layers/linear.py", 42, "apply"), ("/opt/torch/nn/functional.py", 7, "linear")
    crash = OLD.crash("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", *frames)
    alone = read_log([*OLD.start(MARLIN)[:3], *ranks(crash)])
    both = read_log([*OLD.start(MARLIN)[:3], *ranks(crash, crash, lag=1)])
    assert [(f.id, f.at, f.fatal) for f in both.faults] == [(f.id, f.at, f.fatal) for f in alone.faults]
    assert both.faults[0].at == "vllm/model_executor/layers/linear.py:42 in apply"
    assert outcome(both) is Outcome.ENVIRONMENT_FAULT


def test_a_log_of_very_many_processes_is_bounded() -> None:
    lines = [f"(Worker pid={pid}) {OLD.line('Starting to load model m...')}" for pid in range(2 * MAX_PROCESSES)]
    found = read_log([*OLD.start(MARLIN), *lines, OLD.served(), OLD.end()])
    assert found.lines == len(lines) + len(OLD.start(MARLIN)) + 2


@pytest.mark.parametrize(
    "version", ["0.11.0", "0.19.1", "0.99.3", "1.2.3", "0.25.2.dev17+g0123abc.d20261130", "nightly"]
)
def test_versions_whose_rules_were_not_read(version: str, tmp_path: Path) -> None:
    """They are read as far as they go, and nothing crashes."""
    file = tmp_path / "server.log"
    file.write_text(OLD.run(MARLIN, linear="marlin").replace("0.25.1", version))
    result = invoke("diagnose", "--server-log", file, "--json")
    document = json.loads(result.stdout)
    assert document["log"]["version"] == version
    assert [kernel["family"] for kernel in document["log"]["kernels"]] == ["marlin"]
    assert result.exit_code in (0, 7)
