"""A stored value changed in place, as a bad disk or a bad tool would."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def break_a_scale(path: Path) -> None:
    """Set the first element of the first weight scale of a shard to NaN (BF16 or F32)."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = min(name for name in header if name.endswith(".weight_scale"))
    start = 8 + length + header[name]["data_offsets"][0]
    nan = {"BF16": b"\xc0\x7f", "F32": b"\x00\x00\xc0\x7f"}[header[name]["dtype"]]
    data[start : start + len(nan)] = nan
    path.write_bytes(data)
