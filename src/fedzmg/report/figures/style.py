"""Common look of all figures, and their files: the same data give the same bytes."""

import contextlib
import functools
import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator
from numpy.typing import ArrayLike

from fedzmg.experiment.progress import Silent
from fedzmg.experiment.training import deferred_interrupt
from fedzmg.plain_text import printable
from fedzmg.report.writing import write
from fedzmg.results.formatting import is_share, signed_text

# Okabe and Ito's palette, safe under all common colour blindness, without yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")
# Seven colours, five dash patterns and seven markers: styles repeat only after 245 series.
DASHES: tuple[Any, ...] = (
    "solid", (0, (5.0, 1.6)), (0, (6.0, 1.6, 1.2, 1.6)), (0, (1.2, 1.2)),
    (0, (9.0, 1.6, 1.2, 1.6, 1.2, 1.6)),
)  # fmt: skip
MARKERS = ("", "o", "s", "^", "D", "v", "P")
DOTTED = (0, (1.0, 2.2))
INK, QUIET_INK, GRID, GHOST, PAPER = "#222222", "#6b6b6b", "#e4e4e4", "#dddddd", "#ffffff"
# The default settings first: a user's matplotlibrc must not change a figure.
STYLE = ["default", str(Path(__file__).with_name("fedzmg.mplstyle"))]
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
FORMATS = tuple(_METADATA)
Size = tuple[float, float]  # width and height in inches
COLUMNS = 4
MOST_IN_ONE_PANEL = 10  # series up to which one panel has them all
WIDE_LABEL = 28  # characters of a label beyond which a legend moves below the axes
_LEGEND_ROWS = 22
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_Arguments = ParamSpec("_Arguments")
_Drawn = TypeVar("_Drawn", "Chart", "Chart | None")


class Series(NamedTuple):
    """A named part of a figure that the page can highlight."""

    label: str
    points: Sequence[str] = ()  # text of every vertex, shown under the pointer
    legend: bool = False


class Chart(Figure):
    """A figure with a headline, and a caption that only the page shows; sizes are in inches."""

    def __init__(self, title: str, caption: str = "", size: Size = (6.4, 4.0)) -> None:
        lines = wrapped(title, int(9.5 * size[0]))
        height = size[1] + 0.17 * lines.count("\n")
        super().__init__(figsize=(size[0], height), layout="constrained", facecolor=PAPER)
        FigureCanvasAgg(self)
        self.body = self.add_subfigure(self.add_gridspec(1, 1)[0])
        self.title, self.caption = title, caption
        self.series: dict[str, Series] = {}
        self.heading = self.suptitle(lines, x=0.01, ha="left", fontsize=11.0, fontweight="bold")
        self.heading.set_gid("heading")

    def tag(
        self, artist: Artist, label: str, points: Sequence[str] = (), *, legend: bool = False
    ) -> None:
        """Give an artist an identifier by which the page finds it."""
        key = f"series{len(self.series)}"
        artist.set_gid(key)
        self.series[key] = Series(label, points, legend)

    def panel(self, xlabel: str, ylabel: str, metric: str = "") -> Axes:
        """Add axes with a grid; the metric is on the vertical one."""
        axes = self.body.add_subplot()
        axes.grid()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        format_axis(axes, metric)
        return axes

    def small_panels(self, titles: list[str], xlabel: str, ylabel: str, metric: str) -> list[Axes]:
        number, rows = len(titles), -(-len(titles) // COLUMNS)
        grid = self.body.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
        for axes in grid[number:]:
            axes.set_visible(False)
        for axes, title in zip(grid, titles, strict=False):
            axes.grid(linewidth=0.6)
            axes.tick_params(labelsize=7)
            format_axis(axes, metric)
            axes.set_title(wrapped(title, 30), loc="left", fontsize=8.5, fontweight="bold", pad=3)
        # Panels above the gaps of a short last row keep their tick labels.
        for axes in grid[max(0, number - COLUMNS) : number]:
            axes.tick_params(labelbottom=True)
        self.body.supxlabel(xlabel, fontsize=9.0)
        self.body.supylabel(ylabel, fontsize=9.0)
        return list(grid[:number])

    def curve(
        self, axes: Axes, x: ArrayLike, y: ArrayLike, label: str, position: int,
        texts: Sequence[str] = (), band: tuple[ArrayLike, ArrayLike] | None = None, **style: Any,
    ) -> Line2D:  # fmt: skip
        """Draw a line and the band around it, in the style of a position among all series."""
        number = np.size(x)
        style = {"linewidth": 1.6, "markevery": -(-number // 8), **line_style(position), **style}
        if number == 1:
            style["marker"] = style["marker"] or "o"
        (line,) = axes.plot(x, y, **style)
        self.tag(line, label, texts)
        if band is not None:
            filled = axes.fill_between(x, *band, color=style["color"], alpha=0.14, linewidth=0.0)
            self.tag(filled, label)
        return line

    def name_series(
        self, handles: Sequence[Artist], labels: Sequence[str], *, below: bool = False
    ) -> None:
        """Draw a legend right of the axes, or below them, as always if labels are long."""
        if not below and max(map(len, labels)) <= WIDE_LABEL:
            columns = -(-len(labels) // _LEGEND_ROWS)
            legend = self.body.legend(handles, labels, loc="outside right upper", ncols=columns)
        else:
            room = int(13.0 * self.get_figwidth())
            lines = [wrapped(label, room) for label in labels]
            longest = max(len(line) for text in lines for line in text.split("\n"))
            columns = max(1, room // (longest + 9))
            rows = -(-len(lines) // columns) * max(1 + text.count("\n") for text in lines)
            self.set_figheight(self.get_figheight() + 0.19 * rows)
            legend = self.body.legend(handles, lines, loc="outside lower left", ncols=columns)
        self.tag_legend(legend, labels)

    def tag_legend(self, legend: Legend, labels: Sequence[str]) -> None:
        handles, texts = legend.legend_handles, legend.get_texts()
        for handle, text, label in zip(handles, texts, labels, strict=True):
            if handle is not None:
                self.tag(handle, label, legend=True)
            self.tag(text, label, legend=True)


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Draw in the common style, and defer Ctrl-C: matplotlib turns it into errors of its own."""
    with (
        matplotlib.style.context(STYLE), warnings.catch_warnings(),
        deferred_interrupt(Silent()) as pressed,
    ):  # fmt: skip
        # A letter that the font lacks is a box in a PNG.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield
    if pressed.is_set():
        raise KeyboardInterrupt


def styled(draw: Callable[_Arguments, _Drawn]) -> Callable[_Arguments, _Drawn]:
    """Run a drawing function in the common style and lay out its figure once."""

    @functools.wraps(draw)
    def drawn(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Drawn:
        with _drawing():
            figure = draw(*args, **kwargs)
            if figure is not None and (engine := figure.get_layout_engine()) is not None:
                _remove_controls(figure)
                engine.execute(figure)
                figure.set_layout_engine("none")
            return figure

    return drawn


def _remove_controls(figure: Figure) -> None:
    """Remove control characters from all texts: no font has them, and SVG forbids them."""
    for artist in figure.findobj():
        if isinstance(artist, Text):
            artist.set_text(printable(artist.get_text()))
        elif isinstance(artist, Axis) and isinstance(artist.get_major_locator(), FixedLocator):
            # Texts of ticks are set again by every drawing.
            artist.set_ticklabels([printable(one.get_text()) for one in artist.get_ticklabels()])


def wrapped(text: str, characters: int) -> str:
    """Break a text into lines of at most so many characters."""
    return "\n".join(textwrap.wrap(text, max(characters, 8))) or text


def line_style(position: int) -> dict[str, Any]:
    """Return colour, dashes and marker of a series, distinct for the first 245."""
    marker = MARKERS[position // (len(COLOURS) * len(DASHES)) % len(MARKERS)]
    colour, dashes = COLOURS[position % len(COLOURS)], DASHES[position % len(DASHES)]
    return {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 3.6}


def format_axis(axes: Axes, metric: str, *, vertical: bool = True, signed: bool = False) -> None:
    """Write the ticks of an axis in percent, or in points if signed, if the metric is a share."""

    def text(value: float, _: float) -> str:
        return signed_text(round(100 * value, 6), ".6g") if signed else f"{100 * value:.6g} %"

    if is_share(metric):
        (axes.yaxis if vertical else axes.xaxis).set_major_formatter(text)


def usual_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the limits of the inner nine tenths, widened by half; None: no need for limits."""
    finite = np.array([value for value in values if math.isfinite(value)])
    if not finite.size:
        return None
    (low, high), (first, last) = np.quantile(finite, (0.05, 0.95)), (finite.min(), finite.max())
    room = 0.5 * (high - low)
    if not room or (first >= low - 5.0 * room and last <= high + 5.0 * room):
        return None
    return float(max(low - room, first)), float(min(high + room, last))


def use_log_scale(axes: Axes, name: str) -> None:
    """Make an axis logarithmic, with powers of ten in plain characters."""

    def text(value: float, _: float) -> str:
        return "10" + str(round(math.log10(value))).translate(_SUPERSCRIPTS) if value > 0 else ""

    axes.set(**{f"{name}scale": "log"})
    getattr(axes, f"{name}axis").set(major_formatter=text, minor_formatter="")


def rendered(figure: Figure, suffix: str) -> bytes:
    """Return the content of a PNG, SVG or PDF file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with _drawing():
        figure.savefig(buffer, format=suffix, dpi=150, metadata=_METADATA[suffix])
    return buffer.getvalue()


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG, below a path without a suffix, and return both paths."""
    # Not with_suffix: a name such as lr0.1 has a dot of its own.
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        write(path, rendered(figure, path.suffix[1:]))
    return paths
