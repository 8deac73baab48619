"""Tests of the datasets that ship with the package."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
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


def test_digits_have_the_documented_form(digits: Digits) -> None:
    for split, rows in (("train", 8000), ("test", 2000)):
        x, y = (getattr(digits, f"{split}_{column}") for column in "xy")
        assert (x.shape, x.dtype, y.dtype) == ((rows, 28, 28), np.uint8, np.int64)
        assert np.bincount(y).tolist() == [rows // 10] * 10
        assert (x[:, [0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()
    assert len({image.tobytes() for image in (*digits.train_x, *digits.test_x)}) == 10_000


def test_plays_have_the_documented_form(plays: Plays) -> None:
    assert len(plays.offsets) == len(plays.roles) + 1 > 700
    assert (plays.offsets[0], plays.offsets[-1]) == (0, len(plays.text))
    assert (np.diff(plays.offsets) > 0).all()
    assert list(plays.roles) == sorted(set(plays.roles))
    text = plays.text.tobytes().decode("ascii")
    assert not re.search(r"[\[\]{}_@]|Exeunt|\bExit\b|\bSCENE\b|\bACT [IVX]|Gutenberg", text)


@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("HAMLET_PRINCE_OF_DENMARK_HAMLET", "To be, or not to be,--that is the question:--"),
        ("ROMEO_AND_JULIET_JULIET", "wherefore art thou Romeo?"),
        ("THE_TRAGEDY_OF_KING_LEAR_CORDELIA", "I cannot heave\nMy heart into my mouth"),
    ],
)
def test_known_lines_belong_to_their_speakers(plays: Plays, role: str, line: str) -> None:
    assert line in words_of(plays, role)
    everything = plays.text.tobytes()
    assert everything.count(line.encode("ascii")) == 1


def test_files_are_those_of_the_build_script(builder: ModuleType) -> None:
    for name, expected in builder.OUTPUT_SHA256.items():
        content = Path(embedded.__file__).with_name(name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected


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
