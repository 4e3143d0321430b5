"""From texts to rows: the source's own template, answers found again, and every cut and loss told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sparkquant.calibration.template import ChatTemplate
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CalibrationError, CheckpointError
from sparkquant.evaluation_data import DraftRow, EvaluationRows, load_rows, spread
from tests.evaluation.conftest import EXAMPLE

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.open(EXAMPLE)


def jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(*said: str, **fields: Any) -> dict[str, Any]:
    """Turns from user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)], **fields}


def with_template(folder: Path, text: str | None) -> Checkpoint:
    """The example with another chat template, its weights linked."""
    folder.mkdir()
    for entry in EXAMPLE.iterdir():
        if entry.suffix == ".safetensors":
            (folder / entry.name).symlink_to(entry)
        else:
            shutil.copy(entry, folder / entry.name)
    (folder / "chat_template.jinja").unlink()
    if text is not None:
        (folder / "chat_template.jinja").write_text(text)
    return Checkpoint.open(folder)


def test_the_bundled_data_in_full(source: Checkpoint, template: ChatTemplate) -> None:
    made = load_rows(source)
    assert len(made.text) == 48
    assert {name: len(rows) for name, rows in made.drafts.items()} == {"edit": 24, "fresh": 24}
    assert made.notes == ("2 of 60 recall tasks are longer than 3,072 tokens and left out",)
    assert max(map(len, made.text)) <= 3072
    assert len(made.recall) == 58
    drafted = [row for rows in made.drafts.values() for row in rows]
    assert {tuple(row.ids) for row in drafted} == set(map(tuple, made.text))
    assert sum(len(row.spans) for row in drafted) == 52  # four edits have a second turn
    assert load_rows(source).digest == made.digest
    for prompt, answer in made.recall[:3]:
        text = template.decode((*prompt, *answer))
        assert text.endswith(template.decode(answer))
        assert "<think>\n\n</think>\n\n" in template.decode(prompt)[-40:]


def test_spans_hold_the_answers_and_nothing_else(source: Checkpoint, template: ChatTemplate, tmp_path: Path) -> None:
    said = chat("What is it?", "A small boat.", "And this?", "An oar, for rowing.", tags=["edit"], thinking=False)
    data = jsonl(tmp_path / "chats.jsonl", [said])
    made = load_rows(source, data, rows=1)
    (row,) = made.drafts["edit"]
    found = [template.decode(row.ids[begin:end]) for begin, end in row.spans]
    assert [text.removesuffix("<|im_end|>\n") for text in found] == ["A small boat.", "An oar, for rowing."]
    assert "And this?" in template.decode(row.ids)


def test_reasoning_is_part_of_the_answer(source: Checkpoint, template: ChatTemplate, tmp_path: Path) -> None:
    said = chat("What is it?", "A boat.", thinking=True)
    said["messages"][1]["reasoning_content"] = "It floats."
    made = load_rows(source, jsonl(tmp_path / "chats.jsonl", [said]), rows=1)
    (row,) = made.drafts["text"]
    ((begin, end),) = row.spans
    assert template.decode(row.ids[begin:end]).startswith("It floats.\n</think>\n\nA boat.")


def test_cuts_and_losses_are_told(source: Checkpoint, tmp_path: Path) -> None:
    records = [chat(f"Say {n}", "word " * (20 + 40 * n)) for n in range(4)] + [{"nothing": 1}]
    data = jsonl(tmp_path / "chats.jsonl", records)
    data.write_text(data.read_text() + "{broken\n")
    made = load_rows(source, data, tokens=64)
    assert max(map(len, made.text)) == 64
    assert "3 of 4 rows are cut to 64 tokens" in made.notes
    assert "conversations left out: invalid-json 1, not-a-conversation 1" in made.notes
    assert all(end <= 64 for row in made.drafts["text"] for _, end in row.spans)


def test_rows_are_spread_over_the_file(source: Checkpoint) -> None:
    made = load_rows(source, rows=6)
    assert {name: len(rows) for name, rows in made.drafts.items()} == {"edit": 3, "fresh": 3}
    assert "6 of 48 conversations are used, spread over the file" in made.notes
    assert len(made.recall) <= 6
    assert spread(range(10), 3) == [1, 5, 8]
    assert spread(range(10), 20) == list(range(10))
    assert spread(range(1000), 999)[-1] == 999


def test_token_ids_are_taken_as_they_are(source: Checkpoint, tmp_path: Path) -> None:
    data = tmp_path / "rows.json"
    data.write_text(json.dumps([[1, 2, 3, 4], [5, 6], [7, 8, 9]]))
    made = load_rows(source, data, rows=2, tokens=16)
    assert made.text == [(1, 2, 3, 4), (5, 6)] or made.text == ((1, 2, 3, 4), (5, 6))
    assert made.drafts == {"text": (DraftRow((1, 2, 3, 4)), DraftRow((5, 6)))}
    data.write_text(json.dumps([[1, 2048]]))
    with pytest.raises(CalibrationError, match="no token ids of this model"):
        load_rows(source, data)


def test_a_calibration_mix_serves_with_a_warning(source: Checkpoint) -> None:
    made = load_rows(source, "general-chat", rows=3, tokens=64)
    assert len(made.text) == 3
    assert any("flatter" in note for note in made.notes)


def test_faulty_tasks_are_named_all_at_once(source: Checkpoint, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "Say yes"}], "answer": "yes"}
    tasks = jsonl(tmp_path / "tasks.jsonl", [good, {"answer": "x"}, {**good, "answer": ""}, chat("a", "b", answer="c")])
    with pytest.raises(CalibrationError, match="no recall tasks") as caught:
        load_rows(source, tasks=tasks, rows=1, tokens=64)
    assert [problem.where for problem in caught.value.problems] == [f"tasks.jsonl:{n}" for n in (2, 3, 4)]
    with pytest.raises(CalibrationError, match="no such file"):
        load_rows(source, tasks=tmp_path / "none.jsonl")
    with pytest.raises(CalibrationError, match="no such file"):
        load_rows(source, tmp_path / "none.jsonl")
    with pytest.raises(CalibrationError, match="rows=0"):
        load_rows(source, rows=0)


def test_a_template_that_loses_reasoning_costs_those_rows_and_says_so(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    made = load_rows(with_template(tmp_path / "plain", plain), tokens=64)
    assert "conversations left out: template-loses-reasoning 16" in made.notes
    assert len(made.text) == 32


def test_without_a_template_token_ids_still_serve(tmp_path: Path) -> None:
    bare = with_template(tmp_path / "bare", None)
    with pytest.raises(CalibrationError, match="no row is left") as caught:
        load_rows(bare)
    assert "data=FILE.json" in caught.value.hint
    data = tmp_path / "rows.json"
    data.write_text("[[1, 2, 3]]")
    made = load_rows(bare, data, rows=1)
    assert made.notes == ("recall tasks left out: no-chat-template 1",)
    (bare.path / "tokenizer.json").unlink()
    (bare.path / "tokenizer_config.json").unlink()
    made = load_rows(bare, data)
    assert made.recall == ()
    assert "no tokenizer files" in made.notes[0]
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        load_rows(bare)


def test_the_digest_covers_everything_that_is_run() -> None:
    base = EvaluationRows([(1, 2)], [((1,), (2,))], {"text": [DraftRow((1, 2))]})
    others = [
        EvaluationRows([(1, 3)], base.recall, base.drafts),
        EvaluationRows(base.text, [((1,), (3,))], base.drafts),
        EvaluationRows(base.text, base.recall, {"text": [DraftRow((1, 2), ((0, 1),))]}),
        EvaluationRows(base.text, base.recall, {"edit": base.drafts["text"]}),
    ]
    assert len({each.digest for each in (base, *others)}) == 5
    assert EvaluationRows([[1, 2]], base.recall, base.drafts, ("a note",)).digest == base.digest
