"""Options by key: the fields of an algorithm's rules, and wrappers that keys add.

``client.clip_norm=1.0`` puts a wrapper around the client rule, ``client.schedule=cosine`` another,
``server.decay=0.0005`` one around the server rule. Its fields are then options like all others, so
``configure`` builds the same algorithm from what ``Algorithm.options()`` lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedzmg.algorithms.clip import ClipNorm, ClipValue
from fedzmg.algorithms.decay import ServerDecay
from fedzmg.algorithms.schedule import ClientSchedule, Schedule, ServerSchedule
from fedzmg.contract import Algorithm, chain
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
