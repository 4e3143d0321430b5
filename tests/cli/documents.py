"""Documents as tests see them: every fenced block with its marker.

<!-- run -->                runs as it stands, and prints what it shows (`...` stands for any lines)
<!-- run small -->          runs with the example in place of large models; what it shows is not compared
<!-- not run: REASON -->    only parsed: it needs what a test machine has not
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cli.running import ROOT

CODE = ("console", "python", "bash", "sh")
"""Languages that need a marker; the others are data."""

_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<marker>run|run small|not run: [^>]*) -->\n(?P=indent))?```(?P<language>\w*)\n"
    r"(?P<body>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block and where it stands."""

    document: str
    line: int
    language: str
    marker: str
    body: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def reason(self) -> str:
        """Why it is not run."""
        return self.marker.removeprefix("not run:").strip() if self.marker.startswith("not run") else ""

    def steps(self) -> Iterator[tuple[str, str]]:
        """Commands of a console block, each with the output shown for it; a backslash joins lines."""
        for part in re.split(r"^\$ ", self.body, flags=re.MULTILINE)[1:]:
            command, _, output = part.replace("\\\n", "").partition("\n")
            yield command, output


def documents() -> list[Path]:
    """Every README whose blocks are promises."""
    found = [ROOT / "README.md", *(ROOT / name / "README.md" for name in ("recipes", "calibration", "evaluation"))]
    return [*found, *sorted((ROOT / "examples").glob("*/README.md"))]


def blocks_of(path: Path) -> list[Block]:
    """All blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    return [
        Block(name, text[: m.start()].count("\n") + 1, m["language"], m["marker"] or "", textwrap.dedent(m["body"]))
        for m in _BLOCK.finditer(text)
    ]


def blocks(*languages: str, marker: str | None = None) -> list[Block]:
    """Blocks of some languages in all documents; `marker` is how theirs begins."""
    return [
        block
        for path in documents()
        for block in blocks_of(path)
        if block.language in languages and (marker is None or block.marker.split(":")[0] == marker)
    ]
