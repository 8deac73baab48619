"""Figures of the checks of ``fedzmg theory``, from their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedzmg.report.plots.style import COLOURS, DASHES, DOTTED, GRID, QUIET_INK, STYLE, laid_out

BLUE, RED, GREEN, PINK, BLACK, ORANGE, SKY = COLOURS
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


class Stroke(NamedTuple):
    """How a series is drawn."""

    colour: str
    dash: Any = "solid"
    width: float = 1.6
    marker: str = ""


class Chart(NamedTuple):
    """Lines of a check."""

    title: str
    xlabel: str
    ylabel: str
    strokes: Mapping[str, Stroke]
    """Series that are drawn, in this order; those of other names are left out."""
    log_x: bool = True
    log_y: bool = True
    slope: float | None = None
    """Of a guide under the first series."""
    gap: tuple[str, str] | None = None
    """Two series whose quotient at the end is written between them."""
    percent: bool = False
    from_zero: bool = False
    whole: bool = False
    """Whether the horizontal axis counts."""


_STEPS = "steps t"
CHARTS: dict[str, Chart] = {
    "T3": Chart(
        "Variance that projection removes", "share of the noise along 1 (intensity noise)",
        "share removed",
        {
            "rho + (1 - rho)/d": Stroke(BLACK, DASHES[1], 1.2),
            "measured": Stroke(BLUE, "none", marker="o"),
        },
        log_x=False, log_y=False, percent=True, from_zero=True,
    ),
    "T5": Chart(
        "Convergence when the condition on the start holds", _STEPS, "E |w \u2212 w*|²",
        {
            "FedZMG": Stroke(BLUE),
            "FedAvg": Stroke(RED),
            "FedZMG, exact": Stroke(BLUE, "none", marker="o"),
            "FedAvg, exact": Stroke(RED, "none", marker="s"),
        },
        slope=-1.0,
    ),
    "T6": Chart(
        "Where FedZMG goes from another start", _STEPS, "expected squared distance",
        {
            "FedZMG to w*": Stroke(SKY, width=3.0),
            "predicted |w_c - w*|^2": Stroke(BLACK, DASHES[1], 1.1),
            "FedAvg to w*": Stroke(RED, DASHES[2]),
            "FedZMG to w_c": Stroke(BLUE),
        },
    ),
    "T7": Chart(
        "Weight decay wears the sum away", _STEPS, "1'w",
        {"1'w_t": Stroke(SKY, width=3.0), "product": Stroke(BLACK, DASHES[1], 1.1)}, log_y=False,
        from_zero=True,
    ),
    "T9": Chart(
        "Logistic regression from w = 0", _STEPS, "loss above",
        {
            "FedZMG to F*": Stroke(SKY, width=3.0),
            "FedAvg to F*": Stroke(RED, DASHES[2]),
            "FedZMG to F(w_c)": Stroke(BLUE),
        },
    ),
    "T10": Chart(
        "The theorem's bound and what is measured", _STEPS, "E |w \u2212 w*|²",
        {
            "FedAvg's bound": Stroke(RED, DASHES[1]),
            "FedZMG's bound": Stroke(BLUE, DOTTED, 2.6),
            "bound on the hyperplane": Stroke(GREEN, DASHES[2], 1.2),
            "FedAvg": Stroke(RED),
            "FedZMG": Stroke(BLUE, DASHES[1]),
        },
        gap=("FedZMG's bound", "FedZMG"),
    ),
    "T12": Chart(
        "Energy of the mean component along training", "rounds of FedZMG on digits",
        "share of |gradient|² removed",
        {
            "layer 1, convolution": Stroke(BLUE),
            "layer 2, convolution": Stroke(RED, DASHES[1]),
            "layer 3, dense": Stroke(GREEN, DASHES[2]),
            "layer 4, dense": Stroke(PINK, DASHES[3]),
        },
        log_x=False, log_y=False, percent=True, from_zero=True, whole=True,
    ),
    "E6": Chart(
        "Weight decay forgets the start", _STEPS, "|1'w|",
        {"sum +12": Stroke(BLUE), "sum -24": Stroke(RED, DASHES[1])}, slope=-1.0,
    ),
    "E7": Chart(
        "A network: what vanishes and what stays", "steps", "norm",
        {"|grad F|": Stroke(RED), "|Phi grad F|": Stroke(BLUE)}, log_x=False,
    ),
}  # fmt: skip

_WORDS = {
    "rho + (1 - rho)/d": "\u03c1 + (1 \u2212 \u03c1)/d",
    "FedZMG, exact": "FedZMG, exact expectation",
    "FedAvg, exact": "FedAvg, exact expectation",
    "FedZMG to w_c": "FedZMG to the optimum on its hyperplane",
    "FedZMG to w*": "FedZMG to the optimum",
    "FedAvg to w*": "FedAvg to the optimum",
    "predicted |w_c - w*|^2": "predicted distance of the two optima",
    "FedZMG to F*": "FedZMG above F*",
    "FedAvg to F*": "FedAvg above F*",
    "FedZMG to F(w_c)": "FedZMG above F(w_c)",
    "1'w_t": "measured",
    "product": "1'w at the start \u00d7 Π (1 \u2212 λ n)",
    "sum +12": "start with sum +12",
    "sum -24": "start with sum \u221224",
    "|grad F|": "gradient",
    "|Phi grad F|": "projected gradient",
    "FedAvg": "FedAvg, measured",
    "FedZMG": "FedZMG, measured",
}


def figures(finding: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of a finding, by the name of their file; none for one without curves."""
    name, series = str(finding["id"]), finding["series"]
    out = {}
    if name in CHARTS and series:
        out[name] = _drawn(CHARTS[name], series)
    if name in _OTHERS and series:
        out |= _OTHERS[name](series)
    return out


def _canvas(title: str, height: float = 3.9) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.0, height), dpi=100.0, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11.0, fontweight="bold")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.7)
    return figure, axes


def _drawn(chart: Chart, series: Series) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas(chart.title)
        for name, stroke in chart.strokes.items():
            if name in series:
                axes.plot(
                    *series[name], color=stroke.colour, linestyle=stroke.dash,
                    linewidth=stroke.width, marker=stroke.marker, markersize=5.0,
                    markerfacecolor="white" if stroke.marker and chart.log_y else stroke.colour,
                    label=_WORDS.get(name, name),
                )  # fmt: skip
        if chart.log_x:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=chart.whole))
        if chart.log_y:
            axes.set_yscale("log")
        if chart.gap is not None:
            _gap(axes, *(series[name] for name in chart.gap))
        if chart.slope is not None:
            _guide(axes, series[next(iter(chart.strokes))], chart.slope)
        if chart.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if chart.from_zero:
            axes.set_ylim(bottom=0.0)
        axes.set_xlabel(chart.xlabel)
        axes.set_ylabel(chart.ylabel)
        if len(chart.strokes) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5,
                          handlelength=3.2)  # fmt: skip
        return laid_out(figure)


def _gap(
    axes: Axes,
    upper: tuple[Sequence[float], Sequence[float]],
    lower: tuple[Sequence[float], Sequence[float]],
) -> None:
    """Write how far two curves are apart at the end."""
    x, high, low = upper[0][-1], upper[1][-1], lower[1][-1]
    axes.annotate("", (x, high), (x, low), arrowprops={"arrowstyle": "<->", "color": QUIET_INK})
    times = float(f"{high / low:.2g}")
    axes.annotate(f"about {times:,.0f} times", (x, (high * low) ** 0.5), (-6, 0), ha="right",
                  va="center", textcoords="offset points", color=QUIET_INK,
                  fontsize=9.0)  # fmt: skip


def _guide(axes: Axes, series: tuple[Sequence[float], Sequence[float]], slope: float) -> None:
    """A straight line of known slope under the end of a curve."""
    x, y = series
    ends = (x[-1] / 12.0, x[-1])
    foot = 0.3 * y[-1]
    heights = [foot * (end / x[-1]) ** slope for end in ends]
    axes.plot(ends, heights, color=QUIET_INK, linewidth=1.0)
    middle = (ends[0] * ends[1]) ** 0.5
    text = f"slope {slope:g}".replace("-", "\u2212")
    axes.annotate(text, (middle, foot * (middle / x[-1]) ** slope), (-6, -6),
                  textcoords="offset points", ha="right", va="top", color=QUIET_INK,
                  fontsize=8.5)  # fmt: skip


def _ratio(series: Series) -> dict[str, Figure]:
    """What projection gains: the quotient of the two curves."""
    x, zmg = series["FedZMG"]
    quotient = [a / b for a, b in zip(zmg, series["FedAvg"][1], strict=True)]
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas("What projection gains when noise is isotropic", 3.0)
        axes.plot(x, quotient, color=BLUE, linewidth=1.6, label="FedZMG / FedAvg, measured")
        axes.axhline(11 / 12, color=BLACK, linestyle=DASHES[1], linewidth=1.1,
                     label="(d \u2212 1)/d, d = 12")  # fmt: skip
        axes.set_xscale("log")
        axes.set_ylim(0.0, 1.1 * max(1.0, *quotient))
        axes.set_xlabel(_STEPS)
        axes.set_ylabel("quotient of E |w \u2212 w*|²")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5,
                      handlelength=3.2)  # fmt: skip
        return {"T5-gain": laid_out(figure)}


def _drift_bars(series: Series) -> dict[str, Figure]:
    """Spread of the clients' models, without and with projection."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas("Spread of the clients' models after one round", 3.4)
        for place, (_, values) in enumerate(series.values()):
            for shift, value, colour, label in zip(
                (-0.19, 0.19), values, (RED, BLUE), ("FedAvg", "FedZMG"), strict=True
            ):
                axes.bar(place + shift, value, 0.34, color=colour,
                         label=label if place == 0 else None)  # fmt: skip
                axes.annotate(f"{value:.3g}", (place + shift, value), (0, 3), ha="center",
                              textcoords="offset points", fontsize=8.5)  # fmt: skip
        axes.set_xticks(range(len(series)), list(series))
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("spread")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
        return {"T8": laid_out(figure)}


def _term_bars(series: Series) -> dict[str, Figure]:
    """The three terms of the constant, on a logarithmic axis."""
    rows = {
        "FedAvg": ("terms of FedAvg's C", RED),
        "FedZMG": ("terms of C", BLUE),
        "FedZMG, constants of the hyperplane": ("terms of C on the hyperplane", GREEN),
    }
    terms = ("6 L Γ", "8 (E \u2212 1)² G²", "noise")
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas("The terms of the theorem's constant C", 3.6)
        for i, (label, (key, colour)) in enumerate(rows.items()):
            places = [place + 0.27 * (i - 1) for place in range(len(terms))]
            values = series[key][1]
            axes.bar(places, values, 0.25, color=colour, label=label)
            for place, value in zip(places, values, strict=True):
                text = f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"
                axes.annotate(text, (place, value), (0, 3), ha="center",
                              textcoords="offset points", fontsize=8.0)  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.1, top=4.0 * max(max(series[key][1]) for key, _ in rows.values()))
        axes.set_xticks(range(len(terms)), terms)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("value")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
        return {"T10-terms": laid_out(figure)}


def _curvature_ratios(series: Series) -> dict[str, Figure]:
    """How far projection lowers the largest curvature, every point of every problem."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas("Largest curvature with projection, of that without", 2.6)
        for row, (values, colour) in enumerate(
            zip((y for _, y in series.values()), (BLUE, RED, GREEN), strict=False)
        ):
            axes.plot(values, [row] * len(values), "|", color=colour, markersize=16, alpha=0.6)
        axes.axvline(1.0, color=QUIET_INK, linestyle=DOTTED)
        axes.set_yticks(range(len(series)), list(series))
        axes.set_ylim(len(series) - 0.4, -0.6)
        axes.set_xlim(0.0, 1.05)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("λmax(ΦHΦ) / λmax(H)")
        return {"E8": laid_out(figure)}


_OTHERS: dict[str, Callable[[Series], dict[str, Figure]]] = {
    "T5": _ratio,
    "T8": _drift_bars,
    "T10": _term_bars,
    "E8": _curvature_ratios,
}
