"""How figures for print look, and how they become files that are the same every time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fedzmg.report.writing import write

PNG_DPI = 150
# Okabe and Ito's palette, which keeps apart under all common colour blindness, less its yellow,
# which vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# Five dash patterns against seven colours: the pairs repeat only after 35 curves.
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5.0, 1.6)),
    (0, (6.0, 1.6, 1.2, 1.6)),
    (0, (1.2, 1.2)),
    (0, (9.0, 1.6, 1.2, 1.6, 1.2, 1.6)),
)
DOTTED = (0, (1.0, 2.2))
"""Of a line to be reached."""
INK, QUIET_INK, GRID = "#222222", "#6B6B6B", "#E4E4E4"
# A reader's own settings must not change a figure. What draws it is chosen elsewhere.
STYLE: dict[Any, Any] = {
    **{
        key: value
        for key, value in matplotlib.rcParamsDefault.items()
        if not key.startswith("backend")
    },
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "mathtext.fontset": "dejavusans",
    "text.color": INK,
    "text.usetex": False,
    "axes.edgecolor": QUIET_INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "xtick.color": QUIET_INK,
    "ytick.color": QUIET_INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    # A fixed salt: matplotlib otherwise names the parts of an SVG at random.
    "svg.hashsalt": "fedzmg",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}
# Whatever a file says of its making would differ from day to day or from version to version.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
FORMATS = tuple(_METADATA)


def laid_out(figure: Figure) -> Figure:
    """Lay a figure out once; otherwise every file that is saved does it again, twice."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")
    return figure


def rendered(figure: Figure, suffix: str) -> bytes:
    """The content of a PNG, SVG or PDF file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=suffix, dpi=PNG_DPI, metadata=_METADATA[suffix])
    return buffer.getvalue()


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write a figure as PNG and SVG.

    Each file appears complete or not at all, and saving again gives the same bytes.

    Args:
        figure: The figure.
        stem: Path of the files without their suffix; missing folders are made.

    Returns:
        The paths of the PNG and of the SVG.

    Raises:
        InputError: If one cannot be written.
    """
    # Not with_suffix: a name such as lr0.1 holds a dot that is no suffix.
    png, svg = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg"))
    write(png, rendered(figure, "png"))
    write(svg, rendered(figure, "svg"))
    return png, svg
