"""Figures of validation curves."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from numpy.typing import NDArray

from fedzmg.errors import InputError
from fedzmg.report.placing import moved_apart
from fedzmg.report.plots import comparison
from fedzmg.report.plots.figures import MOST_DIRECT_LABELS, curves
from fedzmg.report.plots.panels import panels
from fedzmg.report.plots.series import Series
from fedzmg.report.plots.style import save

ROUNDS = np.arange(0, 100, 5)


def made_up(label: str, top: float, runs: int = 3) -> Series:
    """Return runs that rise towards a top, each a little apart from the next."""
    rising = top * (1.0 - np.exp(-(ROUNDS + 1) / 30.0))
    return Series(label, ROUNDS, rising + 0.01 * np.arange(runs)[:, None])


def drawn(*series: Series, threshold: float | None = None) -> Figure:
    """Draw series under a fixed title."""
    return curves(series, title="title", ylabel="accuracy", threshold=threshold)


def texts(figure: Figure) -> list[str]:
    """Return all texts of the figure."""
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]


def lines(figure: Figure) -> list[Line2D]:
    """Return the lines in the axes."""
    return list(figure.axes[0].lines)


def heights(line: Line2D) -> NDArray[np.float64]:
    """Return the values that a line shows."""
    return np.asarray(line.get_ydata(), dtype=np.float64)


def bands(figure: Figure) -> list[PolyCollection]:
    """Return the shaded bands."""
    return [one for one in figure.axes[0].collections if isinstance(one, PolyCollection)]


def test_mean_and_sample_deviation() -> None:
    series = made_up("FedAvg", 0.5)
    figure = drawn(series)
    (line,), (band,) = lines(figure), bands(figure)
    np.testing.assert_allclose(heights(line), series.runs.mean(axis=0))
    outline = np.asarray(band.get_paths()[0].vertices)
    at_zero = outline[outline[:, 0] == 0.0, 1]
    middle, deviation = series.runs[:, 0].mean(), series.runs[:, 0].std(ddof=1)
    assert at_zero.min() == pytest.approx(middle - deviation)
    assert at_zero.max() == pytest.approx(middle + deviation)


def test_axes_are_named_and_start_at_zero() -> None:
    axes = drawn(made_up("FedAvg", 0.5)).axes[0]
    assert axes.get_xlabel() == "communication round"
    assert axes.get_ylabel() == "accuracy"
    assert axes.get_xlim()[0] == 0.0
    assert axes.get_title(loc="left") == "title"


def test_fine_evaluations_extend_the_axis_to_the_round_number() -> None:
    rounds = np.arange(0, 1000, 5)
    figure = drawn(Series("FedAvg", rounds, np.linspace(0, 1, 200)[None]))
    assert figure.axes[0].get_xlim() == (0.0, 1000.0)


def test_one_run_has_no_band() -> None:
    figure = drawn(made_up("FedAvg", 0.5, runs=1))
    assert bands(figure) == []
    assert "single run" in texts(figure)


def test_caption_counts_runs() -> None:
    assert "mean ± 1 standard deviation, 3 runs" in texts(drawn(made_up("FedAvg", 0.5)))
    mixed = drawn(made_up("FedAvg", 0.5, runs=2), made_up("FedAdam", 0.5, runs=5))
    assert "mean ± 1 standard deviation, 2 to 5 runs" in texts(mixed)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_diverged_run_is_left_out_and_counted(bad: float) -> None:
    series = made_up("FedAvg", 0.5)
    series.runs[1, 7:] = bad
    figure = drawn(series)
    (line,) = lines(figure)
    np.testing.assert_allclose(heights(line), series.runs[[0, 2]].mean(axis=0))
    assert "FedAvg (1 diverged)" in texts(figure)


def test_a_series_of_diverged_runs_ends_in_a_cross() -> None:
    series = made_up("FedAvg", 0.5)
    series.runs[:, 12:] = np.nan
    series.runs[2, 7:] = np.inf
    figure = drawn(series)
    line, cross = lines(figure)
    np.testing.assert_allclose(heights(line), series.runs[:, :7].mean(axis=0))
    assert cross.get_marker() == "x"
    assert list(np.asarray(cross.get_xdata())) == [ROUNDS[6]]
    assert "FedAvg (all 3 diverged)" in texts(figure)


@pytest.mark.parametrize("others", [0, 1, MOST_DIRECT_LABELS])
def test_a_series_without_any_finite_value_is_still_named(tmp_path: Path, others: int) -> None:
    empty = Series("FedAvg", ROUNDS, np.full((1, len(ROUNDS)), np.nan))
    figure = drawn(empty, *(made_up(f"other {i}", 0.5) for i in range(others)), threshold=0.3)
    save(figure, tmp_path / "empty")
    assert "FedAvg (diverged)" in texts(figure)


def test_threshold_is_a_labelled_line_in_view() -> None:
    figure = drawn(made_up("FedAvg", 0.5), threshold=0.75)
    assert "threshold 0.75" in texts(figure)
    assert figure.axes[0].get_ylim()[1] > 0.75
    assert any(set(heights(line)) == {0.75} for line in lines(figure))


def test_a_study_marks_all_its_thresholds_and_no_label_covers_another() -> None:
    tops = {"fedzmg": 0.355, "fedavg": 0.341, "fedadam": 0.383}
    data = {
        "task": "toy", "metric": "accuracy", "threshold": 0.2, "seeds": [0, 1, 2],
        "curves": {
            name: {"indices": ROUNDS.tolist(), "runs": made_up(name, top).runs.tolist()}
            for name, top in tops.items()
        },
    }  # fmt: skip
    assert [t for t in texts(comparison.figure(data)) if "thresh" in t] == ["threshold 0.2"]
    levels = [0.33, 0.335, 0.34, 0.1]
    figure = comparison.figure(data, levels, "reduced protocol")
    assert "toy (reduced protocol), 3 paired seeds" in texts(figure)
    marked = {next(iter(heights(line))) for line in lines(figure) if len(set(heights(line))) == 1}
    assert marked == set(levels)
    named = {*tops, *(f"threshold {level:g}" for level in levels)}
    labels = [one for one in figure.findobj(Text) if isinstance(one, Text)]
    boxes = [one.get_window_extent() for one in labels if one.get_text() in named]
    assert len(boxes) == len(named)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_few_series_are_named_at_their_ends_and_many_in_a_legend() -> None:
    few = drawn(*(made_up(f"series {i}", 0.5) for i in range(MOST_DIRECT_LABELS)))
    assert few.axes[0].get_legend() is None
    assert {f"series {i}" for i in range(MOST_DIRECT_LABELS)} <= set(texts(few))

    many = drawn(*(made_up(f"series {i}", 0.2 + i / 40) for i in range(20)), threshold=0.3)
    legend = many.axes[0].get_legend()
    assert legend is not None
    named = [text.get_text() for text in legend.get_texts()]
    assert len(named) == 21
    assert (named[0], named[-1]) == ("series 19", "series 0")


def test_twenty_series_differ_without_their_colour() -> None:
    many = drawn(*(made_up(f"series {i}", 0.5) for i in range(20)))
    looks = {(str(line._dash_pattern), str(line.get_marker())) for line in lines(many)}  # type: ignore[attr-defined]
    assert len(looks) == 20


@pytest.mark.parametrize("number", [1, 3, MOST_DIRECT_LABELS, 20, 30])
@pytest.mark.parametrize("name", ["FedAvg", "a method with a long name and (many=options)"])
def test_everything_lies_within_the_figure(number: int, name: str) -> None:
    series = [made_up(f"{name} {i}", 0.5) for i in range(number)]
    title = "a long title that has to go on in a second line because it is so very long"
    figure = curves(series, title=title, ylabel="accuracy", threshold=0.4)
    inches = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(inches.x0, inches.y0) >= 0.0
    assert inches.x1 <= width
    assert inches.y1 <= height


@pytest.mark.parametrize(("number", "space"), [(1, " "), (1, "M"), (MOST_DIRECT_LABELS + 1, "-")])
def test_titles_of_wide_letters_are_whole_and_inside(number: int, space: str) -> None:
    title = space.join(["MAXIMUM MOMENTUM WITH WWW AND WEIGHTED MEAN OF MNIST"] * 3)
    series = [made_up(f"series {i}", 0.5) for i in range(number)]
    figure = curves(series, title=title, ylabel="accuracy")
    [shown] = [
        one for one in figure.findobj(Text)
        if isinstance(one, Text) and one.get_text().startswith("MAXIMUM")
    ]  # fmt: skip
    assert "".join(shown.get_text().split()) == "".join(title.split())
    box, (width, height) = shown.get_window_extent(), figure.bbox.size
    assert box.x0 >= 0.0
    assert box.x1 <= width
    assert box.y1 <= height


def test_titles_over_many_panels_are_inside() -> None:
    title = "mean accuracy of every algorithm and of its variants with MOMENTUM, " * 3
    figure = panels([made_up(f"family{i}", 0.5) for i in range(2)], title=title, ylabel="accuracy")
    figure.draw_without_rendering()
    [shown] = [one for one in figure.texts if one.get_text() == figure.get_suptitle()]
    assert "".join(shown.get_text().split()) == "".join(title.split())
    box = shown.get_window_extent()
    assert box.x0 >= 0.0
    assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("rounds", [[0], [3], [0, 1], [0, 1, 2]])
def test_very_short_curves(tmp_path: Path, rounds: list[int]) -> None:
    runs = np.linspace(0.1, 0.2, 2 * len(rounds)).reshape(2, -1)
    save(drawn(Series("FedAvg", np.array(rounds), runs)), tmp_path / "short")


def test_constant_curve(tmp_path: Path) -> None:
    save(drawn(Series("FedAvg", ROUNDS, np.zeros((2, len(ROUNDS)))), threshold=0.0), tmp_path / "c")


@given(st.lists(st.floats(-50.0, 350.0), min_size=1, max_size=9), st.floats(1.0, 20.0))
def test_labels_move_apart_and_keep_their_order(wanted: list[float], gap: float) -> None:
    placed = moved_apart(wanted, gap, room=300.0)
    assert all(-1e-9 <= height <= 300.0 + 1e-9 for height in placed)
    in_order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for below, above in itertools.pairwise(in_order):
        assert placed[above] - placed[below] >= gap - 1e-9


def test_labels_with_room_stay_where_they_belong() -> None:
    assert moved_apart([200.0, 10.0, 50.0], 12.0, 300.0) == [200.0, 10.0, 50.0]
    assert moved_apart([100.0, 100.0], 12.0, 300.0) == [94.0, 106.0]
    assert moved_apart([0.0] * 4, 200.0, 300.0) == pytest.approx([0, 100, 200, 300])


def test_save_writes_both_formats_under_the_whole_stem(tmp_path: Path) -> None:
    png, svg = save(drawn(made_up("FedAvg", 0.5)), tmp_path / "new" / "lr0.1")
    assert (png.name, svg.name) == ("lr0.1.png", "lr0.1.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()
    assert sorted(path.name for path in png.parent.iterdir()) == ["lr0.1.png", "lr0.1.svg"]


def test_save_is_deterministic(tmp_path: Path) -> None:
    def make() -> Figure:
        return drawn(made_up("FedZMG", 0.5), made_up("FedAvg", 0.4), threshold=0.3)

    figure = make()
    first = [path.read_bytes() for path in save(figure, tmp_path / "first")]
    again = [path.read_bytes() for path in save(figure, tmp_path / "again")]
    anew = [path.read_bytes() for path in save(make(), tmp_path / "anew")]
    assert first == again == anew
    assert b"<dc:date>" not in first[1]


def test_save_failure_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(made_up("FedAvg", 0.5))
    png, svg = save(figure, tmp_path / "curve")
    before = png.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match=r"cannot write .*: disk full; choose another"):
        save(figure, tmp_path / "curve")
    assert png.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [png, svg]


def test_settings_of_the_caller_are_left_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save(drawn(made_up("FedAvg", 0.5)), tmp_path / "curve")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("rounds", "runs", "message"),
    [
        ([], np.zeros((1, 0)), "rounds of 'x' must be a non-empty list"),
        ([0, 0], np.zeros((1, 2)), "rounds of 'x' must strictly increase"),
        ([0, 5], np.zeros((1, 3)), r"shape \[runs, 2\], got \(1, 3\)"),
        ([0, 5], np.zeros((0, 2)), r"shape \[runs, 2\], got \(0, 2\)"),
        ([0, 5], np.zeros(2), r"shape \[runs, 2\], got \(2,\)"),
    ],
)
def test_invalid_series(rounds: list[int], runs: NDArray[np.float64], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Series("x", np.array(rounds), runs)


def test_invalid_figures() -> None:
    with pytest.raises(ValueError, match="at least one curve"):
        drawn()
    with pytest.raises(ValueError, match="threshold must be finite, got nan"):
        drawn(made_up("FedAvg", 0.5), threshold=float("nan"))


def test_axis_counts_rounds_as_the_curve_does() -> None:
    """Three evaluations in rounds 1, 6 and 11: the axis names rounds, not evaluations."""
    run = {"indices": [0, 5, 10], "runs": [[0.1, 0.2, 0.3]]}
    data = {"task": "t", "metric": "accuracy", "seeds": [0], "curves": {"fedavg": run}}
    [axes] = comparison.figure(data).axes
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0, 5, 10]
    assert axes.get_xlabel() == "index of the round (index r follows round r + 1)"
