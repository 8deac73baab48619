"""Examples of many clients as two columns and the offsets between clients."""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.data.columns import Owners, group, kind_of
from fedzmg.errors import InputError
from fedzmg.tree import Inputs, leaves, named_leaves, row, tree_map


class Examples(NamedTuple):
    """Inputs and targets, first axis examples."""

    x: Inputs
    y: Tensor

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.y)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Examples":
        """Copy to a device; double precision is rounded to ``dtype``, other types are kept."""
        wide = torch.float64
        return tree_map(lambda t: t.to(device, dtype if t.dtype == wide else t.dtype), self)

    def __repr__(self) -> str:
        return f"<Examples: {self.size:,} of {self.kind()}>"

    def kind(self) -> str:
        """Describe shape and type of an input and of a target."""
        return ", ".join(f"{name[1:]} {kind_of(t)}" for name, t in named_leaves(self).items())


def examples(x: Any, y: Any, *, what: str = "data") -> Examples:
    """Check and wrap inputs, an array or a dict or tuple of inputs, and as many targets."""
    targets = _tensor(y, f"{what} targets")
    # A tuple of as many arrays as there are targets has one for each.
    if isinstance(x, tuple) and len(x) != len(targets) and all(hasattr(p, "__len__") for p in x):
        inputs: Inputs = tuple(_inputs(part, f"{what} inputs {i}") for i, part in enumerate(x))
    else:
        inputs = _inputs(x, f"{what} inputs")
    if not targets.is_floating_point():
        targets = targets.long()  # labels index outputs
    for tensor in leaves(inputs):
        if len(tensor) != len(targets):
            shapes = f"inputs of shape {tuple(tensor.shape)} and targets of {tuple(targets.shape)}"
            raise InputError(f"{what} has {shapes}: their first axes must be equally long")
    if len(targets) == 0:
        raise InputError(f"{what} holds no example: give at least one")
    return Examples(inputs, targets)


def _inputs(x: Any, what: str) -> Inputs:
    if not isinstance(x, Mapping):
        return _tensor(x, what)
    if not x:
        raise InputError(f"{what} are an empty dict: give at least one array")
    return {str(key): _inputs(x[key], f"{what} {key!r}") for key in sorted(x, key=str)}


def _tensor(values: Any, what: str) -> Tensor:
    try:
        tensor = torch.as_tensor(_plain(values)).to_dense()
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if any(word in reason for word in ("length", "shape", "equal size")):
            reason += "; pad examples to one length, Task.from_datasets by collate="
        raise InputError(f"{what} cannot be read as an array of numbers: {reason}") from None
    if tensor.ndim == 0:
        raise InputError(f"{what} are a single number: give one entry per example")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        first = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
        raise InputError(f"{what} hold a value that is not finite in example {first}: remove it")
    return tensor


def _plain(values: Any) -> Any:
    """Convert tables (pandas and others), lists of arrays and odd types to what torch reads."""
    for conversion in ("to_numpy", "toarray"):  # of tables, and of SciPy's sparse matrices
        values = getattr(values, conversion, lambda own=values: own)()
    if isinstance(values, Sequence) and not isinstance(values, str):
        values = list(values)  # also of a class that reads its entries one by one
    if isinstance(values, list) and values:
        if isinstance(values[0], Tensor):
            return torch.stack([torch.as_tensor(row) for row in values])
        if not isinstance(values[0], int | float | list | tuple):
            values = np.stack([np.asarray(row) for row in values])
    if not isinstance(values, np.ndarray):
        return values
    cells = values
    if values.dtype.kind == "O":  # arrays as cells of a table, or columns of several types
        values = np.array(values.tolist())
    if values.dtype.kind in "USO":
        first = next((v for v in cells.flat if not isinstance(v, Number | np.ndarray)), None)
        remedy = "turn text into numbers, classes by np.unique(y, return_inverse=True)[1]"
        raise TypeError(f"it holds {str(first)!r:.60}; {remedy}, or leave it out")
    dtype = np.dtype(np.float64) if values.dtype == np.longdouble else values.dtype
    # Torch refuses other byte orders, and to share memory that it may not write.
    return np.require(values, dtype.newbyteorder("="), requirements=["C", "W"])


def number_clients(clients: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the sorted client ids, and for each example the position of its own."""
    try:
        ids = np.asarray(clients)
        present, owners = np.unique(ids, return_inverse=True)
    except (TypeError, ValueError):
        missing = [i for i, one in enumerate(clients) if one is None or one != one]
        where = f" (example {missing[0]} has none)" if missing else ""
        raise InputError(f"client ids cannot be sorted{where}: give numbers or strings") from None
    if ids.ndim != 1 or len(ids) == 0:
        raise InputError(f"client ids have shape {ids.shape}: give one per example")
    for first in np.flatnonzero(ids != ids):
        raise InputError(f"example {first} has the client id nan: give it a number or a string")
    return present, owners.astype(np.int64)


@dataclass(frozen=True)
class FederatedData:
    """Training examples sorted by client; client ``i`` owns ``offsets[i]:offsets[i + 1]``."""

    examples: Examples
    offsets: npt.NDArray[np.int64]
    names: tuple[str, ...]
    origin: str = ""  # fingerprint of the catalog's data set, if these are all of its examples

    @classmethod
    def from_arrays(cls, x: Any, y: Any, clients: Any, names: Any = None) -> "FederatedData":
        """Group examples by client id, or by owners of sorted rows; ``names``: all ids."""
        data = examples(x, y, what="training data")
        if isinstance(clients, Owners):
            return cls(data, clients.offsets, clients.names)
        present, owner = number_clients(clients)
        if len(owner) != data.size:
            raise InputError(f"{len(owner)} client ids for {data.size} examples: give one for each")
        labels = [str(name) for name in present]
        if names is not None:
            wanted = [str(name) for name in names] if isinstance(names, Iterable) else []
            if sorted(wanted) != sorted(labels):
                known = f"the {len(labels)} clients with examples"
                raise InputError(f"client_names = {names!r:.80}: list each of {known} once")
            position = {name: i for i, name in enumerate(wanted)}
            owner = np.array([position[name] for name in labels])[owner]
            labels = wanted
        order, owners = group(owner, labels)
        return cls(row(data, torch.from_numpy(order)), owners.offsets, owners.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        held = f"{self.examples.size:,} examples of {len(self):,} clients"
        return f"<{type(self).__name__}: {held}; {self.examples.kind()}>"

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Examples per client."""
        return np.diff(self.offsets)

    def to(self, device: torch.device, dtype: torch.dtype) -> "FederatedData":
        """Copy to a device, as :meth:`Examples.to` does."""
        return replace(self, examples=self.examples.to(device, dtype))

    def take(self, clients: npt.NDArray[np.int64], rows: Sequence[Any]) -> "FederatedData":
        """Copy some clients, with the examples at these positions each."""
        picked = row(self.examples, torch.from_numpy(np.concatenate(rows)))
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return FederatedData(picked, offsets, tuple(self.names[client] for client in clients))

    def fingerprint(self) -> str:
        """Hash contents, order and client borders; the hash of a data set replaces its contents."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> str:
        digest = hashlib.sha256(self.origin.encode())
        digest.update("\x1f".join(named_leaves(self.examples.x)).encode())
        for tensor in leaves(self.examples):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            if not self.origin:
                digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if not self.origin:
            digest.update(f"torch.int64{self.offsets.shape}".encode())
        digest.update(self.offsets.tobytes())
        digest.update("\x1f".join(self.names).encode())
        return digest.hexdigest()
