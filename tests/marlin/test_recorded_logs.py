"""What is read from the recorded logs, and that no part of a good one passes for the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.marlin.log import read_log
from sparkquant.marlin.log_verdict import judge_log
from sparkquant.marlin.server_log import End, Engine, Model, Phase, ServerLog
from sparkquant.marlin.verdict import Outcome
from tests.marlin.synthetic import GOOD, LOGS, recorded

ALL = sorted(path.stem.removeprefix("vllm-0.25.1-h200-") for path in LOGS.glob("vllm-0.25.1-h200-*.log"))


def read(name: str) -> ServerLog:
    return read_log(recorded(name).splitlines(keepends=True))


@pytest.mark.parametrize("name", ALL)
def test_facts_common_to_all(name: str) -> None:
    log = read(name)
    assert (log.engine, log.version, log.dialect, log.dtype) == (Engine.VLLM, "0.25.1", "0.25", "bfloat16")
    assert log.quantization == "compressed-tensors"
    assert log.load_gib is not None
    assert 0 < log.load_gib < 1
    assert log.max_model_len == 4096
    assert log.tensor_parallel == 1
    assert log.lines == len(recorded(name).splitlines())


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("auto-machete", [("int", "machete")]),
        ("marlin-mtp", [("int", "marlin")]),
        ("marlin-eager", [("int", "marlin")]),
        ("mixed-nvfp4-fp8", [("fp8", "cutlass"), ("nvfp4", "marlin")]),
        ("mixed-nvfp4-fp8-mtp", [("fp8", "cutlass"), ("nvfp4", "marlin")]),
        ("mlp-only-nvfp4", [("nvfp4", "marlin")]),
    ],
)
def test_kernels_that_ran(name: str, kernels: list[tuple[str, str]]) -> None:
    log = read(name)
    assert [(kernel.scheme, kernel.family) for kernel in log.kernels] == kernels
    lines = recorded(name).splitlines()
    for kernel in log.kernels:
        assert kernel.text in lines[kernel.line - 1]
        assert kernel.model is Model.MAIN
        assert not kernel.experts


def test_sizes_of_the_start_up() -> None:
    log = read("marlin-mtp")
    assert (log.load_gib, log.load_seconds) == (0.03, 0.542242)
    assert (log.kv_cache_gib, log.kv_cache_tokens, log.max_concurrency) == (41.3, 12_441_786, 3037.55)
    assert log.eager is True
    assert not log.graphs
    assert log.linear_backend == "marlin"
    assert log.moe_backend == "auto"
    assert log.speculation is not None
    assert (log.speculation.method, log.speculation.tokens, log.speculation.drafter_loaded) == ("mtp", 1, True)
    assert log.complete
    assert log.end is End.ORDERLY


def test_the_fp4_warning_is_no_fault_and_no_second_kernel() -> None:
    log = read("mlp-only-nvfp4")
    assert [notice.id for notice in log.notices] == ["misleading.fp4"]
    assert not log.failing
    assert len(log.kernels) == 1
    assert not log.kernels[0].implied


def test_an_import_error_is_placed_and_told_apart_from_the_caught_one() -> None:
    log = read("marlin-eager")
    caught, fatal = log.faults
    assert (caught.id, caught.fatal, caught.phase) == ("import", False, Phase.WARM_UP)
    assert (fatal.id, fatal.fatal, fatal.phase) == ("import", True, Phase.SERVING)
    assert fatal.at.endswith("gdn/qwen_gdn_linear_attn.py:252 in fi_chunk_gated_delta_rule")
    verdict = judge_log(log)
    assert verdict.outcome is Outcome.ENVIRONMENT_FAULT
    assert verdict.next.endswith("--gdn-prefill-backend triton")


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        *((name, Outcome.PASS) for name in GOOD),
        ("auto-machete", Outcome.INCONCLUSIVE),
        ("marlin-eager", Outcome.ENVIRONMENT_FAULT),
        ("marlin-mtp-killed-in-graph-capture", Outcome.INCONCLUSIVE),
    ],
)
def test_verdicts(name: str, outcome: Outcome) -> None:
    verdict = judge_log(read(name))
    assert verdict.outcome is outcome, verdict.summary
    assert verdict.next
    assert verdict.evidence


def test_the_killed_start_up_says_what_is_missing() -> None:
    verdict = judge_log(read("marlin-mtp-killed-in-graph-capture"))
    told = " ".join(verdict.missing)
    for part in ("KV cache", "CUDA graphs", "end of the start-up", "end of the process"):
        assert part in told


def test_another_kernel_than_the_wanted_one_is_a_kernel_fault() -> None:
    log = read("auto-machete")
    assert judge_log(log, wanted={"int": "machete"}).outcome is Outcome.INCONCLUSIVE  # Marlin is still unproven
    assert judge_log(log, wanted={"int": "marlin"}).outcome is Outcome.KERNEL_FAULT
    assert judge_log(read("mlp-only-nvfp4"), wanted={"nvfp4": "marlin"}).outcome is Outcome.PASS
    absent = judge_log(read("mlp-only-nvfp4"), wanted={"nvfp4": "marlin", "fp8": "marlin"})
    assert absent.outcome is Outcome.INCONCLUSIVE
    assert "a kernel line for fp8" in absent.missing


@given(st.sampled_from(GOOD), st.data())
def test_no_truncation_of_a_good_log_passes(name: str, data: st.DataObject) -> None:
    text = recorded(name)
    cut = data.draw(st.integers(0, len(text) - 1))
    verdict = judge_log(read_log(text[:cut].splitlines(keepends=True)))
    assert verdict.outcome is Outcome.INCONCLUSIVE, (cut, verdict.summary)
    assert verdict.missing


@pytest.mark.parametrize("name", GOOD)
def test_no_missing_tail_of_lines_passes(name: str) -> None:
    lines = recorded(name).splitlines(keepends=True)
    for count in range(len(lines)):
        assert judge_log(read_log(lines[:count])).outcome is Outcome.INCONCLUSIVE, count


@given(st.integers(0, 46_000))
def test_no_truncation_of_a_bad_log_passes(cut: int) -> None:
    text = recorded("marlin-eager")[:cut]
    assert judge_log(read_log(text.splitlines(keepends=True))).outcome is not Outcome.PASS


@given(st.sampled_from(GOOD), st.data())
def test_a_good_log_without_one_of_its_proofs_does_not_pass(name: str, data: st.DataObject) -> None:
    """Every line may be lost; without the proof that it held, the verdict is inconclusive, and it is never a fault."""
    lines = recorded(name).splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 1))
    proofs = ("Initializing a V1", "LinearKernel for", "Model loading took", "GPU KV cache size", "init engine (",
              "destroy_process_group")  # fmt: skip
    verdict = judge_log(read_log([*lines[:index], *lines[index + 1 :]]))
    assert verdict.outcome in (Outcome.PASS, Outcome.INCONCLUSIVE)
    kernels = sum("LinearKernel for" in line for line in lines)
    alone = [proof for proof in proofs if proof in lines[index]]
    if alone and not (alone == ["LinearKernel for"] and kernels > 1) and "NVFP4 GEMM" not in lines[index]:
        assert verdict.outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("name", ALL)
def test_reading_is_repeatable_and_survives_json(name: str) -> None:
    log = read(name)
    assert log == read(name)
    assert ServerLog.model_validate_json(log.model_dump_json()) == log


@given(st.lists(st.text(max_size=200), max_size=30))
def test_any_text_is_read_and_proves_nothing(lines: list[str]) -> None:
    assert judge_log(read_log(lines)).outcome is not Outcome.PASS


@given(st.sampled_from(GOOD), st.data())
def test_foreign_lines_between_do_not_matter(name: str, data: st.DataObject) -> None:
    """Text of models and prompts in the log, quoted as servers quote it, neither proves nor refutes anything."""
    lines = recorded(name).splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 2))
    quoted = data.draw(
        st.sampled_from(
            [
                "GEN 'CUDA error: an illegal instruction was encountered'\n",
                "INFO 11-30 21:12:00 [logger.py:39] Received request r1: prompt: 'Using MacheteLinearKernel for"
                " CompressedTensorsWNA16', params: SamplingParams(n=1)\n",
                'OUT "INFO 11-30 21:11:15 [x.py:1] Using MacheteLinearKernel for CompressedTensorsWNA16"\n',
                "\n",
            ]
        )
    )
    before, after = judge_log(read_log(lines)), judge_log(read_log([*lines[:index], quoted, *lines[index:]]))
    assert before.outcome is after.outcome is Outcome.PASS
