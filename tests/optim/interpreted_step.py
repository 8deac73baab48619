"""Print the largest differences between the interpreted fused kernel and plain steps.

Run by ``test_fused.py`` in a process of its own: the interpreter is switched on for a whole
process, before Triton is imported.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedzmg.optim import ZeroMeanSGD, fused

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "scalar": ((), ()),
    "vector": ((5000,), ()),
    "empty": ((0, 3), (1,)),
    "rows of one": ((7, 1), (1,)),
    "rows of three": ((300, 3), (1,)),
    "convolution": ((5, 3, 5, 5), (1, 2, 3)),
    "rows of 64": ((9, 64), (1,)),
    "rows of 72": ((31, 72), (1,)),
    "rows of 257": ((3, 257), (1,)),
    "rows of 288": ((9, 32, 3, 3), (1, 2, 3)),
    "rows of 520": ((5, 520), (1,)),
    "rows of 1152": ((3, 1152), (1,)),
    "rows of 1160": ((2, 1160), (1,)),
    "rows of 2304": ((2, 2304), (1,)),
    "rows of 3136": ((2, 3136), (1,)),
    "rows of 4608": ((2, 4608), (1,)),
    "longer than a tile": ((2, 9001), (1,)),
    "far longer": ((1, 70_000), (1,)),
    "rows of 4616": ((2, 4616), (1,)),
    "embedding": ((11, 6), (0,)),
    "embedding of width one": ((11, 1), (0,)),
    "long embedding": ((300, 17), (0,)),
    "longest embedding": ((1024, 3), (0,)),
    "too long embedding": ((1025, 3), (0,)),
    "embedding of two axes": ((4, 5, 33), (0, 1)),
    "transposed convolution": ((4, 3, 2, 2), (0, 2, 3)),
    "middle axis": ((3, 4, 5), (1,)),
    "every second axis": ((3, 4, 2, 5), (1, 3)),
    "whole matrix": ((6, 7), (0, 1)),
}
OPTIONS = {
    "plain": {},
    "without decay": {"weight_decay": 0.0},
    "without momentum": {"momentum": 0.0},
    "nesterov": {"nesterov": True},
    "climbing": {"maximize": True},
    "rate as a tensor": {"lr": torch.tensor(0.1)},
}
warnings.filterwarnings("ignore", "units of parameter")  # rows of one are meant


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape).to(dtype)) for shape, _ in SHAPES.values()]
    made.append(nn.Parameter(torch.randn(6, 4, 3, 3).to(dtype, memory_format=torch.channels_last)))
    return made


def optimizer_of(params: list[nn.Parameter], **options: Any) -> ZeroMeanSGD:
    axes = [axes for _, axes in SHAPES.values()] + [(1, 2, 3)]
    return ZeroMeanSGD([{"params": params, "input_axes": axes}], **{"lr": 0.1, **options})


def trained(params: list[nn.Parameter], steps: int, **options: Any) -> list[Tensor]:
    optimizer = optimizer_of(params, **options)
    torch.manual_seed(1)
    for _ in range(steps):
        for p in params:
            # Laid out plainly, also where the parameter has its channels last.
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()
    kept = [optimizer.state[p]["momentum_buffer"] for p in params if p in optimizer.state]
    return [p.detach().double() for p in params] + [v.double() for v in kept]


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(got, expected, strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def scaled_step(found_inf: float) -> float:
    """Take a step of gradients that a scaler has multiplied by 8, or found to be infinite."""
    params, plain = parameters(torch.float32), parameters(torch.float32)
    ours: Any = optimizer_of(params, fused=True)
    reference = optimizer_of(plain, foreach=False)
    for a, b in zip(params, plain, strict=True):
        b.grad = torch.randn(b.shape)
        a.grad = 8 * b.grad
    ours.grad_scale, ours.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
    ours.step()
    if not found_inf:
        reference.step()
    return difference([p.detach() for p in params], [p.detach() for p in plain])


def moving() -> float:
    """Take steps between which tensors, gradients and state are reallocated or removed."""
    results = []
    for options in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(2)
        params = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
        params.append(nn.Parameter(torch.randn(1030, 3)))  # its sums are kept in a buffer
        groups = [{"params": params, "input_axes": [(1,), (1,), (), (0,)]}]
        optimizer = ZeroMeanSGD(groups, lr=0.1, **options)
        state = optimizer.state
        kept = []  # nothing is freed, so nothing comes back at the same address

        def reallocate(tensor: Any, value: Tensor) -> None:
            tensor.data = value

        def set_velocity(params: Any = params, state: Any = state) -> None:
            state[params[1]]["momentum_buffer"] = torch.ones(4, 3)

        def change(optimizer: Any = optimizer, **options: Any) -> Callable[[], object]:
            return lambda: optimizer.param_groups[0].update(options)

        events: list[Callable[[], object]] = [
            lambda: None,
            lambda p=params[0]: reallocate(p, p.data.clone()),
            lambda p=params[1], s=state: reallocate(s[p]["momentum_buffer"], torch.ones(4, 3)),
            set_velocity,
            lambda p=params[2]: setattr(p, "grad", None),
            lambda p=params[0]: setattr(p, "grad", torch.randn(3, 4).t()),
            change(lr=0.01),
            change(momentum=0.5, nesterov=True, weight_decay=0.1),
            state.clear,
            change(momentum=0.0, nesterov=False),
            lambda p=params[3]: reallocate(p, p.data.t().clone().t()),
        ]
        for happens in events:
            for i in range(3):
                for p in params:
                    kept += [p.data, p.grad]
                    p.grad = torch.randn(p.shape)
                if i == 0:
                    happens()
                optimizer.step()
        results.append([p.detach() for p in params])
    return difference(*results) / len(events)  # every step rounds anew


LAUNCHED: list[object] = []
"""A mark for every launch since it was last cleared."""


def counted(*args: Any, launch: Callable[..., None] = fused._launch) -> None:
    LAUNCHED.append(args)
    launch(*args)


fused._launch = counted


def main() -> None:
    found: dict[str, float] = {}
    for name, chosen in OPTIONS.items():
        expected = trained(parameters(torch.float32), 2, **chosen, foreach=False)
        assert not LAUNCHED
        for way in ("fused", "foreach"):
            got = trained(parameters(torch.float32), 2, **chosen, **{way: True})
            found[f"{name}, {way}"] = difference(got, expected)
            assert len(LAUNCHED) == 2, (name, way)
            LAUNCHED.clear()
    for dtype in (torch.float16, torch.bfloat16):
        exact = trained([nn.Parameter(p.double()) for p in parameters(dtype)], 1, foreach=False)
        got = trained(parameters(dtype), 1, fused=True)
        # Gradients are rounded to the type in one and not in the other; so is the result.
        found[f"{dtype} / rounding"] = difference(got, exact) / torch.finfo(dtype).eps * 1e-7
    for inf in (0.0, 1.0):
        found[f"scaled, infinite: {inf}"] = scaled_step(inf)
    found["what moves"] = moving()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
