"""Folders of images: ``ROOT/<client>/<label>/*.png``, or ``ROOT/<client>/*.png`` with labels.csv.

``labels.csv`` has columns ``file`` and ``label``; it lies in each client's folder, or one for all
lies in ROOT and says ``<client>/<name>``. Images need Pillow. Clients are sorted by name, images of
a client by path.
"""

from __future__ import annotations

import contextlib
import csv
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data.columns import Allocate, Array, Columns, in_memory
from fedzmg.data.formats.rows import (
    Paths,
    as_paths,
    classes_note,
    codes,
    file_size,
    group,
    labels,
    reading,
    refuse_bomb,
)
from fedzmg.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MOST_PIXELS = 2**26
_DEEP = ("I", "F")
"""First letter of modes with more than eight bits, which would be cut off."""
_REMEDY = "replace or remove it"


class Wanted(NamedTuple):
    """What images are turned into; None keeps what is stored."""

    size: tuple[int, int] | None = None
    """Height and width."""
    grey: bool | None = None


class _Found(NamedTuple):
    client: str
    label: str
    path: Path


def read(
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
        grey: turn every image into grey (True) or colour (False); without it all must be one.
        classes: names of labels in the order of their ids; sorted without it.

    Raises:
        InputError: for another layout, images that differ, links that leave the folder, missing
            labels, and files that are no image.
    """
    folders = as_paths(paths)
    if len(folders) != 1:
        raise InputError(f"expected one folder of images, not {len(folders)}: give one")
    (root,) = folders
    wanted = check_wanted(size, grey)
    with reading(str(root)):
        found, notes = _find(root)
    stored = sum(file_size(image.path) for image in found)
    ids, named = labels([image.label for image in found], str(root), classes)
    owner, names = codes([image.client for image in found])
    grouping = group(owner, names)
    sources = (found[i].path for i in grouping.order)
    x = decode_all(
        ((str(path), path) for path in sources),
        len(found),
        np.arange(len(found)),
        allocate,
        wanted,
        stored=stored,
    )
    y = allocate("y", (len(found),), np.int64)
    y[:] = ids[grouping.order]
    return Columns({"x": x, "y": y}, grouping.owners, (*notes, *classes_note(named)), named)


def check_wanted(size: tuple[int, int] | None, grey: bool | None) -> Wanted:
    """Refuse a size that no image has."""
    if size is not None and (len(size) != 2 or min(size) < 1 or size[0] * size[1] > _MOST_PIXELS):
        raise InputError(f"size = {size}: expected a height and a width of at least 1")
    return Wanted(None if size is None else (int(size[0]), int(size[1])), grey)


def _find(root: Path) -> tuple[list[_Found], tuple[str, ...]]:
    """All images with client and label, sorted by path."""
    if not root.is_dir():
        raise InputError(f"{root}: no such folder: give a folder with one folder for each client")
    inside = root.resolve()
    folders, files = _entries(root, inside)
    if any(_is_image(path) for path in files):
        raise InputError(f"{root}: holds images itself: put them in one folder for each client")
    tables = _labels(root, files)
    used: set[str] = set()
    other: list[Path] = [path for path in files if path.name != "labels.csv"]
    found: list[_Found] = []
    for folder in folders:
        client = folder.name
        inner, flat = _entries(folder, inside)
        own = {f"{client}/{name}": label for name, label in _labels(folder, flat).items()}
        both = next((name for name in own if name in tables), None)
        if both is not None:
            raise InputError(f"{root}: two labels.csv label {both}: keep one of them")
        tables.update(own)
        images = [path for path in flat if _is_image(path)]
        other += [path for path in flat if not _is_image(path) and path.name != "labels.csv"]
        before = len(found)
        for path in images:
            name = f"{client}/{path.name}"
            if name not in tables:
                raise InputError(
                    f"{path}: has no label: name it in labels.csv, or put it into a folder named "
                    "after its label"
                )
            used.add(name)
            found.append(_Found(client, tables[name], path))
        for label in inner:
            deeper, pictures = _entries(label, inside)
            if deeper:
                raise InputError(f"{deeper[0]}: is too deep: expected CLIENT/LABEL/IMAGE")
            found += [_Found(client, label.name, path) for path in pictures if _is_image(path)]
            other += [path for path in pictures if not _is_image(path)]
        if images and len(found) > before + len(images):
            raise InputError(f"{folder}: holds images and folders of images: use one of the two")
        if len(found) == before:
            raise InputError(f"{folder}: client {client!r} has no image: remove the folder")
    missing = next((name for name in tables if name not in used), None)
    if missing is not None:
        raise InputError(f"{root}: labels.csv names {missing}, which is not there: correct it")
    if not found:
        raise InputError(f"{root}: holds no image: expected CLIENT/LABEL/IMAGE below it")
    notes = (f"{len(other)} files that are no images left out, as {other[0]}",) if other else ()
    return found, notes


def _entries(folder: Path, root: Path) -> tuple[list[Path], list[Path]]:
    """Folders and files of a folder by name, without hidden ones."""
    folders, files = [], []
    for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if path.name.startswith("."):
            continue
        if not path.name.isprintable():
            raise InputError(f"{str(path)!r}: its name is not plain text: rename it")
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise InputError(f"{path}: is a link that leaves the folder: copy the file instead")
        if path.is_dir():
            folders.append(path)
        else:
            file_size(path)
            files.append(path)
    return folders, files


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _labels(folder: Path, files: Sequence[Path]) -> dict[str, str]:
    """The table of a folder, if it has one."""
    path = folder / "labels.csv"
    if path not in files:
        return {}
    table: dict[str, str] = {}
    with reading(str(path), "correct it"), path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        if [name.strip() for name in next(rows, [])] != ["file", "label"]:
            raise InputError(f"{path}: its first line must be file,label: correct it")
        for row in rows:
            if not row:
                continue
            line = rows.line_num
            if len(row) != 2 or not row[0] or not row[1].strip():
                raise InputError(f"{path}: line {line}: expected a file and a label: correct it")
            name = row[0].strip().removeprefix("./")
            if name in table:
                raise InputError(f"{path}: line {line}: {name} occurs twice: keep one line")
            table[name] = row[1].strip()
    return table


def decode_all(
    sources: Iterator[tuple[str, Any]],
    rows: int,
    place: Array,
    allocate: Allocate,
    wanted: Wanted,
    *,
    stored: int,
) -> Array:
    """Images as one column, all of the same shape.

    Args:
        sources: for each image its name in messages, and a path, bytes, or an image of Pillow.
        rows: how many there are.
        place: the row that each goes to.
        allocate: makes the column ``x``.
        wanted: what to turn them into.
        stored: bytes that the images have in files; bounds what they may unpack to.

    Raises:
        InputError: for images that differ from the first, or cannot be read.
    """
    with _quiet() as image:
        first, source = next(sources)
        pixels = _decode(image, source, first, wanted)
        refuse_bomb(f"{first} and {rows - 1} more images", rows * pixels.nbytes, stored)
        x = allocate("x", (rows, *pixels.shape), np.uint8)
        x[place[0]] = pixels
        for row, (where, source) in enumerate(sources, start=1):
            other = _decode(image, source, where, wanted)
            if other.shape != pixels.shape:
                raise InputError(
                    f"{where}: is {_said(other)} but {first} is {_said(pixels)}: say size and grey "
                    "to make them alike"
                )
            x[place[row]] = other
    return x


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Pillow, with its warning about images that are too large turned into an error."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError("images need Pillow: run pip install 'fedzmg[images]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield Image


def _said(pixels: Array) -> str:
    height, width = pixels.shape[-2:]
    return f"{height} x {width} in {'colour' if pixels.ndim == 3 else 'grey'}"


def _decode(pillow: Any, source: Any, where: str, wanted: Wanted) -> Array:
    """Pixels of one image: [height, width], or [3, height, width]."""
    with reading(where, _REMEDY):
        if not isinstance(source, Path | bytes):
            return _pixels(source, where, wanted)
        # Opening by content, and only as one of these formats: some others run programs.
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with pillow.open(file, formats=_FORMATS) as image:
            return _pixels(image, where, wanted)


def _pixels(image: Any, where: str, wanted: Wanted) -> Array:
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise InputError(f"{where}: {height} x {width} pixels are too many: {_REMEDY}")
    if getattr(image, "is_animated", False):
        raise InputError(f"{where}: holds several pictures: {_REMEDY}")
    if image.mode.startswith(_DEEP):
        raise InputError(f"{where}: has more than 8 bits for a pixel: convert it first")
    modes = {"L": "L", "RGB": "RGB", "P": "RGB"}
    if wanted.grey is None and image.mode not in modes:
        raise InputError(
            f"{where}: is stored as {image.mode}: say grey=True or grey=False to convert images"
        )
    mode = modes[image.mode] if wanted.grey is None else "L" if wanted.grey else "RGB"
    if image.mode == "P":  # a palette may have see-through colours, which only RGBA can hold
        image = image.convert("RGBA")
    if image.mode != mode:
        image = image.convert(mode)
    if wanted.size is not None and (height, width) != wanted.size:
        image = image.resize((wanted.size[1], wanted.size[0]))
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels if mode == "L" else pixels.transpose(2, 0, 1)
