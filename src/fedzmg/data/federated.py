"""Examples of many clients as two columns and the offsets between clients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.errors import InputError


class Examples(NamedTuple):
    """Inputs and targets, first axis examples."""

    x: Tensor
    y: Tensor

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.x)

    def to(self, device: torch.device, dtype: torch.dtype) -> Examples:
        """Copy to a device; double precision is rounded to ``dtype``, other types are kept."""
        return Examples(
            *(t.to(device, dtype if t.dtype == torch.float64 else t.dtype) for t in self)
        )

    def __repr__(self) -> str:
        """Summarise, without any example."""
        return f"<Examples: {self.size:,} of {self.kind()}>"

    def kind(self) -> str:
        """Describe shape and type of an input and of a target."""
        return ", ".join(f"{name} {_kind(t)}" for name, t in self._asdict().items())


def _kind(tensor: Tensor) -> str:
    shape = " x ".join(map(str, tensor.shape[1:]))
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}".strip()


def examples(x: Any, y: Any, *, what: str = "data") -> Examples:
    """Check and wrap two arrays of equal length."""
    tensors = Examples(_tensor(x, f"{what} inputs"), _tensor(y, f"{what} targets"))
    if not tensors.y.is_floating_point():
        tensors = tensors._replace(y=tensors.y.long())  # labels index outputs
    if len(tensors.x) != len(tensors.y):
        raise InputError(
            f"{what} has inputs of shape {tuple(tensors.x.shape)} and targets of shape "
            f"{tuple(tensors.y.shape)}: their first axes must be equally long"
        )
    if len(tensors.x) == 0:
        raise InputError(f"{what} holds no example: give at least one")
    return tensors


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()  # torch refuses to share memory that it may not write
    if isinstance(values, np.ndarray) and values.dtype.kind not in "biufc":
        raise InputError(
            f"{what} cannot be read as an array: turn values of type {values.dtype} into numbers"
        )
    try:
        tensor = torch.as_tensor(
            np.ascontiguousarray(values) if isinstance(values, np.ndarray) else values
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read as an array: {error}") from None
    if tensor.ndim == 0:
        raise InputError(f"{what} are a single number: give one entry per example")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        first = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
        raise InputError(f"{what} hold a value that is not finite in example {first}: remove it")
    return tensor


@dataclass(frozen=True)
class FederatedData:
    """Training examples sorted by client; client ``i`` owns ``offsets[i]:offsets[i + 1]``."""

    examples: Examples
    offsets: npt.NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def from_arrays(
        cls, x: Any, y: Any, clients: Any, names: Sequence[Any] | None = None
    ) -> FederatedData:
        """Group examples by a client id each.

        Args:
            x: inputs, one per example.
            y: targets, one per example.
            clients: the client id of every example, any sortable values.
            names: all client ids, if their order or completeness matters.
        """
        data = examples(x, y, what="training data")
        try:
            ids = np.asarray(clients)
            present, owner = np.unique(ids, return_inverse=True)
        except (TypeError, ValueError):
            raise InputError("client ids cannot be sorted: give numbers or strings") from None
        if ids.shape != (data.size,):
            raise InputError(
                f"client ids have shape {ids.shape} for {data.size} examples: give one per example"
            )
        if ids.dtype.kind == "f" and not np.isfinite(ids).all():
            first = int(np.flatnonzero(~np.isfinite(ids))[0])
            raise InputError(f"example {first} has the client id {ids[first]}: say whose it is")
        if names is not None:
            if isinstance(names, str) or not isinstance(names, Iterable):
                raise InputError(f"client_names = {names!r}: expected a list of all client ids")
            wanted = [str(name) for name in names]
            known = {str(name) for name in present}
            missing = [name for name in wanted if name not in known]
            if missing:
                raise InputError(f"client {missing[0]!r} has no example: leave it out of names")
            if len(set(wanted)) != len(wanted) or len(wanted) != len(present):
                raise InputError("names must list every client id of the data exactly once")
            position = {name: i for i, name in enumerate(wanted)}
            owner = np.array([position[str(name)] for name in present])[owner]
            labels = tuple(wanted)
        else:
            labels = tuple(str(name) for name in present)
        order = torch.from_numpy(np.argsort(owner, kind="stable"))
        counts = np.bincount(owner, minlength=len(labels))
        return cls(
            Examples(data.x[order], data.y[order]),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            labels,
        )

    def __len__(self) -> int:
        """Number of clients."""
        return len(self.names)

    def __repr__(self) -> str:
        """Summarise, without any example."""
        held = f"{self.examples.size:,} examples of {len(self):,} clients"
        return f"<{type(self).__name__}: {held}; {self.examples.kind()}>"

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Examples per client."""
        return np.diff(self.offsets)

    def to(self, device: torch.device, dtype: torch.dtype) -> FederatedData:
        """Copy to a device, as :meth:`Examples.to` does."""
        return replace(self, examples=self.examples.to(device, dtype))

    def fingerprint(self) -> str:
        """Hash contents, order and client borders (SHA-256): equal data, equal fingerprint."""
        digest = hashlib.sha256()
        for tensor in (*self.examples, torch.from_numpy(self.offsets)):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update("\x1f".join(self.names).encode())
        return digest.hexdigest()
