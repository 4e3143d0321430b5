"""What is known before any package is imported: the table, refusals at plan time, options, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant import layouts, quantizers
from sparkquant.cli.backends import backends_markdown
from sparkquant.errors import PlanError, RecipeError
from sparkquant.methods import DELEGATED, OPTIONS
from sparkquant.quantizers import QUANTIZERS, UNTRIED, capabilities, capability_rows
from sparkquant.recipe_files import load_recipe
from sparkquant.schemes import SCHEMES
from tests.cli.running import DEMO, ROOT, invoke
from tests.execution.runs import in_a_child
from tests.families.builders import build as build_family
from tests.families.configs import CASES

Checkpoints = Callable[..., Path]
CLASSES = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")


def recipe_for(scheme: str, method: Any, family: str = "qwen3_5") -> dict[str, Any]:
    return {
        "name": "try",
        "summary": "one scheme on some classes",
        "families": [family],
        "schemes": dict.fromkeys(CLASSES, scheme),
        "method": method,
    }


@pytest.mark.parametrize("method", DELEGATED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_plan_says_what_the_table_says(method: str, scheme: str) -> None:
    reason = next(
        row["reason"] for row in capabilities()
        if (row["method"], row["scheme"], row["family"]) == (method, scheme, "qwen3_5")
    )  # fmt: skip
    if not reason:
        assert sparkquant.plan(DEMO, recipe_for(scheme, method)).recipe.method.name == method
        return
    with pytest.raises(PlanError) as raised:
        sparkquant.plan(DEMO, recipe_for(scheme, method))
    told = [problem for problem in raised.value.problems if reason in problem.what]
    assert {problem.where for problem in told} == set(CLASSES)
    assert all(re.search(r"method mse, gptq(, \w+)* can do it", problem.hint) for problem in told)


def test_the_table_has_every_combination_once_and_a_reason_for_each_refusal() -> None:
    rows = capabilities()
    keys = {(row["method"], row["scheme"], row["family"]) for row in rows}
    assert len(rows) == len(keys) == len(DELEGATED) * len(SCHEMES) * len(layouts.family_names())
    assert {row["method"] for row in rows if not row["reason"]} == set(DELEGATED)
    assert all(row["reason"] == "" or len(row["reason"]) > 20 for row in rows)


@pytest.mark.parametrize("method", DELEGATED)
def test_a_family_that_was_never_tried_is_refused_with_that_reason(method: str, tmp_path: Path) -> None:
    tried = QUANTIZERS[method].families
    case = next(name for name, config in CASES.items() if layouts.layout_for(config).family not in tried)
    source = build_family(case, tmp_path / "m", side_files=True)
    family = layouts.layout_for(CASES[case]).family
    able = next(name for name, reason in QUANTIZERS[method].schemes.items() if not reason)
    layout = layouts.layout_for(CASES[case])
    classes = [str(c) for c in layout.linear_classes if str(c).startswith(("attention", "mlp", "experts"))]
    recipe = recipe_for(able, method, family) | {"schemes": dict.fromkeys(classes, able)}
    with pytest.raises(PlanError) as raised:
        sparkquant.plan(source, recipe)
    assert any(UNTRIED.format(title=QUANTIZERS[method].title) in p.what for p in raised.value.problems)


@pytest.mark.parametrize(
    ("method", "option", "instead"),
    [
        ({"name": "llmcompressor", "modifier": "awq"}, "modifier awq", "use modifier gptq or imatrix"),
        ({"name": "modelopt", "algorithm": "awq_lite"}, "algorithm awq_lite", "use algorithm max or mse"),
    ],
)
def test_awq_is_refused_because_it_rewrites_what_a_plan_keeps(
    method: dict[str, Any], option: str, instead: str
) -> None:
    with pytest.raises(PlanError) as raised:
        sparkquant.plan(DEMO, recipe_for("nvfp4a16", method))
    (problem,) = raised.value.problems
    assert option in problem.what
    assert re.search("norms,? (and )?gates", problem.what)
    assert problem.hint == instead


def test_a_scheme_that_one_modifier_lacks_is_refused_with_it_alone() -> None:
    assert sparkquant.plan(DEMO, recipe_for("fp8_block", "llmcompressor"))
    with pytest.raises(PlanError, match="no blocks"):
        sparkquant.plan(DEMO, recipe_for("fp8_block", {"name": "llmcompressor", "modifier": "imatrix"}))


def test_the_readme_holds_the_table_that_plans_are_judged_by() -> None:
    assert backends_markdown() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_command_lists_the_table() -> None:
    text = " ".join(invoke("recipes", "ls", "--backends").stdout.split())
    for row in capability_rows():
        assert row.subject in text
    for quantizer in QUANTIZERS.values():
        assert f"{quantizer.title} {quantizer.version}: {quantizer.install}" in text
    assert json.loads(invoke("recipes", "ls", "--backends", "--json").stdout) == capabilities()
    one = json.loads(invoke("recipes", "ls", "--backends", "--family", "qwen3_5", "--json").stdout)
    assert {row["family"] for row in one} == {"qwen3_5"}


def test_a_missing_package_is_exit_5_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = replace(QUANTIZERS["autoround"], distribution="auto-round-that-nobody-has")
    monkeypatch.setattr(quantizers, "QUANTIZERS", {**QUANTIZERS, "autoround": absent})
    result = invoke("quantize", DEMO, "-o", tmp_path / "out", "--method", "autoround")
    assert result.exit_code == 5
    assert 'pip install "sparkquant[autoround]"' in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_another_release_of_a_package_is_refused_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = replace(QUANTIZERS["modelopt"], distribution="numpy")
    monkeypatch.setattr(quantizers, "QUANTIZERS", {**QUANTIZERS, "modelopt": other})
    result = invoke("quantize", DEMO, "-r", "qwen-hybrid-nvfp4-fp8-modelopt", "-o", tmp_path / "out")
    assert result.exit_code == 5
    assert re.search(r"needs numpy 0\.47\.0, and \d+\.\S+ is installed", result.stderr)


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        (("--method", "{name: modelopt, algorithm: mse}", "--device", "cpu"), 5, "on a CUDA device alone"),
        (("--device", "cuda:99"), 5, "device 'cuda:99' cannot be used"),
        (("--max-memory", "1MiB"), 2, "holds the whole model"),
    ],
)
def test_a_machine_that_cannot_do_it_is_refused_before_a_folder_is_made(
    given: tuple[str, ...], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = replace(QUANTIZERS["modelopt"], distribution="torch", version=importlib.metadata.version("torch"))
    monkeypatch.setattr(quantizers, "QUANTIZERS", {**QUANTIZERS, "modelopt": present})
    out = tmp_path / "made" / "out"
    result = invoke("quantize", DEMO, "-r", "qwen-hybrid-nvfp4-fp8-modelopt", "-o", out, *given)
    assert result.exit_code == code
    assert told in result.stderr
    assert not out.parent.exists()


def test_planning_imports_no_quantizer_and_no_torch() -> None:
    code = (
        "import sys, sparkquant\n"
        "for method in ('autoround', 'llmcompressor'):\n"
        "    sparkquant.plan(sys.argv[1], 'qwen-hybrid-w4a16', method=method).to_json()\n"
        "sparkquant.plan(sys.argv[1], 'qwen-hybrid-nvfp4-fp8', method='modelopt').to_json()\n"
        "print(sorted({'torch', 'auto_round', 'modelopt', 'llmcompressor', 'transformers'} & set(sys.modules)))\n"
    )
    assert in_a_child(code, DEMO).stdout == "[]\n"


@pytest.mark.parametrize("name", ["qwen-hybrid-w4a16-autoround", "qwen-hybrid-nvfp4-fp8-modelopt",
                                  "qwen-hybrid-nvfp4a16-mlp-llmcompressor"])  # fmt: skip
def test_a_recipe_of_another_quantizer_has_the_modules_of_its_base(name: str) -> None:
    base = name.rpartition("-")[0]
    mine, theirs = sparkquant.plan(DEMO, name), sparkquant.plan(DEMO, base)
    assert mine.totals == theirs.totals
    assert [d.as_json() for d in mine.decisions.values()] == [d.as_json() for d in theirs.decisions.values()]
    assert mine.digest != theirs.digest
    assert mine.footprint.working_bytes > theirs.footprint.working_bytes  # it holds the whole model


@pytest.mark.parametrize("method", OPTIONS)
def test_options_belong_to_their_method(method: str) -> None:
    recipe = load_recipe("qwen-hybrid-w4a16")
    for owner, options in OPTIONS.items():
        for option in options:
            value = {"correction": 0.25, "iters": 5, "batch_rows": 2, "algorithm": "mse", "modifier": "gptq",
                     "dampening": 0.5}[option]  # fmt: skip
            if owner == method:
                made = recipe.with_method({"name": method, option: value})
                assert made.method.as_json()[option] == value
                assert load_recipe(made.as_json()).method == made.method
            else:
                with pytest.raises(RecipeError, match=f"'{option}' is an option of method {owner}"):
                    recipe.with_method({"name": method, option: value})


def test_the_command_line_takes_options_as_a_recipe_spells_them(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert invoke("plan", DEMO, "--method", "{name: autoround, iters: 7}", "--out", out).exit_code == 0
    method = json.loads(out.read_text())["recipe"]["method"]
    assert method == {"name": "autoround", "iters": 7, "batch_rows": 8}
    assert invoke("plan", DEMO, "--method", "{name: autoround, iterations: 7}").exit_code == 2
