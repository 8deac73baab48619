"""Strict models of TOML files, their text, and settings of the command line."""

import contextlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, get_args

import pydantic

from fedzmg.errors import InputError, brief, unknown
from fedzmg.storage.fields import Value
from fedzmg.storage.formats import read_toml

Setting: TypeAlias = Value | list[Value] | list[list[Value]]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_WORDS = {
    "bool_type": "true or false", "int_type": "a whole number", "float_type": "a number",
    "string_type": "text", "list_type": "a list", "dict_type": "a table", "model_type": "a table",
    "literal_error": "{expected}", "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}", "too_short": "at least {min_length}",
    "too_long": "at most {max_length}", "finite_number": "a finite number",
    "int_parsing_size": "a smaller number",
}  # fmt: skip
"""Expected values by pydantic's type of error."""
_UNION = "a number, true, false or text"


class Strict(pydantic.BaseModel):
    """Frozen model that rejects unknown keys and values of another type."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    listing: ClassVar[str] = ""
    """The command that shows every key."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], path: Path | None = None) -> Self:
        """Validate a mapping; one line names an unknown key, a missing one or a wrong value."""
        try:
            return cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            # A misspelt key often makes another one missing, so it is named first.
            found = error.errors()
            first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
        raise InputError(f"{path}: {cls._one_line(first)}" if path else cls._one_line(first))

    @classmethod
    def _one_line(cls, error: Mapping[str, Any]) -> str:
        kind, parts, context = error["type"], list(map(str, error["loc"])), error.get("ctx", {})
        if kind == "extra_forbidden":
            known = [".".join([*parts[:-1], key]) for key in cls.keys_of(parts[:-1])]
            return str(unknown("key", ".".join(parts), known, *filter(None, [cls.listing])))
        # pydantic adds the branch of a union, which the user did not write.
        is_union = parts[-1:] and parts[-1] in ("bool", "int", "float", "str")
        key = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(parts[:-1] if is_union else parts))
        if kind == "missing":
            see = f" ('{cls.listing}' shows its values)" if cls.listing else ""
            return f"{key} is missing: add it{see}"
        if isinstance(reason := context.get("error"), ValueError):  # of one of our validators
            return f"{key}: {reason}" if key else str(reason)
        words = _UNION if is_union else _WORDS.get(kind, "another value").format(**context)
        return f"{key} = {brief(error.get('input'))}: expected {words}"

    @classmethod
    def keys_of(cls, table: Sequence[str]) -> list[str]:
        """Return the keys of a table; ``[]`` is the file itself."""
        kind: Any = cls
        for part in table:
            is_model = isinstance(kind, type)
            kind = kind.model_fields[part].annotation if is_model else get_args(kind)[1]
        return list(kind.model_fields)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.parse(read_toml(path, typed=True), path)


def toml(values: Mapping[str, Any], table: str = "") -> str:
    """Write values and tables as TOML; leave out empty tables unless nothing else is there."""
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    text = "".join(f"{_key(k)} = {_literal(v)}\n" for k, v in plain.items())
    for name, inner in values.items():
        if not isinstance(inner, Mapping):
            continue
        path = f"{table}.{_key(name)}" if table else _key(name)
        below = toml(inner, path)
        own = any(not isinstance(v, Mapping) for v in inner.values())
        text += f"\n[{path}]\n{below}" if own or (table and not below) else below
    return text


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _literal(name)


def _literal(value: Any) -> str:
    # JSON's strings, booleans, numbers and lists are TOML's too, except for two rare characters.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_settings(texts: Iterable[str]) -> dict[str, Setting]:
    """Parse ``key=value`` from the command line; a value that is not TOML is text."""
    found: dict[str, Setting] = {}
    for text in texts:
        key, equals, given = (part.strip() for part in text.partition("="))
        value, number = given, re.sub(r"(?<![\w./\\-])(-?)\.(?=\d)", r"\g<1>0.", given)  # .5
        for form in (number, given):  # of several that are TOML, what was given
            with contextlib.suppress(ValueError):  # also for a number of thousands of digits
                value = tomllib.loads(f"value = {form}")["value"]
        if not key or not equals:
            raise InputError(
                f"--set {brief(text)}: expected KEY=VALUE, such as client.lr=0.03; a value is a "
                "number, true, false, a word or a list of them"
            )
        found[key] = value
    return found
