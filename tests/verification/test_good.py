"""No false alarms: every shipped recipe on every family, by all checks that there are."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparkquant.errors import CheckpointError
from sparkquant.report import Status
from sparkquant.verification.catalogue import CATALOGUE
from sparkquant.verification.gate import verify
from tests.checkpoints import CONFIGS, build
from tests.data.published import QWEN3_5_27B, qwen3_5_27b_shapes, write_headers
from tests.verification.conftest import Good, findings
from tests.verification.headers import write_result

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("qwen-hybrid-*.yaml"))
FAMILIES: list[tuple[str, dict[str, Any]]] = [(model_type, {}) for model_type in CONFIGS]
FAMILIES.append(("qwen3_5_moe", {"fused_experts": False}))
FAMILIES.append(("qwen3_5", {"mtp": False, "tied": True, "float32_state": True}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_result_has_no_finding(recipe: str, good: Good) -> None:
    result = good(recipe)
    report = verify(result.out, source=result.source, level="deep")
    assert findings(report) == set(), report.to_json()
    assert [check.id for check in report.checks] == list(CATALOGUE)
    assert {check.id for check in report.checks if check.status is not Status.PASS} == {"rules.engine"}


@pytest.mark.parametrize(("model_type", "options"), FAMILIES, ids=lambda value: str(value)[:24])
def test_a_family_has_no_finding(model_type: str, options: dict[str, Any], good: Good) -> None:
    result = good("qwen-hybrid-nvfp4-fp8" if "tied" not in options else "qwen-hybrid-w4a16", model_type, **options)
    report = verify(result.out, source=result.source)
    assert findings(report) == set(), report.to_json()


def test_another_producer_has_no_plan_and_no_finding(good: Good, tmp_path: Path) -> None:
    for recipe in RECIPES:
        shutil.copytree(good(recipe).out, tmp_path / recipe)
        shutil.rmtree(tmp_path / recipe / "sparkquant")
        assert findings(verify(tmp_path / recipe)) == set(), recipe


def test_a_plain_checkpoint_is_only_said_to_be_plain(tmp_path: Path) -> None:
    report = verify(build("qwen3_5", tmp_path / "plain"))
    assert findings(report) == {"config.plain"}, report.to_json()
    assert report.ok


def test_negative_integer_scales_are_right(draft: Any) -> None:
    copy = draft()
    name = "model.language_model.layers.0.mlp.up_proj.weight_scale"
    raw = bytearray(copy.tensors[name][2])
    raw[1::2] = bytes(byte ^ 0x80 for byte in raw[1::2])
    copy.put(name, bytes(raw))
    copy.save()
    assert findings(verify(copy.path)) == set()
    del copy.config["quantization_config"]
    copy.save()
    assert findings(verify(copy.path)) == {"config.undeclared"}


def test_a_source_may_be_a_hub_id_or_below_the_home_folder(good: Good, monkeypatch: pytest.MonkeyPatch) -> None:
    result = good("qwen-hybrid-w4a16")
    monkeypatch.setenv("HOME", str(result.out.parent))
    assert verify("~/out", source="~/source", level="headers").ok
    monkeypatch.setattr("sparkquant.source.snapshot", {"owner/name": result.source}.__getitem__)
    assert verify(result.out, source="owner/name", level="headers").ok


def test_a_source_that_is_not_there_is_named(good: Good) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        verify(good("qwen-hybrid-w4a16").out, source="./nowhere")


def test_zero_scales_of_zero_groups_are_right(draft: Any) -> None:
    copy = draft()
    at = "model.language_model.layers.0.mlp.up_proj"
    copy.put(f"{at}.weight_scale", b"\0\0")
    copy.put(f"{at}.weight_packed", b"\x88" * 64)
    copy.save()
    assert findings(verify(copy.path)) == set()


def test_a_fault_of_the_source_only_warns(tmp_path: Path) -> None:
    def lose_draft_head(config: dict[str, Any], tensors: Any) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    source = build("qwen3_5", tmp_path / "source", change=lose_draft_head)
    report = verify(source, source=source)
    assert report.ok
    assert findings(report) == {"config.plain", "mtp.missing"}


def test_full_size_headers_take_less_than_a_second(tmp_path: Path) -> None:
    source = write_headers(tmp_path / "source", QWEN3_5_27B, qwen3_5_27b_shapes(), shards=18)
    out = write_result(source, "qwen-hybrid-nvfp4-fp8", tmp_path / "out")
    started = time.process_time()
    report = verify(out, source=source, level="headers")
    taken = time.process_time() - started
    assert findings(report) == {"files.missing"}, report.to_json()
    assert taken < 1.0


def test_header_level_never_imports_torch_or_numpy(good: Good) -> None:
    result = good("qwen-hybrid-w4a16")
    program = (
        "import sys; from sparkquant.verification.gate import verify;"
        f"assert verify({str(result.out)!r}, source={str(result.source)!r}, level='headers').ok;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
