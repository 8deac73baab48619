"""The page in a real browser: no error, every chart drawn, nothing too wide for a phone."""

from __future__ import annotations

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

# Measures in the page itself, after its own script; what it finds stands in the title.
PROBE = """
<script>
window.addEventListener("load", () => {
  const charts = Array.from(document.querySelectorAll("svg.chart"))
    .filter((chart) => chart.getBoundingClientRect().width > 0);
  const drawn = charts.filter((chart) => {
    const box = chart.getBBox();
    return box.width > 50 && box.height > 20;
  });
  const sorted = document.querySelector("table.sheet th button");
  if (sorted) sorted.click();
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = `PROBE charts=${charts.length} drawn=${drawn.length} over=${wide} ` +
    `lines=${document.querySelectorAll("path.line").length} ms=${Math.round(performance.now())}`;
});
</script>
"""

FOUND = r"PROBE charts=(\d+) drawn=(\d+) over=(-?\d+) lines=(\d+) ms=(\d+)"


def browse(page: Path, profile: Path, width: int) -> tuple[str, str]:
    """The page after its scripts have run, and what the browser complained about."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--enable-logging=stderr",
            f"--window-size={width},900", "--timeout=5000", "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


# A headless window is at least 500 pixels wide, so the phone is a frame inside one.
@pytest.mark.parametrize("width", [1280, 360])
def test_page_in_a_browser(study: Path, tmp_path: Path, width: int) -> None:
    text = render(read([study]))
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    if width < 500:
        frame = (
            f'<!DOCTYPE html><title>x</title><iframe src="page.html" width="{width}" height="900" '
            'style="border:0"></iframe><script>window.addEventListener("message", (event) => '
            "{ document.title = event.data; });</script>"
        )
        (tmp_path / "frame.html").write_text(frame)
        told = (
            page.read_text()
            .replace("document.title = `PROBE", "parent.postMessage(`PROBE")
            .replace("performance.now())}`;", 'performance.now())}`, "*");')
        )
        page.write_text(told)
        page = tmp_path / "frame.html"
    document, complaints = browse(page, tmp_path / "profile", width)
    console = [line for line in complaints.splitlines() if "CONSOLE" in line]
    assert console == []
    found = re.search(FOUND, document)
    assert found is not None
    charts, drawn, over, lines, _ = map(int, found.groups())
    assert charts == drawn == 4
    assert lines >= 4
    assert over <= 0


def test_45_long_runs_open_in_two_seconds(write_run: Any, tmp_path: Path) -> None:
    for i in range(9):
        for seed in range(5):
            metrics = [(1 - 0.99**k) * (0.9 - 0.02 * i) + 0.001 * seed for k in range(200)]
            write_run(f"all/{i}/{seed}", f"alg{i}", seed, metrics)
    page = tmp_path / "page.html"
    page.write_text(render(read([tmp_path / "all"])).replace("</body>", PROBE + "</body>"))
    document, _ = browse(page, tmp_path / "profile", 1280)
    found = re.search(FOUND, document)
    assert found is not None
    assert int(found[5]) < 2000


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
    probe = (
        '<script>window.addEventListener("load", () => { document.title = "PROBE over=" + '
        'Math.max(...Array.from(document.querySelectorAll(".scroll"), (one) => one.scrollWidth - '
        "one.clientWidth)); });</script>"
    )
    page = tmp_path / "page.html"
    page.write_text(render(read([tmp_path])).replace("</body>", probe + "</body>"))
    document, _ = browse(page, tmp_path / "profile", 1200)
    found = re.search(r"PROBE over=(\d+)", document)
    assert found is not None
    assert int(found[1]) == 0


WORDS_PROBE = """
<script>
window.addEventListener("load", () => {
  let texts = 0;
  const out = [];
  for (const chart of document.querySelectorAll("svg.chart")) {
    const outer = chart.getBoundingClientRect();
    if (outer.width === 0) continue;
    for (const text of chart.querySelectorAll("text")) {
      if (!text.textContent) continue;
      texts += 1;
      const box = text.getBoundingClientRect();
      const over = Math.max(outer.left - box.left, box.right - outer.right,
        outer.top - box.top, box.bottom - outer.bottom);
      if (over > 1) out.push(text.textContent);
    }
  }
  for (const figure of document.querySelectorAll("figure.card")) {
    const legend = figure.querySelector(".legend");
    if (legend && legend.scrollWidth > legend.clientWidth) out.push("legend");
  }
  document.title = `PROBE texts=${texts} outside=${out.length} ${out.join("; ")}`;
});
</script>
"""


@pytest.mark.parametrize("width", [1600, 1200, 700])
def test_words_of_charts_are_inside_them(write_run: Any, tmp_path: Path, width: int) -> None:
    """In whatever font this system has; the words of the longest label cannot be broken."""
    words = "average of all: projection + momentum + decay with Wide MEMORY and of all the rest"
    for place, lengths in (("few", [10, 40, 80]), ("more", [12, 30, 50])):
        for i, length in enumerate(lengths):
            name = f"{i} {words}"[:length].strip()
            name = name.replace(" ", "-") if length == 80 else name
            for seed in (0, 1):
                tops = [0.1, 0.5, 0.7 + 0.01 * i + 0.01 * seed]
                write_run(f"{place}/{i}/{seed}", name, seed, tops, task=place)
    page = tmp_path / "page.html"
    text = render(read([tmp_path / "few", tmp_path / "more"]))
    page.write_text(text.replace("</body>", WORDS_PROBE + "</body>"))
    document, _ = browse(page, tmp_path / "profile", width)
    found = re.search(r"PROBE texts=(\d+) outside=(\d+) ([^<]*)", document)
    assert found is not None
    assert int(found[1]) > 80
    assert int(found[2]) == 0, found[3]
