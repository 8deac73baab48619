"""Heat-maps and tables of grids, from the file that a grid writes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from rich.console import Console

from fedzmg.report.figures import heat_maps
from fedzmg.report.figures.grids import field as arrange
from fedzmg.report.tables.grids import best_points
from fedzmg.terminal import views
from fedzmg.terminal.render import render

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
    field = arrange(data()["algorithms"]["fedzmg"])
    assert (field.columns, field.rows) == ("client.lr", "server.lr")
    # Points run over the server rate first.
    assert field.scores.tolist() == [[-np.inf, 0.1 * 3], [0.1, 0.4], [0.2, 0.5]]
    assert field.marks.tolist() == [["x", ""], ["", ""], ["", ""]]


def test_more_axes_show_the_best_over_the_others() -> None:
    axes = {"client.lr": [0.1, 1.0], "server.lr": [1.0], "client.momentum": [0.0, 0.9]}
    field = arrange(data(axes)["algorithms"]["fedzmg"])
    assert field.others == ["client.momentum"]
    np.testing.assert_allclose(field.scores, [[0.1, 0.3]])
    assert not np.any(field.marks)


def test_heat_map_marks_the_best_and_what_diverged() -> None:
    chart = heat_maps(data(), "fedzmg")
    axes = chart.axes[0]
    [mark] = [p for p in axes.patches if isinstance(p, Rectangle)]
    assert (mark.get_x() + 0.5, mark.get_y() + 0.5) == (1, 2)
    [cross] = axes.lines
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (0, 0)  # type: ignore[index]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.1", "1"]
    assert {"10.0", "20.0", "30.0", "40.0", "50.0"} <= {t.get_text() for t in axes.texts}
    assert "reduced" in chart.title


def test_maps_of_a_grid_share_one_scale_of_colours() -> None:
    """The best of the weaker algorithm is as dark as the same score of the stronger one."""
    known = data()
    entry = known["algorithms"]["fedzmg"]
    weaker = {**entry, "points": [{**p, "score": p["score"] / 5} for p in entry["points"]]}
    both = {**known, "algorithms": {"fedzmg": entry, "fedavg": {**weaker, "label": "fedavg"}}}
    for chart in (heat_maps(both), heat_maps(both, "fedavg")):
        limits = {axes.collections[0].get_clim() for axes in chart.axes[:-1]}
        assert limits == {(0.02, 0.5)}


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


@pytest.mark.parametrize(
    ("labels", "axes"),
    [
        ([LONG, LONG.replace(" ", "-")], SQUARE),
        ([LONG], {**SQUARE, **FURTHER}),
        (["a", "b", "c", "d", LONG], {"client.lr": [0.1, 1.0], "server.lr": [1.0]}),
    ],
    ids=["long", "options", "short-row"],
)
def test_words_of_heat_maps_are_inside_and_cover_nothing(
    labels: list[str], axes: dict[str, list[float]]
) -> None:
    chart = heat_maps({**labelled(labels, axes), "label": LONG})
    chart.draw_without_rendering()
    panels = [one for one in chart.axes[:-1] if one.get_visible()]
    titles = [one.get_title(loc="left") for one in panels]
    assert ["".join(own.split()) for own in titles] == ["".join(own.split()) for own in labels]
    words = [chart.heading]
    for one in panels:
        [note] = [text for text in one.texts if text.get_text().startswith("best")]
        words += [one._left_title, note, one.xaxis.label]  # type: ignore[attr-defined]
    boxes = [text.get_window_extent() for text in words]
    scale = chart.axes[-1].get_tightbbox()
    assert scale is not None
    for box in boxes:
        assert min(box.x0, box.y0) >= 0.0
        assert box.x1 <= chart.bbox.x1
        assert box.y1 <= chart.bbox.y1
    for a, b in itertools.combinations([*boxes, scale], 2):
        assert not a.padded(-1.0).overlaps(b)


def test_points_that_were_stopped_are_shown_as_such() -> None:
    known = data()
    entry = known["algorithms"]["fedzmg"]
    line = {"round": 12, "why": "halving", "words": "", "score": 0.3}
    for i in (1, 4):
        entry["points"][i] |= {"score": None, "runs": [None], "stopped": [line]}
    entry["stopped"] = {"halving": 2, "rounds": 224, "rounds_asked": 300}
    field = arrange(entry)
    assert field.marks.tolist() == [["x", ""], ["_", "_"], ["", ""]]
    axes = heat_maps(known, "fedzmg").axes[0]
    assert sorted(line.get_marker() for line in axes.lines) == ["_", "_", "x"]
    shown = text(render([best_points(known)], WIDE))
    assert "2 halving; 75 % of the rounds trained" in shown


def test_one_axis_and_grids_that_only_diverged_are_drawn() -> None:
    heat_maps(data({"client.lr": [0.1, 0.3, 1.0]}))
    lost = data(best=None)
    for point in lost["algorithms"]["fedzmg"]["points"]:
        point["diverged"], point["score"] = 1, 0.0
    heat_maps(lost)
    assert "all diverged" in text(render([best_points(lost)], WIDE))


def test_estimate_without_data_says_what_to_do() -> None:
    known = {
        "kind": "grid", "task": "cifar100", "algorithms": 3, "trials": 243, "rounds": 50,
        "trial_rounds": 12150, "evaluations": 11, "steps": None, "bytes_down": 2**30,
        "bytes_up": 2**30, "disk_bytes": 2**20, "disk_bytes_after": 2**10, "seconds": None,
        "device": "", "engine": "", "missing": "fedzmg data get cifar100",
    }  # fmt: skip
    shown = dict(views.estimate(known))
    assert shown["rounds"] == "50 each, 12,150 in all"
    assert "fedzmg data get cifar100" in shown["time"]
    ready = dict(views.estimate({**known, "missing": "", "seconds": 4000.0, "steps": 7}))
    assert ready["time"].startswith("about 67 min here")
