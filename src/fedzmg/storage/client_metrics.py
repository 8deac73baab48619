"""The file of a run directory with metric and loss on single clients."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fedzmg.errors import InputError
from fedzmg.storage.files import UNSEALED, has_seal, replacing, seal
from fedzmg.storage.formats import RESTORE, SPEC, file_sha256
from fedzmg.storage.reading import check_file

CLIENTS = "clients.safetensors"
FORMAT = 1
Part = Literal["test", "training"]


class ClientTable(NamedTuple):
    """Metric and loss on each client's own examples, by round."""

    part: Part  # kind of examples that are evaluated
    population: int  # number of clients with such examples; those listed may be a sample
    clients: NDArray[np.int64]
    examples: NDArray[np.int64]
    rounds: NDArray[np.int64]
    metric: NDArray[np.float64]  # evaluations x clients
    loss: NDArray[np.float64]
    personal: NDArray[np.float64] | None = None
    tuned: NDArray[np.float64] | None = None


_WHOLE = ("client", "examples", "round")
_NAMES = (*_WHOLE, "metric", "loss")
_OPTIONAL = ("personal", "tuned")  # names of a table's arrays in the file


def write_clients(directory: Path, table: ClientTable) -> None:
    """Write the file atomically."""
    arrays = zip((*_NAMES, *_OPTIONAL), table[2:], strict=True)
    tensors: dict[str, NDArray[Any]] = {n: array for n, array in arrays if array is not None}
    tensors |= {name: tensors[name].astype(np.int32) for name in _WHOLE}
    facts = {"format": str(FORMAT), "part": table.part, "population": str(table.population)}
    facts[SPEC] = file_sha256(directory / "spec.toml")
    with replacing(directory / CLIENTS) as temporary:
        temporary.write_bytes(safetensors.numpy.save(tensors, facts | UNSEALED))
        seal(temporary)


def read_clients(directory: Path) -> ClientTable | None:
    """Read the file; None if the run never evaluated single clients."""
    path = directory / CLIENTS
    if not path.is_file():
        return None
    check_file(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = [*_NAMES, *(name for name in _OPTIONAL if name in file.keys())]  # noqa: SIM118
            facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in names}
        # Copies that were kept by an earlier version have no hash.
        if not {"sha256", SPEC}.isdisjoint(facts):
            if not has_seal(path):
                raise ValueError("its hash is wrong")
            if facts[SPEC] != file_sha256(directory / "spec.toml"):
                raise ValueError("it belongs to another run")
        kinds = {name: np.int64 if name in _WHOLE else np.float64 for name in names}
        tensors = {name: tensors[name].astype(kind) for name, kind in kinds.items()}
        values: list[Any] = [tensors.get(name) for name in (*_NAMES, *_OPTIONAL)]
        found = ClientTable(facts["part"], int(facts["population"]), *values)
        shape = len(found.rounds), len(found.clients)
        same = found.examples.shape == found.clients.shape == shape[1:]
        same &= found.rounds.shape == shape[:1] and found.part in get_args(Part)
        own = [tensors[name] for name in names if name not in _WHOLE]
        if not same or 0 in shape or {array.shape for array in own} != {shape}:
            raise ValueError(f"a table of shape {found.metric.shape}")
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}): {RESTORE}") from None
    return found
