"""Tables of a study: scores, seeds, clients, tests, traffic, settings and the paper's numbers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from fedzmg.report.tables.table import NOTHING, Cell, Column, Record, Table, words
from fedzmg.results import formatting as fmt
from fedzmg.results import paper
from fedzmg.results.reading import Study
from fedzmg.results.scores import RULES, arrivals, late_means, mean_and_sd
from fedzmg.results.significance import LEVEL
from fedzmg.results.study_result import AlgorithmResult, StudyResult

_RULE_NAMES = ("all above", "stays above")
_RATES = ("client.lr", "server.lr")
_ACCURACY = "accuracy"
_goal = partial(fmt.goal_text, metric=_ACCURACY)
_Number = tuple[str, str, str, float | None, float | None]


def scores(result: StudyResult) -> Table:
    """Make the table of final value, speed, late stage and cost of every algorithm."""
    study = result.study
    metric, threshold = study.metric, study.threshold
    shown = partial(fmt.value_text, metric=metric)
    has_late = any(score.late is not None for score in result.scores)
    has_failures = any(s.diverged or s.unfinished or s.dropped for s in result.scores)
    heads = ["", "", ""]
    if threshold is not None:
        heads = [f"rounds to {fmt.goal_text(threshold, metric)}", *_RULE_NAMES]

    def final(score: AlgorithmResult) -> Cell | None:
        if score.mean is None:
            return Cell("diverged") if score.diverged else None
        best = "best" if score is result.ranked[0] else ""
        return Cell(fmt.spread_text(score.mean, score.sd, metric), score.mean, best)

    def moved(score: AlgorithmResult) -> Cell:
        mib = score.traffic["total"] / fmt.MIB
        text = f"{mib:,.1f}" if mib >= 1 else f"{mib:.2g}"
        return Cell(text + ("" if score.finals else " so far"), mib)

    def per_mib(value: float) -> str:
        share = fmt.is_share(metric)
        return fmt.digits_text(100 * value if share else value) + " %" * share

    columns = [
        Column("algorithm", "algorithm", "label"),
        Column(f"final {metric}", "final_mean", final),
        Column("", "final_sd", "sd"),
        *_reached(heads, lambda score: (score.arrivals, score.unfinished > 0)),
        Column("each run" if threshold is not None else "", "", _each_run),
        Column("", "rounds_each", lambda s: " ".join(str(r or "never") for r in s.arrivals_each)),
        Column("late stage" * has_late, "late_stage_mean", "late", shown),
        Column("MiB per run", "mib_per_run", moved),
        Column(f"{metric} per MiB" * study.higher_is_better, "metric_per_mib", "per_mib", per_mib),
        *(Column(n * has_failures, n, n) for n in ("diverged", "dropped", "unfinished")),
    ]
    parts = ["Final: mean over the last tenth of the rounds, ± standard deviation over seeds"]
    if threshold is not None:
        parts.append(
            f"rounds to a threshold: until the mean of {study.window} evaluations of the averaged "
            "curve reaches it; all above: until each of them does; stays above: until no later "
            "mean falls below; each run: mean ± standard deviation over runs"
        )
    if has_late:
        parts.append("late stage: mean after the slowest algorithm arrived")
    parts.append("MiB: traffic of one run, all clients, both ways")
    title, caption = f"Scores on {study.name}", "; ".join(parts) + "."
    return Table.build("scores", title, columns, result.scores, caption)


def thresholds(result: StudyResult) -> Table | None:
    """Make the table of arrivals and late stages by threshold; None for fewer than two."""
    study = result.study
    if len(study.thresholds) < 2:
        return None
    metric, items = study.metric, []
    shown = partial(fmt.value_text, metric=metric)
    for level in study.thresholds:
        late, _ = late_means(study, level)
        for label, runs in study.members.items():
            found = {rule: arrivals(study, runs, level, rule).averaged for rule in RULES}
            running = any(not run.complete for run in runs)
            items.append((level, label, found, running, late.get(label)))
    columns = [
        Column("threshold", "threshold", itemgetter(0), partial(fmt.goal_text, metric=metric)),
        Column("algorithm", "algorithm", itemgetter(1)),
        *_reached(["rounds", *_RULE_NAMES], itemgetter(2, 3)),
        Column("late stage", "late_stage_mean", itemgetter(4), shown),
    ]
    caption = "Rules as above; late stage: mean after the slowest algorithm arrived, if all did."
    title = f"All thresholds on {study.name}"
    return Table.build("thresholds", title, columns, items, caption, words=2)


def finals(result: StudyResult) -> Table:
    """Make the table of the final value of every seed."""
    study = result.study

    def final(seed: int, score: AlgorithmResult) -> Cell:
        lost = any(r.seed == seed and r.diverged is not None for r in study.members[score.label])
        value = None if lost else score.finals.get(seed)
        return Cell("diverged" if lost else fmt.value_text(value, study.metric), value)

    seeds = sorted({seed for score in result.scores for seed in score.finals})
    columns = [Column("algorithm", "", "label")]
    columns += [Column(f"seed {seed}", "", partial(final, seed)) for seed in seeds]
    records: list[Record] = [
        {"algorithm": score.label, "seed": seed, "final": score.finals[seed]}
        for score in result.scores
        for seed in sorted(score.finals)
    ]
    caption = "Mean over the last tenth of the rounds; diverged runs are left out."
    title = f"Final {study.metric} of every seed on {study.name}"
    return Table.build("finals", title, columns, result.scores, caption)._replace(records=records)


def round_cell(round_: int | None, *, running: bool = False) -> Cell:
    """Show the round of an arrival; "never" sorts after every number."""
    if round_ is None:
        return Cell("not yet" if running else "never", math.inf, "quiet")
    return Cell(f"{round_:,}", round_)


def _reached(heads: Sequence[str], of: Callable[[Any], tuple[Any, bool]]) -> Iterator[Column]:
    """Make columns of every rule; ``of`` returns arrivals by rule, and True if runs are left."""

    def cell(rule: str, item: Any) -> Cell:
        found, running = of(item)
        return round_cell(found[rule], running=running)

    for head, rule in zip(heads, RULES, strict=True):
        yield Column(head, f"rounds_{rule}", partial(cell, rule))


def _each_run(score: AlgorithmResult) -> Cell:
    arrived = [one for one in score.arrivals_each if one is not None]
    if not arrived:
        return round_cell(None, running=score.unfinished > 0)
    mean, sd = mean_and_sd(arrived)
    text = f"{mean:,.0f}" + ("" if sd is None else f" ± {sd:,.0f}")
    if len(arrived) < len(score.arrivals_each):
        text += f" ({len(arrived)} of {len(score.arrivals_each)})"
    return Cell(text, mean)


def paired_tests(result: StudyResult) -> Table | None:
    """Make the table of all tests of a study; None if there are none."""
    study, tests = result.study, result.tests
    if not tests:
        return None
    signed = partial(fmt.value_text, metric=study.metric, signed=True)
    columns = [
        Column("difference", "", lambda one: f"{one.first} minus {one.second}"),
        Column("", "first", "first"),
        Column("", "second", "second"),
        Column("mean", "difference", "test.mean_difference", signed),
        Column("95 % interval", "",
               lambda one: fmt.range_text(one.test.ci_low, one.test.ci_high, study.metric)),
        Column("", "ci_low", "test.ci_low"),
        Column("", "ci_high", "test.ci_high"),
        Column("t", "t", "test.t", fmt.signed_text),
        Column("p", "p", "test.p", fmt.p_text),
        Column("Holm p", "p_holm",
               lambda one: Cell(fmt.p_text(one.p_holm), one.p_holm, "yes" * one.significant)),
        Column("sign flip p", "p_sign_flip", "sign_flip", fmt.p_text),
        Column("", "p_sign_flip_floor", "smallest_sign_flip"),
        Column("d_z", "d_z", "test.effect_size", fmt.signed_text),
        Column("seeds", "seeds", "test.n"),
        Column("seeds needed", "seeds_needed", "seeds_needed", "{:,}".format),
    ]  # fmt: skip
    diverged = sum(score.diverged for score in result.scores)
    lost = f"; {fmt.count_text(diverged, 'diverged run')} left out" if diverged else ""
    caption = (
        f"Differences of the final {study.metric}, paired by seed; p: two-sided paired t-test; "
        f"Holm: corrected for the {fmt.count_text(len(tests), 'test')} of this table, bold where "
        f"it is at most {LEVEL:g}; sign flip: exact, without assuming a normal distribution; d_z: "
        "mean difference over its standard deviation; seeds needed: to find an effect of this "
        f"size with a chance of 80 % at the level {LEVEL:g}; with fewer, a missing difference "
        f"proves nothing{lost}."
    )
    # The most seeds give the lowest floor.
    seeds, floor = max(one.test.n for one in tests), min(one.smallest_sign_flip for one in tests)
    if floor > 0.001:
        never = f" and alone is never significant at {LEVEL:g}" * (floor > LEVEL)
        caption += f" With {seeds} seeds the sign-flip p is at least {floor:.3g}{never}."
    if any(one.sign_flip is None for one in tests):
        caption += f" {fmt.NONE} under sign flip: too many seeds to try every pattern of signs."
    return Table.build("tests", f"Paired tests on {study.name}", columns, tests, caption)


def traffic(result: StudyResult) -> Table:
    """Make the table of bytes and seconds of one run."""

    def size(head: str, key: str, *names: str) -> Column:
        return Column(head, key, lambda s: sum(s.traffic[name] for name in names), fmt.bytes_text)

    columns = [
        Column("algorithm", "algorithm", "label"), Column("", "seconds", "seconds"),
        size("arrays down", "down", "bytes_down"), size("arrays up", "up", "bytes_up"),
        size("up, packed", "up_packed", "bytes_up_bound"),
        size("scalars", "scalars", "scalar_bytes_down", "scalar_bytes_up"),
        size("kept per client", "kept", "kept"), size("total", "total", "total"),
        Column("seconds", "", "seconds", "{:,.1f}".format),
    ]  # fmt: skip
    caption = "Mean over runs, all rounds and clients; packed: if whole numbers used no more bits "
    caption += "than they need; seconds: training time of a run's share of its pack."
    title = f"Traffic of one run on {result.study.name}"
    return Table.build("traffic", title, columns, result.scores, caption)


def settings(result: StudyResult) -> Table:
    """Make the table of the hyper-parameters that were used."""
    used = {label: runs[0].variant for label, runs in result.study.members.items()}

    def order(key: str) -> tuple[int, bool, str]:
        table = key.partition(".")[0]
        return {"client": 0, "server": 1}.get(table, 2), not key.endswith(".lr"), key

    keys = sorted({key for options in used.values() for key in options}, key=order)
    items = [{"algorithm": label, **dict.fromkeys(keys), **own} for label, own in used.items()]

    def others(item: dict[str, Any]) -> Cell:
        own = [key for key in keys if key not in _RATES and item[key] is not None]
        return words(", ".join(f"{key} {fmt.setting_text(item[key])}" for key in own))

    columns = [
        Column("algorithm", "algorithm", itemgetter("algorithm")),
        *(Column(k if k in _RATES else "", k, itemgetter(k), fmt.setting_text) for k in keys),
        Column("others", "", others),
    ]
    caption = "Every default is written out; what is not named is off."
    title = f"Hyper-parameters used on {result.study.name}"
    return Table.build("settings", title, columns, items, caption)


def beside_paper(result: StudyResult) -> Table | None:
    """Make a row per printed number; None if the paper has none for this task."""
    study, dataset = result.study, paper.COUNTERPARTS.get(result.study.task)
    if dataset is None or study.metric != _ACCURACY:
        return None
    numbers = list(_numbers(result, dataset))

    def gap(number: _Number) -> Cell:
        *_, kind, here, printed = number
        value = None if here is None or printed is None else here - printed
        return _paper_cell(kind, value, difference=True)

    columns = [
        Column("", "task", lambda _: study.name),
        Column("measure", "measure", lambda one: one[0]),
        Column("algorithm", "algorithm", lambda one: one[1]),
        Column("here", "here", lambda one: _paper_cell(one[2], one[3])),
        Column("paper", "paper", lambda one: _paper_cell(one[2], one[4])),
        Column("difference", "difference", gap),
    ]
    title = f"{study.name} beside the paper's {dataset.title}"
    caption = " ".join(_paper_caption(study, dataset))
    return Table.build("paper", title, columns, numbers, caption, words=2) if numbers else None


def _numbers(result: StudyResult, dataset: paper.Dataset) -> Iterator[_Number]:
    study = result.study
    named = [score for score in result.scores if score.label in dataset.scores]
    shown = {score.label: (score, dataset.scores[score.label]) for score in named}
    for i, level in enumerate(paper.THRESHOLDS):
        for label, (_, printed) in shown.items():
            reached = arrivals(study, study.members[label], level).averaged
            index = None if reached is None else reached - 1
            yield f"index at {_goal(level)}", label, "index", index, printed[i]
    # The paper's slowest is among its own algorithms, so others must not move the start.
    named_runs = {label: study.members[label] for label in shown}
    late, _ = late_means(replace(study, members=named_runs), paper.THRESHOLDS[1])
    for label, (_, printed) in shown.items():
        yield "late-stage mean", label, "share", late.get(label), printed[2]
    for label, (score, _) in shown.items():
        yield "final accuracy", label, "share", score.mean, None
    tested = dataset.tests if study.reference == paper.TESTED else {}
    for i, (measure, kind) in enumerate((("paired t", "t"), ("p, uncorrected", "p"))):
        for label in filter(tested.__contains__, shown):
            yield measure, label, kind, getattr(shown[label][0].test, kind, None), tested[label][i]


def _paper_cell(kind: str, value: float | None, *, difference: bool = False) -> Cell:
    if value is None:
        return round_cell(None) if kind == "index" and not difference else NOTHING
    if kind == "share":
        text = fmt.value_text(value, _ACCURACY, signed=difference)
    elif kind == "t" or difference:
        text = fmt.signed_text(value, {"index": ",d", "t": ".3f", "p": ".3g"}[kind])
    else:
        text = f"{value:,}" if kind == "index" else f"{value:.4g}"
    return Cell(text, value)


def _paper_caption(study: Study, dataset: paper.Dataset) -> Iterator[str]:
    low, high = map(_goal, paper.THRESHOLDS)
    if study.task in paper.STAND_INS:
        yield f"{study.task} only stands in for {dataset.title}, so the differences say little."
    yield (
        "The paper counts from 0: index 80 is round 81. Late stage: mean accuracy after the "
        f"slowest of these algorithms reached {high}. The paper's tables have {low} and {high} for "
        f"every data set; it prints no final accuracies. t and p: paired test of {paper.TESTED} "
        "minus the algorithm, not corrected, as in the paper. Difference: here minus paper."
    )
    own = {key: study.protocol.get(key, value) for key, value in paper.PROTOCOL.items()}
    differing = [f"{own[k]} {k} instead of {v}" for k, v in paper.PROTOCOL.items() if own[k] != v]
    differing += [f"participation.{key} {value}" for key, value in study.participation.items()]
    seeds = max(len(runs) for runs in study.members.values())
    if seeds != paper.SEEDS:
        differing.append(f"{seeds} seeds instead of {paper.SEEDS}")
    if differing:
        yield f"Other than in the paper: {', '.join(differing)}."
