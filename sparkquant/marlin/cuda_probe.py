"""What the CUDA driver says of its devices, as one JSON line on standard output.

Run as a process (`python -m sparkquant.marlin.cuda_probe`): a broken driver may hang or crash, and must not take the
caller with it. No context is created and no memory is taken.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

MAJOR, MINOR, INTEGRATED, PROCESSORS, HOST_PAGE_TABLES = 75, 76, 18, 16, 100
"""CUdevice_attribute numbers of cuda.h."""


def devices() -> dict[str, Any]:
    """`driver_cuda` (the newest CUDA version that the driver runs) and one mapping per device; `error` on failure."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": f"no CUDA driver library: {error}"}
    status = library.cuInit(0)
    if status:
        return {"error": f"cuInit failed with status {status}"}
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    return {
        "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "devices": [_device(library, i) for i in range(count.value)],
    }


def _device(library: Any, index: int) -> dict[str, Any]:
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        return -1 if library.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    return {
        "name": name.value.decode(errors="replace"),
        "capability": f"{attribute(MAJOR)}.{attribute(MINOR)}",
        "memory_bytes": total.value,
        "integrated": attribute(INTEGRATED) == 1 or attribute(HOST_PAGE_TABLES) == 1,
        "processors": attribute(PROCESSORS),
    }


if __name__ == "__main__":
    os.write(1, json.dumps(devices()).encode() + b"\n")
