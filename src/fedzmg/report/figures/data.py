"""Figures of data: how much clients differ, from ``heterogeneity.json``, and some examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from fedzmg.report.figures import style
from fedzmg.report.figures.style import Chart, styled, use_log_scale, wrapped
from fedzmg.report.tables.heterogeneity import divisor, origin, spread_text, visible, who

MOST_ROWS = 500  # rows of the heat map; more clients are averaged in groups of neighbours
FEW_CLASSES = 5  # classes up to which shares are drawn on a linear scale
_NAMED_ROWS = 30
_NAMED_CHARACTERS = 80
_WIDE_RANGE = 50
# Without the lightest tones, which look white.
_SHADES = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.13, 1.0, 256)))
_FAINTEST = 1e-3  # share of the largest value below which shades do not differ


@styled
def heterogeneity(report: Mapping[str, Any], paper: Mapping[str, Any] | None = None) -> Chart:
    """Draw who holds which classes, how much they hold, and how far they are from the whole."""
    title = f"Heterogeneity of {report['name']}" if report["name"] else "Heterogeneity"
    chart = Chart(f"{title}: {who(report)}", size=(10.5, 5.6))
    grid = chart.body.add_gridspec(2, 2, width_ratios=(1.75, 1.0))
    _draw_classes(chart, chart.body.add_subplot(grid[:, 0]), report)
    _draw_volume(chart.body.add_subplot(grid[0, 1]), report)
    _draw_distance(chart.body.add_subplot(grid[1, 1]), report, paper)
    return chart


def _column(report: Mapping[str, Any], measure: str) -> NDArray[np.float64]:
    return np.array([row[measure] for row in report["clients"]], dtype=np.float64)


def _draw_classes(chart: Chart, axes: Axes, report: Mapping[str, Any]) -> None:
    """Draw the share of every class at every client, sorted by dominant class."""
    counts = np.array(report["counts"], dtype=np.float64)
    shares = counts / counts.sum(axis=1, keepdims=True)
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    merged = -(-len(order) // MOST_ROWS)
    starts = range(0, len(order), merged)
    image = np.array([shares[order[start : start + merged]].mean(axis=0) for start in starts])
    few, highest = image.shape[1] <= FEW_CLASSES, float(image.max())
    # Even shares would leave a logarithmic scale without any extent.
    faintest = min(max(float(image[image > 0].min()), _FAINTEST * highest), 0.5 * highest)
    norm = Normalize(0.0, 1.0) if few else LogNorm(faintest, highest)
    drawn = axes.imshow(
        np.ma.masked_equal(image, 0.0), aspect="auto", interpolation="nearest", cmap=_SHADES,
        norm=norm, extent=(-0.5, image.shape[1] - 0.5, len(order), 0.0),
    )  # fmt: skip
    bar = chart.body.colorbar(drawn, ax=axes, pad=0.015, fraction=0.04, aspect=40)
    bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    if not few:
        bar.ax.yaxis.set(minor_formatter="", major_locator=LogLocator(subs=(1, 2, 5), numticks=12))
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    what = "characters" if report["unit"] == "characters" else "labels"
    scale = "linear" if few else "logarithmic"
    _head(axes, f"Share of {what} at each client", f"white: absent; {scale} scale")
    labels = [visible(label) for label in report["labels"]]
    if sum(map(len, labels)) <= _NAMED_CHARACTERS:
        axes.set_xticks(range(len(labels)), labels, fontsize=8.0 if len(labels) <= 30 else 6.0)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    ylabel = "client, by dominant class"
    if len(order) <= _NAMED_ROWS:
        names = [report["clients"][i]["client"] for i in order]
        # Shortened in the middle: roles of a play differ at the end.
        names = [name if len(name) <= 18 else f"{name[:7]}…{name[-10:]}" for name in names]
        axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=7)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        ylabel += f"; each row is the mean of {merged}" if merged > 1 else ""
    axes.set(xlabel="class", ylabel=ylabel)
    axes.tick_params(length=2)
    axes.spines[:].set_visible(False)


def _draw_volume(axes: Axes, report: Mapping[str, Any]) -> None:
    volume, summary = _column(report, "volume"), report["summary"].get("volume")
    low, high = float(volume.min()), float(volume.max())
    note = f"mean ± sd: {spread_text('volume', summary)}" if summary else ""
    number = int(np.clip(2 * np.sqrt(len(volume)), 5, 30))
    # Whole numbers per bin: otherwise some bins hold more of them than their neighbours.
    width = np.ceil((high - low + 1) / number)
    bins = np.arange(low - 0.5, high + width, width)
    if low == high:
        bins, note = np.array([0.95 * low, 1.05 * low]), f"every client holds {low:,.0f}"
        axes.set_xlim(0.5 * low, 1.5 * low)
    elif high >= _WIDE_RANGE * low:
        bins = np.geomspace(low, high * 1.0001, number + 1)
        use_log_scale(axes, "x")
    axes.hist(volume, bins.tolist(), color=style.COLOURS[0], edgecolor=style.PAPER, linewidth=0.4)
    axes.set(xlabel=f"volume in {report['unit']}", ylabel="clients")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axes.grid(linewidth=0.6)
    _head(axes, "Volume", note)


def _draw_distance(axes: Axes, report: Mapping[str, Any], paper: Mapping[str, Any] | None) -> None:
    """Draw the entropy of every client against its distance from the whole."""
    entropy, kl = _column(report, "entropy"), _column(report, "kl")
    many = len(entropy) > 100
    axes.scatter(
        entropy, kl, s=7 if many else 18, color=style.COLOURS[0], alpha=0.35 if many else 0.7,
        linewidths=0, label="client", zorder=2, rasterized=len(entropy) > 1000,
    )  # fmt: skip
    axes.set(xlabel=f"entropy / {divisor(report)}", ylabel=f"KL from {origin(report)} (nats)")
    axes.grid(linewidth=0.6)
    note = ""
    if paper is not None:
        colour, (mean, sd) = style.COLOURS[1], paper["summary"]["entropy"]
        if "kl" in paper["summary"]:
            note = f"paper: KL from its {paper['sample']} clients"
            height, height_sd = paper["summary"]["kl"]
            axes.errorbar(
                mean, height, xerr=sd, yerr=height_sd, color=colour, linewidth=1.3, capsize=2.5,
                zorder=3, label="paper, mean ± sd",
            )  # fmt: skip
        else:
            axes.axvspan(mean - sd, mean + sd, color=colour, alpha=0.12, linewidth=0, zorder=1)
            label = "paper's entropy, mean ± sd"
            axes.axvline(mean, color=colour, linewidth=1.2, zorder=1, label=label)
        # Below the axes: clients may lie anywhere inside.
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.45, -0.24), ncols=3, fontsize=7, borderpad=0,
            borderaxespad=0, handletextpad=0.4, columnspacing=1.4,
        )  # fmt: skip
    _head(axes, "Entropy and KL", note)


def _head(axes: Axes, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.0, fontweight="bold", pad=4)
    axes.set_title(note, loc="right", fontsize=8.0, color=style.QUIET_INK, pad=4)
    axes.tick_params(labelsize=8, length=3)


@styled
def examples(
    title: str, clients: Sequence[str], images: Sequence[NDArray[np.uint8]],
    labels: Sequence[Sequence[str]],
) -> Chart:  # fmt: skip
    """Draw a row of images per client: ``[n, height, width]`` grey, ``[n, 3, ...]`` colour."""
    columns = max((len(row) for row in images), default=1)
    chart = Chart(title, size=(1.6 + 0.75 * columns, 0.7 + 0.85 * len(clients)))
    grid = chart.body.subplots(len(clients), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for row, name, some, texts in zip(grid, clients, images, labels, strict=True):
        row[0].text(
            -0.15, 0.5, wrapped(name, 18), transform=row[0].transAxes, ha="right", va="center",
            fontsize=8.0,
        )  # fmt: skip
        for axes, image, text in zip(row, some, texts, strict=False):
            pixels = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.set_title(text, fontsize=7.0, pad=2.0)
    return chart
