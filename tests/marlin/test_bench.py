"""Throughput: everything that explains it is in the record, or there is no record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant.errors import CheckFailed, UsageError
from sparkquant.marlin.bench import bench
from sparkquant.marlin.bench_compare import compare
from sparkquant.marlin.bench_record import MEASURED, BenchRecord, load_record, make_record, require_conditions
from sparkquant.marlin.server import Launch, Server
from tests.cli.running import invoke
from tests.marlin.serving import VLLM, variables


def measured(out: Path, tmp_path: Path, *, fault: str = "", **options: Any) -> BenchRecord:
    given: dict[str, Any] = {
        "vllm": VLLM, "capability": "12.1", "hardware": "imagined", "max_tokens": 24, "log": tmp_path / "bench.log",
        **options,
    }  # fmt: skip
    with variables(FAKE_FAULT=fault, FAKE_TOKEN_SECONDS="0.001"):
        return bench(out, **given)


@pytest.fixture(scope="session")
def record() -> BenchRecord:
    """One that was measured for real, with drafts."""
    return load_record(Path(__file__).parent / "records" / "bench-k2" / "record.json")


@pytest.mark.slow
def test_a_record_states_what_it_depends_on(result: Path, tmp_path: Path) -> None:
    told = json.loads(json.dumps(measured(result, tmp_path, drafts=2).as_json(), allow_nan=False))
    assert set(told["decode"]) == {"edit", "fresh"}
    assert list(told["aggregate"]) == ["1", "2", "4", "8"]
    assert all(len(found["rounds"]) == 3 for found in told["aggregate"].values())
    assert told["medians"]["aggregate"]["8"] > 2 * told["medians"]["aggregate"]["1"]
    assert told["speculation"] == {"method": "mtp", "k": 2}
    assert told["cache"] == {"state": "off", "hit_rate": 0.0}
    assert told["thinking"] is False
    assert told["kv_cache_tokens"] == 12_441_786
    assert told["environment"]["VLLM_MARLIN_USE_ATOMIC_ADD"] == "1"
    assert told["versions"] == {"vllm": "0.25.1", "sparkquant": sparkquant.version()}
    assert 0 < told["lengths"]["output"] <= 24
    assert any("tokens per step by drafting" in warning for warning in told["warnings"])


@pytest.mark.parametrize("field", sorted(BenchRecord.model_fields))
def test_a_record_without_a_field_cannot_be_made(field: str, record: BenchRecord) -> None:
    fields = {key: value for key, value in record.model_dump(mode="json").items() if key not in (field, "kind")}
    if field == "kind":
        return
    with pytest.raises(UsageError) as raised:
        make_record(fields)
    assert field in [problem.where for problem in raised.value.problems]


def test_two_rounds_and_nan_make_no_record(record: BenchRecord) -> None:
    fields = {key: value for key, value in record.model_dump(mode="json").items() if key != "kind"}
    for wrong in ({"rounds": [1.0, 2.0]}, {"rounds": [1.0, float("nan"), 2.0]}, {"rounds": [1.0, 0.0, 2.0]}):
        with pytest.raises(UsageError):
            make_record({**fields, "prefill": wrong})
    with pytest.raises(UsageError, match="record: "):
        make_record({**fields, "acceptance": {}})


@pytest.mark.slow
def test_a_server_at_a_url_needs_its_log_and_its_environment(result: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    launch = Launch(tuple(VLLM.split()), (str(result),), {"FAKE_HITS": "0.4", "FAKE_QUERIES": "1"}, log)
    given: dict[str, Any] = {"vllm": None, "capability": None, "hardware": None}
    with Server(launch) as server:
        assert server.wait_ready(30) == ""
        with pytest.raises(UsageError) as raised:
            measured(result, tmp_path, url=server.url, **given)
        missing = {problem.where for problem in raised.value.problems}
        assert missing >= {"capability", "hardware", "environment", "arguments", "speculation"}
        known = {"vllm": None, "hardware": "imagined", "environment": {}}
        found = measured(result, tmp_path, url=server.url, server_log=log, **known)
    assert found.speculation.method == "none"
    assert found.cache.hit_rate == pytest.approx(0.4)
    assert any("prefix cache" in warning for warning in found.warnings())


@pytest.mark.slow
def test_a_request_that_fails_is_no_number(result: Path, tmp_path: Path) -> None:
    for fault in ("nan", "crash"):
        with pytest.raises(CheckFailed, match="a request failed") as raised:
            measured(result, tmp_path, fault=fault)
        assert f"--server-log {tmp_path / 'bench.log'}" in raised.value.hint


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hardware": None}, "hardware"),
        ({"capability": None}, "capability"),
        ({"capability": "twelve"}, "12.1"),
        ({"max_tokens": 1}, "cannot be measured"),
        ({"max_tokens": 100_000}, "cannot be measured"),
        ({"rounds": 2}, "no honest median"),
        ({"memory": 0.0}, "a share"),
        ({"vllm_args": ("--served-model-name=x",)}, "a name of our own"),
        ({"drafts": -1}, "counts"),
    ],
)
def test_what_makes_no_record_is_told_before_a_server_starts(
    options: dict[str, Any], says: str, result: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        measured(result, tmp_path, **options)
    assert says in str(raised.value)
    assert not (tmp_path / "bench.log").exists()


def test_a_record_that_cannot_be_written_is_told_first(result: Path, tmp_path: Path) -> None:
    known = ("--vllm", VLLM, "--capability", "12.1", "--hardware", "imagined", "--log", tmp_path / "bench.log")
    found = invoke("bench", result, *known, "--out", tmp_path / "none" / "record.json")
    assert found.exit_code == 2
    assert "there is no folder" in found.stderr
    assert not (tmp_path / "bench.log").exists()


def test_conditions_are_looked_at_apart_from_what_is_measured(record: BenchRecord) -> None:
    fields = {key: value for key, value in record.model_dump(mode="json").items() if key != "kind"}
    conditions = {key: value for key, value in fields.items() if key not in MEASURED}
    require_conditions(conditions)
    for name in conditions:
        with pytest.raises(UsageError) as raised:
            require_conditions({key: value for key, value in conditions.items() if key != name})
        assert [problem.where for problem in raised.value.problems] == [name]


def test_records_that_are_none(tmp_path: Path, record: BenchRecord) -> None:
    path = tmp_path / "record.json"
    sound = json.dumps(record.as_json())
    nan = json.dumps({**record.model_dump(mode="json"), "acceptance": {
        kind: {**found.model_dump(mode="json"), "rates": [float("nan")]} for kind, found in record.acceptance.items()
    }})  # fmt: skip
    for text in ("", "{}", "[" * 100_000, sound[:-20], nan, sound.replace('"thinking": false', '"thinking": "maybe"')):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError):
            load_record(path)
        assert invoke("bench", "compare", path, path).exit_code == 2


def test_comparing_says_what_explains_the_ratio(record: BenchRecord, tmp_path: Path) -> None:
    given = record.model_dump(mode="json")
    given["decode"]["edit"]["rounds"] = [value * 2 for value in given["decode"]["edit"]["rounds"]]
    given["acceptance"]["edit"] = {"drafts": 100, "drafted": 200, "accepted": 110, "rates": [0.70, 0.40]}
    given["cache"] = {"state": "warm", "hit_rate": 0.5}
    given["lengths"]["output"] *= 2
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(record.as_json()))
    b.write_text(json.dumps(given))
    found = compare(load_record(a), load_record(b))
    edit = next(row for row in found.rows if row.name.startswith("decode edit"))
    assert edit.ratio == pytest.approx(2)
    told = " ".join(found.warnings)
    assert "drafts are accepted 90% and 70%" in told
    assert "prefix cache hits differ" in told
    assert "answers have" in told
    assert found.differing["cache"] == ("off", "warm")
    shown = invoke("bench", "compare", a, b)
    assert shown.exit_code == 0
    assert "decode edit, tok/s" in shown.stdout
    assert invoke("bench", "compare", a).exit_code == 2
    assert invoke("bench", "compare", a, tmp_path / "none.json").exit_code == 2
    assert invoke("bench", "compare", a, Path(__file__)).exit_code == 2


def test_noise_is_called_noise(record: BenchRecord) -> None:
    found = compare(record, record)
    assert all(row.ratio == 1 and not row.beyond_noise for row in found.rows)
    assert found.differing == {}
    assert found.warnings == ()
