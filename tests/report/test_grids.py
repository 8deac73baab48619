"""Heat-maps and tables of grids, from the file that a grid writes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from rich.console import Console

from fedzmg.report.plots import grids
from fedzmg.report.plots.style import PNG_DPI, save
from fedzmg.report.terminal import views
from fedzmg.results.grids import field as laid_out

WIDE = 140


def data(axes: dict[str, list[float]] | None = None, best: Any = "first") -> dict[str, Any]:
    axes = axes or {"client.lr": [0.1, 1.0], "server.lr": [0.01, 0.1, 1.0]}
    keys = list(axes)
    grid = np.array(np.meshgrid(*axes.values(), indexing="ij")).reshape(len(axes), -1).T
    points = [
        {"options": dict(zip(keys, p, strict=True)), "score": 0.1 * i, "runs": [0.1 * i],
         "diverged": int(i == 0)}
        for i, p in enumerate(grid.tolist())
    ]  # fmt: skip
    top = {
        "options": points[-1]["options"], "score": points[-1]["score"], "border": True,
        "border_axes": keys, "neighbours": [{"options": points[-2]["options"], "score": 0.4}],
    }  # fmt: skip
    entry = {
        "algorithm": "fedzmg", "label": "FedZMG", "fixed": {}, "axes": axes, "points": points,
        "best": top if best == "first" else best,
    }  # fmt: skip
    return {
        "task": "toy", "label": "reduced", "metric": "accuracy", "higher_is_better": True,
        "selection": "tune", "examples": 10, "rounds": 50, "last": 10, "seeds": [1000],
        "algorithms": {"fedzmg": entry},
    }  # fmt: skip


def text(shown: Any) -> str:
    console = Console(width=WIDE, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(shown)
    return console.export_text()


def test_field_puts_client_rates_across_and_server_rates_up() -> None:
    field = laid_out(data()["algorithms"]["fedzmg"])
    assert (field.columns, field.rows) == ("client.lr", "server.lr")
    # Points run over the server rate first.
    assert field.scores.tolist() == [[0.0, 0.1 * 3], [0.1, 0.4], [0.2, 0.5]]
    assert field.diverged.tolist() == [[True, False], [False, False], [False, False]]


def test_more_axes_show_the_best_over_the_others() -> None:
    axes = {"client.lr": [0.1, 1.0], "server.lr": [1.0], "client.momentum": [0.0, 0.9]}
    field = laid_out(data(axes)["algorithms"]["fedzmg"])
    assert field.others == ["client.momentum"]
    np.testing.assert_allclose(field.scores, [[0.1, 0.3]])
    assert not field.diverged.any()


def test_heat_map_marks_the_best_and_what_diverged(tmp_path: Path) -> None:
    figure = grids.figure(data(), "fedzmg")
    axes = figure.axes[0]
    [mark] = [p for p in axes.patches if isinstance(p, Rectangle)]
    assert (mark.get_x() + 0.5, mark.get_y() + 0.5) == (1, 2)
    [cross] = axes.lines
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (0, 0)  # type: ignore[index]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["$10^{-1}$", "$10^{0}$"]
    numbers = {t.get_text() for t in axes.texts}
    assert {"10.0", "20.0", "30.0", "40.0", "50.0"} <= numbers
    assert "reduced" in figure.get_suptitle()
    png, svg = save(figure, tmp_path / "map")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in svg.read_bytes()


LONG = "Adam on the server: projection + momentum + decay of every layer but the last"
RATES = [0.01, 10**-1.5, 0.1, 10**-0.5]
SQUARE = {"client.lr": RATES, "server.lr": RATES}
FURTHER = {f"client.option_{i}": [0.5] for i in range(3)}


def labelled(labels: list[str], axes: dict[str, list[float]] | None = None) -> dict[str, Any]:
    """A grid of as many algorithms as labels."""
    known = data(axes)
    [entry] = known["algorithms"].values()
    entry["best"]["border"] = False
    return {**known, "algorithms": {f"a{i}": {**entry, "label": x} for i, x in enumerate(labels)}}


def headings(figure: Figure) -> list[list[Text]]:
    """Title, note and name of the horizontal axis of every panel, as they are drawn."""
    found = []
    for axes in figure.axes[:-1]:
        if not axes.get_visible():
            continue
        texts = [one for one in axes.findobj(Text) if isinstance(one, Text) and one.get_text()]
        [title] = [one for one in texts if one.get_text() == axes.get_title(loc="left")]
        [note] = [one for one in axes.texts if one.get_text().startswith(("best", "every"))]
        found.append([title, note, axes.xaxis.label])
    return found


@pytest.mark.parametrize(
    ("labels", "axes"),
    [
        # The last one is wider than its cells, and the scale of colours stands beside it.
        (["plain", "Adam: projection + momentum + decay"], SQUARE),
        # Cells as wide as three panels leave them, and a title of two lines above.
        (["fedzmg", "fedavg", "fedadam"], {axis: [*RATES, 1.0] for axis in SQUARE}),
        pytest.param([LONG, LONG.replace(" ", "-")], SQUARE, marks=pytest.mark.slow),
        ([LONG], {**SQUARE, **FURTHER}),
        pytest.param(
            ["a", "b", "c", "d", LONG],
            {"client.lr": [0.1, 1.0], "server.lr": [1.0]},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "three", "long", "options", "short-row"],
)
def test_words_of_heat_maps_are_inside_and_cover_nothing(
    labels: list[str], axes: dict[str, list[float]]
) -> None:
    figure = grids.figures({**labelled(labels, axes), "label": LONG})
    [title] = [one for one in figure.texts if one.get_text() == figure.get_suptitle()]
    # As PNG, and so fine that letters are as wide as in an SVG, where nothing is rounded.
    for dpi in (PNG_DPI, 600):
        figure.set_dpi(dpi)
        figure.draw_without_rendering()
        words = headings(figure)
        shown = ["".join(own[0].get_text().split()) for own in words]
        assert shown == ["".join(label.split()) for label in labels]
        boxes = {
            f"{text.get_text()} ({i})": text.get_window_extent()
            for i, text in enumerate([title, *itertools.chain(*words)])
        }
        scale = figure.axes[-1].get_tightbbox()
        assert scale is not None
        for name, box in boxes.items():
            assert min(box.x0, box.y0) >= 0.0, name
            assert box.x1 <= figure.bbox.x1, name
            assert box.y1 <= figure.bbox.y1, name
        everything = {**boxes, "scale": scale}
        for one, other in itertools.combinations(everything, 2):
            assert not everything[one].overlaps(everything[other]), (one, other)


def test_words_of_heat_maps_that_have_room_stay_in_one_line() -> None:
    labels = ["plain", "a label over the scale of colours"]
    figure = grids.figures(labelled(labels, SQUARE))
    for label, own in zip(labels, headings(figure), strict=True):
        assert own[0].get_text() == label
        assert not any("\n" in text.get_text() for text in own)
    # 3.6 inches for each and the scale; 0.46 for a row, and what is above and below.
    assert figure.get_size_inches() == pytest.approx([2 * 3.6 + 0.9, 4 * 0.46 + 2.0])


def test_folded_words_leave_cells_as_large_as_they_were() -> None:
    figures = [grids.figures(labelled([own], SQUARE)) for own in ("a", LONG)]
    heights = []
    for figure in figures:
        figure.set_dpi(PNG_DPI)
        figure.draw_without_rendering()
        heights.append([axes.get_window_extent().height for axes in figure.axes[:-1]])
    np.testing.assert_allclose(heights[1], heights[0], rtol=0.03)
    assert figures[1].get_figheight() > figures[0].get_figheight()


def test_points_that_were_stopped_are_shown_as_such() -> None:
    known = data()
    entry = known["algorithms"]["fedzmg"]
    line = {"round": 12, "why": "cannot_win", "words": "", "at_most": 0.3, "heuristic": False}
    for i in (1, 4):
        entry["points"][i] |= {"score": None, "runs": [None], "stopped": [line]}
    entry["stopped"] = {"cannot_win": 2, "rounds": 224, "rounds_asked": 300}
    known["stop"] = {"cannot_win": True}
    field = laid_out(entry)
    assert field.stopped.sum() == 2
    assert field.stopped[1, 0]
    assert not (field.stopped & field.diverged).any()
    axes = grids.figure(known, "fedzmg").axes[0]
    assert sorted(line.get_marker() for line in axes.lines) == ["_", "_", "x"]
    shown = text(views.grid(known, WIDE))
    assert "2 cannot win; 75 % of the rounds trained" in shown


def test_one_axis_and_grids_that_only_diverged_are_drawn() -> None:
    grids.figures(data({"client.lr": [0.1, 0.3, 1.0]})).draw_without_rendering()
    lost = data(best=None)
    for point in lost["algorithms"]["fedzmg"]["points"]:
        point["diverged"], point["score"] = 1, 0.0
    grids.figures(lost).draw_without_rendering()
    assert "all diverged" in text(views.grid(lost, WIDE))


def test_table_says_what_chose_and_where_the_best_lies() -> None:
    shown = text(views.grid(data(), WIDE))
    for word in ("client.lr 1, server.lr 1", "50.00 %", "on the border", "1 of 6", "tuning half"):
        assert word in shown
    assert "whole test set" in text(views.grid({**data(), "selection": "test"}, WIDE))


def test_estimate_without_data_says_what_to_do() -> None:
    known = {
        "kind": "grid", "task": "cifar100", "algorithms": 3, "trials": 243, "rounds": 50,
        "evaluations": 11, "steps": None, "bytes_down": 2**30, "bytes_up": 2**30,
        "disk_bytes": 2**20, "disk_bytes_after": 2**10, "seconds": None, "device": "",
        "engine": "", "missing": "fedzmg data get cifar100",
    }  # fmt: skip
    shown = dict(views.estimate(known))
    assert shown["rounds"] == "50 each, 12,150 in all"
    assert "fedzmg data get cifar100" in shown["time"]
    ready = dict(views.estimate({**known, "missing": "", "seconds": 4000.0, "steps": 7}))
    assert ready["time"].startswith("about 67 min here")
