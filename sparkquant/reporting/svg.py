"""A figure as SVG that can stand in a page: no size of its own, colours of the page, unique ids, a description."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from sparkquant.errors import EnvironmentMissing
from sparkquant.reporting.palette import STAND_INS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
POINTS = 72
"""Units of the drawing per inch: one unit is one CSS pixel where the figure is shown at its own width."""

STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "sparkquant", "text.parse_math": False, "font.family": "sans-serif",
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": STAND_INS["soft"],
    "axes.labelcolor": STAND_INS["ink"], "text.color": STAND_INS["ink"], "xtick.color": STAND_INS["soft"],
    "ytick.color": STAND_INS["soft"], "xtick.labelcolor": STAND_INS["ink"], "ytick.labelcolor": STAND_INS["ink"],
    "grid.color": STAND_INS["line"], "grid.linewidth": 0.8, "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "axes.labelsize": 10, "xtick.labelsize": 10, "ytick.labelsize": 10, "legend.fontsize": 10,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5, "axes.linewidth": 0.8,
    "axes.formatter.use_mathtext": False, "axes.unicode_minus": True,
}  # fmt: skip
"""Names are never read as formulas: a checkpoint may be called anything."""


def figure(width: float, height: float) -> Figure:
    """An empty figure of so many CSS pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / POINTS, height / POINTS), layout="constrained")


def drawn(draw: Callable[[], Figure], key: str, title: str, description: str) -> str:
    """Draw in our style, and make a part of a page of it; `key` keeps its ids apart from those of other charts.

    Raises EnvironmentMissing without matplotlib.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        hint = "pip install 'sparkquant[report]', or ask for --format md or json"
        raise EnvironmentMissing("charts need matplotlib", hint=hint) from None
    text = io.StringIO()
    with rc_context(rc=STYLE):
        draw().savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _fitted(text.getvalue(), key, title, description)


def _fitted(text: str, key: str, title: str, description: str) -> str:
    root = ElementTree.fromstring(text)
    for child in root.findall(f"{{{SVG}}}metadata"):
        root.remove(child)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    used = set(re.findall(r"#([A-Za-z][\w-]*)", " ".join(v for e in root.iter() for v in e.attrib.values())))
    for element in root.iter():
        _rename(element, key, used)
    root.set("role", "img")
    root.set("aria-labelledby", f"{key}-title {key}-desc")
    for place, (tag, told) in enumerate((("title", title), ("desc", description))):
        child = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": f"{key}-{tag}"})
        child.text = told
        root.insert(place, child)
    ElementTree.register_namespace("", SVG)
    page = ElementTree.tostring(root, encoding="unicode")
    for name, stand_in in STAND_INS.items():
        page = page.replace(stand_in, f"var(--{name})")
    return re.sub(r"\s*\n\s*", " ", page)


def _rename(element: ElementTree.Element, key: str, used: set[str]) -> None:
    """Ids that nothing refers to go; the others, and what refers to them, get the key in front."""
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{key}-{own}")
    target = element.attrib.pop(f"{{{XLINK}}}href", None)
    if target is not None:
        element.set("href", f"#{key}-{target.removeprefix('#')}")
    for name, value in list(element.attrib.items()):
        if "url(#" in value:
            element.set(name, value.replace("url(#", f"url(#{key}-"))
    style = element.get("style")
    if style and "font-family" in style:
        element.set("style", re.sub(r"font-family: [^;]*;\s*", "", style))
