"""Labels of charts, however long: all words lie inside their chart, and none cover each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.textpath import TextToPath

from fedzmg.report.html.page import render
from fedzmg.report.html.svg.bands import Band, bands
from fedzmg.report.html.svg.cells import heat_map
from fedzmg.report.html.svg.curves import Drawing, Level, Line, curves
from fedzmg.report.html.svg.labels import MOST
from fedzmg.report.html.svg.parts import FULL, HALF, LOW, Frame, percent
from fedzmg.report.html.svg.rows import Dots, rows
from fedzmg.report.html.svg.scatter import scatter
from fedzmg.report.lettering import folded, width_of
from fedzmg.report.placing import moved_apart
from fedzmg.report.plots.figures import curves as figure_of_curves
from fedzmg.report.plots.panels import panels
from fedzmg.report.plots.series import Series
from fedzmg.report.plots.study import study_figures
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result

WORDS = "average: projection + momentum + decay with Wide MEMORY and 3 per mille of all the rest"
LENGTHS = pytest.mark.parametrize("length", [10, 40, 80])
BREAKABLE = pytest.mark.parametrize("breakable", [True, False], ids=["words", "one-word"])
X = [0.0, 10.0, 20.0, 30.0]


def labels(number: int, length: int, breakable: bool) -> list[str]:
    """So many labels of a length, of one word or of several."""
    found = [f"{i} {WORDS}"[:length] for i in range(number)]
    assert all(len(one) == length for one in found)
    return found if breakable else [one.replace(" ", "-") for one in found]


@cache
def measured(words: str, size: float, bold: bool) -> float:
    """What the font itself says."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    return float(TextToPath().get_text_width_height_descent(words, font, ismath=False)[0])


class Box(NamedTuple):
    """Where words are, and which."""

    left: float
    top: float
    right: float
    bottom: float
    words: str


def boxes(chart: ElementTree.Element) -> Iterator[Box]:
    """Every line of text in a chart, as its class sets it in the style sheet."""
    size = 11.0 if "panel" in chart.get("class", "") else 12.0
    for text in chart.iter("text"):
        kind = set(text.get("class", "").split())
        bold = "on" in kind or ("label" in kind and "quiet" not in kind)
        share = 0.5 if "mid" in kind else 1.0 if "end" in kind else 0.0
        for line in list(text.iter("tspan")) or [text]:
            words = line.text or ""
            width = measured(words, size, bold) if words else 0.0
            above, below = 0.76 * size, 0.24 * size
            turned = re.fullmatch(
                r"translate\((\S+) (\S+)\) rotate\(-90\)", text.get("transform", "")
            )
            if turned:
                x, y = map(float, turned.groups())
                yield Box(x - above, y - width / 2, x + below, y + width / 2, words)
            else:
                x, y = float(line.get("x", "nan")), float(line.get("y", "nan"))
                yield Box(x - share * width, y - above, x + (1 - share) * width, y + below, words)


def charts(markup: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(one) for one in re.findall(r'<svg class="chart.*?</svg>', markup)
    ]


def check(chart: ElementTree.Element) -> None:
    """Words are inside and apart."""
    _, _, width, height = map(float, chart.get("viewBox", "").split())
    found = list(boxes(chart))
    assert found
    for box in found:
        assert box.left >= 0.0, box
        assert box.top >= 0.0, box
        assert box.right <= width, box
        assert box.bottom <= height, box
    for a, b in itertools.combinations([box for box in found if box.words], 2):
        apart = (
            a.right <= b.left or b.right <= a.left or a.bottom <= b.top + 3 or b.bottom <= a.top + 3
        )
        assert apart, (a, b)


def words_of(chart: ElementTree.Element) -> set[str]:
    return {" ".join(t.text or "" for t in (list(one.iter("tspan")) or [one]))
            for one in chart.iter("text")}  # fmt: skip


def plot_width(chart: ElementTree.Element) -> float:
    """Length of the horizontal grid lines as a share of the chart."""
    [d, *_] = [one.get("d", "") for one in chart.iter("path") if one.get("class") == "grid"]
    start, end = re.fullmatch(r"M(\S+) \S+H(\S+)", d).groups()  # type: ignore[union-attr]
    return (float(end) - float(start)) / float(chart.get("viewBox", "").split()[2])


def frame(xlabel: str = "index of the round") -> Frame:
    return Frame("key", "title", "description", xlabel, "test accuracy")


def lines_of(names: list[str]) -> list[Line]:
    """Lines that end close to each other."""
    return [
        Line(
            name, i, X, [0.1, 0.2, 0.3, 0.31 + 0.001 * i],
            ([0.09, 0.19, 0.29, 0.3 + 0.001 * i], [0.11, 0.21, 0.31, 0.32 + 0.001 * i]),
        )
        for i, name in enumerate(names)
    ]  # fmt: skip


LEVELS = [Level(0.2, "threshold 20 %"), Level(0.33, "threshold 33 %")]


def drawn_curves(names: list[str], size: tuple[float, float]) -> Drawing:
    return curves(lines_of(names), frame(), levels=LEVELS, number=percent, size=size)


def drawn_bands(names: list[str], size: tuple[float, float]) -> Drawing:
    found = [Band(line, [0.0] * 4, [0.9] * 4) for line in lines_of(names)]
    return bands(found, frame(), number=percent, size=size)


@LENGTHS
@BREAKABLE
@pytest.mark.parametrize("number", [3, 8, 12])
@pytest.mark.parametrize("size", [LOW, HALF], ids=["low", "half"])
@pytest.mark.parametrize("draw", [drawn_curves, drawn_bands])
def test_names_of_lines_are_inside_or_left_to_a_legend(
    length: int, breakable: bool, number: int, size: tuple[float, float],
    draw: Callable[[list[str], tuple[float, float]], Drawing],
) -> None:  # fmt: skip
    names = labels(number, length, breakable)
    markup, named = draw(names, size)
    wide, narrow = charts(markup)
    for chart in (wide, narrow):
        check(chart)
    assert (set(names) <= words_of(wide)) == named
    assert not set(names) & words_of(narrow)
    # The plot keeps at least half of the chart; ten letters are never too many for it.
    assert plot_width(wide) >= 1.0 - MOST - 0.12
    assert named or length > 10 or number > 8
    if draw is drawn_curves:
        assert {level.label for level in LEVELS} <= words_of(wide)


@LENGTHS
@BREAKABLE
@pytest.mark.parametrize("number", [3, 12])
@pytest.mark.parametrize("zero", [True, False], ids=["zero", "values"])
def test_names_of_rows_are_inside_and_whole(
    length: int, breakable: bool, number: int, zero: bool
) -> None:
    names = labels(number, length, breakable)
    dots = [
        Dots(name, i, [("seed 0", 0.1), ("seed 1", 0.2)], 0.15, (0.1, 0.2) if zero else None,
             "p = 0.0379")
        for i, name in enumerate(names)
    ]  # fmt: skip
    below = f"final accuracy of {names[0]} minus that of the other, in points"
    for chart in charts(rows(dots, frame(below), zero=zero, paired=not zero)):
        check(chart)
        found = "".join("".join(box.words for box in boxes(chart)).split())
        assert all("".join(name.split()) in found for name in (*names, below))


@LENGTHS
@BREAKABLE
def test_names_of_points_are_inside(length: int, breakable: bool) -> None:
    names = labels(9, length, breakable)
    points = [(name, 1000.0 * i, 0.1 * (i % 3)) for i, name in enumerate(names)]
    drawn = charts(scatter(points, frame(), number=percent, named=True, size=FULL))
    for chart in drawn:
        check(chart)
    # Three rows of points; a name may be as long as it is to the third next point.
    named = len(set(names) & words_of(drawn[0]))
    assert named == 9 if length == 10 else named >= (5 if breakable else 0)


@LENGTHS
def test_names_of_a_map_are_inside(length: int) -> None:
    across = f"client.lr; best over {labels(1, length, True)[0]}"
    shades = heat_map(
        Frame("key", "title", "", across, "server.lr"), ["0.1", "1"], ["10", "1"],
        [[0.1, 0.2], [0.3, 0.4]], limits=(0.0, 1.0), best=(1, 1),
    )  # fmt: skip
    [chart] = charts(shades)
    check(chart)


@pytest.mark.parametrize(
    ("number", "length", "breakable"),
    [(2, 10, True), (2, 40, True), (2, 80, False), (9, 40, False), (9, 80, True)],
)
def test_a_page_with_long_labels(
    write_run: Any, tmp_path: Path, number: int, length: int, breakable: bool
) -> None:
    names = labels(number, length, breakable)
    for i, name in enumerate(names):
        for seed in (0, 1):
            tops = [0.1, 0.5, 0.7 + 0.01 * i + 0.01 * seed]
            write_run(f"all/{i}/{seed}", name, seed, tops)
    page = render(read([tmp_path / "all"]))
    found = charts(page)
    assert len(found) >= 6
    for chart in found:
        check(chart)
    for figure in re.findall(
        r'<figure class="card (curves|traffic)(.*?)".*?</figure>', page, re.DOTALL
    ):
        shown = "always" in figure[1]
        assert shown == (number == 2 and length == 80 and not breakable)
    assert page == render(read([tmp_path / "all"]))


LETTERS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)


@given(LETTERS, st.booleans())
def test_widths_are_those_of_the_font(words: str, bold: bool) -> None:
    # The font moves some pairs of letters together, by little.
    exact = measured(words, 100.0, bold) if words else 0.0
    letters = width_of(words, 100.0, bold=bold)
    assert letters >= exact - 15.0
    assert letters <= 1.1 * exact + 60.0


@given(st.lists(st.text("abmi", min_size=1, max_size=20), min_size=1, max_size=8),
       st.floats(30.0, 400.0), st.booleans())  # fmt: skip
def test_folding_keeps_words_and_needs_the_fewest_lines(
    pieces: list[str], room: float, bold: bool
) -> None:
    words = " ".join(pieces)
    lines = folded(words, room, 12.0, bold=bold)
    assert " ".join(lines) == words
    widths = [width_of(line, 12.0, bold=bold) for line in lines]
    assert all(width <= room or " " not in line for width, line in zip(widths, lines, strict=True))
    # No other way to break the words needs fewer lines, nor as many with a narrower widest one.
    for count in range(1, len(lines) + 1):
        for places in itertools.combinations(range(1, len(pieces)), count - 1):
            ends = [0, *places, len(pieces)]
            other = [" ".join(pieces[a:b]) for a, b in itertools.pairwise(ends)]
            fits = all(width_of(o, 12.0, bold=bold) <= room or " " not in o for o in other)
            widest = max(width_of(o, 12.0, bold=bold) for o in other)
            assert not fits or (count == len(lines) and widest >= max(widths) - 1e-6)
    cut = folded(words, room, 12.0, bold=bold, cut=True)
    assert "".join(cut).replace(" ", "") == words.replace(" ", "")
    assert all(width_of(line, 12.0, bold=bold) <= room for line in cut)


def test_words_of_other_alphabets_have_room() -> None:
    assert width_of("動量", 12.0) == 24.0
    assert width_of("e\u0301", 12.0) == width_of("e", 12.0)
    for words in ("момент импульса", "élan vital", "\u2212 ± \u00d7 ∞", "αβγδλ"):
        assert measured(words, 12.0, False) <= width_of(words, 12.0) <= 25.0 * len(words)


TALL = st.lists(st.tuples(st.floats(-20.0, 320.0), st.floats(0.0, 25.0)), min_size=1, max_size=7)


@given(TALL)
def test_tall_labels_move_apart_and_stay_inside(found: list[tuple[float, float]]) -> None:
    wanted, taller = [one for one, _ in found], [one for _, one in found]
    placed = moved_apart(wanted, 14.0, 300.0, taller)
    halves = [extra / 2.0 for extra in taller]
    assert min(p - h for p, h in zip(placed, halves, strict=True)) >= -1e-9
    assert max(p + h for p, h in zip(placed, halves, strict=True)) <= 300.0 + 1e-9
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for below, above in itertools.pairwise(order):
        gap = placed[above] - halves[above] - placed[below] - halves[below]
        assert gap >= 14.0 - 1e-9


def check_figure(figure: Figure, inches: float = 3.6) -> None:
    """Everything is inside, and the plots are not much smaller than with short labels."""
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0) >= 0.0
    assert box.x1 <= width
    assert box.y1 <= height
    shown = [axes.get_position() for axes in figure.axes if axes.get_visible()]
    for place in shown:
        assert place.width * width >= inches
        assert place.height * height >= 0.9
    texts = [one for axes in figure.axes if axes.legend_ for one in axes.legend_.get_texts()]
    texts += [one for legend in figure.legends for one in legend.get_texts()]
    boxes = [one.get_window_extent() for one in texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize(
    ("number", "length", "breakable"),
    [(7, 10, True), (1, 60, True), (7, 60, True), (7, 80, False), (9, 60, False), (9, 80, True)],
)
def test_labels_leave_room_for_a_figure_of_curves(
    number: int, length: int, breakable: bool
) -> None:
    rising = np.array([[0.1, 0.2, 0.3], [0.1, 0.2, 0.4]])
    names = labels(number, length, breakable)
    series = [Series(name, np.arange(3), rising + 0.001 * i) for i, name in enumerate(names)]
    figure = figure_of_curves(series, title="title", ylabel="accuracy", threshold=[0.2, 0.33])
    check_figure(figure)
    width, _ = figure.get_size_inches()
    assert figure.axes[0].get_position().width >= 0.4
    if length == 10:
        assert width == 7.0
    texts = [one for one in figure.findobj(Text) if isinstance(one, Text)]
    written = {re.sub(r"\s", "", one.get_text()) for one in texts}
    assert {name.replace(" ", "") for name in names} <= written
    ends = [one.get_window_extent() for one in texts if re.match(r"\d[ -]ave", one.get_text())]
    assert len(ends) == number
    assert not any(a.overlaps(b) for a, b in itertools.combinations(ends, 2))


def test_labels_leave_room_for_panels() -> None:
    names = [f"{family}: {WORDS} {i}" for family in ("first", "other") for i in range(6)]
    rising = np.array([[0.1, 0.2, 0.3]])
    figure = panels(
        [Series(name, np.arange(3), rising) for name in names], title="title", ylabel="accuracy"
    )
    check_figure(figure, 1.8)


@BREAKABLE
def test_labels_leave_room_for_the_figures_of_a_study(
    write_run: Any, log_line: Any, tmp_path: Path, breakable: bool
) -> None:
    for i, name in enumerate(labels(3, 80, breakable)):
        spread = [0.1, 0.5, 0.7, 0.9, 1.0]
        own = [log_line(r, 0.1 * r + 0.01 * i, client_loss=spread) for r in range(1, 4)]
        write_run(f"all/{i}", name, 0, [], lines=own)
    [study] = read([tmp_path / "all"]).studies
    found = dict(study_figures(study_result(study)))
    assert set(found) == {"curves", "traffic", "seeds", "client-loss"}
    for figure in found.values():
        check_figure(figure)
