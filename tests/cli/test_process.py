"""What only a real process shows: exit codes, signals, closed pipes, terminals, and what a cold start costs."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparkquant.cli import VERBS
from tests.cli.running import CALL, DEMO, command, environment, invoke, spawn


def loaded(*arguments: object) -> tuple[set[str], int]:
    """The modules and the peak memory in bytes of one fresh process that ran a verb."""
    # Read inside: the peak that wait4 reports counts the test process that was forked, too.
    script = f"""
import json, sys
try:
    {CALL}
except SystemExit as end:
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    sys.stderr.write(json.dumps([end.code, sorted(sys.modules), int(peak) * 1024]))
"""
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    code, modules, peak = json.loads(result.stderr)
    assert code == 0
    return set(modules), peak


def test_a_cold_plan_of_a_27b_pays_for_nothing_but_itself(big: Path) -> None:
    """Its seconds are measured by `python -m benchmarks cold_plan`."""
    modules, peak = loaded("plan", big)
    assert peak < 150_000_000
    of = "sparkquant.layouts."
    listed = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}  # by the recipe
    assert {
        name.removeprefix(of) for name in modules if name.startswith(of) and not name.startswith(of + "_")
    } == listed
    verbs = {f"sparkquant.cli.{module}" for module, _ in VERBS.values()}
    assert verbs & modules == {"sparkquant.cli.verbs", "sparkquant.cli.calibration"}  # the latter for its options


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["plan", "BIG"],
        ["plan", "BIG", "--json"],
        ["recipes", "ls"],
        ["recipes", "schema"],
        ["diff", "qwen-hybrid-fp8", "qwen-hybrid-w4a16"],
        ["diff", "BIG", "BIG"],
        ["verify", "BIG", "--headers"],
        ["quantize", "--help"],
    ],
)
def test_reading_verbs_never_import_torch(arguments: list[str], big: Path) -> None:
    heavy = "{'torch', 'numba', 'numpy', 'transformers', 'safetensors', 'compressed_tensors', 'huggingface_hub'}"
    script = f"""
import sys
try:
    {CALL}
except SystemExit as end:
    sys.stderr.write(f"code {{end.code}} loaded {{sorted({heavy} & set(sys.modules))}}")
"""
    arguments = [str(big) if word == "BIG" else word for word in arguments]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert result.stderr == "code 0 loaded []"


def test_exit_codes(tmp_path: Path) -> None:
    assert spawn("--version").returncode == 0
    assert spawn().returncode == 2
    assert spawn("nothing").returncode == 2
    assert spawn("plan", DEMO, "-r", "nothing").returncode == 2
    assert spawn("plan", tmp_path).returncode == 3
    offline = spawn("plan", "owner/name")
    assert offline.returncode == 5
    assert offline.stderr.startswith("error: ")


def test_a_bug_is_exit_1_with_a_traceback() -> None:
    script = f"import sparkquant.planning as p\np.plan = None\n{CALL}"
    result = subprocess.run(
        [sys.executable, "-c", script, "plan", str(DEMO)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stdout == ""


def test_an_interrupt_that_a_library_turns_into_another_error_is_still_one() -> None:
    script = f"""
import os, signal, time
import sparkquant.planning
def swallow(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        raise RecursionError("half-imported") from None
sparkquant.planning.plan = swallow
{CALL}"""
    result = subprocess.run(
        [sys.executable, "-c", script, "plan", str(DEMO)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "error: interrupted\n")


def interrupted(out: Path) -> subprocess.CompletedProcess[str]:
    """`quantize` into many small shards, stopped by Ctrl-C after the third."""
    arguments = command("quantize", DEMO, "--method", "mse", "-o", out, "--max-shard-size", "100KB")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    with process:
        partial = out.with_name(f"{out.name}.partial")
        while process.poll() is None and len(list(partial.glob("*.safetensors"))) < 4:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def test_interrupt_is_130_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped = interrupted(out)
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stdout == ""
    assert "interrupted\nhint: the same command goes on where it stopped" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not out.exists()
    other = invoke("quantize", DEMO, "-o", out, "-r", "qwen-hybrid-fp8")
    assert (other.exit_code, other.stdout) == (2, "")
    assert "--restart" in other.stderr
    again = subprocess.run(stopped.args, capture_output=True, text=True, env=environment(), check=False)
    assert again.returncode == 0, again.stderr
    assert "note: resuming: " in again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert invoke("verify", out, "--source", DEMO).exit_code == 0


@pytest.mark.parametrize("arguments", [["plan", "BIG", "--json"], ["plan", "BIG"], ["recipes", "ls"], ["--help"]])
def test_a_closed_pipe_is_silent(arguments: list[str], big: Path) -> None:
    arguments = [str(big) if word == "BIG" else word for word in arguments]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            command(*arguments), stdout=writing, stderr=subprocess.PIPE, env=environment(), check=False
        )
    finally:
        os.close(writing)
    assert result.stderr == b""
    assert result.returncode in (1, 141)  # 1 comes from the help text, which the option parser prints itself


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_the_work_needs_no_stderr(stderr: str, tmp_path: Path) -> None:
    line = f"{shlex.join(command('quantize', DEMO, '--method', 'rtn', '-o', tmp_path / 'out'))} {stderr}"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment(), check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\nverified before it was put in place: ok" in result.stdout
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(("stdout", "code"), [(">&-", 0), (">/dev/full", 6)])
def test_a_stdout_that_takes_nothing_is_no_bug(stdout: str, code: int) -> None:
    result = subprocess.run(
        ["sh", "-c", f"{shlex.join(command('plan', DEMO))} {stdout}"],
        stderr=subprocess.PIPE, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert ("no space left" in result.stderr) == (code == 6)


def test_a_reader_that_stops_early_is_fine(big: Path) -> None:
    with subprocess.Popen(
        command("plan", big, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"{\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def on_terminal(*arguments: object, env: dict[str, str] | None = None) -> tuple[str, int]:
    """Everything that a process writes to a terminal of 100 columns."""
    parent, child = pty.openpty()
    settings = environment({"TERM": "xterm-256color", "COLUMNS": "100", **(env or {})})
    with subprocess.Popen(command(*arguments), stdin=child, stdout=child, stderr=child, env=settings) as process:
        os.close(child)
        text = b""
        while True:
            try:
                piece = os.read(parent, 65536)
            except OSError:
                break
            if not piece:
                break
            text += piece
    os.close(parent)
    return text.decode(), process.returncode


def test_colours_on_a_terminal_only() -> None:
    assert "\x1b[" in on_terminal("plan", DEMO)[0]
    assert "\x1b" not in on_terminal("plan", DEMO, env={"NO_COLOR": "1"})[0]
    assert "\x1b" not in on_terminal("plan", DEMO, env={"TERM": "dumb"})[0]
    assert "\x1b" not in spawn("plan", DEMO).stdout
    assert "\x1b" not in spawn("plan", "absent").stderr


def test_progress_on_a_terminal_leaves_the_summary(tmp_path: Path) -> None:
    text, code = on_terminal("quantize", DEMO, "--method", "mse", "-o", tmp_path / "out")
    assert code == 0, text
    assert "vllm serve" in text
    assert (tmp_path / "out" / "config.json").is_file()


def test_names_that_the_locale_cannot_show_are_escaped(tmp_path: Path) -> None:
    result = spawn("plan", tmp_path / "mögel\udcff", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert result.returncode == 3
    assert "\\xf6" in result.stderr
    assert "Traceback" not in result.stderr
