"""Random functions and attention inside a user's forward pass, keyed and mapped like layers.

Random numbers depend on the step's key, the number of the call and the position in the tensor.
"""

import contextlib
import math
import random
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from fedzmg.kernels.layers import RANGE, draws, dropout_factors, mapped
from fedzmg.kernels.precision import suits_kernels

NO_KEY = torch.zeros((), dtype=torch.int64)  # of a pass without one: evaluations draw equal numbers
Values = Callable[..., Tensor]  # (mode, tensor, *parameters) -> random values like the tensor


class Draws:
    """Source of random bits with the number of a layer; every call of a pass draws others."""

    key: Tensor
    layer: int
    calls: int
    plain = False  # draw by torch's global generator, which a recomputation sets back
    axes: tuple[int, ...] = ()  # axis of examples by call; the first one in calls beyond the last
    shapes: list[torch.Size] | None = None  # shapes drawn, while the axes are being learnt

    def draw(
        self, shape: torch.Size, device: torch.device, below: int | None = None,
        kind: torch.dtype | None = None, kept: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Draw 32 random bits for every element, or whether they are ``below`` a number.

        With a ``kind``, on a GPU, zero where they are, and ``kept`` where they are not.
        """
        call, key = self.calls, self.key
        vars(self)["calls"] = call + 1  # a module takes longer to set an attribute
        if self.shapes is not None:
            self.shapes.append(shape)
        if self.plain:
            bits = torch.randint(RANGE, shape, device=device)
            return bits if below is None else bits < below
        key, places = key if key.device == device else key.to(device), shape.numel()
        found: Tensor
        if kind is not None and below is not None:
            found = dropout_factors(key, self.layer, call, places, below, kind, kept)
        else:
            found = draws(key, self.layer, call, places, below)
        axis = self.axes[call] if call < len(self.axes) else 0
        if axis == 0:
            return found.reshape(shape)
        return found.reshape(shape[axis], *shape[:axis], *shape[axis + 1 :]).movedim(0, axis)

    def learn_axes(self, shapes: list[torch.Size]) -> None:
        """Find the axes of examples from shapes drawn for one number of examples and another."""
        axes = []
        for pair in zip(shapes, self.shapes or (), strict=False):
            differ = [a != b for a, b in zip(*pair, strict=False)]
            axes.append(differ.index(True) if any(differ) else 0)
        self.axes, self.shapes = tuple(axes) if any(axes) else (), None


class KeyedFunctions(Draws, TorchFunctionMode):
    """Mode that computes random functions from a key, and attention from matrix products.

    It has the number ``layer`` among the model's keyed layers. ``always``: in a loop over clients,
    too. ``seeds``: seed the global generators for functions that take no key; ``plain``: for all.
    """

    def __init__(
        self, layer: int, *, always: bool = True, seeds: bool = False, plain: bool = False,
        axes: tuple[int, ...] = (), learns: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.axes, self.key, self.plain, self.learns = axes, NO_KEY, plain, learns
        self.layer, self.calls, self.always, self.seeds = layer, 0, always, seeds
        self.found: set[str] = set()  # used while seeded: random, attention, unkeyed, hook, again

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace random functions and attention; leave everything else."""
        replaced = _REPLACED.get(func)
        if self.learns and "again" not in self.found and _is_recomputed():
            self.found.add("again")
        if replaced is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return replaced(self, *args, **(kwargs or {}))

    def begin(self, key: Tensor | None) -> AbstractContextManager[object]:
        """Return the context of one pass of the model."""
        self.calls, self.key = 0, NO_KEY if key is None else key
        unseeded = self if self.always or mapped() else contextlib.nullcontext()
        return self._seeded() if self.seeds else unseeded

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        gpu = [torch.cuda.default_generators[self.key.get_device()]] if self.key.is_cuda else []
        generators, seed = [torch.default_generator, *gpu], int(self.key)
        # NumPy's old generator, from which models draw.
        before = [g.get_state() for g in generators], np.random.get_state(), random.getstate()  # noqa: NPY002
        for generator in generators:
            generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        start = generator_states()
        try:
            with contextlib.nullcontext() if self.plain else self:
                yield
            if generator_states() != start:
                self.found.add("unkeyed")
        finally:
            for generator, state in zip(generators, before[0], strict=True):
                generator.set_state(state)
            np.random.set_state(before[1])  # noqa: NPY002
            random.setstate(before[2])

    def note(self, kind: str) -> None:
        """Note a function that was used, unless that is known; compiled code must not change."""
        if self.seeds:
            self.found.add(kind)

    def draw(self, shape: torch.Size, *options: Any) -> Tensor:
        """Draw like a layer, and note that a random function was used."""
        self.note("random")
        return super().draw(shape, *options)


def _is_recomputed() -> bool:
    """Tell whether a checkpoint calls this code, to run it again in the backward pass."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(frame.f_code.co_filename == checkpoint.__file__ for frame in frames)


def generator_states() -> dict[str, object]:
    """Return the states of the global random generators, by owner."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    own = torch.get_rng_state().numpy().tobytes()
    return {"torch": own, "Python": random.getstate(), "NumPy": (numpy[1].tobytes(), numpy[2])}


def _drop(x: Tensor, zeroed: Tensor, p: float) -> Tensor:
    """Zero elements and scale the others; uncompiled, a product is faster than a choice."""
    if x.is_cpu and x.dtype == torch.float32 and not mapped():  # NumPy starts faster than torch
        kept = (~zeroed.numpy()).astype(np.float32)
        kept *= 1 / (1 - p)
        return x * torch.from_numpy(kept)
    if x.is_cpu or not mapped():  # with other than our kernels
        return x * (~zeroed).to(x.dtype).mul_(1 / (1 - p))
    return torch.where(zeroed, 0.0, x / (1 - p))


def _drop_alpha(x: Tensor, zeroed: Tensor, p: float) -> Tensor:
    """Set elements to SELU's lower limit and keep mean and variance."""
    limit = -1.7580993408473766
    gain: float = ((limit * limit * p + 1) * (1 - p)) ** -0.5
    return torch.where(zeroed, torch.full_like(x, limit), x) * gain - gain * limit * p


def _dropout(form: Callable[..., Tensor], axes: int = 0, unbatched: int = 0) -> Values:
    """Build dropout by the first axes alone, or of elements; ``unbatched`` axes: one example."""

    def replaced(
        mode: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *,
        train: bool = True,
    ) -> Tensor:  # fmt: skip
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or not train or p == 0:
            return input
        first = 1 if input.ndim == unbatched else axes
        shape = (*input.shape[:first], *[1] * (input.ndim - first)) if axes else input.shape
        size, below = torch.Size(shape), int(p * RANGE)
        if p == 1:
            out = input * 0
        elif form is _drop and suits_kernels(input) and not (mode.plain or mapped()):
            out = input * mode.draw(size, input.device, below, input.dtype, 1 / (1 - p))
        else:
            out = form(input, mode.draw(size, input.device, below), p)
        return input.copy_(out) if inplace else out

    return replaced


dropout = _dropout(_drop)
drop_path = _dropout(_drop, axes=1)


def _uniform(mode: KeyedFunctions, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    bits = 24 if like.dtype == torch.float32 else 32 if like.dtype == torch.float64 else 8
    drawn = mode.draw(like.shape, like.device) >> (32 - bits)
    unit: Tensor = drawn.to(like.dtype) * 2.0**-bits
    return unit * (high - low) + low


def _normal(mode: KeyedFunctions, like: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    pairs = mode.draw(torch.Size((*like.shape, 2)), like.device).to(kind)
    radius, angle = ((pairs + 0.5) / RANGE).unbind(-1)
    values: Tensor = torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)
    drawn: Tensor = values * std + mean
    return drawn.to(like.dtype)


def _exponential(mode: KeyedFunctions, like: Tensor, lambd: float = 1.0) -> Tensor:
    drawn = mode.draw(like.shape, like.device).to(torch.float64)
    return (-torch.log((drawn + 0.5) / RANGE) / lambd).to(like.dtype)


def _bernoulli(mode: KeyedFunctions, like: Tensor, p: Any = 0.5) -> Tensor:
    if isinstance(p, Tensor):
        return (mode.draw(like.shape, like.device) < p.double() * RANGE).to(like.dtype)
    return mode.draw(like.shape, like.device, int(p * RANGE)).to(like.dtype)


def _chance(mode: KeyedFunctions, input: Tensor, p: Any = None, **_: Any) -> Tensor:
    return _bernoulli(mode, input, input if p is None else p)


def _integers(
    mode: KeyedFunctions, *numbers: Any, size: Any = None, low: int = 0, high: int | None = None,
    dtype: torch.dtype = torch.int64, device: Any = None, **_: object,
) -> Tensor:  # fmt: skip
    """Draw whole numbers: ``randint(high, size)`` or ``randint(low, high, size)``."""
    if size is None:
        *numbers, size = numbers  # type: ignore[assignment]
    *lowest, high = numbers if high is None else (*numbers, high)
    out = torch.empty(size, dtype=dtype, device=device)
    low = lowest[0] if lowest else low
    return (mode.draw(out.shape, out.device) % (high - low) + low).to(dtype)


def _drawn(values: Values, make: Callable[..., Tensor] | None = None) -> Values:
    """Replace a function that makes a random tensor, or a method that fills its own in place."""

    def replaced(mode: KeyedFunctions, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("generator", None)
        if make is not None:
            return values(mode, make(*args, **kwargs))
        return args[0].copy_(values(mode, *args, **kwargs))  # type: ignore[no-any-return]

    return replaced


def _empty(make: Callable[..., Tensor]) -> Values:
    """Replace a function that makes a tensor to be filled: it must have room for all clients."""

    def replaced(mode: KeyedFunctions, *args: Any, **kwargs: Any) -> Tensor:
        out = make(*args, **kwargs)
        if mode.key is NO_KEY or not mapped():
            return out
        return (mode.key.to(out.device) * 0).to(out.dtype).expand(out.shape).clone()

    return replaced


def attention(
    mode: KeyedFunctions, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention from matrix products; torch's fused kernels do not map over clients."""
    mode.note("attention")
    if not dropout_p and not mapped():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:  # every position may attend to the first one
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        is_mask = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_mask else scores + attn_mask
        # A position that may attend to nothing gets zeros instead of NaN.
        alone = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(alone, 0).softmax(-1).masked_fill(alone, 0)
    return dropout(mode, weights, dropout_p) @ value


def _hooked(mode: KeyedFunctions, *args: Any) -> Any:
    mode.note("hook")
    return Tensor.register_hook(*args)  # type: ignore[no-untyped-call]


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys((F.dropout, torch.dropout), dropout),
    F.dropout1d: _dropout(_drop, axes=2, unbatched=2),
    F.dropout3d: _dropout(_drop, axes=2, unbatched=4),
    **dict.fromkeys((F.dropout2d, torch.feature_dropout), _dropout(_drop, axes=2)),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout), _dropout(_drop_alpha)),
    **dict.fromkeys(
        (F.feature_alpha_dropout, torch.feature_alpha_dropout), _dropout(_drop_alpha, axes=2)
    ),
    torch.rand: _drawn(_uniform, torch.empty),
    torch.rand_like: _drawn(_uniform, torch.empty_like),
    torch.randn: _drawn(_normal, torch.empty),
    torch.randn_like: _drawn(_normal, torch.empty_like),
    torch.randint: _integers,
    torch.bernoulli: _chance,
    Tensor.bernoulli: _chance,
    Tensor.bernoulli_: _drawn(_bernoulli),
    Tensor.uniform_: _drawn(_uniform),
    Tensor.normal_: _drawn(_normal),
    Tensor.exponential_: _drawn(_exponential),
    torch.empty: _empty(torch.empty),
    torch.empty_like: _empty(torch.empty_like),
    Tensor.new_empty: _empty(Tensor.new_empty),
    Tensor.register_hook: _hooked,
}


def _twin(function: Any) -> Callable[..., Any]:
    """Copy a function of torch that calls others, which then pass through the mode, too."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | dict.fromkeys(checks, lambda *_: False)
    names["_in_projection_packed"] = _in_projections  # torch's does not compile inside of a mode
    own = function.__name__, function.__defaults__, function.__closure__
    copied = types.FunctionType(function.__code__, names, *own)

    def replaced(mode: KeyedFunctions, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return copied(*args, **kwargs)

    return replaced


def _in_projections(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
    if q is k is v:
        return [part.contiguous() for part in F.linear(q, w, b).chunk(3, -1)]
    biases: Any = [None] * 3 if b is None else b.chunk(3)
    return [F.linear(x, *own) for x, *own in zip((q, k, v), w.chunk(3), biases, strict=True)]


_REPLACED |= {f: _twin(f) for f in (F.multi_head_attention_forward, F.gumbel_softmax)}
