"""Batch normalisation: torch's own layers and loops, four policies, every engine, no padding.

Other buffers that change in training are here, too.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedzmg
from fedzmg import InputError, Parts, Task, Trial, algorithms, tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.data.plan import local_stream, sample_cohort
from fedzmg.diagnose import diagnose
from fedzmg.engine import sequential
from fedzmg.experiment.specs import files as specs
from fedzmg.messages import Cohort
from fedzmg.models.batch_norm import BatchNorm1d, BatchNormPolicy
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import initial_params
from fedzmg.simulation import EnginePlanner, Simulation, simulate
from fedzmg.testing import Case, check_property
from fedzmg.tree import Tree, num_bytes, row
from fedzmg.wrappers.parts import fit
from golden_problems import Net as Function

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "batch_norm.json").read_text()
)
PERSONAL: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "golden_personal.json").read_text()
)
COUNTS, CLASSES, BATCH, EPOCHS, ROUNDS = [7, 12, 4, 10, 6], 3, 4, 2, 2
OWNERS = np.repeat(np.arange(len(COUNTS)), COUNTS)
POLICIES: list[BatchNormPolicy] = ["average", "local", "frozen", "batch"]
CPU = torch.device("cpu")


class Net(nn.Module):
    """Names without "bn"; a layer that is called twice, and one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, bias=False)
        self.down = nn.ModuleList([nn.BatchNorm2d(3, eps=1e-3)])
        self.twice = nn.BatchNorm1d(12, momentum=0.3)
        self.dense = nn.Linear(12, 5)
        self.plain = nn.BatchNorm1d(5, affine=False)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.down[0](self.conv(x))).flatten(1)
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(self.plain(self.dense(x)))


def module(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(3)
    return make()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(OWNERS), 1, 4, 4, generator=generator)
    shifts = torch.from_numpy(OWNERS).reshape(-1, 1, 1, 1)
    y = torch.randint(0, CLASSES, (len(OWNERS),), generator=generator)
    return x * (1 + 0.3 * shifts) + 0.5 * shifts, y


def task(net: nn.Module | None = None, **more: Any) -> Task:
    x, y = data()
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "cohort": 3, "init": "given"} | more
    return Task.from_arrays(net or module(), x, y, OWNERS, test=(x[:9], y[:9]), **settings)


def trained(task: Task, name: str, engine: Any = "vectorized", **options: Any) -> Simulation:
    rounds = options.pop("rounds", ROUNDS)
    dtype = options.pop("dtype", torch.float64)
    trials = [Trial.of(name, **options)]
    sim = Simulation(task, trials, rounds=ROUNDS, device=CPU, dtype=dtype, engine=engine)
    for _ in range(rounds):
        sim.run_round()
    return sim


def model_of(sim: Simulation) -> Tree:
    return row(sim.snapshot.params, 0)


def assert_close(one: Tree, two: Tree, limit: float = 1e-9) -> None:
    assert list(one) == list(two)
    for name, leaf in one.items():
        torch.testing.assert_close(leaf, two[name], rtol=0, atol=limit, msg=name)


# One layer.

LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, {}, (4,)),
    "1d, sequences": (nn.BatchNorm1d, {"momentum": None}, (4, 3)),
    "2d": (nn.BatchNorm2d, {"affine": False, "momentum": 1.0}, (4, 2, 3)),
    "3d": (nn.BatchNorm3d, {"eps": 0.1, "momentum": 0.5}, (4, 2, 1, 2)),
    "untracked": (nn.BatchNorm2d, {"track_running_stats": False}, (4, 2, 2)),
    "synchronised": (nn.SyncBatchNorm, {}, (4, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_padded_batches_equal_torch_on_the_real_examples(name: str) -> None:
    """Outputs, gradients and statistics, of two batches in a row, mapped over two clients."""
    kind, options, shape = LAYERS[name]
    layer = kind(4, **options).double()
    for values in (*layer.parameters(), *layer.buffers()):
        if values.is_floating_point():
            nn.init.uniform_(values, 0.5, 1.5)
    gain = nn.Parameter(torch.ones((), dtype=torch.float64))  # a layer may have no parameter
    model = FunctionalModel(Function(lambda m, x: m.gain * m.own(x), own=layer, gain=gain))
    real = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    x = torch.randn(2, 5, *shape, dtype=torch.float64)
    x[0, 2] = torch.nan
    params = model.params()
    stacked = params.map(lambda leaf: torch.stack([leaf, leaf]))

    def loss(params: Tree, x: Tensor, real: Tensor) -> tuple[Tensor, Tree]:
        moved: dict[str, Tensor] = {}
        model.train(params, x.flip(0), real=real.flip(0), moved=moved)
        out = model.train(Tree({**params, **moved}), x, real=real, moved=moved)
        kept = torch.where(real.reshape(-1, *[1] * len(shape)), out, 0)
        return (kept * torch.arange(out[0].numel()).reshape(shape)).square().sum(), Tree(moved)

    tracked = stacked.map(lambda leaf: leaf.clone().requires_grad_())
    inputs = x.clone().requires_grad_()
    losses, moved = torch.vmap(loss)(tracked, inputs, real)
    trainable = [n for n in params if n not in (*model.statistics, "gain")]
    slopes = torch.autograd.grad(losses.sum(), [inputs, *(tracked[n] for n in trainable)])
    for i in range(2):
        own = nn.BatchNorm1d(4, **options) if name == "synchronised" else kind(4, **options)
        own.double().load_state_dict(layer.state_dict())
        batch = x[i][real[i]].clone().requires_grad_()
        own(batch.detach().flip(0))
        out = own(batch) * torch.arange(x[0, 0].numel()).reshape(shape)
        wanted = torch.autograd.grad(out.square().sum(), [batch, *own.parameters()])
        torch.testing.assert_close(losses[i], out.square().sum(), rtol=1e-10, atol=0)
        torch.testing.assert_close(slopes[0][i][real[i]], wanted[0], rtol=0, atol=1e-8)
        assert not slopes[0][i][~real[i]].any()
        for name_, slope, expected in zip(trainable, slopes[1:], wanted[1:], strict=True):
            torch.testing.assert_close(slope[i], expected, rtol=0, atol=1e-8, msg=name_)
        for name_, leaf in moved.items():
            buffer = own.get_buffer(name_.removeprefix("own."))
            torch.testing.assert_close(leaf[i].double(), buffer.double(), rtol=0, atol=1e-12)


def test_golden_batch() -> None:
    """Numbers of the specification."""
    known = GOLDEN["masked_batch"]
    layer = BatchNorm1d(2, eps=known["eps"], momentum=known["momentum"]).double()
    layer.register_buffer("real", torch.tensor(known["mask"]) > 0)
    real = layer.real
    out = layer(torch.tensor(known["x"], dtype=torch.float64))
    expected = torch.tensor(known["y"], dtype=torch.float64)
    torch.testing.assert_close(out[real], expected[real])
    for name, key in (("running_mean", "from_0"), ("running_var", "from_1")):
        wanted = torch.tensor(known[f"{name}_{key}"], dtype=torch.float64)
        torch.testing.assert_close(layer.get_buffer(name), wanted)


def test_golden_means_of_statistics() -> None:
    """The server adds the weighted mean, whatever its own rule and learning rate are."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    layout = FunctionalModel(net).layout
    server = fit(algorithms.get("fedadam"), layout, Parts(), 3).server
    start = {"running_mean": GOLDEN["start"]["mean"], "running_var": GOLDEN["start"]["var"]}
    double = FunctionalModel(net).params()
    params = Tree(
        {n: torch.tensor(start.get(n[2:], v.tolist()), dtype=v.dtype) for n, v in double.items()}
    )
    for weights, key in ((GOLDEN["n_k"], "average"), ([1, 1, 1], "average_uniform")):
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        delta = params.zeros().map(torch.clone)
        means = {
            f"1.{n}": params[f"1.{n}"] - shares @ torch.tensor(GOLDEN[n], dtype=torch.float64)
            for n in start
        }
        one = torch.tensor(1)
        cohort = Cohort(Tree({**delta, **means}), (), (), one, one, one)
        after, _ = server.update(params, server.init(params), cohort)
        for name, part in (("1.running_mean", "mean"), ("1.running_var", "var")):
            wanted = torch.tensor(GOLDEN[key][part], dtype=torch.float64)
            torch.testing.assert_close(after[name], wanted, rtol=0, atol=1e-12)


def test_single_value_per_channel_is_normalised_to_the_bias() -> None:
    """Torch refuses such a batch, the last of many an epoch; statistics stay as they are."""
    model = FunctionalModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double())
    params = Tree({n: torch.rand_like(v) + 0.5 for n, v in model.params().items()})
    x = torch.randn(3, 3, dtype=torch.float64)
    flags = torch.tensor([True, False, False])
    for inputs, real in ((x[:1], ()), (x, flags)):
        moved: dict[str, Tensor] = {}
        out = model.train(params, inputs, real=real, moved=moved)
        torch.testing.assert_close(out[0], params["1.bias"])
        assert all(torch.equal(params[n], moved[n]) for n in model.statistics)
    uneven = task(batch_size=3, cohort=5)  # 7 = 3 + 3 + 1
    assert_close(*(model_of(trained(uneven, "fedavg", e)) for e in ("sequential", "vectorized")))


# A plain loop over clients, with torch's own layers.


def centre(net: nn.Module) -> None:
    for child in net.modules():
        if isinstance(child, nn.Linear | nn.Conv2d):
            grad = child.weight.grad
            assert grad is not None
            grad.sub_(grad.mean(tuple(range(1, grad.ndim)), keepdim=True))


def loop_by_hand(
    name: str, make: Callable[[], nn.Module] = Net, seed: int = 0, personal: str = "-"
) -> nn.Module:
    """Train as people do who write the loop themselves; state dicts are averaged."""
    options = algorithms.get(name).options()
    x, y = (column.double() if column.is_floating_point() else column for column in data())
    ends = [0, *np.cumsum(COUNTS).tolist()]
    server = module(make).double()
    kept: dict[int, dict[str, Tensor]] = {}
    zeros = {n: torch.zeros_like(p) for n, p in server.named_parameters()}
    m, v, c = dict(zeros), dict(zeros), dict(zeros)
    own: dict[int, dict[str, Tensor]] = {}
    lr = options["client.lr"]
    batching = task().protocol.batching
    for round_ in range(1, ROUNDS + 1):
        cohort = sample_cohort(seed, round_, len(COUNTS), 3, replacement=False).tolist()
        sent = server.state_dict()
        mean = {n: torch.zeros_like(b, dtype=torch.float64) for n, b in sent.items()}
        weights = [1.0 if name == "scaffold" else float(COUNTS[k]) for k in cohort]
        changes = dict(zeros)
        for client, weight in zip(cohort, weights, strict=True):
            local = copy.deepcopy(server).train()
            local.load_state_dict(kept.get(client, {}), strict=False)
            momentum = options.get("client.momentum") or 0.0
            optimiser = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
            plan = local_stream(batching, seed, round_, client, 0, ends[client], COUNTS[client])
            variate = own.get(client, zeros)
            for places, real in zip(plan.indices, plan.counts, strict=True):
                chosen = torch.from_numpy(places[:real])
                optimiser.zero_grad()
                F.cross_entropy(local(x[chosen]), y[chosen]).backward()
                with torch.no_grad():
                    if name == "fedzmg":
                        centre(local)
                    for n, p in local.named_parameters():
                        assert p.grad is not None
                        if name == "scaffold":
                            p.grad.add_(c[n] - variate[n])
                        p.mul_(1 - lr * (options.get("client.decay") or 0.0))
                optimiser.step()
            after = local.state_dict()
            kept[client] = {n: after.pop(n) for n in sent if personal in n}
            for n, value in after.items():
                mean[n] = mean[n] + value * (weight / sum(weights))
            if name == "scaffold":
                with torch.no_grad():
                    before = dict(server.named_parameters())
                    moves = {
                        n: -c[n] + (before[n] - p) / (len(plan) * lr)
                        for n, p in local.named_parameters()
                    }
                own[client] = {n: variate[n] + moves[n] for n in zeros}
                changes = {n: changes[n] + moves[n] / len(COUNTS) for n in zeros}
        c = {n: c[n] + changes[n] for n in zeros}
        if name == "fedadam":
            for n, p in server.named_parameters():
                delta = p.detach() - mean[n]
                m[n], v[n] = 0.9 * m[n] + 0.1 * delta, 0.99 * v[n] + 0.01 * delta**2
                rate = 0.1 * (1 - 0.99**round_) ** 0.5 / (1 - 0.9**round_)
                mean[n] = p.detach() - rate * m[n] / (v[n].sqrt() + 1e-3)
        whole = [n for n, b in sent.items() if not b.is_floating_point()]
        mean |= {n: mean[n].round() for n in whole}
        server.load_state_dict({n: b for n, b in mean.items() if personal not in n}, strict=False)
    return server


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "scaffold", "fedzmg"])
def test_training_equals_a_plain_loop(name: str) -> None:
    expected = loop_by_hand(name).state_dict()
    for engine in ("sequential", "vectorized") if name == "fedavg" else ("vectorized",):
        found = model_of(trained(task(), name, engine))
        assert set(expected) - set(found) == {n for n in expected if n.endswith("tracked")}
        for parameter, leaf in found.items():
            torch.testing.assert_close(leaf, expected[parameter], rtol=0, atol=1e-9, msg=parameter)


class Centre(nn.Module):
    """A mean that is replaced, a whole number of steps, and a queue with a pointer."""

    mean: Tensor
    steps: Tensor
    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("queue", torch.ones(3, 12))
        self.register_buffer("place", torch.tensor([0], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1  # in evaluation, too, where it has no effect
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
            self.queue[int(self.place)] = x.detach()[0]
            self.place[0] = (self.place[0] + 1) % 3
        return (x - self.mean) / (1 + 0.1 * self.steps) + 0.1 * self.queue.mean(0)


class FirstBatch(nn.Module):
    """A scale that the first batch sets in place."""

    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            self.scale.data.copy_(1 / (0.5 + x.detach().abs().mean(0)))
            self.ready.fill_(True)
        return x * self.scale


def changing() -> nn.Module:
    """Spectral norm of the old kind changes two vectors by hooks."""
    dense = nn.utils.spectral_norm(nn.Linear(12, 5))
    conv = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten())
    return nn.Sequential(conv, FirstBatch(), Centre(), nn.Tanh(), dense, nn.Linear(5, CLASSES))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "fedadam"])
def test_buffers_that_change_train_as_in_a_plain_loop(
    name: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_place:
        monkeypatch.setattr(sequential, "takes_out", lambda _: False)
    own = task(module(changing), batch_size=BATCH)
    counts = {n for n, info in own.model.layout.items() if info.role == "counts"}
    assert counts == {"1.ready", "2.steps", "2.place"}
    assert set(own.model.statistics) - counts == {
        "2.mean", "2.queue", "4.weight_u", "4.weight_v",
    }  # fmt: skip
    assert "'1.ready'" in own.model.loop_reason
    sim = trained(own, name, "auto")
    assert sim.choice.path == "sequential"
    expected = loop_by_hand(name, changing).state_dict()
    found = model_of(sim)
    for n, leaf in found.items():
        torch.testing.assert_close(leaf, expected[n].double(), rtol=0, atol=1e-9, msg=n)
    assert expected["2.steps"] > 3
    assert {n for n in expected if not n.endswith(".weight")} <= set(found)
    again = Task.from_arrays(module(changing), *data(), OWNERS, test=data(), init="torch", cohort=3)
    start = initial_params(again.model, "torch", 0)
    assert all(torch.equal(start[n], again.model.params()[n]) for n in again.model.statistics)


def test_personal_buffers_stay_with_their_client() -> None:
    own = task(module(changing), parts=Parts(personal=("2.mean",)))
    found = model_of(trained(own, "fedavg", "sequential"))
    expected = loop_by_hand("fedavg", changing, personal="2.mean").state_dict()
    assert not found["2.mean"].any()
    for n, leaf in found.items():
        torch.testing.assert_close(leaf, expected[n].double(), rtol=0, atol=1e-9, msg=n)
    history = simulate(own, [Trial.of("fedper")], rounds=1, device="cpu")[0]
    layers = {name.partition(".")[0] for name in history.task.model.layout}
    assert history.model()[2].steps.dtype == torch.int64
    assert layers == {"0", "1", "2", "4", "5"}


def cumulative() -> nn.Module:
    """Every batch counts as much as the others: the share of one depends on their number."""
    norm = nn.BatchNorm2d(3, momentum=None)
    return nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.Flatten(), nn.Linear(12, CLASSES))


def test_cumulative_statistics_equal_a_plain_loop() -> None:
    """The server's number of batches is the mean of the clients', rounded."""
    expected = loop_by_hand("fedavg", cumulative).state_dict()
    assert expected["1.num_batches_tracked"] > ROUNDS * EPOCHS
    for engine in ("sequential", "vectorized", "cuda_graph"):
        for n, leaf in model_of(trained(task(module(cumulative)), "fedavg", engine)).items():
            torch.testing.assert_close(leaf, expected[n].double(), rtol=0, atol=1e-9, msg=n)
    sim = trained(task(module(cumulative), batch_norm="local"), "fedavg")
    for kept, _ in sim.memory.of_trial(0).values():
        assert kept["1.num_batches_tracked"] == kept["1.num_batches_tracked"].round() > 0


# Policies.


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_agree_under_every_policy(policy: BatchNormPolicy) -> None:
    own = task(batch_norm=policy)
    engines: list[Any] = ["sequential", EnginePlanner("vectorized", chunk=2), "cuda_graph"]
    rounds = 2 if policy == "local" else 1
    found = [trained(own, "fedzmg", e, client_lr=0.05, rounds=rounds) for e in engines]
    for other in found[1:]:
        assert_close(model_of(found[0]), model_of(other))
    assert {r.memory.is_empty for r in found} == {policy != "local"}
    if policy == "average":
        single = [
            model_of(trained(own, "fedavg", e, dtype=torch.float32, client_lr=0.01, rounds=1))
            for e in engines[:2]
        ]
        assert_close(*single, limit=1e-5)
    shown = own.model.params()
    assert ("twice.running_mean" in shown) == (policy in ("average", "local"))
    [history] = simulate(own, [Trial.of("fedavg")], rounds=1, device="cpu", engine="vectorized")
    travels = ("conv", "dense", "head") if policy == "local" else ("",)
    sent = num_bytes([leaf for n, leaf in shown.items() if n.startswith(travels)])
    assert history.records[0].bytes_down == history.records[0].bytes_up == 3 * sent


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_graphs_on_a_gpu_agree_with_the_loop(policy: BatchNormPolicy) -> None:
    own, models = task(batch_norm=policy), []
    for engine in ("sequential", "cuda_graph", "compiled_cuda_graph"):
        trials, device = [Trial.of("fedzmg", client_lr=0.05)], torch.device("cuda")
        sim = Simulation(
            own,
            trials,
            rounds=2,
            device=device,
            dtype=torch.float64,
            engine=engine,  # type: ignore[arg-type]
        )
        for _ in range(2):
            sim.run_round()
        models.append(model_of(sim))
    for other in models[1:]:
        assert_close(models[0], other)


def assert_single_precision(params: Tree, *, start: Tree) -> None:
    for n, leaf in params.items():
        assert leaf.dtype == torch.float32
        assert not (n.endswith("running_mean") and torch.equal(leaf, start[n].to(leaf)))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Net, cumulative])
def test_statistics_stay_in_single_precision_on_a_gpu(make: Callable[[], nn.Module]) -> None:
    models = []
    for engine in ("sequential", "cuda_graph", "compiled_cuda_graph"):
        sim = Simulation(
            task(module(make)),
            [Trial.of("fedzmg", client_lr=0.05)],
            rounds=1,
            device=torch.device("cuda"),
            dtype=torch.float32,
            engine=engine,  # type: ignore[arg-type]
            precision="bf16",
        )
        sim.run_round()
        models.append(model_of(sim))
    assert_single_precision(models[0], start=FunctionalModel(module(make)).params())
    for other in models[1:]:
        assert_close(models[0], other, limit=2e-2)


@pytest.mark.parametrize("make", [Net, cumulative])
def test_statistics_of_half_precision_layers(make: Callable[[], nn.Module]) -> None:
    """A padded and mapped batch equals the real examples alone; statistics stay float32."""
    model = FunctionalModel(module(make))
    params = model.params()
    real = torch.tensor([1, 1, 0, 1, 1]) > 0
    x, _ = data()
    batches = torch.stack([x[:5], x[10:15]])

    def mapped(params: Tree, x: Tensor) -> Tree:
        moved: dict[str, Tensor] = {}
        model.train(params, x, real=real, moved=moved)
        return Tree(moved)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.vmap(mapped)(params.map(lambda leaf: torch.stack([leaf, leaf])), batches)
        for i, batch in enumerate(batches):
            moved: dict[str, Tensor] = {}
            out = model.train(params, batch[real], moved=moved)
            assert out.dtype == torch.bfloat16
            alone = Tree(moved)
            assert_single_precision(alone, start=params)
            assert_close(row(found, i), alone, limit=2e-2)


def test_frozen_statistics_are_those_of_the_module() -> None:
    net = module()
    with torch.no_grad():
        for n, buffer in net.named_buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 0.5, 1.5, torch.Generator().manual_seed(len(n)))
    own = task(net, batch_norm="frozen", cohort=1, epochs=1, batch_size=100, init="given")
    sim = trained(own, "fedavg", rounds=1)
    local = copy.deepcopy(net).double().eval()
    [client] = sample_cohort(0, 1, len(COUNTS), 1, replacement=False).tolist()
    x, y = (column[client == OWNERS] for column in data())
    optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
    F.cross_entropy(local(x.double()), y).backward()
    optimiser.step()
    for n, p in local.named_parameters():
        torch.testing.assert_close(model_of(sim)[n], p.detach(), rtol=0, atol=1e-9)


def test_local_layers_never_travel_and_clients_use_their_own() -> None:
    sim = trained(task(batch_norm="local", cohort=2), "fedavg", rounds=1)
    start = initial_params(sim.task.model, "given", 0)
    layers = [n for n in start if n.startswith(("down", "twice", "plain"))]
    assert all(torch.equal(model_of(sim)[n], start[n].double()) for n in layers)
    memories = sim.memory.of_trial(0)
    assert len(memories) == 2
    for kept, _ in memories.values():
        assert list(kept) == layers
        assert all(not torch.equal(kept[n], start[n].double()) for n in layers)
    [own] = sim.evaluate_clients()
    assert own.personal is not None


def test_batch_policy_has_no_running_statistics() -> None:
    sim = trained(task(batch_norm="batch"), "fedavg")
    own = module().double()
    for child in own.modules():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            child.track_running_stats = False
            child.running_mean = child.running_var = child.num_batches_tracked = None
    own.load_state_dict(dict(model_of(sim).items()))
    with torch.no_grad():
        x, y = data()
        loss = F.cross_entropy(own.eval()(x[:9].double()), y[:9])
    assert float(loss) == pytest.approx(sim.evaluate()[0].loss, rel=1e-9)


@pytest.mark.parametrize("name", ["fedsam", "fedspeed", "mimelite"])
def test_statistics_move_once_per_step(name: str) -> None:
    """By the first gradient of a batch, at the local model; a full pass does not move them."""
    own = task(cohort=1, epochs=1, batch_size=100)
    plain, other = (trained(own, n, rounds=1) for n in ("fedavg", name))
    for n in own.model.statistics:
        torch.testing.assert_close(model_of(plain)[n], model_of(other)[n], rtol=0, atol=1e-12)
    assert not torch.equal(model_of(plain)["conv.weight"], model_of(other)["conv.weight"])


# Everything else that reads a model.

OFTEN = ["fedsam"]
BITS = [
    "engines agree", "packed = alone", "resumed = whole", "useless uploads", "lost round",
    "one client", "pure rules", "compiled step",
]  # fmt: skip


def combination(name: str, prop: str) -> Any:
    often = (name, prop) == ("fedavg", "resumed = whole") or (name in OFTEN and prop == BITS[0])
    return pytest.param(name, prop, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(("name", "prop"), [combination(n, p) for n in ALGORITHMS for p in BITS])
def test_property_holds_with_batch_norm(name: str, prop: str) -> None:
    found = check_property(Case(ALGORITHMS[name], norm=True), prop)
    assert found.passed, f"{found.detail}\n{found.traceback}"


def test_fine_tuned_clients_use_statistics_of_their_own_data() -> None:
    own = task(fine_tune=1)
    [mapped], [looped] = (
        trained(own, "fedavg", engine).evaluate_clients() for engine in ("vectorized", "sequential")
    )
    assert mapped.tuned is not None
    assert looped.tuned is not None
    assert np.array_equal(mapped.tuned, looped.tuned)


@pytest.mark.parametrize("policy", ["average", "batch"])
def test_model_is_a_module_with_its_statistics(policy: BatchNormPolicy) -> None:
    [history] = simulate(task(batch_norm=policy), [Trial.of("fedavg")], rounds=1, device="cpu")
    loaded = module()
    loaded.load_state_dict(dict(history.params.items()), strict=policy == "average")
    x, y = data()
    for net in (history.model(), loaded) if policy == "average" else (history.model(),):
        with torch.no_grad():
            loss = F.cross_entropy(net.eval()(x[:9]), y[:9])
        assert float(loss) == pytest.approx(history.records[-1].loss, rel=1e-5)


def test_diagnosis_measures_weights_alone() -> None:
    found = diagnose(task(), drifting=3, device="cpu", dtype=torch.float64)
    assert found.points[0].drift
    assert "running" not in json.dumps(found.as_dict())


def test_initial_statistics_are_fresh_unless_given() -> None:
    net = module()
    nn.init.constant_(net.twice.running_mean, 7.0)
    model = FunctionalModel(net)
    for scheme, mean in (("given", 7.0), ("torch", 0.0), ("keras", 0.0)):
        start = initial_params(model, scheme, 0)  # type: ignore[arg-type]
        assert start["twice.running_mean"].unique().item() == mean
        assert start["twice.running_var"].unique().item() == 1.0
        assert start["twice.weight"].unique().item() == 1.0


OWN_TASK = """
import numpy as np
import torch
from torch import nn
from fedzmg import Task

class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return x @ self.table

def rows():
    x, y = np.eye(12, 4, dtype="float32"), np.arange(12) % 3
    net = nn.Sequential(Mix(), nn.BatchNorm1d(3))
    more = {"cohort": 3, "batch_norm": "local"}
    return Task.from_arrays(net, x, y, np.arange(12) % 3, test=(x, y), **more)
"""


@pytest.mark.usefixtures("forget_plugins")
@pytest.mark.filterwarnings("ignore:not projected")
def test_policy_is_an_option_of_specifications_and_in_manifests(
    tmp_path: Path, fedzmg: Callable[..., Any]
) -> None:
    file, spec = tmp_path / "own.py", tmp_path / "own.toml"
    file.write_text(OWN_TASK)
    spec.write_text('task = "own.py:rows"\nprotocol.rounds = 1\npreset.batch_norm = "batch"\n')
    assert specs.read(spec).build_task().model.batch_norm == "batch"
    own = tasks.get(f"{file}:rows")
    other = tasks.get(f"{file}:rows", {"batch_norm": "average"})
    assert (own.model.batch_norm, own.parts.personal) == ("local", ("batch_norm",))
    assert (other.model.batch_norm, other.parts.personal) == ("average", ())
    change = ("--set", "preset.batch_norm=frozen", "--out", str(tmp_path / "out"))
    assert fedzmg("run", str(spec), *change).code == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["preset"] == {"batch_norm": "frozen"}
    assert manifest["not_projected"] == "0.table (Mix)"
    assert "preset.batch_norm" in fedzmg("list", f"{file}:rows").out
    for word in ("preset.batch_norm=mean", "preset.norm=batch"):
        assert fedzmg("run", f"{file}:rows", "--set", word).code == 2


def test_fingerprints_tell_policies_apart() -> None:
    prints = [task(batch_norm=policy).fingerprint() for policy in POLICIES]
    assert len(set(prints)) == len(POLICIES)


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Any:
        return torch.relu(super().forward(input))


@pytest.mark.parametrize(
    "norm", [OwnForward, lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)]
)
def test_other_layers_with_statistics_train_client_by_client(norm: Callable[[int], Any]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), norm(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, CLASSES)
        )

    own = task(module(make), cohort=1, epochs=1, batch_size=100)
    with pytest.raises(InputError, match=r"'1' .*padding"):
        trained(own, "fedavg", "vectorized", rounds=1)
    sim = trained(own, "fedavg", "auto", rounds=1)
    assert sim.choice.path == "sequential"
    local = module(make).double().train()
    [client] = sample_cohort(0, 1, len(COUNTS), 1, replacement=False).tolist()
    stream = local_stream(
        own.protocol.batching, 0, 1, client, 0, sum(COUNTS[:client]), COUNTS[client]
    )
    x, y = (column[torch.from_numpy(stream.indices[0, : COUNTS[client]])] for column in data())
    optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
    F.cross_entropy(local(x.double()), y).backward()
    optimiser.step()
    for n, leaf in model_of(sim).items():
        torch.testing.assert_close(leaf, local.state_dict()[n].double(), rtol=0, atol=1e-9, msg=n)


# FedBN.


class TwoParts(nn.Module):
    """The golden problem of personal algorithms; the personal weight is a BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.tensor(PERSONAL["problem"]["w0"], dtype=torch.float64)
        self.shared = nn.Parameter(start[:1])
        self.own = nn.BatchNorm1d(1).double()
        self.own.bias.requires_grad_(False)
        nn.init.constant_(self.own.weight, float(start[1]))

    def forward(self, rows: Tensor) -> Tensor:
        curvature, centre = rows.chunk(2, dim=1)
        apart = torch.cat([self.shared, self.own.weight]) - centre
        return 0.5 * (curvature * apart**2).sum(1)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_golden_fedbn(engine: str) -> None:
    """The specification's numbers equal FedPer's on this problem."""
    problem = PERSONAL["problem"]
    rows, owners = [], []
    for name, count in problem["n"].items():
        rows += [problem["H"][name] + problem["c"][name]] * count
        owners += [name] * count
    x, y = torch.tensor(rows), torch.zeros(len(rows))

    def outputs(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs

    own = Task.from_arrays(
        TwoParts(), x, y, owners, test=(x, y), loss=outputs, init="given", cohort=2, batch_size=30,
        metric=fedzmg.Metric("loss", outputs, higher_is_better=False), epochs=2,
    )  # fmt: skip
    trials = [Trial.of("fedbn", client_lr=0.1)]
    sim = Simulation(own, trials, rounds=4, device=CPU, dtype=torch.float64, engine=engine)  # type: ignore[arg-type]
    for expected in PERSONAL["algorithms"]["fedper"]["rounds"]:
        sim.run_round()
        shared = float(model_of(sim)["shared"])
        assert shared == pytest.approx(expected["shared"], abs=1e-9)
        memories = sim.memory.of_trial(0)
        for i, client in enumerate(problem["n"]):
            model = sim.program.rule.personal_model(model_of(sim), memories[i])
            found = [float(model["shared"]), float(model["own.weight"])]
            assert found == pytest.approx(expected["model"][client], abs=1e-9)


def test_fedbn_is_fedavg_with_local_layers() -> None:
    one, other = trained(task(), "fedbn"), trained(task(batch_norm="local"), "fedavg")
    assert_close(model_of(one), model_of(other), limit=0)


def test_fedbn_without_batch_norm_is_refused_in_one_line(fedzmg: Callable[..., Any]) -> None:
    done = fedzmg("run", "quadratic", "--algorithm", "fedbn", "--rounds", "1")
    assert done.code == 2
    assert "batch_norm" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
