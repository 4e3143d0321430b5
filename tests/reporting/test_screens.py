"""The page as a browser shows it: headless Chromium, phone and desktop, light and dark. Skipped where there is none."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparkquant.reporting import report_on
from sparkquant.reporting.palette import DARK, LIGHT

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page was not looked at")

PHONE, DESKTOP = 360, 1200
THEMES = {"light": LIGHT, "dark": DARK}

LOOK = """
<!doctype html><title>look</title><body style="margin:0">
<iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const view = document.querySelector("iframe").contentDocument, root = view.documentElement;
  const color = (element, name) => view.defaultView.getComputedStyle(element)[name];
  const drawn = [...view.querySelectorAll("figure svg")].map((svg) => {{
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const texts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
    return {{
      width: box.width, letters: 10 * scale,
      outside: texts.filter((t) => t.left < box.left - 2 || t.right > box.right + 2).length,
    }};
  }});
  document.body.innerHTML = "<pre>" + JSON.stringify({{
    wide: root.scrollWidth, narrow: root.clientWidth, drawn,
    page: color(view.body, "backgroundColor"), ink: color(view.body, "color"),
    bar: color(view.querySelector("figure svg path[style*=int4]"), "fill"),
    cell: color(view.querySelector(".map td.int4"), "backgroundColor"),
    hidden: [...view.querySelectorAll("h2, caption")].filter((e) => e.getBoundingClientRect().width === 0).length,
  }}) + "</pre>";
}});
</script>
"""


@pytest.fixture(scope="module")
def page(int4: Path, mixed: Path) -> str:
    return report_on([int4, mixed])


def chromium(folder: Path, theme: str, *flags: str) -> str:
    """Run it on `look.html` in a folder; what it prints."""
    assert CHROMIUM is not None
    scheme = {"dark": 0, "light": 1}[theme]
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}", *flags,
            (folder / "look.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_fits_and_follows_the_theme(width: int, theme: str, page: str, tmp_path: Path) -> None:
    (tmp_path / "look.html").write_text(LOOK.format(width=width, page=html.escape(page)), encoding="utf-8")
    printed = chromium(tmp_path, theme, "--dump-dom", "--virtual-time-budget=10000", f"--window-size={DESKTOP},900")
    found: dict[str, Any] = json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", printed, re.DOTALL)[1]))  # type: ignore[index]
    assert found["narrow"] == width
    assert found["wide"] == width, "the page scrolls sideways"
    assert len(found["drawn"]) >= 6
    for drawing in found["drawn"]:
        assert drawing["width"] > 200
        assert drawing["letters"] >= 8.5, "letters of a chart are too small to read"
        assert drawing["outside"] == 0, "words of a chart are cut off"
    assert found["hidden"] == 0
    colors = THEMES[theme]
    assert found["page"] == rgb(colors["page"])
    assert found["ink"] == rgb(colors["ink"])
    assert found["bar"] == found["cell"] == rgb(colors["int4"])


def rgb(color: str) -> str:
    """As a browser spells it."""
    return f"rgb({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize("theme", THEMES)
def test_a_screenshot_shows_bars_lines_and_the_map(theme: str, page: str, tmp_path: Path) -> None:
    (tmp_path / "look.html").write_text(page, encoding="utf-8")
    target = tmp_path / "shot.png"
    chromium(tmp_path, theme, f"--screenshot={target}", f"--window-size={DESKTOP},4800")
    with Image.open(target) as shot:
        pixels = shot.convert("RGB")
        counted = {color: count for count, color in pixels.getcolors(maxcolors=10**7)}
    colors = {name: tuple(int(value[i : i + 2], 16) for i in (1, 3, 5)) for name, value in THEMES[theme].items()}
    assert counted[colors["page"]] > 0.4 * pixels.width * pixels.height
    for name, least in {"int4": 5000, "nvfp4": 2000, "fp8": 1000, "kept": 5000, "a": 200, "b": 200, "ink": 500}.items():
        assert counted.get(colors[name], 0) >= least, name
