"""Figures of curves, bands, rows and files."""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.text import Text
from numpy.typing import NDArray

from fedzmg.data.heterogeneity import describe
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.report import figures
from fedzmg.report.figures.style import MOST_IN_ONE_PANEL, Chart, line_style, usual_range
from fedzmg.results.reading import group_study, read
from fedzmg.results.runs import Run
from fedzmg.results.scores import band_around
from fedzmg.results.study_result import StudyResult, study_result
from fedzmg.simulation import ClientMetrics

ROUNDS = np.arange(1, 101, 5)


def made_up(top: float = 0.5, runs: int = 3) -> NDArray[np.float64]:
    """Return runs that rise towards a top, each a little apart from the next."""
    rising = top * (1.0 - np.exp(-ROUNDS / 30.0))
    return np.asarray(rising + 0.01 * np.arange(runs)[:, None])


def drawn(runs: dict[str, Any], *, layout: bool = False, **options: Any) -> Chart:
    """Draw the curves of runs."""
    draw = figures.curves if layout else figures.curves.__wrapped__  # type: ignore[attr-defined]
    chart: Chart = draw(outcome(runs, **options))
    return chart


def outcome(
    runs: dict[str, Any], metric: str = "accuracy", *, task: str = "toy", every: int = 5,
    threshold: float = 0.7,
) -> StudyResult:  # fmt: skip
    """Return the result of runs, which diverge at their first non-finite value."""
    found = []
    for name, own in runs.items():
        for seed, values in enumerate(np.asarray(own, dtype=float)):
            rounds = tuple(range(1, every * len(values) + 1))
            lost = np.flatnonzero(~np.isfinite(values))
            log = (
                rounds[-1], 0, every * int(lost[0]) + 1 if len(lost) else None,
                dict(zip(rounds[::every], values.tolist(), strict=True)),
                {r: r for r in rounds[::every]}, {"total": 1}, 1.0,
            )  # fmt: skip
            protocol = {"rounds": rounds[-1], "eval_every": every, "threshold": threshold}
            spec = {"task": task, "algorithm": name, "seed": seed, "protocol": protocol}
            found.append(Run("", "", spec, {"metric": metric}, *log, label=name))
    return study_result(group_study(found, {"algorithms": list(runs)}, []))


def texts(chart: Chart) -> list[str]:
    return [one.get_text() for one in chart.findobj(Text) if isinstance(one, Text)]


def heights(line: Line2D) -> NDArray[np.float64]:
    return np.asarray(line.get_ydata(), dtype=np.float64)


def edges(chart: Chart) -> list[NDArray[np.float64]]:
    """Return the heights of every band's outline."""
    return [
        np.asarray(band.get_paths()[0].vertices)[:, 1]
        for axes in chart.axes
        for band in axes.collections
        if isinstance(band, PolyCollection)
    ]


def check_layout(chart: Chart) -> None:
    """Check that all words are inside and that legend, title and axes do not overlap."""
    inches, (width, height) = chart.get_tightbbox(), chart.get_size_inches()
    assert min(inches.x0, inches.y0) >= -0.01
    assert inches.x1 <= width + 0.01
    assert inches.y1 <= height + 0.01
    boxes = [chart.heading.get_window_extent()]
    boxes += [legend.get_window_extent() for legend in chart.body.legends]
    boxes += [axes.get_window_extent() for axes in chart.axes if axes.get_visible()]
    for a, b in itertools.combinations(boxes, 2):
        assert not a.padded(-1.0).overlaps(b)


def test_mean_deviation_threshold_and_texts_of_a_curve() -> None:
    runs = made_up()
    chart = drawn({"FedAvg": runs}, threshold=0.75)
    [axes], [band] = chart.axes, edges(chart)
    np.testing.assert_allclose(heights(axes.lines[0]), runs.mean(axis=0))
    assert band.min() == pytest.approx(runs[:, 0].mean() - runs[:, 0].std(ddof=1))
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == ROUNDS.tolist()
    assert axes.get_xlim()[0] == 0.0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy")
    assert "Mean of 3 runs" in chart.caption
    assert "threshold 75 %" in texts(chart)
    assert heights(axes.lines[-1])[0] == 0.75
    assert axes.get_ylim()[1] > 0.75
    [series] = [one for one in chart.series.values() if one.points]
    assert (series.label, len(series.points)) == ("FedAvg", len(ROUNDS))
    mean, deviation = 100 * runs[:, 1].mean(), 100 * runs[:, 1].std(ddof=1)
    assert series.points[1] == f"round 6: {mean:.2f} ± {deviation:.2f} %"
    alone = drawn({"FedAvg": made_up(runs=1)})
    assert edges(alone) == []
    assert "One run each" in alone.caption
    for number in (1, 2):
        drawn({"FedAvg": np.zeros((2, number))}, threshold=0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_diverged_runs_are_left_out_and_a_cross_ends_a_lost_series(bad: float) -> None:
    runs = made_up()
    runs[1, 7:] = bad
    chart = drawn({"FedAvg": runs})
    np.testing.assert_allclose(heights(chart.axes[0].lines[0]), runs[[0, 2]].mean(axis=0))
    assert "FedAvg (1 diverged)" in texts(chart)
    runs[:, 12:] = bad
    chart = drawn({"FedAvg": runs})
    line, cross, _ = chart.axes[0].lines
    np.testing.assert_allclose(heights(line), runs[:, :7].mean(axis=0))
    assert cross.get_marker() == "x"
    assert list(np.asarray(cross.get_xdata())) == [ROUNDS[6]]
    assert "FedAvg (diverged)" in texts(chart)


def test_forty_series_have_distinct_styles() -> None:
    styles = [line_style(i) for i in range(40)]
    assert len({str(sorted(style.items())) for style in styles}) == 40
    # Neighbours differ in dashes, not only in colour.
    assert all(a["linestyle"] != b["linestyle"] for a, b in itertools.pairwise(styles))


LONG = "WIDE $ method with a long name and (many=options) of every kind"


@pytest.mark.parametrize(
    ("number", "name"), [(1, LONG), (MOST_IN_ONE_PANEL, "A"), (MOST_IN_ONE_PANEL, LONG), (12, LONG)]
)
def test_everything_lies_within_the_figure(number: int, name: str) -> None:
    runs = {f"{name} {i}": made_up(0.3 + 0.01 * i) for i in range(number)}
    title = "a title of two lines because it is so long " * 2
    chart = drawn(runs, threshold=0.4, task=title, layout=True)
    check_layout(chart)
    assert "".join(chart.heading.get_text().split()) == "".join(chart.title.split())


def test_many_series_get_a_panel_per_family_over_all_others() -> None:
    names = [f"alg{i}" for i in range(10)] + ["fedadam", "fedadam:reddi"]
    chart = drawn({name: [[0.0] * 6, [1.0] * 6] for name in names}, layout=True)
    panels = [axes for axes in chart.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == names[:-1]
    shown = [text.get_text() for text in panels[-1].get_legend().get_texts()]  # type: ignore[union-attr]
    assert shown == ["fedadam", "fedadam:reddi", "alg0"]
    assert all((band.min(), band.max()) == (0.0, 1.0) for band in edges(chart))
    check_layout(chart)


def test_long_curves_are_thinned() -> None:
    chart = drawn({"a": [[0.001 * i for i in range(700)]]}, every=1)
    assert "one of 3 evaluations" in chart.caption
    assert np.asarray(chart.axes[0].lines[0].get_xdata()).tolist() == list(range(1, 701, 3))
    assert chart.axes[0].get_xlim() == (0.0, 700.0)


@given(
    arrays(np.float64, st.tuples(st.integers(2, 5), st.integers(1, 6)), elements=st.floats(0, 1))
)
def test_a_band_of_shares_is_the_deviation_within_0_and_1(runs: np.ndarray) -> None:
    mean, spread = runs.mean(axis=0), runs.std(axis=0, ddof=1)
    low, high = band_around(mean, spread, "accuracy")
    np.testing.assert_array_equal(low, np.where(mean >= spread, mean - spread, 0.0))
    np.testing.assert_array_equal(high, np.where(mean + spread <= 1.0, mean + spread, 1.0))


@pytest.mark.parametrize(
    ("metric", "mean"),
    # Nothing is known about a distance, and this accuracy is counted in percent.
    [("squared distance", [0.5, 2.0]), ("accuracy", [0.5, 85.0])],
)
def test_a_band_of_other_metrics_is_not_cut(metric: str, mean: list[float]) -> None:
    low, high = band_around(np.array(mean), np.array([1.0, 20.0]), metric)
    assert (low.tolist(), high.tolist()) == ([-0.5, mean[1] - 20.0], [1.5, mean[1] + 20.0])


def test_outliers_do_not_stretch_the_axes() -> None:
    fine, lost = [0.5, 0.8, 0.9, 0.95, 0.97, 0.99], [0.5, 0.8, 0.9, 0.1, 0.1, 0.1]
    chart = drawn({"fedzmg": [fine] * 3, "fedadam": [fine, fine, lost]})
    assert edges(chart)[1].max() == 1.0
    assert chart.axes[0].get_ylim()[1] < 1.05
    assert "cut to possible values" in chart.caption
    usual = [0.1 * i for i in range(40)]
    assert usual_range(usual) is None
    assert usual_range([0.0, *[1.0] * 99]) is None, "equal limits make no axis"
    limits = usual_range([*usual, 1e26])
    assert limits is not None
    assert 4.0 < limits[1] < 10.0


def test_figures_of_a_study(study: Path) -> None:
    for path in study.glob("*/seed-*"):
        metric, who = np.arange(1, 11) / 10, np.arange(10)
        RunDirectory(path).save_clients(
            [ClientMetrics(10, "training", 10, who, who + 5, metric, 1 - metric)]
        )
    result = study_result(read([study]).studies[0])
    made = {name: make(result) for name, make in figures.STUDY_FIGURES.items()}
    charts = {name: chart for name, chart in made.items() if chart is not None}
    assert list(charts) == ["curves", "differences", "seeds", "traffic", "clients"]
    for chart in charts.values():
        check_layout(chart)
        assert chart.title.startswith("digits")

    def values(name: str, label: str) -> list[list[float]]:
        chart = charts[name]
        keys = {key for key, one in chart.series.items() if one.label == label and one.points}
        lines = [line for line in chart.axes[0].lines if line.get_gid() in keys]
        return [np.asarray(line.get_xdata(), dtype=float).tolist() for line in lines]

    # The reference minus the other, as in the table of tests.
    assert values("differences", "fedavg") == [[pytest.approx(0.2)]]
    assert values("seeds", "fedzmg") == [pytest.approx([0.6, 0.8, 1.0])]
    assert values("traffic", "fedavg") == [pytest.approx(np.arange(2.0, 21.0, 2.0))]


def test_many_algorithms_of_a_study(write_run: Any, tmp_path: Path, log_line: Any) -> None:
    for i in range(12):
        lines = [log_line(r, 0.04 * i, client_loss=[0.0, 1.0, 2.0, 3.0, 4.0]) for r in (1, 2, 3)]
        path = write_run(f"many/a{i}", f"a{i}", 0, [], lines=lines)
        two = np.arange(2), np.arange(2), np.array([0.2, 0.9]), np.array([1.0, 2.0])
        RunDirectory(path).save_clients([ClientMetrics(3, "test", 2, *two)])
    result = study_result(read([tmp_path / "many"]).studies[0])
    for name in ("traffic", "clients"):
        chart = figures.STUDY_FIGURES[name](result)
        assert chart is not None
        assert {one.label for one in chart.series.values()} == {f"a{i}" for i in range(12)}
        check_layout(chart)


HOSTILE = "$\\bm{w}$ \x1b[3\u6f22\x00\x7f\ud800_"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "kind",
    [
        "curves",
        "grid",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("seeds", "data", "examples")),
    ],
)
def test_labels_are_neither_mathtext_nor_control_characters(
    kind: str, grid: dict[str, Any]
) -> None:
    grid["algorithms"]["fedzmg"]["label"] = HOSTILE
    make: dict[str, Any] = {
        "curves": lambda: drawn({HOSTILE: made_up()}, task=HOSTILE, layout=True),
        "seeds": lambda: figures.STUDY_FIGURES["seeds"](outcome({HOSTILE: made_up()})),
        "grid": lambda: figures.heat_maps(grid),
        "data": lambda: figures.heterogeneity(
            describe([[1, 2], [3, 0]], [HOSTILE, "b"], labels=["a", HOSTILE])
        ),
        "examples": lambda: figures.examples(
            "x", [HOSTILE], [np.zeros((1, 4, 4), np.uint8)], [[HOSTILE]]
        ),
    }
    chart = make[kind]()
    svg = figures.rendered(chart, "svg").decode()
    words = "".join(ElementTree.fromstring(svg).itertext())
    assert "$\\bm{w}$" in words
    assert not re.search(r"[\x00-\x08\x0e-\x1f\x7f]", words)
    for suffix in ("png", "pdf"):
        figures.rendered(chart, suffix)


def test_examples_and_files_under_the_whole_stem(tmp_path: Path) -> None:
    images = [np.zeros((2, 4, 4), np.uint8), np.zeros((1, 3, 4, 4), np.uint8)]
    chart = figures.examples("digits", ["a", "b"], images, [["1", "2"], ["3"]])
    assert sum(bool(axes.images) for axes in chart.axes if isinstance(axes, Axes)) == 3
    before = dict(matplotlib.rcParams)
    png, svg = figures.save(chart, tmp_path / "new" / "lr0.1")
    assert (png.name, svg.name) == ("lr0.1.png", "lr0.1.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b">digits</text>" in svg.read_bytes()
    assert figures.rendered(chart, "png") == png.read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_ctrl_c_waits_for_the_end_of_a_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle, compiled code of matplotlib turns it into another error."""
    ended = []

    def savefig(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(True)

    chart = drawn({"a": made_up()})
    monkeypatch.setattr(chart, "savefig", savefig)
    with pytest.raises(KeyboardInterrupt):
        figures.rendered(chart, "png")
    assert ended == [True]
