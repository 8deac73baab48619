"""The scores of a study, from its ``study.json``, as tables for a terminal; and a cost estimate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fedzmg.report.terminal.stacked import Column, fits, stacked
from fedzmg.results.formatting import (
    MINUS,
    NONE,
    bytes_text,
    duration,
    goal_text,
    range_text,
    spread_text,
    value_text,
)
from fedzmg.results.scores import fell_from

RULE = "rolling_mean"
_STOPPED = "stopped after"


def scores(data: Mapping[str, Any], width: int) -> RenderableType:
    """Final metric, indices at which thresholds are reached, and the mean after the slowest.

    Args:
        data: what ``study.json`` holds.
        width: of the terminal.
    """
    remark = f" ({data['label']})" if data["label"] else ""
    title = f"{data['task']}{remark}: {len(data['seeds'])} seeds, {data['rounds']} rounds"
    names = Column("algorithm", list(data["algorithms"]))
    columns = _score_columns(data)
    caption = (
        "final: mean ± sd of the last tenth of the rounds; to: index of the round at "
        "which the run-averaged curve's rolling mean has arrived (index r follows round r + 1); "
        "after: mean after the slowest algorithm has arrived"
    )
    if any(column.head == _STOPPED for column in columns):
        caption += f"; {_STOPPED}: rounds after which diverged runs were trained no further"
    caption += "".join(f"; {words}" for words in _fallen(data))
    if not fits(names, columns, width):
        columns = [column._replace(head=_upright(column.head)) for column in columns]
    return _under(title, stacked(names, columns, width), caption)


def _fallen(data: Mapping[str, Any]) -> list[str]:
    """Which runs had learnt and lost it again."""
    if not data["higher_is_better"]:
        return []
    found = []
    for label, row in data["algorithms"].items():
        runs = zip(
            data["seeds"],
            data["curves"][label]["runs"],
            row["final"]["full"]["runs"],
            row["diverged"],
            strict=True,
        )
        for seed, values, final, diverged in runs:
            height = fell_from(values, final, window=data["window"]) if diverged is None else None
            if height is not None:
                had, has = (value_text(value, data["metric"]) for value in (height, final))
                found.append(f"{label}, seed {seed}, fell back from {had} to {has}")
    return found


def _score_columns(data: Mapping[str, Any]) -> list[Column]:
    metric, rows = data["metric"], data["algorithms"]
    finals = [_mean_and_sd(row["final"]["full"], metric) for row in rows.values()]
    columns = [Column(f"final {metric}", finals)]
    for level in data["thresholds"]:
        goal = goal_text(level["threshold"], metric)
        found = level["rules"][RULE]
        arrivals = [found["arrival"][label]["averaged"] for label in rows]
        late = found["late_stage_mean"] or {}
        means = [late.get(label) for label in rows]
        columns += [
            Column(f"to {goal}", ["never" if a is None else str(a) for a in arrivals]),
            Column(f"after {goal}", [value_text(m, metric) for m in means]),
        ]
    return columns + _lost(list(rows.values()))


def _lost(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """What has to be known of runs that did not train to their end; nothing if all did."""
    lost = [sum(round_ is not None for round_ in row["diverged"]) for row in rows]
    stopped = [[r for r in row.get("stopped", []) if r is not None] for row in rows]
    columns = []
    if any(lost):
        counts = [f"{n} of {len(row['diverged'])}" for n, row in zip(lost, rows, strict=True)]
        columns.append(Column("diverged", counts))
    if any(stopped):
        columns.append(Column(_STOPPED, [_span(rounds) for rounds in stopped]))
    return columns


def _span(rounds: Sequence[int]) -> str:
    """A few rounds one by one, more by the first and the last.

    >>> _span([7, 3, 3]), _span([1, 2, 5, 9]), _span([])
    ('3, 7', '1 to 9', '-')
    """
    known = sorted(set(rounds))
    return ", ".join(map(str, known)) or "-" if len(known) < 4 else f"{known[0]} to {known[-1]}"


def _upright(head: str) -> str:
    r"""A head in lines: the word that says what, and below it of what.

    >>> _upright("after 30 %"), _upright("diverged")
    ('after\n30 %', 'diverged')
    """
    return head.replace(" ", "\n", 1)


def tests(data: Mapping[str, Any], width: int) -> RenderableType | None:
    """Paired tests of a study; None if there are none.

    Args:
        data: what ``study.json`` holds.
        width: of the terminal.
    """
    pairs, metric = data["tests"]["pairs"], data["metric"]
    if not pairs:
        return None
    names = Column("", [f"{pair['first']} - {pair['second']}" for pair in pairs])
    columns = _test_columns(pairs, metric)
    firsts = {pair["first"] for pair in pairs}
    if not fits(names, columns, width) and len(firsts) == 1:
        names = Column(f"{firsts.pop()} minus", [pair["second"] for pair in pairs])
    return _under(
        f"paired tests of the final {metric}",
        stacked(names, columns, width),
        f"below a difference: its 95 % interval; Holm: p over the family of {len(pairs)}; sign "
        f"flip: exact, at least {pairs[0]['smallest_sign_flip']:.3g} here; seeds: needed to find "
        "such an effect with power 0.8 at the level 0.05",
    )


def _test_columns(pairs: Sequence[Mapping[str, Any]], metric: str) -> list[Column]:
    results = [pair["test"] for pair in pairs]
    needed = [pair["seeds_needed"] for pair in pairs]
    columns = {
        "difference": [_difference(test, metric) for test in results],
        "t": [_number(test["t"], ".3f") for test in results],
        "p": [_number(test["p"], ".3g") for test in results],
        "Holm": [_number(pair["p_holm"], ".3g") for pair in pairs],
        "sign flip": [_number(pair["sign_flip"], ".3g") for pair in pairs],
        "d_z": [_number(test["effect_size"], "+.2f") for test in results],
        "seeds": ["-" if seeds is None else str(seeds) for seeds in needed],
    }
    return [Column(head, cells) for head, cells in columns.items()]


def _difference(test: Mapping[str, Any], metric: str) -> str:
    """The mean, and its interval below."""
    mean = value_text(test["mean_difference"], metric, signed=True)
    return f"{mean}\n{range_text(test['ci_low'], test['ci_high'], metric)}"


def _under(title: str, parts: Iterable[RenderableType], caption: str) -> RenderableType:
    """A table with a title above and words below it."""
    return Group(
        Text(f"{title}\n", style="bold"), *parts, Text(caption, style="table.caption"), Text()
    )


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form).replace("-", MINUS)


def _mean_and_sd(final: Mapping[str, Any], metric: str) -> str:
    if final["mean"] is None:
        return "diverged"
    return spread_text(final["mean"], final["sd"], metric)


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
