"""Catalog of named data sets: contents, download addresses and file layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedzmg.errors import InputError, unknown

EMBEDDED = ("digits", "plays")
"""Data sets that ship with the package."""


class Remote(NamedTuple):
    """File at its official address."""

    url: str
    sha256: str
    size: int | None = None

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Form:
    """One file layout of a data set."""

    files: str
    """Official files, for messages."""
    official: tuple[str, ...]
    """Patterns of the official names, which are preferred to others that fit."""
    accepted: tuple[str, ...]
    """Patterns of all names that fit."""
    format: str
    """Key of :data:`fedzmg.data.formats.FORMATS`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reader."""
    magic: bytes | None = None
    """First bytes of such a file, whatever its name."""
    each: int | None = 1
    """Files of one split; None for any number."""
    whole: bool = False
    """One file holds all splits."""


@dataclass(frozen=True)
class Source:
    """Named data set."""

    title: str
    citation: str
    terms: str
    counts: Mapping[str, tuple[int | None, int]]
    """Clients (where it has any) and examples of each split."""
    forms: tuple[Form, ...]
    remotes: tuple[Remote, ...] = ()
    classes: int | None = None
    columns: tuple[str, ...] = ("x", "y")

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.counts)


def _h5(stem: str, classes: int | None = None) -> tuple[Form]:
    names = (f"{stem}_train.h5", f"{stem}_test.h5")
    options, magic = {"classes": classes}, b"\x89HDF\r\n\x1a\n"
    return (Form(" and ".join(names), names, ("*.h5", "*.hdf5"), "h5", options, magic),)


def _tff(stem: str, sha256: str) -> tuple[Remote]:
    return (Remote(f"https://storage.googleapis.com/tff-datasets-public/{stem}.tar.bz2", sha256),)


_LEAF = "Caldas et al. 2018, LEAF: A Benchmark for Federated Settings (arXiv:1812.01097)"
_COHEN = "Cohen et al. 2017, EMNIST: an extension of MNIST to handwritten letters"
_KRIZHEVSKY = "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images"
_LEAF_IMAGES = Form(
    "LEAF's femnist folder data/ with train/*.json and test/*.json",
    ("all_data_*.json",),
    ("*.json",),
    "leaf",
    each=None,
)
_MNIST_FILES = (
    ("train-images", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
    ("train-labels", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
    ("t10k-images", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
    ("t10k-labels", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
)

SOURCES: dict[str, Source] = {
    "emnist62": Source(
        "characters by writer (TFF's EMNIST)",
        f"{_COHEN}; {_LEAF}",
        "made from NIST Special Database 19; cite both papers",
        {"train": (3400, 671_585), "test": (3400, 77_483)},
        (*_h5("fed_emnist", 62), _LEAF_IMAGES),
        _tff("fed_emnist", "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0"),
        classes=62,
    ),
    "emnist10": Source(
        "digits by writer (TFF's EMNIST)",
        f"{_COHEN}; {_LEAF}",
        "made from NIST Special Database 19; cite both papers",
        {"train": (3383, 341_873), "test": (3383, 40_832)},
        _h5("fed_emnist_digitsonly", 10),
        _tff(
            "fed_emnist_digitsonly",
            "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
        ),
        classes=10,
    ),
    "cifar100": Source(
        "photographs (official CIFAR-100)",
        _KRIZHEVSKY,
        "research use; cite the report",
        {"train": (None, 50_000), "test": (None, 10_000)},
        (
            Form(
                "cifar-100-binary/train.bin and test.bin",
                ("train.bin", "test.bin"),
                ("*.bin",),
                "cifar_binary",
            ),
            Form(
                "cifar-100-python/train and test",
                ("train", "test"),
                ("train", "test"),
                "cifar_python",
            ),
        ),
        (
            Remote(
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                168_513_733,
            ),
        ),
        classes=100,
        columns=("x", "y", "coarse"),
    ),
    "cifar100-tff": Source(
        "photographs by client (TFF's CIFAR-100)",
        f"{_KRIZHEVSKY}; Reddi et al. 2021, Adaptive Federated Optimization",
        "research use; cite the report",
        {"train": (500, 50_000), "test": (100, 10_000)},
        _h5("fed_cifar100", 100),
        _tff("fed_cifar100", "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de"),
        classes=100,
    ),
    "shakespeare": Source(
        "plays by role (TFF's Shakespeare)",
        _LEAF,
        "the plays are in the public domain",
        {"train": (715, 16_068), "test": (715, 2_356)},
        _h5("shakespeare"),
        _tff("shakespeare", "0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707"),
        columns=("text",),
    ),
    "mnist-by-writer": Source(
        "digits by writer (MNIST's)",
        "LeCun et al. 1998; Yadav and Bottou 2019, Cold Case: The Lost MNIST Digits (writers)",
        "terms of MNIST and QMNIST",
        {"train": (834, 62_988), "test": (834, 6_995)},
        _h5("mnist_by_writer", 10),
        classes=10,
    ),
    "chars74k": Source(
        "characters by writer (Chars74K, drawn)",
        "de Campos et al. 2009, Character Recognition in Natural Images",
        "research use; cite the paper",
        {"train": (55, 3_080), "test": (55, 330)},
        _h5("chars74k_by_writer", 62),
        classes=62,
    ),
    "shakespeare-by-role": Source(
        "plays by role, a snippet a speech",
        "Moby Shakespeare",
        "public domain",
        {"train": (715, 25_504), "test": (715, 3_795)},
        _h5("shakespeare_by_role"),
        columns=("text",),
    ),
    "mnist": Source(
        "digits (official MNIST)",
        "LeCun et al. 1998, Gradient-based learning applied to document recognition",
        "CC BY-SA 3.0",
        {"train": (None, 60_000), "test": (None, 10_000)},
        (
            Form(
                "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
                ("train-*-ubyte*", "t10k-*-ubyte*", "train-*.idx*", "t10k-*.idx*"),
                ("*ubyte", "*ubyte.gz"),
                "idx",
                each=2,
            ),
        ),
        tuple(
            Remote(
                "https://storage.googleapis.com/cvdf-datasets/mnist/"
                f"{name}-{'idx3' if name.endswith('images') else 'idx1'}-ubyte.gz",
                sha256,
                size,
            )
            for name, sha256, size in _MNIST_FILES
        ),
        classes=10,
    ),
    "emnist-byclass": Source(
        "characters (NIST's EMNIST by class)",
        _COHEN,
        "made from NIST Special Database 19; cite the paper",
        {"train": (None, 697_932), "test": (None, 116_323)},
        (
            Form(
                "emnist-byclass-{train,test}-{images-idx3,labels-idx1}-ubyte.gz",
                ("emnist-byclass-*-ubyte*",),
                ("*byclass*ubyte", "*byclass*ubyte.gz"),
                "idx",
                {"transposed": True},
                each=2,
            ),
            Form(
                "emnist-byclass.mat", ("emnist-byclass.mat",), ("*byclass*.mat",), "mat", whole=True
            ),
        ),
        (
            Remote(
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
                561_753_746,
            ),
        ),
        classes=62,
    ),
}


def source(name: str) -> Source:
    """Look up a data set."""
    if name in EMBEDDED:
        raise InputError(f"{name!r} ships with fedzmg: there is nothing to get, import or remove")
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES, "fedzmg data list")
    return SOURCES[name]
