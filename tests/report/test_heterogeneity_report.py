"""The heterogeneity report as a figure, tables and files."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from fedzmg.data.heterogeneity import PAPER, describe
from fedzmg.report import figures
from fedzmg.report.exports import DESCRIPTION, write_description
from fedzmg.report.figures.data import MOST_ROWS
from fedzmg.report.figures.data import heterogeneity as figure
from fedzmg.report.tables.heterogeneity import client_by_client, side_by_side
from fedzmg.results.formatting import NONE
from fedzmg.results.reading import read
from fedzmg.terminal.views import description


def made_up(clients: int, classes: int, volume: int = 100, **options: Any) -> dict[str, Any]:
    """A report on random clients, as read back from JSON."""
    rng = np.random.default_rng(clients)
    shares = rng.dirichlet(np.full(classes, 0.3), clients)
    counts = np.array([rng.multinomial(volume, share) for share in shares])
    names = [f"client {i}" for i in range(clients)]
    return dict(json.loads(json.dumps(describe(counts, names, **options))))


def printed(renderable: Any) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def panels(data: dict[str, Any]) -> tuple[Axes, Axes, Axes]:
    """Draw without the layout, which takes long."""
    return parts(figure.__wrapped__(data))  # type: ignore[attr-defined]


def parts(drawn: Figure) -> tuple[Axes, Axes, Axes]:
    """Heat-map, histogram and scatter; the colour bar comes last."""
    heat, volume, distance, *_ = (axes for axes in drawn.axes if axes.get_label() != "<colorbar>")
    return heat, volume, distance


@pytest.fixture(scope="module")
def pachinko_like() -> Figure:
    data = made_up(120, 100, name="cifar100")
    drawn = figure(data, PAPER["cifar100"])
    drawn.draw_without_rendering()
    return drawn


def test_heat_map_shows_the_share_of_every_class_sorted_by_dominant_class() -> None:
    counts = np.array([[0, 1, 3], [8, 2, 0], [0, 0, 5], [0, 9, 1]])
    data = describe(counts, ["a", "b", "c", "d"])
    heat, _, _ = panels(data)
    shown = heat.images[0].get_array()
    # Dominant classes 0, 1, 2, 2; of the last two the purer one first.
    np.testing.assert_allclose(
        np.ma.filled(shown, 0.0), [[0.8, 0.2, 0], [0, 0.9, 0.1], [0, 0, 1], [0, 0.25, 0.75]]
    )
    assert np.ma.getmaskarray(shown)[0].tolist() == [False, False, True]
    assert [text.get_text() for text in heat.get_yticklabels()] == ["b", "d", "c", "a"]
    assert [text.get_text() for text in heat.get_xticklabels()] == ["0", "1", "2"]


@pytest.mark.parametrize(("classes", "scale"), [(2, "linear"), (6, "logarithmic")])
def test_a_few_classes_have_a_linear_scale(classes: int, scale: str) -> None:
    heat, _, _ = panels(made_up(30, classes))
    assert heat.get_title(loc="right") == f"white: absent; {scale} scale"
    [image] = heat.images
    halfway = image.norm(0.5 * image.norm.vmax)
    assert (halfway == pytest.approx(0.5)) == (scale == "linear")


def test_many_clients_are_averaged_and_the_axis_says_so() -> None:
    data = made_up(3 * MOST_ROWS - 1, 4, volume=20)
    heat, _, distance = panels(data)
    shown = np.ma.filled(heat.images[0].get_array(), 0.0)
    assert shown.shape == (MOST_ROWS, 4)
    np.testing.assert_allclose(shown.sum(axis=1), 1.0)
    assert "each row is the mean of 3" in heat.get_ylabel()
    assert heat.get_ylim() == (3 * MOST_ROWS - 1, 0)
    # Whoever is averaged in one panel is a point in the other.
    assert len(distance.collections[0].get_offsets()) == 3 * MOST_ROWS - 1


def test_histogram_counts_every_client_once() -> None:
    rng = np.random.default_rng(0)
    for volumes in (rng.integers(20, 300, 200), rng.integers(1, 10_000, 200)):
        counts = np.stack([volumes, np.zeros_like(volumes)], axis=1)
        data = describe(counts, [str(i) for i in range(len(volumes))])
        _, axes, _ = panels(data)
        bars = axes.containers[0]
        assert sum(bar.get_height() for bar in bars) == len(volumes)
        assert axes.get_xlabel() == "volume in examples"
    assert axes.get_xscale() == "log"


def test_scatter_holds_clients_and_what_the_paper_printed(pachinko_like: Figure) -> None:
    data = made_up(120, 100, name="cifar100")
    _, _, axes = parts(pachinko_like)
    expected = [(row["entropy"], row["kl"]) for row in data["clients"]]
    np.testing.assert_allclose(axes.collections[0].get_offsets(), expected)
    assert "paper, mean ± sd" in axes.get_legend_handles_labels()[1]
    assert axes.get_xlabel() == "entropy / ln(all classes)"
    assert axes.get_ylabel() == "KL from all clients (nats)"


def test_texts_stay_inside_and_do_not_overlap(pachinko_like: Figure) -> None:
    edge = pachinko_like.bbox
    for axes in parts(pachinko_like):
        heads = [axes.title, axes._left_title, axes._right_title]  # type: ignore[attr-defined]
        boxes = [head.get_window_extent() for head in heads if head.get_text()]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
        boxes += [axes.xaxis.label.get_window_extent(), axes.yaxis.label.get_window_extent()]
        assert all(box.x0 >= edge.x0 and box.x1 <= edge.x1 for box in boxes)
        assert all(box.y0 >= edge.y0 and box.y1 <= edge.y1 for box in boxes)


@pytest.mark.parametrize("counts", [[[3]], [[5, 5, 5]] * 40, [[1, 0, 0], [0, 0, 10**6]]])
def test_poor_data_can_be_drawn(counts: list[list[int]]) -> None:
    data = describe(counts, [f"${i}$" for i in range(len(counts))], name="a $ and $\\x$")
    figure(data, PAPER["emnist62"]).draw_without_rendering()


def test_odd_characters_are_shown() -> None:
    """A whole vocabulary has room on the axis, and one sees its white space."""
    letters = [chr(code) for code in range(ord("A"), ord("A") + 60)]
    labels = [" ", "\n", "\t", "$", "[", "\x00", "é", *letters]
    data = describe(np.ones((2, 67), int), ["a", "b"], unit="characters", labels=labels)
    drawn = figure(data)
    drawn.draw_without_rendering()
    shown = [text.get_text() for text in parts(drawn)[0].get_xticklabels()]
    assert shown == ["␣", "↵", "⇥", "$", "[", r"\x00", "é", *letters]


def test_a_table_without_the_paper_or_deviations() -> None:
    data = describe(np.array([[3, 1]]), ["[bold]me[/bold]"], name="[red]mine")
    text = printed(description(data, None, 200))
    assert "paper" not in text
    assert "±" not in text.partition("volume")[2]
    assert "[bold]me[/bold]" in text
    assert "[red]mine: 1 client" in text
    assert "75.0 % (0)" in text


def test_files_hold_everything_and_a_report_draws_the_same_figure(tmp_path: Path) -> None:
    labels = [" ", "\n", ","]
    counts = np.array([[3, 1, 0], [0, 4, 0], [0, 0, 2]])
    names = ["a,b", 'c "d"', "é"]
    data = describe(counts, names, labels=labels, name="mnist-by-writer")
    write_description(data, PAPER["emnist62"], tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(DESCRIPTION)
    with (tmp_path / "new" / "heterogeneity.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == names
    assert [row["dominant_class"] for row in rows] == labels
    assert [float(row["kl"]) for row in rows] == [row["kl"] for row in data["clients"]]
    assert json.loads((tmp_path / "new" / "heterogeneity.json").read_text()) == data
    charts = figures.draw(read([tmp_path]), [])
    assert set(charts) == {"heterogeneity"}
    kept = (tmp_path / "new" / "heterogeneity.svg").read_bytes()
    assert figures.rendered(charts["heterogeneity"], "svg") == kept


def test_tables_put_every_data_set_and_client_beside_the_papers() -> None:
    """The numbers of the second client are told by hand: 3 of one class and 1 of another."""
    counts = np.array([[2, 2, 0, 0], [3, 1, 0, 0]])
    ours = describe(counts, names=["a", "b"], name="cifar100")
    other = describe(counts, names=["a", "b"], name="mine")
    together = side_by_side([ours, other])
    assert [row[0].text for row in together.rows] == ["cifar100", "paper: CIFAR-100", "mine"]
    assert together.rows[1][2].text == "100 ± 0"
    assert [record["volume_mean"] for record in together.records] == [4.0, 100, 4.0]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in client_by_client(ours).rows}
    # Entropy (ln 4 - 3/4 ln 3) / ln 4; KL of (3/4, 1/4) from the pooled (5/8, 3/8).
    assert rows["b"] == ["4", "2", "0.406", "0.625", "0.035", "75.0 % (0)"]
    assert rows["paper: 435"] == ["100", "18", "0.430", NONE, "1.730", "48.0 %"]
    assert [row[0].text for row in client_by_client(other).rows] == ["a", "b"]
