"""Every line that means something, in the spelling of both versions."""

from __future__ import annotations

import pytest

from sparkquant.marlin.log import kernel_family, read_log
from sparkquant.marlin.log_faults import FAULTS
from sparkquant.marlin.log_lines import NOTICES
from sparkquant.marlin.log_verdict import judge_log
from sparkquant.marlin.server_log import End, Engine, Model, Phase, ServerLog
from sparkquant.marlin.verdict import Outcome, Verdict
from tests.marlin.synthetic import NEW, OLD, Dialect

BOTH = pytest.mark.parametrize("dialect", [OLD, NEW], ids=["0.25", "0.33"])
MARLIN = "Using MarlinLinearKernel for CompressedTensorsWNA16"


def read(text: str) -> ServerLog:
    return read_log(text.splitlines(keepends=True))


def judged(text: str) -> Verdict:
    return judge_log(read(text))


@BOTH
def test_a_clean_run_passes(dialect: Dialect) -> None:
    log = read(dialect.run(MARLIN))
    assert judge_log(log).outcome is Outcome.PASS
    assert log.dialect == dialect.version[:4]
    assert (log.load_gib, log.kv_cache_tokens, log.max_concurrency) == (12.5, 1_234_567, 301.41)
    assert log.requests
    assert log.started
    assert log.end is End.ORDERLY


KERNEL_LINES = [
    (OLD, "Using MarlinLinearKernel for AutoGPTQLinearMethod", "int", "marlin", False),
    (OLD, "Using MarlinLinearKernel for AutoAWQMarlinLinearMethod", "int", "marlin", False),
    (NEW, "Using MarlinLinearKernel for mixed-precision linear", "int", "marlin", False),
    (NEW, "Using dequantize + batch-invariant matmul for CompressedTensorsWNA16", "int", "batch-invariant", False),
    (OLD, "Using MarlinNvFp4LinearKernel for NVFP4 GEMM", "nvfp4", "marlin", False),
    (NEW, "Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM", "nvfp4", "flashinfer", False),
    (OLD, "Selected MarlinFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8", "fp8", "marlin", False),
    (NEW, "Selected CutlassFp8BlockScaledMMKernel for Fp8LinearMethod", "fp8", "cutlass", False),
    (OLD, "Using CompressedTensorsWNA16MarlinMoEMethod", "int", "marlin", True),
    (OLD, "Using CompressedTensorsWNA16MoEMethod", "int", "triton", True),
    (OLD, "Using 'MARLIN' WNA16 MoE backend.", "int", "marlin", True),
    (NEW, "Using 'BATCHED_MARLIN' WNA16 MoE backend.", "int", "marlin", True),
    (OLD, "Using 'MARLIN' NvFp4 MoE backend out of potential backends: ['MARLIN'].", "nvfp4", "marlin", True),
    (OLD, "Using MARLIN Fp8 MoE backend out of potential backends: ['TRITON', 'MARLIN'].", "fp8", "marlin", True),
    (NEW, "Using TRITON Fp8 MoE backend out of potential backends: ['TRITON', 'MARLIN'].", "fp8", "triton", True),
    (OLD, "Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].", "none", "triton", True),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "line", "scheme", "family", "experts"), KERNEL_LINES)
def test_kernel_lines(dialect: Dialect, line: str, scheme: str, family: str, experts: bool) -> None:
    (kernel,) = read(dialect.run(line)).kernels
    assert (kernel.scheme, kernel.family, kernel.experts) == (scheme, family, experts)


def test_the_class_of_experts_gives_way_to_the_backend_in_the_newer_version() -> None:
    log = read(NEW.run("Using CompressedTensorsWNA16MoEMethod", "Using 'MARLIN' WNA16 MoE backend."))
    assert [kernel.kernel for kernel in log.kernels] == ["MARLIN"]


@BOTH
@pytest.mark.parametrize("kind", ["FP4", "FP8"])
def test_the_misleading_warning_proves_marlin(dialect: Dialect, kind: str) -> None:
    warning = (
        f"Your GPU does not have native support for {kind} computation but {kind} quantization is being used."
        f" Weight-only {kind} compression will be used leveraging the Marlin kernel. This may degrade performance."
    )
    log = read(dialect.run(dialect.line(warning, "WARNING", "marlin.py")))
    (kernel,) = log.kernels
    assert kernel.implied
    assert kernel.family == "marlin"
    assert kernel.scheme == {"FP4": "nvfp4", "FP8": "fp8"}[kind]
    assert not log.failing
    assert judge_log(log).outcome is Outcome.PASS


def test_the_drafter_has_kernels_of_its_own() -> None:
    log = read(OLD.run(MARLIN, "Loading drafter model...", "Using TritonW4A16LinearKernel for CompressedTensorsWNA16"))
    assert log.families("int") == ("marlin",)
    assert log.families("int", model=Model.DRAFTER) == ("triton",)
    assert judge_log(log).outcome is Outcome.PASS  # the gate is about the main model; the drafter is reported


NOTICE_LINES = [
    (OLD, "Layer 'x' is not supported by GPTQMoeMarlin. Falling back to Moe WNA16 kernels.", "fallback.experts"),
    (OLD, "NVFP4 linear falling back to the slow and unoptimized emulation backend as no optimized backend is available"
          " (unavailable reasons:", "fallback.emulation"),
    (NEW, "NVFP4 linear falling back to the slow and unoptimized emulation backend as no optimized backend is available"
          " (unavailable reasons:", "fallback.emulation"),
    (NEW, "--linear-backend=marlin has no kernel for this linear layer type; using automatic selection for that layer"
          " type.", "fallback.backend"),
    (NEW, "--linear-backend=marlin was requested, but no marlin kernel exists for NVFP4 layers; falling back to normal"
          " kernel selection for this layer.", "fallback.backend"),
    (OLD, "Layer 'x' is not supported by AWQMarlin. Falling back to unoptimized AWQ kernels.", "fallback.awq"),
    (NEW, "VLLM_BATCH_INVARIANT overrides --linear-backend=marlin; using emulation", "fallback.batch-invariant"),
    (OLD, "In NVFP4 linear, the weight global scale is different for parallel layers (e.g. q_proj, k_proj,",
     "scale.global"),
    (OLD, "In NVFP4 linear, the global scale for input or weight are different for parallel layers", "scale.global"),
    (OLD, "In NVFP4 linear, the global weight scale (weight_scale_2) differs across fused parallel", "scale.global"),
    (NEW, "In NVFP4 linear, the global weight scale differs across fused layers", "scale.global"),
    (NEW, "In FP8 linear, the static input scale differs across fused layers", "scale.global"),
    (OLD, "NVFP4 Marlin assumes the scales to be >=0, but has encountered negative scales.", "scale.negative"),
    (NEW, "NVFP4 Marlin assumes the scales to be >=0, but has encountered negative scales.", "scale.negative"),
    (OLD, "Unknown vLLM environment variable detected: VLLM_USE_FLASHINFER_MOE_FP4", "variable.unknown"),
    (NEW, "Unknown vLLM environment variable detected: VLLM_TEST_FORCE_FP8_MARLIN", "variable.unknown"),
    (OLD, "Parameter mtp.fc.weight not found in params_dict, skip loading", "tensor.skipped"),
    (OLD, "X has no vLLM implementation, falling back to Transformers implementation.", "fallback.transformers"),
]  # fmt: skip
BY_ID = {line.id: line for line in NOTICES}


@pytest.mark.parametrize(("dialect", "line", "id"), NOTICE_LINES)
def test_failing_lines(dialect: Dialect, line: str, id: str) -> None:
    log = read(dialect.run(MARLIN, dialect.line(line, "WARNING", "loading.py")))
    (notice,) = log.notices
    assert notice.id == id
    assert notice.fails
    verdict = judge_log(log)
    assert verdict.outcome is BY_ID[id].points
    assert any(item.points is verdict.outcome and line[:40] in item.what for item in verdict.evidence)


def test_every_failing_notice_has_a_line_here() -> None:
    assert {line.id for line in NOTICES if line.fails} == {id for _, _, id in NOTICE_LINES}


@BOTH
def test_harmless_lines_do_not_fail(dialect: Dialect) -> None:
    log = read(
        dialect.run(
            MARLIN,
            dialect.line("Marlin requires thread-tile padding for some weight shapes in this model.", "WARNING"),
            dialect.line("Marlin kernel can achieve better performance for small size_n with experimental"),
        )
    )
    assert [notice.id for notice in log.notices] == ["padding", "atomic-add.off"]
    assert judge_log(log).outcome is Outcome.PASS


def test_the_unknown_variable_is_named_in_the_next_command() -> None:
    line = OLD.line("Unknown vLLM environment variable detected: VLLM_ATTENTION_BACKEND", "WARNING")
    verdict = judged(OLD.run(MARLIN, line))
    assert verdict.next.startswith("env -u VLLM_ATTENTION_BACKEND vllm serve CKPT/m")


FAULT_LINES = {
    "guard": None,
    "cutlass": "RuntimeError: cutlass_gemm_caller, /csrc/cutlass_gemm_caller.cuh:61: Error Internal",
    "illegal-instruction": "torch.AcceleratorError: CUDA error: an illegal instruction was encountered",
    "illegal-access": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "no-image": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
    "no-gpu": "RuntimeError: No CUDA GPUs are available",
    "capture": "RuntimeError: CUDA error: operation not permitted when stream is capturing",
    "cuda-error": "RuntimeError: CUDA error: unspecified launch failure",
    "import": "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
    "backend.absent": "ValueError: --linear-backend=marlin was requested but no 'marlin' kernel exists for FP8 layers.",
    "variable.unknown": "ValueError: Unknown vLLM environment variable detected: VLLM_FOO",
    "option.unknown": None,
    "port": "OSError: [Errno 98] Address already in use",
    "architecture": "ValueError: Model architectures ['Qwen3_5ForCausalLM'] are not supported for now.",
    "no-kernel": "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons:",
    "parameter": "ValueError: There is no module or parameter named 'weight' in Qwen3_5MTP",
    "scheme": "ValueError: Found a different quantization schemes for ['in_proj_b','in_proj_a'] in in_proj_ba.",
    "shape": "RuntimeError: start (0) + length (512) exceeds dimension size (256).",
    "killed": None,
    "crash": None,
}
RAW = {
    "guard": "This kernel only supports sm120.",
    "option.unknown": "vllm: error: unrecognized arguments: --gdn-prefill-backend",
    "killed": "Killed",
    "crash": "Fatal Python error: Segmentation fault",
}
FRAMES = (
    ("/opt/vllm/model_executor/layers/x.py", 12, "forward"),
    ("/usr/lib/python3.12/site-packages/torch/_ops.py", 3, "call"),
)


def test_every_fault_has_a_line_here() -> None:
    assert list(FAULT_LINES) == [line.id for line in FAULTS] or set(FAULT_LINES) == {line.id for line in FAULTS}


@BOTH
@pytest.mark.parametrize("id", list(FAULT_LINES))
@pytest.mark.parametrize("raw", [False, True], ids=["logged", "raw"])
@pytest.mark.parametrize("when", ["loading", "serving"])
def test_faults(dialect: Dialect, id: str, raw: bool, when: str) -> None:
    lines = dialect.start(MARLIN)
    if when == "loading":
        lines = lines[:4]
    exception = FAULT_LINES[id]
    lines += [RAW[id] + "\n"] if exception is None else dialect.crash(exception, *FRAMES, raw=raw)
    log = read("".join(lines))
    (fault,) = log.fatal
    assert fault.id == id
    assert log.end is End.FAILED
    assert fault.phase is (Phase.LOAD if when == "loading" else Phase.SERVING)
    if exception is not None:
        assert fault.at == "/opt/vllm/model_executor/layers/x.py:12 in forward"[1:].replace("opt/", "", 1)
    verdict = judge_log(log)
    points = next(line.points for line in FAULTS if line.id == id)
    assert verdict.outcome is points
    assert verdict.next
    assert verdict.outcome is not Outcome.PASS


def test_an_error_of_one_request_does_not_end_the_engine() -> None:
    lines = [*OLD.start(MARLIN), OLD.served()]
    bad = OLD.crash("ValueError: The prompt is too long")
    lines += [line.replace("[core.py:", "[serving_completion.py:") for line in bad]
    lines += [OLD.served(), OLD.end()]
    log = read("".join(lines))
    assert not log.fatal
    assert judge_log(log).outcome is Outcome.PASS


def test_a_cuda_error_of_one_request_does_end_it() -> None:
    bad = OLD.crash("torch.AcceleratorError: CUDA error: an illegal instruction was encountered")
    lines = [*OLD.start(MARLIN), *(line.replace("[core.py:", "[serving_completion.py:") for line in bad)]
    assert judged("".join(lines)).outcome is Outcome.KERNEL_FAULT


def test_an_unknown_error_is_inconclusive_and_its_later_lines_may_name_it() -> None:
    plain = [*NEW.start(MARLIN)[:4], *NEW.crash("FooError: something new")]
    assert judged("".join(plain)).outcome is Outcome.INCONCLUSIVE
    told = [*plain[:-1], *NEW.crash("pydantic_core.ValidationError: 1 validation error for ModelConfig", raw=True),
            "  Value error, Model architectures ['Qwen3_5ForCausalLM'] are not supported for now.\n"]  # fmt: skip
    assert judged("".join(told)).outcome is Outcome.ENVIRONMENT_FAULT


def test_the_engine_that_died_without_a_known_cause() -> None:
    lines = [
        *OLD.start(MARLIN),
        OLD.line("Worker proc VllmWorker-0 died unexpectedly, shutting down executor.", "ERROR"),
    ]
    verdict = judged("".join(lines))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.missing == ("why the engine ended",)


def test_the_cause_counts_and_not_the_echo_of_the_frontend() -> None:
    lines = [*OLD.start(MARLIN)[:4], *OLD.crash("ImportError: no flashinfer", *FRAMES),
             *OLD.crash("RuntimeError: Engine core initialization failed. See root cause.", raw=True)]  # fmt: skip
    log = read("".join(lines))
    assert [fault.id for fault in log.fatal] == ["import"]


def test_a_forced_backend_that_another_replaced_is_a_kernel_fault() -> None:
    other = "Using MacheteLinearKernel for CompressedTensorsWNA16"
    assert judged(OLD.run(other, linear="marlin")).outcome is Outcome.KERNEL_FAULT
    assert judged(OLD.run(other, linear="machete")).outcome is Outcome.PASS
    assert judged(OLD.run(other)).outcome is Outcome.INCONCLUSIVE
    experts = "Using TRITON Fp8 MoE backend out of potential backends: ['TRITON']."
    assert judged(OLD.run(experts, moe="marlin")).outcome is Outcome.KERNEL_FAULT


@pytest.mark.parametrize("kernel", ["TritonW4A16LinearKernel", "ExllamaLinearKernel", "ConchLinearKernel"])
def test_a_kernel_that_comes_after_marlin_is_a_silent_fallback(kernel: str) -> None:
    verdict = judged(OLD.run(f"Using {kernel} for CompressedTensorsWNA16"))
    assert verdict.outcome is Outcome.KERNEL_FAULT
    assert "refused" in verdict.summary
    assert verdict.next == "sparkquant verify CKPT/m --engine vllm==0.25.1"


def test_humming_comes_after_marlin_in_the_older_version_only() -> None:
    line = "Using HummingLinearKernel for CompressedTensorsWNA16"
    assert judged(OLD.run(line)).outcome is Outcome.KERNEL_FAULT
    assert judged(NEW.run(line)).outcome is Outcome.INCONCLUSIVE


def test_nothing_quantized_proves_nothing_of_marlin() -> None:
    verdict = judged(OLD.run(quantization="None"))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "nothing is quantized" in verdict.summary


def test_graphs_that_were_never_captured_are_missing() -> None:
    text = OLD.run(MARLIN, eager=False)
    assert judged(text).outcome is Outcome.PASS
    cut = "".join(line for line in text.splitlines(keepends=True) if "Graph capturing" not in line)
    assert judged(cut).outcome is Outcome.INCONCLUSIVE


def test_a_server_that_answers_needs_no_end_in_its_log() -> None:
    text = "".join([*OLD.start(MARLIN), OLD.served()])
    assert judged(text).outcome is Outcome.INCONCLUSIVE
    assert judge_log(read(text), alive=True).outcome is Outcome.PASS


def test_an_api_server_is_started_when_it_says_so() -> None:
    lines = ["(APIServer pid=1) INFO:     Started server process [1]\n", *OLD.start(MARLIN)]
    assert not read("".join(lines)).started
    lines.append("(APIServer pid=1) INFO:     Application startup complete.\n")
    request = '(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    log = read("".join([*lines, request, "(APIServer pid=1) INFO:     Application shutdown complete.\n"]))
    assert log.started
    assert log.requests
    assert log.end is End.ORDERLY


def test_acceptance_is_read_with_its_positions() -> None:
    line = (
        "SpecDecoding metrics: Mean acceptance length: 2.32, Accepted throughput: 5.00 tokens/s, Drafted throughput:"
        " 7.00 tokens/s, Accepted: 132 tokens, Drafted: 200 tokens, Per-position acceptance rate: 0.820, 0.500, Avg"
        " Draft acceptance rate: 66.0%"
    )
    spec = "SpeculativeConfig(method='mtp', model='CKPT/m', num_spec_tokens=2)"
    log = read("".join([*NEW.start(MARLIN, "Loading drafter model...", spec=spec), NEW.line(line)]))
    (draft,) = log.drafting
    assert (draft.mean_length, draft.rates, draft.accepted, draft.drafted) == (2.32, (0.82, 0.5), 132, 200)
    assert log.speculation is not None
    assert log.speculation.tokens == 2
    assert log.requests


def test_a_draft_head_that_was_not_loaded_is_missing() -> None:
    spec = "SpeculativeConfig(method='mtp', model='CKPT/m', num_spec_tokens=2)"
    assert any("draft head" in item for item in judged(OLD.run(MARLIN, spec=spec)).missing)


def test_the_last_of_several_runs_is_described_and_an_earlier_crash_is_kept() -> None:
    crashed = "".join([*OLD.start(MARLIN), *OLD.crash("torch.OutOfMemoryError: CUDA out of memory.")])
    log = read(crashed + OLD.run(MARLIN))
    assert log.runs == 2
    assert not log.fatal
    assert judge_log(log).outcome is Outcome.ENVIRONMENT_FAULT
    assert judged(OLD.run(MARLIN) + OLD.run(MARLIN)).outcome is Outcome.PASS
    killed = "".join([*OLD.start(MARLIN), OLD.served()])
    verdict = judged(killed + OLD.run(MARLIN))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "killed, and started again" in verdict.summary


def test_secrets_are_not_kept() -> None:
    line = OLD.line("non-default args: {'model': 'CKPT/m', 'api_key': ['sk-very-secret'], 'hf_token': 'hf_x'}")
    log = read(line + OLD.run(MARLIN).partition("\n")[2])
    assert log.arguments["api_key"] == "***"
    assert "sk-very-secret" not in log.model_dump_json()


@BOTH
def test_colours_and_a_container_prefix_do_not_matter(dialect: Dialect) -> None:
    text = "".join(f"vllm-1  | \x1b[36m{line.rstrip()}\x1b[0m\n" for line in dialect.run(MARLIN).splitlines())
    log = read(text)
    assert log.kernels
    assert log.kv_cache_tokens == 1_234_567


def test_a_line_that_follows_a_progress_bar_is_read() -> None:
    bars = "".join(
        f"\rCapturing CUDA graphs: {i:3}%|####      | {i}/100 [00:0{i % 10}<00:10, 4.2it/s]" for i in range(100)
    )
    log = read(OLD.run(MARLIN).replace("INFO 11-30 21:11:10 [loading.py", bars + "\rINFO 11-30 21:11:10 [loading.py"))
    assert log.families("int") == ("marlin",)


def test_families() -> None:
    names = {
        "MarlinNvFp4LinearKernel": "marlin", "BATCHED_MARLIN": "marlin", "CutlassFP8ScaledMMLinearKernel": "cutlass",
        "FLASHINFER_CUTLASS": "flashinfer", "VLLM_CUTLASS": "cutlass", "DeepGemmFp8BlockScaledMMKernel": "deepgemm",
        "deep_gemm": "deepgemm", "EmulationNvFp4LinearKernel": "emulation", "FLASHINFER_B12X": "flashinfer",
        "PerTensorTorchFP8ScaledMMLinearKernel": "torch", "Unheard": "other",
    }  # fmt: skip
    assert {name: kernel_family(name) for name in names} == names


SGLANG = """\
[2026-10-13 09:00:01] server_args=ServerArgs(model_path='CKPT/glm', quantization='compressed-tensors', dtype='auto', \
tp_size=1, attention_backend='triton', moe_runner_backend='flashinfer_cutlass', speculative_algorithm='NEXTN', \
speculative_num_draft_tokens=4, disable_cuda_graph=False, api_key='sk-secret')
[2026-10-13 09:00:05 TP0] Load weight begin. avail mem=118.20 GB
[2026-10-13 09:08:13 TP0] Load weight end. elapsed=488.00 s, type=GlmForCausalLM, dtype=bf16, avail mem=50 GB, \
mem usage=66.22 GB.
[2026-10-13 09:08:20 TP0] Capture target CUDA graph end. elapsed=5 s
[2026-10-13 09:08:20 TP0] max_total_num_tokens=812345, chunked_prefill_size=8192, max_running_requests=32
[2026-10-13 09:08:21] The server is fired up and ready to roll!
[2026-10-13 09:08:30 TP0] Decode batch, #running-req: 1, #token: 512, accept len: 2.13, accept rate: 0.38
"""


def test_sglang_is_recognised_and_proves_no_kernel() -> None:
    log = read(SGLANG)
    assert (log.engine, log.model, log.moe_backend, log.attention) == (
        Engine.SGLANG,
        "CKPT/glm",
        "flashinfer_cutlass",
        "triton",
    )
    assert (log.load_gib, log.kv_cache_tokens, log.started, log.requests) == (66.22, 812_345, True, True)
    assert log.speculation is not None
    assert log.drafting[0].mean_length == 2.13
    verdict = judge_log(log)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "diagnose CKPT/glm --url" in verdict.next
    crashed = SGLANG + "[2026-10-13 09:20:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    crashed += "RuntimeError: CUDA error: an illegal instruction was encountered\n"
    assert judged(crashed).outcome is Outcome.KERNEL_FAULT


def test_no_engine_at_all() -> None:
    verdict = judged("hello\nworld\n")
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "any line of vLLM or SGLang" in verdict.missing
