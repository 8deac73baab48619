"""Models as people write them: mapped with the results of a loop, or trained by the loop."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federations import LABELS, OWNERS, assert_engines_agree, federation, ids, normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from fedzmg import Metric, Task, Trial, cli, simulate
from fedzmg.engine.choose import EnginePlanner
from fedzmg.errors import CannotMap, UserCodeError
from fedzmg.models import objective
from fedzmg.simulation import Simulation
from fedzmg.simulation.planner import RoundPlanner
from golden_problems import Net

IMAGES, VECTORS, SEQUENCES, TEXT = normal(3, 8, 8), normal(6), normal(5, 8), ids(11, 6)
MASK = torch.ones(5, 5, dtype=torch.bool).tril()


def dense(function: Callable[[Any, Tensor], Any], **parts: Any) -> Net:
    """Two dense layers of vectors and a function of them."""
    return Net(function, first=nn.Linear(6, 8), last=nn.Linear(8, 3), **parts)


def sequences(function: Callable[[Any, Tensor], Tensor], width: int = 8, **parts: Any) -> Net:
    """A function of sequences, and a dense layer on the mean over time."""
    return Net(lambda m, x: m.head(function(m, x).mean(1)), head=nn.Linear(width, 3), **parts)


def sampled(m: Any, x: Tensor) -> Tensor:
    """A layer with every random function that takes a key."""
    hidden = torch.tanh(m.first(x))
    if not m.training:
        return m.last(hidden)
    noise = torch.empty([len(x), 1], device=x.device).bernoulli_(0.7).div_(0.7).to(x.dtype)
    hidden = hidden * noise + x.new_empty((len(x), 1)).uniform_(-0.1, 0.1)
    hidden = (
        hidden + 0.1 * torch.randn_like(hidden) + 0.1 * torch.rand(hidden.shape, device=x.device)
    )
    hidden = hidden * torch.bernoulli(torch.full_like(hidden, 0.9))
    hidden = hidden + 0.1 * torch.randn(len(x), 8, device=x.device)
    hidden = hidden + 0.1 * torch.randint(0, 3, hidden.shape, device=x.device)
    hidden = F.gumbel_softmax(hidden, tau=2.0) + torch.rand_like(hidden) + hidden
    return m.last(torch.zeros_like(hidden).normal_(0, 0.1) + hidden)


def attended(m: Any, x: Tensor) -> Tensor:
    query, key, value = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in m.qkv(x).chunk(3, -1))
    dropped = 0.2 if m.training else 0.0
    out = F.scaled_dot_product_attention(query, key, value, m.mask, dropped, scale=0.3)
    out = out + F.scaled_dot_product_attention(out, key, value, is_causal=True)
    return out.transpose(1, 2).flatten(-2)


def tied() -> nn.Module:
    module: Any = Net(
        lambda m, x: m.head(torch.tanh(m.inner(m.table(x)))),
        table=nn.Embedding(11, 4, padding_idx=2),
        inner=nn.Linear(4, 4),
        head=nn.Linear(4, 11, bias=False),
    )
    module.head.weight = module.table.weight
    return module


def with_buffer() -> nn.Module:
    module = dense(lambda m, x: m.last(F.relu(m.first(x) * m.gain)))
    module.register_buffer("gain", torch.linspace(0.5, 2, 8))
    return module


def rotated() -> nn.Module:
    """Complex parameters, and complex constants as rotary positions have them."""
    module = sequences(
        lambda m, x: torch.view_as_real(
            torch.view_as_complex(m.first(x).unflatten(-1, (4, 2))) * m.turn * (1 + m.weight)
        ).flatten(-2),
        first=nn.Linear(8, 8), weight=nn.Parameter(0.1 * torch.randn(4, dtype=torch.cfloat)),
    )  # fmt: skip
    module.register_buffer("turn", torch.polar(torch.ones(5, 4), torch.arange(20.0).view(5, 4)))
    return module


def recurrent(layer: nn.RNNBase, width: int) -> nn.Module:
    return sequences(lambda m, x: m.inner(x)[0], width, inner=layer)


MAPPED: dict[str, Callable[[], Task]] = {
    "lstm": lambda: federation(
        recurrent(nn.LSTM(8, 4, 2, batch_first=True, dropout=0.3, proj_size=3), 3), SEQUENCES
    ),
    "gru": lambda: federation(
        recurrent(nn.GRU(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.2), 8), SEQUENCES
    ),
    "encoder": lambda: federation(
        sequences(
            lambda m, x: m.inner(x),
            inner=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), 2,
                enable_nested_tensor=False,
            ),
        ),
        SEQUENCES,
    ),
    "decoder": lambda: federation(
        sequences(
            lambda m, x: m.inner(x, x.flip(1), tgt_is_causal=True, tgt_mask=~m.mask),
            mask=MASK, inner=nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
        ),
        SEQUENCES,
    ),
    "time-first": lambda: federation(
        sequences(
            lambda m, x: m.drop(m.rnn(m.inner(x.transpose(0, 1)))[0]).transpose(0, 1),
            inner=nn.TransformerEncoderLayer(8, 2, 16), rnn=nn.LSTM(8, 8, 2, dropout=0.2),
            drop=nn.Dropout(0.3),
        ),
        SEQUENCES,
    ),
    "attention": lambda: federation(
        sequences(attended, qkv=nn.Linear(8, 24), mask=MASK), SEQUENCES
    ),
    "functional-dropout": lambda: federation(
        dense(lambda m, x: m.last(F.dropout(torch.relu(m.first(x)), 0.4, m.training))), VECTORS
    ),
    "channel-dropout": lambda: federation(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.AlphaDropout(0.2), nn.Flatten(2),
            nn.Dropout1d(0.3), nn.FeatureAlphaDropout(0.2), nn.Flatten(), nn.Linear(144, 3),
        ),
        IMAGES,
    ),
    "samples": lambda: federation(dense(sampled), VECTORS),
    "tied-padded": lambda: federation(tied(), TEXT, TEXT, axes={"table.weight": (0,)}),
    "bag": lambda: federation(
        nn.Sequential(nn.EmbeddingBag(11, 4, padding_idx=1), nn.Linear(4, 3)), TEXT
    ),
    "complex": lambda: federation(rotated(), SEQUENCES, init="given"),
    "sparse": lambda: federation(
        nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3)), TEXT
    ),
    "buffer": lambda: federation(with_buffer(), VECTORS),
    "spectral-norm": lambda: federation(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 3)),
        VECTORS, init="given", axes={"0.parametrizations.weight.original": (1,)},
    ),
    "hook-weight-norm": lambda: federation(
        nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)),
        VECTORS, init="given", axes={"0.weight_g": (), "0.weight_v": (1,)},
    ),
}  # fmt: skip


def trained(
    task: Task, engine: Any = "auto", algorithm: str = "fedavg", **more: Any
) -> dict[str, Tensor]:
    more = {"rounds": 2, "dtype": torch.float64, **more}
    history = simulate(task, Trial.of(algorithm, client_lr=0.2), engine=engine, **more)[0]
    assert history.diverged is None
    return dict(history.params.items())


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", MAPPED)
def test_mapped_as_by_a_loop_and_the_same_twice(name: str) -> None:
    task = MAPPED[name]()
    assert task.model.loop_reason == ""
    assert_engines_agree(task, torch.float64)
    first, second = (trained(task, "vectorized", rounds=1) for _ in range(2))
    assert all(torch.equal(leaf, second[key]) for key, leaf in first.items())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAPPED)
def test_graphs_on_a_gpu_as_by_a_loop(name: str) -> None:
    task = MAPPED[name]()
    more: dict[str, Any] = {"rounds": 1, "device": "cuda"}
    more |= {"dtype": torch.float32, "precision": "float32"}
    loop, graph = (trained(task, engine, **more) for engine in ("sequential", "cuda_graph"))
    for key, leaf in loop.items():
        torch.testing.assert_close(leaf, graph[key], rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["encoder", "attention", "lstm"])
@pytest.mark.parametrize(("precision", "close"), [("tf32", 2e-3), ("bf16", 2e-2)])
def test_lower_precisions_on_a_gpu_as_by_a_loop(name: str, precision: str, close: float) -> None:
    more: dict[str, Any] = {"device": "cuda", "dtype": torch.float32, "precision": precision}
    task = MAPPED[name]()
    loop, graph = (trained(task, engine, **more) for engine in ("sequential", "cuda_graph"))
    for key, leaf in loop.items():
        torch.testing.assert_close(graph[key], leaf, rtol=0, atol=close)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["samples", "functional-dropout"])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_compiled_as_mapped(name: str) -> None:
    """The compiler traces the second model, and the first runs without it."""
    planner = EnginePlanner("compiled", backend="eager")
    found, stops = [], name == "samples"
    task, trial = MAPPED[name](), Trial.of("fedavg", client_lr=0.2)
    for engine in ("vectorized", planner):
        options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
        made = Simulation(task, [trial], rounds=1, engine=engine, **options)  # type: ignore[arg-type]
        warns = pytest.warns(UserWarning, match="without the compiler")
        with warns if stops and engine is planner else contextlib.nullcontext():
            made.run_round()
        found.append(made.snapshot.params)
    for key, leaf in found[0].items():
        torch.testing.assert_close(leaf, found[1][key], rtol=0, atol=1e-6)


def bounded(m: Any, x: Tensor) -> Tensor:
    m.first.weight.data.clamp_(-0.2, 0.2)
    return m.last(m.first(x))


def renormed(m: Any, x: Tensor) -> Tensor:
    m.first.weight.data = torch.renorm(m.first.weight.data, 2, 0, 0.3)
    return m.last(m.first(x))


def with_functions() -> nn.Module:
    """Functions and a hook that use the module, and one that uses a parameter itself."""
    module: Any = dense(lambda m, x: m.last(m.scale(m.act(x))))
    module.gain, weight = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.linspace(0.5, 2, 8))
    module.weight = weight
    module.act = lambda z: torch.tanh(module.first(z))
    module.scale = lambda z: z * weight
    module.last.register_forward_hook(lambda _layer, _inputs, out: out * module.gain)
    return module  # type: ignore[no-any-return]


def with_hooks_of_parameters() -> nn.Module:
    module: Any = dense(lambda m, x: m.last(m.first(x)))
    module.first.weight.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
    return module  # type: ignore[no-any-return]


def with_hook_of_a_layer() -> nn.Module:
    module: Any = dense(lambda m, x: m.last(m.first(x)))
    module.last.register_full_backward_hook(lambda _layer, slopes, _out: (0.3 * slopes[0],))
    return module  # type: ignore[no-any-return]


def with_momentum_encoder() -> nn.Module:
    """Frozen weights that follow trained ones."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if m.training:
            with torch.no_grad():
                m.slow.weight.mul_(0.9).add_(m.first.weight, alpha=0.1)
        return m.last(torch.relu(m.first(x))) + m.head(m.slow(x))  # type: ignore[no-any-return]

    return dense(forward, slow=nn.Linear(6, 8).requires_grad_(False), head=nn.Linear(8, 3))


def with_rare_changes() -> nn.Module:
    """A buffer that changes in every third pass."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        if m.training:
            m.passes += 1
            if m.passes % 3 == 0:
                m.average = 0.9 * m.average + 0.1 * hidden.detach().mean(0)
        return m.last(hidden - m.average)  # type: ignore[no-any-return]

    module = dense(forward)
    module.register_buffer("passes", torch.tensor(0))
    module.register_buffer("average", torch.ones(8))
    return module


def crowded(m: Any, x: Tensor) -> Tensor:
    """Experts that take a share of the batch, first come, first served."""
    taken = F.one_hot(m.first(x)[:, :3].argmax(1), 3).to(x)
    kept = (taken.cumsum(0) <= max(1.0, len(x) / 3)) * taken
    return m.last(m.first(x)) * kept.sum(1, keepdim=True)  # type: ignore[no-any-return]


def reversed_gradient(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda slope: -slope)
    return m.last(hidden)


def with_slope(m: Any, x: Tensor) -> Tensor:
    """The slope of a part of the model, as in models of physics."""
    with torch.enable_grad():
        x = x.requires_grad_()
        energy = torch.tanh(m.first(x)).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return m.last(torch.tanh(m.first(x))) + slope[:, :3]


def gated(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    return m.last(hidden + m.gate * hidden.mean(0))


def unsure(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    return m.last(hidden if hidden.sum() > 0 else -hidden)


def packed(m: Any, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), 4)
    return m.inner(pack_padded_sequence(x, lengths, batch_first=True))[1][0][0][:, None]


LOOPED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "branch": lambda: (dense(unsure), VECTORS),
    "item": lambda: (dense(lambda m, x: m.last(m.first(x) * m.first(x).mean().item())), VECTORS),
    "batch-mean": lambda: (dense(lambda m, x: m.last(m.first(x - x.mean(0)))), VECTORS),
    "only-in-training": lambda: (
        dense(lambda m, x: m.last(m.first(x - x.mean(0) if m.training else x))), VECTORS
    ),
    "max-norm": lambda: (
        nn.Sequential(nn.Embedding(11, 4, max_norm=0.7), nn.Flatten(), nn.Linear(24, 3)), TEXT
    ),
    "bounded": lambda: (dense(bounded), VECTORS),
    "renormed": lambda: (dense(renormed), VECTORS),
    "functions": lambda: (with_functions(), VECTORS),
    "hooks-of-parameters": lambda: (with_hooks_of_parameters(), VECTORS),
    "hook-of-a-gradient": lambda: (dense(reversed_gradient), VECTORS),
    "slope": lambda: (dense(with_slope), VECTORS),
    "gate": lambda: (dense(gated, gate=nn.Parameter(torch.zeros(8))), VECTORS),
    "checkpoint": lambda: (
        dense(lambda m, x: checkpoint(m.last, m.first(x), use_reentrant=True)), VECTORS
    ),
    "checkpoint-again": lambda: (
        dense(lambda m, x: m.last(checkpoint(lambda z: m.first(z).relu(), x, use_reentrant=False))),
        VECTORS,
    ),
    "checkpoint-of-a-norm": lambda: (
        dense(
            lambda m, x: m.last(
                checkpoint(lambda z: F.gelu(m.norm(z)), m.first(x), use_reentrant=False)
            ),
            norm=nn.LayerNorm(8),
        ),
        VECTORS,
    ),
    "first-examples-alike": lambda: (
        dense(lambda m, x: m.last(m.first(x) - m.first(x).relu().mean(0))),
        np.concatenate([VECTORS[:1], VECTORS[:1], VECTORS[2:]]),
    ),
    "small-gate": lambda: (dense(gated, gate=nn.Parameter(torch.full((8,), 1e-6))), VECTORS),
    "hook-of-a-layer": lambda: (with_hook_of_a_layer(), VECTORS),
    "weight-norm-of-a-state": lambda: (
        recurrent(
            parametrizations.weight_norm(nn.LSTM(8, 4, batch_first=True), "weight_hh_l0"), 4
        ),
        SEQUENCES,
    ),
    "functional-batch-norm": lambda: (
        dense(lambda m, x: m.last(F.batch_norm(m.first(x), None, None, training=True))), VECTORS
    ),
    "frequencies": lambda: (
        nn.Sequential(nn.EmbeddingBag(11, 4, scale_grad_by_freq=True), nn.Linear(4, 3)), TEXT
    ),
    "packed": lambda: (
        sequences(packed, width=4, inner=nn.LSTM(8, 4, batch_first=True)), SEQUENCES
    ),
    "time-first": lambda: (
        sequences(lambda m, x: m.inner(x), inner=nn.TransformerEncoderLayer(8, 2, 16, 0.0)),
        SEQUENCES,
    ),
}  # fmt: skip


def by_hand(module: nn.Module, x: Any, rounds: int = 2, epochs: int = 2) -> dict[str, Tensor]:
    """Federated averaging of full local batches as anybody would write it."""
    module, shares = module.double().train(), np.bincount(OWNERS) / len(OWNERS)
    inputs = torch.from_numpy(x) if x.dtype == np.int64 else torch.from_numpy(x).double()
    model = {name: p.detach().clone() for name, p in module.named_parameters()}
    for _ in range(rounds):
        average = {name: torch.zeros_like(p) for name, p in model.items()}
        for client, share in enumerate(shares):
            module.load_state_dict(model, strict=False)
            own = torch.from_numpy(client == OWNERS)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
            for _ in range(epochs):
                optimizer.zero_grad()
                F.cross_entropy(module(inputs[own]), torch.from_numpy(LABELS)[own]).backward()
                optimizer.step()
            for name, parameter in module.named_parameters():
                average[name] += share * parameter.detach()
        model = average
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", LOOPED)
def test_a_model_that_does_not_map_trains_as_by_hand(name: str) -> None:
    torch.manual_seed(3)
    module, x = LOOPED[name]()
    task = Task.from_arrays(
        module, x, LABELS, OWNERS, test=(x, LABELS), cohort=3, batch_size=5, epochs=2, init="given"
    )
    start = {key: p.detach().double() for key, p in module.named_parameters()}
    found, expected = trained(task), by_hand(module, x)
    assert found.keys() == expected.keys()
    for key, leaf in expected.items():
        torch.testing.assert_close(found[key], leaf, rtol=0, atol=1e-9)
        assert not torch.equal(leaf, start[key])
    with pytest.raises(CannotMap) as caught:
        trained(task, "vectorized")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [with_momentum_encoder, with_rare_changes])
def test_state_that_changes_in_a_pass_travels_with_the_client(make: Any) -> None:
    module = make()
    options: dict[str, Any] = {"cohort": 3, "batch_size": 2, "epochs": 2, "init": "given"}
    task = Task.from_arrays(module, VECTORS, LABELS, OWNERS, test=(VECTORS, LABELS), **options)
    first, second = (trained(task) for _ in range(2))
    assert all(torch.equal(leaf, second[key]) for key, leaf in first.items())
    planned = RoundPlanner(task, [0])
    model = {name: t.detach().clone() for name, t in module.double().state_dict().items()}
    x, y = torch.from_numpy(VECTORS).double(), torch.from_numpy(LABELS)
    for round_ in (1, 2):
        total: dict[str, Tensor] = {name: torch.zeros_like(t).double() for name, t in model.items()}
        for client in planned.batches(round_):
            module.load_state_dict(model)
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.2)
            for rows, count in zip(client.stream.indices, client.stream.counts, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(module.train()(x[rows[:count]]), y[rows[:count]]).backward()
                optimizer.step()
            for name, value in module.state_dict().items():
                total[name] += client.examples / len(OWNERS) * value
        model = {n: t.round().long() if n == "passes" else t for n, t in total.items()}
    for key, leaf in first.items():
        torch.testing.assert_close(leaf, model[key].double(), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("again", [False, True])
def test_dropout_in_a_checkpoint_repeats_its_mask(again: bool) -> None:
    masks: list[Tensor] = []

    def part(m: Any, z: Tensor) -> Tensor:
        first = F.dropout(torch.ones_like(z), 0.5, m.training)
        masks.append(torch.cat([first, m.drop(torch.ones_like(z))]))
        return m.last(z * first * masks[-1][len(z) :])  # type: ignore[no-any-return]

    module = dense(
        lambda m, x: checkpoint(partial(part, m), m.first(x), use_reentrant=again),
        drop=nn.Dropout(0.5),
    )
    task = federation(module, VECTORS, init="given")
    masks.clear()
    found = trained(task, "sequential", rounds=1)
    drawn = [mask for mask in masks if mask.eq(0).any()][-8:]  # after trial passes
    assert all(torch.equal(*pair) for pair in zip(drawn[::2], drawn[1::2], strict=True))
    repeated = trained(task, "sequential", rounds=1)
    assert all(torch.equal(leaf, repeated[key]) for key, leaf in found.items())


def test_features_of_a_model_whose_only_layer_has_a_hook() -> None:
    """The body of such a model has no parameter of its own."""
    module = nn.Linear(6, 3)
    plain = trained(federation(module, VECTORS, init="given"), "sequential", algorithm="moon")
    module.weight.register_hook(lambda slope: slope * 1)
    hooked = trained(federation(module, VECTORS, init="given"), "sequential", algorithm="moon")
    assert all(torch.equal(leaf, plain[key]) for key, leaf in hooked.items())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
# torch's own gradients of ``scale_grad_by_freq`` differ between a CPU and a GPU.
@pytest.mark.parametrize("name", [name for name in LOOPED if name != "frequencies"])
def test_a_model_that_does_not_map_trains_alike_on_a_gpu(name: str) -> None:
    module, x = LOOPED[name]()
    task = federation(module, x, init="given")
    found, expected = (trained(task, "sequential", device=place) for place in ("cuda", "cpu"))
    for key, leaf in expected.items():
        torch.testing.assert_close(found[key].cpu(), leaf, rtol=0, atol=1e-6)


def test_examples_that_compete_for_experts_are_not_mapped() -> None:
    assert "depend on the other examples" in federation(dense(crowded), VECTORS).model.loop_reason


def test_a_loss_that_couples_examples_is_not_mapped() -> None:
    def coupled(outputs: Tensor, targets: Tensor) -> Tensor:
        near = (outputs @ outputs.T).logsumexp(1)
        return near - (outputs * (targets == targets[:1])[:, None]).sum(1)

    def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
        """Ask for outputs of all classes over a batch, which a head of zeros does not show."""
        shares = outputs.softmax(1).mean(0)
        entropy = (shares * shares.log()).sum()
        return F.cross_entropy(outputs, targets, reduction="none") + entropy

    zeros = nn.Linear(6, 3)
    nn.init.zeros_(zeros.weight)
    loops = federation(zeros, VECTORS, loss=balanced)
    assert "the loss of an example" in loops.model.loop_reason
    loops = federation(dense(lambda m, x: m.last(m.first(x))), VECTORS, loss=coupled)
    assert "the loss of an example" in loops.model.loop_reason
    with pytest.raises(CannotMap, match="the loss of an example"):
        trained(loops, "vectorized")


def test_complex_numbers_train_as_by_hand() -> None:
    module = rotated()
    task = Task.from_arrays(
        module, SEQUENCES, LABELS, OWNERS, test=(SEQUENCES, LABELS), cohort=3, batch_size=5,
        epochs=2, init="given",
    )  # fmt: skip
    trial = Trial.of("fedavg", client_lr=0.2)
    [history] = simulate(task, trial, rounds=2, dtype=torch.float64)
    found = dict(history.model().named_parameters())
    for name, leaf in by_hand(module, SEQUENCES).items():
        close = {"rtol": 0, "atol": 1e-6, "check_dtype": False}
        torch.testing.assert_close(found[name].detach(), leaf, **close)


UNKEYED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "numpy": lambda m, x: m.last(m.first(x)) * float(np.random.rand()),  # noqa: NPY002
    "python": lambda m, x: m.last(m.first(x)) * (random.random() if m.training else 1),
    "torch": lambda m, x: m.last(m.first(x)[torch.randperm(len(x))]),
}


@pytest.mark.parametrize("name", UNKEYED)
def test_random_numbers_without_a_key_repeat_and_leave_the_generators(name: str) -> None:
    task = federation(dense(UNKEYED[name]), VECTORS)
    assert task.model.loop_reason
    states = [torch.get_rng_state(), np.random.get_state()[1], random.getstate()]  # type: ignore[index] # noqa: NPY002
    first, second = trained(task), trained(task)
    assert all(torch.equal(leaf, second[key]) for key, leaf in first.items())
    assert torch.equal(torch.get_rng_state(), states[0])  # type: ignore[arg-type]
    assert np.array_equal(np.random.get_state()[1], states[1])  # type: ignore[index,arg-type] # noqa: NPY002
    assert random.getstate() == states[2]


def _raise(kind: type[Exception], x: Tensor, out: Any) -> Any:
    if bool((x > 11).any()):
        raise kind("mine")
    return out


FAILURES: dict[Any, type[Exception]] = {
    # An id above the table's 11 rows, and below the number of rows of three clients.
    lambda m, x: m.head(m.embed(x.long()).flatten(1)): IndexError,
    lambda m, x: m.head(m.embed(_raise(KeyError, x, x.long() % 11)).flatten(1)): KeyError,
    lambda m, x: m.head(_raise(OSError, x, m.embed(x.long() % 11).flatten(1))): OSError,
}


@pytest.mark.parametrize("engine", ["auto", "sequential", "vectorized", "cuda_graph"])
def test_an_error_of_the_model_says_where(engine: str) -> None:
    """One client's data breaks the model: the error is its own, with client, step and engine."""
    x = TEXT.astype(np.float32)
    x[6, 0] = 12  # of the second client, not among the examples that are tried out
    for fails, kind in FAILURES.items():
        module = Net(fails, embed=nn.Embedding(11, 4), head=nn.Linear(24, 3))
        options: dict[str, Any] = {"test": (TEXT.astype(np.float32), LABELS), "batch_size": 3}
        task = Task.from_arrays(module, x, LABELS, OWNERS, cohort=3, **options)
        for trials in ([Trial.of("fedavg")], [Trial.of("fedavg", client_lr=lr) for lr in (1, 2)]):
            with pytest.raises(kind) as caught:
                simulate(task, trials, rounds=1, engine=engine)  # type: ignore[arg-type]
            path = "sequential" if engine == "auto" else engine
            assert caught.value.__notes__ == [f"client '1', local step 1, engine {path!r}"]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("fails", ["model", "loss", "metric", "finish", "prepare"])
def test_an_error_in_evaluation_says_where(engine: Any, fails: str) -> None:
    """The error keeps its type, message and traceback."""
    failing = ""

    def checked(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            if name == failing:
                raise FileNotFoundError("mine")
            return function(*args)

        return call

    x = TEXT.astype(np.float32)
    task = Task.from_arrays(
        Net(checked("model", lambda m, x: m.head(x)), head=nn.Linear(6, 3)), x, LABELS, OWNERS,
        test=(x, LABELS), cohort=3, loss=checked("loss", objective.cross_entropy),
        metric=Metric("own", checked("metric", lambda o, _: o),
                      finish=checked("finish", lambda sums: sums[..., 0])),
        prepare=checked("prepare", lambda x, dtype: x.to(dtype)),
    )  # fmt: skip
    simulation = Simulation(task, [Trial.of("fedavg")], rounds=2, device=torch.device("cpu"),
                            dtype=torch.float64, engine=engine)  # fmt: skip
    simulation.run_round()
    failing = fails
    for what, evaluate in (
        (f"{len(x)} test examples after round 1", simulation.evaluate),
        ("clients on training examples, round 1", simulation.evaluate_clients),
    ):
        with pytest.raises(FileNotFoundError, match="mine") as caught:
            evaluate()
        assert caught.value.__notes__ == [f"evaluation of {what}"]
        assert caught.traceback[-1].name == "call"


def test_ids_beyond_an_embedding_are_found_before_training() -> None:
    x = TEXT.copy()
    x[6, 0] = 12
    module = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(24, 3))
    with pytest.raises(UserCodeError, match="example 6 of the training data") as caught:
        Task.from_arrays(module, x, LABELS, OWNERS, test=(TEXT, LABELS), cohort=3)
    assert isinstance(caught.value.__cause__, IndexError)


def test_an_unknown_nonlinearity_is_torchs_own_error() -> None:
    cell = nn.RNNCell(4, 3, nonlinearity="sine")
    with pytest.raises(UserCodeError, match="sine") as caught:
        federation(cell, VECTORS[:, :4])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_command_line_shows_the_users_traceback_below_our_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_m: Any, _x: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(cli, "app", lambda **_: federation(dense(fails), VECTORS))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    first, *rest = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert first.startswith("fedzmg: error:")
    assert any("in fails" in line for line in rest)
    assert rest[-1] == "ZeroDivisionError: mine"
