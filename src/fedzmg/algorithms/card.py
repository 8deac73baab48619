"""Definition cards: what `fedzmg list NAME` and docs/algorithms.md show of an algorithm."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from fedzmg.algorithms.info import AlgorithmInfo
from fedzmg.algorithms.options import wrapper_options
from fedzmg.contract import Rule, inner_rules


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
