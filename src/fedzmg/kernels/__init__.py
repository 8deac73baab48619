"""Kernels of layers, whose choice changes speed and the last bits, never the result."""

from fedzmg.kernels.layers import (
    ONEDNN_BY_DEFAULT,
    MappedLayers,
    channels_last,
    onednn,
    threads,
)
from fedzmg.kernels.precision import PRECISIONS, rounding

__all__ = [
    "ONEDNN_BY_DEFAULT", "PRECISIONS", "MappedLayers", "channels_last", "onednn", "rounding",
    "threads",
]  # fmt: skip
