"""Exports that the packages write by themselves: `verify` says what is true and nothing else, `convert` mends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import sparkquant
from sparkquant.errors import CheckFailed
from tests.backends.exports import autoround_export, llmcompressor_export, modelopt_export
from tests.backends.packages import needs
from tests.checkpoints import read_raw
from tests.cli.running import DEMO

pytestmark = pytest.mark.slow
Export = Callable[[], Path]


def failed(folder: Path, source: Path | None = None) -> dict[str, str]:
    report = sparkquant.verify(folder, source=source, level="deep")
    return {check.id: check.message for check in report.failed}


@needs("llmcompressor")
@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_a_good_export_of_llm_compressor_passes(scheme: str, tmp_path: Path) -> None:
    """It copies the draft head; what differs from the source is said: norms rounded, state cast, side files lost."""
    out = llmcompressor_export(DEMO, tmp_path / "out", scheme)
    assert failed(out) == {}
    told = failed(out, DEMO)
    assert set(told) <= {"source.bytes", "source.shape", "source.files_missing", "source.files_differ", "source.config"}
    made = sparkquant.convert(out, tmp_path / "mended", source=DEMO)
    report = sparkquant.verify(made.out, source=DEMO, level="deep")
    assert {check.id for check in report.failed} <= {"source.bytes"}
    assert all("norm" in name for check in report.failed for name in check.tensors)
    before, after = read_raw(DEMO), read_raw(made.out)
    kept = [name for name in before if after.get(name, ("F8",))[0][:2] != "F8" and "norm" not in name]
    assert len([name for name in kept if name.startswith(("mtp.", "model.visual."))]) > 20
    assert all(after[name] == before[name] for name in kept)


@needs("llmcompressor")
def test_unequal_global_scales_of_llm_compressor_are_found_and_not_mended(tmp_path: Path) -> None:
    out = llmcompressor_export(DEMO, tmp_path / "out", "NVFP4A16")
    assert set(failed(out)) == {"scales.global"}
    with pytest.raises(CheckFailed, match="cannot be repaired without changing numbers") as raised:
        sparkquant.convert(out, tmp_path / "mended", source=DEMO)
    assert [problem.where for problem in raised.value.problems] == ["scales.global"]
    assert not (tmp_path / "mended").exists()


@needs("modelopt")
def test_an_export_of_modelopt_lacks_its_draft_head_and_nothing_else(tmp_path: Path) -> None:
    out = modelopt_export(DEMO, tmp_path / "out")
    assert set(failed(out)) == {"mtp.missing"}
    with pytest.raises(CheckFailed) as raised:
        sparkquant.convert(out, tmp_path / "alone")
    assert raised.value.hint.startswith("pass --source")
    made = sparkquant.convert(out, tmp_path / "mended", source=DEMO)
    assert failed(made.out, DEMO) == {}
    assert any(change.startswith("15 tensors of mtp taken from the source") for change in made.changes)


@needs("autoround")
@pytest.mark.parametrize("form", ["auto_round", "llm_compressor"])
def test_an_export_of_autoround_is_read_and_mended(form: str, tmp_path: Path) -> None:
    """Its compressed-tensors form targets every Linear and forgets to ignore the draft head."""
    out = autoround_export(DEMO, tmp_path / "out", form)
    assert set(failed(out)) == ({"protected.targeted"} if form == "llm_compressor" else set())
    made = sparkquant.convert(out, tmp_path / "mended", source=DEMO)
    assert failed(made.out, DEMO) == {}
