"""Two real results of the trained example with real records, and a reader of pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import sparkquant
from sparkquant import evidence

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hybrid-5m"
VOID = {"meta", "br", "hr", "img", "input", "link"}


def made(folder: Path, recipe: str) -> Path:
    """Quantized and evaluated on two short rows, as the verbs would do it."""
    out = sparkquant.quantize(EXAMPLE, recipe, folder, method="rtn").out
    rows = folder.parent / "rows.json"
    rows.write_text(json.dumps([list(range(100 + n, 230 + n)) for n in range(2)]), encoding="utf-8")
    tasks = folder.parent / "tasks.jsonl"
    tasks.write_text(json.dumps({"messages": [{"role": "user", "content": "Say yes"}], "answer": "yes"}) + "\n")
    found = sparkquant.evaluate(out, source=EXAMPLE, data=rows, tasks=tasks)
    evidence.record(out, "evaluate", found.as_json(), inputs={"source": EXAMPLE})
    return out


@pytest.fixture(scope="session")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """int4 decoder. Copy it before editing."""
    return made(tmp_path_factory.mktemp("reported") / "int4", "qwen-hybrid-w4a16")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVFP4 and FP8. Copy it before editing."""
    return made(tmp_path_factory.mktemp("reported") / "mixed", "qwen-hybrid-nvfp4-fp8")


@pytest.fixture
def copied(int4: Path, tmp_path: Path) -> Callable[[str], Path]:
    """`copied(name)`: a copy of a result under another name."""
    return lambda name: Path(shutil.copytree(int4, tmp_path / name))


class Element:
    """A tag with its attributes, children and text."""

    def __init__(self, tag: str, attributes: dict[str, str], parent: Element | None) -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Element] = []
        self.own: list[str] = []

    def all(self, *tags: str) -> list[Element]:
        """Elements below, in reading order."""
        return [found for child in self.children for found in ([child] if child.tag in tags else []) + child.all(*tags)]

    def every(self) -> list[Element]:
        """All elements below."""
        return [found for child in self.children for found in [child, *child.every()]]

    @property
    def text(self) -> str:
        """Own text and that of the children, in no particular order."""
        return " ".join([*self.own, *(child.text for child in self.children)])


class Page(HTMLParser):
    """A strict reader: what is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self._at = Element("", {}, None)
        self.feed(text)
        self.close()
        assert self._at is self.root, f"<{self._at.tag}> is never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice"
        found = Element(tag, {name: value or "" for name, value in attrs}, self._at)
        self._at.children.append(found)
        if tag not in VOID:
            self._at = found

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._at.children.append(Element(tag, {name: value or "" for name, value in attrs}, self._at))

    def handle_endtag(self, tag: str) -> None:
        assert self._at.tag == tag, f"</{tag}> closes <{self._at.tag}>"
        assert self._at.parent is not None
        self._at = self._at.parent

    def handle_data(self, data: str) -> None:
        if data.strip():
            self._at.own.append(data)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    edit(fields)
    path.write_text(json.dumps(fields), encoding="utf-8")
