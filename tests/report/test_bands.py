"""Bands of one standard deviation end where the metric does, in figures and on the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedzmg.experiment.runs.store import RunDirectory
from fedzmg.report.html.page import render
from fedzmg.report.plots import comparison
from fedzmg.report.plots.study import study_figures
from fedzmg.results.averaging import ANY, band_around, possible
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result
from fedzmg.simulation import ClientMetrics

INDICES = list(range(6))
FINE = [0.5, 0.8, 0.9, 0.95, 0.97, 0.99]
LOST = [0.5, 0.8, 0.9, 0.1, 0.1, 0.1]
CUT = "bands cut to what is possible"


def compared(runs: dict[str, list[list[float]]], metric: str = "accuracy") -> Figure:
    return comparison.figure(
        {
            "task": "toy", "metric": metric, "seeds": [0, 1, 2],
            "curves": {name: {"indices": INDICES, "runs": own} for name, own in runs.items()},
        }
    )  # fmt: skip


def edges(figure: Figure) -> list[np.ndarray]:
    """Heights of every band's outline, where any is drawn."""
    return [
        np.asarray(band.get_paths()[0].vertices)[:, 1]
        for axes in figure.axes
        for band in axes.collections
        if isinstance(band, PolyCollection)
    ]


def words(figure: Figure) -> str:
    return "|".join(one.get_text() for one in figure.findobj(Text) if isinstance(one, Text))


SHARES = arrays(
    np.float64, st.tuples(st.integers(2, 5), st.integers(1, 6)), elements=st.floats(0.0, 1.0)
)


@given(SHARES)
def test_a_band_of_shares_is_the_deviation_within_0_and_1(runs: np.ndarray) -> None:
    mean, spread = runs.mean(axis=0), runs.std(axis=0, ddof=1)
    low, high, cut = band_around(mean, spread, possible("accuracy"))
    assert all(0.0 <= a <= m <= b <= 1.0 for a, m, b in zip(low, mean, high, strict=True))
    outside = 0
    for a, m, b, s in zip(low, mean, high, spread, strict=True):
        assert a == (m - s if m >= s else 0.0)
        assert b == (m + s if m + s <= 1.0 else 1.0)
        outside += m < s or m + s > 1.0
    assert cut == (outside > 0)


@pytest.mark.parametrize(
    ("metric", "mean"),
    # Nothing is known about a distance, and this accuracy is counted in percent.
    [("squared distance", [0.5, 2.0]), ("accuracy", [0.5, 85.0])],
)
def test_what_is_not_known_to_be_a_share_is_left_alone(metric: str, mean: list[float]) -> None:
    low, high, cut = band_around(np.array(mean), np.array([1.0, 20.0]), possible(metric))
    assert (low.tolist(), high.tolist()) == ([-0.5, mean[1] - 20.0], [1.5, mean[1] + 20.0])
    assert not cut
    assert possible("squared distance") == ANY


def test_a_run_that_collapsed_does_not_stretch_the_axis() -> None:
    figure = compared({"fedzmg": [FINE] * 3, "fedadam": [FINE, FINE, LOST]})
    mean, spread = np.mean([FINE, FINE, LOST], axis=0), np.std([FINE, FINE, LOST], axis=0, ddof=1)
    assert (mean + spread).max() > 1.15
    _, around = edges(figure)
    assert around.max() == 1.0
    assert around.min() == pytest.approx((mean - spread).min())
    assert figure.axes[0].get_ylim()[1] < 1.05
    assert CUT in words(figure)


def test_a_band_that_is_possible_is_drawn_whole_and_says_nothing() -> None:
    figure = compared({"fedzmg": [[part * one for one in FINE] for part in (0.9, 0.8)]})
    [around] = edges(figure)
    mean, spread = 0.85 * np.array(FINE), 0.05 * np.array(FINE) * np.sqrt(2.0)
    assert {*np.round(around, 9)} >= {*np.round(mean - spread, 9), *np.round(mean + spread, 9)}
    assert CUT not in words(figure)


def test_a_loss_may_be_anything() -> None:
    figure = compared({"fedzmg": [[5.0] * 6, [0.1] * 6]}, metric="squared distance")
    [around] = edges(figure)
    assert around.min() < 0.0
    assert around.max() > 5.0


def test_small_panels_cut_bands_too() -> None:
    many = {f"family{i}": [[0.0] * 6, [1.0] * 6] for i in range(11)}
    figure = compared(many)
    found = edges(figure)
    assert len(found) == 11
    assert all((band.min(), band.max()) == (0.0, 1.0) for band in found)


Runs = Callable[..., Path]


@pytest.fixture
def uneven(write_run: Runs, tmp_path: Path) -> Path:
    """Of each algorithm one run is perfect, and so are its clients, and one is lost."""
    for name in ("fedzmg", "fedavg"):
        for seed, value in enumerate((1.0, 0.0)):
            place = write_run(f"study/{name}/seed-{seed}", name, seed, [value] * 6)
            clients = np.arange(10)
            metric = np.full(10, value)
            RunDirectory(place).save_clients(
                [ClientMetrics(6, "training", 10, clients, clients + 5, metric, 1.0 - metric)]
            )
    return tmp_path / "study"


def charts(page: str) -> Iterator[ElementTree.Element]:
    for found in re.findall(r'<svg class="chart.*?</svg>', page, re.DOTALL):
        yield ElementTree.fromstring(found)


def test_bands_of_the_page_lie_between_its_lines_of_0_and_100_percent(uneven: Path) -> None:
    page = render(read([uneven]))
    assert "one standard deviation either way, cut to what is possible." in page
    seen: list[str] = []
    for chart in charts(page):
        bands = [one for one in chart.iter("path") if one.get("class", "").startswith("band")]
        if not bands:
            continue
        seen.append(chart.get("aria-labelledby", ""))
        ticks = {
            (one.text or "").replace("\u00a0", " "): float(one.get("y", "nan")) - 4.0
            for one in chart.iter("text")
            if one.get("class") == "end"
        }
        for band in bands:
            heights = [float(y) for y in re.findall(r"[ML]\S+ ([-\d.]+)", band.get("d", ""))]
            # Coordinates are written to a tenth of a pixel.
            assert min(heights) == pytest.approx(ticks["100 %"], abs=0.11)
            assert max(heights) == pytest.approx(ticks["0 %"], abs=0.11)
        assert not any(float(label.split()[0]) > 100.0 for label in ticks)
    # By round, by traffic, and over clients, each for a wide page and for a narrow one.
    for kind in ("curves", "traffic", "sorted"):
        assert sum(f"-{kind}-" in one for one in seen) == 2


def test_figures_of_a_study_cut_bands(uneven: Path) -> None:
    [outcome] = [study_result(study) for study in read([uneven]).studies]
    found = {
        name: edges(figure)
        for name, figure in study_figures(outcome)
        if name in ("curves", "clients")
    }
    for bands in (found["curves"], found["clients"]):
        assert len(bands) == 2
        assert all((band.min(), band.max()) == (0.0, 1.0) for band in bands)
