"""Tables for people: a comparison, the algorithms, the tasks; no wider than a terminal is."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedzmg.report.terminal.stacked import folded
from fedzmg.results.formatting import goal_text, signed_text, spread_text, value_text
from fedzmg.results.significance import holm
from fedzmg.results.study_result import StudyResult

_NARROWEST = 6


class _Column(NamedTuple):
    """A column of a comparison."""

    head: str
    cells: Sequence[str]
    says: str
    """For the caption, where columns that say the same stand together."""
    rank: int = 0
    """Columns with the highest ranks go first where there is no room; those with 0 never do."""

    @property
    def width(self) -> int:
        return _widest([*self.head.splitlines(), *self.cells])


def rows_of(result: StudyResult) -> dict[str, Any]:
    """Return the numbers of a comparison's table."""
    study = result.study
    return {
        "metric": study.metric,
        "threshold": study.threshold,
        "seeds": study.seeds,
        "reference": study.reference,
        "algorithms": [
            {
                "algorithm": score.label,
                "inferred": score.inferred,
                "mean": score.mean,
                "sd": score.sd,
                "rounds_to_threshold": score.arrivals["rolling_mean"],
                "test": None if score.test is None else vars(score.test),
                "bytes_down": score.traffic["bytes_down"],
                "bytes_up": score.traffic["bytes_up"],
                "metric_per_mib": score.per_mib,
                "dropped": score.dropped,
                "diverged": score.diverged,
            }
            for score in result.scores
        ],
    }


def comparison(data: StudyResult | Mapping[str, Any], width: int) -> Table:
    """Show final metric, speed, significance and traffic of a study; reference first.

    A name or number is never cut: the caption says which columns found no room in ``width``. Names
    that are too long even beside the others are folded.
    """
    data = rows_of(data) if isinstance(data, StudyResult) else data
    columns = _columns(data)
    shown = _fitting(columns, width)
    missing = [column.head for column in columns if column not in shown]
    words = _said(shown)
    if any(row["inferred"] for row in data["algorithms"]):
        words.append("* partly inferred, see its card")
    if missing:
        words.append(f"for want of room only in study.json: {', '.join(missing)}")
    table = Table(
        box=box.SIMPLE_HEAD, padding=0, pad_edge=False,
        caption="; ".join(words), caption_justify="left",
    )  # fmt: skip
    names, *numbers = shown
    room = min(names.width, width - _used(numbers) - 1)
    table.add_column(names.head, overflow="fold", width=room)
    for column in numbers:
        table.add_column(column.head, justify="right", no_wrap=True)
    for name, *cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(Text(folded(name, room)), *cells)
    return table


def _said(columns: Sequence[_Column]) -> list[str]:
    """What the columns that are there mean.

    >>> _said([_Column("a", [], "one"), _Column("b", [], ""), _Column("c", [], "one")])
    ['a and c: one']
    """
    heads: dict[str, list[str]] = {}
    for column in columns:
        heads.setdefault(column.says, []).append(column.head)
    return [
        f"{' and '.join(filter(None, [', '.join(own[:-1]), own[-1]]))}: {says}"
        for says, own in heads.items()
        if says
    ]


def _columns(data: Mapping[str, Any]) -> list[_Column]:
    metric, rows = data["metric"], data["algorithms"]
    goal = goal_text(data["threshold"], metric)
    seeds = len(data["seeds"])
    over = "the only seed" if seeds == 1 else f"mean ± sd over {seeds} paired seeds"
    tests = [_test_cells(row["test"], metric) for row in rows]
    tested = f"paired t-test of {data['reference']} minus this one"
    arrivals = [row["rounds_to_threshold"] for row in rows]
    traffic = [f"{row['bytes_down'] / 2**20:.0f} / {row['bytes_up'] / 2**20:.0f}" for row in rows]
    columns = [
        _Column("algorithm", [row["algorithm"] + "*" * bool(row["inferred"]) for row in rows], ""),
        _Column(
            f"final {metric}",
            [
                "diverged" if row["mean"] is None else spread_text(row["mean"], row["sd"], metric)
                for row in rows
            ],
            f"{over}, last tenth of the rounds",
        ),
        _Column(
            f"to {goal}",
            ["never" if arrived is None else str(arrived) for arrived in arrivals],
            "index of the round at which the mean of 4 evaluations arrives (index r follows round "
            "r + 1)",
            rank=4,
        ),
        _Column("diff.", [test[0] for test in tests], tested, rank=1),
        _Column("p", [test[1] for test in tests], tested, rank=3),
        *_corrected(rows),
        _Column("d_z", [test[2] for test in tests], tested, rank=6),
        _Column("MiB ↓ / ↑", traffic, "traffic of one run, all clients, down / up", rank=5),
        _Column(
            "per MiB",
            [value_text(row["metric_per_mib"], metric) for row in rows],
            "final over that traffic",
            rank=7,
        ),
    ]
    # One seed or one algorithm makes no test.
    columns = [column for column in columns if column.says != tested or any(column.cells)]
    if any(row["dropped"] or row["diverged"] for row in rows):
        counts = [f"{row['dropped']} / {row['diverged']}" for row in rows]
        columns.append(_Column("dropped /\ndiverged", counts, ""))
    return columns


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Columns that fit a width with a blank between them and at both edges."""
    shown = list(columns)
    while _used(shown) > width:
        last = max(shown, key=lambda column: column.rank)
        if not last.rank:
            break
        shown.remove(last)
    return shown


def _used(columns: Sequence[_Column]) -> int:
    """By columns with their blanks."""
    return sum(column.width + 1 for column in columns) + 1


def _corrected(rows: Sequence[Mapping[str, Any]]) -> list[_Column]:
    """The p-values after Holm's correction, if there are several."""
    found = {i: row["test"]["p"] for i, row in enumerate(rows) if row["test"] is not None}
    if len(found) < 2:
        return []
    adjusted = dict(zip(found, holm(list(found.values())), strict=True))
    cells = [f"{adjusted[i]:.3g}" if i in adjusted else "" for i in range(len(rows))]
    return [_Column("Holm", cells, f"p over the family of {len(found)} tests", rank=2)]


def _test_cells(test: Mapping[str, Any] | None, metric: str) -> tuple[str, str, str]:
    if test is None:
        return "", "", ""
    difference = test["mean_difference"]
    return (
        value_text(difference, metric, signed=True),
        f"{test['p']:.3g}",
        signed_text(test["effect_size"]),
    )


def listing(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    title: str | None = None,
    right: Container[str] = (),
) -> Table:
    """A table of texts; names in the first column stay whole, other texts break between words.

    Where even that is too wide, words of the last columns are broken.

    Args:
        heads: of the columns.
        rows: their texts.
        width: of the terminal.
        title: above it.
        right: heads of columns that end at the right.
    """
    columns = list(zip(heads, *rows, strict=True))
    wanted = [_widest(column) for column in columns]
    words = [_widest(word for text in column for word in text.split()) for column in columns]
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    gaps = 2 * (len(columns) - 1)
    least = [wanted[0], *words[1:]]
    for i in reversed(range(1, len(least))):
        too_wide = max(sum(least) - (width - gaps), 0)
        least[i] = max(least[i] - too_wide, min(least[i], _NARROWEST))
    widths = shares(wanted, least, width - gaps)
    for head, room in zip(heads, widths, strict=True):
        justify: Literal["left", "right"] = "right" if head in right else "left"
        table.add_column(head, overflow="fold", width=room, justify=justify)
    for row in rows:
        table.add_row(*row)
    return table


def shares(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths of columns: what they want, or what is left after the least, as evenly as possible.

    >>> shares([10, 30, 8], [10, 7, 5], 80), shares([10, 30, 8], [10, 7, 5], 30)
    ([10, 30, 8], [10, 12, 8])
    """
    widths = list(least)
    for _ in range(room - sum(least)):
        growing = [i for i, width in enumerate(widths) if width < wanted[i]]
        if growing:
            widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def _widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)
