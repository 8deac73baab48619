"""Adapters: equal outputs at the start, merged weights, memory, and models made by peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import InputError, Task, Trial, algorithms, simulate
from fedzmg.contract import Algorithm, ParamInfo, Parts
from fedzmg.engine.choose import EnginePlanner
from fedzmg.engine.vectorized import Vectorized
from fedzmg.messages import Asked, ClientContext
from fedzmg.models import CharTransformer, FunctionalModel, add_lora, merge_lora
from fedzmg.models.initial import initial_params
from fedzmg.models.lora import product
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree, leaves, num_bytes, row
from fedzmg.wrappers.parts import fit

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "lora.json").read_text()
)["lora"]
A, B = (torch.tensor(GOLDEN[name], dtype=torch.float64) for name in "AB")
SHARE, SCALE = GOLDEN["p"], GOLDEN["scale"]


class Pixels(nn.Module):
    """Convolution and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.hidden, self.dense = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(torch.relu(self.hidden(torch.relu(self.conv(x)).flatten(1))))  # type: ignore[no-any-return]


def base() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Pixels()


def task(*, merge: bool = False, dropout: float = 0.0, **protocol: int) -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 2, 4, 4)), rng.integers(0, 3, 40)
    owner = np.repeat(np.arange(5), [4, 12, 9, 8, 7])
    model = add_lora(base(), 2, 4, merge=merge, dropout=dropout)
    settings = {"cohort": 4, "batch_size": 4, "epochs": 2, **protocol}
    return Task.from_arrays(model, x, y, owner, test=(x, y), **settings)


def simulation(
    problem: Task, algorithm: Algorithm | str, engine: Any, **options: Any
) -> Simulation:
    trials = [Trial.of(algorithm, seed=seed, **options) for seed in (0, 1)]
    cpu = torch.device("cpu")
    return Simulation(problem, trials, rounds=2, device=cpu, dtype=torch.float64, engine=engine)


def trained(sim: Simulation) -> Tree:
    sim.run_round()
    sim.run_round()
    return sim.snapshot.params


def test_outputs_are_those_of_the_model_and_of_the_merged_model() -> None:
    x, model = torch.randn(3, 2, 4, 4, dtype=torch.float64), base().double()
    adapted = add_lora(model, rank=2, alpha=6)
    assert torch.equal(adapted(x), model(x))
    for name, values in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(values)
    merged = merge_lora(adapted)
    assert not torch.allclose(adapted(x), model(x))
    torch.testing.assert_close(merged(x), adapted(x), rtol=0, atol=1e-12)
    assert merged.state_dict().keys() == model.state_dict().keys()


def test_only_adapters_are_trained_and_their_roles_are_known() -> None:
    layout = FunctionalModel(add_lora(base(), 2, 4, ("hidden", "conv"))).layout
    assert dict(layout) == {
        "conv.lora_A.weight": ParamInfo("lora_A", (1, 2, 3), "LoRAConv2d", 2.0),
        "conv.lora_B.weight": ParamInfo("lora_B", (), "LoRAConv2d"),
        "hidden.lora_A.weight": ParamInfo("lora_A", (1,), "LoRALinear", 2.0),
        "hidden.lora_B.weight": ParamInfo("lora_B", (), "LoRALinear"),
    }
    merged = FunctionalModel(add_lora(base(), 2, 4, "dense", merge=True)).layout
    assert merged["dense.weight"] == ParamInfo("lora_base", (1,), "LoRALinear")


def test_a_is_drawn_from_the_seed_and_weights_are_kept() -> None:
    model = FunctionalModel(add_lora(base(), 2, merge=True))
    first, again, other = (initial_params(model, "torch", seed) for seed in (1, 1, 2))
    given = dict(model.module.named_parameters())
    for name, values in first.items():
        assert torch.equal(values, again[name])
        if name.endswith("lora_A.weight"):
            bound = values.shape[1:].numel() ** -0.5
            assert 0.5 * bound < float(values.abs().max()) <= bound
            assert not torch.equal(values, other[name])
        else:
            assert torch.equal(values, given[name])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 0}, "rank = 0"),
        ({"alpha": -1}, "alpha = -1"),
        ({"dropout": 1.5}, "dropout = 1.5"),
        ({"targets": ("hidden", "no*")}, "'no*'"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=f".*{named.replace('*', '[*]')}"):
        add_lora(base(), **options)


def test_layers_that_are_never_called_are_not_adapted() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    names = [name for name, p in add_lora(layer).named_parameters() if p.requires_grad]
    assert {name.split(".")[0] for name in names} == {"linear1", "linear2"}


COMPILED = EnginePlanner("compiled", backend="eager")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedit", ()),
        ("ffa-lora", ()),
        ("flora", ()),
        ("fedzmg", ()),
        pytest.param("flora", (COMPILED,), marks=pytest.mark.slow),
    ],
)
def test_engines_agree(name: str, more: tuple[EnginePlanner, ...]) -> None:
    problem = task(merge=name == "flora", dropout=0.25)
    sim = simulation(problem, name, "sequential")
    start, reference = sim.snapshot.params, trained(sim)
    moved = {n for n, leaf in reference.items() if not torch.equal(leaf, start[n])}
    roles = {"flora": ("lora_base",), "ffa-lora": ("lora_B",)}.get(name, ("lora_A", "lora_B"))
    assert moved == {n for n, info in problem.model.layout.items() if info.role in roles}
    for engine in ("vectorized", "cuda_graph", *more):
        other = trained(simulation(problem, name, engine))
        gaps = other.map(lambda x, y: (x - y).abs().max(), reference)
        assert max(float(gap) for gap in gaps.values()) < 1e-9


def language_model(dim: int, layers: int, device: str) -> Simulation:
    x = np.random.default_rng(0).integers(0, 20, (40, 8))
    model = add_lora(CharTransformer(20, dim, 2, layers, 8), 2, 4, "*.attention.*")
    problem = Task.from_arrays(
        model, x, x, np.arange(40) % 10, test=(x[:2], x[:2]), cohort=10, batch_size=4
    )
    return Simulation(
        problem, [Trial.of("fedavg", client_momentum=0.9)], rounds=1, device=torch.device(device),
        dtype=torch.float32, engine="cuda_graph",
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fedit", "ffa-lora", "flora", "fedzmg"])
@pytest.mark.parametrize("engine", ["vectorized", "cuda_graph", "compiled_cuda_graph"])
def test_gpu_agrees_with_cpu(name: str, engine: Any) -> None:
    problem, trials = task(merge=name == "flora", dropout=0.25), [Trial.of(name)]
    [here], [there] = (
        simulate(problem, trials, rounds=2, engine=e, dtype=torch.float64, device=device)  # type: ignore[arg-type]
        for e, device in (("sequential", "cpu"), (engine, "cuda"))
    )
    for own, values in here.params.items():
        torch.testing.assert_close(there.params[own].cpu(), values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_base_weights_are_shared_by_all_clients(device: str) -> None:
    """Bytes of everything with a client axis: ten clients need under 1.5 times those of one."""
    sim = language_model(64, 1, device)
    sim.run_round()
    engine = sim.engine
    assert isinstance(engine, Vectorized)
    assert engine.graphs is not None
    [buffers] = engine.graphs._buffers.values()
    work = buffers.state.work
    axes = {len(leaf) for leaf in leaves(work)}
    assert axes == {10}
    functional = sim.program.objective.model
    constants = functional.frozen()
    shared = {p.data_ptr() for p in constants}
    for call in (functional._training, functional._evaluating):
        held = {p.data_ptr() for p in call.module.parameters() if not p.requires_grad}
        assert held == shared
    whole = num_bytes(constants)
    one, ten = (num_bytes(row((work.params, work.scratch), slice(n))) for n in (1, 10))
    assert whole + ten < 1.5 * (whole + one)


def rows_of(weight: Tensor) -> Tensor:
    return weight.flatten(1).sum(1)


@pytest.mark.parametrize("name", ["fedzmg", "fedit", "flora"])
def test_zero_mean_adapters_keep_the_row_sums_of_weights(name: str) -> None:
    """``W 1 = W0 1``: A is centred and projected, B is left alone."""
    problem = task(merge=name == "flora")
    zero_mean = {} if name == "fedzmg" else {"client_zero_mean": True}
    for options, conserved in ((zero_mean, True), ({}, name == "fedzmg")):
        found = row(trained(simulation(problem, name, "vectorized", **options)), 0)
        model = problem.model.module
        with torch.no_grad():
            for own, values in model.named_parameters():
                if own in found:
                    values.copy_(found[own])
        before, after = base().state_dict(), merge_lora(model).state_dict()
        gap = max(
            float((rows_of(after[n]) - rows_of(before[n])).abs().max())
            for n in before
            if n.endswith("weight")
        )
        assert (gap < 1e-5) == conserved, gap


def test_golden_averages_of_products_and_of_factors() -> None:
    layer = add_lora(nn.Linear(4, 3, bias=False).double(), 1, SCALE, merge=True)
    model = FunctionalModel(layer)
    start = model.params()
    locals_ = [
        Tree({**start, "lora_A.weight": a, "lora_B.weight": b}) for a, b in zip(A, B, strict=True)
    ]
    one = torch.ones((), dtype=torch.int64)
    merged = {}
    for name in ("flora", "fedit"):
        rules = fit(algorithms.get(name), model.layout, Parts(), 2)
        total = start.zeros()
        for share, params in zip(SHARE, locals_, strict=True):
            memory = rules.client.init_memory(start)
            context = ClientContext(start, (), memory, one, one, Asked(key=one))
            scratch = rules.client.begin(context, ())
            upload, _ = rules.client.finish(context, params, scratch, one)
            total = total + share * Tree({**start.zeros(), **upload.delta})
        merged[name] = start - total
    moved = merged["flora"]["weight"] - start["weight"]
    torch.testing.assert_close(moved, torch.tensor(GOLDEN["exact"], dtype=torch.float64))
    assert not merged["flora"]["lora_B.weight"].any()
    factors = (merged["fedit"][f"lora_{f}.weight"] for f in "AB")
    found = SCALE * product(*factors)
    torch.testing.assert_close(found, torch.tensor(GOLDEN["fedit"], dtype=torch.float64))
    error = torch.tensor(GOLDEN["fedit_error_covariance"], dtype=torch.float64)
    torch.testing.assert_close(moved - found, error)


def test_golden_row_means_of_one_step() -> None:
    """One step of rank 2 on the loss ``<G, W>``, without and with the projection."""
    slope = torch.tensor(GOLDEN["G"], dtype=torch.float64)
    layer: Any = add_lora(nn.Linear(4, 3, bias=False).double(), 2, 2 * SCALE)
    with torch.no_grad():
        layer.lora_A.weight.copy_(A.flatten(0, 1))
        layer.lora_B.weight.copy_(torch.cat(list(B), 1))
    model = FunctionalModel(layer)
    start = model.params()
    for name, case, exact in (
        ("fedavg", "no_projection", True),
        ("fedzmg", "A_centred_and_projected", False),
    ):
        client = algorithms.get(name).for_layout(model.layout).client
        one = torch.ones((), dtype=torch.int64)
        context = ClientContext(start, (), client.init_memory(start), one, one)
        params = client.start(context)
        weight = SCALE * product(*params.values())
        grad = Tree(
            {
                "lora_A.weight": SCALE * params["lora_B.weight"].T @ slope,
                "lora_B.weight": SCALE * slope @ params["lora_A.weight"].T,
            }
        )
        moved, _ = client.step(context, params, client.begin(context, ()), grad)
        means = (SCALE * product(*moved.values()) - weight).mean(1)
        wanted = GOLDEN["row_mean_of_product_update_rank2_lr0.1"][case]
        if exact:
            torch.testing.assert_close(means, torch.tensor(wanted, dtype=torch.float64))
        else:
            assert float(means.abs().max()) < 1e-15


def test_bytes_are_those_of_the_factors() -> None:
    problem = task(merge=True)
    sizes = {"conv": (18, 3), "hidden": (12, 5), "dense": (5, 3)}
    both, last = (
        sum(8 * 2 * (inputs * own + outputs) for inputs, outputs in sizes.values())
        for own in (1, 0)
    )
    for name, up, down in (
        ("fedit", both, both),
        ("ffa-lora", last, last),
        ("flora", both, 4 * both),
    ):
        sim = simulation(problem, name, "vectorized")
        [record, _] = sim.run_round().records
        assert (record.bytes_up, record.bytes_down) == (4 * up, 4 * down), name


def test_flora_needs_weights_that_move() -> None:
    with pytest.raises(InputError, match=r"conv\.lora_A"):
        simulation(task(), "flora", "sequential")


@pytest.mark.slow
def test_models_of_peft_are_trained_as_they_are() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["conv", "hidden", "dense"])
    ours = task()
    other = peft.get_peft_model(base(), config)
    x, y = ours.train.examples
    owner = np.repeat(np.arange(5), np.diff(ours.train.offsets))
    theirs = Task.from_arrays(
        other, x, y, owner, test=tuple(ours.test), cohort=4, batch_size=4, epochs=2
    )
    roles = [(info.role, info.input_axes, info.scale) for info in theirs.model.layout.values()]
    assert roles == [(i.role, i.input_axes, i.scale) for i in ours.model.layout.values()]
    found = []
    for problem in (ours, theirs):
        sim = simulation(problem, "fedzmg", "vectorized")
        start = sim.snapshot.params
        first = ours.model.params()
        values = dict(zip(start, first.values(), strict=True))
        drawn = Tree({n: values[n].double()[None].repeat(2, *[1] * values[n].ndim) for n in start})
        sim.snapshot = sim.snapshot._replace(params=drawn)
        found.append(trained(sim))
    for mine, yours in zip(found[0].values(), found[1].values(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-9)
