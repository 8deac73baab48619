"""The page in a real browser: no error, every chart drawn, nothing too wide for a phone."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedzmg.report.html.page import render
from fedzmg.results.reading import read

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed"),
]

# Measures in the page itself, after its own script; the result becomes the title.
PROBE = """
window.addEventListener("load", () => {
  const charts = Array.from(document.querySelectorAll("svg.chart"));
  const drawn = charts.filter((chart) => {
    const box = chart.getBBox();
    return box.width > 50 && box.height > 20;
  });
  const sorted = document.querySelector("table.sheet th button");
  if (sorted) sorted.click();
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const out = [];
  for (const chart of charts) {
    const outer = chart.getBoundingClientRect();
    for (const text of chart.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.width && Math.max(outer.left - box.left, box.right - outer.right,
          outer.top - box.top, box.bottom - outer.bottom) > 1) out.push(text.textContent);
    }
  }
  const boxes = Array.from(document.querySelectorAll(".scroll"));
  const cut = Math.max(...boxes.map((box) => box.scrollWidth - box.clientWidth));
  const found = {charts: charts.length, drawn: drawn.length, over: wide, out, cut};
  const report = () => { document.title = "PROBE" + JSON.stringify(found) + "END"; };
  if (!charts.length) return report();
  const [chart] = charts, line = chart.querySelector("[data-points]");
  const name = line.dataset.series;
  const entries = Array.from(chart.querySelectorAll("[data-legend]"));
  const legend = entries.find((e) => e.dataset.series === name);
  legend.dispatchEvent(new MouseEvent("click", {bubbles: true}));
  found.hidden = getComputedStyle(line).display;
  legend.dispatchEvent(new MouseEvent("click", {bubbles: true}));
  const [x, y] = line.querySelector("path").getAttribute("d").match(/[\\d.]+/g).map(Number);
  const at = new DOMPoint(x, y).matrixTransform(chart.getScreenCTM());
  const where = {clientX: at.x, clientY: at.y, bubbles: true};
  chart.dispatchEvent(new PointerEvent("pointermove", where));
  found.tip = chart.closest("figure").querySelector("output").textContent;
  found.shown = getComputedStyle(line).display;
  report();
});
"""


def probed(text: str, folder: Path, width: int) -> dict[str, Any]:
    """Return the probe's measurements in a page of some width."""
    assert BROWSER is not None
    page = folder / "page.html"
    probe = PROBE
    if width < 500:
        # A headless window is at least 500 pixels wide, so the phone is a frame inside one.
        probe = probe.replace('document.title = "PROBE"', 'parent.postMessage("PROBE"')
        probe = probe.replace('+ "END";', '+ "END", "*");')
    # The policy of the page would block the probe.
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ")
    page.write_text(text.replace("</body>", f"<script>{probe}</script></body>"))
    if width < 500:
        frame = (
            f'<!DOCTYPE html><title>x</title><iframe src="page.html" width="{width}" height="900" '
            'style="border:0"></iframe><script>window.addEventListener("message", (event) => '
            "{ document.title = event.data; });</script>"
        )
        page = folder / "frame.html"
        page.write_text(frame)
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr", f"--window-size={width},900", "--timeout=5000",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r"<title>PROBE(.*?)END</title>", done.stdout)
    assert found is not None
    return dict(json.loads(html.unescape(found[1])))


@pytest.mark.parametrize("width", [1280, 360])
def test_page_in_a_browser(study_page: str, tmp_path: Path, width: int) -> None:
    found = probed(study_page, tmp_path, width)
    assert found["charts"] == found["drawn"] == 4
    assert found["over"] <= 0
    assert found["out"] == []
    # A click on a name in the legend hides its curve, another shows it again.
    assert (found["hidden"], found["shown"]) == ("none", "inline")
    assert re.fullmatch(r"fed\w+, round 1: \d+\.\d\d ± \d+\.\d\d %", found["tip"])


def test_other_scripts_are_blocked(study_page: str, tmp_path: Path) -> None:
    text = study_page.replace("<header", "<script>document.title = 'hostile'</script><header")
    with pytest.raises(AssertionError, match="inline script violates"):
        probed(text, tmp_path, 1280)


def test_data_sets_side_by_side_are_not_cut_off(tmp_path: Path) -> None:
    """The longest names there are, and spreads as wide as real ones."""
    spread = {"mean": 4544.4, "sd": 4655.5}
    report = {
        "name": "shakespeare-by-role", "unit": "characters", "entropy": "present", "seed": 0,
        "reference": "pooled", "total": 715, "sample": 10, "labels": ["a"], "clients": [],
        "summary": {"volume": spread, "distinct": {"mean": 51.3, "sd": 7.1}}
        | {m: {"mean": 0.798, "sd": 0.027} for m in ("entropy", "gini", "kl", "dominant_share")},
    }  # fmt: skip
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "heterogeneity.json").write_text(json.dumps(report))
    assert probed(render(read([tmp_path])), tmp_path, 1200)["cut"] == 0


@pytest.mark.parametrize("width", [1600, 700])
def test_words_of_figures_are_inside_them(write_run: Any, tmp_path: Path, width: int) -> None:
    """In the system's own font; the words of the longest label cannot be broken."""
    words = "average of all: projection + momentum + decay with Wide MEMORY and of all the rest"
    for i, length in enumerate([10, 40, 80]):
        name = f"{i} {words}"[:length].strip()
        name = name.replace(" ", "-") if length == 80 else name
        for seed in (0, 1):
            write_run(f"few/{i}/{seed}", name, seed, [0.1, 0.5, 0.7 + 0.01 * i + 0.01 * seed])
    assert probed(render(read([tmp_path / "few"])), tmp_path, width)["out"] == []
