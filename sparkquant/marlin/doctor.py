"""`examine`: what this machine is, what its vLLM holds for the GPU, and which known faults apply to the pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from sparkquant.engine.versions import require_capability
from sparkquant.errors import EnvironmentMissing
from sparkquant.marlin.fatbin import Extension
from sparkquant.marlin.installation import Installation, core, find_vllm
from sparkquant.marlin.known_bad import KnownBad, gone, known_bad, table
from sparkquant.marlin.machine import Machine, look
from sparkquant.marlin.noun import Noun

GB10 = "12.1"
READY = ("native", "family", "compatible")
"""How machine code fits a chip."""
CHANGES_NUMBERS = {
    "VLLM_MARLIN_INPUT_DTYPE": "activations are quantized too: numbers change",
    "VLLM_BATCH_INVARIANT": "other kernels than Marlin are taken for FP8 and NVFP4",
    "VLLM_DISABLED_KERNELS": "kernels are taken out of the choice",
    "VLLM_TEST_FORCE_FP8_MARLIN": "FP8 and NVFP4 experts go to Marlin (0.25 and 0.26 alone)",
}


class Finding(Noun):
    """`level`: `fault` (nothing will run right), `warning`, or `note`. `do` is the next step, "" for a note."""

    level: Literal["fault", "warning", "note"]
    what: str
    do: str = ""


class Examination(Noun):
    """`capability` is what all is judged for; `because` says where it comes from. `dated`: the table's last change."""

    machine: Machine
    capability: str
    because: str
    installation: Installation | None
    findings: tuple[Finding, ...]
    known_bad: tuple[KnownBad, ...]
    dated: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON: extensions with the names of their architectures and how they run on the chip."""
        told = self.model_dump(mode="json")
        if self.installation is not None:
            told["installation"].pop("known_variables")
            told["installation"]["extensions"] = [
                {
                    "path": _name(self.installation, extension), "bytes": extension.size,
                    "architectures": [code.name for code in extension.codes],
                    "fat_binaries": extension.fit(self.capability), "problem": extension.problem,
                }
                for extension in self.installation.cuda
            ]  # fmt: skip
        return told

    @property
    def exit_code(self) -> int:
        """0, or 5 where the build cannot run on the chip."""
        return EnvironmentMissing.exit_code if any(f.level == "fault" for f in self.findings) else 0


def examine(vllm: str | None = None, capability: str | None = None) -> Examination:
    """This machine and a vLLM, which is not imported.

    vllm        where it is, as `installation.find_vllm` takes it; without it the one on PATH
    capability  judge for this chip instead of the one here; GB10 where there is neither
    Raises EnvironmentMissing when `vllm` is not there, UsageError for a capability that is not like 12.1.
    """
    if capability is not None:
        require_capability(capability)
    machine, installation = look(), find_vllm(vllm)
    own = machine.gpus[0].capability if machine.gpus else None
    judged = capability or own or GB10
    because = "named" if capability else "the GPU here" if own else "GB10, because no GPU is here"
    version = installation.version if installation else ""
    findings = [*_variables(machine, installation), *_memory(machine)]
    if installation is None:
        findings.append(Finding(level="note", what="no vLLM was found on PATH", do="sparkquant doctor --vllm PATH"))
    else:
        findings += [*_build(installation, judged), *_packages(installation, judged)]
    order = ("fault", "warning", "note")
    return Examination(
        machine=machine, capability=judged, because=because, installation=installation,
        findings=tuple(sorted(findings, key=lambda finding: order.index(finding.level))),
        known_bad=tuple(known_bad(judged, version)), dated=table().dated,
    )  # fmt: skip


def _variables(machine: Machine, installation: Installation | None) -> Iterator[Finding]:
    """Variables that this version does not read, and those that change what is computed."""
    version = installation.version if installation else ""
    replaced = {item.name: item.instead for item in gone(version)}
    known = set(installation.known_variables) if installation else set()
    for name, value in machine.variables.items():
        if not name.startswith("VLLM_") or not value:
            continue
        unread = bool(known) and name not in known if installation else name in replaced
        if unread:
            instead = replaced.get(name, "")
            whose = f"vLLM {version}" if version else "newer vLLM"
            yield Finding(
                level="warning", what=f"{name} is set, and {whose} does not read it",
                do=f"unset {name}" + (f"; use {instead}" if instead else ""),
            )  # fmt: skip
        elif name in CHANGES_NUMBERS:
            yield Finding(level="warning", what=f"{name}={value}: {CHANGES_NUMBERS[name]}", do=f"unset {name}")


def _memory(machine: Machine) -> Iterator[Finding]:
    if any(gpu.unified for gpu in machine.gpus):
        yield Finding(level="note", what="unified memory: keep --gpu-memory-utilization at 0.85 or below")


def machine_code(extension: Extension, capability: str) -> int:
    """Fat binaries that run without being compiled at load."""
    fits = extension.fit(capability)
    return sum(fits.get(how, 0) for how in READY)


def _build(installation: Installation, capability: str) -> Iterator[Finding]:
    """What the compiled code says."""
    for extension in installation.extensions:
        if extension.problem:
            yield Finding(
                level="warning", what=f"{_name(installation, extension)}: {extension.problem}", do="install vLLM again"
            )
    kernels = [extension for extension in installation.cuda if core(extension.path)]
    if not kernels:
        yield Finding(level="fault", what="no compiled kernels for quantized layers are installed (_C, _moe_C)",
                      do="install a CUDA build of vLLM")  # fmt: skip
    for extension in installation.cuda:
        yield from _fits(_name(installation, extension), extension, capability)
    for extension in kernels:
        yield from _marlin(_name(installation, extension), extension, capability)
    yield from _guard(installation, capability)


def _fits(name: str, extension: Extension, capability: str) -> Iterator[Finding]:
    """Extensions that the chip can run from PTX alone, or not at all."""
    fits = extension.fit(capability)
    if not extension.modules or machine_code(extension, capability):
        return
    if not core(extension.path):
        if fits.get("ptx"):
            yield Finding(level="note", what=f"{name} holds no machine code for {capability}: it is compiled at load")
        return
    what = f"{name} holds no machine code for {capability}"
    ran = "all of it is compiled at load" if fits.get("ptx") else "none of it runs"
    yield Finding(level="fault", what=f"{what}: {ran}", do=_rebuild(capability))


def _rebuild(capability: str) -> str:
    return f"install a build for {capability}, or build with TORCH_CUDA_ARCH_LIST={capability}"


def _marlin(name: str, extension: Extension, capability: str) -> Iterator[Finding]:
    """Marlin's own kernels, by name: one without machine code for the chip runs from PTX, or not at all."""
    experts = Path(extension.path).name.startswith("_moe")
    which = "Marlin's expert kernels" if experts else "Marlin's dense kernels"
    fits, helpers = extension.fit(capability, "marlin"), extension.fit(capability, "marlin-helper")
    ready = sum(fits.get(how, 0) for how in READY)
    if not extension.named:
        yield Finding(level="note", what=f"{name}: kernels cannot be told apart without libzstd")
    elif not fits:
        yield Finding(level="warning", what=f"{name} holds no Marlin kernel", do="install a CUDA build of vLLM")
    elif fits.get("ptx"):
        known = " (marlin-experts-ptx: corrupted answers among concurrent requests)" if capability[:3] == "12." else ""
        what = f"{which}: {fits['ptx']} fat binaries have no machine code for {capability}, and are compiled at load"
        yield Finding(level="fault" if known and experts else "warning", what=what + known, do=_rebuild(capability))
    elif not ready:
        yield Finding(level="fault", what=f"{which}: none runs on {capability}", do=_rebuild(capability))
    else:
        beside = helpers.get("ptx", 0)
        more = f"; {beside} beside them (repacking, permuting) have none and are compiled at load" if beside else ""
        what = f"{which}: {ready} fat binaries have machine code for {capability}{more}"
        yield Finding(level="note", what=what)


def fp8_can_trap(installation: Installation, capability: str) -> bool | None:
    """Whether FP8 CUTLASS kernels of this build trap on the chip; None where the build does not tell.

    The guard is in the kernel's name. `enable_sm120_only` holds the body for __CUDA_ARCH__ == 1200, which is decided
    when code is compiled: machine code for sm_120 or its family holds it and runs on 12.1, machine code for sm_121,
    which the driver prefers there, holds a trap.
    """
    kernels = [extension for extension in installation.cuda if core(extension.path) and extension.named]
    if capability != GB10 or not kernels:
        return None
    only = [module for extension in kernels for module in extension.modules if "guard-only" in module.marks]
    if any(code.kind == "sass" and code.sm == 121 for module in only for code in module.codes):
        return True
    family = any("guard-family" in module.marks for extension in kernels for module in extension.modules)
    return False if only or family else None


def _guard(installation: Installation, capability: str) -> Iterator[Finding]:
    told = fp8_can_trap(installation, capability)
    if told:
        what = "FP8 CUTLASS kernels of this build hold a trap in place of their body for 12.1 (fp8-guard-1200)"
        yield Finding(level="fault", what=what, do="use vLLM 0.25 or newer, or FP8 by Marlin")
    elif told is False:
        yield Finding(level="note", what="FP8 CUTLASS kernels: the guard of this build lets 12.1 run their body")


def _packages(installation: Installation, capability: str) -> Iterator[Finding]:
    versions = installation.versions
    if "flashinfer-python" not in versions:
        asked = "; linear attention needs --gdn-prefill-backend triton" if capability == "9.0" else ""
        yield Finding(level="note", what=f"flashinfer is not installed: its kernels are out of the choice{asked}")
    if versions.get("nvidia-cutlass-dsl") == "4.5.0" and capability.startswith("12."):
        yield Finding(
            level="warning", what="nvidia-cutlass-dsl 4.5.0 compiles FP4 wrongly on 12.x (nvfp4-cutlass-garbage)",
            do="install nvidia-cutlass-dsl 4.5.1 or newer",
        )  # fmt: skip
    if not installation.version:
        yield Finding(level="warning", what="the version of this vLLM is not known: every known fault is listed",
                      do="install it with its metadata")  # fmt: skip


def _name(installation: Installation, extension: Extension) -> str:
    return str(Path(extension.path).relative_to(installation.folder))
