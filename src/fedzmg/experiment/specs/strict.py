"""Strict models of what a user writes: TOML in, one line for the first mistake, JSON Schema out."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import pydantic

from fedzmg.errors import InputError, unknown
from fedzmg.storage.formats import read_toml

Value: TypeAlias = bool | int | float | str
Setting: TypeAlias = Value | list[bool | int | float | str]

_PLAIN = "a number, true, false or text"
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Strict(pydantic.BaseModel):
    """A frozen model that takes no key it does not know and no value of another type."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    listing: ClassVar[str] = ""
    """The command that shows every key."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Validate a mapping; the first thing wrong becomes one line.

        Raises:
            InputError: for an unknown key (nearest suggested), a missing one or a wrong type.
        """
        try:
            return cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            # A misspelt key is the reason why another one is missing, so it is named first.
            found = error.errors()
            first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
        raise cls._one_line(first)

    @classmethod
    def _one_line(cls, error: Mapping[str, Any]) -> InputError:
        # What pydantic adds of its own, such as the branch of a union, is no word of the user's.
        parts = [str(part) for part in error["loc"] if not str(part).startswith(("list[", "dict["))]
        if error["type"] == "extra_forbidden":
            *table, _ = parts
            prefix = ".".join([*table, ""]) if table else ""
            known = [prefix + k for k in cls.keys_of(table)]
            commands = [cls.listing] if cls.listing else []
            return unknown("key", ".".join(parts), known, *commands)
        whole = ".".join(parts)
        place = re.sub(r"\.(bool|int|float|str|literal\[.*\])$", "", whole)
        if error["type"] == "missing":
            see = f" ('{cls.listing}' shows what it may be)" if cls.listing else ""
            return InputError(f"{place} is missing: add it{see}")
        reason = error.get("ctx", {}).get("error")
        if isinstance(reason, ValueError):  # raised by a validator of ours: already one line
            return InputError(f"{place}: {reason}" if place else str(reason))
        # A value of any plain type has the type that pydantic tried first in its place.
        expected = _PLAIN if place != whole else _expected(error, place)
        place = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", place)
        return InputError(f"{place} = {error.get('input')!r}: expected {expected}")

    @classmethod
    def keys_of(cls, table: list[str]) -> list[str]:
        """The keys a table knows; ``[]`` is the file itself."""
        return list(cls.model_fields) if not table else []

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a TOML file.

        Raises:
            InputError: if it cannot be read or is not a valid specification.
        """
        values = read_toml(path)
        try:
            return cls.parse(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def to_toml(self) -> str:
        """As a TOML document that :meth:`read` reads back."""
        return toml(self.model_dump(exclude_none=True))


def _expected(error: Mapping[str, Any], place: str) -> str:
    """What a value should have been, in words of TOML."""
    words = {
        "bool_type": "true or false",
        "dict_type": f"a table, [{place}]",
        "float_type": "a number",
        "int_from_float": "a whole number",
        "int_type": "a whole number",
        "list_type": f"a list, such as {place} = {_literal([error['input']])}",
        "model_type": f"a table, [{place}]",
        "string_type": f'text in quotes, such as "{error["input"]}"',
    }
    said = str(error["msg"]).removeprefix("Input should be ")
    return words.get(error["type"], said.replace("greater than or equal to", "at least"))


def toml(values: Mapping[str, Any], table: str = "") -> str:
    """Values and tables of them as TOML; empty tables are left out, unless they are all there is.

    >>> print(toml({"task": "digits", "client": {"lr": 0.1}, "server": {}}))
    task = "digits"
    <BLANKLINE>
    [client]
    lr = 0.1
    <BLANKLINE>
    """
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    text = "".join(f"{_key(k)} = {_literal(v)}\n" for k, v in plain.items())
    for name, inner in values.items():
        if not isinstance(inner, Mapping):
            continue
        place = f"{table}.{_key(name)}" if table else _key(name)
        below = toml(inner, place)
        own = any(not isinstance(v, Mapping) for v in inner.values())
        if own or (table and not below):
            text += f"\n[{place}]\n{below}"
        elif below:
            text += below
    return text


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _literal(name)


def _literal(value: Any) -> str:
    # JSON's strings, booleans, numbers and lists are TOML's too, but for two rare characters.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_setting(text: str) -> tuple[str, Value]:
    """``key=value`` from the command line; the value is read as TOML, else taken as a string.

    >>> parse_setting("client.lr=0.03"), parse_setting("weights=uniform")
    (('client.lr', 0.03), ('weights', 'uniform'))
    """
    key, value = _parts(text)
    if not isinstance(value, bool | int | float | str):
        raise InputError(f"--set {text!r}: expected a number, true, false or a word")
    return key, value


def parse_settings(texts: Iterable[str]) -> dict[str, Setting]:
    """Several ``key=value``, of which a value may be a list: ``seeds=[0,1]``."""
    found: dict[str, Setting] = {}
    for text in texts:
        key, value = _parts(text)
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, bool | int | float | str):
                raise InputError(
                    f"--set {text!r}: expected a number, true, false, a word or a list of them"
                )
        found[key] = value
    return found


def _parts(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {text!r}: expected KEY=VALUE, for example client.lr=0.03")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
