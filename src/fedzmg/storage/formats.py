"""Readers and writers of TOML, JSON and JSON-lines files, shared by runs, grids and reports."""

import contextlib
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedzmg.errors import InputError
from fedzmg.storage.fields import check_fields
from fedzmg.storage.files import append, changed_log, log_bytes, write_atomic
from fedzmg.storage.reading import parse_lines, read_file, strict_json

T = TypeVar("T")

CONTENT, SPEC = "content_sha256", "spec_sha256"  # hash of the other fields, and of the spec
RESTORE = "restore or remove it"
_NUMBERS = ("metric", "test_metric", "loss", "train_loss", "seconds", "score")  # fields of logs


def read_toml(path: Path, *, typed: bool = False) -> dict[str, Any]:
    """Read a TOML file; a path that the user ``typed`` may be a link."""
    remedy = "correct or restore it"
    values = _parsed(path, tomllib.loads, "TOML", remedy, typed=typed)
    if not typed:
        check_fields(path, values, remedy)
    return values


def read_json(
    path: Path, remedy: str = RESTORE, wanted: int | None = None, spec: Path | None = None
) -> dict[str, Any]:
    """Read a JSON object of a format and check its hashes, also of the ``spec`` it belongs to."""
    values = _parsed(path, strict_json, "JSON", remedy, typed=False)
    if not isinstance(values, dict):
        raise InputError(f"{path} does not hold a JSON object: {remedy}")
    if wanted is not None and values.get("format") != wanted:
        found = f"{path} has format {values.get('format')!r}"
        raise InputError(f"{found}, this version reads {wanted}: use the version that wrote it")
    if CONTENT in values and values.pop(CONTENT) != _content_hash(values):
        raise InputError(f"{path} is damaged, its hash is wrong: {remedy}")
    if spec is not None and SPEC in values and values.pop(SPEC) != file_sha256(spec):
        raise InputError(f"{path} does not belong to {spec}: {remedy}")
    check_fields(path, values, remedy)
    return values


def read_or_empty(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file; one that is missing, damaged or being replaced counts as empty."""
    try:
        return read_toml(path) if path.suffix == ".toml" else read_json(path)
    except InputError:
        return {}


def read_manifest(directory: Path, wanted: int) -> dict[str, Any]:
    """Read the manifest of a run or of a grid's algorithm; check its specification and logs."""
    spec = directory / "spec.toml"
    spec = spec if spec.exists() else directory.parent / "grid.toml"
    facts = read_json(directory / "manifest.json", wanted=wanted, spec=spec)
    log = changed_log(directory, facts.get("logs", {}), grown="finished" not in facts)
    if log:
        remedy = f"restore it, or remove {directory} to train again"
        raise InputError(f"{directory / log} is damaged or of another training: {remedy}")
    return facts


def write_json(path: Path, values: Mapping[str, Any], spec: Path | None = None) -> None:
    """Write strict JSON atomically with its hash and that of ``spec``; NaN becomes null."""
    bound = {} if spec is None else {SPEC: file_sha256(spec)}
    content = json.loads(json.dumps(json_nulls({**values, **bound}), allow_nan=False))
    content[CONTENT] = _content_hash(content)
    write_atomic(path, json.dumps(content, indent=1).encode())


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file; of a missing one, that of nothing."""
    if not path.exists():
        return hashlib.sha256().hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_hash(values: Mapping[str, Any]) -> str:
    whole = {key: value for key, value in values.items() if key != CONTENT}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def append_log(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a log; numbers that are not finite become words."""
    text = "".join(f"{json.dumps(json_words(row), allow_nan=False)}\n" for row in rows)
    append(path, text.encode())


def log_lines(path: Path, parse: Callable[[Any], T], remedy: str = RESTORE) -> list[T]:
    """Read the lines of a log, maybe compressed, by ``parse``; skip one that a crash cut off."""
    content = log_bytes(path)
    lines = content.splitlines()
    ended = len(lines) if content.endswith(b"\n") else len(lines) - 1
    wrong = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
    with contextlib.suppress(*wrong):
        # Parsing all lines at once is much faster; the loop below locates an error.
        return [parse(values) for values in parse_lines(lines)]
    found: list[T] = []
    for number, line in enumerate(lines, 1):
        try:
            found += [parse(values) for values in parse_lines([line])]
        except wrong:
            # A line that a crash cut off is superseded by the next one.
            if number <= ended and line.endswith(b"}"):
                raise InputError(f"{path}, line {number} is damaged: {remedy}") from None
    return found


def log_rows(path: Path, *keys: str, remedy: str = RESTORE) -> dict[Any, dict[str, Any]]:
    """Read a log by one number of a line or several; later lines win, words become numbers."""

    def parse(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        key = tuple(int(row[name]) for name in keys)
        known = {name: float(row[name]) for name in _NUMBERS if row.get(name) is not None}
        return key if keys[1:] else key[0], {**row, **known}

    return dict(log_lines(path, parse, remedy))


def flat(values: Mapping[str, Any], *, keep_empty: bool = False) -> dict[str, Any]:
    """Flatten nested tables to dotted names; ``keep_empty`` keeps empty tables as values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Mapping) or (keep_empty and not value):
            found[key] = value
        else:
            inner = flat(value, keep_empty=keep_empty)
            found |= {f"{key}.{name}": v for name, v in inner.items()}
    return found


def by_side(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables of an algorithm's options such as ``client.lr``."""
    found: dict[str, dict[str, Any]] = {"client": {}, "server": {}}
    for key, value in options.items():
        side, _, name = key.partition(".")
        if name and value is not None:
            found.setdefault(side, {})[name] = value
    return found


def flat_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with one fact per plugin file."""
    plugins = {"plugins": manifest.get("plugins", {})}
    return {key: value for key, value in manifest.items() if key not in plugins} | flat(plugins)


def _strict(value: Any, instead: Callable[[float], Any]) -> Any:
    """Prepare values for strict JSON, which has no numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _strict(inner, instead) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner, instead) for inner in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


json_words: Callable[[Any], Any] = partial(_strict, instead=str)  # words that float() reads
json_nulls: Callable[[Any], Any] = partial(_strict, instead=lambda _: None)


def _parsed(path: Path, parse: Callable[[str], T], kind: str, remedy: str, *, typed: bool) -> T:
    try:
        # Editors may add a BOM.
        return parse(read_file(path, typed=typed).decode("utf-8-sig"))
    except OSError as error:
        reason = f"{error.strerror}; check that it exists and is readable"
        raise InputError(f"cannot read {path}: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid {kind} ({error}): {remedy}") from None
