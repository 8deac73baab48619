"""Install the peers, run the work in turns, compare and print."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fedzmg.provenance import environment
from fedzmg.storage.formats import write_json
from peers.environments import OURS, PEERS, PLAIN, Failed, Peer, interpreter, train
from peers.networks import build, prepare
from peers.ours import define, has_dropout
from peers.table import TOLERANCE, Outcome, distance, doubts, render, rows
from peers.work import Arrays, Facts, Work, cores, load_arrays

GENTLE = 0.1
"""Models are compared after a round at this part of the learning rate: at the whole of it, one
unit that the last bit switches on or off moves a CNN's update by a tenth within 25 steps."""


class Plan(NamedTuple):
    """Measurement plan of a workload."""

    lr: float
    warm_up: int
    """Rounds before those that count: imports, compilation and caches are behind them."""
    rounds: int
    turns: int
    population: int = 100
    whole: int = 0
    """Rounds of a published benchmark, to which the times are extrapolated."""


PLANS = {
    "mlp": Plan(0.05, 2, 10, 3),
    "cifar100": Plan(0.05, 1, 2, 2),
    "pfl-cifar10": Plan(0.1, 2, 20, 1, population=1000, whole=1500),
}


def main() -> None:
    """Measure and print; a peer that fails is a line of the table."""
    arguments = parse()
    # Ends as an interrupt does: the peer at work ends too, and what lies on the disk goes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(arguments.cores)
    if hasattr(os, "sched_setaffinity"):
        # Inherited by every process below, whatever its own idea of threads.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    plan = PLANS[arguments.workload]
    plan = plan._replace(
        rounds=arguments.rounds or plan.rounds, turns=arguments.turns or plan.turns,
        population=arguments.population or plan.population,
        whole=0 if arguments.population else plan.whole,
    )  # fmt: skip
    facts = Facts(
        network=arguments.workload, dropout=has_dropout(arguments.workload),
        population=plan.population, lr=plan.lr, device=arguments.device,
        precision=arguments.precision,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        contest = Contest(Path(temporary), facts, plan, arguments.cores, arguments.timeout)
        contest.install([PEERS[name] for name in arguments.peers], arguments.environments)
        contest.compare()
        for turn in range(plan.turns):
            contest.turn(turn)
        table = contest.table()
        print(f"\n{contest.summary()}\n\n{render(table)}")
    if arguments.out:
        command = " ".join(["python", *sys.argv])
        facts_of_run = {**environment(torch.device(arguments.device)), "command": command}
        write_json(
            arguments.out,
            {"environment": facts_of_run, "work": contest.described(), "peers": table},
        )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="run.py", description="FedAvg rounds of fedzmg and of other systems: the same work."
    )
    parser.add_argument("--workload", default="mlp", choices=list(PLANS))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rounds", type=int, help="timed rounds of a turn")
    parser.add_argument("--population", type=int, help="clients in all")
    parser.add_argument("--turns", type=int, help="every peer trains that often")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="float32", choices=list(TOLERANCE))
    parser.add_argument("--cores", type=int, default=cores(), help="for each peer, at most")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one peer's turn")
    parser.add_argument(
        "--environments", type=Path, default=Path(tempfile.gettempdir()) / "fedzmg-peers",
        help="where peers are installed, and found the next time",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="keep the figures in this JSON file")
    return parser.parse_args()


class Contest:
    """Work on disk, its peers and their results."""

    def __init__(self, folder: Path, facts: Facts, plan: Plan, cores: int, timeout: float) -> None:
        self._folder, self._cores, self._timeout = folder, cores, timeout
        self._plan = plan
        self._work = define(facts, plan.warm_up + plan.rounds)
        self._work.save(folder / "work")
        self._outcomes: dict[Peer, Outcome] = {}
        self._pythons: dict[Peer, Path] = {}

    def install(self, peers: Sequence[Peer], environments: Path) -> None:
        """Make the environments, one after another."""
        device = self._work.facts.device
        for peer in peers:
            outcome = self._outcomes[peer] = Outcome(peer.title)
            if device not in peer.devices:
                outcome.failure = f"not measured on {device}"
                continue
            try:
                self._pythons[peer] = interpreter(peer, environments.absolute())
            except Failed as error:
                outcome.failure = f"not installed: {error}"
                print(f"{peer.title}: {outcome.failure}", flush=True)

    def compare(self) -> None:
        """Train one round without dropout; every peer must match the plain loop's model."""
        facts = self._work.facts
        gentle = {**vars(facts), "dropout": False, "lr": GENTLE * facts.lr}
        exact = define(Facts(**gentle), rounds=1)
        exact.save(self._folder / "exact")
        reference: Arrays | None = None
        for peer in self._taking_part():
            found = self._train(peer, exact, "exact", "compare")
            if found is None:
                continue
            model = found[1]
            if peer is PLAIN:
                reference = model
            if reference is not None:
                outcome = self._outcomes[peer]
                off = outcome.difference = distance(model, reference, exact.start)
                if not off <= TOLERANCE[facts.precision]:
                    outcome.failure = f"another model after one round: update off by {off:.0e}"
                print(f"one round: {peer.title}, update off by {off:.0e}", flush=True)

    def turn(self, number: int) -> None:
        """Run all rounds once with every peer."""
        for peer in self._taking_part():
            outcome, began = self._outcomes[peer], time.time()
            found = self._train(peer, self._work, "work", f"turn-{number}")
            if found is None:
                print(f"{peer.title}: {outcome.failure}", flush=True)
                continue
            report, last = found
            outcome.loss = self._loss(self._work.start), self._loss(last)
            if not outcome.loss[1] < outcome.loss[0]:
                outcome.failure = "loss went from {:.3f} to {:.3f}".format(*outcome.loss)
                continue
            outcome.add(report, began=began, warm_up=self._plan.warm_up)
            ms = outcome.turns[-1]
            print(f"turn {number + 1}: {peer.title} {np.median(ms):.1f} ms per round", flush=True)

    def table(self) -> list[dict[str, Any]]:
        """Collect the results so far."""
        none = Outcome("")
        plain, ours = (self._outcomes.get(peer, none) for peer in (PLAIN, OURS))
        found = rows(list(self._outcomes.values()), plain, ours, self._work.steps)
        for row in found if self._plan.whole else ():
            if "failure" not in row:
                rest = (self._plan.whole - 1) * row["round_ms"] / 1e3
                row["extrapolated_seconds"] = row["cold_seconds"] + rest
        return found

    def described(self) -> dict[str, Any]:
        """Describe the work in numbers."""
        _, cohort, steps, size = self._work.batches.shape
        return {
            **vars(self._work.facts), "parameters": self._work.parameters, "cohort": cohort,
            "steps_per_client": steps, "batch_size": size, "warm_up_rounds": self._plan.warm_up,
            "timed_rounds": self._plan.rounds, "extrapolated_to_rounds": self._plan.whole,
            "turns": self._plan.turns, "cores": self._cores,
        }  # fmt: skip

    def summary(self) -> str:
        """Describe the work in one line."""
        work = self.described()
        return (
            "{network}: FedAvg, {parameters:,} parameters, {cohort} of {population} clients, "
            "{steps_per_client} steps of {batch_size}; {device}, {precision}, {cores} cores"
        ).format(**work)

    def _taking_part(self) -> list[Peer]:
        return [peer for peer in self._pythons if self._outcomes[peer].failure is None]

    def _train(
        self, peer: Peer, work: Work, folder: str, name: str
    ) -> tuple[Mapping[str, Any], Arrays] | None:
        """Read a peer's report and last model; None, with a reason, if it failed."""
        out = self._folder / name / peer.module
        try:
            train(
                self._pythons[peer], peer, self._folder / folder, out,
                device=work.facts.device, cores=self._cores, timeout=self._timeout,
            )  # fmt: skip
            report = json.loads((out / "report.json").read_text())
            last = load_arrays(out / "last.npz")
        except (Failed, FileNotFoundError) as error:
            self._outcomes[peer].failure = str(error)
            return None
        found = doubts(report, last, work.start, steps=work.steps, rounds=len(work.batches))
        if found:
            self._outcomes[peer].failure = "; ".join(found)
            return None
        return report, last

    @torch.no_grad()
    def _loss(self, model: Arrays) -> float:
        facts = Facts(**{**vars(self._work.facts), "device": "cpu"})
        taken = np.unique(self._work.batches[-1])
        x, y = torch.from_numpy(self._work.x[taken]), torch.from_numpy(self._work.y[taken])
        return F.cross_entropy(build(facts, model).eval()(prepare(x)), y).item()
