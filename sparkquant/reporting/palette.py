"""Colours of a page as CSS variables, for light and dark: drawn with stand-ins, resolved by whoever looks.

A test holds the contrast of each pair against WCAG 2.2: 4.5 for text, 3 for lines and areas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparkquant.contents import KEPT

LIGHT: Mapping[str, str] = {
    "page": "#ffffff", "card": "#f5f6f8", "ink": "#1b1f24", "soft": "#57606a", "line": "#d0d7de", "link": "#0a58ca",
    "good": "#116329", "bad": "#a40e26", "warn": "#7a4d00",
    "a": "#0b62c4", "b": "#b3450e", "c": "#157347", "d": "#7a3fd1", "e": "#a8205f", "f": "#5b6570",
    "int4": "#0b62c4", "int8": "#0b6e8a", "nvfp4": "#a8410a", "fp8": "#157347", "block": "#5f6b00", "kept": "#6a737d",
    "other": "#7a3fd1", "on": "#ffffff",
}  # fmt: skip

DARK: Mapping[str, str] = {
    "page": "#0f1318", "card": "#181e26", "ink": "#e6edf3", "soft": "#a3adb8", "line": "#39424e", "link": "#7cb7ff",
    "good": "#5fd38d", "bad": "#ff8a8f", "warn": "#e3b341",
    "a": "#6cb0ff", "b": "#ffa066", "c": "#5fd3a2", "d": "#c4a1ff", "e": "#ff8fc0", "f": "#aab4bf",
    "int4": "#6cb0ff", "int8": "#5ec8e0", "nvfp4": "#ffa066", "fp8": "#5fd3a2", "block": "#c9d15c", "kept": "#9aa5b1",
    "other": "#c4a1ff", "on": "#0f1318",
}  # fmt: skip

SERIES = ("a", "b", "c", "d", "e", "f")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (8, 3)), (0, (3, 1, 1, 1, 1, 1)))
"""Checkpoints are told apart by marker and dash as well as by colour."""

STAND_INS: Mapping[str, str] = {name: f"#fe01{number:02x}" for number, name in enumerate(LIGHT)}
"""What a chart is drawn with: no colour that a page would use."""

_SCHEMES = (
    ("w4a16", "int4", "I4"), ("w8a16", "int8", "I8"), ("nvfp4a16", "nvfp4", "N4"), ("fp8_block", "block", "B8"),
    ("fp8", "fp8", "F8"), (KEPT, "kept", "16"),
)  # fmt: skip


def series(number: int) -> str:
    """The variable of the checkpoint with this number; there are six, then they begin again."""
    return SERIES[number % len(SERIES)]


def scheme_color(label: str) -> str:
    """The variable of a scheme."""
    return next((color for name, color, _ in _SCHEMES if label.startswith(name)), "other")


def scheme_codes(labels: Iterable[str]) -> dict[str, str]:
    """Two or three characters for each scheme, different for different ones: colour alone tells nothing."""
    found: dict[str, str] = {}
    for label in labels:
        code = next((code for name, _, code in _SCHEMES if label.startswith(name)), "X")
        taken = sum(other.rstrip("abcdefghijklmnopqrstuvwxyz") == code for other in found.values())
        found[label] = code + (chr(ord("a") + taken) if taken else "")
    return found
