"""Client momentum, projections of clients and servers, Gradient Centralization."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from known_answers import ENGINES, TASKS, close, cohort, image_task, named, text_task
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
    Yogi,
    ZeroMean,
)
from fedzmg.errors import InputError
from fedzmg.models.initial import initial_params
from fedzmg.tree import Tree
from golden_problems import make_context, models

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


def same(one: list[Tree], two: list[Tree]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def apart(one: list[Tree], two: list[Tree]) -> float:
    pairs = zip(one, two, strict=True)
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in a)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("off", [None, 0.0])
def test_fedzmg_that_projects_nothing_is_fedavg(off: float | None, engine: str) -> None:
    bare = {"client_momentum": off, "client_decay": off, "client_project": "none"}
    for ours, plain in (("fedzmg", "fedavg"), ("fedzmg-yogi", "fedyogi")):
        one, other = (
            models(image_task(), a, engine=engine, dtype=torch.float32, rounds=2)
            for a in (named(ours, **bare), named(plain))
        )
        assert same(one, other)


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
def test_projected_parameters(kind: str, project: Any, left_out: list[str]) -> None:
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


@pytest.mark.parametrize("engine", ENGINES)
def test_one_mean_over_the_whole_vector(engine: str) -> None:
    """The sum of all parameters is conserved, those of columns are not."""
    task = image_task()
    algorithm = named("fedzmg", client_decay=None, client_project="whole")
    rule = algorithm.for_layout(task.model.layout).client
    assert isinstance(rule, ZeroMean)
    grad = Tree({n: torch.rand(p.shape).double() for n, p in task.model.params().items()})
    flat = torch.cat([leaf.flatten() for leaf in grad.values()])
    after = torch.cat([leaf.flatten() for leaf in rule.changed(grad).values()])
    torch.testing.assert_close(after, flat - flat.mean(), rtol=0, atol=1e-14)
    half = rule.changed(grad.map(lambda leaf: leaf.to(torch.bfloat16)))
    assert {leaf.dtype for leaf in half.values()} == {torch.bfloat16}

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
def test_named_alternatives_map(options: dict[str, Any]) -> None:
    task = image_task()
    algorithm = named("fedzmg").with_options(options)
    [loop], [mapped] = (models(task, algorithm, engine=e, rounds=1) for e in ENGINES)
    assert apart([loop], [mapped]) < 1e-9
    assert apart([loop], models(task, named("fedzmg"), rounds=1)) > 1e-6


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
