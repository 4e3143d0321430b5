"""Calibration data: conversations of the user's own kind of work, as rows of token ids of the user's own model.

    calibration = load_calibration("coding-agent", "Qwen3.5-27B", rows=256, tokens=2048)
    for ids in calibration.rows: ...
    calibration.record()            # digests and counts for the model card, never the text

One conversation per row, never packed: linear-attention layers carry state from one conversation into the next.
Importing this costs no torch and no transformers; they are loaded when rows are made.
"""

from sparkquant.calibration.calibration_set import CalibrationSet
from sparkquant.calibration.check import CalibrationCheck, Sample, check_calibration
from sparkquant.calibration.loading import load_calibration
from sparkquant.calibration.mix import Mix
from sparkquant.calibration.mix_files import load_mix, mix_folder, mix_names
from sparkquant.calibration.private_folder import private_base, private_folder

__all__ = [
    "CalibrationCheck",
    "CalibrationSet",
    "Mix",
    "Sample",
    "check_calibration",
    "load_calibration",
    "load_mix",
    "mix_folder",
    "mix_names",
    "private_base",
    "private_folder",
]
