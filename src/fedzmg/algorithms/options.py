"""Options by key, and the cards that describe an algorithm with its options.

``client.clip_norm=1.0`` puts a wrapper around the client rule, ``client.schedule=cosine`` another,
``server.decay=0.0005`` one around the server rule. Its fields are then options like all others, so
``configure`` builds the same algorithm from what ``Algorithm.options()`` lists. FedZMG's projection
is one of them: ``client.zero_mean=true`` is short for ``client.project=all``.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.contract import Algorithm, AlgorithmInfo
from fedzmg.errors import InputError, unknown
from fedzmg.wrappers.clip import ClipNorm, ClipValue
from fedzmg.wrappers.schedule import ClientSchedule, Schedule, ServerSchedule
from fedzmg.wrappers.wrapper import ServerDecay

SCHEDULE = tuple(field.name for field in dataclasses.fields(Schedule))
ZERO_MEAN = "client.zero_mean"
WRAPPERS: dict[str, tuple[Any, tuple[str, ...], Any]] = {
    "client.project": (ZeroMean, ("project", "embedding_axis", "biases"), "all"),
    "server.decay": (ServerDecay, ("decay",), 0.0),
    "client.schedule": (ClientSchedule, SCHEDULE, "constant"),
    "server.schedule": (ServerSchedule, SCHEDULE, "constant"),
    "client.clip_norm": (ClipNorm, ("clip_norm",), 1.0),
    "client.clip_value": (ClipValue, ("clip_value",), 1.0),
}
"""Wrappers by key, innermost first: class, fields, and a value that is valid if the wrapper fits.

Clipping is outermost: it bounds the loss gradient before anything else, single entries before the
norm. A server's schedule is around its decay, which is relative to the learning rate.
"""


def _keys(key: str) -> list[str]:
    return [f"{key.partition('.')[0]}.{name}" for name in WRAPPERS[key][1]]


def known_options(algorithm: Algorithm) -> list[str]:
    """Return every key of this algorithm and of wrappers, also of those that do not fit."""
    added = (name for key in WRAPPERS for name in _keys(key))
    return sorted({*algorithm.options(), ZERO_MEAN, *added})


def wrapper_options(algorithm: Algorithm) -> list[str]:
    """Return the keys of wrappers that fit around this algorithm's rules and are not used yet."""
    own, found = algorithm.options(), []
    for key, (_, _, example) in WRAPPERS.items():
        with contextlib.suppress(InputError):
            configure(algorithm, {key: example})
            found += [ZERO_MEAN] if key == "client.project" and key not in own else []
            found += [name for name in _keys(key) if name not in own]
    return found


def number_options(algorithm: Algorithm) -> list[str]:
    """Return the keys with numeric values, of this algorithm and of wrappers that fit."""
    own = {key for key, (_, field) in algorithm.fields().items() if "number" in field.metadata}
    added = {
        f"{key.partition('.')[0]}.{field.name}"
        for key, (kind, names, _) in WRAPPERS.items()
        for field in dataclasses.fields(kind)
        if field.name in names and "number" in field.metadata
    }
    return sorted(own | added.intersection(wrapper_options(algorithm)))


def configure(algorithm: Algorithm, options: Mapping[str, Any]) -> Algorithm:
    """Return a copy with fields changed and wrappers added; ``None`` adds no wrapper."""
    own, known = algorithm.options(), known_options(algorithm)
    options = _spelled_out(algorithm, options)
    for name in options:
        if name not in known:
            raise _unknown(algorithm, name)
    added = {name: v for name, v in options.items() if name not in own and v is not None}
    changed = algorithm.with_options({name: v for name, v in options.items() if name in own})
    for key, (kind, _, example) in WRAPPERS.items():
        fields = {name: added[name] for name in _keys(key) if name in added}
        if fields and key not in fields:
            name, value = next(iter(fields.items()))
            remedy = f"{key}={'cosine' if issubclass(kind, Schedule) else example}"
            raise InputError(f"{algorithm.name}, {name} = {value!r}: needs {key}; add {remedy}")
        if fields and (taken := [name for name in _keys(key) if name in own]):
            remedy = f"put {kind.__name__} around the rule in Python"
            options_of = f"{', '.join(taken)} is an option of the rule itself"
            raise InputError(f"{algorithm.name}, {key}: {options_of}; {remedy}")
        if fields:
            side = key.partition(".")[0]
            values = {name.partition(".")[2]: value for name, value in fields.items()}
            try:
                rule = kind(getattr(changed, side), **values)
            except InputError as error:
                raise InputError(f"{algorithm.name}, {key}: {error}") from None
            changed = dataclasses.replace(changed, **{side: rule})
    return changed


def _spelled_out(algorithm: Algorithm, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the short form of the projection by the option that it stands for."""
    if ZERO_MEAN not in options:
        return options
    value = options[ZERO_MEAN]
    if not isinstance(value, bool | None):
        raise InputError(f"{algorithm.name}, {ZERO_MEAN} = {value!r}: expected true or false")
    own = algorithm.options()
    if value is False and "client.project" in own:
        raise InputError(f"{algorithm.name}, {ZERO_MEAN} = False: set client.project=none")
    wanted = {"client.project": "all"} if value and "client.project" not in own else {}
    return wanted | {name: v for name, v in options.items() if name != ZERO_MEAN}


def _unknown(algorithm: Algorithm, key: str) -> InputError:
    """Return an error that suggests options of the same side."""
    side, dot, _ = key.partition(".")
    known = [*algorithm.options(), *wrapper_options(algorithm)]
    same = [name for name in known if dot and name.startswith(side + dot)]
    if side in ("client", "server") and dot and not same:
        rule = type(getattr(algorithm, side)).__name__
        return InputError(f"{algorithm.name}, {key!r}: its {side} rule {rule} has no options")
    if side == "parts" and dot and not same:
        remedy = "use fedper (personal) or fedbabu (frozen), or Task(parts=...) for every algorithm"
        return InputError(f"{algorithm.name}, {key!r}: it has no parts; {remedy}")
    command = f"fedzmg list {algorithm.name}"
    return unknown(f"option of {algorithm.name}", key, same or known, command)


def card(entry: AlgorithmInfo, model_bytes: int | None = None) -> dict[str, Any]:
    """Return a row of the table for JSON; ``model_bytes`` adds bytes to multiples of the model."""
    algorithm, values = entry.algorithm, entry.algorithm.options()
    costs = {name: getattr(entry, name) for name in ("down", "up", "client_keeps", "server_keeps")}
    if model_bytes is not None:
        costs |= {f"{name}_bytes": round(times * model_bytes) for name, times in costs.items()}
    fields = algorithm.fields().items()
    described = {key: (_range(f), f.metadata.get("doc", "")) for key, (_, f) in fields}
    described["weights"] = "examples, uniform", "weights of clients when uploads are averaged"
    for key, what in (("personal", "stay with the client"), ("frozen", "are not trained")):
        if f"parts.{key}" in values:
            patterns = "first:N, last:N, norm, batch_norm, NAME*"
            described[f"parts.{key}"] = patterns, f"layers that {what}"
    options = [
        {"key": key, "default": values[key], "range": range_, "doc": doc}
        for key, (range_, doc) in described.items()
    ]
    rules = {side: repr(getattr(algorithm, side)) for side in ("client", "server")}
    return {
        "name": algorithm.name, "summary": entry.summary, "source": entry.source,
        "inferred": entry.inferred, "rules": rules | {"weights": algorithm.weights},
        "options": options, "wrapper_options": wrapper_options(algorithm), "costs": costs,
        "about": inspect.cleandoc(entry.about),
    }  # fmt: skip


def _range(field: dataclasses.Field[Any]) -> str:
    limits = field.metadata.get("number")
    if "whole" in field.metadata:
        return f"{field.metadata['whole']}, {field.metadata['whole'] + 1}, ..."
    if limits is None:
        return ", ".join(field.metadata.get("words", ()))
    low, above, high, below = (limits[name] for name in ("low", "above", "high", "below"))
    left = f"[{low:g}" if math.isfinite(low) else f"({above:g}"
    right = f"{high:g}]" if math.isfinite(high) else f"{below:g})"
    return f"{left}, {right}"
