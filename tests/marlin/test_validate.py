"""The whole gate against a server process that is broken in a known way: the verdict names what is."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from sparkquant.errors import EnvironmentMissing, UsageError
from sparkquant.marlin.controls import Role
from sparkquant.marlin.log import read_log_file
from sparkquant.marlin.log_verdict import judge_log
from sparkquant.marlin.server import Launch, Server
from sparkquant.marlin.verdict import Outcome
from tests.checkpoints import build
from tests.cli.running import invoke
from tests.marlin.serving import MARK, SOURCE, VLLM, gate, marked, rows_of_ids, variables


def verdict(found: object) -> str:
    return str(found.verdict.outcome)  # type: ignore[attr-defined]


def test_a_sound_result_passes_with_all_runs(result: Path, tmp_path: Path) -> None:
    record = tmp_path / "reference.json.gz"
    with variables(**{MARK: str(tmp_path)}):
        found = gate(result, tmp_path / "logs", save_reference=record)
        assert marked(str(tmp_path)) == []
    assert verdict(found) == "pass", found.verdict
    assert set(found.seen) == set(Role)
    assert "VLLM_MARLIN_USE_ATOMIC_ADD=1 changes nothing here" in found.preflight.atomic_add
    document = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert document["conditions"]["capability"] == "12.1"
    assert document["conditions"]["version"] == "0.25.1"
    runs = document["runs"]
    assert runs["candidate"]["environment"] == {"VLLM_MARLIN_USE_ATOMIC_ADD": "1"}
    assert runs["atomic-off"]["environment"] == {"VLLM_MARLIN_USE_ATOMIC_ADD": "0"}
    assert runs["eager"]["eager"] is True
    assert runs["candidate"]["graphs"] is True
    assert [kernel["kernel"] for kernel in runs["backend"]["kernels"]] == ["TritonW4A16LinearKernel"]
    assert list(runs["concurrent"]["answers"]) == ["8"]
    assert runs["drafting"]["acceptance"]["rates"][0] > 0.7
    assert runs["candidate"]["kv_cache_tokens"] == 12_441_786
    assert document["to_reference"]["candidate"]["kl"] < 0.01
    for role in Role:
        assert "Initializing a V1 LLM engine" in (tmp_path / "logs" / f"{role}.log").read_text()
    # The same reference, from its record.
    again = gate(result, tmp_path / "again", reference=None, reference_record=record, quick=True)
    assert verdict(again) == "pass", again.verdict
    assert again.reference == "record"
    numbers = [told["to_reference"]["candidate"]["kl"] for told in (again.as_json(), document)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-6)
    other = {"reference": None, "reference_record": record, "rows": 3}
    with pytest.raises(UsageError, match="other prompts"):
        gate(result, tmp_path / "other", **other)


QUICK = {
    "kernel": "kernel-fault",
    "checkpoint": "checkpoint-fault",
    "concurrent": "kernel-fault",
    "nan": "checkpoint-fault",
    "crash": "kernel-fault",
    "import": "environment-fault",
    "machete": "kernel-fault",
    "fallback": "kernel-fault",
    "drafts": "checkpoint-fault",
    "short-log": "inconclusive",
    "no-graphs-log": "inconclusive",
    "reference": "inconclusive",
    "utf8": "checkpoint-fault",
    "empty": "checkpoint-fault",
    "bangs": "checkpoint-fault",
}
OFTEN = ("concurrent", "drafts", "import", "short-log")
"""One of each outcome; test_records.py has real runs of the others, too."""


@pytest.mark.parametrize(
    "fault", [fault if fault in OFTEN else pytest.param(fault, marks=pytest.mark.slow) for fault in QUICK]
)
def test_each_fault_gets_its_verdict(fault: str, result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", fault, quick=True, data=rows_of_ids(tmp_path))
    assert verdict(found) == QUICK[fault], found.verdict
    assert found.verdict.next
    assert not found.ok
    assert found.verdict.missing or verdict(found) != "inconclusive"


@pytest.mark.slow
def test_graphs_are_told_from_kernels_by_eager(result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", "graphs")
    assert verdict(found) == "execution-fault", found.verdict
    assert "eager is right" in found.verdict.summary
    assert any(item.where == "eager" and item.what.endswith("sound") for item in found.verdict.evidence)


@pytest.mark.slow
def test_atomic_adds_are_told_from_the_kernel(result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", "atomic")
    assert verdict(found) == "kernel-fault", found.verdict


@pytest.mark.slow
def test_a_server_that_never_answers_is_inconclusive_and_ended(result: Path, tmp_path: Path) -> None:
    with variables(**{MARK: str(tmp_path)}):
        found = gate(result, tmp_path / "logs", "hang", quick=True, start_limit=3.0)
        assert marked(str(tmp_path)) == []
    assert verdict(found) == "inconclusive"
    assert "did not answer within 3 s" in found.verdict.summary


@pytest.mark.slow
def test_without_a_reference_nothing_passes(result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", reference=None, quick=True)
    assert verdict(found) == "inconclusive"
    assert "a reference to compare with" in found.verdict.missing
    assert "--reference SRC" in found.verdict.next


def test_a_red_static_gate_starts_nothing(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(result, out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head"]
    (out / "config.json").write_text(json.dumps(config))
    found = gate(out, tmp_path / "logs")
    assert verdict(found) == "checkpoint-fault"
    assert found.seen == {}
    assert not (tmp_path / "logs").exists()
    assert found.verdict.next.startswith("sparkquant verify")


@pytest.mark.slow
def test_extra_words_come_last_and_win(result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", quick=True, vllm_args=("--linear-backend", "machete"))
    assert verdict(found) == "kernel-fault", found.verdict
    assert "machete ran" in found.verdict.summary


@pytest.mark.slow
def test_a_soak_looks_again(result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", quick=True, soak_seconds=1.0)
    assert verdict(found) == "pass", found.verdict
    assert found.soak["requests"] > 0
    assert found.soak["broken"] == []
    assert found.soak["host_bytes"][1] > 0


@pytest.mark.slow
def test_a_server_that_runs_is_judged_by_its_answers_and_its_log(result: Path, tmp_path: Path) -> None:
    record, log = tmp_path / "reference.json", tmp_path / "server.log"
    gate(result, tmp_path / "logs", quick=True, save_reference=record)
    launch = Launch(tuple(VLLM.split()), (str(result), "--linear-backend", "marlin"), {}, log)
    given = {"reference": None, "vllm": None, "server_log": log}
    with Server(launch) as server:
        assert server.wait_ready(30) == ""
        alone = gate(result, tmp_path, url=server.url, **given)
        found = gate(result, tmp_path, url=server.url, reference_record=record, max_tokens=64, **given)
    assert verdict(alone) == "inconclusive"
    assert verdict(found) == "pass", found.verdict
    assert list(found.seen[Role.CANDIDATE].answers) == [1, 8]
    assert any("no controls" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://localhost:1", "server_log": "x"}, "--vllm starts one"),
        ({"vllm": None, "url": "http://localhost:1"}, "answers and its log"),
        ({"reference_record": "x"}, "either served or read"),
        ({"vllm": None, "url": "http://localhost:1", "server_log": "x"}, "nothing is started"),
        ({"reference": None, "save_reference": Path("x")}, "a served reference"),
        ({"capability": "twelve"}, "12.1"),
        ({"tp": 0}, "tp is 0"),
        ({"max_tokens": 2040}, "no room"),
        ({"rows": -3}, "rows is -3"),
        ({"memory": 1.5}, "a share"),
        ({"memory": float("nan")}, "a share"),
        ({"answer_limit": 0.0}, "answer_limit is 0"),
        ({"vllm_args": ("--tensor-parallel-size=2",)}, "pass --tp"),
        ({"vllm_args": ("--port", "80")}, "free ports"),
        ({"vllm": None, "reference": None, "server_log": "x", "url": "localhost:8000"}, "cannot be read"),
    ],
)
def test_what_does_not_go_together(options: dict[str, object], message: str, result: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        gate(result, tmp_path, **options)
    assert message in str(raised.value)


def test_a_place_that_cannot_be_written_is_told_before_a_server_starts(result: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    wrong = ({"logs": file / "logs"}, {"save_reference": tmp_path}, {"save_reference": tmp_path / "none" / "record"})
    for options in wrong:
        with pytest.raises(UsageError):
            gate(result, **{"logs": tmp_path / "logs", "data": rows_of_ids(tmp_path), **options})
    assert list(tmp_path.glob("logs/*.log")) == []


@pytest.fixture
def cached(result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The result as a repository in the hub's cache, and no way to the hub."""
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--someone--small-w4a16"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(result, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return "someone/small-w4a16"


def test_a_hub_id_is_served_from_the_cache(cached: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.glob("hub/**/*"))
    found = gate(Path(cached), None, "import", quick=True, data=rows_of_ids(tmp_path))  # type: ignore[arg-type]
    assert verdict(found) == "environment-fault", found.verdict
    assert found.out == cached
    logs = tmp_path / "small-w4a16.validate"
    assert (logs / "candidate.log").is_file()
    assert "snapshots" in found.as_json()["runs"]["candidate"]["failed"] + (logs / "candidate.log").read_text()
    assert sorted(tmp_path.glob("hub/**/*")) == before, "nothing is written into the cache"


@pytest.mark.parametrize("verb", ["validate", "bench"])
def test_a_hub_id_that_cannot_be_had_says_what_to_do(verb: str, cached: str) -> None:
    for name, code in (("someone/other", 5), ("no-such-folder", 3)):
        found = invoke(verb, name, "--vllm", VLLM, "--capability", "12.1")
        assert found.exit_code == code
        assert "hint: " in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_a_reference_may_be_a_hub_id(cached: str, result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", quick=True, reference=cached, data=rows_of_ids(tmp_path))
    assert not found.seen[Role.REFERENCE].failed
    assert found.seen[Role.REFERENCE].acceptance is not None


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(original, result) with two key heads in its linear attention, so that it fits two ranks."""
    import sparkquant

    source, out = (tmp_path_factory.mktemp("ranks") / name for name in ("source", "out"))
    build("qwen3_5", source)
    sparkquant.quantize(source, "qwen-hybrid-w4a16", out, method="rtn")
    return source, out


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "outcome"), [("", "pass"), ("rank", "kernel-fault")])
def test_ranks_reach_the_server_and_the_rules(
    fault: str, outcome: str, two_ranks: tuple[Path, Path], tmp_path: Path
) -> None:
    source, out = two_ranks
    given = {"reference": source, "quick": True, "data": rows_of_ids(tmp_path)}
    found = gate(out, tmp_path / "logs", fault, tp=2, **given)
    assert verdict(found) == outcome, found.verdict
    document = found.as_json()
    assert document["conditions"]["tp"] == 2
    assert document["conditions"]["arguments"][-2:] == ["--tensor-parallel-size", "2"]
    sizes = {row["class"]: tuple(row["size"]) for row in found.preflight.table["rows"]}
    assert sizes["mlp.down"] == (256, 256), "k is divided by the ranks"
    assert sizes["mlp.gate_up"] == (512, 256), "n is divided by the ranks"
    log = found.seen[Role.CANDIDATE].log
    assert (log.tensor_parallel, log.load_gib, log.kv_cache_gib) == (2, 0.04, 41.2)
    assert log.missing == ()
    text = (tmp_path / "logs" / "candidate.log").read_text()
    assert text.count("(Worker_TP0 pid=") == text.count("(Worker_TP1 pid=") > 3


def test_ranks_that_do_not_fit_start_nothing(result: Path, tmp_path: Path) -> None:
    found = gate(result, tmp_path / "logs", tp=2)
    assert verdict(found) == "checkpoint-fault"
    assert "tensor parallel 2" in found.verdict.summary
    assert found.seen == {}


def test_a_server_of_two_ranks_has_a_complete_log(two_ranks: tuple[Path, Path], tmp_path: Path) -> None:
    words = (str(two_ranks[1]), "--linear-backend", "marlin", "--tensor-parallel-size", "2")
    launch = Launch(tuple(VLLM.split()), words, {}, tmp_path / "server.log")
    with Server(launch) as server:
        assert server.wait_ready(30) == ""
    log = read_log_file(launch.log)
    assert log.complete
    assert [kernel.kernel for kernel in log.kernels] == ["MarlinLinearKernel"]
    assert judge_log(log, wanted={"int": "marlin"}, alive=True).outcome is Outcome.PASS


@pytest.mark.slow
def test_a_server_that_hangs_in_the_middle_is_given_up(result: Path, tmp_path: Path) -> None:
    given = {"quick": True, "data": rows_of_ids(tmp_path), "answer_limit": 1.0}
    with variables(FAKE_LATE="3"):
        found = gate(result, tmp_path / "logs", "stall", **given)
    assert verdict(found) == "inconclusive", found.verdict
    assert "requests fail" in found.verdict.summary
    assert str(tmp_path / "logs" / "candidate.log") in found.verdict.next


@pytest.mark.slow
def test_the_log_of_another_server_proves_nothing(result: Path, tmp_path: Path) -> None:
    record, log = tmp_path / "reference.json", tmp_path / "server.log"
    given = {"quick": True, "data": rows_of_ids(tmp_path)}
    gate(result, tmp_path / "logs", save_reference=record, **given)
    launch = Launch(tuple(VLLM.split()), (str(result), "--linear-backend", "marlin"), {}, log)
    with Server(launch) as server:
        assert server.wait_ready(30) == ""
        copy = tmp_path / "copy.log"
        for version in ("0.25.1", "0.33.0"):
            copy.write_text(log.read_text().replace("0.25.1", version))
            url = {"reference": None, "vllm": None, "url": server.url, "server_log": copy, "reference_record": record}
            found = gate(result, tmp_path, **url, **given)
            assert verdict(found) == "inconclusive"
            assert "no line came to it" in found.verdict.summary
            assert ("the log is of 0.33.0" in found.verdict.summary) == (version == "0.33.0")


@pytest.mark.parametrize("vllm", ["/nowhere/vllm", "no-such-program serve", f"{SOURCE}/config.json"])
def test_no_engine_is_an_environment_error(vllm: str, result: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing):
        gate(result, tmp_path, vllm=vllm)


def test_a_vllm_that_cannot_be_imported_is_a_verdict(result: Path, tmp_path: Path) -> None:
    """Its files state a version; its servers say what is missing, and the verdict says so."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm-0.25.1.dist-info").mkdir()
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nraise ImportError('libcudart.so.13: cannot open shared object file')\n")
    script.chmod(0o755)
    with variables(PYTHONPATH=str(tmp_path)):
        found = gate(result, tmp_path / "logs", vllm=str(script), data=rows_of_ids(tmp_path))
    assert verdict(found) == "environment-fault", found.verdict
    assert "libcudart.so.13" in found.verdict.summary
    assert found.conditions["version"] == "0.25.1"


def test_a_python_without_vllm_says_so(result: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="No package metadata"):
        gate(result, tmp_path, vllm=VLLM.split()[0])
