"""One self-contained page: no script, no network, colours of light and dark, readable by a screen reader."""

from __future__ import annotations

from typing import Any

from sparkquant.errors import EnvironmentMissing
from sparkquant.reporting.document import Document
from sparkquant.reporting.palette import DARK, LIGHT, scheme_color

STATES = ("pass", "fail", "inconclusive", "stale", "unreadable", "missing")
"""Words of the evidence table that have a colour and a sign."""

COLORED = ("int4", "int8", "nvfp4", "fp8", "block", "other", "kept")


def html(document: Document) -> str:
    """The page. Everything that comes from a checkpoint is escaped. Raises EnvironmentMissing without jinja2."""
    from sparkquant import version

    page: str = _environment().get_template("report.html.j2").render(
        document=document, version=version(), light=LIGHT, dark=DARK, schemes=COLORED, states=STATES,
        color_of=scheme_color,
    )  # fmt: skip
    return page


def _environment() -> Any:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise EnvironmentMissing("a page needs jinja2", hint="pip install 'sparkquant[report]'") from None
    return Environment(
        loader=PackageLoader("sparkquant.reporting"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
