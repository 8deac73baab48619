"""``ZeroMeanSGD`` against the golden numbers, the engines' rule, and what torch's own promise."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given as having
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.errors import InputError
from fedzmg.models import CharGRU, CharTransformer, digits_cnn, layout_of, mlp, resnet18_gn
from fedzmg.models.layout import Axes
from fedzmg.optim import ZeroMeanSGD
from fedzmg.optim.updates import inputs_sharded, usable
from fedzmg.tree import Tree
from golden_problems import GOLDEN, P2, P3, Net, make_context

DOUBLE = torch.float64
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"foreach": True, "capturable": True, "lr": torch.tensor(0.1, dtype=DOUBLE)},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def optimizer_of(params: Any, **options: Any) -> ZeroMeanSGD:
    return ZeroMeanSGD(params, **{"lr": 0.1, **options})


# --- golden numbers -------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "lambda0": {"momentum": 0.0, "weight_decay": 0.0},
    "lambda_0.01": {"momentum": 0.0, "weight_decay": 0.01},
    "momentum": {"weight_decay": 0.0},
    "paper_settings": {},
}
P2_NAMES = {"lambda0": "pseudocode_lambda0", "lambda_0.01": "pseudocode"}
TRACES = [
    (P2, GOLDEN["algorithms"][f"fedzmg_{P2_NAMES.get(n, n)}"], s, f"p2-{n}")
    for n, s in SETTINGS.items()
] + [(P3, GOLDEN["p3"]["algorithms"][f"fedzmg_{n}"], s, f"p3-{n}") for n, s in SETTINGS.items()]


@ways
@pytest.mark.parametrize(
    ("problem", "trace", "options"), [pytest.param(*t[:3], id=t[3]) for t in TRACES]
)
def test_every_local_step_of_the_golden_traces(
    problem: dict[str, Any], trace: dict[str, Any], options: dict[str, Any], way: dict[str, Any]
) -> None:
    start = torch.tensor([problem["w0"]], dtype=DOUBLE)
    for stored in trace["rounds"]:
        for client, iterates in stored["local_iterates"].items():
            curvature, centre = (
                torch.tensor(problem[key][client], dtype=DOUBLE) for key in ("H", "c")
            )
            weight = nn.Parameter(start.clone())
            group = {"params": [weight], "input_axes": (1,)}
            optimizer = optimizer_of([group], **options, **way)
            for expected in iterates:
                optimizer.zero_grad()
                (0.5 * (curvature * (weight - centre) ** 2)).sum().backward()
                optimizer.step()
                torch.testing.assert_close(
                    weight.detach()[0], torch.tensor(expected, dtype=DOUBLE), rtol=0, atol=1e-9
                )
        start = torch.tensor([stored["w"]], dtype=DOUBLE)


# --- the engines' rule ----------------------------------------------------------------------


def odd() -> nn.Module:
    """Layers whose input axes are not all but the first."""

    def run(m: Any, ids: Tensor) -> Tensor:
        x = m.up(m.words(ids).mT).mT
        x = m.attention(x, x, x, need_weights=False)[0]
        return m.out(m.grouped(x.mT).mean(-1))

    return Net(
        run,
        words=nn.Embedding(9, 6),
        up=nn.ConvTranspose1d(6, 4, 3),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        grouped=nn.Conv1d(4, 4, 3, groups=2),
        out=nn.Linear(4, 5),
    )


def images(*shape: int) -> Tensor:
    return torch.randn(4, *shape).double()


def words(size: int, length: int = 7) -> Tensor:
    return torch.randint(0, size, (4, length))


MODELS: dict[str, Any] = {
    "mlp": lambda: (mlp(12, 8, outputs=3), lambda: images(12)),
    "cnn": lambda: (digits_cnn(), lambda: images(28, 28)),
    "resnet": lambda: (resnet18_gn(3, width=2), lambda: images(3, 8, 8)),
    "gru": lambda: (CharGRU(9, 5, 6), lambda: words(9)),
    "transformer": lambda: (
        CharTransformer(9, 8, 2, 1, 7), lambda: words(9),
    ),
    "odd layers": lambda: (odd(), lambda: words(9)),
}  # fmt: skip


@pytest.mark.parametrize("way", [WAYS["auto"], WAYS["foreach"]])
@pytest.mark.parametrize("form", ["heavy_ball", "nesterov"])
@pytest.mark.parametrize("name", MODELS)
def test_many_steps_are_those_of_the_engines_rule(
    name: str, form: str, way: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.double()
    rule = ZeroMean(SGD(lr=0.05, momentum=0.8, decay=0.01, form=form))  # type: ignore[arg-type]
    rule = rule.for_layout(layout_of(model))
    params = Tree({n: p.detach().clone() for n, p in model.named_parameters()})
    start = make_context(params)
    scratch = rule.begin(start, ())
    optimizer = ZeroMeanSGD(model, 0.05, 0.8, 0.01, nesterov=form == "nesterov", **way)
    for _ in range(5):
        model.zero_grad()
        model(batch()).square().mean().backward()
        grads = Tree({n: p.grad.clone() for n, p in model.named_parameters()})
        params, scratch = rule.step(start, params, scratch, grads)
        optimizer.step()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), params[n], rtol=1e-12, atol=1e-14)


# --- one step, many ways --------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


@pytest.mark.filterwarnings("ignore:units of parameter")
@settings(max_examples=25)
@having(data=st.data())
def test_all_ways_agree_for_any_shape_type_and_option(data: st.DataObject) -> None:
    """The oracle is the rule in complex double precision, written anew."""
    dtype = data.draw(
        st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.complex128])
    )
    shape = data.draw(SHAPES)
    axes = tuple(a for a in range(len(shape)) if data.draw(st.booleans()))
    options = {
        "momentum": data.draw(st.sampled_from([0.0, 0.5, 0.9])),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1])),
        "maximize": data.draw(st.booleans()),
    }
    options["nesterov"] = options["momentum"] > 0 and data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 9)))
    start = torch.randn(shape, dtype=torch.complex128).to(
        dtype if dtype.is_complex else torch.complex128
    )
    start = start if dtype.is_complex else start.real.to(dtype)
    turned = len(shape) == 4 and data.draw(st.booleans())
    if turned:
        start = start.contiguous(memory_format=torch.channels_last)
    grads = [torch.randn(shape, dtype=DOUBLE).to(dtype) for _ in range(2)]

    w, v = start.to(torch.complex128), torch.zeros(shape, dtype=torch.complex128)
    for grad in grads:
        g = grad.to(torch.complex128)
        if axes:
            g = g - g.mean(axes, keepdim=True)
        g = -g if options["maximize"] else g
        v = options["momentum"] * v + g
        w = w * (1 - options["weight_decay"] * 0.1)
        w = w - 0.1 * (g + options["momentum"] * v if options["nesterov"] else v)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 0.06}.get(dtype, 1e-14)
    for name, way in WAYS.items():
        param = nn.Parameter(start.clone())
        group = {"params": [param], "input_axes": [axes]}
        optimizer = optimizer_of([group], **options, **way)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
            assert torch.equal(param.grad, grad)
        assert torch.allclose(param.detach().to(torch.complex128), w, rtol=0, atol=rounding), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", [WAYS["auto"], WAYS["single"], WAYS["foreach"]])
def test_half_precision_means_are_taken_in_float32(dtype: torch.dtype, way: dict[str, Any]) -> None:
    # 4096 gradients of 32 add up to more than float16 can say, and bfloat16 would stop counting.
    param = nn.Parameter(torch.zeros(2, 4096, dtype=dtype))
    param.grad = torch.full_like(param, 32.0)
    param.grad[0, 0] = 33.0
    optimizer_of([{"params": [param], "input_axes": (1,)}], **way).step()
    assert param[1].abs().max() == 0
    assert param.isfinite().all()
    torch.testing.assert_close(param[0, 0].float(), torch.tensor(-0.1), rtol=0.01, atol=0)


def test_sparse_gradients_are_rejected_with_a_remedy() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = ZeroMeanSGD(embedding, 0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match=r"sparse=False.*to_dense"):
        optimizer.step()
    embedding.weight.grad = embedding.weight.grad.to_dense()
    optimizer.step()


@pytest.mark.parametrize("axes", [(1,), ()])
def test_a_parameter_and_a_gradient_that_are_sharded_differently_are_rejected(axes: Axes) -> None:
    sharded = SimpleNamespace(placements=[], layout=torch.strided, ndim=2)
    with pytest.raises(InputError, match="sharded"):
        usable(torch.ones(2, 3), sharded, axes)
    with pytest.raises(InputError, match="sharded"):
        usable(sharded, torch.ones(2, 3), axes)


def test_a_mean_over_a_partial_sum_is_rejected() -> None:
    partial = SimpleNamespace(placements=[SimpleNamespace(is_partial=lambda: True)], ndim=2)
    with pytest.raises(InputError, match="partial sum"):
        inputs_sharded(partial, (1,))


@ways
def test_sparse_gradients_of_uncentred_weights_are_taken_as_torchs_sgd_does(
    way: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    ours = nn.Embedding(5, 2, sparse=True).double()
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, **way}
    optimizer = ZeroMeanSGD(ours, weight_decay=0.0, axes={"weight": ()}, **options)
    sgd = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        for layer, each in ((ours, optimizer), (theirs, sgd)):
            each.zero_grad()
            layer(torch.tensor([1, 3, 1])).square().sum().backward()
            each.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


# --- what torch's own promise ---------------------------------------------------------------


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0
) -> list[Tensor]:
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6).to(dtype)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return mlp(6, 5, outputs=3).to(dtype)


@pytest.mark.parametrize(
    ("first", "then"), list(itertools.permutations(["single", "foreach", "fused"], 2))
)
def test_a_saved_state_continues_in_another_way(first: str, then: str, tmp_path: Path) -> None:
    model = small()
    optimizer = ZeroMeanSGD(model, 0.1, **WAYS[first])
    trained(model, optimizer, 3)
    again = copy.deepcopy(model)
    restored = ZeroMeanSGD(again, 0.7, 0.1, **WAYS[then])
    torch.save(optimizer.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    for group in state["param_groups"]:
        group.update({"foreach": None, "fused": None, **WAYS[then]})
    restored.load_state_dict(state)
    assert restored.param_groups[0]["lr"] == 0.1
    assert restored.param_groups[0]["momentum"] == 0.9
    expected = trained(model, optimizer, 3, seed=1)
    torch.testing.assert_close(trained(again, restored, 3, seed=1), expected)


def test_the_state_of_torchs_sgd_is_taken_over() -> None:
    model = small()
    sgd = torch.optim.SGD(model.parameters(), 0.3, momentum=0.8)
    trained(model, sgd, 2)
    ours = ZeroMeanSGD(model, 0.1)
    ours.load_state_dict(sgd.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.8, 0)
    assert group["input_axes"] == [(1,), (), (1,), ()]
    for p in model.parameters():
        assert torch.equal(ours.state[p]["momentum_buffer"], sgd.state[p]["momentum_buffer"])
    trained(model, ours, 1)
    damped = torch.optim.SGD(model.parameters(), 0.3, momentum=0.8, dampening=0.5)
    with pytest.raises(InputError, match="dampening"):
        ours.load_state_dict(damped.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.Adam(model.parameters()), "another optimizer than SGD"),
        (lambda model: torch.optim.Adagrad(model.parameters()), "another optimizer than SGD"),
        (lambda model: ZeroMeanSGD(model, 0.1, axes={"1.weight": ()}), "input axes"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_of_another_optimizer_is_rejected(make: Any, message: str, steps: int) -> None:
    model = small()
    other, ours = make(model), ZeroMeanSGD(model, 0.2)
    trained(model, other, steps)
    with pytest.raises(InputError, match=message):
        ours.load_state_dict(other.state_dict())
    assert ours.param_groups[0]["lr"] == 0.2


def test_a_state_with_more_groups_is_rejected() -> None:
    model = small()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    sgd.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="argument"):
        ZeroMeanSGD(model, 0.2).load_state_dict(sgd.state_dict())


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"fused": True}])
def test_a_group_of_several_types_is_stepped_as_one_of_each(way: dict[str, Any]) -> None:
    def made(i: int) -> Tensor:
        torch.manual_seed(i)
        dtype = (torch.float32, torch.float64, torch.bfloat16)[i % 3]
        start = torch.randn(4, 3 + i, dtype=dtype)
        # A plain tensor is as good as a parameter.
        return start.requires_grad_() if i == 4 else nn.Parameter(start)

    together, apart = [made(i) for i in range(6)], [made(i) for i in range(6)]
    axes = [(1,), (0,), (), (1,), (0, 1), (0,)]
    optimizers = [
        ZeroMeanSGD([{"params": together, "input_axes": axes}], 0.1, **way),
        *(
            ZeroMeanSGD([{"params": [p], "input_axes": [over]}], 0.1, foreach=False)
            for p, over in zip(apart, axes, strict=True)
        ),
    ]
    for step in range(4):
        for i, (a, b) in enumerate(zip(together, apart, strict=True)):
            grad = torch.randn(a.shape, dtype=a.dtype)
            # Some come and go.
            a.grad, b.grad = (grad, grad.clone()) if step % 3 != i % 4 else (None, None)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(together, apart, strict=True):
        tolerance = 0.05 if a.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_groups_have_rates_and_axes_of_their_own() -> None:
    a, b, c = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    optimizer = ZeroMeanSGD(
        [{"params": [a], "lr": 1.0, "input_axes": (0,)}, {"params": [b], "input_axes": (1,)}],
        lr=0.5,
        momentum=0.0,
        weight_decay=0.0,
    )
    optimizer.add_param_group({"params": c, "input_axes": [()], "maximize": True})
    grad = torch.tensor([[1.0, 2.0, 6.0], [3.0, 0.0, 0.0]])
    a.grad, b.grad, c.grad = grad.clone(), grad.clone(), grad.clone()
    optimizer.step()
    torch.testing.assert_close(a.detach(), -(grad - grad.mean(0)))
    torch.testing.assert_close(b.detach(), -0.5 * (grad - grad.mean(1, keepdim=True)))
    torch.testing.assert_close(c.detach(), 0.5 * grad)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: CosineAnnealingLR(o, 6),
        lambda o: LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=True),
    ],
)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=DOUBLE)])
def test_schedulers_drive_it_as_they_drive_torchs(schedule: Any, lr: Any) -> None:
    found = []
    for kind in (ZeroMeanSGD, torch.optim.SGD):
        model = small()
        rate = lr.clone() if isinstance(lr, Tensor) else lr
        optimizer = kind(list(model.named_parameters()), rate, momentum=0.9, weight_decay=0.0, **(
            {"axes": {n: () for n, _ in model.named_parameters()}} if kind is ZeroMeanSGD else {}
        ))  # fmt: skip
        scheduler = schedule(optimizer)
        for step in range(6):
            trained(model, optimizer, 1, seed=step)
            scheduler.step()
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])
