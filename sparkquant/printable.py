"""Text for people: foreign names made harmless, and sizes with their units."""

from __future__ import annotations


def clean(text: object) -> str:
    """On one line, with what does not print spelled out, like `\\x1b`.

    A name in a checkpoint must not move the cursor, forge a line or reverse the reading direction.
    """
    given = str(text)
    return given if given.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in given)


def size(count: float) -> str:
    """Bytes with a binary unit: `18.12 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
