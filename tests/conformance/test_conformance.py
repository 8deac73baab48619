"""The conformance suite on every algorithm in the table, and on some with wrappers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fedzmg import Federation
from fedzmg.algorithms import ALGORITHMS, AlgorithmInfo
from fedzmg.algorithms.options import configure
from fedzmg.contract import chain
from fedzmg.simulation import EnginePlanner
from fedzmg.testing import PROPERTIES, Case, check_property
from fedzmg.testing.case import PACK, ChangedPlanner, distance, run_of, task, with_inputs
from fedzmg.tree import leaves


def wrapped(name: str, options: dict[str, Any]) -> AlgorithmInfo:
    info = ALGORITHMS[name]
    return replace(info, algorithm=configure(info.algorithm, options))


CLIPPED = {"client.clip_norm": 0.3, "client.clip_value": 0.1}
COSINE = {"client.schedule": "cosine", "client.horizon": 6}
DECAYED = {"server.decay": 0.05, "server.schedule": "exponential", "server.gamma": 0.7}
ENTRIES = {
    **ALGORITHMS,
    "wrapped clients": wrapped("fedzmg-adam", CLIPPED | COSINE),
    "wrapped server": wrapped("fedavg", DECAYED),
}
NAMES = list(ENTRIES)


def rule_types(name: str) -> tuple[Any, ...]:
    algorithm = ENTRIES[name].algorithm
    return tuple(
        type(rule) for side in (algorithm.client, algorithm.server) for rule in chain(side)
    )


def covering() -> list[str]:
    """Choose rows that together have every type of rule."""
    seen: set[Any] = set()
    chosen = []
    for name in ("fedavg", "fedzmg", *NAMES):
        if not seen.issuperset(rule_types(name)):
            seen.update(rule_types(name))
            chosen.append(name)
    return chosen


OFTEN = covering()
SOME = ("fedzmg", "scaffold", *OFTEN[::3])
TRACED = ("wrapped clients",)
"""Traced in every run: projection and wrappers; the rest with ``-m slow``."""
RARE = (
    *("pure rules", "zero gradients", "packed = alone", "resumed = whole"),
    *("one client", "useless uploads", "lost round", "bytes as declared"),
)
"""Checked in every run for some algorithms only; the golden tests run both engines for all."""


def row(name: str, prop: str) -> Any:
    """Mark other combinations of the same rules, and most compilations: ``-m slow``."""
    often = name in (TRACED if prop == "compiled step" else SOME if prop in RARE else OFTEN)
    return pytest.param(name, prop, marks=() if often else pytest.mark.slow)


@cache
def case(name: str) -> Case:
    return Case(ENTRIES[name])


@pytest.mark.parametrize(("name", "prop"), [row(n, p) for n in NAMES for p in PROPERTIES])
def test_property_holds(name: str, prop: str) -> None:
    found = check_property(case(name), prop)
    assert found.passed, f"{found.detail}\n{found.traceback}"


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_is_described_and_can_be_pickled(name: str) -> None:
    assert ENTRIES[name].about
    assert ENTRIES[name].source
    algorithm = ENTRIES[name].algorithm.for_layout(task().model.layout)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mimelite", "fedlion"])
def test_guard_rejects_an_outlier_whatever_packs_chunks_engines_and_resumes(name: str) -> None:
    # Deltas, totals and memory, averages, and deltas that are always small.
    clean, own = task(keep_partial=False, cohort=7, epochs=1), case(name)
    others = ChangedPlanner(
        clean, own.algorithm, lambda batches: [b for b in batches if b.client != 3]
    )
    expected = run_of(own.simulation(problem=clean, planner=others))
    outlier = with_inputs(clean, lambda x: x * 1e8, 3)
    stages: dict[str, Any] = {"problem": outlier, "federation": Federation(guard=True)}
    whole = run_of(own.simulation(**stages))
    assert [(r.clients, r.dropped) for r in whole.records[-1]] == [(3, 1)] * PACK
    assert [[c for c, _ in r.rejected] for r in whole.records[-1]] == [["3"]] * PACK
    for engine in ("sequential", "cuda_graph"):
        found = run_of(own.simulation(engine, **stages))
        assert distance(found.snapshots[-1].params, expected.snapshots[-1].params)[0] < 1e-9
    chunked = run_of(own.simulation(EnginePlanner("vectorized", chunk=2), **stages))
    alone = run_of(own.simulation(chosen=own.trials()[1:], **stages))
    resumed = own.simulation(restored=whole.kept, **stages)
    assert chunked.records == whole.records
    assert run_of(resumed, 1).records == whole.records[1:]
    assert [records[0] for records in alone.records] == [rs[1] for rs in whole.records]
    last = whole.snapshots[-1]
    for other in (expected.snapshots[-1], chunked.snapshots[-1], resumed.snapshot):
        for part in ("params", "state"):
            for a, b in zip(leaves(getattr(last, part)), leaves(getattr(other, part)), strict=True):
                assert torch.equal(a, b)
    for a, b in zip(leaves(alone.snapshots[-1]), leaves(last), strict=True):
        assert torch.equal(a[0], b[1])
