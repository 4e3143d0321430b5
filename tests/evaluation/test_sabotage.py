"""Results worse on purpose, made by editing the bytes of a real one: the right numbers move, the others stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.drafting import NO_HEAD
from sparkquant.errors import CheckFailed, CheckpointError
from sparkquant.evaluation import Evaluation, compare, evaluate, paired
from sparkquant.evaluation_data import EvaluationRows
from sparkquant.pairing import demand_pair
from tests.checkpoints import RawTensors, write_json
from tests.evaluation.conftest import EXAMPLE, Edited, store, to_int4, values_of

pytest.importorskip("transformers")

LAYER = "model.language_model.layers.2."


def test_rounded_gates_cost_quality(source: Checkpoint, rows: EvaluationRows, edited: Edited, tmp_path: Path) -> None:
    """In an FP8 result, whose own loss is small; in int4 four short rows cannot tell it from the rounding elsewhere."""
    good = sparkquant.quantize(EXAMPLE, "qwen-hybrid-fp8", tmp_path / "good", method="rtn").out
    bad = edited(good, lambda tensors: to_int4(tensors, "in_proj_a", "in_proj_b"))
    before, after = (compare(Checkpoint.open(folder), source, rows) for folder in (good, bad))
    difference = paired(before, after)
    assert difference.mean > 2 * difference.se > 0
    assert after.layers[0] > before.layers[0]
    assert after.recall == before.recall


def test_rounded_gates_alone_show_where_they_are(source: Checkpoint, rows: EvaluationRows, edited: Edited) -> None:
    bad = edited(EXAMPLE, lambda tensors: to_int4(tensors, "layers.1.linear_attn.in_proj_a"))
    found = compare(Checkpoint.open(bad), source, rows)
    assert found.kl_mean > 1e-6
    assert found.layers[0] == 0 < found.layers[1]


def test_wrong_scales_name_their_layer(
    quantized: Path, source: Checkpoint, rows: EvaluationRows, measured: Evaluation, edited: Edited
) -> None:
    def enlarge(tensors: RawTensors) -> None:
        scales = [name for name in tensors if name.startswith(LAYER) and name.endswith("weight_scale")]
        assert len(scales) == 6
        for name in scales:
            store(tensors, name, 1.3 * values_of(tensors, name))

    found = compare(Checkpoint.open(edited(quantized, enlarge)), source, rows)
    difference = paired(measured, found)
    assert difference.mean > 5 * difference.se > 0
    assert found.kl_mean > 3 * measured.kl_mean
    assert found.worst_layers(1)[0][0] == 2
    assert found.layers[:2] == measured.layers[:2]
    assert found.nll["source"] == measured.nll["source"] < measured.nll["result"] < found.nll["result"]
    assert found.top1 < measured.top1


def crude(tensors: RawTensors) -> None:
    """Four bits with one scale for a whole matrix."""
    for name in heads(tensors):
        weight = values_of(tensors, name)
        scale = weight.abs().max() / 7
        store(tensors, name, (weight / scale).round() * scale)


def noise(tensors: RawTensors) -> None:
    random = torch.Generator().manual_seed(0)
    for name in heads(tensors):
        weight = values_of(tensors, name)
        store(tensors, name, weight.std() * torch.randn(weight.shape, generator=random))


def swapped(tensors: RawTensors) -> None:
    """The halves of fc in the other order, as a converter that joins them the wrong way round would write them."""
    store(tensors, "mtp.fc.weight", torch.cat(values_of(tensors, "mtp.fc.weight").chunk(2, dim=1)[::-1], dim=1))


def heads(tensors: RawTensors) -> list[str]:
    """The matrices of the draft head."""
    return [name for name, (_, shape, _raw) in tensors.items() if name.startswith("mtp.") and len(shape) == 2]


@pytest.mark.parametrize(("change", "most"), [(crude, 0.9), (noise, 0.1), (swapped, 0.5)])
def test_a_damaged_draft_head_costs_acceptance_alone(
    change: object, most: float, quantized: Path, source: Checkpoint, rows: EvaluationRows, measured: Evaluation,
    edited: Edited,
) -> None:  # fmt: skip
    found = compare(Checkpoint.open(edited(quantized, change)), source, rows)  # type: ignore[arg-type]
    assert found.kl_rows == measured.kl_rows
    assert found.layers == measured.layers
    assert found.nll == measured.nll
    before, after = (each.acceptance["text"] for each in (measured, found))
    assert after["source"] == before["source"]
    assert after["result"][0] < most * before["result"][0]


def test_a_lost_draft_head_is_told(
    quantized: Path, source: Checkpoint, rows: EvaluationRows, measured: Evaluation, edited: Edited
) -> None:
    def drop(tensors: RawTensors) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    found = compare(Checkpoint.open(edited(quantized, drop)), source, rows)
    assert found.undrafted == {"result": NO_HEAD}
    assert found.acceptance == {"text": {"source": measured.acceptance["text"]["source"]}}
    assert found.kl_rows == measured.kl_rows


def test_a_torn_draft_head_is_told(quantized: Path, source: Checkpoint, rows: EvaluationRows, edited: Edited) -> None:
    bad = edited(quantized, lambda tensors: tensors.pop("mtp.layers.0.self_attn.k_norm.weight"))  # type: ignore[arg-type]
    found = compare(Checkpoint.open(bad), source, rows)
    assert list(found.undrafted) == ["result"]
    assert "mtp.layers.0.self_attn.k_norm.weight" in found.undrafted["result"]


# NaN


def poison(name: str, value: float = float("nan")) -> object:
    """Put one bad value into a tensor."""

    def change(tensors: RawTensors) -> None:
        values = values_of(tensors, name)
        values.view(-1)[0] = value
        store(tensors, name, values)

    return change


@pytest.mark.parametrize(
    ("name", "where"),
    [
        (f"{LAYER}mlp.down_proj.weight_scale", "behind block 2"),
        (f"{LAYER}linear_attn.A_log", "behind block 2"),
        ("model.language_model.norm.weight", "in its logits"),
        ("lm_head.weight", "in its logits"),
        ("mtp.fc.weight", "in its draft head"),
    ],
)
def test_nan_is_a_fault_and_never_part_of_a_mean(
    name: str, where: str, quantized: Path, source: Checkpoint, rows: EvaluationRows, edited: Edited
) -> None:
    short = EvaluationRows([ids[:24] for ids in rows.text], (), {"text": rows.drafts["text"][:1]})
    bad = Checkpoint.open(edited(quantized, poison(name)))  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match=f"the result computes NaN or infinity {where}"):
        compare(bad, source, short)
    with pytest.raises(CheckpointError, match=f"the source computes NaN or infinity {where}"):
        compare(source, bad, short)


def test_infinite_logits_are_a_fault_in_recall_too(quantized: Path, source: Checkpoint, edited: Edited) -> None:
    bad = Checkpoint.open(edited(quantized, poison("lm_head.weight", float("inf"))))  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match="in its logits"):
        compare(bad, source, EvaluationRows((), [((5, 6, 7), (8, 9))]))


# Pairs that are none


def test_another_architecture_is_no_source(quantized: Path, tmp_path: Path) -> None:
    wider = tmp_path / "wider"
    wider.mkdir()
    for entry in EXAMPLE.iterdir():
        (wider / entry.name).symlink_to(entry)
    config = json.loads((EXAMPLE / "config.json").read_text())
    config["text_config"] |= {"vocab_size": 4096, "num_attention_heads": 4}
    (wider / "config.json").unlink()
    write_json(wider / "config.json", config)
    with pytest.raises(CheckpointError, match="different models") as caught:
        evaluate(quantized, source=wider)
    assert [problem.where for problem in caught.value.problems] == [
        "config.json: num_attention_heads",
        "config.json: vocab_size",
    ]
    assert "2048 in the result, 4096 in the source" in str(caught.value)


def test_other_weights_are_no_source(quantized: Path, edited: Edited) -> None:
    def reorder(tensors: RawTensors) -> None:
        name = "model.language_model.embed_tokens.weight"
        store(tensors, name, values_of(tensors, name).flip(0))

    with pytest.raises(CheckpointError, match=r"different models: their embeddings differ by \d+%"):
        evaluate(quantized, source=edited(EXAMPLE, reorder))


def test_a_tuned_source_is_doubted(quantized: Path, edited: Edited) -> None:
    def tune(tensors: RawTensors) -> None:
        name = "model.language_model.embed_tokens.weight"
        store(tensors, name, values_of(tensors, name) * 1.02)

    result = Checkpoint.open(quantized)
    (doubt,) = demand_pair(result, Checkpoint.open(edited(EXAMPLE, tune)))
    assert doubt == "the embeddings differ by 2.0%: was the result made from this source?"
    assert demand_pair(result, Checkpoint.open(EXAMPLE)) == ()
