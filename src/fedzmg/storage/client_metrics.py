"""Metric and loss on single clients, and their file in a run directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedzmg.errors import InputError
from fedzmg.storage.files import UNSEALED, has_seal, replacing, seal
from fedzmg.storage.formats import RESTORE, SPEC, file_sha256
from fedzmg.storage.reading import check_file

CLIENTS = "clients.safetensors"
FORMAT = 1
Part = Literal["test", "training"]


@dataclass(frozen=True, eq=False)
class ClientMetrics:
    """Metric and loss of one model on each client's own examples."""

    round: int
    part: Part  # evaluated examples: test examples if the task has them by client
    population: int  # clients that hold such examples; ``clients`` may be a sample of them
    clients: NDArray[np.int64]  # positions in the task's clients, ascending
    examples: NDArray[np.int64]
    metric: NDArray[np.float64]
    loss: NDArray[np.float64]
    personal: NDArray[np.float64] | None = None  # of each client's personal model, if any
    tuned: NDArray[np.float64] | None = None
    """Metric of each client's model after fine-tuning; None unless ``protocol.fine_tune``."""


_VALUES = ("metric", "loss", "personal", "tuned")  # arrays with a row per round


def write_clients(directory: Path, found: Sequence[ClientMetrics]) -> None:
    """Write evaluations of a run atomically."""
    last, rounds = found[-1], [one.round for one in found]
    whole = {"client": last.clients, "examples": last.examples, "round": rounds}
    tensors: dict[str, NDArray[Any]] = {n: np.array(own, np.int32) for n, own in whole.items()}
    known = [name for name in _VALUES if getattr(last, name) is not None]
    tensors |= {name: np.stack([getattr(one, name) for one in found]) for name in known}
    facts = {"format": str(FORMAT), "part": last.part, "population": str(last.population)}
    facts[SPEC] = file_sha256(directory / "spec.toml")
    with replacing(directory / CLIENTS) as temporary:
        temporary.write_bytes(safetensors.numpy.save(tensors, facts | UNSEALED))
        seal(temporary)


def read_clients(directory: Path) -> tuple[ClientMetrics, ...]:
    """Read evaluations in order of rounds; none if the run never evaluated single clients."""
    path = directory / CLIENTS
    if not path.is_file():
        return ()
    check_file(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            facts, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        # Copies that were kept by an earlier version have no hash.
        if not {"sha256", SPEC}.isdisjoint(facts):
            if not has_seal(path):
                raise ValueError("its hash is wrong")
            if facts[SPEC] != file_sha256(directory / "spec.toml"):
                raise ValueError("it belongs to another run")
        clients, examples = (tensors[name].astype(np.int64) for name in ("client", "examples"))
        rounds, values = tensors["round"], {n: tensors[n] for n in _VALUES if n in tensors}
        shapes = {array.shape for array in values.values()}
        same = examples.shape == clients.shape and shapes == {(len(rounds), len(clients))}
        if not same or 0 in (len(rounds), len(clients)) or facts["part"] not in get_args(Part):
            raise ValueError(f"a table of shape {min(shapes, default=())}")
        shared = facts["part"], int(facts["population"]), clients, examples
        return tuple(
            ClientMetrics(round_, *shared, **{name: own[i] for name, own in values.items()})
            for i, round_ in enumerate(rounds.tolist())
        )
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}): {RESTORE}") from None
