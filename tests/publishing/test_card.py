"""The card says what was measured, with its conditions, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from sparkquant import evidence
from sparkquant.card import NOTES_BEGIN, NOTES_END, CardPlace, Standing, card_text, standing_of
from sparkquant.card_metadata import card_metadata
from sparkquant.errors import CheckpointError
from sparkquant.marlin.bench_record import make_record
from sparkquant.recipe_files import load_recipe, recipe_names
from sparkquant.serve_command import serve_command, serve_flags
from tests.cli.running import DEMO, invoke
from tests.publishing.hub_server import metadata_faults


def card(folder: Path, repository: str = "me/demo", base_model: str = "them/hybrid-5m") -> str:
    """The card of a folder as it is now."""
    digest = evidence.checkpoint_digest(folder)
    return card_text(folder, evidence.read(folder, digest=digest), digest, CardPlace(repository, base_model))


def front(text: str) -> dict[str, Any]:
    """Its front matter."""
    found = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def section(text: str, title: str) -> str:
    """One section; empty when there is none."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return match[1] if match else ""


# Metadata


def test_metadata_is_the_sources_and_what_the_hub_takes(ready: Path) -> None:
    text = card(ready)
    assert front(text) == {
        "base_model": ["them/hybrid-5m"],
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "language": ["en", "de"],
        "pipeline_tag": "text-generation",
        "tags": ["code", "hybrid", "sparkquant", "sparkquant-validated", "compressed-tensors", "fp8"],
    }
    assert list(metadata_faults(text)) == []
    read = ModelCard(text)  # the hub's own reader
    assert read.data.base_model == ["them/hybrid-5m"]
    assert read.data.license == "apache-2.0"
    assert "# demo" in read.text


def test_an_unknown_source_is_not_made_up(ready: Path) -> None:
    text = card(ready, base_model="")
    assert "base_model" not in front(text)
    assert "huggingface.co" not in text
    assert list(metadata_faults(text)) == []


def test_a_base_model_that_was_stated_once_stays(ready: Path) -> None:
    (ready / "README.md").write_text(card(ready))
    assert front(card(ready, base_model=""))["base_model"] == ["them/hybrid-5m"]


@pytest.mark.parametrize(
    "metadata",
    [
        "license: [1, 2]\nlanguage: {a: b}\ntags: 5\n",
        "license: &a mit\nlanguage: *a\n",
        "license: !!python/object/apply:os.system [true]\n",
        "license: 2024-01-01\ntags: [2024-01-01, true, ok]\n",
        "- a list\n",
        "a: [unclosed\n",
        'license: "a\\nb"\n',
    ],
)
def test_a_strangers_metadata_is_text_or_nothing(ready: Path, metadata: str) -> None:
    (ready / "SOURCE_README.md").write_text(f"---\n{metadata}---\n# x\n")
    text = card(ready)
    assert list(metadata_faults(text)) == []
    assert {"license", "language"}.isdisjoint(front(text))
    assert set(front(text)["tags"]) <= {"ok", "sparkquant", "sparkquant-verified", "sparkquant-candidate", "fp8",
                                       "sparkquant-validated", "compressed-tensors"}  # fmt: skip


def test_a_card_without_front_matter_carries_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# a model\n")
    assert card_metadata(tmp_path / "README.md") == {}
    assert card_metadata(tmp_path / "absent.md") == {}
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert card_metadata(tmp_path / "README.md") == {}


# Contents


def test_everything_is_said_as_it_was_measured(ready: Path) -> None:
    text = card(ready)
    plan = json.loads((ready / "sparkquant/plan.json").read_text())
    found = evidence.read(ready)["evaluate"].result
    assert f"exactly {plan['totals']['output_bytes']:,} bytes" in text
    assert f"{found['kl_mean']:.5f}" in section(text, "What was lost")
    assert f"{found['nll']['source']:.4f} | {found['nll']['result']:.4f}" in section(text, "What was lost")
    assert f"{found['tokens']:,} tokens" in section(text, "What was lost")
    assert found["data"][:16] in section(text, "What was lost")
    for name, sides in found["acceptance"].items():
        for side, rates in sides.items():
            row = " | ".join(f"{100 * rate:.1f} %" for rate in rates)
            assert f"| {name} | {side} | {found['drafts'][name]:,} | {row} |" in text
    kept = section(text, "What is 16-bit, and why")
    for row in plan["classes"]:
        assert (f"| `{row['class']}` |" in kept) == (row["scheme"] == "keep")
        assert f"| `{row['class']}` | {row['scheme']} | {row['tensors']:,} | {row['parameters']:,} |" in text
    assert "```yaml\n" + (ready / "sparkquant/recipe.yaml").read_text().rstrip() + "\n```" in text
    assert evidence.checkpoint_digest(ready) in text


def test_tables_are_tables(ready: Path) -> None:
    widths: list[int] = []
    for line in [*card(ready).splitlines(), ""]:
        if line.startswith("|"):
            widths.append(len(re.findall(r"(?<!\\)\|", line)))
        else:
            assert len(set(widths)) <= 1, line
            widths = []


def test_what_was_not_measured_is_named_and_has_no_section(ready: Path) -> None:
    for verb in ("evaluate", "validate"):
        (ready / f"sparkquant/evidence/{verb}.json").unlink()
    text = card(ready)
    assert "**Status: candidate.**" in text
    assert "No `evaluate` was recorded. No `validate` was recorded. No `bench` was recorded." in text
    assert section(text, "What was lost") == section(text, "Run on the engine") == section(text, "Throughput") == ""
    assert "KL" not in text


def test_stale_numbers_are_not_shown(ready: Path) -> None:
    (ready / "tokenizer.json").write_bytes((ready / "tokenizer.json").read_bytes() + b"\n")
    text = card(ready)
    assert "The record of `evaluate` is stale: the checkpoint has changed since." in text
    assert section(text, "What was lost") == ""
    assert "**Status: candidate.**" in text


def test_the_status_climbs_with_the_evidence(ready: Path) -> None:
    def status() -> Standing:
        return standing_of(evidence.read(ready))

    assert status() is Standing.VALIDATED
    evidence.record(ready, "validate", {"verdict": "kernel-fault"})
    assert status() is Standing.VERIFIED
    assert "`validate`: fail." in card(ready)
    evidence.record(ready, "evaluate", {**evidence.read(ready)["evaluate"].result, "ok": False})
    assert status() is Standing.CANDIDATE


def test_a_run_is_shown_with_its_conditions(ready: Path) -> None:
    result = {"decode": {"c1": 41.25}, "prompts": "distinct", "speculative": {"method": "mtp", "k": 2}, "runs": [1, 2]}
    evidence.record(ready, "bench", result)
    shown = section(card(ready), "Throughput")
    for row in ("| decode: c1 | 41.25 |", "| prompts | distinct |", "| speculative: method | mtp |"):
        assert row in shown


BENCH = {
    "model": "out", "versions": {"vllm": "0.25.1", "sparkquant": "0.1.0"}, "capability": "9.0", "hardware": "a GPU",
    "environment": {"VLLM_MARLIN_USE_ATOMIC_ADD": "1"}, "arguments": ["--enforce-eager"],
    "speculation": {"method": "none", "k": 0}, "thinking": False, "cache": {"state": "off", "hit_rate": 0.0},
    "lengths": {"prompt": 300.0, "output": 120.0, "max_tokens": 256, "ended": 0.9}, "kv_cache_tokens": 20000,
    "prompts": "bundled conversations", "distinct_prompts": 12, "warm_up_rounds": 1, "acceptance": {},
    "decode": {"edit": {"rounds": [40.0, 41.0, 60.0]}}, "aggregate": {"8": {"rounds": [200.0, 210.0, 205.0]}},
    "prefill": {"rounds": [1000.0, 1010.0, 990.0]}, "first_token": {"rounds": [0.3, 0.31, 0.29]},
}  # fmt: skip


def test_a_benchmark_is_medians_and_all_its_conditions(ready: Path) -> None:
    evidence.record(ready, "bench", make_record(BENCH).as_json())
    shown = section(card(ready), "Throughput")
    assert "| decode, one stream, edit | 41.0 tokens per second |" in shown
    assert "| 8 at once, together | 205.0 tokens per second |" in shown
    for row in ("cache: state | off", "capability | 9.0", "arguments | --enforce-eager", "thinking | no",
                "environment: VLLM_MARLIN_USE_ATOMIC_ADD | 1", "speculation: method | none", "hardware | a GPU",
                "lengths: output | 120", "distinct prompts | 12", "versions: vllm | 0.25.1"):  # fmt: skip
        assert f"| {row} |" in shown, row
    assert "the rounds differ by" in shown  # its own warnings come along


def test_a_record_of_another_shape_is_told(ready: Path) -> None:
    evidence.record(ready, "evaluate", {"rows": 3})
    with pytest.raises(CheckpointError, match="the evidence does not hold what the card states"):
        card(ready)


def test_your_own_words_stay(ready: Path) -> None:
    text = card(ready).replace(f"{NOTES_BEGIN}\n", f"{NOTES_BEGIN}\n\n## Thanks\n\nto everybody\n\n")
    (ready / "README.md").write_text(text)
    again = card(ready)
    assert f"{NOTES_BEGIN}\n## Thanks\n\nto everybody\n{NOTES_END}" in again
    (ready / "README.md").write_text(again)
    assert card(ready) == again


def test_the_same_evidence_gives_the_same_bytes(ready: Path, tmp_path: Path) -> None:
    first = card(ready)
    (ready / "README.md").write_text(first)
    moved = ready.rename(tmp_path / "elsewhere")
    assert card(moved) == first
    assert str(tmp_path) not in first


def test_foreign_text_cannot_leave_its_place(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    summary = "a | b ``` <script>alert(1)</script> [x](http://example.org)"
    recipe.write_text(
        f'extends: qwen-hybrid-fp8\nname: mine\nsummary: "{summary}"\nmethod: rtn\n# ``` ends no block\n',
        encoding="utf-8",
    )
    out = tmp_path / "out"
    assert invoke("quantize", DEMO, "-r", recipe, "-o", out).exit_code == 0
    text = (out / "README.md").read_text()
    before, _, block = text.partition("<details>")
    assert "<script>" not in before
    assert "](http://example.org)" not in before
    assert block.index("````yaml") < block.index("# ``` ends no block") < block.index("\n````\n")


# Serving


def test_the_command_has_the_flags_that_the_checkpoint_needs(ready: Path) -> None:
    assert (
        "$ VLLM_MARLIN_USE_ATOMIC_ADD=1 vllm serve me/demo"
        """ --speculative-config '{"method":"mtp","num_speculative_tokens":2}'\n"""
    ) in section(card(ready), "Serve")
    assert serve_flags({}, {"draft_head_tensors": 0}) == []
    assert serve_flags({"auto_map": {"AutoModel": "m.M"}}, {}) == ["--trust-remote-code"]
    assert serve_command("'a b'", {}, {}).endswith("vllm serve 'a b'")


def test_known_bad_engines_are_those_of_the_schemes(ready: Path) -> None:
    shown = section(card(ready), "Serve")
    assert "FP8" in shown
    assert "CUTLASS FP4 kernels printed garbage" not in shown  # a row of NVFP4 alone


# Every recipe


OWN = [name for name in recipe_names() if name.startswith("qwen-hybrid") and not load_recipe(name).method.delegated]


@pytest.mark.parametrize("recipe", OWN)
def test_every_recipe_of_the_demo_has_a_card(recipe: str, demo_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke("quantize", demo_source, "-r", recipe, "--method", "mse", "-o", out).exit_code == 0
    text = (out / "README.md").read_text()
    assert list(metadata_faults(text)) == []
    assert "**Status: candidate.**" in text
    assert (out / "SOURCE_README.md").read_bytes() == (demo_source / "README.md").read_bytes()


def test_a_card_of_ours_in_a_source_is_kept_aside_as_any_other(demo_source: Path, tmp_path: Path) -> None:
    source = tmp_path / "again"
    shutil.copytree(demo_source, source)
    (source / "SOURCE_README.md").write_text("the first card")
    out = tmp_path / "out"
    assert invoke("quantize", source, "--method", "rtn", "-o", out).exit_code == 0
    assert (out / "SOURCE_README.md").read_bytes() == (source / "README.md").read_bytes()
    assert (out / "SOURCE_SOURCE_README.md").read_text() == "the first card"
