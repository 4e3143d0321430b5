"""The lines with which engines end, as data, and the shape of traces. See `log_lines` for what `source` means."""

from __future__ import annotations

import re

from sparkquant.marlin.log_lines import OLD, Line
from sparkquant.marlin.verdict import Outcome


def _p(text: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(text, flags)


FAULTS = (
    Line(
        "guard",
        _p(r"This kernel only supports sm\d+"),
        Outcome.KERNEL_FAULT,
        "a kernel holds its body for another chip alone, and traps on this one",
        "csrc/cutlass_extensions/common.hpp of vLLM; Avarok-Cybersecurity/dgx-vllm#9",
    ),
    Line(
        "cutlass",
        _p(
            r"cutlass_gemm_caller|[Cc]utlass (?:error|GEMM).{0,80}Error Internal"
            r"|\bgemm on sm1\d\d\b.{0,40}Error Internal"
        ),
        Outcome.KERNEL_FAULT,
        "CUTLASS refused at run time: mostly machine code built for another member of the family",
        "vllm#43367, vllm#40758, vllm#30163",
    ),
    Line(
        "illegal-instruction",
        _p(r"an illegal instruction was encountered|cudaErrorIllegalInstruction"),
        Outcome.KERNEL_FAULT,
        "a kernel trapped: the place named is where the host noticed, not where it ran",
        "torch",
    ),
    Line(
        "illegal-access",
        _p(r"an illegal memory access was encountered|cudaErrorIllegalAddress|misaligned address"),
        Outcome.KERNEL_FAULT,
        "a kernel touched memory it must not: the place named is where the host noticed",
        "torch",
    ),
    Line(
        "no-image",
        _p(
            r"no kernel image is available for execution|PTX was compiled with an unsupported toolchain"
            r"|cudaErrorNoKernelImageForDevice"
        ),
        Outcome.ENVIRONMENT_FAULT,
        "this build holds no code for this GPU",
        "torch",
    ),
    Line(
        "out-of-memory",
        _p(
            r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|No available memory for the cache blocks"
            r"|Free memory on device .{1,80} on startup is less than|larger than the available KV cache memory"
            r"|Out of memory: Killed process|oom-kill"
        ),
        Outcome.ENVIRONMENT_FAULT,
        "not enough memory for these settings",
        "v1/core/kv_cache_utils.py, v1/worker/utils.py, torch",
    ),
    Line(
        "no-gpu",
        _p(
            r"No CUDA GPUs are available|Failed to infer device type|no CUDA-capable device is detected"
            r"|CUDA driver version is insufficient|NVIDIA driver on your system is too old"
            r"|Found no NVIDIA driver"
        ),
        Outcome.ENVIRONMENT_FAULT,
        "no usable GPU or driver",
        "config/device.py, torch",
    ),
    Line(
        "capture",
        _p(r"stream is capturing|during capture|Capture cuda graph failed|cudaErrorStreamCapture\w+"),
        Outcome.EXECUTION_FAULT,
        "the capture of CUDA graphs failed",
        "torch; model_executor/runner/decode_cuda_graph_runner.py",
    ),
    Line(
        "cuda-error",
        _p(r"CUDA error: |device-side assert triggered|unspecified launch failure|CUBLAS_STATUS_\w+"),
        Outcome.KERNEL_FAULT,
        "a CUDA call failed: the place named is where the host noticed",
        "torch",
    ),
    Line(
        "import",
        _p(r"^(?:ModuleNotFoundError|ImportError)\b"),
        Outcome.ENVIRONMENT_FAULT,
        "a package is missing or does not fit",
        "recorded",
    ),
    Line(
        "backend.absent",
        _p(r"(--linear-backend=\S+) was requested but no '\S+' kernel exists for"),
        Outcome.ENVIRONMENT_FAULT,
        "this version refuses a backend that has no kernel for one kind of layer",
        "kernels/linear/__init__.py",
        OLD,
    ),
    Line(
        "variable.unknown",
        _p(r"Unknown vLLM environment variable detected: (\w{1,100})"),
        Outcome.ENVIRONMENT_FAULT,
        "this version does not read the variable",
        "envs.py, platforms/interface.py",
    ),
    Line(
        "option.unknown",
        _p(r"error: unrecognized arguments: (.{1,200})|error: argument (.{1,200})"),
        Outcome.ENVIRONMENT_FAULT,
        "this version does not know an option or its value",
        "argparse",
    ),
    Line(
        "port", _p(r"address already in use", re.IGNORECASE), Outcome.ENVIRONMENT_FAULT, "the port is taken", "asyncio"
    ),
    Line(
        "architecture",
        _p(r"Model architectures .{1,200} (?:are not supported|failed to be inspected)"),
        Outcome.ENVIRONMENT_FAULT,
        "this version does not know the architecture",
        "models/registry.py",
    ),
    Line(
        "no-kernel",
        _p(
            r"Failed to find a kernel that can implement|No \w+ MoE backend supports"
            r"|does not support the deployment configuration"
        ),
        Outcome.CHECKPOINT_FAULT,
        "no kernel of this version takes these shapes, group sizes and bits on this GPU",
        "kernels/linear/__init__.py",
    ),
    Line(
        "parameter",
        _p(
            r"There is no module or parameter named|Following weights were not initialized"
            r"|^KeyError: '[\w.]*(?:layers|experts|weight|scale|proj)"
        ),
        Outcome.CHECKPOINT_FAULT,
        "a stored tensor has no place in the model, or a needed one is not stored",
        "models/utils.py, model_loader",
    ),
    Line(
        "scheme",
        _p(
            r"Found a different quantization schemes|No compressed-tensors compatible scheme was found"
            r"|All MoE projections need to have same"
        ),
        Outcome.CHECKPOINT_FAULT,
        "the quantization config does not fit the engine's fused modules",
        "quantization/compressed_tensors",
    ),
    Line(
        "shape",
        _p(r"size mismatch|^AssertionError.*(?:shape|size)|start \(\d+\) \+ length \(\d+\) exceeds"),
        Outcome.CHECKPOINT_FAULT,
        "a stored tensor has another shape than the model",
        "models",
    ),
    Line(
        "killed",
        _p(r"^Killed$|\bSIGKILL\b|exit ?code:? -9|: -9\b"),
        Outcome.INCONCLUSIVE,
        "something outside killed the process: memory, a time limit, or a person",
        "v1/engine/utils.py",
    ),
    Line(
        "crash",
        _p(r"Segmentation fault|Fatal Python error|SIGSEGV|SIGABRT"),
        Outcome.INCONCLUSIVE,
        "the process crashed in native code",
        "python",
    ),
)
"""The first that matches counts. Searched in errors, warnings with a trace, and lines without a header."""


DEAD = re.compile(
    r"EngineCore (?:failed to start|encountered a fatal error)|Engine core initialization failed|EngineDeadError"
    r"|Worker proc \S+ died unexpectedly|WorkerProc failed|engine core exited unexpectedly|Scheduler hit an exception"
)
"""The engine is gone; the cause is in other lines."""
EXCEPTION = re.compile(r"^([A-Za-z_][\w.]{0,100}(?:Error|Exception|Interrupt|Exit|Unauthorized))(?::|$)")
TERMINATED = re.compile(
    r"^This kernel only supports sm\d+|"
    r"^\s{0,8}what\(\): |^terminate called|^Killed$|Out of memory: Killed|oom-kill|^Segmentation fault"
    r"|^Fatal Python error|^\S{1,60}: error: |^\[rank\d{1,4}\]:\[E"
)
"""Lines without a header that speak of an end: shells, the kernel, C++ and argparse."""
FRAME = re.compile(r'^\s{0,12}File "([^"]{1,300})", line (\d{1,7}), in (\S{1,100})')
LIBRARIES = re.compile(
    r"(?:^SITE/|/site-packages/|/dist-packages/)?(?:torch|triton)/|/lib/python3|^<frozen |concurrent/futures"
)
"""Files in which an error surfaces rather than begins."""
