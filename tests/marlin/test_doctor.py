"""`sparkquant doctor`: the machine, an installed vLLM that is never imported, and the table of known-bad pairs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkquant.errors import EnvironmentMissing, UsageError
from sparkquant.marlin.cuda_error import explain
from sparkquant.marlin.cuda_probe import devices
from sparkquant.marlin.doctor import examine
from sparkquant.marlin.installation import find_vllm
from sparkquant.marlin.known_bad import concerns, gone, known_bad, table, version_of
from sparkquant.marlin.log import read_log
from sparkquant.marlin.machine import look
from tests.cli.running import invoke, spawn
from tests.marlin.elf import fatbin, library
from tests.marlin.synthetic import OLD

ENVS = """\
environment_variables = {
    "VLLM_TARGET_DEVICE": lambda: 1,
    "VLLM_MARLIN_INPUT_DTYPE":
        lambda: 1,
}
"""
MINE = (("sass", 80, ""), ("sass", 120, "f"), ("ptx", 80, ""))
DENSE, EXPERTS = b".text._ZN6marlin6MarlinILl11", b".text._ZN16marlin_moe_wna166MarlinILl11"
REPACK = b".text._ZN6marlin25gptq_marlin_repack_kernel"
GUARD = b".text._ZN7cutlass13device_kernelI19enable_sm120_%sINS_4gemm"


def package(site: Path, *, version: str = "0.25.1", core: bytes | None = None, experts: bytes | None = None) -> Path:
    """A vLLM as its wheel lies in a folder of packages. Importing it fails, as nothing here may do so."""
    folder = site / "vllm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "envs.py").write_text(ENVS)
    (folder / "_C_stable_libtorch.abi3.so").write_bytes(core or library(fatbin(*MINE, names=DENSE)))
    (folder / "_moe_C_stable_libtorch.abi3.so").write_bytes(experts or library(fatbin(*MINE, names=EXPERTS)))
    (folder / "cumem_allocator.abi3.so").write_bytes(library())
    for name in (f"vllm-{version}", "torch-2.11.0", "nvidia_cutlass_dsl-4.5.0"):
        (site / f"{name}.dist-info").mkdir()
    return site


def told(found: object) -> str:
    return " | ".join(f"{f.level}: {f.what}; {f.do}" for f in found.findings)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)


def test_this_machine_is_looked_at_without_a_gpu_too() -> None:
    machine = look()
    assert machine.memory_bytes is None or machine.memory_bytes > 1 << 28
    assert machine.architecture
    if not machine.gpus:
        assert any("no NVIDIA GPU" in note for note in machine.notes)
    probe = devices()
    assert "error" in probe or probe["devices"] is not None


def test_an_nvidia_smi_that_does_not_know_the_memory_is_a_gb10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "error" not in devices():
        pytest.skip("this machine has a CUDA driver, which is asked first")
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA GB10, 12.1, [N/A], 580.95.05'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = look()
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.capability, gpu.memory_bytes, gpu.unified) == ("NVIDIA GB10", "12.1", None, True)
    assert machine.driver == "580.95.05"
    assert any("share one memory" in note for note in machine.notes)
    found = examine()
    assert (found.capability, found.because) == ("12.1", "the GPU here")
    assert "--gpu-memory-utilization" in told(found)


def test_an_nvidia_smi_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert any("does not answer" in note for note in look().notes)


def test_a_vllm_is_described_by_its_files(tmp_path: Path) -> None:
    found = find_vllm(str(package(tmp_path / "site")))
    assert found is not None
    assert found.version == "0.25.1"
    assert found.versions == {"nvidia-cutlass-dsl": "4.5.0", "torch": "2.11.0", "vllm": "0.25.1"}
    assert found.known_variables == ("VLLM_MARLIN_INPUT_DTYPE", "VLLM_TARGET_DEVICE")
    assert len(found.extensions) == 3
    assert [Path(extension.path).name[:6] for extension in found.cuda] == ["_C_sta", "_moe_C"]


def test_the_same_by_every_way_to_name_it(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    (site,) = environment.glob("lib/python*/site-packages")
    package(site)
    script = environment / "bin" / "vllm"
    script.write_text(f"#!{environment}/bin/python\nimport vllm\n")
    script.chmod(0o755)
    for place in (environment, environment / "bin" / "python", script, site, site / "vllm"):
        found = find_vllm(str(place))
        assert found is not None
        assert (found.version, Path(found.folder).resolve()) == ("0.25.1", (site / "vllm").resolve())
        assert "torch" in found.versions


def test_the_vllm_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = package(tmp_path / "site")
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(site))
    found = find_vllm()
    assert found is not None
    assert found.folder == str(site / "vllm")


@pytest.mark.parametrize("name", ["nothing", "empty", "text"])
def test_a_named_place_without_vllm_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no program")
    with pytest.raises(EnvironmentMissing, match=r"does not exist|no vLLM is there"):
        find_vllm(str(tmp_path / name))
    result = invoke("doctor", "--vllm", tmp_path / name)
    assert result.exit_code == 5
    assert "hint: " in result.stderr


def test_a_good_build_has_no_fault(tmp_path: Path) -> None:
    found = examine(str(package(tmp_path / "site")), "12.1")
    assert found.exit_code == 0
    assert "nvidia-cutlass-dsl 4.5.0" in told(found)
    assert "fault:" not in told(found)


PTX = (("sass", 80, ""), ("ptx", 80, ""))


def test_marlin_experts_without_machine_code_for_the_chip_are_a_fault(tmp_path: Path) -> None:
    # Other kernels of the same file have it: only names tell that Marlin's do not.
    experts = library(fatbin(*PTX, names=EXPERTS), fatbin(("sass", 120, ""), names=b".text._Z4topk"))
    site = package(tmp_path / "site", experts=experts)
    found = examine(str(site), "12.1")
    assert found.exit_code == 5
    assert "Marlin's expert kernels: 1 fat binaries have no machine code for 12.1" in told(found)
    assert "marlin-experts-ptx" in told(found)
    assert examine(str(site), "8.0").exit_code == 0
    result = invoke("doctor", "--vllm", site, "--capability", "12.1")
    assert result.exit_code == 5
    assert "fault: " in result.stdout


def test_marlin_with_machine_code_and_helpers_without(tmp_path: Path) -> None:
    core = library(*[fatbin(*MINE, names=DENSE)] * 3, fatbin(*PTX, names=REPACK))
    found = told(examine(str(package(tmp_path / "site", core=core)), "12.1"))
    assert "Marlin's dense kernels: 3 fat binaries have machine code for 12.1; 1 beside them" in found
    assert "Marlin's expert kernels: 1 fat binaries have machine code for 12.1;" in found


def test_no_marlin_and_marlin_for_other_chips(tmp_path: Path) -> None:
    none = package(tmp_path / "none", core=library(fatbin(*MINE)))
    assert "holds no Marlin kernel" in told(examine(str(none), "12.1"))
    other = library(fatbin(("sass", 75, ""), names=DENSE), fatbin(*MINE))
    found = examine(str(package(tmp_path / "other", core=other)), "12.1")
    assert "Marlin's dense kernels: none runs on 12.1" in told(found)
    assert found.exit_code == 5


def test_no_code_at_all_and_damaged_code(tmp_path: Path) -> None:
    site = package(tmp_path / "a", core=library(fatbin(("sass", 90, "a"))), experts=library(fatbin(*MINE))[:-80])
    findings = told(examine(str(site), "12.1"))
    assert "none of it runs" in findings
    assert "damaged" in findings or "ends inside" in findings


def test_a_cpu_build_is_a_fault(tmp_path: Path) -> None:
    site = package(tmp_path / "site")
    for file in (site / "vllm").glob("*.so"):
        file.unlink()
    assert "no compiled kernels" in told(examine(str(site), "12.1"))


BUILDS = {
    "trap": (fatbin(("sass", 120, "f"), ("sass", 121, "a"), names=GUARD % b"only"), True),
    "body of 12.0": (fatbin(("sass", 120, "f"), names=GUARD % b"only"), False),
    "family": (fatbin(("sass", 120, "f"), ("sass", 121, "a"), names=GUARD % b"family"), False),
    "unnamed": (fatbin(*MINE), None),
}


@pytest.mark.parametrize(("code", "traps"), BUILDS.values(), ids=list(BUILDS))
def test_whether_the_guard_that_was_compiled_traps(tmp_path: Path, code: bytes, traps: bool | None) -> None:
    site = str(package(tmp_path / "site", core=library(fatbin(*MINE, names=DENSE), code)))
    found = examine(site, "12.1")
    assert ("hold a trap" in told(found)) == (traps is True)
    assert ("lets 12.1 run" in told(found)) == (traps is False)
    assert found.exit_code == (5 if traps else 0)
    assert "trap" not in told(examine(site, "12.0"))
    kernel = "Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"
    crash = OLD.crash("torch.AcceleratorError: CUDA error: an illegal instruction was encountered")
    said = " ".join(explain(read_log([*OLD.start(kernel), *crash]), "12.1", find_vllm(site)))
    assert {True: "12.1: yes.", False: "12.1: no.", None: "cannot be told"}[traps] in said


def test_variables_that_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    monkeypatch.setenv("VLLM_API_KEY", "secret-value")
    found = examine(str(package(tmp_path / "site")), "12.1")
    assert "VLLM_ATTENTION_BACKEND is set, and vLLM 0.25.1 does not read it; unset" in told(found)
    assert "use --attention-backend" in told(found)
    assert "VLLM_MARLIN_INPUT_DTYPE=int8: activations are quantized too" in told(found)
    assert "VLLM_TARGET_DEVICE" not in told(found)
    assert "secret-value" not in json.dumps(found.as_json())


def test_the_command_in_both_forms(tmp_path: Path) -> None:
    site = package(tmp_path / "site")
    text = invoke("doctor", "--vllm", site, "--capability", "12.1")
    assert text.exit_code == 0
    for part in ("judged for  12.1 (named)", "_C_stable_libtorch", "sm_120f", "nvfp4-cutlass-garbage", "Source: "):
        assert part in text.stdout
    found = json.loads(invoke("doctor", "--vllm", site, "--capability", "12.1", "--json").stdout)
    assert found["installation"]["version"] == "0.25.1"
    first = found["installation"]["extensions"][0]
    assert first["architectures"] == ["sm_80", "sm_120f", "compute_80"]
    assert first["fat_binaries"] == {"family": 1}
    assert any("Marlin's dense kernels" in finding["what"] for finding in found["findings"])
    assert {row["id"] for row in found["known_bad"]} == {row.id for row in known_bad("12.1", "0.25.1")}


def test_it_runs_as_a_process_without_torch(tmp_path: Path) -> None:
    done = spawn("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "judged for" in done.stdout


def test_a_capability_that_is_none() -> None:
    with pytest.raises(UsageError):
        examine(capability="blackwell")


def test_the_table_is_dated_and_sourced() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table().dated)
    ids = [row.id for row in table().rows]
    assert len(ids) == len(set(ids)) >= 12
    for row in table().rows:
        assert re.search(r"\w#\d+|note|vllm 0\.|measured", row.source), row.id
        assert row.what
        assert row.do
        assert row.date == "" or re.fullmatch(r"\d{4}-\d\d(-\d\d)?", row.date)
        assert row.status != "fixed" or row.until


def test_the_demanded_pairs_are_in_the_table() -> None:
    ids = {row.id for row in table().rows}
    assert {"nvfp4-cutlass-garbage", "fp8-guard-1200", "marlin-experts-ptx", "marlin-nvfp4-experts-crash"} <= ids
    assert {"VLLM_TEST_FORCE_FP8_MARLIN", "VLLM_NVFP4_GEMM_BACKEND"} <= {item.name for item in table().gone}


@pytest.mark.parametrize(
    ("capability", "version", "has", "lacks"),
    [
        ("12.1", "0.24.0", {"fp8-guard-1200", "marlin-experts-ptx"}, {"humming-absent", "machete-first"}),
        ("12.1", "0.25.1", {"fp8-published-wheel", "humming-absent"}, {"fp8-guard-1200", "marlin-experts-ptx"}),
        ("12.0", "0.24.0", {"marlin-experts-ptx"}, {"fp8-guard-1200", "marlin-nvfp4-experts-crash"}),
        ("9.0", "0.25.1", {"machete-first"}, {"fp8-published-wheel"}),
        ("12.1", "", {"fp8-guard-1200", "humming-absent"}, {"machete-first"}),
    ],
)
def test_rows_by_chip_and_version(capability: str, version: str, has: set[str], lacks: set[str]) -> None:
    ids = {row.id for row in known_bad(capability, version)}
    assert has <= ids
    assert not lacks & ids


def test_rows_by_kernel() -> None:
    (kernel,) = read_log(OLD.start("Selected CutlassFp8BlockScaledMMKernel for Fp8LinearMethod")).kernels
    rows = {row.id for row in known_bad("12.1", "0.25.1") if concerns(row, kernel, graphs=False)}
    assert rows == {"fp8-block-internal", "fp8-published-wheel"}
    rows = {row.id for row in known_bad("12.1", "0.25.1") if concerns(row, kernel, graphs=True)}
    assert "graphs-only-garbage" in rows


def test_variables_by_version() -> None:
    assert "VLLM_TEST_FORCE_FP8_MARLIN" not in {item.name for item in gone("0.25.1")}
    assert "VLLM_TEST_FORCE_FP8_MARLIN" in {item.name for item in gone("0.33.0")}
    assert len(gone("")) == len(table().gone)
    assert version_of("0.25.1") == (0, 25)
    assert version_of("nightly") is None
