"""recipes/README.md is what its records say: every recipe is in it, and every number has a source."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks import guide
from sparkquant.planning import plan
from sparkquant.recipe_files import load_recipe, recipe_names
from tests.cli.running import DEMO

TEXT = guide.GUIDE.read_text(encoding="utf-8")
RECORDS = guide.read_records()
AGAIN = "measure it again: python -m benchmarks.records --recipe NAME, then python -m benchmarks.guide"


def test_the_tables_are_those_of_the_records() -> None:
    assert guide.filled(TEXT) == TEXT, "run: python -m benchmarks.guide"


def test_every_recipe_is_in_a_table() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", TEXT, re.MULTILINE)
    assert sorted(set(rows)) == recipe_names()


def test_every_recipe_has_a_record_or_is_said_to_have_none() -> None:
    others = re.search(r"<!-- others -->(.*?)<!-- /others -->", TEXT, re.DOTALL)
    assert others is not None
    assert "None of these has a record" in others[1]
    listed = re.findall(r"^\| `([^`]+)` \|", others[1], re.MULTILINE)
    assert sorted([*RECORDS, *guide.unmeasured(RECORDS), *listed]) == recipe_names()


def test_every_recipe_of_the_hybrids_is_planned() -> None:
    planned = guide.read_plans()
    assert {(name, model) for name in guide.hybrids() for model in (guide.BIG, guide.MIXTURE, guide.DEMO)} <= set(
        planned
    )
    assert set(guide.EXAMPLES.items()) <= set(planned)
    assert {name for name, _ in planned} <= set(recipe_names())
    assert set(RECORDS) <= set(guide.hybrids())
    assert guide.FIRST in RECORDS


def test_what_was_not_measured_as_it_is_shipped_is_named() -> None:
    measured = re.search(r"<!-- measured -->(.*?)<!-- /measured -->", TEXT, re.DOTALL)
    assert measured is not None
    for names, words in (
        (guide.other_methods(RECORDS), "These ship with another method than they were measured with here:"),
        (guide.unmeasured(RECORDS), "Without a record, not measured:"),
    ):
        told = [line for line in measured[1].splitlines() if line.startswith(words)]
        assert [re.findall(r"`([^`]+)`", line) for line in told] == ([names] if names else [])


@pytest.mark.parametrize("name", guide.hybrids())
def test_plans_are_those_of_today(name: str) -> None:
    row = guide.read_plans()[name, guide.DEMO]
    made = plan(DEMO, name)
    assert row["bytes"] == made.totals["output_bytes"]
    assert row["bits_per_weight"] == made.totals["bits_per_weight"]
    assert row["decode_bytes"] == made.footprint.decode_bytes


@pytest.mark.slow
def test_all_plans_are_those_of_today() -> None:
    assert guide.plans() == list(guide.read_plans().values()), "run: python -m benchmarks.guide --plans"


def numbers_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """What of a recipe decides its numbers: not its words; the method stands beside them, the rows in the record."""
    return {key: recipe.get(key) for key in ("schemes", "overrides", "unprotect")}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_of_the_recipe_as_it_is_shipped(name: str) -> None:
    assert numbers_of(RECORDS[name]["recipe"]) == numbers_of(load_recipe(name).as_json()), AGAIN


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_whole_and_states_its_conditions(name: str) -> None:
    record, found = RECORDS[name], RECORDS[name]["result"]
    assert len(found["kl_rows"]) == found["rows"] == 24
    assert found["kl_mean"] == pytest.approx(sum(found["kl_rows"]) / 24)
    assert sum(found["kl_histogram"]["counts"]) == found["tokens"] == 24 * 512
    assert found["data"] == RECORDS[guide.FIRST]["result"]["data"], "measured on other rows than the others"
    assert record["model"] == RECORDS[guide.FIRST]["model"]
    assert {"data", "tasks", "calibration", "activations", "device"} <= record["conditions"].keys()
    calibrated = load_recipe(name).with_method(record["recipe"]["method"]).method.calibrated
    assert (record["conditions"]["calibration"] is not None) == calibrated
    assert {"sparkquant", "torch", "machine"} <= record["versions"].keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+Z", record["date"])


def test_records_name_no_machine() -> None:
    for path in guide.FOLDER.glob("*.json"):
        assert not re.search(r"(?<![\w.])/(?:work|root|home|tmp|Users|mnt)/", json.dumps(json.loads(path.read_text())))


CONSTANTS = {"273", "0.33", "0.25", "0.26", "128", "100_000", "16", "8", "4", "10", "2"}
"""Numbers of the prose that are no results: the bandwidth of a GB10, engine versions, group size, bits."""


def test_the_prose_between_the_tables_states_no_number_of_its_own() -> None:
    prose = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", TEXT, flags=re.DOTALL)
    prose = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    prose = re.sub(r"`[^`]*`|\bw\d+a\d+\b|\b\w*\d+B\b|A\d+B|\b[A-Z]\w*[\d.]+-?\w*", "", prose)
    stated = set(re.findall(r"(?<![\w.-])\d[\d.,]*\d|(?<![\w.-])\d(?![\w.])", prose))
    assert stated <= CONSTANTS, f"{sorted(stated - CONSTANTS)}: move them into a generated part"
