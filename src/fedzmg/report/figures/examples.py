"""Picture of a few clients' examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedzmg.report.figures.style import Chart, styled, wrapped


@styled
def examples(
    title: str,
    clients: Sequence[str],
    images: Sequence[npt.NDArray[np.uint8]],
    labels: Sequence[Sequence[str]],
) -> Chart:
    """Draw one row of images per client, with labels above them.

    Args:
        title: headline.
        clients: name of each row.
        images: for each client, ``[n, height, width]`` grey or ``[n, 3, height, width]`` colour.
        labels: for each client, one text per image.
    """
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
