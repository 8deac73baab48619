"""Kernels for layers whose weights differ between clients, against torch's own."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import recurrence_reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedzmg import kernels
from fedzmg.kernels import (
    MappedLayers,
    convolution,
    layers,
    onednn,
    patches,
    precision,
    rounding,
)
from fedzmg.kernels.precision import milliseconds
from fedzmg.models import recurrent
from fedzmg.models.layers import swap_layers
from fedzmg.models.recurrent import GRU, LSTM, scan


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (Linux) for its interpreter"
)
@pytest.mark.slow
def test_gpu_kernels_under_the_interpreter() -> None:
    script = Path(__file__).with_name("interpreted_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert len(found) == 33
    rounded = [found.pop(f"{name}, float16") for name in ("recurrence", "LSTM")]
    assert max(rounded) < 1e-3
    assert {name: value for name, value in found.items() if not value < 1e-5} == {}


@pytest.mark.gpu
def test_a_call_is_timed_from_a_graph() -> None:
    calls, count = [], torch.zeros((), device="cuda")

    def call() -> None:
        calls.append(None)
        count.add_(1)

    assert min(milliseconds(call)) > 0
    assert len(calls) == 1 + precision.TIMES  # once as it is, then into the graph
    assert int(count) == 1 + (1 + precision.TIMES) * precision.TIMES  # once to warm up


def clients(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", requires_grad=True)


def test_models_on_the_same_images_and_one_model_on_many() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, 9, 9), torch.randn(5, 6, 3, 3, 3)

    def one(x: Tensor, w: Tensor) -> Tensor:
        return convolution.conv2d(x, w, [2, 1], [1, 0], "ieee")

    got = torch.vmap(one, in_dims=(None, 0))(x, w)
    torch.testing.assert_close(
        got, torch.stack([F.conv2d(x, each, None, (2, 1), (1, 0)) for each in w])
    )
    many = torch.randn(4, 2, 3, 9, 9)
    got = torch.vmap(one, in_dims=(1, None))(many, w[0])
    want = torch.stack([F.conv2d(each, w[0], None, (2, 1), (1, 0)) for each in many.unbind(1)])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "channels", "filters", "size", "taps"),
    [(16, 3, 32, 32, 3), (16, 32, 32, 32, 3), (16, 32, 64, 16, 3), (16, 64, 64, 16, 3),
     (20, 1, 32, 28, 5), (20, 32, 64, 14, 5)],
)  # fmt: skip
def test_the_papers_models_use_our_kernels(
    batch: int, channels: int, filters: int, size: int, taps: int, dtype: torch.dtype
) -> None:
    x = torch.empty(10, batch, channels, size, size, dtype=dtype, device="meta")
    w = torch.empty(10, filters, channels, taps, taps, dtype=dtype, device="meta")
    assert convolution._ways(x, w, [1, 1], [taps // 2] * 2)[0] == "kernels"


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["kernels", "grouped", "patches", "measured"])
@pytest.mark.parametrize(
    ("channels", "filters", "size", "taps", "stride"),
    [(3, 32, 32, 3, 1), (32, 32, 32, 3, 1), (32, 64, 16, 3, 1), (64, 64, 16, 3, 1),
     (1, 32, 28, 5, 1), (32, 64, 14, 5, 1), (64, 128, 8, 3, 2), (256, 512, 2, 1, 2),
     (256, 256, 4, 3, 1)],
)  # fmt: skip
def test_convolutions_of_the_papers_models_and_of_a_resnet(
    channels: int, filters: int, size: int, taps: int, stride: int, choice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if choice == "kernels" and max(stride, filters // convolution.MAX_CHANNELS) > 1:
        pytest.skip("our kernels have no strides, and few channels")
    torch.manual_seed(0)
    monkeypatch.setattr(convolution, "SMALL", 0)
    if choice != "measured":
        monkeypatch.setattr(convolution, "_fastest", lambda *_, **__: (choice, False))
    monkeypatch.setattr(convolution, "_chosen", {})
    monkeypatch.setattr(precision, "cached_answer", lambda _, measure: measure()[0])
    pad = taps // 2
    x, w = clients(3, 4, channels, size, size), clients(3, filters, channels, taps, taps)
    b = clients(3, filters)

    def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, stride, pad)

    def changed(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, w, None, stride, pad), inplace=True)

    with rounding("float32"):
        with MappedLayers():
            got = torch.vmap(one)(x, w, b)
            torch.testing.assert_close(
                torch.vmap(changed)(x, w),
                (got - b[:, None, :, None, None]).relu(),
                rtol=1e-4,
                atol=1e-4,
            )
        expected = torch.stack([one(*each) for each in zip(x, w, b, strict=True)])
        signal = torch.randn_like(expected)
        mine = torch.autograd.grad(got, [x, w, b], signal)
        theirs = torch.autograd.grad(expected, [x, w, b], signal)
    for a, e in zip((got, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["tf32", "bf16"])
@pytest.mark.parametrize(
    ("channels", "filters", "size", "taps"),
    [(3, 32, 32, 3), (32, 32, 32, 3), (64, 64, 16, 3), (32, 64, 14, 5)],
)
def test_products_on_tensor_cores(
    channels: int, filters: int, size: int, taps: int, dtype: torch.dtype
) -> None:
    from fedzmg.kernels import triton_convolution as kernels

    torch.manual_seed(0)
    pad = (taps // 2, taps // 2)
    x, w = clients(3, 5, channels, size, size), clients(3, filters, channels, taps, taps)
    x, w = x.to(dtype).double(), w.to(dtype).double()
    expected = torch.stack([F.conv2d(a, b, padding=pad) for a, b in zip(x, w, strict=True)])
    signal = torch.randn_like(expected).to(dtype)
    for_x, for_w = torch.autograd.grad(expected, [x, w], signal.double())

    def last(images: Tensor) -> Tensor:
        return images.detach().to(dtype).permute(0, 1, 3, 4, 2).contiguous()

    weights = w.detach().to(dtype)
    out = kernels.convolve(last(x), weights, pad, "tf32")
    back = kernels.convolve(last(signal), weights, pad, "tf32", turned=True)
    slope = kernels.weight_gradient(last(x), last(signal), (taps, taps), pad, "tf32")
    for got, want in ((out, expected), (back, for_x), (slope, for_w)):
        assert float((got - want).abs().max() / want.abs().max()) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("mapped", [True, False])
def test_recurrence_against_the_fused_layer(mapped: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.GRU(16, 96, batch_first=True).cuda()
    weights = list(theirs.parameters())
    x = torch.randn(2, 8, 12, 16, device="cuda")
    signal = torch.randn(2, 8, 12, 96, device="cuda")
    with rounding("float32"):
        expected = torch.stack([theirs(part)[0] for part in x])
        slopes = torch.autograd.grad(expected, weights, signal)
        if mapped:
            many = [torch.stack([p, p]) for p in weights]
            got = torch.vmap(lambda part, *own: scan("GRU", part, None, own)[0])(x, *many)
        else:
            got = torch.stack([scan("GRU", part, None, weights)[0] for part in x])
        mine = torch.autograd.grad(got, weights, signal)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    for a, e in zip(mine, slopes, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "clients", "batch", "steps", "units"),
    [("GRU", 1, 8, 1, 64), ("GRU", 5, 5, 3, 1024), ("GRU", 3, 13, 9, 256), ("GRU", 40, 30, 7, 128),
     ("LSTM", 2, 3, 2, 32), ("LSTM", 9, 8, 6, 512), ("LSTM", 70, 4, 20, 256)],
)  # fmt: skip
def test_recurrences_in_one_launch(
    kind: str, clients: int, batch: int, steps: int, units: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from fedzmg.kernels import cuda_recurrence, triton_recurrence

    torch.manual_seed(0)
    monkeypatch.setattr(cuda_recurrence, "STEP", 0.0)  # whatever is faster
    gates = 3 if kind == "GRU" else 4
    from_input = torch.randn(clients, batch, steps, gates * units, device="cuda")
    weights = (torch.randn(clients, gates * units, units, device="cuda") / units**0.5).to(dtype)
    bias = torch.randn(clients, gates * units, device="cuda") / 9
    assert cuda_recurrence.recurrence_for(weights, batch) is not None

    def run(weights: Tensor, precision: str) -> list[Tensor]:
        found = triton_recurrence.forward(from_input, weights, bias, precision)
        signal = 1e-6 * found[0]  # float16 alone would lose it
        of_cell = signal[:, 0, :, : found[1].shape[-1]].contiguous()
        return [*found, *triton_recurrence.backward(signal, of_cell, *found, weights, precision)]

    for got, want in zip(run(weights, "tf32"), run(weights.float(), "ieee"), strict=True):
        limit = 2e-3 if dtype == torch.float16 else 2e-2
        assert want.numel() == 0 or float((got - want).abs().max() / want.abs().max()) < limit


@pytest.mark.slow
@pytest.mark.skipif(not precision.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("gates", [3, 4])
@pytest.mark.parametrize("kind", ["*fp32", "*fp16", "*bf16"])
def test_recurrent_kernels_compile_for_a_gpu_that_is_not_here(gates: int, kind: str) -> None:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fedzmg.kernels import triton_recurrence

    sizes = {"GATES": gates, "U": 128, "ROWS": 16, "BLOCK": 32, "DEPTH": 64, "PRECISION": "tf32"}
    for kernel in (triton_recurrence._step_kernel, triton_recurrence._back_kernel):
        types = {name: "*fp32" for name in kernel.arg_names if name not in sizes}
        types |= {"weights": kind, "time": "i32", "steps": "i32", "batch": "i32"}
        source = ASTSource(kernel, types | dict.fromkeys(sizes, "constexpr"), sizes)
        assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("gates", "clients", "batch", "steps", "units", "slots", "float16"),
    [(3, 2, 5, 3, 64, 1, True), (3, 3, 20, 2, 32, 2, False), (4, 3, 8, 3, 64, 2, True)],
)
def test_the_kernels_of_one_launch_on_a_cpu(
    gates: int, clients: int, batch: int, steps: int, units: int, slots: int, float16: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    tiles, parts = -(-batch // 8), units // 32
    kind = torch.float16 if float16 else torch.bfloat16
    defined = {"UNITS": units, "GATES": gates, "TILES": tiles, "BLOCKS": 1, "FLOAT16": int(float16)}
    own = Path(__file__).with_name("recurrence_on_cpu.cpp"), tmp_path / "kernels.so"
    options = (
        "-std=c++20",
        "-O1",
        "-pthread",
        "-shared",
        "-fPIC",
        f"-I{Path(kernels.__file__).parent}",
    )
    names = [f"-D{name}={value}" for name, value in defined.items()]
    subprocess.run(["g++", *options, *names, str(own[0]), "-o", str(own[1])], check=True)
    library, sizes = ctypes.CDLL(str(own[1])), (clients, steps, batch, slots * parts)

    def run(name: str, given: list[Tensor], made: list[Tensor], *words: int) -> list[Tensor]:
        """Call a kernel, all of whose memory is shared between the processes of its blocks."""
        found = [torch.full_like(t, math.nan).share_memory_() for t in made]
        sent = [torch.full((size,), -1, dtype=torch.int32).share_memory_() for size in words]
        shared = [*(t.contiguous().share_memory_() for t in given), *found, *sent]
        places = [ctypes.c_void_p(t.data_ptr()) for t in shared]
        assert library[name](*places, *sizes) == 0
        return found

    torch.manual_seed(0)
    from_input = torch.randn(clients, batch, steps, gates * units)
    weights = (torch.randn(clients, gates * units, units) / units**0.5).to(kind)
    bias, each = torch.randn(clients, gates * units), clients * steps * 8 * tiles * units
    want = [*recurrence_reference.forward(from_input, weights.float(), bias)]
    got = run("forward", [from_input, weights, bias], want, each // 2)
    signal = 1e-6 * torch.randn(clients, steps, batch, units)  # float16 alone would lose it
    of_cell = signal[:, 0, :, : want[1].shape[-1]]
    back = [signal, of_cell, *want, weights]
    slopes = [*recurrence_reference.backward(*back[:-1], weights.float())]
    found = run("backward", back, slopes, each * gates // 2, each // 32)
    limit = 1e-3 if float16 else 1e-2
    for a, e in zip([*got, *found], [*want, *slopes], strict=True):
        assert e.numel() == 0 or float((a - e).abs().max() / e.abs().max()) < limit


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.float32, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize(("theirs", "ours"), [(nn.GRU, GRU), (nn.LSTM, LSTM)])
def test_recurrent_layers_of_many_clients_are_torchs(
    theirs: Any, ours: Any, device: str, dtype: torch.dtype, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if device == "cpu":  # the same operators, whose kernels are for a GPU
        monkeypatch.setattr(recurrent, "suits_kernels", lambda _: True)
        monkeypatch.setattr(kernels, "triton_recurrence", recurrence_reference, raising=False)
    torch.manual_seed(0)
    clients = [theirs(3, 5, batch_first=True, **options).to(device, dtype) for _ in range(3)]
    own = ours(3, 5, batch_first=True, **options).to(device, dtype)
    x = torch.randn(3, 4, 6, 3, device=device, dtype=dtype)

    def loss(out: Tensor, ends: Any) -> Tensor:
        last, *cell = ends if theirs is nn.LSTM else (ends,)
        return out.square().sum() + last.sum() + sum(part.sin().sum() for part in cell)

    weights = {
        name: torch.stack([dict(one.named_parameters())[name].detach() for one in clients])
        for name, _ in own.named_parameters()
    }
    tracked = [x.requires_grad_(), *(leaf.requires_grad_() for leaf in weights.values())]
    with rounding("float32"):
        losses = torch.vmap(lambda w, x: loss(*functional_call(own, w, (x,))))(weights, x)
        of_x, *found = torch.autograd.grad(losses.sum(), tracked)
        grads = dict(zip(weights, found, strict=True))
        for i, one in enumerate(clients):
            given = x[i].detach().requires_grad_()
            loss(*one(given)).backward()  # type: ignore[no-untyped-call]
            assert given.grad is not None
            torch.testing.assert_close(of_x[i], given.grad, rtol=1e-4, atol=1e-5)
            for name, weight in one.named_parameters():
                torch.testing.assert_close(grads[name][i], weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
@pytest.mark.parametrize("most", [patches.MOST_BYTES, 1])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"stride": (1, 2), "padding": (2, 0)}]
)
def test_convolutions_of_patches_are_torchs(
    options: dict[str, Any], most: int, dims: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "MOST_BYTES", most)
    torch.manual_seed(0)
    x, w = torch.randn(3, 5, 4, 9, 8).double(), torch.randn(3, 6, 4, 3, 3).double()
    given = [t if d == 0 else t[0] for t, d in zip((x, w), dims, strict=True)]
    given = [t.requires_grad_() for t in given]
    used: list[None] = []
    conv2d = patches.conv2d
    monkeypatch.setattr(patches, "conv2d", lambda *a: (used.append(None), conv2d(*a))[1])

    def one(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, **options)

    with onednn(False), MappedLayers():
        out = torch.vmap(one, in_dims=dims)(*given)
    assert used
    each = [[t[i] if d == 0 else t for t, d in zip(given, dims, strict=True)] for i in range(3)]
    expected = torch.stack([one(*pair) for pair in each])
    torch.testing.assert_close(out, expected)
    signal = torch.randn_like(out)
    for found, wanted in zip(
        torch.autograd.grad(out, given, signal),
        torch.autograd.grad(expected, given, signal),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_gradients_of_patches_within_a_map_are_torchs() -> None:
    torch.manual_seed(0)
    x, *weights = (
        torch.randn(3, *shape).double() for shape in ((5, 2, 8, 8), (4, 2, 3, 3), (3, 4, 3, 3))
    )

    def loss(first: Tensor, second: Tensor, images: Tensor) -> Tensor:
        hidden = F.conv2d(images, first, padding=1).relu()
        return F.conv2d(hidden, second, padding=1).square().sum()

    gradients = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))
    with onednn(False), MappedLayers():
        found = gradients(*weights, x)
    for own, expected in zip(found, gradients(*weights, x), strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_mapped_images_of_one_channel_are_convolved_like_single_ones(*, bias: bool) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 5, 1, 9, 8), torch.randn(3, 4, 1, 3, 3), torch.randn(3, 4)
    given = [x, w, b][: 2 + bias]

    def loss(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        out = F.conv2d(x, w, b, stride=2, padding=1)
        return (out.flatten(1).sum(1) ** 2).mean() + out.sin().sum()

    gradients = torch.func.grad(loss, argnums=tuple(range(len(given))))
    expected = torch.stack([loss(*own) for own in zip(*given, strict=True)])
    wanted = [torch.stack(g) for g in zip(*map(gradients, *given), strict=True)]
    tracked = [t.clone().requires_grad_() for t in given]
    with MappedLayers():
        found = torch.vmap(loss)(*tracked)
        inside = torch.vmap(gradients)(*given)
    torch.testing.assert_close(found, expected)
    for kind in (torch.autograd.grad(found.sum(), tracked), inside):
        for own, want in zip(kind, wanted, strict=True):
            torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-4)


class _PreActivation(nn.Module):
    """A block that changes the output of a convolution in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.two(F.relu(self.one(x), inplace=True))
        out += x
        return out


def test_models_may_change_and_view_the_outputs_of_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "WIDE", 0)
    torch.manual_seed(0)
    models, x = [_PreActivation() for _ in range(2)], torch.randn(2, 3, 4, 6, 6)
    expected = torch.stack([model(own) for model, own in zip(models, x, strict=True)])
    every = zip(*(dict(model.named_parameters()).items() for model in models), strict=True)
    weights = {one[0]: torch.stack([one[1], two[1]]) for one, two in every}
    for model in models:
        swap_layers(model)
    with onednn(False), MappedLayers():
        looped = [model(own) for model, own in zip(models, x, strict=True)]
        mapped = torch.vmap(lambda w, own: functional_call(models[0], w, (own,)))(weights, x)
    torch.testing.assert_close(mapped, expected)
    torch.testing.assert_close(torch.stack(looped), expected)
    assert all(out.is_contiguous() for out in looped)


def test_offsets_that_need_more_than_32_bits_are_avoided() -> None:
    wide = torch.empty(1 << 12, 3, 1 << 20, device="meta")  # clients on the second axis
    assert precision.within_reach(wide.transpose(0, 1)).is_contiguous()
    near = wide[:100].transpose(0, 1)
    assert precision.within_reach(near) is near
    assert precision.within_reach(wide) is wide


def test_patches_are_differentiated_twice_and_inside_of_a_map() -> None:
    """A model may have gradients in its forward pass or in its loss."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 2, 4, 6, 6).double(), torch.randn(3, 5, 4, 3, 3).double()

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        slope: Any = torch.func.grad(lambda x: F.conv2d(x, w, padding=1).square().sum())
        return slope(x).square().sum()

    def found() -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in (x, w)]
        out = torch.vmap(lambda x, w: F.conv2d(x, w, padding=1).square().sum())(*given)
        [slope] = torch.autograd.grad(out.sum(), given[:1], create_graph=True)
        twice = torch.autograd.grad(slope.square().sum(), given)
        inside = torch.autograd.grad(torch.vmap(penalty)(*given).sum(), given)
        return [*twice, *inside]

    expected = found()
    with onednn(False), MappedLayers():
        for ours, theirs in zip(found(), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_patches_give_a_client_the_same_bits_alone_and_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is cut into parts to save memory: a trial has the same bits alone and in a pack."""
    monkeypatch.setattr(patches, "MOST_BYTES", 1 << 18)  # six images of one client
    torch.manual_seed(0)
    x, w = torch.randn(6, 7, 8, 12, 12), torch.randn(6, 16, 8, 3, 3)

    def grads(clients: slice) -> tuple[Tensor, ...]:
        given = [t[clients].clone().requires_grad_() for t in (x, w)]
        with onednn(False), MappedLayers():
            out = torch.vmap(lambda x, w: F.conv2d(x, w, padding=1))(*given)
        return out, *torch.autograd.grad(out.square().sum(), given)

    for alone, together in zip(grads(slice(2)), grads(slice(6)), strict=True):
        assert torch.equal(alone, together[:2])
