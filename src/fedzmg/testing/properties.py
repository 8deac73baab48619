"""Properties of every algorithm: each raises a :class:`Violation`, or returns a remark."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedzmg.algorithms.options import configure
from fedzmg.engine.choose import EnginePlanner
from fedzmg.simulation import simulate
from fedzmg.simulation.dry_run import check_pure, rehearse, same
from fedzmg.simulation.rule_errors import where
from fedzmg.testing.case import TOLERANCE, Case, ChangedPlanner, distance, run_of, with_inputs
from fedzmg.testing.result import Violation
from fedzmg.tree import Tree, leaves, num_bytes, row
from fedzmg.wrappers.parts import travelling

ENGINES = ("sequential", "vectorized")


def _rules_are_pure(case: Case) -> str:
    """Shapes, types, changed arguments, random numbers and NaN, method by method."""
    packed, models = case.packed_rules()
    check_pure(packed, models)
    calls = {call.method: call for call in rehearse(packed, models)}
    values = {method: call.value for method, call in calls.items()}
    for method, found, wanted in (
        ("step", values["step"], (models, values["begin"])),
        ("finish", values["finish"][1], values["init_memory"]),
        ("update", values["update"], (models, values["init"])),
    ):
        for new, old in zip(leaves(found), leaves(wanted), strict=True):
            if new.dtype != old.dtype:
                raise Violation(
                    f"{where(calls[method].rule, method)} returned a {new.dtype} of shape "
                    f"{tuple(new.shape[1:])} where it was {old.dtype}: make states with the type "
                    "of the model, such as next(iter(params.values())).new_zeros(())"
                )
    return ""


def _zero_gradients_are_finite(case: Case) -> str:
    check_pure(*case.packed_rules(), grad=0.0)
    return ""


def _options_make_the_same_algorithm(case: Case) -> str:
    options = case.algorithm.options()
    other = configure(case.algorithm, options)
    if other != case.algorithm:
        raise Violation(f"{other} was made of the options of {case.algorithm}")
    return f"{len(options)} options"


def _numbers_can_be_packed(case: Case) -> str:
    fields = case.algorithm.fields()
    values = {key: getattr(rule, f.name) for key, (rule, f) in fields.items()}
    floats = [key for key, value in values.items() if isinstance(value, float)]
    if plain := [key for key in floats if "number" not in fields[key][1].metadata]:
        problem = "trials with other values of a plain float cannot train together"
        raise Violation(f"{', '.join(plain)}: declare with number(DEFAULT, doc=...); {problem}")
    first, second = (trial.algorithm.options() for trial in case.trials())
    varied = [key for key in first if first[key] != second[key]]
    case.packed_rules()  # an error if trials do not fit together
    return f"trained with different {', '.join(varied)}" if varied else "no numbers"


def _engines_agree(case: Case) -> str:
    """All engines, also with chunks and clients in another order."""
    first, reference = (snapshot.params for snapshot in case.run("sequential").snapshots)
    if distance(reference, first)[0] <= 1e-6:
        raise Violation("the algorithm does nothing: the second round did not change the model")
    reverse = ChangedPlanner(case.task(), case.algorithm, lambda batches: batches[::-1])
    chunked = case.simulation(EnginePlanner("vectorized", chunk=3), planner=reverse)
    # The second round reads the client memory that the first one wrote.
    others = {"vectorized": case.run("vectorized")}
    others["chunks of clients in another order"] = run_of(chunked)
    others["cuda_graph"] = run_of(case.simulation("cuda_graph"))
    return _all_close(reference, {k: run.snapshots[-1].params for k, run in others.items()})


def _all_close(reference: Any, others: dict[str, Any], what: str = "sequential") -> str:
    found = {name: distance(reference, other) for name, other in others.items()}
    name, (gap, leaf) = max(found.items(), key=lambda item: item[1])
    if not gap < TOLERANCE:
        raise Violation(f"{what} and {name} differ by {gap:.1e} in {leaf}, more than {TOLERANCE}")
    return f"within {gap:.0e}"


def _packed_equals_alone(case: Case) -> str:
    for engine in ENGINES:
        packed = case.run(engine)
        alone = run_of(case.simulation(engine, chosen=case.trials()[1:]))
        same = [records[1:] for records in packed.records], row(packed.snapshots[1], 1)
        what = f"{engine}: a trial alone and the same trial in a pack"
        _equal_bits((alone.records, row(alone.snapshots[1], 0)), same, what)
    return "equal bits"


def _resumed_equals_whole(case: Case) -> str:
    for engine in ENGINES:
        whole = case.run(engine)
        resumed = case.simulation(engine, restored=whole.kept)
        if resumed.round != 1:
            raise Violation(f"{engine}: the checkpoint after round 1 is of round {resumed.round}")
        what = f"{engine}: a resumed and an uninterrupted training"
        rest = whole.records[1:], whole.snapshots[-1]
        _equal_bits((run_of(resumed, 1).records, resumed.snapshot), rest, what)
    return "equal bits"


def _equal_bits(one: tuple[Any, Any], two: tuple[Any, Any], what: str) -> None:
    if not all(torch.equal(a, b) for a, b in zip(leaves(one[1]), leaves(two[1]), strict=True)):
        gap, leaf = distance(one[1], two[1])
        raise Violation(f"{what} differ by {gap:.1e} in {leaf}")
    if one[0] != two[0]:
        raise Violation(f"{what} have different records")


def _one_client_suffices(case: Case) -> str:
    problem = case.task((5,), cohort=1)
    loop, mapped = (run_of(case.simulation(engine, problem)) for engine in ENGINES)
    return _all_close(loop.snapshots[-1].params, {"vectorized": mapped.snapshots[-1].params})


def _useless_uploads_change_nothing(case: Case) -> str:
    """Clients without examples or without a full batch, and NaN in an upload."""
    base = case.task(keep_partial=False, cohort=7, epochs=1)
    # Clients of 3, 1 and 2 examples hold no full batch of 4, and the last one holds nothing.
    offsets = np.append(base.train.offsets, base.train.offsets[-1])
    data = replace(base.train, offsets=offsets, names=(*base.train.names, "empty"))
    clean = replace(base, train=data, protocol=replace(base.protocol, cohort=8))
    others = ChangedPlanner(
        clean, case.algorithm, lambda all_: [b for b in all_ if len(b.stream) and b.client != 3]
    )
    expected = run_of(case.simulation(problem=clean, planner=others)).snapshots[-1].params
    bad = with_inputs(clean, lambda x: x * torch.nan, 3)
    found = {engine: run_of(case.simulation(engine, bad)) for engine in ENGINES}
    for engine, run in found.items():
        counts = [(r.clients, r.dropped) for r in run.records[-1]]
        if set(counts) != {(3, 1)}:
            raise Violation(f"{engine}: (merged, dropped) = {counts[0]}, expected (3, 1)")
    models = {engine: run.snapshots[-1].params for engine, run in found.items()}
    return _all_close(expected, models, "without useless clients")


def _lost_round_changes_nothing(case: Case) -> str:
    sim = case.simulation(problem=with_inputs(case.task(), lambda x: x * torch.nan, None))
    before = sim.snapshot
    records = run_of(sim, 3).records
    for part in ("params", "state"):
        if not same(getattr(before, part), getattr(sim.snapshot, part)):
            raise Violation(f"a round that lost every upload changed the server's {part}")
    diverged = [rs[0].diverged for rs in records]
    if diverged != [False, False, True] or records[-1][0].metric != 0.0:
        raise Violation(f"diverged after three lost rounds: {diverged}")
    return ""


def _traffic_and_state_are_as_declared(case: Case) -> str:
    """Multiples of the model, or of its shared part; memory of a part of the model is left out."""
    sim, cohort = case.simulation(), case.task().protocol.cohort
    model = num_bytes(travelling(sim.program.rule, case.task().model.params()))
    # In float32, which the multiples are declared for: messages may be integers.
    one = case.task(), case.trials()[:1]
    record = simulate(*one, rounds=1, engine="sequential", device="cpu")[0].records[0]

    def size(state: object) -> float:
        if isinstance(state, Tree) and state and len(state) < len(sim.snapshot.params):
            return 0  # of a part of the model
        if isinstance(state, tuple | Tree):
            return sum(map(size, state.values() if isinstance(state, Tree) else state))
        # One number per client counts as a scalar.
        if not isinstance(state, Tensor) or state.shape[1:] in ((), (len(case.task().train),)):
            return 0
        return state[0].numel()

    weights = size(sim.snapshot.params)
    counted = {
        "down": record.bytes_down / model / cohort,
        "up": record.bytes_up / model / cohort,
        "client_keeps": size(sim.memory.fresh) / weights,
        "server_keeps": size(sim.snapshot.state) / weights,
    }
    shown = ", ".join(f"{name}={value:g}" for name, value in counted.items())
    if case.info is None:
        return f"not declared; counted {shown}"
    declared = {name: getattr(case.info, name) for name in counted}
    if wrong := [name for name, value in counted.items() if declared[name] != value]:
        each = (f"{name} = {declared[name]:g}: {counted[name]:g} counted" for name in wrong)
        raise Violation(f"{'; '.join(each)} (in models); declare it in AlgorithmInfo")
    return shown


def _step_compiles_as_one_graph(case: Case) -> str:
    # Equal clients: every width would be traced anew, and one of them shows that it can be.
    even = case.task((4,) * 7)
    traced = case.simulation(EnginePlanner("compiled", backend="eager"), even)
    mapped = case.simulation(problem=even)
    models = [run_of(sim, 1).snapshots[-1].params for sim in (mapped, traced)]
    return _all_close(models[0], {"compiled": models[1]}, "vectorized")


PROPERTIES: dict[str, Callable[[Case], str]] = {
    "pure rules": _rules_are_pure, "zero gradients": _zero_gradients_are_finite,
    "options": _options_make_the_same_algorithm, "numbers": _numbers_can_be_packed,
    "engines agree": _engines_agree, "packed = alone": _packed_equals_alone,
    "resumed = whole": _resumed_equals_whole, "one client": _one_client_suffices,
    "useless uploads": _useless_uploads_change_nothing, "lost round": _lost_round_changes_nothing,
    "bytes as declared": _traffic_and_state_are_as_declared,
    "compiled step": _step_compiles_as_one_graph,
}  # fmt: skip
