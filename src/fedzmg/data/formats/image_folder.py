"""Reader for image folders: ``ROOT/<client>/<label>/*.png``.

Images need Pillow. Clients are sorted by name, images of a client by path.
"""

import io
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedzmg.data.columns import Array, Columns, Ids, group
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Entries, Names, Paths, Size
from fedzmg.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MOST_PIXELS = 2**26
_REMEDY = "replace or remove it"


def read_image_folder(
    paths: Paths, *, size: Size = None, grey: bool | None = None, classes: Names = None
) -> Columns:
    """Read a folder with one folder of images for each client.

    Images are resized to ``size``, height and width, and converted to grey (True) or colour (False)
    as given; without these all must be alike. ``classes`` are in the order of their ids.
    """
    [root] = common.as_paths(paths, folder=True, single=True)
    with common.reading(str(root)):
        images, others = _find(root)
        stored = sum(path.stat().st_size for path in images)
    clients, labels = [], []
    for path in images:
        client, *inner = path.relative_to(root).parts
        if len(inner) != 2:
            raise InputError(f"{path}: has no label: expected CLIENT/LABEL/IMAGE")
        clients.append(client)
        labels.append(inner[0])
    folders = {path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."}
    unused = sorted(folders - set(clients))
    if unused or not images:
        raise InputError(f"{root}: no image for {unused[0] if unused else 'any client'}: add some")
    sources = ((str(path), path) for path in images)
    notes = [f"{len(others)} files that are not images left out, as {others[0]}"] if others else []
    decode = partial(decode_all, sources, size=size, grey=grey, stored=stored)
    grouping = group(*common.codes(clients))
    return common.assemble(str(root), grouping, decode, labels, classes=classes, notes=notes)


def _find(root: Path) -> tuple[list[Path], list[Path]]:
    """List the images by path, and all other files."""
    inside, images, others = root.resolve(), list[Path](), list[Path]()
    for path in sorted(root.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if not path.name.isprintable():
            raise InputError(f"{str(path)!r}: its name is not plain text: rename it")
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise InputError(f"{path}: is a link that leaves the folder: copy the file instead")
        if not path.is_dir():
            (images if path.suffix.lower() in SUFFIXES else others).append(path)
    return images, others


def decode_all(
    sources: Entries, order: Ids, size: Size = None, grey: bool | None = None, stored: int = 0
) -> Array:
    """Decode images of one shape into one column; image ``order[i]`` goes to row ``i``.

    Sources are paths, bytes or images of Pillow. ``stored`` bytes in files bound the result.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError("images need Pillow: run pip install 'fedzmg[images]'") from None
    if size is not None and (len(size) != 2 or min(size) < 1 or np.prod(size) > _MOST_PIXELS):
        raise InputError(f"size = {size}: expected a height and a width of at least 1")
    x: Array | None = None
    with warnings.catch_warnings(action="ignore"):
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for row, (where, source) in zip(np.argsort(order), sources, strict=True):
            with common.reading(where, _REMEDY):
                if isinstance(source, Mapping):  # an image of Hugging Face
                    source = source["bytes"]
                if isinstance(source, Path | bytes):
                    file = io.BytesIO(source) if isinstance(source, bytes) else source
                    # Some other formats run programs.
                    with Image.open(file, formats=_FORMATS) as image:
                        pixels = _pixels(image, size, grey)
                else:
                    pixels = _pixels(source, size, grey)
            if x is None:
                if stored:
                    named = f"{where} and {len(order) - 1} more images"
                    common.refuse_bomb(named, len(order) * pixels.nbytes, stored)
                x = np.empty((len(order), *pixels.shape), np.uint8)
            if pixels.shape != x.shape[1:]:
                shapes = f"shape {pixels.shape}, the first {x.shape[1:]}"
                raise InputError(f"{where}: has {shapes}: set size and grey")
            x[row] = pixels
    assert x is not None
    return x


def _pixels(image: Any, size: Size, grey: bool | None) -> Array:
    """Return the pixels of one image: [height, width], or [3, height, width]."""
    width, height = image.size
    if width * height > _MOST_PIXELS or getattr(image, "is_animated", False):
        raise ValueError(f"is animated or too large ({height} x {width})")
    modes = {"L": "L", "RGB": "RGB", "P": "RGB"}
    if image.mode.startswith(("I", "F")) or (grey is None and image.mode not in modes):
        raise ValueError(f"is stored as {image.mode}; set grey=True or grey=False if it has 8 bits")
    mode = modes[image.mode] if grey is None else "L" if grey else "RGB"
    if image.mode == "P":  # a palette may have transparent colours, which only RGBA can hold
        image = image.convert("RGBA")
    image = image.convert(mode)
    if size is not None and (height, width) != size:
        image = image.resize((size[1], size[0]))
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels if mode == "L" else pixels.transpose(2, 0, 1)
