"""The CUDA driver is asked in a process of its own: drivers that answer, refuse, crash and hang."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkquant.marlin import machine
from sparkquant.marlin.machine import look

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: no stand-in driver can be built"
)

DRIVER = r"""
#include <stddef.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { %s }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "NVIDIA GB10", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 130595368960; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 75: *value = 12; return 0;
    case 76: *value = 1; return 0;
    case 18: *value = %d; return 0;
    case 16: *value = 48; return 0;
    default: *value = 0; return 1;
    }
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def build(start: str, integrated: int = 1) -> None:
        (tmp_path / "driver.c").write_text(DRIVER % (start, integrated))
        command = ["gcc", "-shared", "-fPIC", "driver.c", "-o", "libcuda.so.1"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return build


@pytest.mark.parametrize("integrated", [0, 1])
def test_a_driver_that_answers(driver: Callable[..., None], integrated: int) -> None:
    driver("return 0;", integrated)
    found = look()
    (gpu,) = found.gpus
    assert (gpu.name, gpu.capability, gpu.memory_bytes) == ("NVIDIA GB10", "12.1", 130_595_368_960)
    assert gpu.unified  # a chip of this capability shares its memory, whatever the attribute says
    assert found.cuda == "13.0"


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("return 100;", "cuInit failed with status 100"),
        ("*(volatile int *)0 = 1; return 0;", "crashed or hung"),
        ("sleep(60); return 0;", "crashed or hung"),
    ],
    ids=["refuses", "crashes", "hangs"],
)
def test_a_driver_that_is_broken(
    driver: Callable[..., None], start: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "TIME_LIMIT", 3)
    driver(start)
    found = look()
    assert any(says in note for note in found.notes)
    assert found.cuda == ""
