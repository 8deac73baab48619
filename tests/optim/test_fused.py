"""The fused kernel: how it walks tensors, its steps under the interpreter, and on a GPU."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models import emnist_cnn, shakespeare_gru
from fedzmg.optim import ZeroMeanSGD, fused

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (Linux) for its interpreter"
)
COMPILER_WARNS = pytest.mark.filterwarnings("ignore")
"""Internal warnings of Triton's compiler change with every version."""


def interpreted() -> dict[str, float]:
    script = Path(__file__).with_name("interpreted_step.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@needs_triton
@pytest.mark.slow
def test_steps_of_every_option_under_the_interpreter() -> None:
    found = interpreted()
    assert len(found) == 17
    assert {name: value for name, value in found.items() if not value < 1e-6} == {}


@pytest.mark.slow
def test_importing_the_package_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import fedzmg.optim"
    subprocess.run([sys.executable, "-c", code], check=True)


def walked(form: fused.Form, order: list[int], shape: list[int]) -> list[int]:
    """For every entry in memory the number of its mean, as the kernel computes it."""
    entries = int(np.prod(shape))
    if form.shape == fused.COLUMNS:
        return [at % form.rows for at in range(entries)]
    if form.shape != fused.FLAT:
        return [at // form.length for at in range(entries)]
    return [
        at // form.length * form.outputs + at // form.inner % form.outputs for at in range(entries)
    ]


@settings(max_examples=50)
@given(data=st.data())
def test_entries_share_a_mean_exactly_if_their_outputs_agree(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = tuple(a for a in range(len(shape)) if data.draw(st.booleans()))
    order = data.draw(st.permutations(range(len(shape))))
    laid = torch.empty([shape[a] for a in order]).permute(
        [order.index(a) for a in range(len(order))]
    )
    assert list(laid.shape) == shape
    form = fused.form_of(laid, axes, sums_given=data.draw(st.booleans()))
    if form is None or not axes:
        assert axes or (form is not None and not form.inputs)
        return
    outputs = [a for a in range(len(shape)) if a not in axes]
    in_memory = list(itertools.product(*(range(shape[a]) for a in order)))
    expected = []
    for place in in_memory:
        index = [place[order.index(a)] for a in range(len(shape))]
        number = 0
        for a in outputs:
            number = number * shape[a] + index[a]
        expected.append(number)
    got = walked(form, list(order), shape)
    if form.shape == fused.FLAT:
        assert got == expected  # the very sum is read
    else:
        assert len(set(zip(got, expected, strict=True))) == len(set(got)) == len(set(expected))
    assert form.inputs == np.prod([shape[a] for a in axes])


def test_fused_on_another_device_is_rejected() -> None:
    param = nn.Parameter(torch.ones(2, 2, device="meta"))
    param.grad = torch.ones(2, 2, device="meta")
    optimizer = ZeroMeanSGD([{"params": [param], "input_axes": (1,)}], 0.1, fused=True)
    with pytest.raises(InputError, match="meta"):
        optimizer.step()


@needs_triton
@COMPILER_WARNS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options", "given"),
    [
        (torch.float32, (True, False), False),
        (torch.float32, (True, True), True),
        (torch.bfloat16, (False, False), True),
    ],
)
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(
    dtype: torch.dtype, options: tuple[bool, ...], given: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    # The interpreter takes what the compiler does not, such as a name of two types.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fedzmg.optim import triton_step

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = triton_step.step
    signature = {
        "tiles": "*i32", "tensors": "*i64", "moving": "*i64", "lr": "fp32", "momentum": "fp32",
        "decay": "fp32", "sign": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {"DTYPE": triton_step.TYPES[dtype]}
    constants.update(zip(("BUFFER", "NESTEROV"), options, strict=True))
    for pointer in ("lr_at", "scale_at", "inf_at"):
        if given:
            signature[pointer] = "*fp32"
        else:
            constants[pointer] = None
    source = ASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), dict(triton_step.OPTIONS))
    assert "ld.global.v4" in compiled.asm["ptx"]  # aligned rows are read 16 bytes at a time


# --- on a GPU -------------------------------------------------------------------------------


def trained(make: Any, steps: int = 3, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = ZeroMeanSGD.for_model(model, **{"lr": 0.1, **options})
    for seed in range(steps):
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [emnist_cnn, shakespeare_gru])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"nesterov": True},
        {"maximize": True, "weight_decay": 0.0},
        {"capturable": True, "lr": "tensor"},
    ],
)
def test_kernel_and_lists_agree_with_single_tensors(make: Any, options: dict[str, Any]) -> None:
    if options.get("lr") == "tensor":
        options = {**options, "lr": torch.tensor(0.1, device="cuda")}
    expected = trained(make, foreach=False, **options)
    for way in ({"fused": True}, {"foreach": True}, {}):
        for got, wanted in zip(trained(make, **way, **options), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{"fused": True}, {"foreach": True}])
def test_options_change_between_launches_of_a_compiled_kernel(way: dict[str, Any]) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"lr": 0.02}, {"momentum": 0.5}, {"weight_decay": 0.0}, {"maximize": True},
        {"nesterov": True}, {"lr": torch.tensor(0.01, device="cuda")}, {"lr": 0.05},
    ]  # fmt: skip
    results = []
    for chosen in ({"foreach": False}, way):
        torch.manual_seed(0)
        model = shakespeare_gru().cuda()
        optimizer = ZeroMeanSGD.for_model(model, 0.1, **chosen)
        grads = [torch.randn_like(p) for p in model.parameters()]
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad  # stays in place
        for change in changes:
            optimizer.param_groups[0].update(change)
            for _ in range(2):
                optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_recorded_graph_repeats_the_step(way: dict[str, Any]) -> None:
    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = emnist_cnn().cuda()
        lr = torch.tensor(0.01, device="cuda")
        optimizer = ZeroMeanSGD(model, lr, capturable=True, **way)
        x = torch.randn(4, 28, 28, device="cuda")

        def work(
            model: nn.Module = model, optimizer: ZeroMeanSGD = optimizer, x: Tensor = x
        ) -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        if recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        for _ in range(3):
            graph.replay() if recorded else work()
            lr.mul_(0.5)
        torch.cuda.synchronize()
        results.append([p.detach().cpu() for p in model.parameters()])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_scaler_hands_its_factor_to_the_kernel() -> None:
    torch.manual_seed(0)
    model = emnist_cnn().cuda()
    optimizer = ZeroMeanSGD(model, 0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(4, 28, 28, device="cuda")
    scaler.scale(model(x).square().mean()).backward()
    next(model.parameters()).grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_that_has_launched_is_copied_and_pickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "possible", lambda *_: True)
    monkeypatch.setattr(fused, "_launch", lambda *_: None)
    param = nn.Parameter(torch.ones(4, 3))
    param.grad = torch.ones(4, 3)
    optimizer = ZeroMeanSGD([{"params": [param], "input_axes": (1,)}], 0.1)
    optimizer.step()
    assert optimizer._launchers
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not hasattr(other, "_launchers")
        other.step()
