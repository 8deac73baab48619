"""Options by key, and the cards that describe an algorithm with its options.

``client.clip_norm=1.0`` puts a wrapper around the client rule, ``client.schedule=cosine`` another,
``server.decay=0.0005`` one around the server rule. Its fields are then options like all others, so
``configure`` builds the same algorithm from what ``Algorithm.options()`` lists.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from fedzmg.algorithms.clip import ClipNorm, ClipValue
from fedzmg.algorithms.info import AlgorithmInfo
from fedzmg.algorithms.schedule import ClientSchedule, Schedule, ServerSchedule
from fedzmg.algorithms.wrapper import ServerDecay
from fedzmg.contract import Algorithm, Rule, chain, inner_rules
from fedzmg.errors import InputError, unknown

SCHEDULE = tuple(field.name for field in dataclasses.fields(Schedule))
CLIPS = {"clip_norm": ClipNorm, "clip_value": ClipValue}
"""Clipping wrappers, innermost first: single entries are bounded before the norm."""
SERVER_DECAY = "server.decay"

WRAPPER_KEYS = (
    *(f"client.{name}" for name in CLIPS),
    SERVER_DECAY,
    *(f"{side}.{name}" for side in ("client", "server") for name in SCHEDULE),
)


_EXAMPLES: dict[str, Any] = {
    **{f"client.{name}": 1.0 for name in CLIPS},
    SERVER_DECAY: 0.0,
    "client.schedule": "constant",
    "server.schedule": "constant",
}
"""A valid value of every wrapper's key, to test whether the wrapper fits."""


def known_options(algorithm: Algorithm) -> list[str]:
    """Return every key of this algorithm and of wrappers, also of those that do not fit."""
    return sorted({*algorithm.options(), *WRAPPER_KEYS})


def wrapper_options(algorithm: Algorithm) -> list[str]:
    """Return the keys of wrappers that fit around this algorithm's rules and are not used yet."""
    own = algorithm.options()
    fit = {key for key, value in _EXAMPLES.items() if _fits(algorithm, key, value)}
    for side in ("client", "server"):
        fit |= {f"{side}.{name}" for name in SCHEDULE if f"{side}.schedule" in fit}
    return [key for key in WRAPPER_KEYS if key in fit and key not in own]


def number_options(algorithm: Algorithm) -> list[str]:
    """Return the keys with numeric values, of this algorithm and of wrappers that fit."""
    own = [
        f"{side}.{field.name}"
        for side in ("client", "server")
        for rule in chain(getattr(algorithm, side))
        for field in dataclasses.fields(rule)
        if "number" in field.metadata
    ]
    added = [key for key in wrapper_options(algorithm) if not key.endswith(".schedule")]
    return sorted({*own, *added})


def _fits(algorithm: Algorithm, key: str, value: Any) -> bool:
    try:
        configure(algorithm, {key: value})
    except InputError:
        return False
    return True


def configure(algorithm: Algorithm, options: Mapping[str, Any]) -> Algorithm:
    """Return a copy with fields changed and wrappers added; ``None`` adds no wrapper.

    Clipping comes outermost, since the loss gradient is clipped before anything else. A server's
    schedule comes around its decay, which is relative to the learning rate.
    """
    own = algorithm.options()
    added: dict[str, Any] = {}
    for key, value in options.items():
        if key not in own and key not in WRAPPER_KEYS:
            raise _unknown(algorithm, key)
        if key not in own and value is not None:
            added[key] = value
    changed = algorithm.with_options({k: v for k, v in options.items() if k in own})
    if SERVER_DECAY in added:
        fields = {"decay": added[SERVER_DECAY]}
        changed = _wrapped(changed, "server", SERVER_DECAY, ServerDecay, fields)
    for side, kind in (("client", ClientSchedule), ("server", ServerSchedule)):
        fields = {n: added[f"{side}.{n}"] for n in SCHEDULE if f"{side}.{n}" in added}
        if fields:
            _check_schedule(changed, side, fields)
            changed = _wrapped(changed, side, f"{side}.schedule", kind, fields)
    for name, clip in CLIPS.items():
        key = f"client.{name}"
        if key in added:
            changed = _wrapped(changed, "client", key, clip, {name: added[key]})
    return changed


def _unknown(algorithm: Algorithm, key: str) -> InputError:
    """Return an error that suggests options of the same side."""
    side, dot, _ = key.partition(".")
    known = [*algorithm.options(), *wrapper_options(algorithm)]
    same = [name for name in known if name.startswith(side + dot)]
    if dot and side in ("client", "server") and not same:
        rule = type(getattr(algorithm, side)).__name__
        return InputError(
            f"unknown option of {algorithm.name} {key!r}: its {side} rule {rule} has no options"
        )
    command = f"fedzmg list {algorithm.name}"
    return unknown(f"option of {algorithm.name}", key, same or known, command)


def _check_schedule(algorithm: Algorithm, side: str, fields: Mapping[str, Any]) -> None:
    """Reject numbers without a schedule, and a schedule whose keys are taken."""
    if "schedule" not in fields:
        name, value = next(iter(fields.items()))
        raise InputError(
            f"{algorithm.name}, {side}.{name} = {value!r}: belongs to a schedule; add one, for "
            f"example {side}.schedule=cosine"
        )
    taken = [f"{side}.{name}" for name in SCHEDULE if f"{side}.{name}" in algorithm.options()]
    if taken:
        raise InputError(
            f"{algorithm.name}, {side}.schedule: {', '.join(taken)} is an option of the rule "
            "itself; put the schedule around the rule in Python"
        )


def _wrapped(
    algorithm: Algorithm, side: str, key: str, kind: Any, fields: Mapping[str, Any]
) -> Algorithm:
    try:
        rule = kind(getattr(algorithm, side), **fields)
    except InputError as error:
        raise InputError(f"{algorithm.name}, {key}: {error}") from None
    return dataclasses.replace(algorithm, **{side: rule})


def card(entry: AlgorithmInfo, model_bytes: int | None = None) -> dict[str, Any]:
    """Return a row of the table with options and costs, ready for JSON.

    ``model_bytes``, the size of a task's model, adds bytes to the multiples of the model.
    """
    costs: dict[str, Any] = {
        "down": entry.down,
        "up": entry.up,
        "client_keeps": entry.client_keeps,
        "server_keeps": entry.server_keeps,
    }
    if model_bytes is not None:
        costs |= {f"{name}_bytes": round(times * model_bytes) for name, times in costs.items()}
    return {
        "name": entry.algorithm.name,
        "summary": entry.summary,
        "source": entry.source,
        "inferred": entry.inferred,
        "rules": {
            "client": repr(entry.algorithm.client),
            "server": repr(entry.algorithm.server),
            "weights": entry.algorithm.weights,
        },
        "options": list(_options(entry)),
        "wrapper_options": wrapper_options(entry.algorithm),
        "costs": costs,
        "about": inspect.cleandoc(entry.about),
    }


def _options(entry: AlgorithmInfo) -> Iterator[dict[str, Any]]:
    for side in ("client", "server"):
        yield from _fields(side, getattr(entry.algorithm, side), set())
    yield {
        "key": "weights",
        "default": entry.algorithm.weights,
        "range": "examples, uniform",
        "doc": "weights of clients when uploads are averaged",
    }


def _fields(side: str, rule: Rule, seen: set[str]) -> Iterator[dict[str, Any]]:
    for field in dataclasses.fields(rule):  # type: ignore[arg-type]
        value = getattr(rule, field.name)
        if isinstance(value, Rule) or field.metadata.get("derived") or field.name in seen:
            continue
        seen.add(field.name)
        limits, words = field.metadata.get("number"), field.metadata.get("words", ())
        yield {
            "key": f"{side}.{field.name}",
            "default": value,
            "range": ", ".join(words) if limits is None else _range(limits),
            "doc": field.metadata.get("doc", ""),
        }
    for inner in inner_rules(rule).values():
        yield from _fields(side, inner, seen)


def _range(limits: Mapping[str, float]) -> str:
    low, above = limits["low"], limits["above"]
    high, below = limits["high"], limits["below"]
    left = f"[{low:g}" if math.isfinite(low) else f"({above:g}"
    right = f"{high:g}]" if math.isfinite(high) else f"{below:g})"
    return f"{left}, {right}"
