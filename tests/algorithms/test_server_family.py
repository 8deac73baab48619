"""Adaptive and projecting servers, Gradient Centralization: oracles and degenerate cases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import known_answers
import pytest
import torch
from hypothesis import given as hypotheses
from hypothesis import settings
from hypothesis import strategies as st
from known_answers import (
    DTYPES,
    ENGINES,
    close,
    cohort,
    drive,
    named,
    text_task,
)
from torch import Tensor, nn

import fedzmg
from fedzmg import algorithms
from fedzmg.algorithms import (
    SGD,
    AdaDB,
    Adagrad,
    Adam,
    Average,
    CoupledDecay,
    Momentum,
    Projected,
    ReddiAdagrad,
    ReddiAdam,
    ReddiYogi,
    Yogi,
    ZeroMean,
)
from fedzmg.contract import bind, numbers
from fedzmg.errors import InputError
from fedzmg.models.initial import initial_params
from fedzmg.tree import Tree
from golden_problems import (
    dense_task,
    make_context,
    models,
)

# Servers by hand.


update = st.lists(
    st.floats(-4, 4).map(lambda v: 0.0 if abs(v) < 1e-6 else v), min_size=3, max_size=3
)
updates = st.lists(update, min_size=1, max_size=5)


def plain_adadb(start: list[float], deltas: list[list[float]], rule: AdaDB) -> list[list[float]]:
    """AdaDB one coordinate at a time, in plain floats."""
    lr, b1, b2, gamma, floor = (float(v) for v in numbers(rule).values())
    w, m, v = list(start), [0.0] * len(start), [0.0] * len(start)
    found = []
    for t, delta in enumerate(deltas, 1):
        for i, g in enumerate(delta):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
        a = lr
        if rule.correction == "double":
            a *= math.sqrt(1 - b2**t) / (1 - b1**t)
        largest = max(abs(x) for x in m)
        for i, first in enumerate(m):
            if largest == 0:
                continue
            root = math.sqrt(v[i] / (1 - b2**t))
            width = abs(first) / (gamma * (t if rule.bound == "inverse_round" else 1) * largest)
            rate = min(max(a / root if root else math.inf, floor), floor + width)
            w[i] -= rate * first / (1 - b1**t)
        found.append(list(w))
    return found


@hypotheses(
    updates,
    st.floats(1e-3, 2),
    st.floats(1e-2, 10),
    st.floats(0, 1),
    st.sampled_from(["constant", "inverse_round"]),
    st.sampled_from(["double", "single"]),
    st.booleans(),
)
@settings(max_examples=60)
def test_adadb_against_plain_floats(
    deltas: list[list[float]],
    lr: float,
    gamma: float,
    floor: float,
    bound: Any,
    correction: Any,
    as_tensors: bool,
) -> None:
    rule = AdaDB(lr, 0.9, 0.999, gamma, floor, bound, correction)
    start = [1.0, -2.0, 0.25]
    found = drive(rule, start, deltas, bound=as_tensors)
    for left, right in zip(found, plain_adadb(start, deltas, rule), strict=True):
        assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("bound", ["constant", "inverse_round"])
@pytest.mark.parametrize("correction", ["double", "single"])
def test_adadb_leaves_a_tensor_without_updates_alone(bound: Any, correction: Any) -> None:
    """Whatever another tensor of the model does, and with the bound of that one tensor."""
    rule = AdaDB(bound=bound, correction=correction, gamma=4.0, floor=0.05)
    params = Tree({"still": torch.ones(2, 3), "moving": torch.ones(2)})
    alone = drive(rule, [1.0, 1.0], [[0.5, -0.1]] * 2, dtype=torch.float32)
    state = rule.init(params)
    for round_ in range(2):
        delta = Tree({"still": torch.zeros(2, 3), "moving": torch.tensor([0.5, -0.1])})
        context = cohort(delta, round_ + 1)
        params, state = rule.update(params, state, context)
        assert torch.equal(params["still"], torch.ones(2, 3))
        assert params["moving"].tolist() == alone[round_]


def test_server_momentum_against_torch() -> None:
    """The accumulating form is that of ``torch.optim.SGD``."""
    deltas = [[0.5, -2.0], [0.25, 1.0], [-1.0, 0.0]]
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.3, momentum=0.9)
    for delta, found in zip(deltas, drive(Momentum(0.3, 0.9), [1.0, -1.0], deltas), strict=True):
        weight.grad = torch.tensor(delta, dtype=torch.float64)
        optimizer.step()
        assert found == pytest.approx(weight.tolist(), abs=1e-12)


SIGN_STEPS = {
    "adam": Adam(lr=0.5, beta1=0.0, beta2=0.0, eps=0.0),
    "adam-reddi": ReddiAdam(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0),
    "adam-reddi-v0": ReddiAdam(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0, v0=0.0),
    "yogi": Yogi(lr=0.5, beta1=0.0, beta2=0.0, eps=0.0, v0=0.0),
    "yogi-reddi": ReddiYogi(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0),
    "adagrad": Adagrad(lr=0.5, eps=0.0, v0=0.0),
    "adagrad-reddi": ReddiAdagrad(lr=0.5, tau=0.0),
    "adagrad-reddi-moment": ReddiAdagrad(lr=0.5, beta1=0.0, tau=0.0),
    "adam-flower": Adam(lr=0.5, beta1=0.0, beta2=0.0, eps=0.0, exponent="next_step"),
}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("name", SIGN_STEPS)
def test_no_memory_and_nothing_added_is_a_sign_step(name: str, bound: bool) -> None:
    """In the first round; a coordinate that never moved stays put and is no NaN."""
    deltas = [[3.0, -0.001, 0.0], [0.0, 0.0, 0.0]]
    found = drive(SIGN_STEPS[name], [0.0, 1.0, 4.0], deltas, bound=bound)
    assert found[0] == pytest.approx([-0.5, 1.5, 4.0], abs=1e-12)
    assert found[1] == pytest.approx([-0.5, 1.5, 4.0], abs=1e-12)


def test_yogi_moves_its_second_moment_by_a_bounded_amount() -> None:
    """Up and down by ``(1 - beta2) g^2``; not at all where it equals ``g^2``."""
    rule = Yogi(beta2=0.75, v0=4.0)
    params = Tree({"w": torch.zeros(3, dtype=torch.float64)})
    delta = torch.tensor([2.0, 4.0, 1.0], dtype=torch.float64)
    _, state = rule.update(params, rule.init(params), cohort(delta, 1))
    assert state.second["w"].tolist() == [4.0, 8.0, 3.75]


# Clients: forms of momentum, decay, what is projected.


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("l2", [None, 0.3])
def test_forms_of_momentum_against_torch(nesterov: bool, l2: float | None) -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD(
        [weight], lr=0.1, momentum=0.8, nesterov=nesterov, weight_decay=l2 or 0.0
    )
    rule = CoupledDecay(SGD(0.1, 0.8, form="nesterov" if nesterov else "heavy_ball"), l2)
    params = Tree({"w": weight.detach().clone()})
    scratch = rule.begin(make_context(params), ())
    for _ in range(5):
        grad = params.map(torch.sin)
        weight.grad = grad["w"].clone()
        optimizer.step()
        params, scratch = rule.step(make_context(params), params, scratch, grad)
        assert params["w"].tolist() == pytest.approx(weight.tolist(), abs=1e-12)


class Mixed(nn.Module):
    """Two convolutions, normalisation and two dense layers on 6x6 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2)
        self.norm = nn.GroupNorm(1, 3)
        self.up = nn.ConvTranspose2d(3, 2, 2)
        self.hidden = nn.Linear(18, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.norm(self.conv(x))).flatten(1)
        return self.out(torch.tanh(self.hidden(inner)))


def image_task(**more: Any) -> fedzmg.Task:
    return known_answers.image_task(Mixed(), **more)


TASKS = {"images": image_task, "text": text_task}


def same(one: list[Tree], two: list[Tree]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def apart(one: list[Tree], two: list[Tree]) -> float:
    pairs = zip(one, two, strict=True)
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in a)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("off", [None, 0.0])
def test_fedzmg_that_projects_nothing_is_fedavg(
    off: float | None, engine: str, dtype: torch.dtype
) -> None:
    bare = {"client_momentum": off, "client_decay": off, "client_project": "none"}
    task = image_task()
    one = models(task, named("fedzmg", **bare), engine=engine, dtype=dtype, rounds=3)
    assert same(one, models(task, named("fedavg"), engine=engine, dtype=dtype, rounds=3))
    hybrid = models(task, named("fedzmg-yogi", **bare), engine=engine, dtype=dtype, rounds=2)
    assert same(hybrid, models(task, named("fedyogi"), engine=engine, dtype=dtype, rounds=2))


IMAGE_WEIGHTS = {
    "conv.weight": (1, 2, 3),
    "up.weight": (0, 2, 3),
    "hidden.weight": (1,),
    "out.weight": (1,),
}
TEXT_WEIGHTS = {
    "embedding.weight": (0,),
    "gru.weight_ih_l0": (1,),
    "gru.weight_hh_l0": (1,),
    "dense.weight": (1,),
}


@pytest.mark.parametrize(
    ("kind", "project", "left_out"),
    [
        ("images", "all", []),
        ("images", "no_embedding", []),
        ("images", "conv_only", ["hidden.weight", "out.weight"]),
        ("images", "first_layer", ["up.weight", "hidden.weight", "out.weight"]),
        ("images", "all_but_last", ["out.weight"]),
        ("images", "none", list(IMAGE_WEIGHTS)),
        ("text", "all", []),
        ("text", "no_embedding", ["embedding.weight"]),
        ("text", "conv_only", list(TEXT_WEIGHTS)),
        ("text", "first_layer", ["gru.weight_ih_l0", "gru.weight_hh_l0", "dense.weight"]),
        ("text", "all_but_last", ["dense.weight"]),
        ("text", "none", list(TEXT_WEIGHTS)),
    ],
)
def test_what_is_projected(kind: str, project: Any, left_out: list[str]) -> None:
    layout = TASKS[kind]().model.layout
    rule = ZeroMean(SGD(), project=project).for_layout(layout)
    assert rule.axes is not None
    weights = {"images": IMAGE_WEIGHTS, "text": TEXT_WEIGHTS}[kind]
    found = {name: axes for name, axes in rule.axes.items() if axes}
    assert found == {name: axes for name, axes in weights.items() if name not in left_out}
    assert list(rule.axes) == list(layout)


def test_a_layer_of_two_kernels_is_one_layer() -> None:
    """The GRU's two kernels and biases come first and last together."""
    layout = {n: i for n, i in text_task().model.layout.items() if n.startswith("gru")}
    first = ZeroMean(SGD(), project="first_layer", biases="centred").for_layout(layout).axes
    assert first == {
        "gru.weight_ih_l0": (1,),
        "gru.weight_hh_l0": (1,),
        "gru.bias_ih_l0": (-1,),
        "gru.bias_hh_l0": (-1,),
    }
    last = ZeroMean(SGD(), project="all_but_last", biases="centred").for_layout(layout).axes
    assert last == dict.fromkeys(layout, ())


def test_embeddings_can_be_centred_per_token() -> None:
    layout = text_task().model.layout
    rule = ZeroMean(SGD(), embedding_axis="dim").for_layout(layout)
    assert rule.axes is not None
    assert {n: a for n, a in rule.axes.items() if a} == TEXT_WEIGHTS | {"embedding.weight": (1,)}
    grad = Tree({n: torch.rand(p.shape) for n, p in text_task().model.params().items()})
    after = rule.centred(grad)["embedding.weight"]
    torch.testing.assert_close(after.sum(1), torch.zeros(7), rtol=0, atol=1e-6)
    assert float(after.sum(0).abs().max()) > 1e-2


def test_biases_can_be_centred() -> None:
    task = image_task(axes={"norm.weight": ()})
    rule = ZeroMean(SGD(), biases="centred").for_layout(task.model.layout)
    grad = Tree({n: torch.rand(p.shape) for n, p in task.model.params().items()})
    after = rule.centred(grad)
    for name in ("conv.bias", "norm.bias", "hidden.bias", "out.bias"):
        expected = grad[name] - grad[name].mean()
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)
    assert torch.equal(after["norm.weight"], grad["norm.weight"]), "the user said: no axes"


@pytest.mark.parametrize("engine", ENGINES)
def test_one_mean_over_the_whole_vector(engine: str) -> None:
    """The sum of all parameters is conserved, those of columns are not."""
    task = image_task()
    algorithm = named("fedzmg", client_decay=None, client_project="whole")
    rule = algorithm.for_layout(task.model.layout).client
    assert isinstance(rule, ZeroMean)
    grad = Tree({n: torch.rand(p.shape).double() for n, p in task.model.params().items()})
    flat = torch.cat([leaf.flatten() for leaf in grad.values()])
    after = torch.cat([leaf.flatten() for leaf in rule.centred(grad).values()])
    torch.testing.assert_close(after, flat - flat.mean(), rtol=0, atol=1e-14)
    half = rule.centred(grad.map(lambda leaf: leaf.to(torch.bfloat16)))
    assert {leaf.dtype for leaf in half.values()} == {torch.bfloat16}
    assert len(rule.centred(Tree({}))) == 0

    start = initial_params(task.model, task.init, 0)
    before = sum(float(leaf.double().sum()) for leaf in start.values())
    last = models(task, algorithm, engine=engine, rounds=2)[-1]
    assert sum(float(leaf.sum()) for leaf in last.values()) == pytest.approx(before, abs=1e-10)
    columns = last["hidden.weight"].sum(1) - start["hidden.weight"].double().sum(1)
    assert float(columns.abs().max()) > 1e-3


@pytest.mark.parametrize("scope", ["all", "kernels"])
def test_decay_scope_by_role(scope: Any) -> None:
    """Zero gradients show the decay alone; embeddings and recurrent kernels are kernels."""
    for task in (image_task(), text_task()):
        rule = SGD(0.5, decay=0.2, decay_scope=scope).for_layout(task.model.layout)
        params = task.model.params().map(torch.ones_like)
        after, _ = rule.step(make_context(params), params, (), params.zeros())
        for name, leaf in after.items():
            spared = scope == "kernels" and task.model.layout[name].role in ("bias", "norm")
            assert torch.equal(leaf, torch.full_like(leaf, 1.0 if spared else 0.9))


@pytest.mark.parametrize(
    "options",
    [
        {"client.project": "whole"},
        {"client.project": "first_layer", "client.biases": "centred"},
        {"client.decay_scope": "kernels", "client.form": "nesterov"},
    ],
    ids=str,
)
def test_named_alternatives_map_and_compile(options: dict[str, Any]) -> None:
    task = image_task()
    algorithm = named("fedzmg").with_options(options)
    [loop], [mapped] = (models(task, algorithm, engine=e, rounds=1) for e in ENGINES)
    assert apart([loop], [mapped]) < 1e-9
    assert apart([loop], models(task, named("fedzmg"), rounds=1)) > 1e-6
    params = task.model.params().map(lambda leaf: leaf.double())
    rule = algorithm.for_layout(task.model.layout).client
    scratch = rule.begin(make_context(params), ())

    def step(values: dict[str, Tensor], grad: Tree) -> Tree:
        return bind(rule, values).step(make_context(params), params, scratch, grad)[0]

    values = {n: torch.tensor(v, dtype=torch.float64) for n, v in numbers(rule).items()}
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert apart([compiled(values, params)], [step(values, params)]) < 1e-12


@pytest.mark.parametrize("name", ["fedadadb", "fedadadb:original", "fedzmg-yogi:projected"])
def test_servers_compile(name: str) -> None:
    task = image_task()
    params = task.model.params().map(lambda leaf: leaf.double())
    rule = algorithms.get(name).for_layout(task.model.layout).server
    state = rule.init(params)

    def update(delta: Tree) -> Tree:
        context = cohort(delta, 1)
        return rule.update(params, state, context)[0]

    compiled = torch.compile(update, fullgraph=True, backend="eager")
    assert apart([compiled(params.map(torch.cos))], [update(params.map(torch.cos))]) < 1e-12


# Projected servers.


def column_sums(task: fedzmg.Task, params: Tree, **options: Any) -> dict[str, Tensor]:
    axes = ZeroMean(SGD(), **options).for_layout(task.model.layout).axes
    assert axes is not None
    return {name: params[name].double().sum(over) for name, over in axes.items() if over}


SERVERS = ["fedzmg-adam:projected", "fedzmg-yogi:projected", "fedzmg-adagrad:projected"]


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SERVERS)
def test_projected_servers_conserve_column_sums(name: str, engine: str, kind: str) -> None:
    """Even with decay on the clients; their unprojected twins do not."""
    task = TASKS[kind]()
    before = column_sums(task, initial_params(task.model, task.init, 0))
    for after in models(task, named(name), engine=engine, rounds=2):
        for weight, sums in column_sums(task, after).items():
            torch.testing.assert_close(sums, before[weight], rtol=0, atol=1e-10)
    [twin] = models(task, named(name.removesuffix(":projected")), engine=engine, rounds=1)
    moved = column_sums(task, twin)
    assert all(float((moved[w] - before[w]).abs().max()) > 1e-6 for w in before)


def test_a_projected_step_is_the_inner_one_less_its_mean() -> None:
    task = image_task()
    layout = task.model.layout
    params = task.model.params().map(lambda leaf: leaf.double())
    delta = params.map(lambda leaf: leaf.cos() + 0.3)
    context = cohort(delta, 1)
    for inner in (Average(0.7), Momentum(0.7), Adam(), Yogi(), Adagrad(), AdaDB()):
        rule = Projected(inner).for_layout(layout)
        assert rule.share(rule.init(params)) == ()
        plain, plain_state = inner.update(params, inner.init(params), context)
        found, state = rule.update(params, rule.init(params), context)
        assert type(state) is type(plain_state)
        for name, leaf in plain.items():
            if name in IMAGE_WEIGHTS:
                step = leaf - params[name]
                mean = step.mean(IMAGE_WEIGHTS[name], keepdim=True)
                torch.testing.assert_close(found[name], params[name] + step - mean)
            else:
                assert torch.equal(found[name], leaf)


# Gradient Centralization.


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_global_gc_after_local_gc_changes_nothing(engine: str, kind: str) -> None:
    """Without decay every update is centred already."""
    task = TASKS[kind]()
    local = named("local-gc", client_l2=None)
    both = dataclasses.replace(local, name="both", server=algorithms.get("global-gc").server)
    one, two = (models(task, a, engine=engine, rounds=2) for a in (local, both))
    assert apart(one, two) < 1e-12
    decaying = local.with_options({"client.l2": 0.1})
    assert apart(one, models(task, decaying, engine=engine, rounds=2)) > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_local_gc_is_fedzmg_but_for_biases_and_weights(engine: str) -> None:
    task = image_task()
    free = named("local-gc", client_l2=None, client_biases="free")
    zmg = named("fedzmg", client_decay=None, weights="uniform")
    one, two = (models(task, a, engine=engine, rounds=2) for a in (free, zmg))
    assert apart(one, two) < 1e-12
    centred = models(task, named("local-gc", client_l2=None), engine=engine, rounds=2)
    assert apart(one, centred) > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_gc_fed_of_one_layer_is_global_gc(engine: str) -> None:
    found = [models(dense_task(), named(n), engine=engine) for n in ("gc-fed", "global-gc")]
    assert same(*found)


@pytest.mark.parametrize("name", ["global-gc", "gc-fed"])
@pytest.mark.parametrize("kind", TASKS)
def test_gc_servers_conserve_column_sums(name: str, kind: str) -> None:
    """Per token for an embedding, and of every bias as one column."""
    task = TASKS[kind]()
    options = {"embedding_axis": "dim", "biases": "centred"}
    before = column_sums(task, initial_params(task.model, task.init, 0), **options)
    assert set(before) == set(task.model.layout)
    [after] = models(task, named(name), rounds=1)
    for weight, sums in column_sums(task, after, **options).items():
        torch.testing.assert_close(sums, before[weight], rtol=0, atol=1e-10)


def test_coupled_decay_comes_after_centring_and_enters_the_momentum() -> None:
    """Two steps by hand: the decay term is not centred."""
    rule = ZeroMean(CoupledDecay(SGD(0.1, 0.5), l2=0.2), axes={"w": (1,)})
    params = Tree({"w": torch.tensor([[1.0, 3.0]], dtype=torch.float64)})
    grad = Tree({"w": torch.tensor([[4.0, 2.0]], dtype=torch.float64)})
    scratch = rule.begin(make_context(params), ())
    params, scratch = rule.step(make_context(params), params, scratch, grad)
    close(scratch["w"], [[1.2, -0.4]])
    close(params["w"], [[0.88, 3.04]])
    params, scratch = rule.step(make_context(params), params, scratch, grad)
    close(scratch["w"], [[1.776, -0.592]])
    close(params["w"], [[0.7024, 3.0992]])


def test_rules_that_need_a_model_say_so() -> None:
    params = Tree({"w": torch.ones(2, 2)})
    with pytest.raises(InputError, match="Projected does not know the model yet: call for_layout"):
        Projected(Average()).update(params, (), cohort(torch.ones(2, 2), 1))
    client = algorithms.get("fedzmg").client
    with pytest.raises(InputError, match="ZeroMean does not know the model yet: call for_layout"):
        client.step(make_context(params), params, client.begin(make_context(params), ()), params)
    spared = SGD(decay=0.1, decay_scope="kernels")
    with pytest.raises(InputError, match="SGD does not know the model yet: call for_layout"):
        spared.step(make_context(params), params, (), params)
