"""`explain`: what a CUDA error in a log means, how to find its kernel, and whether FP8 GEMMs can trap on this chip."""

from __future__ import annotations

from collections.abc import Iterator

from sparkquant.marlin import next_step
from sparkquant.marlin.doctor import GB10, fp8_can_trap
from sparkquant.marlin.installation import Installation
from sparkquant.marlin.known_bad import version_of
from sparkquant.marlin.server_log import Fault, Phase, ServerLog

IDS = ("illegal-instruction", "illegal-access", "cuda-error", "guard", "cutlass")
"""Faults that a kernel on the GPU causes."""


def explain(log: ServerLog, capability: str = "", installation: Installation | None = None) -> tuple[str, ...]:
    """Sentences about the first CUDA error of a log; () where there is none."""
    fault = next((fault for fault in log.faults if fault.id in IDS), None)
    return () if fault is None else tuple(_sentences(log, fault, capability or log.capability, installation))


def _sentences(log: ServerLog, fault: Fault, capability: str, installation: Installation | None) -> Iterator[str]:
    yield next_step.ASYNCHRONOUS + (f": {fault.at} is not evidence against that line" if fault.at else "")
    if fault.phase is Phase.SERVING:
        yield (
            "it came while serving: settings that were changed last are not guilty for that; a kernel that only some"
            " batch sizes or lengths reach is more likely"
        )
    yield (
        f"to see the launch that fails: {next_step.serve(log, {'CUDA_LAUNCH_BLOCKING': '1'}, enforce_eager=True)}"
        " (slow; eager, because a graph is one launch)"
    )
    yield (
        "to see the kernel itself: CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_FILE=core.%p, then cuda-gdb;"
        " `dmesg | grep Xid` dates it (13: illegal instruction or address, 31: page fault)"
    )
    yield from _fp8(log, fault, capability, installation)


def _fp8(log: ServerLog, fault: Fault, capability: str, installation: Installation | None) -> Iterator[str]:
    """Whether the FP8 kernels of this build can trap here."""
    ran = [kernel for kernel in log.kernels if kernel.scheme == "fp8"]
    if not ran and log.kernels and fault.id != "guard":
        yield "no FP8 GEMM is named in this log: the FP8 trap of 12.1 is not the cause (an FP8 KV cache may still be)"
        return
    if not capability:
        yield "whether FP8 GEMMs can trap depends on the chip: name it with --capability (GB10 is 12.1)"
    elif capability != GB10:
        yield f"the known FP8 trap (`__CUDA_ARCH__ == 1200`) concerns 12.1; this is {capability}"
    else:
        named = ", ".join(kernel.kernel for kernel in ran) or "FP8 GEMMs"
        yield f"{named} on 12.1: " + _trap(log, installation)


def _trap(log: ServerLog, installation: Installation | None) -> str:
    if installation is None:
        number = version_of(log.version)
        if number is not None and number >= (0, 25):
            return (
                f"the guard of vLLM {log.version} takes all of 12.x (vllm#41215), so it should not trap; a published"
                " wheel is reported to fail all the same (vllm#45435). `sparkquant doctor --vllm PATH` reads the build"
            )
        return (
            "versions before 0.25 can trap, where the build holds code for sm_121: see `sparkquant doctor --vllm PATH`"
        )
    told = fp8_can_trap(installation, GB10)
    if told is None:
        return "the build does not name its kernels, so it cannot be told: send one FP8 request as a control"
    if told:
        return "yes. This build holds a trap in place of their body for 12.1 (fp8-guard-1200)"
    return "no. The guard of this build lets 12.1 run their body"
