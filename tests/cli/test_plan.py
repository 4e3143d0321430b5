"""`sparkquant plan` shows what the plan says, readable at 80 columns, and one JSON document on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkquant.cli.shell import parse_bytes, parse_ranks
from sparkquant.cli.tables import available_memory, parameters, size
from sparkquant.errors import UsageError
from sparkquant.planning import plan
from sparkquant.routing import kernel_rows
from tests.cli.running import DEMO, invoke
from tests.data.published import write_headers
from tests.families.configs import CASES
from tests.families.shapes import shapes_of


def test_text_holds_every_class_total_and_cost(big: Path) -> None:
    result = invoke("plan", big, "-r", "qwen-hybrid-nvfp4-fp8")
    assert result.exit_code == 0
    text = result.stdout
    made = plan(big, "qwen-hybrid-nvfp4-fp8")
    for row in made.by_class:
        line = next(line for line in text.splitlines() if line.startswith(row["class"] + " "))
        assert f" {row['scheme']} " in line
        assert f"{row['tensors']:,}" in line
        assert size(row["source_bytes"]) in line
        assert line.endswith(size(row["output_bytes"]))
    assert "193 nvfp4a16" in text
    assert "208 fp8" in text
    assert "257 keep" in text
    assert "20.42 GiB (21,924,112,612 bytes)" in text
    assert "at 273 GB/s (GB10) at most 15.5" in " ".join(text.split())
    assert all(shard.name in text for shard in made.shards)
    assert "fits" in text
    assert "recurrence control" in text
    assert all(" ".join(note.split()) in " ".join(text.split()) for note in made.notes)


@pytest.mark.parametrize("columns", ["80", "40", "200"])
def test_no_name_and_no_number_is_cut(big: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = invoke("plan", big).stdout
    assert "…" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= max(80, int(columns))
    assert "linear_attention.gates  keep            192   23.60 M" in text


def test_json_is_the_plan_and_nothing_else(big: Path) -> None:
    result = invoke("plan", big, "--json")
    made = plan(big)
    assert result.stdout == made.to_json(kernels=kernel_rows(made))
    document = json.loads(result.stdout)
    assert document.pop("kernels")
    assert document == json.loads(made.to_json())
    assert document["totals"]["tensors"] == 1199
    assert result.stderr == ""


def test_json_says_of_every_module_where_it_runs(big: Path) -> None:
    """By engine version, capability and tensor-parallel size; the text shows the same rows."""
    arguments = ("plan", big, "-r", "qwen-hybrid-nvfp4-fp8", "--tp", "1,2")
    document = json.loads(invoke(*arguments, "--json").stdout)
    assert invoke(*arguments, "--json").stdout == invoke(*arguments, "--json").stdout
    rows = document["kernels"]
    where = {(row["engine"], row["capability"], row["tp"]) for row in rows}
    assert where == {(v, c, tp) for v in ("0.25", "0.26", "0.33") for c in ("12.1", "9.0", "8.6") for tp in (1, 2)}
    # 48 x (qkvz, out), 16 x (qkv, out), 64 x (gate_up, down), lm_head
    for place in where:
        modules = [m for row in rows if (row["engine"], row["capability"], row["tp"]) == place for m in row["modules"]]
        assert len(modules) == len(set(modules)) == 48 * 2 + 16 * 2 + 64 * 2 + 1
    assert all(row["count"] == len(row["modules"]) and row["reason"] for row in rows)
    down = [row for row in rows if row["class"] == "mlp.down" and row["engine"] == "0.33" and row["tp"] == 2]
    assert {row["capability"]: row["kernel"] for row in down} == {"12.1": "Marlin", "9.0": "Humming", "8.6": "Marlin"}
    assert {tuple(row["size"]) for row in down} == {(5120, 8704)}
    assert "model.language_model.layers.63.mlp.down_proj" in down[0]["modules"]
    text = invoke(*arguments).stdout
    assert "Engine 0.33, capability 12.1 (GB10), tensor parallel 1, 2" in text


def test_json_holds_the_kernels_that_were_asked_for(big: Path) -> None:
    asked = invoke("plan", big, "--engine", "vllm==0.28.0", "--capability", "9.0", "--tp", "4", "--json")
    rows = json.loads(asked.stdout)["kernels"]
    assert {(r["engine"], r["rules"], r["capability"], r["tp"]) for r in rows} == {("vllm==0.28.0", "0.26", "9.0", 4)}


def test_kernels_are_no_part_of_the_job(big: Path, tmp_path: Path) -> None:
    """The digest names the job: what another engine would do with its result does not change it."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, engine in zip(files, ("0.25", "0.33"), strict=True):
        text = invoke("plan", big, "--engine", engine, "--out", file).stdout
        assert f"sha256 {plan(big).digest[:16]}" in text
    found = json.loads(invoke("diff", *files, "--json").stdout)["changes"]
    assert found
    assert all(change["what"].startswith("kernel of ") for change in found)
    plain = tmp_path / "plain.json"
    plain.write_text(plan(big).to_json(), encoding="utf-8")
    assert json.loads(invoke("diff", plain, files[0], "--json").stdout)["changes"] == []


def test_a_family_that_no_engine_runs_has_no_kernels(tmp_path: Path) -> None:
    config = CASES["bamba"]
    folder = write_headers(tmp_path / "bamba", config, shapes_of(config))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: trial\nsummary: a recipe of a test\nfamilies: [bamba]\nschemes: {mlp.down: fp8}\n")
    assert json.loads(invoke("plan", folder, "-r", recipe, "--json").stdout)["kernels"] == []
    text = invoke("plan", folder, "-r", recipe).stdout
    assert "\nEngine " not in text
    assert "no supported vLLM version runs this family" in " ".join(text.split())


def test_options_reach_the_plan(big: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = invoke(
        "plan", big, "--method", "rtn", "--tp", "1,2", "--max-shard-size", "2GB", "--out", out, "--json"
    )  # fmt: skip
    expected = plan(big, method="rtn", tp=(1, 2), shard_bytes=2_000_000_000)
    document = expected.to_json(kernels=kernel_rows(expected, tp=(1, 2)))
    assert result.stdout == document
    assert out.read_text(encoding="utf-8") == document


def test_out_is_named_in_the_text(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    assert str(out) in "".join(line.strip() for line in invoke("plan", DEMO, "--out", out).stdout.splitlines())


def test_explain_shows_one_decision(big: Path) -> None:
    name = "model.language_model.layers.0.linear_attn.in_proj_a.weight"
    result = invoke("plan", big, "--explain", name)
    assert result.stdout == plan(big).explain(name) + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--recipe", "qwen-hybrid-w4a61"], 2, "did you mean 'qwen-hybrid-w4a16'"),
        (["--method", "gtpq"], 2, "--method"),
        (["--tp", "1;2"], 2, "write it like 1,2"),
        (["--tp", "7"], 2, "tensor parallel 7"),
        (["--max-shard-size", "5 apples"], 2, "write it like 5GB"),
        (["--max-shard-size", "0"], 2, "hint"),
        (["--explain", "model.layers.0.nothing"], 2, "no tensor"),
        (["--explain", "lm_head", "--json"], 2, "pass one of them"),
        (["--out", "no/such/folder/plan.json"], 2, "existing folder"),
        (["--nothing"], 2, "No such option"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_user_errors_have_a_hint_and_no_traceback(
    arguments: list[str], code: int, says: str, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("plan", DEMO, *arguments, *(["--json"] if as_json else []))
    assert result.exit_code == code
    assert says in result.stderr or (as_json and "--explain" in arguments)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_folder_that_is_no_checkpoint_is_exit_3(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent"):
        result = invoke("plan", source, "--json")
        assert (result.exit_code, result.stdout) == (3, "")
        assert "hint:" in result.stderr


def test_a_quantized_source_is_exit_3(quantized: Path) -> None:
    assert invoke("plan", quantized).exit_code == 3


@pytest.mark.parametrize(
    ("text", "count"),
    [("5GB", 5 * 10**9), ("500 MiB", 500 * 2**20), ("1.5gb", 1_500_000_000), ("1000000", 10**6), ("12B", 12)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5XB", "1e9", "५GB", "nan"])
def test_odd_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_ranks_are_read() -> None:
    assert parse_ranks(" 1, 2 ,2") == (1, 2)
    assert parse_ranks("") == ()
    for text in ("0", "1,", "a", "-1", "٣"):
        with pytest.raises(UsageError):
            parse_ranks(text)


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**20, 19_452_526_304)] == [
        "0 B", "1023 B", "1.00 KiB", "5.00 MiB", "18.12 GiB",
    ]  # fmt: skip
    assert [parameters(n) for n in (12, 4_660_000, 27_781_427_952)] == ["12", "4.66 M", "27.78 B"]
    memory = available_memory()
    assert memory is None or memory > 2**20
