"""Recipes: every fault at once with its place, one level of `extends`, a loss-free JSON form, an agreeing schema."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparkquant import layouts, recipe_files
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import PlanError, RecipeError
from sparkquant.layers import PROTECTED, LayerClass
from sparkquant.planning import make_plan
from sparkquant.recipe import Recipe, parse_recipe
from sparkquant.recipe_files import load_recipe, recipe_from_text, recipe_names
from sparkquant.recipe_schema import recipe_schema, recipe_schema_text
from sparkquant.schemes import GROUP_SIZES, KEEP
from tests.checkpoints import hybrid_recipes

Checkpoints = Callable[..., Path]

GOOD = """\
name: good
summary: a recipe that has no fault
families: [qwen3_5, qwen3_next]
schemes:
  attention.qkv: fp8
  mlp.down: {scheme: w4a16, group_size: 64}
"""


def faults(text: str, source: str = "r.yaml") -> list[str]:
    """All problems of a refused recipe text, as they are shown."""
    with pytest.raises(RecipeError) as caught:
        recipe_from_text(text, source=source)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    str(caught.value).encode()
    return [str(problem) for problem in caught.value.problems]


def test_a_good_recipe_keeps_its_text_and_source() -> None:
    recipe = recipe_from_text(GOOD, source="r.yaml")
    assert (recipe.text, recipe.source, recipe.method.name, recipe.target.capability) == (GOOD, "r.yaml", "mse", "12.1")
    assert {str(c): s.label for c, s in recipe.schemes.items()} == {"attention.qkv": "fp8", "mlp.down": "w4a16 g64"}


def test_every_fault_is_found_at_once_with_place_and_suggestion() -> None:
    text = """\
name: Bad Name
sumary: too short
families: [qwen3_6, qwen3_5]
target: {engin: vllm, capability: 12.1, tensor_parallel: [0, 2]}
schemes:
  atention.qkv: w4a16
  mlp.down: w4a61
  mlp.gate_up: {scheme: w4a16, group_sise: 64}
  router: fp8
  attention.q: fp8
  experts.down: fp8
method: {name: mes}
accept: {kl_meen: 0.1}
overrides:
  - {layers: [0], class: mlp.dwon, scheme: fp8, why: because it is the first}
  - {layers: [1], class: mlp.down, scheme: fp8}
unprotect:
  mtp: {scheme: nvfp4a16, why: smaller is better}
  vision: {scheme: fp8, why: smaller is better}
"""
    found = {line.split(": ", 1)[0]: line.split(": ", 1)[1] for line in faults(text)}
    assert found.keys() == {
        "r.yaml:1:1", "r.yaml:1:7", "r.yaml:2:1", "r.yaml:3:12", "r.yaml:4:10", "r.yaml:4:35", "r.yaml:4:59",
        "r.yaml:6:3", "r.yaml:7:13", "r.yaml:8:16", "r.yaml:9:3", "r.yaml:10:3", "r.yaml:11:3", "r.yaml:12:16",
        "r.yaml:13:10", "r.yaml:15:26", "r.yaml:16:5", "r.yaml:18:17", "r.yaml:19:3",
    }  # fmt: skip
    assert found["r.yaml:2:1"] == "unknown key 'sumary'; did you mean 'summary'?"
    assert found["r.yaml:1:1"] == "'summary' is missing"
    assert found["r.yaml:3:12"] == "no family 'qwen3_6'; did you mean 'qwen3_5'?"
    assert found["r.yaml:4:10"] == "unknown key 'target.engin'; did you mean 'engine'?"
    assert 'write capability as text: "12.1"' in found["r.yaml:4:35"]
    assert found["r.yaml:6:3"] == "no layer class 'atention.qkv'; did you mean 'attention.qkv'?"
    assert found["r.yaml:7:13"] == "no scheme 'w4a61'; did you mean 'w4a16'?"
    assert found["r.yaml:8:16"] == "unknown option 'group_sise'; did you mean 'group_size'?"
    assert found["r.yaml:9:3"].startswith("router is protected: ")
    assert found["r.yaml:10:3"].startswith("'attention.q' is not a class of its own")
    assert found["r.yaml:11:3"] == "none of qwen3_5 has the class experts.down; remove the line"
    assert "did you mean 'mse'?" in found["r.yaml:12:16"]
    assert found["r.yaml:13:10"] == "unknown key 'accept.kl_meen'; did you mean 'kl_mean'?"
    assert found["r.yaml:15:26"] == "no layer class 'mlp.dwon'; did you mean 'mlp.down'?"
    assert found["r.yaml:16:5"] == "'overrides.1.why' is missing"
    assert "never goes below 8 bits" in found["r.yaml:18:17"]
    assert found["r.yaml:19:3"].startswith("vision cannot be unprotected")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "name: again\n", ["r.yaml:7:1: 'name' twice"]),
        (GOOD + "  mlp.down: fp8\n", ["r.yaml:7:3: 'mlp.down' twice"]),
        (GOOD + "1: x\n", ["r.yaml:7:1: key '1' is not text; quote it"]),
        (GOOD + "on: x\n", ["r.yaml:7:1: key 'on' is not text; quote it"]),
        (GOOD + "~: x\n", ["r.yaml:7:1: key '~' is not text; quote it"]),
        (GOOD + "accept: {kl_mean: .inf}\n", ["r.yaml:7:19: accept.kl_mean: Input should be a finite number"]),
        (GOOD + "accept: {kl_mean: .nan}\n", ["r.yaml:7:19: accept.kl_mean: Input should be a finite number"]),
        (GOOD + "accept: {kl_mean: 0}\n", ["r.yaml:7:19: accept.kl_mean: Input should be greater than 0"]),
        (GOOD.replace("fp8", ""), ["r.yaml:5:17: no scheme is written here: name one, or `keep`"]),
        (GOOD.replace("64", "true"), ["r.yaml:6:13: group_size must be a whole number, not True"]),
        (GOOD.replace("64", "96"), ["r.yaml:6:13: group_size 96 is not one of -1, 32, 64, 128: Marlin refuses others"]),
        (GOOD.replace("group_size: 64", "symmetric: 1"), ["r.yaml:6:13: symmetric must be true or false, not 1"]),
        (GOOD.replace("{scheme: w4a16,", "{scheme: keep,"), ["r.yaml:6:13: `keep` has no options"]),
        (GOOD.replace("{scheme: w4a16,", "{"), ["r.yaml:6:13: `scheme:` must be a scheme name"]),
        (GOOD.replace("qwen3_5, qwen3_next", ""), ["r.yaml:3:11: families: Tuple should have at least 1 item after"
                                                   " validation, not 0"]),
        (GOOD + "overrides: [{layers: [-1], class: mlp.down, scheme: fp8, why: it is the last}]\n",
         ["r.yaml:7:23: overrides.0.layers.0: Input should be greater than or equal to 0"]),
        (GOOD + "overrides:\n" + "  - {layers: [2], class: mlp.down, scheme: fp8, why: it is the second}\n" * 2,
         ["r.yaml:9:5: layer 2 of mlp.down is overridden twice; keep one"]),
        (GOOD + "target: {tensor_parallel: 2}\n",
         ["r.yaml:7:27: target.tensor_parallel: Input should be a valid tuple"]),
    ],
)  # fmt: skip
def test_one_fault_is_one_line(text: str, expected: list[str]) -> None:
    assert faults(text) == expected


@pytest.mark.parametrize("key", ["source", "text", "digest", "extend"])
def test_internal_fields_are_no_keys(key: str) -> None:
    found = faults(GOOD + f"{key}: x\n")
    assert len(found) == 1
    assert found[0].startswith(f"r.yaml:7:1: unknown key {key!r}; ")


def test_plain_data_gives_the_same_faults_as_a_file() -> None:
    value = {**yaml.safe_load(GOOD), "shemes": {}}
    with pytest.raises(RecipeError, match="unknown key 'shemes'; did you mean 'schemes'"):
        load_recipe(value)
    assert load_recipe(yaml.safe_load(GOOD)).as_json() == recipe_from_text(GOOD, source="x").as_json()
    with pytest.raises(RecipeError, match="--method: 1 fault"):
        recipe_from_text(GOOD, source="x").with_method("magic")


_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_LAUGHS, "r.yaml:2:10: aliases are refused: write the value out"),
        ("&a [*a]", "r.yaml:1:5: aliases are refused"),
        (GOOD.replace("attention.qkv: fp8", "attention.qkv: &s fp8\n  attention.out: *s"), "aliases are refused"),
        (GOOD + "accept: {<<: {kl_mean: 1.0}, kl_mean: !!float abc}\n", "tag 'tag:yaml.org,2002:float' is refused"),
        (GOOD + "x: !!timestamp abc\n", "tag 'tag:yaml.org,2002:timestamp' is refused"),
        (GOOD + "x: !!python/object/apply:os.system ['true']\n", "is refused"),
        (GOOD + "x: !custom y\n", "r.yaml:7:4: tag '!custom' is refused"),
        (GOOD + "? [a, b]\n: c\n", "r.yaml:7:3: a key must be text"),
        (GOOD + "? {a: b}\n: c\n", "r.yaml:7:3: a key must be text"),
        (GOOD + "---\n" + GOOD, "another document"),
        (GOOD + "schemes: {a\n", "r.yaml:8:1"),
        ("a: [", "r.yaml:1:5"),
        ("\tname: x", "r.yaml:1:1"),
        (GOOD + "x: \0", "r.yaml:7:4: the character U+0000 is not allowed: special characters are not allowed"),
        ("name: a\nsummary: \x1b[2J", "r.yaml:2:10: the character U+001B is not allowed"),
        (GOOD.replace("a recipe that has no fault", "2020-13-45"), "r.yaml:2:10: '2020-13-45' is no date: month must"),
        (
            GOOD + "accept: {kl_mean: " + "9" * 5000 + "}",
            "r.yaml:7:19: '999999999999999999999999999999...' is no number",
        ),
        (
            GOOD + "accept: {kl_mean: 0x" + "f" * 5000 + "}",
            "r.yaml:7:19: '0xffffffffffffffffffffffffffff...' is no number",
        ),
    ],
)
def test_yaml_that_is_more_than_plain_is_refused_with_its_place(text: str, expected: str) -> None:
    started = time.process_time()
    assert any(expected in line for line in faults(text))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a recipe is a map of keys, found NoneType"),
        ("# nothing", "found NoneType"),
        ("[]", "found list"),
        ("just text", "found str"),
        ("a: " + "[" * 30 + "]" * 30, "nested too deeply"),
        ("a: " + "[" * 3000, "cannot be read"),
    ],
)
def test_what_is_no_recipe_at_all(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_text(text, source="r.yaml")
    assert message in str(caught.value)
    assert "r.yaml" in str(caught.value)


@given(st.text(max_size=200) | st.text("abn:[]{}&*!|>-?'\"#%\n 0.,~<", max_size=60).map(lambda tail: GOOD + tail))
def test_any_text_gives_a_recipe_or_a_recipe_error(text: str) -> None:
    try:
        recipe = recipe_from_text(text, source="r.yaml")
    except RecipeError as error:
        str(error).encode()
        return
    json.dumps(recipe.as_json(), allow_nan=False)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([*map(str, LayerClass), "fp8", "keep", "scheme", "why", "mtp"])
)
_DATA = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_SCALARS, inner, max_size=3), max_leaves=8
)


@given(st.sampled_from([*Recipe.model_fields, "extends"]), _DATA)
def test_any_data_under_any_key_gives_a_recipe_or_a_recipe_error(key: str, value: Any) -> None:
    try:
        recipe = parse_recipe({**yaml.safe_load(GOOD), key: value})
    except RecipeError as error:
        str(error).encode()
        return
    json.dumps(recipe.as_json(), allow_nan=False)


# Files, names, extends.


def test_files_that_cannot_serve(tmp_path: Path) -> None:
    def message(path: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            load_recipe(path)
        return str(caught.value)

    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    (tmp_path / "huge.yaml").write_text(GOOD + "#" * 200_000)
    (tmp_path / "folder.yaml").mkdir()
    assert "not UTF-8 text" in message(tmp_path / "binary.yaml")
    assert "too large for a recipe" in message(tmp_path / "huge.yaml")
    assert "no such recipe file" in message(tmp_path / "folder.yaml")
    assert "no such recipe file" in message(str(tmp_path / "missing.yaml"))
    assert "no recipe 'qwen-hybrid-w4a61'; did you mean 'qwen-hybrid-w4a16'?" in message("qwen-hybrid-w4a61")
    assert "shipped: " in message("zzz")
    assert "no recipe '..'" in message("..")


def test_a_file_reports_its_own_path_and_a_shipped_recipe_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "shemes: {}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.problems[0].where == f"{path}:7:1"
    assert load_recipe("qwen-hybrid-w4a16").source == "qwen-hybrid-w4a16.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_recipe(path).name == "good"
    assert load_recipe(load_recipe(path)).source == str(path)


CHILD = """\
extends: qwen-hybrid-w4a16
name: child
summary: a recipe that starts from another
schemes: {lm_head: w8a16, mlp.down: {scheme: w4a16, group_size: 32}}
accept: {kl_p99: 0.5}
"""


def test_extends_merges_maps_and_replaces_the_rest() -> None:
    base, child = load_recipe("qwen-hybrid-w4a16").as_json(), recipe_from_text(CHILD, source="c.yaml").as_json()
    assert child["schemes"] == base["schemes"] | {
        "lm_head": {"scheme": "w8a16", "group_size": 128, "symmetric": True},
        "mlp.down": {"scheme": "w4a16", "group_size": 32, "symmetric": True},
    }
    assert child["accept"] == base["accept"] | {"kl_p99": 0.5}
    assert (child["name"], child["summary"]) == ("child", "a recipe that starts from another")
    assert [child[key] for key in ("families", "target", "method", "unprotect")] == [
        base[key] for key in ("families", "target", "method", "unprotect")
    ]
    more = "families: [qwen3_5]\ntarget: {tensor_parallel: [4]}\nmethod: rtn\n"
    other = recipe_from_text(CHILD.replace("schemes:", more + "schemes:"), source="c.yaml").as_json()
    assert other["families"] == ["qwen3_5"], "lists are replaced"
    dense = ["attention", "linear_attention", "mlp"]
    assert {name.partition(".")[0] for name in other["schemes"]} == {*dense, "lm_head"}
    strict = CHILD.replace("schemes: {", "families: [qwen3_5]\nschemes: {experts.down: fp8, ")
    assert faults(strict, "c.yaml") == ["c.yaml:5:11: none of qwen3_5 has the class experts.down; remove the line"]
    assert other["target"] == base["target"] | {"tensor_parallel": [4]}
    assert other["method"] == {"name": "rtn"}


def test_keep_takes_a_scheme_of_the_base_back() -> None:
    child = recipe_from_text(CHILD.replace("lm_head: w8a16", "attention.qkv: keep"), source="c.yaml")
    assert child.schemes[LayerClass.ATTENTION_QKV] is None
    assert child.as_json()["schemes"]["attention.qkv"] == KEEP


def test_faults_of_a_child_are_placed_in_the_child() -> None:
    text = CHILD.replace("lm_head", "lmhead").replace("kl_p99", "kl_p9")
    assert faults(text, "c.yaml") == [
        "c.yaml:4:11: no layer class 'lmhead'; did you mean 'lm_head'?",
        "c.yaml:5:10: unknown key 'accept.kl_p9'; did you mean 'kl_p99'?",
    ]


@pytest.mark.parametrize("base", ["qwen-hybrid-w4a61", "nothing", "[qwen-hybrid-w4a16]", "5", "", "~", "../recipes/x"])
def test_an_unknown_base_is_refused(base: str) -> None:
    found = faults(CHILD.replace("qwen-hybrid-w4a16", base), "c.yaml")
    assert len(found) == 1
    assert found[0].startswith("c.yaml:1:")
    assert "no recipe" in found[0]
    if base == "qwen-hybrid-w4a61":
        assert "did you mean 'qwen-hybrid-w4a16'?" in found[0]


def test_an_unknown_base_hides_no_other_fault() -> None:
    text = (
        CHILD.replace("qwen-hybrid-w4a16", "qwen-hybrid-w4a61").replace("lm_head", "lmhead").replace("kl_p99", "kl_p9")
    )
    assert [line.split(": ")[0] for line in faults(text, "c.yaml")] == ["c.yaml:1:10", "c.yaml:4:11", "c.yaml:5:10"]
    protected = faults("extends: nothing\nschemes:\n  router: fp8\n", "c.yaml")
    assert [line.split(": ")[0] for line in protected] == ["c.yaml:1:10", "c.yaml:3:3"]


@pytest.mark.parametrize("line", ["source: 5", "text: [1]", "source: x", "summary: 2020-13-45", "1: x"])
def test_no_fault_silences_the_semantic_checks(line: str) -> None:
    text = GOOD.replace("summary: a recipe that has no fault\n", "") if line.startswith("summary") else GOOD
    found = faults(text.replace("attention.qkv: fp8", "router: fp8") + line + "\n")
    assert len(found) == 2
    assert any("router is protected" in fault for fault in found)


def test_plain_data_extends_and_names_keys_instead_of_lines() -> None:
    assert load_recipe(yaml.safe_load(CHILD)).as_json() == recipe_from_text(CHILD, source="c.yaml").as_json()
    with pytest.raises(RecipeError) as caught:
        load_recipe({"extends": "nothing", "schemes": {"mlp.down": "w4a61"}, "accept": {"kl_mean": 0}, "colour": 1})
    assert [str(problem).partition(";")[0] for problem in caught.value.problems] == [
        "recipe: extends: no recipe 'nothing'",
        "recipe: schemes.mlp.down: no scheme 'w4a61'",
        "recipe: accept.kl_mean: Input should be greater than 0",
        "recipe: colour: unknown key 'colour'",
    ]


def test_a_recipe_is_read_only() -> None:
    recipe = load_recipe("qwen-hybrid-fp8-mtp")
    before = recipe.as_json()
    schemes: Any = recipe.schemes
    for change in (
        lambda: schemes.update({LayerClass.ROUTER: None}),
        lambda: schemes.pop(LayerClass.MLP_DOWN),
        lambda: schemes.clear(),
        lambda: schemes.setdefault(LayerClass.ROUTER, None),
        lambda: schemes.__setitem__(LayerClass.ROUTER, None),
        lambda: schemes.__delitem__(LayerClass.MLP_DOWN),
        lambda: recipe.unprotect.__setitem__(LayerClass.MTP, next(iter(recipe.unprotect.values()))),
        lambda: recipe_from_text(GOOD, source="r.yaml").unprotect.clear(),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    assert recipe.as_json() == before
    for copy in (pickle.loads(pickle.dumps(recipe)), recipe.model_copy(deep=True)):
        assert copy == recipe


def test_a_plan_refuses_four_bits_of_a_protected_class_however_they_got_in(checkpoints: Checkpoints) -> None:
    source = Checkpoint.open(checkpoints("qwen3_5"))
    recipe = load_recipe("qwen-hybrid-fp8-mtp")
    small = load_recipe("qwen-hybrid-w4a16").schemes[LayerClass.MLP_DOWN]
    permission = recipe.unprotect[LayerClass.MTP].model_copy(update={"scheme": small})
    with pytest.raises(PlanError, match="mtp never goes below 8 bits"):
        make_plan(source, recipe.model_copy(update={"unprotect": {LayerClass.MTP: permission}}))


def test_a_chain_of_extends_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_text(CHILD.replace("qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head"), source="c.yaml")
    assert "extends one level only" in str(caught.value)


# Round trip.

_CLASSES = layouts.family_layout("qwen3_5_moe").linear_classes | layouts.family_layout("qwen3_5").linear_classes
_QUANTIZABLE = sorted(str(c) for c in _CLASSES if c not in PROTECTED)


def _integer(name: str, symmetric: st.SearchStrategy[bool]) -> st.SearchStrategy[dict[str, Any]]:
    options = {"group_size": st.sampled_from([-1, *GROUP_SIZES]), "symmetric": symmetric}
    return st.fixed_dictionaries({"scheme": st.just(name)}, optional=options)


_EIGHT = st.sampled_from(["fp8", "fp8_block", "w8a16", KEEP, {"scheme": "fp8"}]) | _integer("w8a16", st.just(True))
_SCHEMES = st.sampled_from(["w4a16", "nvfp4a16"]) | _EIGHT | _integer("w4a16", st.booleans())
_WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=8, max_size=30)
_LIMIT = st.floats(1e-6, 1, exclude_min=True)


@st.composite
def _recipes(draw: st.DrawFn) -> dict[str, Any]:
    spots = draw(st.lists(st.tuples(st.sampled_from(_QUANTIZABLE), st.integers(0, 99)), unique=True, max_size=4))
    fields = {
        "name": draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)),
        "summary": draw(_WORDS),
        "families": draw(st.just(["qwen3_5", "qwen3_5_moe"]) | st.just(["qwen3_5_moe", "qwen3_5", "qwen3_next"])),
        "schemes": draw(st.dictionaries(st.sampled_from(_QUANTIZABLE), _SCHEMES, min_size=1, max_size=6)),
        "method": draw(st.sampled_from(["rtn", "mse", {"name": "rtn"}, {}])),
        "accept": draw(st.fixed_dictionaries({}, optional={"kl_mean": _LIMIT, "kl_p99": _LIMIT, "top1_drop": _LIMIT})),
        "target": draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "capability": st.sampled_from(["12.1", "9.0"]),
                    "kernel": st.sampled_from(["marlin", "any"]),
                    "tensor_parallel": st.lists(st.integers(1, 64), max_size=3),
                },
            )
        ),
        "overrides": [
            {"layers": [layer], "class": name, "scheme": draw(_SCHEMES), "why": draw(_WORDS)} for name, layer in spots
        ],
        "unprotect": draw(
            st.just({}) | st.fixed_dictionaries({"scheme": _EIGHT, "why": _WORDS}).map(lambda u: {"mtp": u})
        ),
    }
    return fields


@given(_recipes())
def test_round_trip_through_json_and_yaml(fields: dict[str, Any]) -> None:
    recipe = parse_recipe(fields)
    value = recipe.as_json()
    assert parse_recipe(value).as_json() == value
    text = json.dumps(value, allow_nan=False)
    assert parse_recipe(json.loads(text)).as_json() == value
    assert recipe_from_text(yaml.safe_dump(value, allow_unicode=True), source="x").as_json() == value
    assert recipe.with_method(recipe.method.name).as_json() == value


@given(_recipes())
def test_the_schema_accepts_what_the_parser_accepts(fields: dict[str, Any]) -> None:
    parse_recipe(fields)
    assert list(_validator().iter_errors(fields)) == []


def test_a_round_trip_gives_the_same_plan(checkpoints: Checkpoints) -> None:
    checkpoint = Checkpoint.open(checkpoints("qwen3_5"))
    for name in hybrid_recipes():
        recipe = load_recipe(name)
        again = parse_recipe(json.loads(json.dumps(recipe.as_json())))
        assert make_plan(checkpoint, again).digest == make_plan(checkpoint, recipe).digest


# What ships.


def _validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(recipe_schema())


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_validates_and_states_what_it_must(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert set(recipe.families) <= set(layouts.family_names())
    # Limits are claims: only families with a trained model that was measured here have them.
    assert (recipe.accept.kl_mean is not None) == name.startswith("qwen-hybrid")
    assert recipe.text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    document = yaml.safe_load(recipe.text)
    assert list(_validator().iter_errors(document)) == []
    assert load_recipe(str(recipe_files.recipe_folder() / f"{name}.yaml")).as_json() == recipe.as_json()


_MODEL_TYPES = {
    "qwen3_next": ["qwen3_next"],
    "qwen3_5": ["qwen3_5", "qwen3_5_text"],
    "qwen3_5_moe": ["qwen3_5_moe", "qwen3_5_moe_text"],
}


@pytest.mark.parametrize("name", hybrid_recipes())
def test_a_shipped_recipe_plans_every_family_it_lists_and_refuses_others(name: str, checkpoints: Checkpoints) -> None:
    recipe = load_recipe(name)
    assert set(recipe.families) & set(_MODEL_TYPES), "a family without a builder here is not tested"
    for family, model_types in _MODEL_TYPES.items():
        for model_type in model_types:
            checkpoint = Checkpoint.open(checkpoints(model_type))
            if family in recipe.families:
                plan = make_plan(checkpoint, recipe)
                assert plan.totals["output_bytes"] < plan.totals["source_bytes"]
                unprotected = set(recipe.unprotect)
                assert all(
                    d.scheme is None
                    for d in plan.decisions.values()
                    if d.layer_class in PROTECTED and d.layer_class not in unprotected
                )
            else:
                with pytest.raises(PlanError, match=f"this checkpoint is {family}"):
                    make_plan(checkpoint, recipe)


def test_a_recipe_for_one_family_refuses_every_other(checkpoints: Checkpoints) -> None:
    narrow = parse_recipe({**yaml.safe_load(GOOD), "families": ["qwen3_5"]})
    for model_type in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"):
        with pytest.raises(PlanError, match=r"is for qwen3_5; this checkpoint is qwen3_"):
            make_plan(Checkpoint.open(checkpoints(model_type)), narrow)
    assert make_plan(Checkpoint.open(checkpoints("qwen3_5_text")), narrow).layout.family == "qwen3_5"


def test_the_documented_recipes_ship() -> None:
    assert {
        "qwen-hybrid-w4a16", "qwen-hybrid-w4a16-head", "qwen-hybrid-nvfp4-fp8", "qwen-hybrid-nvfp4a16-mlp",
        "qwen-hybrid-w4a16-fp8", "qwen-hybrid-fp8", "qwen-hybrid-fp8-mtp",
    } <= set(recipe_names())  # fmt: skip


def _bad_documents() -> Iterator[tuple[str, dict[str, Any]]]:
    good = yaml.safe_load(GOOD)
    edits: dict[str, dict[str, Any]] = {
        "unknown key": {"shemes": {}},
        "unknown class": {"schemes": {"atention.qkv": "fp8"}},
        "protected class": {"schemes": {"router": "fp8"}},
        "unknown scheme": {"schemes": {"mlp.down": "w4a61"}},
        "empty scheme": {"schemes": {"mlp.down": None}},
        "unknown option": {"schemes": {"mlp.down": {"scheme": "w4a16", "group_sise": 32}}},
        "odd group size": {"schemes": {"mlp.down": {"scheme": "w4a16", "group_size": 96}}},
        "no schemes": {"schemes": {}},
        "no families": {"families": []},
        "unknown method": {"method": "magic"},
        "unknown method option": {"method": {"name": "rtn", "grid": 3}},
        "unknown target": {"target": {"engin": "vllm"}},
        "capability as number": {"target": {"capability": 12.1}},
        "negative limit": {"accept": {"kl_mean": -1}},
        "override without reason": {"overrides": [{"layers": [0], "class": "mlp.down", "scheme": "fp8"}]},
        "override without layers": {
            "overrides": [{"layers": [], "class": "mlp.down", "scheme": "fp8", "why": "no layer at all"}]
        },
        "unprotect vision": {"unprotect": {"vision": {"scheme": "fp8", "why": "smaller is better"}}},
        "unprotect without reason": {"unprotect": {"mtp": {"scheme": "fp8"}}},
        "four-bit draft head": {"unprotect": {"mtp": {"scheme": "nvfp4a16", "why": "smaller is better"}}},
        "bad name": {"name": "Bad Name"},
        "short summary": {"summary": "short"},
    }
    for label, edit in edits.items():
        yield label, {**good, **edit}
    yield "nothing", {}
    yield "no name", {key: value for key, value in good.items() if key != "name"}


@pytest.mark.parametrize(("label", "document"), list(_bad_documents()))
def test_the_schema_rejects_what_the_parser_rejects(label: str, document: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(document)
    assert list(_validator().iter_errors(document)), f"the schema accepts: {label}"


def test_the_schema_is_a_schema_and_its_text_is_stable() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(recipe_schema())
    text = recipe_schema_text()
    assert json.loads(text) == recipe_schema()
    assert text == recipe_schema_text()
    assert list(_validator().iter_errors({"extends": "qwen-hybrid-w4a16"})) == []


def test_the_schema_file_beside_the_recipes_is_up_to_date() -> None:
    path = recipe_files.recipe_folder() / "recipe.schema.json"
    if not path.exists():
        pytest.skip("recipe.schema.json is not written yet")
    assert path.read_text(encoding="utf-8") == recipe_schema_text()
