"""Colours that can be told from their background, in light and dark, and lines that can be told apart without them."""

from __future__ import annotations

import pytest

from sparkquant.contents import KEPT
from sparkquant.reporting.palette import DARK, DASHES, LIGHT, MARKERS, SERIES, STAND_INS, scheme_codes, scheme_color
from sparkquant.schemes import SCHEMES

TEXT = ("ink", "soft", "link", "good", "bad", "warn")
FILLS = ("int4", "int8", "nvfp4", "fp8", "block", "other")


def luminance(color: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """WCAG 2.2, contrast ratio."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(theme: dict[str, str]) -> None:
    for ground in ("page", "card"):
        for name in TEXT:
            assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)
        for name in (*SERIES, *FILLS, "kept"):
            assert contrast(theme[name], theme[ground]) >= 3, (name, ground)
    for name in FILLS:
        assert contrast(theme["on"], theme[name]) >= 4.5, name


def test_both_themes_have_every_colour() -> None:
    assert LIGHT.keys() == DARK.keys() == STAND_INS.keys()
    assert len(set(STAND_INS.values())) == len(STAND_INS)
    assert not set(STAND_INS.values()) & {*LIGHT.values(), *DARK.values()}


def test_six_checkpoints_differ_without_colour() -> None:
    assert len(SERIES) == len(set(MARKERS)) == len(set(map(str, DASHES))) == 6


def test_every_scheme_has_a_code_of_its_own() -> None:
    labels = [
        KEPT,
        "w4a16 g128",
        "w4a16 g64",
        "w4a16 g32 asym",
        *(s.label for s in SCHEMES.values()),
        "fp8 tensor",
        "new",
    ]
    labels = list(dict.fromkeys(labels))
    codes = scheme_codes(labels)
    assert len(set(codes.values())) == len(labels)
    assert {codes[KEPT], codes["w4a16 g128"], codes["nvfp4a16"], codes["fp8_block"]} == {"16", "I4", "N4", "B8"}
    assert {scheme_color(s.label) for s in SCHEMES.values()} == {"int4", "int8", "nvfp4", "fp8", "block"}
    assert scheme_color("new") == "other"
