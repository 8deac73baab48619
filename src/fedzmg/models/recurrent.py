"""Recurrent layers and cells of matrix products, which map over clients; torch's fused do not.

Parameters, their names and outputs are torch's. In a loop over clients torch's kernels run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn
from torch.backends import cudnn
from torch.backends.cudnn.rnn import get_cudnn_mode
from torch.nn.utils.rnn import PackedSequence

from fedzmg.kernels import recurrence
from fedzmg.kernels.layers import mapped
from fedzmg.kernels.precision import suits_kernels

States = tuple[Tensor, ...]  # hidden state, and the cell of an LSTM


def _gru(from_input: Tensor, from_hidden: Tensor, hidden: Tensor) -> States:
    """Compute the next state; both products hold the gates reset, update, new."""
    reset_in, update_in, new_in = from_input.chunk(3, -1)
    reset_h, update_h, new_h = from_hidden.chunk(3, -1)
    reset = torch.sigmoid(reset_in + reset_h)
    update = torch.sigmoid(update_in + update_h)
    new = torch.tanh(new_in + reset * new_h)
    return (new + update * (hidden - new),)


def _lstm(from_input: Tensor, from_hidden: Tensor, _: Tensor, cell: Tensor) -> States:
    """Compute the next state and cell; both products hold the gates write, keep, new, show."""
    write, keep, new, show = torch.add(from_input, from_hidden).chunk(4, -1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(cell), cell


_NEXT: dict[str, Callable[..., States]] = {  # (both products, *states) -> next states
    "GRU": _gru,
    "LSTM": _lstm,
    "RNN_TANH": lambda x, h, _: (torch.tanh(x + h),),
    "RNN_RELU": lambda x, h, _: (torch.relu(x + h),),
}
MAX_BATCH = 64  # of a GRU's kernels, which keep all gates: too much memory in an evaluation


def scan(
    kind: str, x: Tensor, states: States | None, weights: Sequence[Tensor | None]
) -> tuple[Tensor, States]:
    """Compute hidden states ``(batch, time, units)`` of a layer in one direction, and the last."""
    # Weights are those of input and state, both biases, and an LSTM's projection.
    from_input = F.linear(x, weights[0], weights[2])  # type: ignore[arg-type]
    own, bias, *projection = weights[1], *weights[3:]
    assert own is not None
    if states is None:
        fits = len(x) <= MAX_BATCH if kind == "GRU" else kind == "LSTM" and not projection
        if fits and suits_kernels(from_input) and own.dtype == torch.float32:
            bias = own.new_zeros(len(own)) if bias is None else bias
            if torch.is_autocast_enabled("cuda"):
                own = own.to(torch.get_autocast_dtype("cuda"))
            out, *cell = recurrence.states(from_input, own, bias)
            return out, (out[:, -1], *cell)
        widths = (own.shape[-1], len(own) // 4) if kind == "LSTM" else (own.shape[-1],)
        states = tuple(x.new_zeros(x.shape[0], width) for width in widths)
    found = []
    for now in from_input.unbind(1):
        states = _NEXT[kind](now, F.linear(states[0], own, bias), *states)
        if projection:
            states = (F.linear(states[0], projection[0]), states[1])  # type: ignore[arg-type]
        found.append(states[0])
    return torch.stack(found, 1), states


class Recurrent(nn.RNNBase):
    """Common part of the recurrent layers; ``between`` is their dropout, if any."""

    between: nn.Module

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute outputs and last states; packed sequences only in a loop over clients."""
        drops = self.training and self.dropout > 0 and self.num_layers > 1
        if isinstance(input, PackedSequence) or not (drops or mapped()):
            return super().forward(input, hx)
        lstm, batched = self.mode == "LSTM", input.ndim == 3
        states: States = () if hx is None else hx if lstm else (hx,)
        if not batched:
            x, states = input[None], tuple(part[:, None] for part in states)
        else:
            x = input if self.batch_first else input.transpose(0, 1)
        last = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = self.between(x)
            x, ends = self._layer(x, layer, states)
            last.append(ends)
        states = tuple(torch.cat(parts) for parts in zip(*last, strict=True))
        if not batched:
            x, states = x[0], tuple(part[:, 0] for part in states)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x, states if lstm else states[0]

    def _layer(self, x: Tensor, layer: int, states: States) -> tuple[Tensor, States]:
        """Compute one layer's outputs, examples first, and its last states by direction."""
        ways = 2 if self.bidirectional else 1
        rows = slice(layer * ways, (layer + 1) * ways)
        weights = [[getattr(self, name) for name in names] for names in self._all_weights[rows]]
        if not states:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)
            used = widths[: 2 if self.mode == "LSTM" else 1]
            first = tuple(x.new_zeros(ways, x.shape[0], width) for width in used)
        else:
            first = tuple(part[rows] for part in states)
        if not mapped():
            fused, flat = getattr(_VF, self.mode.lower()), [w for own in weights for w in own]
            begin = first if len(first) > 1 else first[0]
            options = self.bias, 1, 0.0, self.training, self.bidirectional, True
            out, *last = fused(x, begin, flat, *options)
            return out, tuple(last)
        found = []
        for way, own in enumerate(weights):
            start = None if not states else tuple(part[way] for part in first)
            biased = own if self.bias else [*own[:2], None, None, *own[2:]]
            out, ends = scan(self.mode, x.flip(1) if way else x, start, biased)
            found.append((out.flip(1) if way else out, ends))
        outs, lasts = zip(*found, strict=True)
        last = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
        return torch.cat(outs, -1) if len(outs) > 1 else outs[0], last


def join_weights(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Move weights on a GPU to where cuDNN reads a layer's without copying them.

    torch does so for all layers together; with dropout between them, they run one by one.
    """
    for prefix, rnn in module.named_modules():
        if not isinstance(rnn, nn.RNNBase) or rnn.num_layers == 1 or not rnn.dropout:
            continue
        ways, inputs = 1 + rnn.bidirectional, rnn.input_size
        for first in range(0, len(rnn._all_weights), ways):
            layer = rnn._all_weights[first : first + ways]
            names = [f"{prefix}.{name}".lstrip(".") for own in layer for name in own]
            weights = [params[name] for name in names if name in params]
            if len(weights) == len(names) and cudnn.is_acceptable(weights[0]):  # type: ignore[no-untyped-call]
                kind: int = get_cudnn_mode(rnn.mode)  # type: ignore[no-untyped-call]
                sizes = rnn.hidden_size, rnn.proj_size
                one_layer = len(layer[0]), inputs, kind, *sizes, 1, rnn.batch_first, ways > 1
                with torch.no_grad():
                    torch._cudnn_rnn_flatten_weight(weights, *one_layer)
            inputs = ways * (rnn.proj_size or rnn.hidden_size)


class Cell(nn.RNNCellBase):
    """Common part of the cells."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Compute the next state, and the cell of an LSTM."""
        kind = type(self).__name__.removesuffix("Cell")
        if isinstance(self, nn.RNNCell):
            kind += f"_{self.nonlinearity.upper()}"
        if kind not in _NEXT:
            return super().forward(input, hx)  # which names the unknown nonlinearity
        lstm = kind == "LSTM"
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros) if lstm else zeros
        states: States = hx if lstm else (hx,)
        from_input = F.linear(input, self.weight_ih, self.bias_ih)
        after = _NEXT[kind](from_input, F.linear(states[0], self.weight_hh, self.bias_hh), *states)
        return after if lstm else after[0]


RECURRENT = GRU, GRUCell, LSTM, LSTMCell, RNN, RNNCell = tuple(
    type(kind.__name__, (Cell if issubclass(kind, nn.RNNCellBase) else Recurrent, kind), {})
    for kind in (nn.GRU, nn.GRUCell, nn.LSTM, nn.LSTMCell, nn.RNN, nn.RNNCell)
)
