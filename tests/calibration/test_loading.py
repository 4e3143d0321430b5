"""From files to rows: the same everywhere, everything counted, what cannot serve refused, no text in records."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.calibration import CalibrationSet, check_calibration, load_calibration
from sparkquant.calibration.calibration_set import histogram
from sparkquant.calibration.selection import _quotas
from sparkquant.calibration.sufficiency import tokens_needed
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CalibrationError
from tests.calibration.conftest import agent, chat, write_jsonl

ALL = ("few-tokens", "no-thinking", "truncated", "empty-source")


def write_mix(folder: Path, sources: dict[str, dict[str, Any]], **fields: Any) -> Path:
    path = folder / "mix.yaml"
    path.write_text(json.dumps({"name": "m", "summary": "a mix of a test", **fields, "sources": sources}))
    return path


def load(spec: Path, model: Path, **options: Any) -> CalibrationSet:
    return load_calibration(spec, model, **{"allow": ALL, **options})


def failing(calibration: CalibrationSet) -> set[str]:
    return {check.id.removeprefix("calibration.") for check in calibration.checks}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", [chat(n, reasoning="Because", turns=2) for n in range(12)])


def test_one_conversation_per_row(logs: Path, model: Path) -> None:
    from sparkquant.calibration.template import ChatTemplate

    calibration = load_calibration(logs, model, rows=12, tokens=512)
    template = ChatTemplate.open(model)
    assert len(calibration.rows) == 12
    for ids in calibration.rows:
        numbers = {word.split(".")[0] for word in template.decode(ids).split("Question ")[1:]}
        assert len(numbers) == 1
    assert calibration.kinds == {"truncated": 0, "thinking": 12, "tools": 0, "part": 0}


def test_no_id_is_beyond_the_vocabulary(logs: Path, model: Path) -> None:
    rows = load_calibration(logs, model).rows
    assert 0 <= min(map(min, rows)) <= max(map(max, rows)) < 2048


def test_a_tokenizer_larger_than_the_model_is_refused(logs: Path, model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    config = {**checkpoint.config, "text_config": {**checkpoint.text_config, "vocab_size": 100}}
    small = Checkpoint(checkpoint.path, config, checkpoint.tensors, checkpoint.shards, ())
    with pytest.raises(CalibrationError, match="vocabulary ends at 100"):
        load_calibration(logs, small)
    del config["text_config"]["vocab_size"]
    assert load_calibration(logs, small).rows


def test_the_order_of_lines_and_files_does_not_matter(tmp_path: Path, model: Path) -> None:
    records = [chat(n) for n in range(9)] + [agent(n) for n in range(5)]
    digests = set()
    for order in range(3):
        folder = tmp_path / str(order)
        folder.mkdir()
        random.Random(order).shuffle(records)
        for number, cut in enumerate((records[:5], records[5:])):
            write_jsonl(folder / f"{random.Random(order).random()}-{number}.jsonl", cut)
        spec = write_mix(folder, {"s": {"conversations": "*.jsonl"}}, rows=7, tokens=300)
        calibration = load(spec, model)
        digests.add((calibration.digest, calibration.rows))
    assert len(digests) == 1


def test_hash_seeds_do_not_matter(logs: Path, model: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None  # not needed, and slow to import\n"
        "from sparkquant.calibration import load_calibration;"
        "print(load_calibration(sys.argv[1], sys.argv[2], rows=5).digest)"
    )
    here = load_calibration(logs, model, rows=5).digest
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code, str(logs), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == here


def test_what_makes_a_difference_shows_in_the_digest(logs: Path, model: Path) -> None:
    base = load(logs, model, rows=5, tokens=256)
    others = [
        load(logs, model, rows=5, tokens=256, seed=1),
        load(logs, model, rows=4, tokens=256),
        load(logs, model, rows=5, tokens=255),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 4
    with logs.open("a") as file:
        file.write(json.dumps(chat(99)) + "\n")
    assert load(logs, model, rows=5, tokens=256).made["data"] != base.made["data"]


def test_importing_and_ready_rows_cost_neither_torch_nor_transformers(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([[1, 2, 3]] * 3))
    code = (
        "import sys; from sparkquant.calibration import load_calibration;"
        "load_calibration(sys.argv[1], sys.argv[2], allow=['few-tokens']);"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(model)], check=True)


def test_requests_of_one_session_count_once(tmp_path: Path, model: Path) -> None:
    messages = agent(1, steps=4)["messages"]
    for message in messages[:-1]:
        message.pop("reasoning_content", None)  # clients do not send it back
    grown = [{"messages": messages[:stop], "tools": agent(1)["tools"]} for stop in (3, 5, 7, len(messages))]
    calibration = load(write_jsonl(tmp_path / "a.jsonl", grown), model)
    assert calibration.dropped == {"part-of-a-longer-conversation": 3}
    assert len(calibration.rows) == 1


def test_duplicates_and_faults_are_counted_by_source(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [chat(1), chat(1), 7, {"messages": [{"role": "user", "content": "\ud800"}]}])
    write_jsonl(tmp_path / "b.jsonl", [chat(1), chat(2)])
    sources = {"first": {"conversations": "a.jsonl"}, "second": {"conversations": "b.jsonl"}}
    calibration = load(write_mix(tmp_path, sources), model)
    first, second = calibration.counts["first"], calibration.counts["second"]
    assert first["dropped"] == {"duplicate": 1, "lone-surrogate": 1, "not-a-conversation": 1}
    assert second["dropped"] == {"duplicate": 1}
    assert (first["read"], first["used"], second["read"], second["used"]) == (4, 1, 2, 1)
    assert "a.jsonl:3" in {problem.where for problem in calibration.problems}


def test_rows_that_become_the_same_ids_are_duplicates(tmp_path: Path, model: Path) -> None:
    long = "the same long beginning " * 50
    records = [{"messages": [{"role": "user", "content": long + str(n)}]} for n in range(3)]
    calibration = load(write_jsonl(tmp_path / "a.jsonl", records), model, tokens=32)
    assert len(calibration.rows) == 1
    assert calibration.dropped == {"duplicate": 2}


def test_filters(tmp_path: Path, model: Path) -> None:
    records = [
        {**chat(1), "tags": ["a", "b"]},
        {**chat(2), "tags": ["b"], "language": "de"},
        {**chat(3, reasoning="R"), "tags": ["c"]},
        {**agent(4), "tags": ["b"]},
        chat(5, words=100),
    ]
    write_jsonl(tmp_path / "a.jsonl", records)

    def kept(**filters: Any) -> int:
        source = {"s": {"conversations": "a.jsonl", "filters": filters}}
        return len(load(write_mix(tmp_path, source, tokens=4096), model).rows)

    assert kept() == 5
    assert kept(tags="a") == 1
    assert kept(tags=["a", "c"]) == 2
    assert kept(tags="b", without_tags="a") == 2
    assert kept(languages=["de"]) == 1
    assert kept(thinking=True) == 2
    assert kept(thinking=False, tools=False) == 3
    assert kept(tools=True) == 1
    assert kept(min_tokens=500) == 1
    assert kept(max_tokens=499) == 4


def test_two_sources_may_take_different_parts_of_one_file(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [chat(n, words=4 if n % 2 else 90) for n in range(8)])
    sources = {
        "short": {"conversations": "a.jsonl", "filters": {"max_tokens": 200}},
        "long": {"conversations": "a.jsonl", "filters": {"min_tokens": 201}},
    }
    calibration = load(write_mix(tmp_path, sources, tokens=2048), model)
    assert [calibration.counts[name]["rows"] for name in ("short", "long")] == [4, 4]


def test_shares_are_kept_and_a_dry_source_is_filled_by_others(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(30)])
    write_jsonl(tmp_path / "b.jsonl", [chat(n) for n in range(30, 35)])
    sources = {"a": {"conversations": "a.jsonl", "share": 1}, "b": {"conversations": "b.jsonl", "share": 3}}
    even = load(write_mix(tmp_path, sources), model, rows=4)
    assert {name: even.counts[name]["rows"] for name in "ab"} == {"a": 1, "b": 3}
    dry = load(write_mix(tmp_path, sources), model, rows=20)
    assert {name: dry.counts[name]["rows"] for name in "ab"} == {"a": 15, "b": 5}
    assert "dominant" in failing(dry)
    short = load(write_mix(tmp_path, sources), model, rows=50)
    assert len(short.rows) == 35
    assert "short" in failing(short)


def test_one_long_conversation_waits_for_the_others(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [agent(1, steps=60), *(chat(n) for n in range(4))])
    calibration = load(tmp_path / "a.jsonl", model, rows=8, tokens=300)
    assert calibration.counts["conversations"]["used"] == 5
    assert calibration.kinds["part"] == 4
    assert load(tmp_path / "a.jsonl", model, rows=20, tokens=300).kinds["part"] > 4


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.001, 1000), min_size=1),
    st.integers(0, 500),
)
def test_quotas_add_up_and_follow_the_shares(shares: dict[str, float], rows: int) -> None:
    quotas = _quotas(shares, rows)
    assert sum(quotas.values()) == rows
    total = sum(shares.values())
    assert all(abs(quotas[name] - rows * share / total) <= 1 + 1e-6 for name, share in shares.items())


def test_too_few_tokens_are_refused_unless_allowed(tmp_path: Path, model: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(1, reasoning="R")])
    with pytest.raises(CalibrationError, match="needs 1,024") as caught:
        load_calibration(path, model)
    assert 'allow=["few-tokens"] (`--allow few-tokens`)' in caught.value.hint
    assert load_calibration(path, model, allow=["few-tokens"]).rows


def test_a_thinking_model_needs_thinking_rows(tmp_path: Path, model: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(30)])
    with pytest.raises(CalibrationError, match="no row holds reasoning"):
        load_calibration(path, model)
    assert load_calibration(path, model, allow=["no-thinking"]).rows


def test_many_truncated_rows_are_refused(tmp_path: Path, model: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(n, reasoning="R", words=40) for n in range(30)])
    with pytest.raises(CalibrationError, match="30 of 30 rows are cut"):
        load_calibration(path, model, tokens=64)
    assert load_calibration(path, model, tokens=64, allow=["truncated", "no-thinking"]).kinds["truncated"] == 30


def test_a_source_that_gives_nothing_is_refused(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [chat(n, reasoning="R") for n in range(30)])
    sources = {"a": {"conversations": "a.jsonl"}, "b": {"conversations": "a.jsonl", "filters": {"tags": "typo"}}}
    with pytest.raises(CalibrationError, match="source 'b' gives no row: 30 read, 30 filtered out"):
        load_calibration(write_mix(tmp_path, sources), model)


def test_no_row_at_all_cannot_be_allowed(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.jsonl").write_text("nonsense\n")
    with pytest.raises(CalibrationError, match="no row is left") as caught:
        load(tmp_path / "a.jsonl", model)
    assert any("invalid-json" in str(problem) for problem in caught.value.problems)


def test_null_content_may_be_rendered_as_servers_do(tmp_path: Path, with_template: Callable[[str], Path]) -> None:
    text = "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content + '' }}"
    text += "{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n{% endfor %}"
    folder, path = with_template(text), write_jsonl(tmp_path / "a.jsonl", [agent(n) for n in range(5)])
    refused = check_calibration(path, folder)
    assert refused.calibration.dropped == {"template-cannot-take-null-content": 5}
    assert not refused.calibration.rows
    assert "null-content" in failing(refused.calibration)
    assert len(load(path, folder, allow=[*ALL, "null-content"]).rows) == 5


def test_misspelled_permissions_and_odd_numbers_are_refused(logs: Path, model: Path) -> None:
    for allow in (["few_tokens"], "few-tokens"):
        with pytest.raises(CalibrationError, match="nothing to allow"):
            load_calibration(logs, model, allow=allow)
    for options in ({"rows": 0}, {"tokens": 1}, {"seed": -1}, {"rows": True}, {"tokens": "64"}):
        with pytest.raises(CalibrationError, match="out of range"):
            load_calibration(logs, model, **options)  # type: ignore[arg-type]


def test_rows_that_begin_alike_are_reported(tmp_path: Path, model: Path) -> None:
    records = [chat(n, reasoning="R") for n in range(20)]
    for record in records[:15]:
        record["messages"].insert(0, {"role": "system", "content": "You are a very careful assistant. " * 30})
    assert "alike" in failing(load(write_jsonl(tmp_path / "a.jsonl", records), model))


def test_experts_that_see_few_tokens_are_reported(logs: Path, model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    moe = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    config = {**checkpoint.config, "text_config": {**checkpoint.text_config, **moe}}
    many = Checkpoint(checkpoint.path, config, checkpoint.tensors, checkpoint.shards, ())
    assert "experts" in failing(load_calibration(logs, many, allow=ALL))


def test_tokens_needed_follow_the_widest_layer() -> None:
    assert tokens_needed({"hidden_size": 5120, "intermediate_size": 17408}) == 34816
    assert tokens_needed({"hidden_size": 64, "num_attention_heads": 8, "head_dim": 16}) == 256
    assert tokens_needed({}) == 2048


def test_texts_are_cut_at_lines(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.py").write_text("".join(f"value_{n} = {n}\n" for n in range(300)))
    sources = {
        "code": {"text": "a.py"},
        "told": {"text": "a.py", "wrap": {"user": "Show {path}", "assistant": "{text}"}},
    }
    calibration = check_calibration(write_mix(tmp_path, sources), model, tokens=256, rows=100, show=100)
    assert calibration.calibration.kinds["truncated"] == 0
    for sample in calibration.samples:
        assert sample.tokens <= 256
        if sample.source == "told":
            assert sample.text.startswith("<|im_start|>user\nShow a.py<|im_end|>")
        else:
            assert sample.text.startswith("value_")
            assert sample.text.endswith("\n")


def test_the_record_holds_no_text_no_ids_and_no_places(tmp_path: Path, model: Path) -> None:
    secret = "Xyzzyplugh"
    records = [chat(n, reasoning=f"{secret} thinks", words=30) for n in range(20)]
    records += [{"messages": [{"role": secret, "content": secret}]}]
    path = tmp_path / f"{secret}.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in records) + f"\n{secret}\n")
    calibration = load(path, model)
    published = json.dumps(calibration.record())
    assert secret not in published
    assert str(tmp_path) not in published
    assert secret not in repr(calibration)
    assert str(calibration.rows[0][0]) not in repr(calibration).split("counts=")[0]

    def lists(value: Any) -> list[Any]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [value] * isinstance(value, list) + [found for v in inner for found in lists(v)]

    assert all(len(found) <= 20 for found in lists(calibration.record()))


def test_the_check_shows_problems_and_samples_without_raising(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat(1)) + "\n{broken\n")
    check = check_calibration(path, model, show=3)
    assert not check.ok
    shown = check.as_json()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["problems"] == [{"where": "a.jsonl:2", "what": shown["problems"][0]["what"]}]
    assert {c["id"] for c in shown["checks"]} >= {"calibration.few-tokens", "calibration.no-thinking"}
    (sample,) = check.samples
    assert sample.text.startswith("<|im_start|>user\nQuestion 1.0")
    assert "samples" not in check.calibration.record()


def test_samples_show_every_source_first(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(20)])
    write_jsonl(tmp_path / "b.jsonl", [chat(99)])
    sources = {"a": {"conversations": "a.jsonl", "share": 9}, "b": {"conversations": "b.jsonl"}}
    check = check_calibration(write_mix(tmp_path, sources), model, show=2)
    assert {sample.source for sample in check.samples} == {"a", "b"}


def test_histogram_is_in_powers_of_two() -> None:
    assert histogram([]) == []
    assert histogram([1, 32, 33, 64, 65, 200, 256]) == [(32, 2), (64, 2), (128, 1), (256, 2)]


class TestReadyRows:
    """Rows of ids that someone made."""

    def write(self, folder: Path, rows: Any) -> Path:
        path = folder / "rows.json"
        path.write_text(json.dumps(rows))
        return path

    def test_they_are_taken_in_their_order(self, tmp_path: Path, model: Path) -> None:
        path = self.write(tmp_path, [[n + 1] * (100 + n) for n in range(20)])
        calibration = load_calibration(path, model)
        assert calibration.rows[3] == (4,) * 103
        assert calibration.sources == ("token-ids",) * 20
        assert load_calibration(path, model, rows=12, tokens=105).rows == tuple(
            row[:105] for row in calibration.rows[:12]
        )

    def test_the_shared_rows_load(self, shared: Path) -> None:
        calibration = load_calibration(
            shared / "eval" / "calibration-hybrid-32m.json", shared / "models" / "hybrid-32m"
        )
        assert len(calibration.rows) == 128
        assert {len(row) for row in calibration.rows} == {512}

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ([[1, 2048]], "row 1: token id 2048 is outside the vocabulary of 2,048"),
            ([[1], [-1]], "row 2: token id -1 is outside"),
            ([[1, True]], "row 1: position 1 holds bool"),
            ([[1, 2.0]], "row 1: position 1 holds float"),
            ([[1], []], "row 2: empty"),
            ([[1], "text"], "row 2: str, not a list"),
            ([[1], [[2]]], "row 2: position 0 holds list"),
            ([], "no list of rows"),
            ({"rows": []}, "no list of rows"),
        ],
    )
    def test_faulty_rows_are_all_named(self, rows: Any, expected: str, tmp_path: Path, model: Path) -> None:
        with pytest.raises(CalibrationError) as caught:
            load_calibration(self.write(tmp_path, rows), model)
        assert expected in str(caught.value)

    def test_broken_and_missing_files(self, tmp_path: Path, model: Path) -> None:
        (tmp_path / "rows.json").write_text("[[1,")
        with pytest.raises(CalibrationError, match="not readable as JSON"):
            load_calibration(tmp_path / "rows.json", model)
        with pytest.raises(CalibrationError, match="No such file"):
            load_calibration(tmp_path / "none.json", model)

    def test_a_json_list_of_conversations_is_no_list_of_ids(self, tmp_path: Path, model: Path) -> None:
        path = self.write(tmp_path, [chat(n, reasoning="R") for n in range(20)])
        assert len(load_calibration(path, model).rows) == 20

    def test_samples_are_decoded(self, tmp_path: Path, model: Path) -> None:
        path = self.write(tmp_path, [[300, 301]] * 4)
        check = check_calibration(path, model, show=1)
        assert len(check.samples) == 1
        assert "alike" in failing(check.calibration)
