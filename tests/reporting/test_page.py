"""The page: one file, structure that a screen reader can follow, numbers that are those of the records."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from sparkquant import evidence
from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import UsageError
from sparkquant.reporting import report_on
from tests.reporting.conftest import Page, edit_json

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def single(int4: Path) -> str:
    return report_on([int4])


@pytest.fixture(scope="module")
def compared(int4: Path, mixed: Path) -> str:
    return report_on([int4, mixed])


@pytest.fixture(params=["single", "compared"])
def page(request: pytest.FixtureRequest) -> Page:
    return Page(request.getfixturevalue(request.param))


@pytest.mark.parametrize("name", ["single", "compared"])
def test_a_page_needs_nothing_but_itself(name: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(name)
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) <= {"http://www.w3.org/2000/svg"}
    found = Page(text).root
    assert not found.all("script", "link", "iframe", "object", "embed", "img", "base", "form")
    for element in found.every():
        assert not [name for name in element.attributes if name.startswith("on") or name in ("src", "srcset", "action")]
        assert element.attributes.get("href", "#").startswith("#")
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)
    assert "@import" not in text
    policy = [m.attributes["content"] for m in found.all("meta") if "http-equiv" in m.attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert len(text.encode()) < 250_000


def test_ids_are_unique_and_references_lead_somewhere(page: Page) -> None:
    elements = page.root.every()
    counts = Counter(e.attributes["id"] for e in elements if "id" in e.attributes)
    assert set(counts.values()) == {1}
    for element in elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(element.attributes.get(name, "").split()) <= counts.keys()
        if "href" in element.attributes:
            assert element.attributes["href"].removeprefix("#") in counts
        for value in element.attributes.values():
            assert set(re.findall(r"url\(#([\w-]+)\)", value)) <= counts.keys()


def test_landmarks_and_headings(page: Page) -> None:
    (root,) = page.root.all("html")
    assert root.attributes["lang"] == "en"
    for tag in ("title", "header", "nav", "main", "footer", "h1"):
        assert len([e for e in root.all(tag) if e.parent is not None and e.parent.tag != "svg"]) == 1, tag
    (viewport,) = [m for m in root.all("meta") if m.attributes.get("name") == "viewport"]
    assert viewport.attributes["content"] == "width=device-width, initial-scale=1"
    levels = [int(e.tag[1]) for e in root.all("h1", "h2", "h3", "h4", "h5", "h6")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(e.attributes.get("aria-labelledby") for e in root.all("section"))
    linked = [a.attributes["href"] for a in root.all("nav")[0].all("a")]
    assert linked == [f"#{section.attributes['id']}" for section in root.all("section")]
    first = root.all("body")[0].children[0]
    assert (first.tag, first.attributes["href"]) == ("a", "#main")


def test_tables_say_what_they_are(page: Page) -> None:
    tables = page.root.all("table")
    assert len(tables) > 5
    for table in tables:
        (caption,) = table.all("caption")
        assert caption.text.strip()
        width = len(table.all("thead")[0].all("th", "td"))
        assert all(cell.attributes.get("scope") in ("col", "row") for cell in table.all("th"))
        for row in table.all("tbody")[0].all("tr"):
            assert len(row.children) == width
            assert row.children[0].tag == "th"
            assert row.children[0].attributes["scope"] == "row"
        region = table.parent
        assert region is not None
        assert region.attributes["role"] == "region"
        assert region.attributes["tabindex"] == "0"
        assert region.attributes["aria-label"]


def test_every_chart_has_words_and_numbers(page: Page) -> None:
    figures = page.root.all("figure")
    assert len(figures) >= 5
    for figure in figures:
        (svg,) = figure.all("svg")
        assert svg.attributes["role"] == "img"
        title, description = (svg.all(tag)[0] for tag in ("title", "desc"))
        assert svg.attributes["aria-labelledby"] == f"{title.attributes['id']} {description.attributes['id']}"
        assert len(description.text) > 40
        assert figure.all("h3")[0].text == title.text
        assert figure.all("details")[0].all("summary")[0].text
        assert len(figure.all("details")[0].all("tbody")[0].all("tr")) > 0
        assert "width" not in svg.attributes
        colors = re.findall(r"#[0-9a-f]{6}", " ".join(v for e in [svg, *svg.every()] for v in e.attributes.values()))
        assert colors == [], "a colour that does not follow the theme"


def test_the_same_folders_give_the_same_bytes(int4: Path, mixed: Path, compared: str) -> None:
    assert report_on([int4, mixed]) == compared
    for form in ("md", "json"):
        assert report_on([int4], form=form) == report_on([int4], form=form)


def cells(page: Page, caption: str) -> dict[str, list[str]]:
    """Rows of a table by their header."""
    (table,) = [t for t in page.root.all("table") if t.all("caption")[0].text.strip() == caption]
    rows = table.all("tbody")[0].all("tr")
    return {row.children[0].text.strip(): [cell.text.strip() for cell in row.children[1:]] for row in rows}


def test_numbers_are_those_of_the_record_and_the_headers(int4: Path, single: str) -> None:
    page, found = Page(single), evidence.read(int4)["evaluate"].result
    glance = cells(page, "The checkpoint in numbers")
    stored = sum(header.bytes for header in Checkpoint.open(int4, strict=False).tensors.values())
    assert glance["size of the tensors"] == [f"{stored / 2**20:.2f} MiB"]
    assert glance["KL to the source, nats per token"] == [f"{found['kl_mean']:.5f} ± {found['kl_se']:.5f}"]
    assert glance["same most likely token"] == [f"{found['top1']:.2%}"]
    assert glance["recipe"] == ["qwen-hybrid-w4a16"]
    layers = cells(page, "Relative error of the hidden states behind each block")
    assert [float(row[0]) for row in layers.values()] == pytest.approx(found["layers"], abs=1e-5)
    shares = cells(page, "Share of positions by their KL")
    assert sum(float(row[0].rstrip("%")) for row in shares.values()) == pytest.approx(100, abs=0.1)
    drafts = cells(page, "Share of drafts accepted up to each position")
    (name,) = found["acceptance"]
    assert drafts[f"{name}, source"][0] == f"{found['acceptance'][name]['source'][0]:.1%}"
    assert drafts[f"{name}, int4"][-1] == f"{found['drafts'][name]:,}"
    sizes = [t for t in page.root.all("table") if t.all("caption")[0].text.strip().startswith("Bytes by class")]
    (rows,) = ([[c.text.strip() for c in r.children] for r in t.all("tbody")[0].all("tr")] for t in sizes)
    assert sum(int(row[4].replace(",", "")) for row in rows) == stored


def test_the_scheme_map_has_every_layer_and_class(mixed: Path) -> None:
    page = Page(report_on([mixed]))
    rows = cells(page, "Schemes by layer in mixed")
    assert list(rows) == ["outside", "0", "1", "2", "3"]
    (table,) = [t for t in page.root.all("table") if "map" in t.attributes.get("class", "")]
    classes = [th.text.strip() for th in table.all("thead")[0].all("th")[1:]]
    shown = {layer: {c: code for c, code in zip(classes, row, strict=True) if code} for layer, row in rows.items()}
    assert shown["outside"] == {"embed": "16", "lm_head": "N4", "norm": "16", "vision": "16", "mtp": "16"}
    assert shown["3"]["attention.qkv"] == "F8"
    assert shown["0"]["linear_attention.gates"] == "16"
    assert "attention.qkv" not in shown["0"]
    legend = cells(page, "Codes of the map")
    assert {code: row[0] for code, row in legend.items()} == {"16": "16-bit", "N4": "nvfp4a16", "F8": "fp8"}


def test_several_checkpoints_are_compared_row_by_row(int4: Path, mixed: Path, compared: str) -> None:
    page = Page(compared)
    paired = cells(page, "KL to the source compared with A int4, row by row")
    a, b = (evidence.read(folder)["evaluate"].result["kl_rows"] for folder in (int4, mixed))
    mean = sum(y - x for x, y in zip(a, b, strict=True)) / len(a)
    assert paired["B mixed"][1].startswith(f"{mean:+.5f} ±")
    assert [h.text for h in page.root.all("h2")][:2] == ["At a glance", "Compared"]
    assert cells(page, "Size against mean KL, measured on the same rows").keys() == {"A int4", "B mixed"}
    evidence_rows = cells(page, "What each verb found, for the files as they are now")
    assert evidence_rows["verify"] == ["pass", "pass"]


def test_what_was_not_measured_is_named_with_its_command(copied: Callable[[str], Path]) -> None:
    bare = copied("bare")
    (bare / "sparkquant" / "evidence" / "evaluate.json").unlink()
    page = Page(report_on([bare]))
    assert cells(page, "The checkpoint in numbers")["KL to the source, nats per token"] == ["not measured"]
    rows = cells(page, "What each verb found, for the files as they are now")
    assert rows["evaluate"] == ["missing", "–", "sparkquant evaluate bare --source SRC"]
    assert rows["bench"][0] == "missing"
    absent = [p.text for p in page.root.all("p") if p.attributes.get("class") == "absent"]
    assert any(
        "quality was not measured" in text and "sparkquant evaluate bare --source SRC" in text for text in absent
    )
    assert "Bytes by class and scheme in bare" in page.root.text


def test_stale_numbers_are_never_shown(copied: Callable[[str], Path], int4: Path) -> None:
    stale = copied("stale")
    with (stale / "config.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    found = evidence.read(int4)["evaluate"].result
    for form in ("html", "md"):
        text = report_on([stale], form=form)
        assert "stale" in text
        assert f"{found['kl_mean']:.5f}" not in text
    document = json.loads(report_on([stale], form="json"))
    assert document["checkpoints"][0]["evidence"]["evaluate"]["freshness"] == "stale"


@pytest.mark.parametrize(
    "edit",
    [
        lambda record: record["result"].update(kl_mean="low"),
        lambda record: record["result"].pop("tokens"),
        lambda record: record["result"].update(top1=7),
        lambda record: record.update(result=[]),
        lambda record: record["result"].update(layers=[None]),
    ],
)
def test_a_record_of_another_shape_is_told_and_not_shown(
    edit: Callable[[dict], object], copied: Callable[[str], Path]
) -> None:  # type: ignore[type-arg]
    odd = copied("odd")
    edit_json(odd / "sparkquant" / "evidence" / "evaluate.json", edit)
    page = Page(report_on([odd]))
    assert "the record of evaluate cannot be shown" in page.root.text
    assert cells(page, "The checkpoint in numbers")["KL to the source, nats per token"] == ["not measured"]


def test_odd_but_valid_records_are_drawn(copied: Callable[[str], Path]) -> None:
    def edit(record: dict) -> None:  # type: ignore[type-arg]
        record["result"].update(
            kl_mean=0, kl_se=None, kl_p99=0, kl_rows=[0.0], layers=[0.0], acceptance={}, recall={},
            undrafted={"source": "no head"}, kl_histogram={"edges": [1, 2], "counts": [5, 0, 0]},
            kl_positions={"ends": [3], "kl": [0], "tokens": [5]},
        )  # fmt: skip

    odd = copied("odd")
    edit_json(odd / "sparkquant" / "evidence" / "evaluate.json", edit)
    text = Page(report_on([odd])).root.text
    assert "no draft acceptance of the source: no head" in text
    assert "cannot be shown" not in text


def test_folders_are_named_apart_and_once(copied: Callable[[str], Path], int4: Path, tmp_path: Path) -> None:
    twin = copied("twin/int4")
    document = json.loads(report_on([int4, twin], form="json"))
    names = [sheet["name"] for sheet in document["checkpoints"]]
    assert names == [f"{int4.parent.name}/int4", "twin/int4"]
    with pytest.raises(UsageError, match="named twice"):
        report_on([int4, int4 / ".." / "int4"])
    with pytest.raises(UsageError, match="no form"):
        report_on([int4], form="pdf")
    with pytest.raises(UsageError, match="in a list"):
        report_on([])


def test_a_source_can_be_shown_too() -> None:
    from tests.reporting.conftest import EXAMPLE

    page = Page(report_on([EXAMPLE]))
    assert cells(page, "The checkpoint in numbers")["bits per weight"] == ["16.00"]
    assert cells(page, "The checkpoint in numbers")["recipe"] == ["unknown: made elsewhere"]
