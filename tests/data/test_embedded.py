"""Tests of the datasets that ship with the package."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedzmg.data import embedded
from fedzmg.data.embedded import Digits, Plays, load_digits, load_plays

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "build_embedded.py"


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits()


@pytest.fixture(scope="module")
def plays() -> Plays:
    return load_plays()


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_embedded", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words_of(plays: Plays, role: str) -> str:
    index = plays.roles.index(role)
    start, end = plays.offsets[index : index + 2]
    return plays.text[start:end].tobytes().decode("ascii")


def test_digits_have_the_documented_shapes_and_types(digits: Digits) -> None:
    assert digits.train_x.shape == (8000, 28, 28)
    assert digits.test_x.shape == (2000, 28, 28)
    assert digits.train_x.dtype == digits.test_x.dtype == np.uint8
    assert digits.train_y.shape == (8000,)
    assert digits.test_y.shape == (2000,)
    assert digits.train_y.dtype == digits.test_y.dtype == np.int64


def test_digits_are_balanced(digits: Digits) -> None:
    assert np.bincount(digits.train_y).tolist() == [800] * 10
    assert np.bincount(digits.test_y).tolist() == [200] * 10


@pytest.mark.parametrize("part", ["train_x", "test_x"])
def test_digits_are_dark_on_a_white_ground(digits: Digits, part: str) -> None:
    images = getattr(digits, part)
    assert (images[:, [0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()
    assert images.mean() / 255 > 0.8
    # Every image has ink, and some of it is fully dark.
    assert (images.min(axis=(1, 2)) < 32).all()


def test_no_digit_is_both_trained_and_tested_on(digits: Digits) -> None:
    train = {image.tobytes() for image in digits.train_x}
    test = {image.tobytes() for image in digits.test_x}
    assert len(train) == 8000
    assert len(test) == 2000
    assert not train & test


def test_digits_of_a_class_resemble_each_other(digits: Digits) -> None:
    means = np.stack([digits.train_x[digits.train_y == k].mean(axis=0) for k in range(10)])
    distances = ((digits.test_x[:, None].astype(np.float64) - means) ** 2).sum(axis=(2, 3))
    # Guards against labels out of step with images: the nearest class mean is right for about
    # four in five MNIST digits, against one in ten by chance.
    assert (distances.argmin(axis=1) == digits.test_y).mean() > 0.75


def test_plays_are_split_into_many_roles(plays: Plays) -> None:
    assert len(plays.roles) >= 700
    assert len(plays.offsets) == len(plays.roles) + 1
    assert plays.text.dtype == np.uint8
    assert plays.offsets.dtype == np.int64


def test_offsets_cover_the_text_in_order(plays: Plays) -> None:
    assert plays.offsets[0] == 0
    assert plays.offsets[-1] == len(plays.text)
    assert (np.diff(plays.offsets) > 0).all()


def test_role_names_are_unique_sorted_and_plain(plays: Plays) -> None:
    assert len(set(plays.roles)) == len(plays.roles)
    assert list(plays.roles) == sorted(plays.roles)
    assert all(re.fullmatch(r"[A-Z0-9_]+", role) for role in plays.roles)


def test_every_role_speaks_at_least_twice(plays: Plays) -> None:
    assert all("\n" in words_of(plays, role) for role in plays.roles)


@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("HAMLET_PRINCE_OF_DENMARK_HAMLET", "To be, or not to be,--that is the question:--"),
        ("MACBETH_LADY_MACBETH", "Out, damned spot!"),
        ("ROMEO_AND_JULIET_JULIET", "wherefore art thou Romeo?"),
        ("JULIUS_CAESAR_ANTONY", "Friends, Romans, countrymen, lend me your ears"),
        ("THE_MERCHANT_OF_VENICE_PORTIA", "The quality of mercy is not strain'd"),
        ("AS_YOU_LIKE_IT_JAQUES", "All the world's a stage"),
        ("THE_TEMPEST_PROSPERO", "We are such stuff"),
        ("THE_TRAGEDY_OF_KING_LEAR_CORDELIA", "I cannot heave\nMy heart into my mouth"),
        ("THE_LIFE_OF_KING_HENRY_V_CHORUS", "O for a Muse of fire"),
        ("KING_HENRY_IV_THE_FIRST_PART_FALSTAFF", "honour is a mere scutcheon"),
    ],
)
def test_known_lines_belong_to_their_speakers(plays: Plays, role: str, line: str) -> None:
    assert line in words_of(plays, role)
    everything = plays.text.tobytes()
    assert everything.count(line.encode("ascii")) == 1


def test_a_speech_starts_where_the_speaker_does(plays: Plays) -> None:
    hamlet = words_of(plays, "HAMLET_PRINCE_OF_DENMARK_HAMLET")
    assert hamlet.startswith("A little more than kin, and less than kind!\n")
    assert hamlet.endswith("the rest is silence.")
    assert "Neither a borrower nor a lender be" not in hamlet


def test_plays_hold_speeches_only(plays: Plays) -> None:
    text = plays.text.tobytes().decode("ascii")
    assert not re.search(r"[\[\]{}_@]|Exeunt|\bExit\b|\bSCENE\b|\bACT [IVX]|Gutenberg", text)
    assert set(text) <= set(
        "\n !\"&'(),-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    )


@pytest.mark.parametrize(("name", "load"), [("digits.npz", load_digits), ("plays.npz", load_plays)])
def test_a_damaged_file_is_refused(
    name: str, load: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(embedded._FILES.joinpath(name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(embedded, "_FILES", tmp_path)
    with pytest.raises(
        ValueError, match=rf"^embedded file {re.escape(name)} is damaged: reinstall fedzmg$"
    ):
        load()


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_FILES", tmp_path)
    with pytest.raises(ValueError, match=r"^embedded file plays\.npz is missing"):
        load_plays()


def test_loader_and_build_script_expect_the_same_files(builder: ModuleType) -> None:
    assert builder.OUTPUT_SHA256 == embedded._SHA256


def test_packing_is_reproducible(builder: ModuleType) -> None:
    arrays = {"a": np.arange(5), "b": np.array(["x", "yz"])}
    packed = builder.pack(arrays)
    assert packed == builder.pack(arrays)
    assert builder.same_arrays(packed, builder.pack(dict(arrays)))
    assert not builder.same_arrays(packed, builder.pack({**arrays, "a": np.arange(1, 6)}))


def test_stage_directions_are_removed(builder: ModuleType) -> None:
    assert builder.strip_directions("[Aside.] Words [to [one] man] follow") == " Words  follow"
    assert builder.strip_directions("Spoken. [Exit\nsomeone") == "Spoken. \n"


def test_speeches_are_cut_at_prefixes_and_headings(builder: ModuleType) -> None:
    play = (
        "A PLAY\n\nFIRST PERSON, a cast entry.\n\nACT I.\n\nSCENE I. A room.\n\n[Enter both.]\n\n"
        "ANNA.\nOne line,\n  [Aside] and another.\n\n[Exit.]\n\nStill Anna.\n\n"
        "BEN. Inline.\n\nALL.\nTogether.\n\n2 LORD.\nMine.\n\nBEN.\nAgain.\n\n"
        "SCENE II. Elsewhere.\n\nNobody says this.\n\nANNA.\nEnd.\n"
    )
    assert list(builder.speeches("unknown", play)) == [
        ("ANNA", "One line,\nand another.\nStill Anna."),
        ("BEN", "Inline."),
        ("SECOND LORD", "Mine."),
        ("BEN", "Again."),
        ("ANNA", "End."),
    ]


@pytest.mark.slow
def test_files_can_be_rebuilt_from_the_registries() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
