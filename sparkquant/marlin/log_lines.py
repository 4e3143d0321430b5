"""The lines of server logs that mean something, as data: one row per line, with the versions that print it and where.

`source` is a file of the wheel of vLLM 0.25.1 or 0.33.0 (below `vllm/`) or of SGLang 0.5.23 (below `sglang/srt/`) in
which the line was read, or `recorded` for lines of a real log. 0.26 is taken to print the lines of 0.25.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparkquant.marlin.verdict import Outcome

OLD = ("0.25", "0.26")
NEW = ("0.33",)
ALL = OLD + NEW

HEADER = re.compile(
    r"^[^'\"{}]{0,200}?(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[([^\]\s]{1,200}):\d{1,6}\] ?"
)
"""What vLLM writes before a message: level, time, file. Before it `(process pid=N)`, always in 0.33 and with several
processes in 0.25, and what a container runtime adds. A quotation mark before it means that the text is quoted."""
WHOSE = re.compile(r"^[^'\"{}]{0,200}?(\([\w. :-]{1,80} pid=\d{1,10}\))")
CONTAINER = re.compile(
    r"^(?:[\w.@/-]{1,100} {0,40}\| ?|\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,100} [^\s\[\]]{1,100}(?:\[\d{1,10}\])?: ){1,2}"
)
"""What compose (`name-1  | `), Docker and Kubernetes (a time, `stdout F`) and journald write before every line."""
PROCESS = re.compile(r"^(?:\([\w. :-]{1,80} pid=\d{1,10}\) ?)?(?:\[rank\d{1,4}\]: ?)?")
SGLANG_HEADER = re.compile(r"^[^'\"{}]{0,200}?\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]'\"]{0,60}\] ?")
ANSI = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A line that names a kernel (group 1) and what it serves (group 2, or `layers`); `implied`: a family it proves."""

    pattern: re.Pattern[str]
    dialects: tuple[str, ...]
    source: str
    layers: str = ""
    experts: bool = False
    implied: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line with a meaning. `fails`: no run with it may pass; the first group, if any, is the detail."""

    id: str
    pattern: re.Pattern[str]
    points: Outcome | None
    meaning: str
    source: str
    dialects: tuple[str, ...] = ALL
    fails: bool = True


def _p(text: str) -> re.Pattern[str]:
    return re.compile(text)


KERNELS = (
    Kernel(_p(r"Using (\w+) for (CompressedTensors\w+)$"), ALL, "quantization/compressed_tensors/schemes"),
    Kernel(
        _p(r"Using (dequantize \+ batch-invariant matmul) for (\w+)$"),
        NEW,
        "quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py",
    ),
    Kernel(_p(r"Using (\w+) for (AutoGPTQLinearMethod)$"), ALL, "quantization/auto_gptq.py"),
    Kernel(_p(r"Using (\w+) for (AutoAWQMarlinLinearMethod)$"), ALL, "quantization/auto_awq.py"),
    Kernel(_p(r"Using (\w+) for (mixed-precision linear)$"), NEW, "kernels/linear/__init__.py"),
    Kernel(_p(r"Using (\w+) for ((?:NVFP4|MXFP4|MXFP6|MXFP8) GEMM)$"), ALL, "kernels/linear/__init__.py"),
    Kernel(_p(r"Selected (\w*Kernel\w*) for (\w+)$"), ALL, "kernels/linear/__init__.py"),
    Kernel(
        _p(
            r"Using '?([A-Z][A-Z0-9_]*)'? ((?:WNA16|NvFp4|Fp8|Mxfp4|MxFp8|Int8|W4A8|W4A8 Int8|Unquantized) MoE)"
            r" backend"
        ),
        ALL,
        "fused_moe/oracle",
        experts=True,
    ),
    Kernel(
        _p(r"Using (CompressedTensors\w+MoEMethod)\b"),
        ALL,
        "quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py",
        "CompressedTensors MoE",
        True,
    ),
    Kernel(
        _p(
            r"Your GPU does not have native support for (FP4) computation but FP4 quantization is being used\."
            r" Weight-only FP4 compression will be used leveraging the Marlin kernel"
        ),
        ALL,
        "recorded; quantization/utils/marlin_utils_fp4.py",
        "NVFP4 GEMM",
        implied="marlin",
    ),
    Kernel(
        _p(
            r"Your GPU does not have native support for (FP8) computation but FP8 quantization is being used\."
            r" Weight-only FP8 compression will be used leveraging the Marlin kernel"
        ),
        ALL,
        "quantization/utils/marlin_utils_fp8.py",
        "Fp8",
        implied="marlin",
    ),
)

SCHEMES = (
    ("nvfp4", re.compile(r"nvfp4", re.IGNORECASE)),
    ("mxfp4", re.compile(r"mxfp4|w4a4_?mxfp4|mxfp6", re.IGNORECASE)),
    ("mxfp8", re.compile(r"mxfp8", re.IGNORECASE)),
    ("int8", re.compile(r"int8|w4a8|w8a8int", re.IGNORECASE)),
    ("fp8", re.compile(r"fp8", re.IGNORECASE)),
    ("none", re.compile(r"unquantized", re.IGNORECASE)),
    ("int", re.compile(r"wna16|w4a16|gptq|awq|mixed-precision linear|CompressedTensors MoE", re.IGNORECASE)),
)
"""Scheme by what a line says it serves; the first match counts (`W4A8 Fp8` is integer weights with FP8 activations)."""

FAMILIES = (
    "flashinfer", "deepgemm", "marlin", "machete", "cutlass", "allspark", "conch", "exllama", "triton", "humming",
    "emulation", "b12x", "fbgemm", "batch-invariant", "torch",
)  # fmt: skip
"""Part of a kernel's name -> its family; the first that occurs counts."""


NOTICES = (
    Line(
        "fallback.experts",
        _p(r"Falling back to Moe WNA16 kernels"),
        Outcome.KERNEL_FAULT,
        "Marlin cannot take these experts: they run in Triton, slower and without an error",
        "quantization/auto_gptq.py",
    ),
    Line(
        "fallback.emulation",
        _p(r"falling back to the slow and unoptimized\s+emulation backend"),
        Outcome.KERNEL_FAULT,
        "no NVFP4 kernel is usable here: the weights are dequantized in Python",
        "kernels/linear/__init__.py",
    ),
    Line(
        "fallback.backend",
        _p(r"(--linear-backend=\S+) has no kernel for this linear layer type"),
        Outcome.KERNEL_FAULT,
        "the backend that was asked for was replaced by the automatic choice",
        "kernels/linear/__init__.py",
        NEW,
    ),
    Line(
        "fallback.backend",
        _p(r"(--linear-backend=\S+) was requested, but no \S+ kernel exists for .{1,80}falling back"),
        Outcome.KERNEL_FAULT,
        "the backend that was asked for was replaced by the automatic choice",
        "kernels/linear/__init__.py",
        NEW,
    ),
    Line(
        "fallback.awq",
        _p(r"Falling back to unoptimized AWQ kernels"),
        Outcome.KERNEL_FAULT,
        "Marlin cannot take this shape: AWQ's own kernel runs",
        "quantization/auto_awq.py",
    ),
    Line(
        "fallback.batch-invariant",
        _p(r"(VLLM_BATCH_INVARIANT) (?:overrides|is set but)"),
        Outcome.KERNEL_FAULT,
        "batch invariance replaces the kernel that was asked for",
        "kernels/linear/__init__.py",
    ),
    Line(
        "fallback.transformers",
        _p(r"has no (?:vLLM|SGLang) implementation, falling back to Transformers"),
        Outcome.ENVIRONMENT_FAULT,
        "this version does not know the architecture",
        "model_loader/utils.py",
    ),
    Line(
        "scale.global",
        _p(
            r"(?:weight|input|activation) global scale (?:for inputs )?(?:is|are) different"
            r"|global scale for (?:input or weight|weight) are different"
            r"|differs? across (?:the )?fused|global (?:weight|input) scale differs across"
            r"|static input scale differs across"
        ),
        Outcome.CHECKPOINT_FAULT,
        "fused parts have different global scales and the engine keeps one of them",
        "quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py, quantization/modelopt.py",
    ),
    Line(
        "scale.negative",
        _p(r"NVFP4 Marlin assumes the scales to be >=0"),
        Outcome.CHECKPOINT_FAULT,
        "Marlin drops the sign of NVFP4 block scales",
        "quantization/utils/marlin_utils_fp4.py",
    ),
    Line(
        "variable.unknown",
        _p(r"Unknown vLLM environment variable detected: (\w{1,100})"),
        Outcome.ENVIRONMENT_FAULT,
        "this version does not read the variable: what it was set for does not happen",
        "envs.py, platforms/interface.py",
    ),
    Line(
        "tensor.skipped",
        _p(r"Parameter (\S{1,200}) not found in params_dict"),
        Outcome.CHECKPOINT_FAULT,
        "a stored tensor has no place in the model and was left out",
        "models",
    ),
    Line(
        "warm-up.failed",
        _p(r"(GDN prefill kernel warmup) \(T=\d+\) failed"),
        Outcome.ENVIRONMENT_FAULT,
        "the kernel of the linear-attention prefill could not run once",
        "recorded; layers/mamba/gdn/qwen_gdn_linear_attn.py",
        OLD,
        fails=False,
    ),
    Line(
        "misleading.fp4",
        _p(r"Your GPU does not have native support for FP4 computation"),
        None,
        "Marlin decodes FP4 weights, as wanted; on GB10 the sentence about the GPU is misleading",
        "recorded; quantization/utils/marlin_utils_fp4.py",
        fails=False,
    ),
    Line(
        "misleading.fp8",
        _p(r"Your GPU does not have native support for FP8 computation"),
        None,
        "Marlin decodes FP8 weights; the sentence about the GPU does not say why Marlin was chosen",
        "quantization/utils/marlin_utils_fp8.py",
        fails=False,
    ),
    Line(
        "padding",
        _p(r"Marlin requires thread-tile padding for (some weight shapes|the MoE intermediate size)"),
        None,
        "Marlin pads some layers with zeros: right, a little slower",
        "quantization/utils/marlin_utils.py",
        fails=False,
    ),
    Line(
        "atomic-add.off",
        _p(r"Marlin kernel can achieve better performance for small size_n"),
        None,
        "VLLM_MARLIN_USE_ATOMIC_ADD is off and some dense layer has n < 2048 <= k",
        "quantization/utils/marlin_utils.py",
        fails=False,
    ),
)
