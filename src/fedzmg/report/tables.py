"""Tables for people: a comparison, the algorithms, the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fedzmg.report.numbers import bytes_text

__all__ = ["bytes_text", "comparison", "listing", "metric_text"]


def metric_text(value: float, metric: str) -> str:
    """An accuracy in percent, any other metric with four digits."""
    return f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.4g}"


def comparison(data: Mapping[str, Any]) -> Table:
    """Final metric, speed, significance and traffic of a ``comparison.json``; reference first."""
    metric, rows = data["metric"], data["algorithms"]
    goal = metric_text(data["threshold"], metric).replace(".00", "")
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        caption=f"final: mean ± sd over {len(data['seeds'])} paired seeds, last tenth of the "
        f"rounds; to {goal}: index of the first evaluation there; diff., p, d_z: paired t-test of "
        f"{data['reference']} minus this one; MiB: traffic of one run, all clients, down / up; "
        "per MiB: final over that traffic"
        + ("; * partly inferred, see its card" if any(row["inferred"] for row in rows) else ""),
        caption_justify="left",
    )
    table.add_column("algorithm", no_wrap=True)
    for head in (f"final {metric}", f"to {goal}", "diff.", "p", "d_z", "MiB ↓ / ↑", "per MiB"):
        table.add_column(head, justify="right", no_wrap=True)
    troubled = any(row["dropped"] or row["diverged"] for row in rows)
    if troubled:
        table.add_column("dropped / diverged", justify="right")
    for row in rows:
        arrived = row["rounds_to_threshold"]
        cells = [
            row["algorithm"] + ("*" if row["inferred"] else ""),
            _mean_and_spread(row["mean"], row["sd"], metric),
            "never" if arrived is None else str(arrived),
            *_test_cells(row["test"], metric),
            f"{row['bytes_down'] / 2**20:.0f} / {row['bytes_up'] / 2**20:.0f}",
            metric_text(row["metric_per_mib"], metric),
        ]
        table.add_row(*cells, *([f"{row['dropped']} / {row['diverged']}"] if troubled else []))
    return table


def _mean_and_spread(mean: float, sd: float | None, metric: str) -> str:
    if sd is None:
        return metric_text(mean, metric)
    return f"{metric_text(mean, metric).removesuffix(' %')} ± {metric_text(sd, metric)}"


def _test_cells(test: Mapping[str, Any] | None, metric: str) -> list[str]:
    if test is None:
        return ["", "", ""]
    difference = test["mean_difference"]
    return [
        ("+" if difference >= 0 else "") + metric_text(difference, metric),
        f"{test['p']:.3g}",
        f"{test['effect_size']:+.2f}",
    ]


def listing(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table of texts."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
