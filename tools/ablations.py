"""Print the effect of each of FedZMG's parts: differences within and between ablation studies.

    python tools/ablations.py

Reads results/ and trains nothing. All studies share seeds, cohorts and batches: variants are
paired across studies. Differences are in points of the final accuracy.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedzmg.experiment.run_directory import RunDirectory

RESULTS = Path(__file__).resolve().parents[1] / "results"
SERVERS = {"average": "ablation-factors-study", "adam": "ablation-factors-adam-study"}
PARTS = ("projection", "momentum", "decay")
PROTOCOL = ([0, 1, 2], 500, "tf32")
"""Seeds, rounds and precision of all of them."""
AVERAGE, ADAM = (f"{study}/{server}" for server, study in SERVERS.items())
LAYERS, KIN, HYBRIDS, CENTRED = (
    f"ablation-{name}-study" for name in ("layers", "centralization", "hybrids", "centring")
)
COMPARED = {
    "all parts, or all but one, against none": [
        (f"{AVERAGE}-projection-momentum-decay", f"{AVERAGE}-plain"),
        (f"{AVERAGE}-projection-decay", f"{AVERAGE}-plain"),
        (f"{AVERAGE}-momentum-decay", f"{AVERAGE}-plain"),
        (f"{ADAM}-projection-momentum-decay", f"{ADAM}-plain"),
    ],
    "where the projection acts": [
        (f"{LAYERS}/first-layer", f"{AVERAGE}-decay"),
        (f"{LAYERS}/convolutions", f"{AVERAGE}-decay"),
        (f"{LAYERS}/all-but-last", f"{AVERAGE}-decay"),
        (f"{AVERAGE}-projection-decay", f"{AVERAGE}-decay"),
        (f"{LAYERS}/convolutions", f"{LAYERS}/first-layer"),
        (f"{LAYERS}/all-but-last", f"{LAYERS}/convolutions"),
        (f"{AVERAGE}-projection-decay", f"{LAYERS}/all-but-last"),
    ],
    "its kin": [
        (f"{KIN}/local-gc", f"{AVERAGE}-projection-momentum"),
        (f"{KIN}/gc-fed", f"{AVERAGE}-projection-momentum"),
        (f"{KIN}/global-gc", f"{AVERAGE}-momentum"),
        (f"{KIN}/global-gc", f"{AVERAGE}-projection-decay"),
    ],
    "a projected step of Adam on the server": [
        (f"{HYBRIDS}/fedzmg-adam-projected", f"{ADAM}-projection-momentum-decay"),
        (f"{HYBRIDS}/without-momentum", f"{ADAM}-projection-decay"),
        (f"{HYBRIDS}/server-only", f"{ADAM}-decay"),
    ],
    "centred images": [
        (f"{CENTRED}/fedavg", f"{AVERAGE}-plain"),
        (f"{CENTRED}/projection", f"{AVERAGE}-projection-decay"),
        (f"{CENTRED}/momentum", f"{AVERAGE}-momentum-decay"),
        (f"{CENTRED}/fedzmg", f"{AVERAGE}-projection-momentum-decay"),
    ],
    "the projection, images centred": [
        (f"{CENTRED}/projection", f"{CENTRED}/fedavg"),
        (f"{CENTRED}/fedzmg", f"{CENTRED}/momentum"),
    ],
}
"""Variants and what each is compared with, by question; named by study and directory."""


def score(variant: str) -> dict[str, Any] | None:
    """Read final accuracies by seed in % and rounds to the thresholds; None if it was not run."""
    study, _, directory = variant.partition("/")
    path = RESULTS / study / "study.json"
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    # Otherwise runs would not be paired.
    assert (data["seeds"], data["rounds"], data["precision"]) == PROTOCOL, path
    for label, entry in data["algorithms"].items():
        if entry["directory"] == directory:
            rules = [t["rules"]["rolling_mean"] for t in data["thresholds"]]
            return {
                "finals": finals_of(entry),
                "diverged": entry["diverged"],
                "arrivals": [rule["arrival"][label]["averaged"] for rule in rules],
                "by seed": [rule["arrival"][label]["runs"] for rule in rules],
                "curve": 100 * np.array(data["curves"][label]["runs"], dtype=float).mean(0),
                "rounds": np.array(data["curves"][label]["rounds"]),
                "own": 100 * own_accuracy(RESULTS / study / directory),
                "options": entry["options"],
            }
    return None


def finals_of(entry: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Return final accuracies by seed in %, NaN for a diverged run."""
    runs = zip(entry["final"]["full"]["runs"], entry["diverged"], strict=True)
    return np.array([100 * final if round_ is None else np.nan for final, round_ in runs])


def own_accuracy(directory: Path) -> float:
    """Average the last model's accuracy on clients' own examples over runs and clients."""
    runs = [RunDirectory(run).clients()[-1] for run in sorted(directory.glob("seed-*"))]
    return float(np.mean([run.metric.mean() for run in runs]))


def gaps_in_words(gaps: npt.NDArray[np.float64]) -> str:
    """Format mean, 95 % interval of the paired t-test and every seed; no mean if one diverged."""
    seeds = ", ".join("diverged" if np.isnan(gap) else f"{gap:+.1f}" for gap in gaps)
    if np.isnan(gaps).any():
        return f"   none  ({seeds})"
    half = stats.sem(gaps) * stats.t.ppf(0.975, len(gaps) - 1)
    return f"{gaps.mean():+6.2f}  ({gaps.mean() - half:+.1f} to {gaps.mean() + half:+.1f}; {seeds})"


def finals_in_words(each: dict[str, Any]) -> str:
    """Format mean and sd of three seeds, or the rounds in which runs diverged."""
    finals = each["finals"]
    if np.isnan(finals).any():
        return f"diverged: {each['diverged']}"
    return f"{finals.mean():6.2f} ± {finals.std(ddof=1):.2f}"


def variant_of(server: str, parts: set[str]) -> str:
    """Name a variant by its parts."""
    chosen = [part for part in PARTS if part in parts] or ["plain"]
    return f"{SERVERS[server]}/{'-'.join([server, *chosen])}"


def print_parts(server: str) -> None:
    """Print every variant of a server, then the effect of each part."""
    sets = [set(c) for n in range(4) for c in itertools.combinations(PARTS, n)]
    found = {frozenset(parts): score(variant_of(server, parts)) for parts in sets}
    if any(each is None for each in found.values()):
        print(f"server {server}: not run yet")
        return
    known = {parts: each for parts, each in found.items() if each is not None}
    print(
        f"server {server}: final accuracy, mean and sd of three seeds; rounds to 20 and 33 %, to "
        "33 % by seed; accuracy on clients' own examples; rates"
    )
    for parts, each in known.items():
        name = " + ".join(part for part in PARTS if part in parts) or "plain"
        rates = each["options"]["client.lr"], each["options"]["server.lr"]
        print(
            f"  {name:30}{finals_in_words(each)}  "
            f"{each['arrivals'][0]!s:>5} {each['arrivals'][1]!s:>5} {each['by seed'][1]!s:20}"
            f"{each['own']:7.1f}   {rates[0]}, {rates[1]}"
        )
    for rest in ({"momentum"}, {"momentum", "decay"}):
        lead = known[frozenset(rest | {"projection"})]["curve"] - known[frozenset(rest)]["curve"]
        rolled, at = (
            np.convolve(lead, np.ones(4) / 4, "valid"),
            known[frozenset(rest)]["rounds"][3:],
        )
        above = np.flatnonzero(rolled >= 1)
        print(
            f"  lead of the projection beside {' + '.join(sorted(rest))}: {rolled.max():.1f} at "
            f"most, after round {at[rolled.argmax()]}; last above 1 after {at[above[-1]]}, at the "
            f"end {rolled[-1]:+.1f}"
        )
    for part in PARTS:
        print(f"  what {part} adds, to")
        for parts, each in known.items():
            if part not in parts:
                gaps = known[parts | {part}]["finals"] - each["finals"]
                name = " + ".join(p for p in PARTS if p in parts) or "nothing else"
                print(f"    {name:28}{gaps_in_words(gaps)}")


def main() -> None:
    """Print it all."""
    for server in SERVERS:
        print_parts(server)
    lost = score(variant_of("adam", {"projection"}))
    if lost is not None:
        lived = lost["rounds"] <= min(lost["diverged"]) - 20
        late = lost["curve"][lived & (lost["rounds"] > 200)]
        print(
            f"the projection alone with Adam after round 200 until 20 rounds before the first "
            f"diverged: {late.min():.1f} to {late.max():.1f} %"
        )
    for question, pairs in COMPARED.items():
        print(f"{question}: final accuracy; rounds to 20 and 33 %; minus another")
        for variant, base in pairs:
            one, other = score(variant), score(base)
            name, base_name = (each.partition("/")[2] for each in (variant, base))
            if one is None or other is None:
                print(f"  {name}: not run yet")
            else:
                arrivals = " ".join(f"{arrival!s:>5}" for arrival in one["arrivals"])
                print(
                    f"  {name:37}{finals_in_words(one):14} {arrivals}; minus {base_name:30}"
                    f"{gaps_in_words(one['finals'] - other['finals'])}"
                )


if __name__ == "__main__":
    main()
