"""Foreign names do nothing to a terminal, `--out` replaces nothing but a plan, `next:` can be pasted."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from sparkquant.cli import tables
from sparkquant.cli.plans import explained
from sparkquant.cli.shell import clean, show, write_json
from sparkquant.errors import CheckpointError, Problem
from sparkquant.planning import plan
from sparkquant.report import Check, Report, Status
from tests.checkpoints import RawTensors, build
from tests.cli.running import DEMO, invoke

EVIL = "a\x1b[2Jb\nok: 67 pass\u202e\x9b"
SPELLED = "a\\x1b[2Jb\\nok: 67 pass\\u202e\\x9b"


def test_what_does_not_print_is_spelled_out() -> None:
    assert clean(EVIL) == SPELLED
    assert clean("größe ± 0.1, 模型") == "größe ± 0.1, 模型"
    assert clean("\udcff") == "\\udcff"


@pytest.mark.parametrize("status", list(Status))
def test_a_report_cannot_move_the_cursor_or_forge_a_line(status: Status, capsys: pytest.CaptureFixture[str]) -> None:
    found = Check(id="config.ignore", status=status, message=EVIL, tensors=(EVIL,), measured=EVIL, expected=EVIL)
    for every in (False, True):
        show(tables.report_text(Report.of("x", [found]), every=every))
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert not any(line.strip().startswith("ok: 67") for line in shown.splitlines())
        assert status in (Status.PASS,) or SPELLED in "".join(line.strip() for line in shown.splitlines())


def test_json_spells_out_what_does_not_print_and_means_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    given = {EVIL: [EVIL, "größe 模型", "\U000e0001\u2028", 0.5]}
    write_json(json.dumps(given, indent=1, ensure_ascii=False) + "\n")
    shown = capsys.readouterr().out
    assert json.loads(shown) == given
    assert shown.replace("\n", "").isprintable()
    assert "größe 模型" in shown


def test_a_tensor_name_with_controls_is_harmless_in_every_form(tmp_path: Path) -> None:
    folder = tmp_path / "m"

    def rename(_: dict[str, Any], tensors: RawTensors) -> None:
        tensors[f"model.visual.blocks.0.{EVIL}"] = ("BF16", (1,), b"\0\0")

    build("qwen3_5", folder, change=rename)
    for arguments in (["verify", folder, "--headers"], ["verify", folder, "--headers", "--json"], ["plan", folder],
                      ["plan", folder, "--json"], ["diff", folder, DEMO, "--json"]):  # fmt: skip
        result = invoke(*arguments)
        shown = result.stdout + result.stderr
        assert shown
        assert not {c for c in shown if not c.isprintable()} - {"\n"}, arguments


def test_the_last_net_spares_colours_and_line_ends(capsys: pytest.CaptureFixture[str]) -> None:
    show([Text("one\ntwo\x1b[2J", "bold red")])
    assert capsys.readouterr().out == "one\ntwo\\x1b[2J\n"


def test_errors_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError(f"{EVIL[:6]}: bad", hint=EVIL, problems=[Problem(EVIL, EVIL, EVIL)])

    monkeypatch.setattr("sparkquant.comparison.diff", fail)
    result = invoke("diff", "a", "b")
    assert result.exit_code == 3
    assert "\x1b" not in result.stderr
    assert result.stderr.count("\n") == 3
    assert f"hint: {SPELLED}" in result.stderr


def test_explain_and_diff_are_clean(tmp_path: Path) -> None:
    checkpoint = tmp_path / "evil\x1b[2J"
    shutil.copytree(DEMO, checkpoint)
    made = plan(DEMO)
    first = next(iter(made.decisions))
    odd = replace(made, decisions={first: replace(made.decisions[first], shard=EVIL)})
    assert explained(odd, first).splitlines()[0].endswith(f"in {SPELLED}")
    for arguments in (["plan", checkpoint, "--explain", first], ["plan", checkpoint], ["diff", DEMO, checkpoint]):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.stderr
        assert "\x1b" not in result.stdout + result.stderr


def test_warnings_are_printed_with_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report.of("x", [
        Check(id="a.good", status=Status.PASS, message="fine"),
        Check(id="a.odd", status=Status.WARN, message="scales look odd"),
    ])  # fmt: skip
    assert list(tables.warnings(report)) == ["warn: a.odd: scales look odd"]
    made = plan(DEMO)

    def quantized(*_: Any, **__: Any) -> Any:
        from sparkquant.execute import Quantized

        return Quantized(tmp_path / "my out", made, report)

    shutil.copytree(DEMO, tmp_path / "my out")
    monkeypatch.setattr("sparkquant.execute.quantize", quantized)
    monkeypatch.chdir(tmp_path)
    result = invoke("quantize", DEMO, "-o", "my out")
    assert "\nwarn: a.odd: scales look odd\n" in result.stdout
    flags = """--speculative-config '{"method":"mtp","num_speculative_tokens":2}'"""
    assert result.stdout.endswith(f"next: VLLM_MARLIN_USE_ATOMIC_ADD=1 vllm serve 'my out' {flags}\n")


@pytest.mark.parametrize("path", ["a b", "$(reboot)", "it's", "-x", "a\nb'\\c\x1bé", "plain/out", '"q" \x07'])
def test_the_next_step_can_be_pasted(path: str) -> None:
    word = tables.shell_word(path)
    assert word.isprintable()
    told = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout.decode()
    assert told == (f"./{path}" if path.startswith("-") else path)


@pytest.mark.parametrize("name", ["precious.txt", "config.json"])
def test_out_replaces_nothing_but_a_plan(name: str, tmp_path: Path) -> None:
    target = tmp_path / name
    target.write_text('{"mine": 1}', encoding="utf-8")
    result = invoke("plan", DEMO, "--out", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "exists already" in result.stderr
    assert target.read_text(encoding="utf-8") == '{"mine": 1}'


def test_out_replaces_a_plan_and_leaves_no_other_file(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    for method in ("rtn", "mse"):
        assert invoke("plan", DEMO, "--method", method, "--out", target).exit_code == 0
        written = json.loads(target.read_text(encoding="utf-8"))
        assert written.pop("kernels")  # what an engine makes of the plan is beside it
        assert written == json.loads(plan(DEMO, method=method).to_json())
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_out_never_follows_a_link_and_never_writes_into_the_source(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_text(plan(DEMO).to_json(), encoding="utf-8")
    (tmp_path / "link.json").symlink_to(real)
    assert invoke("plan", DEMO, "--out", tmp_path / "link.json").exit_code == 2
    shutil.copytree(DEMO, tmp_path / "source")
    result = invoke("plan", tmp_path / "source", "--out", tmp_path / "source" / "sub" / ".." / "plan.json")
    assert result.exit_code == 2
    assert "inside the source" in result.stderr
    assert not (tmp_path / "source" / "plan.json").exists()


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    assert invoke("plan", DEMO, "--out", target).exit_code == 0
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert invoke("plan", DEMO, "--method", "rtn", "--out", target).exit_code == 2
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
