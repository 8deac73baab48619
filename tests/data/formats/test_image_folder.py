from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import damaged, fuzz_tests
from hypothesis import strategies as st
from PIL import Image
from test_arrays import rows_of

from fedzmg.data.formats import common, image_folder
from fedzmg.errors import InputError


def picture(seed: int = 0, mode: str = "L", height: int = 4, width: int = 6) -> Image.Image:
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


def packed(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def put(path: Path, image: Image.Image | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image if isinstance(image, bytes) else packed(image))


def test_client_and_label_folders(tmp_path: Path) -> None:
    for seed, name in enumerate(["zoe/cat/b.png", "zoe/cat/a.PNG", "al/dog/x.bmp", "al/cat/y.png"]):
        put(tmp_path / name, picture(seed))
    columns = image_folder.read_image_folder([tmp_path])
    assert rows_of(columns) == {"al": [0, 1], "zoe": [0, 0]}
    assert columns.notes == ("classes: cat, dog",)
    assert columns.classes == ("cat", "dog")
    expected = [np.asarray(picture(seed)) for seed in (3, 2, 1, 0)]  # by client, label and name
    np.testing.assert_array_equal(columns.array("x"), expected)
    assert columns.array("x").dtype == np.uint8


def test_images_are_made_alike_on_demand(tmp_path: Path) -> None:
    grey = Image.new("L", (6, 4), 100)
    put(tmp_path / "a/0/1.png", grey)
    put(tmp_path / "a/0/2.png", Image.new("RGB", (3, 9), (100, 100, 100)))
    with pytest.raises(InputError, match=r"2.png: has shape \(3, 9, 3\), the first \(4, 6\)"):
        image_folder.read_image_folder([tmp_path])
    x = image_folder.read_image_folder([tmp_path], size=(5, 7), grey=True).array("x")
    assert x.shape == (2, 5, 7)
    assert (x == 100).all()
    x = image_folder.read_image_folder([tmp_path], size=(5, 7), grey=False).array("x")
    assert x.shape == (2, 3, 5, 7)
    assert (x == 100).all()
    with pytest.raises(InputError, match=r"size = \(0, 7\)"):
        image_folder.read_image_folder([tmp_path], size=(0, 7))


def test_palettes_are_colours_and_see_through_needs_a_decision(tmp_path: Path) -> None:
    paletted = picture(1, "RGB").quantize(16)
    paletted.info["transparency"] = bytes(16)
    put(tmp_path / "p/a/0/i.png", paletted)
    x = image_folder.read_image_folder([tmp_path / "p"]).array("x")
    colours = paletted.convert("RGBA").convert("RGB")
    np.testing.assert_array_equal(x[0].transpose(1, 2, 0), np.asarray(colours))
    put(tmp_path / "t/a/0/i.png", picture(1, "RGBA"))
    with pytest.raises(InputError, match="RGBA"):
        image_folder.read_image_folder([tmp_path / "t"])
    assert image_folder.read_image_folder([tmp_path / "t"], grey=False).array("x").shape == (
        1,
        3,
        4,
        6,
    )


def test_hidden_files_are_skipped_and_others_are_noted(tmp_path: Path) -> None:
    put(tmp_path / "a/0/i.png", picture())
    for name in (".git/x/i.png", "a/.hidden.png", "a/0/._i.png", "a/0/Thumbs.db", "README.txt"):
        put(tmp_path / name, b"no image")
    columns = image_folder.read_image_folder([tmp_path])
    assert columns.rows == 1
    assert columns.notes == (
        f"2 files that are not images left out, as {tmp_path / 'README.txt'}",
        "classes: 0",
    )


def test_links_may_not_leave_the_folder(tmp_path: Path) -> None:
    put(tmp_path / "outside/0/i.png", picture())
    root = tmp_path / "root"
    put(root / "a/0/i.png", picture())
    (root / "a/0/j.png").symlink_to("i.png")
    assert image_folder.read_image_folder([root]).rows == 2
    for link, target in {
        "a/0/k.png": tmp_path / "outside/0/i.png",
        "b": tmp_path / "outside",
        "a/1": Path("../../outside/0"),
    }.items():
        (root / link).symlink_to(target)
        with pytest.raises(InputError, match=f"{link}: is a link that leaves the folder"):
            image_folder.read_image_folder([root])
        (root / link).unlink()
    (root / "a/0/loop.png").symlink_to("loop.png")
    with pytest.raises(InputError):
        image_folder.read_image_folder([root])


TWO = packed(picture(), "GIF", save_all=True, append_images=[picture(1)])


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "no image"),
        ({"a/i.png": picture()}, "a/i.png: has no label"),
        ({"i.png": picture()}, "i.png: has no label"),
        ({"a/0/i.png": picture(), "b/notes.txt": b""}, "no image for b"),
        ({"a/0/i.png": b"text"}, "i.png: cannot be read .*: replace or remove it"),
        ({"a/0/i.png": Image.new("I;16", (3, 3))}, "I;16"),
        ({"a/0/i.gif": TWO}, "is animated"),
        ({"a/0/i.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, "cannot be read"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, files: dict[str, Any], match: str) -> None:
    for name, image in files.items():
        put(tmp_path / name, image)
    with pytest.raises(InputError, match=match) as caught:
        image_folder.read_image_folder([tmp_path])
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a/cat/i.png", picture())
    assert image_folder.read_image_folder(tmp_path, classes=["dog", "cat"]).array("y") == [1]
    for paths, options, match in (
        ([tmp_path], {"classes": ["dog", "cap"]}, "unknown class 'cat'"),
        ([tmp_path / "none"], {}, "no such folder"),
        ([tmp_path, tmp_path], {}, "2 paths"),
    ):
        with pytest.raises(InputError, match=match):
            image_folder.read_image_folder(paths, **options)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'fedzmg\[images\]'"):
        image_folder.read_image_folder([tmp_path])


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("side", [30_000, 10_000, 2**31 - 1])
def test_images_that_unpack_to_gigabytes_are_refused(tmp_path: Path, side: int) -> None:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    put(tmp_path / "a/0/bomb.png", b"\x89PNG\r\n\x1a\n" + header + body)
    with pytest.raises(InputError, match=r"bomb.png: cannot be read .*(limit|exceeds|large|range)"):
        image_folder.read_image_folder([tmp_path])


def test_many_flat_images_are_refused_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "_SMALL", 2**20)
    for name in range(4):
        put(tmp_path / f"a/0/{name}.png", Image.new("L", (1000, 1000)))
    with pytest.raises(InputError, match=r"0\.png and 3 more images: claims 4,000,000 bytes"):
        image_folder.read_image_folder([tmp_path])


FORMS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM")
IMAGES = st.one_of(*(damaged(packed(picture(0, "RGB"), form)) for form in FORMS))


def read_image(paths: list[Path]) -> Any:
    """Read a damaged file as an image."""
    root = paths[0].with_name("images")
    put(root / "a/0/i.png", paths[0].read_bytes())
    try:
        return image_folder.read_image_folder([root])
    except InputError as error:
        raise InputError(str(error).replace(str(root), str(paths[0]))) from None


test_damaged_images, test_many_damaged_images = fuzz_tests(read_image, IMAGES, 30, 3000)
