"""Reader for image folders: ``ROOT/<client>/<label>/*.png``, or ``ROOT/<client>/*.png`` and labels.

``labels.csv`` has columns ``file`` and ``label``; it lies in each client's folder, or one for all
lies in ROOT and names ``<client>/<name>``. Images need Pillow. Clients are sorted by name, images
of a client by path.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data.columns import Allocate, Array, Columns, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Paths
from fedzmg.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MOST_PIXELS = 2**26
_REMEDY = "replace or remove it"


class ImageForm(NamedTuple):
    """Size and colour that images are converted to; None keeps what is stored."""

    size: tuple[int, int] | None = None
    """Height and width."""
    grey: bool | None = None

    def check(self) -> ImageForm:
        """Refuse an impossible size."""
        size = self.size
        if size is not None and (len(size) != 2 or min(size) < 1 or np.prod(size) > _MOST_PIXELS):
            raise InputError(f"size = {size}: expected a height and a width of at least 1")
        return self


class _Found(NamedTuple):
    """Image file."""

    client: str
    label: str
    path: Path


def read_image_folder(
    paths: Paths,
    allocate: Allocate = in_memory,
    *,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
    classes: Sequence[str] | None = None,
) -> Columns:
    """Read a folder with one folder of images for each client.

    Args:
        paths: the one folder.
        allocate: makes the columns ``x`` uint8 and ``y`` int64.
        size: resize every image to this height and width; without it all must have one size.
        grey: convert every image to grey (True) or colour (False); without it all must be one.
        classes: names of labels in the order of their ids; sorted by default.
    """
    folders = common.as_paths(paths, "folder of images")
    if len(folders) != 1:
        raise InputError(f"{len(folders)} folders of images: give one")
    (root,) = folders
    form = ImageForm(size, grey).check()
    with common.reading(str(root)):
        found, notes = _find(root)
        stored = sum(common.file_size(image.path) for image in found)
    ids, named = common.labels([image.label for image in found], str(root), classes)
    grouping = common.group(*common.codes([image.client for image in found]))
    sources = [found[i].path for i in grouping.order]
    named_sources = ((str(path), path) for path in sources)
    x = decode_all(named_sources, len(found), np.arange(len(found)), allocate, form, stored=stored)
    y = common.fill(allocate, "y", ids[grouping.order])
    return Columns({"x": x, "y": y}, grouping.owners, (*notes, *common.classes_note(named)), named)


def _find(root: Path) -> tuple[list[_Found], list[str]]:
    """List all images with client and label, sorted by path."""
    if not root.is_dir():
        raise InputError(f"{root}: no such folder: give a folder with one folder for each client")
    inside = root.resolve()
    images: list[Path] = []
    others: list[Path] = []
    tables: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts):
            continue
        if not path.name.isprintable():
            raise InputError(f"{str(path)!r}: its name is not plain text: rename it")
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise InputError(f"{path}: is a link that leaves the folder: copy the file instead")
        if path.name == "labels.csv" and len(parts) <= 2:
            for name, label in _label_table(path).items():
                full = "/".join([*parts[:-1], name])
                if full in tables:
                    raise InputError(f"{path}: {full} has a label in two tables: keep one")
                tables[full] = label
        elif path.suffix.lower() in SUFFIXES and not path.is_dir():
            images.append(path)
        elif not path.is_dir():
            others.append(path)
    found = [_labelled(path, root, tables) for path in images]
    named = {f"{image.client}/{image.path.name}" for image in found}
    missing = next((name for name in tables if name not in named), None)
    if missing is not None:
        raise InputError(f"{root}: labels.csv names {missing}, which is not there: correct it")
    if not found:
        raise InputError(f"{root}: holds no image: expected CLIENT/LABEL/IMAGE below it")
    clients = {image.client for image in found}
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and folder.name[0] != "." and folder.name not in clients:
            raise InputError(f"{folder}: client {folder.name!r} has no image: remove the folder")
    notes = [f"{len(others)} files that are not images left out, as {others[0]}"] if others else []
    return found, notes


def _labelled(path: Path, root: Path, tables: dict[str, str]) -> _Found:
    client, *rest = path.relative_to(root).parts
    if len(rest) == 2:
        return _Found(client, rest[0], path)
    if len(rest) == 1 and f"{client}/{rest[0]}" in tables:
        return _Found(client, tables[f"{client}/{rest[0]}"], path)
    raise InputError(f"{path}: has no label: expected CLIENT/LABEL/IMAGE, or a line in labels.csv")


def _label_table(path: Path) -> dict[str, str]:
    common.file_size(path)
    table: dict[str, str] = {}
    with (
        common.reading(str(path), "correct it"),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        rows = csv.reader(file, strict=True)
        if [name.strip() for name in next(rows, [])] != ["file", "label"]:
            raise InputError(f"{path}: its first line must be file,label: correct it")
        for row in filter(None, rows):
            if len(row) != 2 or not row[0] or not row[1].strip():
                raise InputError(f"{path}: line {rows.line_num}: expected a file and a label")
            name = row[0].strip().removeprefix("./")
            if name in table:
                raise InputError(f"{path}: line {rows.line_num}: {name} occurs twice: keep one")
            table[name] = row[1].strip()
    return table


def decode_all(
    sources: Iterable[tuple[str, Any]],
    rows: int,
    order: Array,
    allocate: Allocate,
    form: ImageForm,
    *,
    stored: int | None = None,
) -> Array:
    """Decode images of one shape into one column.

    Args:
        sources: for each image its name in messages, and a path, bytes, or an image of Pillow.
        rows: number of images.
        order: image ``order[i]`` goes to row ``i``.
        allocate: makes the column ``x``.
        form: size and colour to convert to.
        stored: bytes of the images in files, which bound the result; None for no bound.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError("images need Pillow: run pip install 'fedzmg[images]'") from None
    target = np.argsort(order)
    x: Array | None = None
    first = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for row, (where, source) in enumerate(sources):
            with common.reading(where, _REMEDY):
                if isinstance(source, Path | bytes):
                    file = io.BytesIO(source) if isinstance(source, bytes) else source
                    # Some other formats run programs.
                    with Image.open(file, formats=_FORMATS) as image:
                        pixels = _pixels(image, where, form)
                else:
                    pixels = _pixels(source, where, form)
            if x is None:
                first = f"{where} is {_describe(pixels)}"
                if stored is not None:
                    common.refuse_bomb(
                        f"{where} and {rows - 1} more images", rows * pixels.nbytes, stored
                    )
                x = allocate("x", (rows, *pixels.shape), np.uint8)
            if pixels.shape != x.shape[1:]:
                raise InputError(f"{where}: is {_describe(pixels)} but {first}: set size and grey")
            x[target[row]] = pixels
    assert x is not None
    return x


def _describe(pixels: Array) -> str:
    height, width = pixels.shape[-2:]
    return f"{height} x {width} in {'colour' if pixels.ndim == 3 else 'grey'}"


def _pixels(image: Any, where: str, form: ImageForm) -> Array:
    """Return the pixels of one image: [height, width], or [3, height, width]."""
    width, height = image.size
    if width * height > _MOST_PIXELS or getattr(image, "is_animated", False):
        raise InputError(f"{where}: is animated or too large ({height} x {width}): {_REMEDY}")
    if image.mode.startswith(("I", "F")):
        raise InputError(f"{where}: has more than 8 bits for a pixel: convert it first")
    modes = {"L": "L", "RGB": "RGB", "P": "RGB"}
    if form.grey is None and image.mode not in modes:
        raise InputError(
            f"{where}: is stored as {image.mode}: set grey=True or grey=False to convert images"
        )
    mode = modes[image.mode] if form.grey is None else "L" if form.grey else "RGB"
    if image.mode == "P":  # a palette may have transparent colours, which only RGBA can hold
        image = image.convert("RGBA")
    image = image.convert(mode)
    if form.size is not None and (height, width) != form.size:
        image = image.resize((form.size[1], form.size[0]))
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels if mode == "L" else pixels.transpose(2, 0, 1)
