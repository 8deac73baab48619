"""Reader for NIST's EMNIST in MATLAB 5 files: ``dataset.{train,test}.{images,labels,writers}``."""

from __future__ import annotations

import numpy as np

from fedzmg.data.columns import Columns
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Paths
from fedzmg.errors import unknown

_REMEDY = "give one of NIST's EMNIST files, in the format of MATLAB 5 to 7.2"


def read_mat(paths: Paths, *, split: str = "train") -> Columns:
    """Read one split of one file, images upright, sorted by writer where the file names writers.

    Args:
        paths: the one file.
        split: ``train`` or ``test``.
    """
    if split not in ("train", "test"):
        raise unknown("split", split, ("train", "test"))
    [path] = common.as_paths(paths, single=True)
    where = f"{path}: dataset.{split}"
    with common.reading(where, _REMEDY):
        from scipy.io import loadmat

        # A struct is an object array of shape [1, 1].
        part = loadmat(path, variable_names=["dataset"])["dataset"][split].item()
        images = part["images"].item()
        if images.dtype != np.uint8 or images.size == 0:
            raise ValueError(f"images are {images.dtype} of shape {images.shape}")
        # MATLAB stores each image column by column.
        upright = images.reshape(len(images), 28, 28).swapaxes(1, 2)
        labels = part["labels"].item().reshape(-1)
        writers = part["writers"].item().reshape(-1) if "writers" in part.dtype.names else None
        if labels.dtype.kind not in "biuf":
            raise ValueError(f"labels are {labels.dtype}")
    grouping = common.by_client(writers, len(upright), where)
    return common.assemble(where, grouping, upright, labels)
