"""Names and number formats of the measures of heterogeneity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "volume": "volume",
    "distinct": "distinct classes",
    "entropy": "entropy",
    "gini": "Gini",
    "kl": "KL",
    "dominant_share": "dominant share",
}

_VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥", "": "∅"}


def number(measure: str, value: float | None, sign: str = "") -> str:
    """Format a value of one measure; ``sign`` is "+" for a difference."""
    if value is None:
        return "-"
    if measure == "volume":
        return f"{value:{sign},.0f}"
    if measure == "distinct":
        return f"{value:{sign}.1f}" if isinstance(value, float) else f"{value:{sign}}"
    if measure == "dominant_share":
        return f"{100 * value:{sign}.1f} %"
    return f"{value:{sign}.3f}"


def spread(measure: str, found: Mapping[str, Any]) -> str:
    """Format mean and standard deviation over clients."""
    mean = number(measure, found["mean"])
    if found["sd"] is None:
        return mean
    return f"{mean.removesuffix(' %')} ± {number(measure, found['sd'])}"


def printed(paper: Mapping[str, Any], measure: str) -> str:
    """Format the paper's mean and deviation with its own digits."""
    if measure not in paper["summary"]:
        return "not given"
    mean, sd = paper["summary"][measure]
    if isinstance(mean, int):
        return f"{mean:,} ± {sd:,}"
    return f"{mean:.2f} ± {sd:.2f}"


def who(report: Mapping[str, Any]) -> str:
    """Name the clients that are described."""
    described, total = len(report["clients"]), report["total"]
    if described == total:
        return f"{total:,} clients" if total > 1 else "1 client"
    return f"{described:,} of {total:,} clients (seed {report['seed']})"


def divisor(report: Mapping[str, Any]) -> str:
    """Name the divisor of entropies."""
    return "ln(classes present)" if report["entropy"] == "present" else "ln(all classes)"


def origin(report: Mapping[str, Any]) -> str:
    """Name the distribution that clients are compared with."""
    if report["reference"] == "global":
        return "all clients"
    return "the pooled sample" if report["sample"] else "the pooled clients"


def visible(label: str) -> str:
    """Replace invisible characters of a class name."""
    return _VISIBLE.get(label, label if label.isprintable() else ascii(label)[1:-1])
