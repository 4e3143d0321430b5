"""Results as transformers and compressed-tensors load them: every weight arrives, and the model answers as its source.

transformers reads what it can of a result by itself: everything but NVFP4 experts (it knows no global scale of an
expert), experts of families whose own files hold them stacked, and the repeated block of zamba2. Those are read by this
package, put back under the names of the source, and loaded in 16 bits.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant.layers import LayerClass
from sparkquant.layouts import layout_for
from tests.families.configs import CASES, family_of
from tests.families.shapes import shapes_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from safetensors.torch import save_file  # noqa: E402

from sparkquant.checkpoint import Checkpoint  # noqa: E402
from sparkquant.weights import StoredWeights  # noqa: E402
from tests.oracles.loading import load  # noqa: E402

Family = Callable[[str], Path]
EXPERTS = {LayerClass.EXPERTS_GATE_UP, LayerClass.EXPERTS_DOWN}
STACKED = {"granitemoehybrid", "mistral4", "gemma4"}
"""Families whose own files hold experts stacked: transformers has no rule that stacks the single ones of a result."""
REPEATED = {LayerClass.ATTENTION_QKV, LayerClass.ATTENTION_OUT, LayerClass.MLP_GATE_UP, LayerClass.MLP_DOWN}
"""Classes of zamba2's block, which is stored once and run by several layers: transformers ties the weights of the later
uses to the first, and leaves their scales without values."""


def _classes(case: str) -> set[LayerClass]:
    """What can be quantized in a case, the draft head aside."""
    layout = layout_for(CASES[case])
    tied = {LayerClass.LM_HEAD} if layout.tied_head else set()
    return set(layout.linear_classes) - {LayerClass.MTP} - tied - set(layout.never_quantized)


def _stored(case: str) -> set[LayerClass]:
    """Classes that a case holds."""
    layout = layout_for(CASES[case])
    return {rule.layer_class for name in shapes_of(CASES[case]) if (rule := layout.rule_of(name)) is not None}


def _unread(case: str) -> set[LayerClass]:
    """Classes that transformers does not read quantized."""
    family = family_of(case)
    return EXPERTS if family in STACKED else REPEATED if family == "zamba2" else set()


def _recipe(case: str, classes: set[LayerClass], scheme: Any) -> dict[str, Any]:
    return {
        "name": "reloaded", "summary": "one scheme for all classes that are tried",
        "families": [layout_for(CASES[case]).family], "schemes": {str(c): scheme for c in sorted(classes)},
    }  # fmt: skip


# Of falcon_mamba the engine takes nothing.
SERVED = [case for case in CASES if family_of(case) != "falcon_mamba"]
MIXTURES = [case for case in SERVED if _stored(case) & EXPERTS]


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED)
def test_transformers_reads_the_result(case: str, family: Family, tmp_path: Path) -> None:
    recipe = _recipe(case, _classes(case) - _unread(case), "fp8")
    done = sparkquant.quantize(family(case), recipe, tmp_path / "out", method="mse")
    _compare(family(case), done.out, _changed(done.plan), error=0.03, divergence=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MIXTURES if family_of(case) not in STACKED])
def test_transformers_reads_int4_experts(case: str, family: Family, tmp_path: Path) -> None:
    recipe = _recipe(case, EXPERTS, {"scheme": "w4a16", "group_size": 32})
    done = sparkquant.quantize(family(case), recipe, tmp_path / "out", method="mse")
    _compare(family(case), done.out, _changed(done.plan), error=0.12, divergence=0.2)


def _unread_by_transformers() -> list[tuple[str, str]]:
    eight = [(case, "fp8") for case in SERVED if _unread(case) and (case in MIXTURES or case == "zamba2")]
    return [*eight, *((case, "nvfp4a16") for case in (*MIXTURES, "zamba2"))]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "scheme"), _unread_by_transformers())
def test_what_transformers_does_not_read_answers_as_its_source(
    case: str, scheme: str, family: Family, tmp_path: Path
) -> None:
    classes = (_unread(case) or EXPERTS) & _classes(case)
    done = sparkquant.quantize(family(case), _recipe(case, classes, scheme), tmp_path / "out", method="mse")
    restored = _in_16_bits(done, family(case), tmp_path / "restored")
    error = 0.03 if scheme == "fp8" else 0.12
    _compare(family(case), restored, _changed(done.plan), error=error, divergence=0.2)


def _in_16_bits(done: Any, source: Path, folder: Path) -> Path:
    """The result under the names of its source, every quantized weight read back from what is stored."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {}
    with StoredWeights(Checkpoint.open(done.out)) as weights:
        for name, d in done.plan.decisions.items():
            if d.scheme is None:
                tensors[name] = weights.read(name)
            elif d.parts:
                parent = d.module.rpartition(".")[0]
                experts = (
                    torch.cat([weights.read(f"{parent}.{expert}.{part}.weight") for part in d.parts])
                    for expert in range(d.experts)
                )
                tensors[name] = torch.stack(list(experts)).to(torch.bfloat16)
            else:
                tensors[name] = weights.read(f"{d.module}.weight").to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _changed(plan: Any) -> int:
    """How many parameters of the live model come from quantized weights: all experts of a layer are two of them."""
    quantized = [d for d in plan.decisions.values() if d.scheme is not None]
    single = sum(d.modules for d in quantized if d.layer_class not in EXPERTS)
    return single + len({(d.layer_class, d.layer) for d in quantized if d.layer_class in EXPERTS})


def _compare(before: Path, after: Path, changed: int, *, error: float, divergence: float) -> None:
    """Every weight arrives, those that were quantized nearly as they were, and so do the logits."""
    layout = layout_for(json.loads((before / "config.json").read_text()))
    source, _ = load(before)
    result, report = load(after)
    assert not {name for name in report["missing_keys"] if not _is_elsewhere(name, layout)}
    assert not report["mismatched_keys"]
    assert not {name for name in report["unexpected_keys"] if not _is_elsewhere(name, layout)}
    assert _compare_weights(source, result, error) == changed
    ids = torch.arange(3, 27)[None] % 200
    with torch.no_grad():
        theirs = source(input_ids=ids).logits.float().log_softmax(-1)
        ours = result(input_ids=ids).logits.float().log_softmax(-1)
    assert torch.isfinite(ours).all()
    # Random weights: a few percent per matrix add up, and a token that changes its expert changes its logits.
    found = (theirs.exp() * (theirs - ours)).sum(-1).median()
    assert 0 < found < divergence, f"KL {found:.4f}"


def _compare_weights(source: Any, result: Any, limit: float) -> int:
    """Weights that differ, each by little; all others are equal."""
    changed = 0
    loaded = dict(result.named_parameters())
    for name, weight in source.named_parameters():
        there = loaded[name]
        if not torch.equal(weight, there):
            error = (weight.float() - there.float()).norm() / weight.float().norm()
            assert error < limit, f"{name}: {error:.4f}"
            changed += 1
    return changed


def _is_elsewhere(name: str, layout: Any) -> bool:
    """The draft head, which the class has not; and a block that several layers run, which is stored once."""
    is_draft = bool(layout.mtp.region) and re.search(layout.mtp.region, name) is not None
    return is_draft or ".shared_transformer." in name
