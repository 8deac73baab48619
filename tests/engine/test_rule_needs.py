"""Rules that use everything the contract offers: the same numbers in every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import InputError, Parts, Task, Trial, draw
from fedzmg.algorithms import ALGORITHMS, Average, ZeroMean
from fedzmg.algorithms.ditto import Ditto
from fedzmg.algorithms.qfedavg import FairAverage, LossWeighted
from fedzmg.contract import Algorithm, ClientRule, Need, Number, ServerRule, number
from fedzmg.engine.choose import EnginePlanner
from fedzmg.messages import (
    Asked,
    BatchOutputs,
    ClientContext,
    Cohort,
    FullPass,
    Result,
    Stepped,
    Upload,
)
from fedzmg.simulation import Simulation
from fedzmg.simulation.program import label_counts
from fedzmg.tree import State, Tree, leaves, tree_map
from fedzmg.wrappers.parts import fit
from golden_problems import random_task


@final
@dataclass(frozen=True)
class Everything(ClientRule):
    """A rule with an own loss, two gradients per step, own start, noise and memory."""

    lr: Number = number(0.1, above=0, doc="client learning rate")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(("client", "key", "steps", "label_counts", "features"))

    own_loss = True  # type: ignore[assignment]
    gradients_per_step = 2  # type: ignore[assignment]
    full_pass = "loss"  # type: ignore[assignment]

    def init_memory(self, params: Tree) -> State:
        return params.zeros()

    def start(self, context: ClientContext) -> Tree:
        return context.params + 0.01 * draw.normal(context.key, context.params)

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        assert isinstance(full_pass, FullPass)
        return full_pass.loss, context.params.zeros()

    def references(self, context: ClientContext) -> tuple[Tree, ...]:
        return (context.params, context.memory)

    def loss(self, context: ClientContext, batch: BatchOutputs) -> Tensor:
        shifted = batch.outputs - 0.1 * context.label_counts
        wanted = shifted.gather(1, batch.targets[:, None]).squeeze(1)
        distance = (batch.features - batch.reference_features[0]).square().sum(1)
        other = (batch.outputs - batch.reference_outputs[1]).square().sum(1)
        return batch.losses + shifted.logsumexp(1) - wanted + 0.1 * distance + 0.01 * other

    def next_point(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> Stepped:
        return params + 0.05 * grad, (scratch[0], grad)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        scale = 1 + 0.1 * context.client / context.steps
        moved = params - self.lr * scale * (grad + 0.5 * scratch[1])
        return moved, (scratch[0], scratch[1])

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return Upload(context.params - params, average=scratch[0]), params


@final
@dataclass(frozen=True)
class Shifted(ServerRule):
    """A server that sends another model than its own."""

    def send(self, params: Tree, state: State) -> Tree:
        return params * 0.9

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return params - cohort.delta * cohort.average, state


EVERYTHING = Algorithm("everything", Everything(), Shifted())
SIZES = (5, 12, 8, 3)


def task(sizes: Sequence[int] = SIZES, **changes: Any) -> Task:
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))
    made = random_task(net, list(sizes), inputs=6, classes=3, cohort=3, batch_size=4, epochs=2)
    return replace(made, **changes)


def final(
    algorithm: Algorithm, engine: Any, problem: Task | None = None, seeds: tuple[int, ...] = (0, 1)
) -> Simulation:
    trials = [Trial(algorithm, seed) for seed in seeds]
    sim = Simulation(
        problem or task(),
        trials,
        rounds=2,
        device=torch.device("cpu"),
        dtype=torch.float64,
        engine=engine,
    )
    for _ in range(2):
        sim.run_round()
    return sim


def distance(a: Any, b: Any) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(leaves(a), leaves(b), strict=True))


VARIANTS = {
    "plain": EVERYTHING,
    "zero mean": replace(EVERYTHING, client=ZeroMean(Everything())),
    "parts": replace(EVERYTHING, parts=Parts(personal=("last:1",), frozen=("0.bias",))),
}


@pytest.mark.parametrize(
    "name", ["plain", pytest.param("zero mean", marks=pytest.mark.slow), "parts"]
)
def test_engines_agree(name: str) -> None:
    algorithm = VARIANTS[name]
    expected = final(algorithm, "sequential")
    for path in ("vectorized", "cuda_graph", EnginePlanner("vectorized", chunk=2)):
        found = final(algorithm, path)
        assert distance(found.snapshot.params, expected.snapshot.params) < 1e-9
        assert distance(found.memory.of_trial(1), expected.memory.of_trial(1)) < 1e-9
    alone = final(algorithm, "vectorized", seeds=(1,)).snapshot.params
    packed = final(algorithm, "vectorized").snapshot.params
    assert all(torch.equal(alone[n][0], leaf[1]) for n, leaf in packed.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("path", ["compiled", "compiled_cuda_graph"])
def test_compiled_agrees(path: Any) -> None:
    backend = EnginePlanner(path, backend="aot_eager")
    problem = task((8, 8, 8))  # one width, so one compilation of each function
    expected, found = (
        final(VARIANTS["parts"], p, problem, seeds=(0,)).snapshot.params
        for p in ("sequential", backend)
    )
    assert distance(found, expected) < 1e-9


def test_parts_stay_where_they_belong() -> None:
    sgd = Algorithm("x", Everything(), Average(), parts=VARIANTS["parts"].parts)
    sim = final(sgd, "vectorized")
    begun = Simulation(
        task(), sim.trials, rounds=1, device=sim.device, dtype=sim.dtype, engine="vectorized"
    )
    start = begun.snapshot.params
    moved = {n for n, leaf in sim.snapshot.params.items() if not torch.equal(leaf, start[n])}
    assert moved == {"0.weight"}
    for client, (personal, _) in sim.memory.of_trial(0).items():
        assert set(personal) == {"3.weight", "3.bias"}, client
        assert not torch.equal(personal["3.weight"], start["3.weight"][0])
    record = sim.run_round().records[0]
    assert record.bytes_down == 3 * 8 * 30


def test_own_loss_by_hand() -> None:
    """One client and one full batch, with autograd on an ordinary module."""
    problem = task(train=replace(task().train), protocol=task().protocol)
    rule = Everything(lr=0.1)
    counts = torch.bincount(problem.train.examples.y[:5], minlength=3)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = problem.train.examples.x[:5].double()
    y = problem.train.examples.y[:5]
    features = module[:2](x)
    outputs = module(x)
    losses = nn.functional.cross_entropy(outputs, y, reduction="none")
    shifted = outputs - 0.1 * counts
    by_hand = losses + nn.functional.cross_entropy(shifted, y, reduction="none")
    by_hand = by_hand + 0.01 * outputs.square().sum(1)
    none = torch.zeros(())
    context = ClientContext(Tree({}), (), (), none, none, Asked(label_counts=counts))
    batch = BatchOutputs(
        losses, outputs, y, features, (outputs, torch.zeros_like(outputs)), (features, features)
    )
    torch.testing.assert_close(rule.loss(context, batch), by_hand)


def test_ignored_labels_are_not_counted() -> None:
    x, y = np.ones((6, 2), np.float32), np.array([0, -1, 2, 2, -100, 1])
    made = Task.from_arrays(
        nn.Linear(2, 3), x, y, [0, 0, 0, 1, 1, 1], test=(x[:1], y[:1]), cohort=2,
        loss=lambda out, t: nn.functional.cross_entropy(out, t.clamp(min=0), reduction="none"),
    )  # fmt: skip
    counts = label_counts(made, Everything(), torch.device("cpu"))
    assert isinstance(counts, Tensor)
    assert counts.tolist() == [[1, 0, 1], [0, 1, 1]]


def test_features_and_labels_need_a_classifier() -> None:
    last = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1))
    made = random_task(last, list(SIZES), inputs=6, classes=3, cohort=3, batch_size=4, epochs=1)
    with pytest.raises(InputError, match="'0'"):
        final(EVERYTHING, "vectorized", made)


@pytest.mark.parametrize(
    "parts", [{"personal": ("nothing*",)}, {"frozen": ("*",)}, {"personal": "*", "frozen": "norm"}]
)
def test_bad_parts(parts: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    made = random_task(net, list(SIZES), inputs=6, classes=3, cohort=3, batch_size=4, epochs=1)
    with pytest.raises(InputError):
        replace(made, parts=Parts(**parts))


def test_some_parameters_must_be_shared() -> None:
    with pytest.raises(InputError, match="parts \\*"):
        final(replace(ALGORITHMS["fedavg"].algorithm, parts=Parts(personal="*")), "vectorized")  # type: ignore[arg-type]


def personal_head(name: str) -> tuple[ClientRule, ServerRule, Tree]:
    """Rules of an algorithm on a model with a personal head, and its parameters."""
    model = task().model
    head = Parts(personal=("last:1",))
    fitted = fit(ALGORITHMS[name].algorithm, model.layout, head, 4)
    return fitted.client, fitted.server, model.params()


def context_of(client: ClientRule, server: ServerRule, params: Tree) -> ClientContext:
    """A context whose memory of the rule inside is 1 everywhere."""
    personal, memory = client.init_memory(params)
    one = torch.tensor(1)
    memory = tree_map(torch.ones_like, memory)
    shared = server.share(server.init(params))
    return ClientContext(params, shared, (personal, memory), one + 1, one)


@pytest.mark.parametrize(
    "name", ["scaffold", "feddyn", "adabest", "feddc", "fedspeed", "fedspeed:all"]
)
def test_personal_parameters_are_not_corrected(name: str) -> None:
    client, server, params = personal_head(name)
    context = context_of(client, server, params)
    scratch = client.begin(context, ())
    moved, _ = client.step(context, params, scratch, params.zeros())
    assert {n for n in params if not torch.equal(moved[n], params[n])} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("name", ["fedexp", "qfedavg"])
def test_norms_of_updates_are_those_of_shared_parameters(name: str) -> None:
    client, server, params = personal_head(name)
    context = context_of(client, server, params)
    seen = FullPass(torch.tensor(0.5), Tree({})) if client.full_pass == "loss" else ()
    scratch = client.begin(context, seen)
    upload, _ = client.finish(context, params + 1, scratch, torch.tensor(1))
    factor = 0.1 / 0.5 if name == "qfedavg" else 1
    assert float(upload.average[0]) == pytest.approx(35 * factor)


def test_wrappers_with_own_state_pass_the_points_of_gradients_on() -> None:
    """With q = 0 the wrapper changes nothing, and the rule inside takes two gradients."""
    plain = Algorithm("ditto", Ditto(lr=0.1), Average(), "uniform")
    wrapped = Algorithm("fair", LossWeighted(Ditto(lr=0.1), q=0.0), FairAverage(), "uniform")
    a, b = (final(algorithm, "sequential").snapshot.params for algorithm in (plain, wrapped))
    assert distance(a, b) < 1e-12


def test_random_numbers_depend_on_the_key_alone() -> None:
    keys = torch.from_numpy(np.random.default_rng(0).integers(0, 2**62, 3))
    like = Tree({"a": torch.zeros(3, 4000), "b": torch.zeros(3, 10)})
    mapped = torch.vmap(draw.normal)(keys, like)
    for i, key in enumerate(keys):
        alone = draw.normal(key, Tree({n: leaf[i] for n, leaf in like.items()}))
        assert all(torch.equal(alone[n], mapped[n][i]) for n in like)
    assert torch.corrcoef(mapped["a"]).triu(1).abs().max() < 0.1
    assert torch.allclose(mapped["a"].std(1), torch.ones(3), atol=0.05)
    folded = draw.fold(keys[0], torch.arange(100))
    assert len(set(folded.tolist())) == 100
