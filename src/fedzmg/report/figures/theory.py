"""Figures of the checks of ``fedzmg theory``, from their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedzmg.report.figures.style import (
    COLOURS,
    DASHES,
    DOTTED,
    PAPER,
    QUIET_INK,
    Chart,
    styled,
    use_log_scale,
)

BLUE, RED, GREEN, PINK, BLACK, ORANGE, SKY = COLOURS
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


class Stroke(NamedTuple):
    """Line style of a series."""

    colour: str
    dash: Any = "solid"
    width: float = 1.6
    marker: str = ""
    label: str = ""
    """Label in the legend, if it is not the name of the series."""


class Plot(NamedTuple):
    """Axes and series of a check."""

    title: str
    xlabel: str
    ylabel: str
    strokes: Mapping[str, Stroke]
    """Drawn series in this order; others are left out."""
    log_x: bool = True
    log_y: bool = True
    slope: float | None = None
    """Slope of a guide under the first series."""
    gap: tuple[str, str] | None = None
    """Two series whose quotient at the end is written between them."""
    percent: bool = False
    from_zero: bool = False
    whole: bool = False
    """True if the horizontal axis has whole numbers only."""


_STEPS = "steps t"
CHARTS: dict[str, Plot] = {
    "T3": Plot(
        "Variance that projection removes", "share of the noise along 1 (intensity noise)",
        "share removed",
        {
            "rho + (1 - rho)/d": Stroke(BLACK, DASHES[1], 1.2, "", "\u03c1 + (1 \u2212 \u03c1)/d"),
            "measured": Stroke(BLUE, "none", marker="o"),
        },
        log_x=False, log_y=False, percent=True, from_zero=True,
    ),
    "T5": Plot(
        "Convergence when the condition on the start holds", _STEPS, "E |w \u2212 w*|²",
        {
            "FedZMG": Stroke(BLUE, label="FedZMG, measured"),
            "FedAvg": Stroke(RED, label="FedAvg, measured"),
            "FedZMG, exact": Stroke(BLUE, "none", marker="o", label="FedZMG, exact expectation"),
            "FedAvg, exact": Stroke(RED, "none", marker="s", label="FedAvg, exact expectation"),
        },
        slope=-1.0,
    ),
    "T6": Plot(
        "Where FedZMG goes from another start", _STEPS, "expected squared distance",
        {
            "FedZMG to w*": Stroke(SKY, width=3.0, label="FedZMG to the optimum"),
            "predicted |w_c - w*|^2": Stroke(BLACK, DASHES[1], 1.1, label="predicted distance"),
            "FedAvg to w*": Stroke(RED, DASHES[2], label="FedAvg to the optimum"),
            "FedZMG to w_c": Stroke(BLUE, label="FedZMG to the optimum on its hyperplane"),
        },
    ),
    "T7": Plot(
        "Weight decay wears the sum away", _STEPS, "1'w",
        {
            "1'w_t": Stroke(SKY, width=3.0, label="measured"),
            "product": Stroke(BLACK, DASHES[1], 1.1, "", "1'w at first \u00d7 Π (1 \u2212 λ n)"),
        },
        log_y=False, from_zero=True,
    ),
    "T9": Plot(
        "Logistic regression from w = 0", _STEPS, "loss above",
        {
            "FedZMG to F*": Stroke(SKY, width=3.0, label="FedZMG above F*"),
            "FedAvg to F*": Stroke(RED, DASHES[2], label="FedAvg above F*"),
            "FedZMG to F(w_c)": Stroke(BLUE, label="FedZMG above F(w_c)"),
        },
    ),
    "T10": Plot(
        "The theorem's bound and what is measured", _STEPS, "E |w \u2212 w*|²",
        {
            "FedAvg's bound": Stroke(RED, DASHES[1]),
            "FedZMG's bound": Stroke(BLUE, DOTTED, 2.6),
            "bound on the hyperplane": Stroke(GREEN, DASHES[2], 1.2),
            "FedAvg": Stroke(RED, label="FedAvg, measured"),
            "FedZMG": Stroke(BLUE, DASHES[1], label="FedZMG, measured"),
        },
        gap=("FedZMG's bound", "FedZMG"),
    ),
    "T12": Plot(
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
    "E6": Plot(
        "Weight decay forgets the start", _STEPS, "|1'w|",
        {"sum +12": Stroke(BLUE, label="start with sum +12"),
         "sum -24": Stroke(RED, DASHES[1], label="start with sum \u221224")}, slope=-1.0,
    ),
    "E7": Plot(
        "A network: what vanishes and what stays", "steps", "norm",
        {"|grad F|": Stroke(RED, label="gradient"),
         "|Phi grad F|": Stroke(BLUE, label="projected gradient")}, log_x=False,
    ),
}  # fmt: skip

LEADS = {
    "T3": "Isotropic noise loses 1/d. The gain is large only where the noise is an intensity "
    "shift.",
    "T5": "Both fall like 1/t. Marks: the exact expectation, by a recursion of mean and "
    "covariance.",
    "T5-gain": "A twelfth of the noise, which is what isotropic noise has along 1.",
    "T6": "FedZMG stays away from the optimum by what is predicted, and converges to the optimum "
    "on the hyperplane through its start.",
    "T7": "The sum that the proof needs to be constant follows the product of (1 - λ n).",
    "T8": "Bars: no shift, shifted optima, gradients shifted by a constant.",
    "T9": "The loss stays above its minimum by the gap to the constrained minimum.",
    "T10": "The bound is true, and far from what happens.",
    "T10-terms": "Projection changes only the last term.",
    "T12": "The first layer sees a white background, so most of its gradient is mean.",
    "E6": "Whatever sum a start has, it dies like a power of t.",
    "E7": "The projected gradient vanishes; the rest of the gradient stays.",
    "E8": "A mark is a Hessian.",
}
"""Captions by figure."""


def theory(finding: Mapping[str, Any]) -> dict[str, Chart]:
    """Draw the figures of a finding, by the names of their files; none for one without curves."""
    name, series = str(finding["id"]), finding["series"]
    out = {}
    if name in CHARTS and series:
        out[name] = _lines(CHARTS[name], series, LEADS.get(name, ""))
    if name in _OTHERS and series:
        key, draw = _OTHERS[name]
        out[key] = draw(series, LEADS.get(key, ""))
    return out


@styled
def _lines(plot: Plot, series: Series, caption: str) -> Chart:
    figure = Chart(plot.title, caption, (7.0, 3.9))
    axes = figure.body.add_subplot()
    for name, stroke in plot.strokes.items():
        if name in series:
            (line,) = axes.plot(
                *series[name], color=stroke.colour, linestyle=stroke.dash, linewidth=stroke.width,
                marker=stroke.marker, markersize=5.0, label=stroke.label or name,
                markerfacecolor=PAPER if stroke.marker and plot.log_y else stroke.colour,
            )  # fmt: skip
            figure.tag(line, stroke.label or name)
    if plot.log_x:
        use_log_scale(axes, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=plot.whole))
    if plot.log_y:
        use_log_scale(axes, "y")
    if plot.gap is not None:
        _gap(axes, *(series[name] for name in plot.gap))
    if plot.slope is not None:
        _guide(axes, series[next(iter(plot.strokes))], plot.slope)
    if plot.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if plot.from_zero:
        axes.set_ylim(bottom=0.0)
    axes.grid()
    axes.set_xlabel(plot.xlabel)
    axes.set_ylabel(plot.ylabel)
    if len(plot.strokes) > 1:
        _legend(figure)
    return figure


def _legend(figure: Chart, columns: int = 2) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    legend = figure.body.legend(handles, labels, loc="outside lower center", ncols=columns)
    figure.tag_legend(legend, [str(label) for label in labels])


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
    """Draw a straight line of known slope under the end of a curve."""
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


@styled
def _ratio(series: Series, caption: str) -> Chart:
    """Draw the quotient of the two curves."""
    x, zmg = series["FedZMG"]
    quotient = [a / b for a, b in zip(zmg, series["FedAvg"][1], strict=True)]
    figure = Chart("What projection gains when noise is isotropic", caption, (7.0, 3.0))
    axes = figure.body.add_subplot()
    axes.grid()
    axes.plot(x, quotient, color=BLUE, linewidth=1.6, label="FedZMG / FedAvg, measured")
    axes.axhline(11 / 12, color=BLACK, linestyle=DASHES[1], linewidth=1.1,
                 label="(d \u2212 1)/d, d = 12")  # fmt: skip
    use_log_scale(axes, "x")
    axes.set_ylim(0.0, 1.1 * max(1.0, *quotient))
    axes.set_xlabel(_STEPS)
    axes.set_ylabel("quotient of E |w \u2212 w*|²")
    _legend(figure, 2)
    return figure


def _bars(figure: Chart, groups: Sequence[str], rows: Mapping[str, Sequence[float]]) -> Axes:
    """Draw groups of bars with their values above them; ``rows`` has a value per group."""
    axes = figure.body.add_subplot()
    axes.grid(axis="y")
    width = 0.8 / len(rows)
    for i, ((label, values), colour) in enumerate(
        zip(rows.items(), (RED, BLUE, GREEN), strict=False)
    ):
        centres = [x + width * (i - (len(rows) - 1) / 2) for x in range(len(groups))]
        axes.bar(centres, values, 0.9 * width, color=colour, label=label)
        for x, value in zip(centres, values, strict=True):
            text = f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"
            axes.annotate(text, (x, value), (0, 3), ha="center", textcoords="offset points",
                          fontsize=8.0)  # fmt: skip
    axes.set_xticks(range(len(groups)), groups)
    return axes


@styled
def _drift_bars(series: Series, caption: str) -> Chart:
    """Draw the spread of the clients' models, without and with projection."""
    figure = Chart("Spread of the clients' models after one round", caption, (7.0, 3.4))
    pairs = zip(*(values for _, values in series.values()), strict=True)
    axes = _bars(figure, list(series), dict(zip(("FedAvg", "FedZMG"), pairs, strict=True)))
    axes.set_ylabel("spread")
    _legend(figure)
    return figure


@styled
def _term_bars(series: Series, caption: str) -> Chart:
    """Draw the three terms of the constant on a logarithmic axis."""
    rows = {
        "FedAvg": series["terms of FedAvg's C"][1],
        "FedZMG": series["terms of C"][1],
        "FedZMG, constants of the hyperplane": series["terms of C on the hyperplane"][1],
    }
    figure = Chart("The terms of the theorem's constant C", caption, (7.0, 3.6))
    axes = _bars(figure, ("6 L Γ", "8 (E \u2212 1)² G²", "noise"), rows)
    use_log_scale(axes, "y")
    axes.set_ylim(bottom=0.1, top=4.0 * max(map(max, rows.values())))
    axes.set_ylabel("value")
    _legend(figure, 3)
    return figure


@styled
def _curvature_ratios(series: Series, caption: str) -> Chart:
    """Draw the ratio of the largest curvatures at every point of every problem."""
    figure = Chart("Largest curvature with projection, of that without", caption, (7.0, 2.6))
    axes = figure.body.add_subplot()
    axes.grid()
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
    return figure


_OTHERS: dict[str, tuple[str, Callable[[Series, str], Chart]]] = {
    "T5": ("T5-gain", _ratio),
    "T8": ("T8", _drift_bars),
    "T10": ("T10-terms", _term_bars),
    "E8": ("E8", _curvature_ratios),
}
