"""`sparkquant recipes`, `diff`, and the documents beside the recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkquant.planning import plan
from sparkquant.recipe_files import load_recipe, recipe_names
from sparkquant.recipe_schema import recipe_schema_text
from tests.cli.running import DEMO, ROOT, invoke

GUIDE = ROOT / "recipes" / "README.md"


def test_ls_lists_every_recipe() -> None:
    text = invoke("recipes", "ls").stdout
    assert [line.split()[0] for line in text.splitlines()[1:] if line[0] != " "] == recipe_names()
    rows = json.loads(invoke("recipes", "ls", "--json").stdout)
    assert [row["name"] for row in rows] == recipe_names()
    assert all(set(row) == {"name", "summary", "families"} for row in rows)


def test_ls_by_family() -> None:
    rows = json.loads(invoke("recipes", "ls", "--family", "qwen3_next", "--json").stdout)
    assert rows
    assert all("qwen3_next" in row["families"] for row in rows)
    result = invoke("recipes", "ls", "--family", "qwen3_nxt")
    assert result.exit_code == 2
    assert "did you mean 'qwen3_next'?" in result.stderr


def test_show_prints_the_file() -> None:
    for name in recipe_names():
        assert invoke("recipes", "show", name).stdout == (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert invoke("recipes", "show", "nothing").exit_code == 2


def test_copy_never_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "qwen-hybrid-w4a16"
    text = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert invoke("recipes", "copy", name).stdout == f"{name}.yaml\n"
    assert (tmp_path / f"{name}.yaml").read_text(encoding="utf-8") == text
    (tmp_path / f"{name}.yaml").write_text("mine", encoding="utf-8")
    again = invoke("recipes", "copy", name, ".")
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert (tmp_path / f"{name}.yaml").read_text(encoding="utf-8") == "mine"
    assert invoke("recipes", "copy", name, "other.yaml").exit_code == 0
    assert load_recipe(tmp_path / "other.yaml").name == name
    assert invoke("recipes", "copy", name, "no/folder/x.yaml").exit_code == 2


def test_lint_reports_every_fault_with_its_place(tmp_path: Path) -> None:
    good, bad, absent = ROOT / "recipes" / "qwen-hybrid-fp8.yaml", tmp_path / "bad.yaml", tmp_path / "absent.yaml"
    bad.write_text(
        "name: bad\nsummary: a recipe with faults\nfamilies: [qwen3_5]\nschemes:\n  mlp.gate_up: w4a17\n"
        "  mtp: w4a16\ncolour: red\n",
        encoding="utf-8",
    )
    result = invoke("recipes", "lint", good, bad, absent)
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert f"{good}: ok" in lines
    assert any(line.startswith(f"{bad}:5:") and "w4a16" in line for line in lines)
    assert any(line.startswith(f"{bad}:7:") and "colour" in line for line in lines)
    assert any(line.startswith(f"{absent}: ") for line in lines)
    assert "Traceback" not in result.stderr


def test_lint_takes_a_bare_word_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen-hybrid-w4a16").write_text("name: [", encoding="utf-8")
    assert invoke("recipes", "lint", "qwen-hybrid-w4a16").exit_code == 2


def test_shipped_recipes_pass_lint() -> None:
    assert invoke("recipes", "lint", *sorted((ROOT / "recipes").glob("*.yaml"))).exit_code == 0


def test_schema_file_is_what_the_code_says() -> None:
    text = invoke("recipes", "schema").stdout
    assert text == recipe_schema_text()
    assert (ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8") == text, (
        "run: sparkquant recipes schema > recipes/recipe.schema.json"
    )


def test_diff_of_recipes() -> None:
    result = invoke("diff", "qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head")
    assert result.exit_code == 0
    assert "+ schemes.lm_head: scheme w4a16" in result.stdout
    fields = json.loads(invoke("diff", "qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head", "--json").stdout)
    assert fields["kind"] == "recipe"
    assert {"schemes.lm_head", "name"} <= {change["what"] for change in fields["changes"]}
    assert "no differences" in invoke("diff", "qwen-hybrid-fp8", "qwen-hybrid-fp8").stdout
    unlike = invoke("diff", "qwen-hybrid-fp8", ROOT / "examples" / "hybrid-5m", "--json")
    assert (unlike.exit_code, unlike.stdout) == (2, "")


def test_diff_of_plans(big: Path, tmp_path: Path) -> None:
    for name in ("qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head"):
        assert invoke("plan", big, "-r", name, "--out", tmp_path / f"{name}.json").exit_code == 0
    result = invoke("diff", tmp_path / "qwen-hybrid-w4a16.json", tmp_path / "qwen-hybrid-w4a16-head.json")
    assert "~ totals.output_bytes: 19452526304 -> 17565" in result.stdout
    assert "~ lm_head.weight: keep -> scheme w4a16" in result.stdout


def hybrid_recipes() -> list[str]:
    """Recipes for the family of the 27B and of the demo checkpoint."""
    return [name for name in recipe_names() if "qwen3_5" in load_recipe(name).families]


def guide_rows(text: str) -> dict[str, list[str]]:
    """Rows of the size table, the only one with so many columns, by recipe name."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return {row[0].strip("`"): row[1:] for row in rows if len(row) > 6 and row[0].strip("`") in hybrid_recipes()}


def test_the_guide_names_every_recipe() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in text] == []


def sizes(name: str, big: Path, moe: Path) -> list[str]:
    """What the tables say of a recipe, from its plans."""
    made = plan(big, name)
    totals = made.totals
    return [
        f"{totals['output_bytes'] / 2**30:.2f}",
        f"{totals['output_bytes']:,}",
        f"{totals['bits_per_weight']:.2f}",
        f"{made.footprint.decode_ceiling_tps:.1f}",
        f"{plan(moe, name).totals['output_bytes'] / 2**30:.2f}",
        f"{plan(DEMO, name).totals['output_bytes'] / 2**20:.2f}",
    ]


def test_documents_list_every_recipe_with_its_exact_sizes(big: Path, moe: Path) -> None:
    expected = {name: sizes(name, big, moe) for name in hybrid_recipes()}
    for document in ("recipes/README.md", "README.md"):
        rows = guide_rows((ROOT / document).read_text(encoding="utf-8"))
        assert {name: cells[:6] for name, cells in rows.items()} == expected, document
