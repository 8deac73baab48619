"""A few clients' examples, to look at."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedzmg.report.plots.style import STYLE


def figure(
    title: str,
    clients: Sequence[str],
    images: Sequence[npt.NDArray[np.uint8]],
    labels: Sequence[Sequence[str]],
) -> Figure:
    """One row of images for each client, their labels above them.

    Args:
        title: what is shown.
        clients: name of each row.
        images: for each client, ``[n, height, width]`` grey or ``[n, 3, height, width]`` colour.
        labels: for each client, one text per image.
    """
    columns = max((len(row) for row in images), default=1)
    with matplotlib.rc_context(STYLE):
        canvas = Figure(
            figsize=(1.6 + 0.75 * columns, 0.7 + 0.85 * len(clients)),
            dpi=100.0,
            facecolor="white",
            layout="constrained",
        )
        FigureCanvasAgg(canvas)
        canvas.suptitle(title, x=0.012, ha="left", fontsize=11.0, fontweight="bold")
        grid = canvas.subplots(len(clients), columns, squeeze=False)
        for row, (name, some) in enumerate(zip(clients, images, strict=True)):
            for column in range(columns):
                axes = grid[row, column]
                axes.set_axis_off()
                if column == 0:
                    axes.text(
                        -0.15, 0.5, name, transform=axes.transAxes, ha="right", va="center",
                        fontsize=8.0,
                    )  # fmt: skip
                if column < len(some):
                    image = np.moveaxis(some[column], 0, -1) if some.ndim == 4 else some[column]
                    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                    axes.set_title(labels[row][column], fontsize=7.0, pad=2.0)
    return canvas
