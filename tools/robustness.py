"""Print how conclusions depend on windows, single seeds and rounding; and test the paper's numbers.

    python tools/robustness.py

Reads results/ and trains nothing. Prints the numbers of docs/reproduction.md and docs/claims.md
that are not in the report's tables.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedzmg.data.heterogeneity import PAPER
from fedzmg.results.paper import COUNTERPARTS, TESTED
from fedzmg.results.significance import holm
from fedzmg.storage.files import log_bytes

RESULTS = Path(__file__).resolve().parents[1] / "results"
ALGORITHMS = ("fedzmg", "fedavg", "fedadam")
Curves = npt.NDArray[np.float64]


def curves(study: str, algorithm: str, seeds: int = 5) -> tuple[npt.NDArray[np.int64], Curves]:
    """Read the rounds of the scheduled evaluations (1, 6, ...) and the accuracy in % by seed."""
    found = []
    for seed in range(seeds):
        log = log_bytes(RESULTS / study / algorithm / f"seed-{seed}" / "metrics.jsonl")
        lines = [json.loads(line) for line in log.splitlines()]
        known = {line["round"]: line["metric"] for line in lines if line["metric"] is not None}
        found.append({round_: value for round_, value in known.items() if round_ % 5 == 1})
    return np.array(list(found[0])), 100 * np.array([list(each.values()) for each in found])


def rolling(values: Curves) -> Curves:
    """Average four evaluations; NaN for those without three before them."""
    means = np.lib.stride_tricks.sliding_window_view(values, 4, axis=-1).mean(-1)
    return np.concatenate([np.full((*values.shape[:-1], 3), np.nan), means], axis=-1)


def probability(gaps: Curves) -> float:
    """Compute the p-value of the paired t-test."""
    return float(stats.ttest_1samp(gaps, 0.0).pvalue)


def words(gaps: Curves) -> str:
    """Format mean and standard deviation, in points."""
    return f"{gaps.mean():+.2f} (sd {gaps.std(ddof=1):.2f})"


def interval(gaps: Curves) -> str:
    """Format mean, 95 % interval and every seed, in points."""
    low, high = stats.ttest_1samp(gaps, 0.0).confidence_interval()
    each = ", ".join(f"{gap:+.1f}" for gap in gaps)
    return f"{gaps.mean():+.2f}, {low:+.2f} to {high:+.2f} ({each})"


def cifar100() -> None:
    """Print arrivals, windows, single seeds and repetitions with other kernels."""
    rounds, _ = curves("cifar100-study", "fedzmg")
    of = {name: curves("cifar100-study", name)[1] for name in ALGORITHMS}
    print("arrivals of single seeds, at 20 % and at 33 %")
    for name, values in of.items():
        arrived = [rounds[(rolling(values) >= level).argmax(1)].tolist() for level in (20, 33)]
        print(f"  {name:8}{arrived[0]}  {arrived[1]}")
    ahead = rolling(of["fedzmg"].mean(0)) > rolling(of["fedadam"].mean(0))
    print(f"the averaged curve of fedzmg leads fedadam's until round {rounds[ahead].max()}", end="")
    ahead = rolling(of["fedzmg"]) > rolling(of["fedadam"])
    print("; with single seeds:", *(rounds[each].max() for each in ahead))
    there = rolling(np.delete(of["fedzmg"], 2, axis=0).mean(0)) >= 33
    print(f"fedzmg's averaged curve without seed 2 is at 33 % after round {rounds[there.argmax()]}")
    windows = {"final": rounds > 900, "late stage": rounds > 756}
    for other in ("fedavg", "fedadam"):
        print(f"fedzmg minus {other}, paired over seeds")
        for name, window in windows.items():
            gaps = of["fedzmg"][:, window].mean(1) - of[other][:, window].mean(1)
            without = [probability(np.delete(gaps, seed)) for seed in range(len(gaps))]
            print(
                f"  {name:11}{words(gaps)}, p {probability(gaps):.3f}; without one seed:", end=" "
            )
            print(*(f"{p:.3f}" for p in without))
    middle = (rounds > 450) & (rounds <= 500)
    print("rounds 451 to 496")
    for name, values in of.items():
        means = values[:, middle].mean(1)
        print(f"  {name:8}{means[:3].mean():.2f} with seeds 0 to 2, {means.mean():.2f} with all")
    for name, variant in (
        ("fedzmg", "average-projection-momentum-decay"),
        ("fedavg", "average-plain"),
    ):
        own, values = curves("ablation-factors-study", variant, seeds=3)
        gaps = values[:, own > 450].mean(1) - of[name][:3, middle].mean(1)
        print(f"  {name:8}retrained for the ablation: {words(gaps)}; by seed:", end=" ")
        print(*(f"{gap:+.2f}" for gap in gaps))
    own, tf32 = curves("precision-tf32", "fedzmg")
    last = own[own > 135]
    gaps = of["fedzmg"][:, np.isin(rounds, last)].mean(1) - tf32[:, np.isin(own, last)].mean(1)
    print("the same five seeds in tf32 with other kernels, rounds", *last, end=": ")
    print(f"{words(gaps)}, at most {abs(gaps).max():.2f}")


VARIANTS = ("without-momentum", "smaller-client-rate", "centred-biases", "fedzmg-adam")


def cifar100_variants() -> None:
    """Print FedZMG's variants on the study's seeds and rounds."""
    rounds, _ = curves("cifar100-study", "fedzmg")
    of = {name: curves("cifar100-study", name)[1] for name in ALGORITHMS}
    of |= {name: curves("cifar100-variants-study", name)[1] for name in VARIANTS}
    final, late = rounds > 900, rounds > 756
    for name, values in of.items():
        arrived = [int(rounds[(rolling(values.mean(0)) >= level).argmax()]) for level in (20, 33)]
        seeds = [rounds[(rolling(values) >= level).argmax(1)] for level in (20, 33)]
        spans = " and ".join(f"{each.min()} to {each.max()}" for each in seeds)
        print(f"  {name:20}at 20 and 33 %: {arrived[0]}, {arrived[1]} (by seed {spans});", end=" ")
        print(f"late stage {values[:, late].mean():.2f} %, final", end=" ")
        print(*(f"{each:.2f}" for each in values[:, final].mean(1)))
    for name in VARIANTS:
        for other in ALGORITHMS:
            gaps = (of[name] - of[other])[:, final].mean(1)
            print(f"  {name} minus {other}: {interval(gaps)}, p {probability(gaps):.5f}")
    half = (rounds > 450) & (rounds <= 500)
    print("  rounds 451 to 496:", end=" ")
    print(*(f"{name} {values[:, half].mean():.2f} %" for name, values in of.items()), sep=", ")
    small = of["smaller-client-rate"]
    for study, variant in (
        ("ablation-factors-study", "average-momentum-decay"),
        ("ablation-factors-study", "average-projection-decay"),
        ("ablation-centralization-study", "global-gc"),
    ):
        own, values = curves(study, variant, seeds=3)
        gaps = small[:3, half].mean(1) - values[:, own > 450].mean(1)
        print(f"  there, seeds 0 to 2: smaller-client-rate minus {variant}: {interval(gaps)}")
    gaps = (small - of["without-momentum"])[:, half].mean(1)
    print(f"  there, all seeds: smaller-client-rate minus without-momentum: {interval(gaps)}")
    searched = np.isin(rounds, (41, 46))
    print(f"  where the search looks, rounds {rounds[searched]}:")
    for name in ("fedzmg", "smaller-client-rate"):
        print(f"    {name:20}", *(f"{each:.1f}" for each in of[name][:, searched].mean(1)))
    gaps = (small - of["fedzmg"])[:, searched].mean(1)
    print(f"    smaller-client-rate minus fedzmg: {interval(gaps)}")
    for other in ("fedzmg", "fedadam", "without-momentum"):
        behind = rolling(of["smaller-client-rate"].mean(0)) < rolling(of[other].mean(0))
        print(f"  smaller-client-rate is behind {other} at {behind.sum()} evaluations", end="")
        print(f", last after round {rounds[behind].max()}" if behind.any() else "")


def cifar100_named() -> None:
    """Print what SCAFFOLD and FedCAda end above or below on the study's first three seeds."""
    rounds, _ = curves("cifar100-study", "fedzmg")
    of = {name: curves("cifar100-study", name, seeds=3)[1] for name in ALGORITHMS}
    for name in ("smaller-client-rate", "fedzmg-adam"):
        of[name] = curves("cifar100-variants-study", name, seeds=3)[1]
    final = {name: values[:, rounds > 900].mean(1) for name, values in of.items()}
    for name in ("scaffold", "fedcada"):
        ends = curves("cifar100-named-study", name, seeds=3)[1][:, rounds > 900].mean(1)
        print(f"  {name}, final:", *(f"{each:.2f}" for each in ends))
        for other, others in final.items():
            print(f"    minus {other}: {interval(ends - others)}")


def mnist_by_writer() -> None:
    """Print the seed with which FedAdam collapsed, and the results without it."""
    rounds, adam = curves("mnist-by-writer-study", "fedadam")
    fell = rounds[(adam[0] < 90) & (rounds > 101)]
    print(
        f"fedadam, seed 0: {adam[0][rounds == fell[0] - 5].item():.1f} % after round "
        f"{fell[0] - 5}, {adam[0][rounds == fell[1]].item():.1f} % after {fell[1]}, at most "
        f"{adam[0][rounds > fell[1]].max():.1f} % from there on; other seeds after round 100 at "
        f"least {adam[1:, rounds > 100].min():.1f} %"
    )
    for name in ALGORITHMS:
        values = curves("mnist-by-writer-study", name)[1]
        means = [values[1:, rounds > 16].mean(), values[1:, rounds > 900].mean()]
        print(f"  {name:8}seeds 1 to 4: late stage {means[0]:.2f} %, final {means[1]:.2f} %")
    for name in ALGORITHMS:
        mean = curves("mnist-by-writer-study", name)[1].mean(0)
        print(
            f"  {name:8}all seeds: {mean[0]:.1f} % after round 1, {mean[1]:.1f} % after {rounds[1]}"
        )
    gaps = (curves("mnist-by-writer-study", "fedzmg")[1] - adam)[1:, rounds > 900].mean(1)
    print(f"  fedzmg minus fedadam, seeds 1 to 4: {words(gaps)}, p {probability(gaps):.4f}")


def shakespeare_by_role() -> None:
    """Print every seed of the reduced protocol, and the rounds of collapses."""
    study = "shakespeare-by-role-reduced-study"
    for name in ALGORITHMS:
        rounds, values = curves(study, name, seeds=3)
        for seed, curve in enumerate(values):
            means = rolling(curve)
            arrived = [
                str(rounds[(means >= level).argmax()]) if (means >= level).any() else "never"
                for level in (20, 33, 35, 45)
            ]
            at = ", ".join(
                f"{curve[rounds == each].item():.1f} % at {each}" for each in (1, 21, 66)
            )
            print(f"  {name:8}seed {seed}: {at}; best {curve.max():.1f} % at", end=" ")
            print(f"{rounds[curve.argmax()]}; final {curve[rounds > 180].mean():.2f} %;", end=" ")
            print("at 20, 33, 35, 45 %:", *arrived)
    rounds, own = curves(study, "fedzmg", seeds=3)
    average = curves(study, "fedavg", seeds=3)[1]
    ahead = rolling(own[:2]) > rolling(average[:2])
    print("  fedzmg leads fedavg, seeds 0 and 1, until", *(rounds[each].max() for each in ahead))
    gaps = (own - average)[:2, rounds > 180].mean(1)
    print("  fedzmg minus fedavg, final, seeds 0 and 1:", *(f"{gap:+.2f}" for gap in gaps))


def shakespeare_by_role_search() -> None:
    """Print the finalists of the search of 300 rounds, and when FedAvg passes FedZMG."""
    chosen: dict[str, Curves] = {}
    finalists: dict[tuple[str, float], Curves] = {}
    grid = "shakespeare-by-role-{}-grid"
    for name in ("fedzmg", "fedzmg-no-embedding", "fedavg", "fedadam", "fedavg-momentum"):
        of = RESULTS / grid.format("momentum" if name == "fedavg-momentum" else "halving")
        log = log_bytes(of / name / "metrics.jsonl")
        trials: dict[tuple[float, float], dict[int, float]] = {}  # later lines of a log win
        for line in map(json.loads, log.splitlines()):
            pair = line["client.lr"], line["server.lr"]
            trials.setdefault(pair, {})[line["round"]] = 100 * line["metric"]
        for pair, points in trials.items():
            rounds, values = np.array(sorted(points.items())).T
            if rounds[-1] < 300:
                continue
            finalists[name, pair[0]] = np.stack([rounds, values])
            best, last = values.argmax(), values[rounds > 290].mean()
            print(f"  {name:20}{pair[0]:.3g}, {pair[1]:.3g}: best {values[best]:.2f} %", end="")
            print(f" at {rounds[best]:.0f}; last ten rounds {last:.3f} %")
            if name not in chosen or last > chosen[name][1][rounds > 290].mean():
                chosen[name] = finalists[name, pair[0]]
    behind = chosen["fedavg"][1] <= chosen["fedzmg"][1]
    print(f"  fedavg is behind fedzmg until round {chosen['fedavg'][0][behind].max():.0f}")
    for lr in (10**-1, 10**-0.5):
        gain = finalists["fedzmg", lr][1] - finalists["fedavg-momentum", lr][1]
        print(
            f"  fedzmg minus fedavg-momentum at {lr:.3g}, 1: {gain.min():+.2f} to {gain.max():+.2f}"
        )


def paper() -> None:
    """Print what follows from the paper's own tables: p-values, Holm, late stages, volumes, KL."""
    printed = [COUNTERPARTS[name] for name in ("emnist62", "cifar100", "shakespeare")]
    tests = [(one.title, other, *values) for one in printed for other, values in one.tests.items()]
    corrected = holm([p for *_, p in tests])
    for (title, other, t, p), own in zip(tests, corrected, strict=True):
        exact = 2 * stats.t.sf(t, 4)
        print(f"  {title}, {TESTED} minus {other}: t {t}, p {p} (by t: {exact:.4g}); ", end="")
        print(f"Holm over all six {own:.2g}")
    for one in printed:
        late = {name: 100 * values[-1] for name, values in one.scores.items()}
        gaps = [f"{late[TESTED] - late[other]:+.2f} over {other}" for other in one.tests]
        print(f"  {one.title}, late stage of {TESTED}:", ", ".join(gaps))
    table = {name: column["summary"] for name, column in PAPER.items()}
    for name, row in table.items():
        print(f"  {name}: volume ± {row['volume'][1]}, {row['distinct'][0]} distinct classes")
    share, found = table["cifar100"]["entropy"][0], table["cifar100"]["kl"][0]
    print(f"  cifar100: entropy {share} means KL {np.log(100) * (1 - share):.2f} from the", end=" ")
    print(f"uniform distribution of all clients; printed {found}")


def main() -> None:
    """Print it all."""
    print("The paper's own numbers")
    paper()
    print("CIFAR-100")
    cifar100()
    print("CIFAR-100, variants of FedZMG")
    cifar100_variants()
    print("CIFAR-100, SCAFFOLD and FedCAda")
    cifar100_named()
    print("MNIST by writer")
    mnist_by_writer()
    print("Shakespeare by role, reduced protocol")
    shakespeare_by_role()
    print("Shakespeare by role, search of 300 rounds")
    shakespeare_by_role_search()


if __name__ == "__main__":
    main()
