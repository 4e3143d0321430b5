"""Good results to break: one folder per recipe and family, made once by `quantize` and copied for every edit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkquant.execute import quantize
from sparkquant.report import Report, Status
from tests.checkpoints import RawTensors, build, read_raw, write_json, write_shards

Good = Callable[..., "Result"]


@dataclass(frozen=True)
class Result:
    """A quantized folder and its source."""

    out: Path
    source: Path


@dataclass
class Draft:
    """A copy of a good result that a test edits: `config` and `tensors` are written back by `save`."""

    path: Path
    source: Path
    config: dict[str, Any]
    tensors: RawTensors

    @property
    def block(self) -> dict[str, Any]:
        """The quantization_config."""
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def group(self, format: str) -> dict[str, Any]:
        """The config group with this format."""
        found: dict[str, Any] = next(g for g in self.block["config_groups"].values() if g["format"] == format)
        return found

    def forget_plan(self) -> None:
        """As if another producer had made it."""
        shutil.rmtree(self.path / "sparkquant", ignore_errors=True)

    def save(self) -> None:
        """Write config and tensors."""
        write_json(self.path / "config.json", self.config)
        for shard in [*self.path.glob("*.safetensors"), *self.path.glob("*.index.json")]:
            shard.unlink()
        write_shards(self.path, self.tensors)

    def put(self, name: str, raw: bytes, *, at: int = 0) -> None:
        """Overwrite bytes of one tensor."""
        dtype, shape, old = self.tensors[name]
        self.tensors[name] = (dtype, shape, old[:at] + raw + old[at + len(raw) :])


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Matrices this small cost more to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """`good("qwen-hybrid-w4a16", "qwen3_5")`: a result that must have no finding."""
    made: dict[str, Result] = {}

    def make(recipe: str, model_type: str = "qwen3_5", **options: Any) -> Result:
        key = f"{recipe} {model_type} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("good")
            source = build(model_type, folder / "source", **options)
            quantize(source, recipe=recipe, out=folder / "out", method="rtn")
            made[key] = Result(folder / "out", source)
        return made[key]

    return make


@pytest.fixture
def draft(good: Good, tmp_path: Path) -> Callable[..., Draft]:
    """A private copy of a good result."""

    def copy(recipe: str = "qwen-hybrid-w4a16", model_type: str = "qwen3_5", **options: Any) -> Draft:
        result = good(recipe, model_type, **options)
        path = tmp_path / "draft"
        shutil.copytree(result.out, path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return Draft(path, result.source, config, read_raw(path))

    return copy


def findings(report: Report) -> set[str]:
    """Ids that are red or warned."""
    return {check.id for check in report.checks if check.status in (Status.FAIL, Status.WARN)}
