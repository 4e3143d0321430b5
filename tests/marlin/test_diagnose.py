"""`sparkquant diagnose`: from a log alone, from a checkpoint, and against servers that are broken in known ways."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkquant.errors import EnvironmentMissing, UsageError
from sparkquant.marlin.diagnosis import diagnose
from sparkquant.marlin.suspicion import Suspect
from sparkquant.marlin.symptom import Kind, classify, examine_server
from sparkquant.marlin.verdict import EXITS, Outcome
from tests.cli.running import ROOT, environment, invoke
from tests.marlin.synthetic import LOGS, NEW, OLD

MARLIN = "Using MarlinLinearKernel for CompressedTensorsWNA16"


@pytest.fixture(scope="module")
def quantized(result: Path) -> Path:
    """A sound checkpoint."""
    return result


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """`serve("garbage")` -> the URL of a process that answers so."""
    running: list[subprocess.Popen[bytes]] = []

    def start(mode: str) -> str:
        file = tmp_path / f"port-{len(running)}"
        command = [sys.executable, "-m", "tests.marlin.answering", mode, str(file)]
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment()))
        until = time.monotonic() + 30
        while not file.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        return f"http://127.0.0.1:{file.read_text()}"

    yield start
    for process in running:
        process.kill()
        process.wait()


def log_file(folder: Path, text: str) -> Path:
    file = folder / "server.log"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "outcome", "code"),
    [
        ("marlin-mtp", "pass", 0),
        ("mixed-nvfp4-fp8", "pass", 0),
        ("auto-machete", "inconclusive", 7),
        ("marlin-eager", "environment-fault", 5),
        ("marlin-mtp-killed-in-graph-capture", "inconclusive", 7),
    ],
)
def test_a_log_alone_is_enough(name: str, outcome: str, code: int) -> None:
    log = LOGS / f"vllm-0.25.1-h200-{name}.log"
    text = invoke("diagnose", "--server-log", log)
    assert text.exit_code == code
    assert f"{outcome}: " in text.stdout
    assert "next: " in text.stdout
    found = invoke("diagnose", "--server-log", log, "--json")
    assert found.exit_code == code
    document = json.loads(found.stdout)
    assert document["outcome"] == document["verdict"]["outcome"] == outcome
    assert document["log"]["version"] == "0.25.1"


def test_every_outcome_has_the_exit_code_of_the_table(tmp_path: Path) -> None:
    runs = {
        Outcome.KERNEL_FAULT: OLD.run("Using TritonW4A16LinearKernel for CompressedTensorsWNA16", linear="marlin"),
        Outcome.EXECUTION_FAULT: "".join(
            [
                *OLD.start(MARLIN)[:4],
                *OLD.crash("RuntimeError: CUDA error: operation not permitted when stream is capturing"),
            ]
        ),
        Outcome.CHECKPOINT_FAULT: OLD.run(MARLIN, "Parameter mtp.fc.weight not found in params_dict, skip loading"),
        Outcome.ENVIRONMENT_FAULT: OLD.run(MARLIN, "Unknown vLLM environment variable detected: VLLM_FOO"),
        Outcome.INCONCLUSIVE: "".join(OLD.start(MARLIN)),
        Outcome.PASS: OLD.run(MARLIN),
    }
    assert set(runs) == set(Outcome)
    for outcome, text in runs.items():
        result = invoke("diagnose", "--server-log", log_file(tmp_path, text), "--json")
        assert json.loads(result.stdout)["outcome"] == outcome
        assert result.exit_code == EXITS[outcome]


def test_a_log_from_another_machine_may_be_hostile(tmp_path: Path) -> None:
    text = OLD.run(MARLIN).replace("CKPT/m", "CKPT/\x1b[2J\u202em")
    result = invoke("diagnose", "--server-log", log_file(tmp_path, text))
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout
    long = "x" * 300_000 + "\n" + OLD.run(MARLIN)
    assert invoke("diagnose", "--server-log", log_file(tmp_path, long)).exit_code == 0


def test_nothing_to_diagnose_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to diagnose"):
        diagnose()
    for arguments in ([], ["--server-log", tmp_path / "none"], ["--answer", tmp_path / "none"], [tmp_path / "none"]):
        result = invoke("diagnose", *arguments)
        assert result.exit_code in (2, 3)
        assert "hint: " in result.stderr
        assert "Traceback" not in result.stderr
    with pytest.raises(UsageError, match="capability"):
        diagnose(server_log=log_file(tmp_path, ""), capability="blackwell")


def crashed(
    dialect: Any = OLD, kernel: str = "Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"
) -> str:
    frames = (("/opt/vllm/model_executor/layers/layernorm.py", 21, "rms_norm"),)
    error = "torch.AcceleratorError: CUDA error: an illegal instruction was encountered"
    return "".join([*dialect.start(kernel), dialect.served(), *dialect.crash(error, *frames)])


def test_a_cuda_error_in_an_innocent_operation_is_explained(tmp_path: Path) -> None:
    found = diagnose(server_log=log_file(tmp_path, crashed(NEW)), capability="12.1")
    assert found.verdict.outcome is Outcome.KERNEL_FAULT
    assert found.suspect is Suspect.KERNEL
    told = " ".join(found.explanation)
    for part in (
        "asynchronous",
        "rms_norm",
        "CUDA_LAUNCH_BLOCKING=1",
        "--enforce-eager",
        "CutlassFP8",
        "vllm#41215",
        "Xid",
    ):
        assert part in told
    assert found.verdict.next.startswith("CUDA_LAUNCH_BLOCKING=1 vllm serve CKPT/m")
    shown = invoke("diagnose", "--server-log", tmp_path / "server.log", "--capability", "12.1")
    assert shown.exit_code == 4
    assert "The CUDA error" in shown.stdout


@pytest.mark.parametrize(
    ("text", "capability", "says"),
    [
        (crashed(), None, "name it with --capability"),
        (crashed(), "9.0", "concerns 12.1; this is 9.0"),
        (crashed().replace("0.25.1", "0.24.0"), "12.1", "versions before 0.25 can trap"),
        (crashed(kernel=MARLIN), "12.1", "no FP8 GEMM is named in this log"),
    ],
)
def test_whether_fp8_can_trap(tmp_path: Path, text: str, capability: str | None, says: str) -> None:
    found = diagnose(server_log=log_file(tmp_path, text), capability=capability)
    assert any(says in sentence for sentence in found.explanation)


def test_no_explanation_without_a_cuda_error(tmp_path: Path) -> None:
    assert diagnose(server_log=log_file(tmp_path, OLD.run(MARLIN)), capability="12.1").explanation == ()


def test_rows_of_the_table_for_the_kernels_that_ran(tmp_path: Path) -> None:
    log = log_file(tmp_path, OLD.run("Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"))
    assert [row.id for row in diagnose(server_log=log, capability="12.1").known] == ["fp8-published-wheel"]
    assert diagnose(server_log=log, capability="9.0").known == ()
    assert diagnose(server_log=log).known == ()


def test_a_sound_checkpoint_with_a_good_log(quantized: Path, tmp_path: Path) -> None:
    found = diagnose(quantized, server_log=log_file(tmp_path, OLD.run(MARLIN)), capability="12.1")
    assert found.verdict.outcome is Outcome.PASS
    assert any(item.source == "static" and "none fails" in item.what for item in found.verdict.evidence)


def test_a_kernel_that_the_rules_did_not_predict_is_evidence(quantized: Path, tmp_path: Path) -> None:
    other = OLD.run("Using MacheteLinearKernel for CompressedTensorsWNA16")
    found = diagnose(quantized, server_log=log_file(tmp_path, other), capability="12.1")
    assert any("predict marlin, and machete ran" in item.what for item in found.verdict.evidence)
    absent = OLD.run("Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8")
    found = diagnose(quantized, server_log=log_file(tmp_path, absent), capability="12.1")
    assert any("no line of the log names their kernel" in item.what for item in found.verdict.evidence)


def test_a_model_of_the_hub(quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--someone--small"
    shutil.copytree(quantized, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = diagnose("someone/small")
    assert found.subject == "someone/small"
    assert any("static checks pass" in item.what for item in found.verdict.evidence)
    other = invoke("diagnose", "someone/other")
    assert other.exit_code == 5
    assert "HF_HUB_OFFLINE" in other.stderr


def test_a_broken_checkpoint_is_the_suspect(quantized: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in quantized.iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (broken / "config.json").write_text(json.dumps(config))
    result = invoke("diagnose", broken, "--json")
    assert result.exit_code == 4
    document = json.loads(result.stdout)
    assert (document["outcome"], document["suspect"]) == ("checkpoint-fault", "checkpoint")
    assert document["verdict"]["next"] == f"sparkquant verify {broken}"


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("sound", Kind.COHERENT),
        pytest.param("strict", Kind.COHERENT, marks=pytest.mark.slow),
        ("garbage", Kind.BROKEN),
        ("concurrent", Kind.CONCURRENT),
        pytest.param("unstable", Kind.UNSTABLE, marks=pytest.mark.slow),
        pytest.param("nan", Kind.BROKEN, marks=pytest.mark.slow),
        pytest.param("errors", Kind.SILENT, marks=pytest.mark.slow),
    ],
)
def test_symptoms_of_real_servers(serve: Callable[[str], str], mode: str, kind: Kind) -> None:
    found = examine_server(serve(mode))
    assert found.kind is kind, found
    assert (found.alone > 0) == (mode in ("garbage", "nan"))


def test_corruption_among_concurrent_requests_alone_is_a_kernel_fault(
    serve: Callable[[str], str], quantized: Path, tmp_path: Path
) -> None:
    log = log_file(tmp_path, "".join([*OLD.start(MARLIN), OLD.served()]))  # the server still runs
    found = diagnose(quantized, url=serve("concurrent"), server_log=log, capability="12.1")
    assert (found.verdict.outcome, found.suspect) == (Outcome.KERNEL_FAULT, Suspect.KERNEL)
    assert "right alone" in found.verdict.summary


@pytest.mark.slow
def test_garbage_from_a_sound_checkpoint_asks_for_a_control(
    serve: Callable[[str], str], quantized: Path, tmp_path: Path
) -> None:
    graphs = "".join([*OLD.start(MARLIN, eager=False), OLD.served()])
    found = diagnose(quantized, url=serve("garbage"), server_log=log_file(tmp_path, graphs))
    assert (found.verdict.outcome, found.suspect) == (Outcome.INCONCLUSIVE, Suspect.EXECUTION)
    assert "--enforce-eager" in found.verdict.next
    eager = "".join([*OLD.start(MARLIN), OLD.served()])
    found = diagnose(quantized, url=serve("garbage"), server_log=log_file(tmp_path, eager))
    assert (found.verdict.outcome, found.suspect) == (Outcome.INCONCLUSIVE, Suspect.KERNEL)
    assert found.verdict.next.endswith("--linear-backend triton")


@pytest.mark.slow
def test_a_sound_server_is_told_to_measure_quality(
    serve: Callable[[str], str], quantized: Path, tmp_path: Path
) -> None:
    log = log_file(tmp_path, "".join([*OLD.start(MARLIN), OLD.served()]))
    found = diagnose(quantized, url=serve("sound"), server_log=log)
    assert (found.verdict.outcome, found.suspect) == (Outcome.PASS, Suspect.QUALITY)
    assert "sparkquant evaluate" in found.verdict.next


@pytest.mark.slow
def test_a_url_alone_leaves_kernel_and_checkpoint_open(serve: Callable[[str], str]) -> None:
    found = diagnose(url=serve("sound"))
    assert found.verdict.outcome is Outcome.INCONCLUSIVE
    assert len(found.verdict.missing) == 2
    assert diagnose(url=serve("garbage")).verdict.missing == ("the checkpoint",)
    result = invoke("diagnose", "--url", serve("errors"))
    assert result.exit_code == 7
    assert "answers with errors" in result.stdout


def test_nobody_answers() -> None:
    with pytest.raises(EnvironmentMissing):
        diagnose(url="http://127.0.0.1:9")
    assert invoke("diagnose", "--url", "http://127.0.0.1:9").exit_code == 5


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The capital of France is Paris.", Kind.COHERENT),
        ("The capital of!!!!!!!!!!!!!!!!!!!!!!", Kind.BROKEN),
        ("a\ufffdb\ufffdc\ufffd and more text", Kind.BROKEN),
        ("", Kind.BROKEN),
    ],
)
def test_a_text_is_structurally_broken_or_not(tmp_path: Path, text: str, kind: Kind) -> None:
    assert classify(text).kind is kind
    file = tmp_path / "answer.txt"
    file.write_text(text, encoding="utf-8")
    assert diagnose(answer=file).symptom == classify(text)
