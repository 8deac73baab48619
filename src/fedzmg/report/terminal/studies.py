"""The scores of a study, from its ``study.json``, as tables for a terminal; and a cost estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from fedzmg.report.numbers import bytes_text, duration
from fedzmg.report.terminal.tables import metric_text

RULE = "rolling_mean"


def scores(data: Mapping[str, Any]) -> Table:
    """Final metric, indices at which thresholds are reached, and the mean after the slowest."""
    metric, remark = data["metric"], f" ({data['label']})" if data["label"] else ""
    table = Table(
        title=f"{data['task']}{remark}: {len(data['seeds'])} seeds, {data['rounds']} rounds",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="final: mean ± sd of the last tenth of the rounds; to: index of the round at "
        "which the run-averaged curve's rolling mean has arrived (index r follows round r + 1); "
        "after: mean after the slowest algorithm has arrived",
        caption_justify="left",
    )
    table.add_column("algorithm", no_wrap=True)
    table.add_column(f"final {metric}", justify="right", no_wrap=True)
    for level in data["thresholds"]:
        goal = metric_text(level["threshold"], metric).replace(".00", "")
        table.add_column(f"to {goal}", justify="right")
        table.add_column(f"after {goal}", justify="right")
    for label, row in data["algorithms"].items():
        final = row["final"]["full"]
        cells = []
        for level in data["thresholds"]:
            found = level["rules"][RULE]
            arrived = found["arrival"][label]["averaged"]
            late = found["late_stage_mean"]
            mean = None if late is None else late[label]
            cells.append("never" if arrived is None else str(arrived))
            cells.append("-" if mean is None else metric_text(mean, metric))
        table.add_row(label + _ended(row), _mean_and_sd(final, metric), *cells)
    return table


def tests(data: Mapping[str, Any]) -> Table | None:
    """Paired tests of a study; None if there are none."""
    pairs, metric = data["tests"]["pairs"], data["metric"]
    if not pairs:
        return None
    floor = pairs[0]["smallest_sign_flip"]
    table = Table(
        title=f"paired tests of the final {metric}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # eight columns of figures, which must not be cut at 80 characters
        caption="below a difference: its 95 % interval; Holm: p over the family of "
        f"{len(pairs)}; sign flip: exact, at least {floor:.3g} "
        "here; seeds: needed to find such an effect with power 0.8 at the level 0.05",
        caption_justify="left",
    )
    table.add_column("")
    for head in ("difference", "t", "p", "Holm", "sign flip", "d_z", "seeds"):
        table.add_column(head, justify="right", no_wrap=True)
    for pair in pairs:
        test = pair["test"]
        low, high = (metric_text(test[end], metric) for end in ("ci_low", "ci_high"))
        table.add_row(
            f"{pair['first']} - {pair['second']}",
            f"{metric_text(test['mean_difference'], metric)}\n{low.removesuffix(' %')} to {high}",
            _number(test["t"], ".3f"),
            _number(test["p"], ".3g"),
            _number(pair["p_holm"], ".3g"),
            _number(pair["sign_flip"], ".3g"),
            _number(test["effect_size"], "+.2f"),
            "-" if pair["seeds_needed"] is None else str(pair["seeds_needed"]),
        )
    return table


def _ended(row: Mapping[str, Any]) -> str:
    """What has to be known of runs that did not train to their end."""
    stopped = [round_ for round_ in row.get("stopped", []) if round_ is not None]
    if stopped:
        rounds = ", ".join(map(str, sorted(set(stopped))))
        return f" ({len(stopped)} diverged, stopped after round {rounds})"
    lost = sum(round_ is not None for round_ in row["diverged"])
    return f" ({lost} diverged)" if lost else ""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mean_and_sd(final: Mapping[str, Any], metric: str) -> str:
    if final["mean"] is None:
        return "diverged"
    mean = metric_text(final["mean"], metric)
    if final["sd"] is None:
        return mean
    return f"{mean.removesuffix(' %')} ± {metric_text(final['sd'], metric)}"


def estimate(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a specification will cost, as pairs of what and how much."""
    trials, rounds = data["trials"], data["rounds"]
    found = [
        (data["kind"], f"{data['task']}, {data['algorithms']} algorithm(s)"),
        ("trials", f"{trials:,}"),
        ("rounds", f"{rounds:,} each, {trials * rounds:,} in all"),
        ("evaluations", f"{data['evaluations']:,} each"),
        ("steps", f"{data['steps']:,} local steps" if data["steps"] else "unknown without data"),
        (
            "traffic",
            f"{bytes_text(data['bytes_down'])} down, {bytes_text(data['bytes_up'])} up (simulated)",
        ),
        (
            "disk",
            f"{bytes_text(data['disk_bytes'])} at most while it runs, "
            f"{bytes_text(data['disk_bytes_after'])} after",
        ),
    ]
    if data["missing"]:
        found.append(("time", f"unknown: the data is not here yet ({data['missing']})"))
    elif data["seconds"] is not None:
        found.append(
            (
                "time",
                f"about {duration(data['seconds'])} here ({data['device']}, {data['engine']}), "
                + _measured(data),
            )
        )
    return found


def _measured(data: Mapping[str, Any]) -> str:
    probe = f" ({data['probe']})" if data.get("probe") else ""
    if data.get("extrapolated"):
        return f"extrapolated from less than a round{probe}"
    return f"from a few measured steps{probe}"
