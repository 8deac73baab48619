"""Train trials from the first round to the last, on a chosen device."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from fedzmg.engine.choose import EngineName, EnginePlanner
from fedzmg.errors import InputError, check_names
from fedzmg.federation import Federation
from fedzmg.kernels.precision import DEFAULT_PRECISION, Precision
from fedzmg.simulation.history import History, Record
from fedzmg.simulation.rounds import RoundReport, Simulation
from fedzmg.simulation.trial import Trial
from fedzmg.tasks.task import Task

Observer = Callable[[RoundReport], None]
Device = Literal["auto", "cpu", "cuda"]
has_gpu = torch.cuda.is_available


def resolve_device(device: str) -> torch.device:
    """Return the named device; ``auto`` is a GPU if there is one."""
    check_names("device", [device], get_args(Device))
    if device == "cuda" and not has_gpu():
        raise InputError("device 'cuda': no CUDA device is available here; use --device cpu")
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    return torch.device(device)


def simulate(
    task: Task, trials: Sequence[Trial] | Trial, *, rounds: int | None = None,
    engine: EngineName = "auto", device: Device = "auto", dtype: torch.dtype = torch.float32,
    precision: Precision = DEFAULT_PRECISION, deterministic: bool = False,
    federation: Federation | None = None, chunk: int | None = None,
    observer: Observer | None = None,
) -> list[History]:  # fmt: skip
    """Train trials of equal structure together; return one history each.

    Args:
        task: a preset of ``fedzmg.tasks`` or :meth:`Task.from_arrays`.
        trials: algorithms that differ only in numbers, and seeds.
        rounds: instead of the task's own number of rounds.
        engine: ``auto`` measures and picks. ``sequential`` is the reference loop, ``vectorized``
            maps over clients, ``compiled`` compiles the mapped step, ``cuda_graph`` replays it as a
            CUDA graph, ``compiled_cuda_graph`` does both. On a GPU ``compiled`` means
            ``compiled_cuda_graph``; on a CPU graphs are called instead of replayed.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: type of parameters, updates and floating point data.
        precision: rounding of float32 layers on a GPU: ``tf32``, ``float32`` or ``bf16``.
        deterministic: on a GPU, the same bits whenever the same trials are packed together;
            slower. A CPU always gives the same bits.
        federation: optional stages of a round, such as ``Federation(guard=True)``.
        chunk: train at most this many clients at once, to save memory.
        observer: called after every round.

    Raises:
        InputError: for trials of different structure or a task that does not fit together.
    """
    alone = isinstance(trials, str) or not isinstance(trials, Sequence)
    trials = [trials] if alone else list(trials)  # type: ignore[list-item, arg-type]
    wanted: list[tuple[str, Any, type, str]] = [
        ("task", task, Task, "tasks.get('digits')"),
        ("dtype", dtype, torch.dtype, "torch.float32"),
        ("federation", federation or Federation(), Federation, "Federation(guard=True)"),
        *(("trials", t, Trial, "Trial.of('fedzmg') or Trial(algorithm, seed=0)") for t in trials),
    ]
    for name, value, kind, example in wanted:
        if not isinstance(value, kind):
            shown = repr(value).partition("\n")[0][:80]
            raise InputError(f"{name} = {shown}: expected {kind.__name__}, such as {example}")
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk = {chunk!r}: expected a whole number of at least 1")
    total = task.protocol.rounds if rounds is None else rounds
    simulation = Simulation(
        replace(task, protocol=replace(task.protocol, rounds=total)), trials, rounds=total,
        device=resolve_device(device), dtype=dtype, engine=EnginePlanner(engine, chunk=chunk),
        precision=precision, deterministic=deterministic, federation=federation,
    )  # fmt: skip
    records: list[list[Record]] = [[] for _ in trials]
    while simulation.round < total:
        report = simulation.run_round()
        for own, record in zip(records, report.records, strict=True):
            own.append(record)
        if observer is not None:
            observer(report)
    histories = simulation.histories(records)
    if simulation.program.rule.is_personal or task.protocol.fine_tune:
        clients = simulation.evaluate_clients()  # whose memory ends here
        histories = [replace(h, clients=(own,)) for h, own in zip(histories, clients, strict=True)]
    return histories
