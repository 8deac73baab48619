"""Inputs and labels that people have: stored types, labels of other forms, datasets per client."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.utils.data import DataLoader

from fedzmg.data.columns import Array, Columns, Owners
from fedzmg.data.federated import Examples, number_clients
from fedzmg.errors import InputError, listed
from fedzmg.models import objective
from fedzmg.models.call import Call
from fedzmg.models.layout import warn_once
from fedzmg.models.objective import PrepareFunction
from fedzmg.tree import Inputs, leaves, named_leaves, row, tree_map

LABELS = ("label", "labels", "target", "targets", "y", "fine_label")


def as_stored(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Convert inputs to the model's precision; token ids stay integers."""
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)


def unit_pixels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert bytes to the unit interval."""
    return x.to(dtype) / 255


def as_real(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert whole numbers and truth values to the model's precision."""
    return x.to(dtype)


def token_ids(x: Tensor, _: torch.dtype) -> Tensor:
    """Convert small whole numbers to the ids that an embedding reads."""
    return x.long()


def leaf_by_leaf(x: Inputs, dtype: torch.dtype, functions: Sequence[PrepareFunction]) -> Inputs:
    """Convert every tensor of inputs by its own function."""
    own = iter(functions)
    return tree_map(lambda leaf: next(own)(leaf, dtype), x)


@torch.no_grad()
def default_prepare(read: Callable[..., Any], x: Inputs, dtype: torch.dtype) -> PrepareFunction:
    """Choose the first conversions of inputs that the model reads: as is, ids, pixels, numbers."""
    known, tensors = [], leaves(x)
    for t in tensors:
        pixels = t.dtype == torch.uint8 and bool((t > 1).any())  # others are flags
        numbers = [token_ids, unit_pixels if pixels else as_real]
        known.append([as_stored, *([] if t.is_floating_point() else numbers)])
    alike = zip(*(own * (3 // len(own)) for own in known), strict=True)
    tries = product(*known) if len(known) <= 4 else alike
    for chosen in sorted(tries, key=lambda one: sum(map(list.index, known, one))):
        prepare = chosen[0] if x is tensors[0] else partial(leaf_by_leaf, functions=chosen)
        try:
            read(prepare(tree_map(torch.clone, row(x, slice(2))), dtype))
        except Exception as error:
            if not isinstance(error, IndexError):  # which an id beyond an embedding's rows raises
                continue
        break
    return prepare


def with_shapes(module: nn.Module, x: Inputs, prepare: Any) -> tuple[nn.Module, PrepareFunction]:
    """Copy a module with lazy parameters and shape them by two examples; choose ``prepare``."""
    dtype, made = next(module.parameters()).dtype, module

    def read(few: Inputs) -> None:
        nonlocal made
        # Torch cannot copy buffers without shapes.
        lazy = (b for b in module.buffers() if is_lazy(b))
        own = {id(b): UninitializedBuffer(dtype=b.dtype) for b in lazy}  # type: ignore[call-arg]
        made = copy.deepcopy(module, own)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            Call(made.eval())({}, few)

    chosen = prepare or default_prepare(read, x, dtype)
    read(chosen(tree_map(torch.clone, row(x, slice(2))), dtype))
    return made, chosen


def whole_labels(data: Examples, loss: objective.LossFunction) -> Examples:
    """Convert class labels that are stored as floating point numbers, as tables often do."""
    y = data.y
    labelled = objective.class_axis(loss) is not None and y.is_floating_point()
    return data._replace(y=y.long()) if labelled and bool((y == y.round()).all()) else data


def check_labels(data: Examples, outputs: Any, loss: objective.LossFunction, what: str) -> None:
    """Reject labels that the outputs cannot predict."""
    y, axis = data.y, objective.class_axis(loss)
    if loss not in objective.LOSSES.values() and axis is None:
        return
    if isinstance(loss, objective.TorchLoss):
        kept = y.ne(loss.ignored)
        if y.ndim == 1 and not kept.all():
            raise InputError(f"{what} has the label {loss.ignored}, which is ignored: leave it out")
        y = y.where(kept, 0)
    if not isinstance(outputs, Tensor):
        given = f"the model gives a {type(outputs).__name__} for {what}"
        raise InputError(f"{given}: return one tensor, or give a loss and a metric that read it")
    shape, high = tuple(outputs.shape), y.max()
    if axis is None:
        if outputs.numel() != y[:2].numel():
            problem = f"{what} has targets of shape {tuple(y.shape)}, and the model gives {shape}"
            raise InputError(f"{problem}: {loss.__name__} expects as many outputs as targets")
        if high > 1 and loss is objective.binary_cross_entropy:
            raise InputError(f"{what} holds the target {high:g}: {loss.__name__} expects 0 or 1")
        return
    fits = len(shape) > 1 and y.shape[1:] == outputs.select(axis, 0).shape[1:]
    if y.is_floating_point() or not fits:
        given = f"{what} has {y.dtype} labels of shape {tuple(y.shape)}"
        one_hot = y.shape[1:] == shape[1:] and bool(((y == 0) | (y == 1)).all())
        if one_hot and bool((y.sum(1) == 1).all()):
            raise InputError(f"{given}, which are one-hot: pass class numbers, y.argmax(1)")
        other = "another loss and metric" if y.ndim > 1 else "loss='squared_error'"
        other = "loss='binary_cross_entropy'" if one_hot else other
        if y.ndim > 1 and y.shape[1:] == shape[2:]:
            other = "loss='pixel_cross_entropy'"
        column = " (y.squeeze(1))" if y.ndim == len(shape) == 2 and y.shape[1] == 1 else ""
        remedy = f"give one whole number per prediction{column}, or pass {other}"
        raise InputError(f"{given}, and the model gives a tensor of shape {shape}: {remedy}")
    classes = shape[axis]  # negative labels: padding
    padded = loss is not objective.cross_entropy and not isinstance(loss, objective.TorchLoss)
    ignored = ", negative ones are ignored" if padded else ""
    for label in (int(y.min()), int(high)):
        if label >= classes or (label < 0 and not padded):
            allowed = f"{classes} outputs (labels 0 to {classes - 1}{ignored})"
            problem = f"{what} holds the label {label} but the model has {allowed}"
            other = ", or pass loss='binary_cross_entropy'" if classes == 1 else ""
            raise InputError(f"{problem}: change the labels or the last layer{other}")


def warn_of_loss(module: nn.Module, outputs: Any, loss: objective.LossFunction) -> None:
    """Warn of a loss with parameters, and of a softmax or sigmoid that it applies once more."""
    own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if fixed := [name for name, p in own if p.requires_grad]:
        warn_once(f"the loss's parameters are not trained: {listed(fixed)}; put them in the model")
    if not isinstance(outputs, Tensor) or not (outputs.ge(0) & outputs.le(1)).all():
        return
    found = isinstance(list(module.modules())[-1], nn.Softmax | nn.Sigmoid)
    if (axis := objective.class_axis(loss)) is not None and outputs.ndim > 1:
        found = found or bool((outputs.sum(axis) - 1).abs().le(1e-3).all())
    if found and (axis is not None or loss is objective.binary_cross_entropy):
        problem = "the model's outputs are probabilities (a softmax or sigmoid at its end), but"
        logs = "nll" in loss.__name__.lower()
        wanted = f"{loss.__name__} expects {'log-probabilities' if logs else 'logits'}"
        remedy = "make it nn.LogSoftmax" if logs else "remove the last layer"
        warn_once(f"{problem} {wanted} and learns slowly from these: {remedy}")


Collate = Callable[[list[Any]], Any]


def _label_of(names: Any) -> str | None:
    return next((name for name in LABELS if name in names), None)


def by_client(given: Any, examples: Any = tuple | Mapping) -> dict[str, Any] | None:
    """Return datasets by the name of their client; None for a single one, a list of examples."""
    if isinstance(given, Mapping) and _label_of(given) is None:
        return {str(name): part for name, part in given.items()}
    if isinstance(given, list | tuple) and given and not isinstance(given[0], examples):
        return {str(number): part for number, part in enumerate(given)}
    return None


def read_datasets(parts: Mapping[str, Any], what: str, collate: Collate | None) -> tuple[Any, ...]:
    """Load datasets of (input, target) pairs or dicts: inputs, targets, and names of parts."""
    samples: list[Any] = []
    names: list[str] = []
    for name, part in parts.items():
        if isinstance(part, DataLoader):
            collate = collate or part.collate_fn
            part = part.dataset
        if isinstance(part, Mapping):  # columns
            if len({len(column) for column in part.values()}) > 1:
                raise InputError(f"{what} {name} has columns of different lengths: cut or pad them")
            part = [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]
        # A torch dataset has a length, but no end when it is iterated.
        sized = hasattr(type(part), "__len__") and hasattr(type(part), "__getitem__")
        if not sized and not hasattr(type(part), "__iter__"):
            raise InputError(f"{what} {name} is a {type(part).__name__}: give a dataset")
        own = [part[i] for i in range(len(part))] if sized else list(part)
        if not own:
            raise InputError(f"{what} {name} holds no example: leave it out")
        samples += own
        names += [name] * len(own)
    made = _stacked(samples) if collate is None else collate(samples)
    if isinstance(made, tuple | list) and len(made) == 2:
        return made[0], made[1], names
    keys = list(made) if isinstance(made, Mapping) else []
    label = _label_of(keys)
    others = [key for key in keys if key != label]
    if label is None or not others:
        raise InputError(
            f"{what} gives a {type(made).__name__} of {', '.join(map(str, keys)) or 'no names'}: "
            "expected (input, target) pairs or dicts with a 'label'; convert others by "
            "collate=, a function of a list of examples that returns (inputs, targets)"
        )
    x = made[others[0]] if len(others) == 1 else {key: made[key] for key in others}
    return x, made[label], names


def _stacked(samples: list[Any]) -> Any:
    """Turn a list of dicts into a dict of lists, and a list of pairs into a pair of lists."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: [sample[key] for sample in samples] for key in first}
    if isinstance(first, tuple | list) and len(first) == 2:
        inputs, targets = ([sample[i] for sample in samples] for i in range(2))
        if isinstance(inputs[0], tuple) and all(getattr(part, "shape", ()) for part in inputs[0]):
            return tuple(map(list, zip(*inputs, strict=True))), targets
        return _stacked(inputs) if isinstance(inputs[0], Mapping) else inputs, targets
    return first


def match_clients(train: Sequence[str], test: Owners) -> npt.NDArray[np.int64]:
    """Return each test example's client: a position in ``train``, or -1."""
    position = {name: i for i, name in enumerate(train)}
    matched = np.array([position.get(name, -1) for name in test.names], np.int64)
    return np.repeat(matched, np.diff(test.offsets))


def find_owners(clients: Any, train: Sequence[str]) -> npt.NDArray[np.int64] | None:
    """Return the position in ``train`` of each test example's client, or -1; None without ids."""
    if clients is None or isinstance(clients, Owners):
        found = match_clients(train, clients or Owners((), np.zeros(1, np.int64)))
        return found if (found >= 0).any() else None
    try:
        present, owner = number_clients(clients)
    except InputError as error:
        raise InputError(f"test_clients: {error}") from None
    matched = match_clients(train, Owners((*map(str, present),), np.arange(len(present) + 1)))
    if (matched < 0).all():
        problem = f"test_clients: {str(present[0])!r} and all others are not training clients"
        raise InputError(f"{problem}, such as {train[0]!r}: give ids of the same kind")
    return matched[owner]


def describe_inputs(x: Inputs) -> str:
    """Describe shape and type of inputs by the first two examples."""
    found = []
    for name, t in named_leaves(row(x, slice(2))).items():
        whole = t.numel() > 0 and not t.is_floating_point()
        span = f" from {t.cpu().numpy().min()} to {t.cpu().numpy().max()}" if whole else ""
        found.append(f"{name} shape {tuple(t.shape)[1:]} and type {t.dtype}{span}".strip())
    return ", ".join(found)


def as_pair(given: Any, name: str) -> Sequence[Any]:
    """Check that inputs and targets are a pair."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{name} is a {type(given).__name__}: pass {name}=(inputs, targets)")
    return given


def column_arrays(columns: Columns, what: str) -> tuple[Array, Array]:
    """Extract inputs and targets."""
    held = columns.columns if isinstance(columns, Columns) else {}
    if not all(isinstance(held.get(name), np.ndarray) for name in "xy"):
        given = f"the {what} is a {type(columns).__name__} of {', '.join(held) or 'no columns'}"
        remedy = "read them with fedzmg.data.formats, or turn text into numbers for from_arrays"
        raise InputError(f"{given}: expected columns x and y of numbers; {remedy}")
    return columns.array("x"), columns.array("y")
