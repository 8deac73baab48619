"""Catalog of named data sets: contents, download addresses and file layouts."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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

    format: str
    """Key of :data:`fedzmg.data.formats.FORMATS`."""
    files: str
    """Official files, for messages."""
    accepted: tuple[str, ...]
    """Patterns of all names that fit."""
    official: tuple[str, ...] = ()
    """Patterns of the official names, which are preferred to others that fit."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reader."""
    each: int = 1
    """Files of one split; 0 for any number."""
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


def _catalog() -> dict[str, Source]:
    catalog = {}
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for name, entry in table.items():
        counts = {split: entry.pop(split) for split in ("train", "test")}
        entry["counts"] = {s: (clients or None, rows) for s, (clients, rows) in counts.items()}
        entry["forms"] = tuple(Form(**form) for form in entry["forms"])
        entry["remotes"] = tuple(Remote(**remote) for remote in entry.get("remotes", ()))
        catalog[name] = Source(**entry)
    return catalog


SOURCES = _catalog()


def source(name: str) -> Source:
    """Look up a data set."""
    if name in EMBEDDED:
        raise InputError(f"{name!r} ships with fedzmg: there is nothing to get, import or remove")
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES, "fedzmg data list")
    return SOURCES[name]
