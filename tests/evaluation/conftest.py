"""The trained example as source, what `quantize` makes of it, and ways to break that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import sparkquant
from sparkquant.checkpoint import Checkpoint
from sparkquant.evaluation import Evaluation, compare
from sparkquant.evaluation_data import DraftRow, EvaluationRows, load_rows
from tests.checkpoints import RawTensors, read_raw, write_shards

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hybrid-5m"
LENGTHS = (160, 192, 192, 131)

Edit = Callable[[RawTensors], None]
Edited = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: on a busy machine more threads wait than compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def source() -> Checkpoint:
    return Checkpoint.open(EXAMPLE)


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in qwen-hybrid-w4a16. Copy it before editing."""
    return sparkquant.quantize(EXAMPLE, "qwen-hybrid-w4a16", tmp_path_factory.mktemp("made") / "out", method="rtn").out


@pytest.fixture(scope="session")
def rows(source: Checkpoint) -> EvaluationRows:
    """A few short rows of different lengths, drafted from end to end."""
    made = load_rows(source, rows=len(LENGTHS)).text
    text = tuple(tuple(ids[:length]) for ids, length in zip(made, LENGTHS, strict=True))
    return EvaluationRows(text, (), {"text": tuple(map(DraftRow, text))})


@pytest.fixture(scope="session")
def measured(quantized: Path, source: Checkpoint, rows: EvaluationRows) -> Evaluation:
    """The numbers of the unbroken result."""
    return compare(Checkpoint.open(quantized), source, rows)


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    """`edited(folder, change)`: a copy of a checkpoint whose stored bytes `change` has edited in place."""

    def make(folder: Path, change: Edit, name: str = "edited") -> Path:
        copy = tmp_path / name
        copy.mkdir()
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.copytree(entry, copy / entry.name)
            elif entry.suffix != ".safetensors" and not entry.name.endswith(".index.json"):
                shutil.copy(entry, copy / entry.name)
        tensors = read_raw(folder)
        change(tensors)
        write_shards(copy, tensors)
        return copy

    return make


def values_of(tensors: RawTensors, name: str) -> torch.Tensor:
    """A stored BF16 or F32 tensor as float32."""
    dtype, shape, raw = tensors[name]
    kind = {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(shape).float()


def store(tensors: RawTensors, name: str, values: torch.Tensor) -> None:
    """Write values back in the dtype that they had."""
    dtype, shape, _ = tensors[name]
    kind = {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    raw = values.to(kind).contiguous().view(torch.uint8).numpy().tobytes()
    tensors[name] = (dtype, shape, raw)


def to_int4(tensors: RawTensors, *parts: str) -> None:
    """Round matrices whose names hold one of `parts` to four bits in groups of 128, as a careless recipe would."""
    for name, (_, shape, _raw) in list(tensors.items()):
        if len(shape) == 2 and any(part in name for part in parts):
            weight = values_of(tensors, name)
            groups = weight.reshape(shape[0], -1, min(128, shape[1]))
            scale = groups.abs().amax(-1, keepdim=True) / 7.5
            store(tensors, name, ((groups / scale).round().clamp(-8, 7) * scale).reshape(shape))


def set_limits(folder: Path, **limits: float) -> None:
    """Replace the `accept` of the plan in a result."""
    path = folder / "sparkquant" / "plan.json"
    plan = json.loads(path.read_text())
    plan["recipe"]["accept"] = limits
    path.write_text(json.dumps(plan))
