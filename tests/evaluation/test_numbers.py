"""KL, top-1, NLL and recall against transformers' own forward and its own greedy decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import UsageError
from sparkquant.evaluation import Evaluation, compare, evaluate, paired
from sparkquant.evaluation_data import EvaluationRows, load_rows
from sparkquant.stream import StreamedModel
from sparkquant.weights import StoredWeights
from tests.evaluation.conftest import EXAMPLE
from tests.oracles.loading import load

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


@pytest.fixture(scope="module")
def original() -> nn.Module:
    """The source as transformers runs it."""
    return load(EXAMPLE, dtype=torch.float32)[0]


@pytest.fixture(scope="module")
def decompressed(quantized: Path) -> nn.Module:
    """The result as transformers runs it, its weights decompressed by compressed-tensors."""
    return load(quantized, dtype=torch.float32)[0]


def logits_of(model: nn.Module, rows: EvaluationRows) -> Iterator[Tensor]:
    """One row at a time, so nothing is padded."""
    for ids in rows.text:
        with torch.no_grad():
            yield model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def streamed(folder: Path, rows: EvaluationRows) -> dict[int, Tensor]:
    """Logits of every text row, block by block and padded in batches."""
    checkpoint = Checkpoint.open(folder)
    found = {}
    with StoredWeights(checkpoint) as weights, torch.no_grad():
        model = StreamedModel(checkpoint, weights)
        batches = list(model.embed(rows.text))
        assert len(batches) < len(rows.text)
        for index in range(model.depth):
            with model.block(index) as block:
                for batch in batches:
                    batch.hidden = model.run(block, index, batch.hidden)
        with model.head() as head:
            for batch in batches:
                for position, row in enumerate(batch.rows):
                    length = int(batch.valid[position].sum())
                    found[row] = head.logits(head.normalize(batch.hidden[position, :length]))
    return found


def test_streamed_logits_are_those_of_transformers(original: nn.Module, rows: EvaluationRows) -> None:
    found = streamed(EXAMPLE, rows)
    assert len(found) == len(rows.text)
    for row, expected in enumerate(logits_of(original, rows)):
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(found[row].argmax(-1), expected.argmax(-1))


def test_the_numbers_are_those_of_whole_models(
    measured: Evaluation, original: nn.Module, decompressed: nn.Module, rows: EvaluationRows
) -> None:
    kl, agree, nll, predicted = [], 0, [0.0, 0.0], 0
    every = []
    for ids, before, after in zip(rows.text, logits_of(original, rows), logits_of(decompressed, rows), strict=True):
        p, q = (logits.double().softmax(-1) for logits in (before, after))
        every.append((p * (p / q).log()).sum(-1))
        kl.append(float(every[-1].mean()))
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        for side, chances in enumerate((p, q)):
            nll[side] -= sum(math.log(chances[i, ids[i + 1]]) for i in range(len(ids) - 1))
        predicted += len(ids) - 1
    assert measured.rows == len(rows.text)
    assert measured.tokens == sum(map(len, rows.text))
    assert measured.kl_rows == pytest.approx(kl, rel=2e-3)
    assert measured.kl_mean == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    spread = torch.tensor(kl).std(unbiased=True) / len(kl) ** 0.5
    assert measured.kl_se == pytest.approx(float(spread), rel=2e-2)
    assert measured.kl_p99 == pytest.approx(float(torch.cat(every).quantile(0.99)), rel=0.1)
    assert measured.top1 == pytest.approx(agree / measured.tokens, abs=2.1 / measured.tokens)
    assert measured.nll == pytest.approx({"source": nll[0] / predicted, "result": nll[1] / predicted}, rel=1e-4)
    assert 0.02 < measured.kl_mean < 0.1


def test_the_layer_errors_are_those_of_whole_models(
    measured: Evaluation, original: nn.Module, decompressed: nn.Module, rows: EvaluationRows
) -> None:
    wrong = torch.zeros(5, dtype=torch.float64)
    whole = torch.zeros(5, dtype=torch.float64)
    for ids in rows.text:
        with torch.no_grad():
            a, b = (
                model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
                for model in (original, decompressed)
            )
        for index in range(4):  # behind the last block transformers has the final norm already
            wrong[index] += (b[index].double() - a[index].double()).square().sum()
            whole[index] += a[index].double().square().sum()
    expected = (wrong / whole).sqrt()[1:4]
    assert measured.layers[:3] == pytest.approx(expected.tolist(), rel=1e-3)
    assert len(measured.layers) == 4


def test_a_model_differs_in_nothing_from_itself(source: Checkpoint, rows: EvaluationRows) -> None:
    found = compare(source, source, rows)
    assert found.kl_mean == found.kl_se == found.kl_p99 == 0
    assert set(found.kl_rows) == {0}
    assert found.top1 == 1
    assert found.nll["source"] == found.nll["result"]
    assert set(found.layers) == {0}
    assert found.acceptance["text"]["source"] == found.acceptance["text"]["result"]
    assert found.drafts == {"text": 256}
    assert found.checks == ()
    assert found.ok


def test_a_row_of_several_purposes_runs_once_and_counts_in_each(source: Checkpoint) -> None:
    ids = tuple(range(5, 45))
    found = compare(source, source, EvaluationRows((ids, ids[:30], ids), ((ids[:20], ids[20:]),)))
    assert found.rows == 3
    assert found.tokens == 110
    assert found.recall["tasks"] == 1
    assert found.acceptance == {}


# Recall


def greedy(model: nn.Module, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What transformers writes, with its cache and its step-by-step kernels."""
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return tuple(whole[0, len(prompt) :].tolist())


def stub(number: int, name: str, *arguments: str) -> dict[str, object]:
    """A question like those that the example was trained on."""
    lines = [f"    def {name}({', '.join(('self', *arguments))}): ...", "    def close(self): ..."]
    question = "\n".join(["```python", f"class Thing{number}:", *lines, "```", f"What is the signature of `{name}`?"])
    answer = f"`{name}({', '.join(('self', *arguments))})`"
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


TASKS = [
    stub(1, "moor", "vessel: str", "days: int=1"),
    stub(2, "open", "path: str"),
    stub(3, "xqz_vorp", "zyl: Qwop[str, Blick]", "*", "frob: Trumm | None=Trumm.LEFT_77"),
    stub(4, "read", "size: int=-1"),
]


def test_recall_is_what_greedy_decoding_writes(
    quantized: Path, original: nn.Module, decompressed: nn.Module, source: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    made = load_rows(source, tasks=path, rows=4, tokens=200).recall
    assert len(made) == len(TASKS)
    found = compare(Checkpoint.open(quantized), source, EvaluationRows(((1, 2, 3),), made))
    expected = {
        side: sum(greedy(model, tuple(prompt), len(answer)) == tuple(answer) for prompt, answer in made)
        for side, model in (("source", original), ("result", decompressed))
    }
    assert {side: found.recall[side] for side in expected} == expected
    assert 0 < expected["source"] < len(TASKS)


def test_every_token_of_an_answer_counts(original: nn.Module, source: Checkpoint) -> None:
    prompt = tuple(load_rows(source, rows=1, tokens=60).text[0])
    answer = greedy(original, prompt, 8)
    wrong = [(*answer[:i], (answer[i] + 1) % 2000, *answer[i + 1 :]) for i in (0, 3, 7)]
    found = compare(source, source, EvaluationRows(((1, 2, 3),), [(prompt, a) for a in (answer, answer[:1], *wrong)]))
    assert found.recall == {"tasks": 5, "source": 2, "result": 2, "lost": 0}


# Comparing two results


def numbers(kl: tuple[float, ...], data: str = "same") -> Evaluation:
    """An evaluation with these rows."""
    return Evaluation(
        rows=len(kl), tokens=1, data=data, kl_mean=0, kl_se=0, kl_p99=0, kl_rows=kl, top1=1,
        nll={}, layers=(), recall={},
    )  # fmt: skip


def test_a_pair_is_compared_row_by_row() -> None:
    found = paired(numbers((0.1, 0.5, 0.9)), numbers((0.11, 0.52, 0.93)))
    assert found.rows == 3
    assert found.mean == pytest.approx(0.02)
    assert found.se == pytest.approx(0.01 / 3**0.5)
    assert sparkquant.paired is paired


def test_other_rows_are_no_pair() -> None:
    with pytest.raises(UsageError, match="different rows"):
        paired(numbers((0.1, 0.2)), numbers((0.1, 0.2), data="other"))
    with pytest.raises(UsageError, match="no standard error"):
        paired(numbers((0.1,)), numbers((0.1,)))


def test_evaluate_is_public_and_repeats_itself(quantized: Path, tmp_path: Path, rows: EvaluationRows) -> None:
    data = tmp_path / "rows.json"
    data.write_text(json.dumps([list(ids) for ids in rows.text]))
    first, second = (sparkquant.evaluate(quantized, source=EXAMPLE, data=data, rows=2, tokens=50) for _ in range(2))
    assert first == second
    assert sparkquant.evaluate is evaluate
    assert (first.rows, first.tokens) == (2, 100)
    assert first.notes == (
        "2 of 2 rows are cut to 50 tokens",
        "2 of 2 recall tasks are longer than 50 tokens and left out",
    )
    assert json.loads(json.dumps(first.as_json(), allow_nan=False))["ok"] is first.ok
