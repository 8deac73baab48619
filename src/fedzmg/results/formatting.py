"""Number formats of every table, chart and sentence."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedzmg.plain_text import plain

MINUS, NONE = "\u2212", "\u2013"  # a minus as wide as a plus, and the sign for a missing number
MIB = 2**20


def value_text(value: float | None, metric: str, *, signed: bool = False) -> str:
    """Format a metric; an accuracy is a percentage."""
    if value is None or math.isnan(value):
        return NONE
    sign = "+" if signed else ""
    text = f"{100 * value:{sign}.2f} %" if is_share(metric) else f"{value:{sign}.4g}"
    return text.replace("-", MINUS)


def is_share(metric: str) -> bool:
    """Return True for a metric that is shown as a percentage."""
    return "accuracy" in metric


def range_text(low: float, high: float, metric: str, *, signed: bool = True) -> str:
    """Format an interval of differences, or of values without a sign."""
    ends = (value_text(end, metric, signed=signed) for end in (low, high))
    return f"{next(ends).removesuffix(' %')} to {next(ends)}"


def spread_text(mean: float | None, sd: float | None, metric: str) -> str:
    """Format a mean and, if there is one, its standard deviation."""
    text = value_text(mean, metric)
    return text if sd is None else f"{text.removesuffix(' %')} ± {value_text(sd, metric)}"


def goal_text(threshold: float, metric: str) -> str:
    """Format a threshold: 80 %, not 80.00 %."""
    return value_text(threshold, metric).replace(".00 %", " %")


def points_text(difference: float, metric: str) -> str:
    """Format the size of a difference; between percentages it is in points."""
    size = abs(difference)
    return f"{100 * size:.2f} points" if is_share(metric) else f"{size:.4g}"


def p_text(p: float | None) -> str:
    """Format a p-value."""
    if p is None:
        return NONE
    return f"{p:.3g}" if p >= 0.001 else ("0" if p == 0 else f"{p:.1e}")


def signed_text(value: float, form: str = ".2f") -> str:
    """Format a number with its sign."""
    return "0" if value == 0 else f"{value:+{form}}".replace("-", MINUS).replace("inf", "∞")


def digits_text(value: float) -> str:
    """Format three significant digits; a large number is rounded to an integer."""
    text = f"{value:#.3g}"
    return f"{value:,.0f}" if text.endswith(".") or "e+" in text else text


def bytes_text(count: float) -> str:
    """Format bytes with a binary unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(max(count, 1))) // 10, len(units) - 1)
    return f"{count / 1024**power:,.{power > 0:d}f} {units[power]}"


def setting_text(value: Any) -> str:
    """Format a setting."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def count_text(number: int, what: str) -> str:
    """Format a count and its noun."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def options_text(options: Mapping[str, float], digits: int = 4) -> str:
    """Format a point of a grid."""
    return ", ".join(f"{key} {value:.{digits}g}" for key, value in options.items())


def slug(name: str) -> str:
    """Make a name for files and anchors."""
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")


def duration(seconds: float) -> str:
    """Format a length of time."""
    units = {120: (1, 0, "s"), 7200: (60, 0, "min"), 172800: (3600, 1, "h")}
    limit = next((limit for limit in units if seconds < limit), None)
    size, digits, unit = (86400, 1, "days") if limit is None else units[limit]
    return f"{seconds / size:.{digits}f} {unit}"


def aligned(columns: Mapping[str, Sequence[str]], words: int = 1) -> str:
    """Lay out cells by head as plain text, empty columns left out, the first ``words`` left."""
    shown = [[*map(plain, (head, *cells))] for head, cells in columns.items() if any(cells)]
    widths = [max(map(len, cells)) for cells in shown]
    padded = [
        [cell.ljust(width) if i < words else cell.rjust(width) for cell in cells]
        for i, (cells, width) in enumerate(zip(shown, widths, strict=True))
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))
