"""``diagnose``: measure a task's model on some clients, before training and along it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.algorithms.mimelite import MimeLite
from fedzmg.contract import ClientRule, Layout, Parts, numbers, structure
from fedzmg.data.columns import Ids
from fedzmg.data.plan import ClientBatch, Stream, local_stream
from fedzmg.diagnose.measure import Floats, Measurement, Pair, Part, measure, spread_of
from fedzmg.diagnose.verdict import Progress, Verdict, judge
from fedzmg.engine.local import Broadcast
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import Vectorized
from fedzmg.errors import InputError, check_names
from fedzmg.evaluation import Metric
from fedzmg.kernels import ONEDNN_BY_DEFAULT, onednn, rounding
from fedzmg.models.initial import initial_params
from fedzmg.seeds import stream
from fedzmg.simulation import Device, RoundReport, Simulation, Trial, resolve_device, simulate
from fedzmg.simulation.program import build_program
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, num_bytes, row, stack, tree_map
from fedzmg.wrappers.parts import PartsClient, pick

CLIENTS, EXAMPLES, DRIFTING = 50, 256, 10
TRIAL, TRIAL_CLIENTS, TRIAL_EXAMPLES = 6, 10, 64  # rounds, clients and examples of a training
RATES = tuple(10 ** (k / 2) for k in range(-7, 0))  # its client learning rates
LEARNING_RATE = 0.05  # client learning rate for a task without a tuned one for FedAvg
MEMORY = 128 * 2**20  # bytes for models and gradients of clients trained side by side
MOST_CLIENTS = 8
PASS_SIZE = 32


@dataclass(frozen=True)
class Diagnosis:
    """Evidence for or against FedZMG's premise on a task."""

    task: str
    total: int  # number of the task's clients; ``clients`` names those that were measured
    clients: tuple[str, ...]
    examples: int  # largest number of examples per client
    seed: int
    lr: float
    drifting: int  # number of clients whose local training was followed
    points: tuple[Measurement, ...]
    centred: Measurement | None  # first point, inputs centred; None: tokens, trained model
    progress: Progress | None  # of a short training; None: none was asked for
    verdict: Verdict  # verdict on the first point

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    task: Task, *, params: Mapping[str, Tensor] | None = None, round: int = 0,
    clients: int = CLIENTS, examples: int = EXAMPLES, drifting: int = DRIFTING,
    lr: float | None = None, trial: int = TRIAL, along: int = 0, every: int | None = None,
    seed: int = 0, device: Device = "auto", dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:  # fmt: skip
    """Measure what the zero-mean projection would do to a task's clients.

    Args:
        task: a preset of ``fedzmg.tasks`` or :meth:`Task.from_arrays`.
        params: a trained model by parameter names, such as ``history.params`` or
            ``module.state_dict()``; frozen parameters are always the task's own. By default the
            initial model of ``seed``.
        round: number of rounds after which ``params`` was taken.
        clients: largest number of clients to measure, drawn by ``seed``.
        examples: largest number of examples per client.
        drifting: number of clients whose local training is followed; 0 skips drift.
        lr: client learning rate of local training and ``along``; by default the task's tuned one
            for FedAvg, else 0.05.
        trial: rounds of a short training with and without the projection, at seven learning rates
            each; 0 skips it, and there is no verdict.
        along: number of rounds of plain FedAvg to train and measure.
        every: rounds of ``along`` between measurements; by default a fifth of them.
        seed: seed of clients, examples, initial weights, batches and cohorts.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: type of models and gradients; sums are always in double precision.
        progress: receives progress messages.

    Raises:
        InputError: for a wrong type, a number out of range, or a model of another task.
    """
    if not isinstance(task, Task):
        raise InputError(f"task is a {type(task).__name__}: use tasks.get or Task.from_arrays")
    tuned = task.options.get("fedavg", {}).get("client.lr", LEARNING_RATE)
    rate = float(tuned) if lr is None else lr
    least = {"clients": 1, "examples": 1, "drifting": 0, "trial": 0, "along": 0, "every": 1}
    given = clients, examples, drifting, trial, along, 1 if every is None else every
    for (name, low), value in zip(least.items(), given, strict=True):
        if not isinstance(value, int) or value < low:
            raise InputError(f"{name} = {value!r}: expected a whole number of at least {low}")
    if not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise InputError(f"lr = {lr!r}: expected a finite number > 0")
    if params is not None and along:
        raise InputError(f"along = {along}: training starts at the initial model; pass no params")
    if every is not None and not along:
        raise InputError(f"every = {every}: there is no training to measure; pass along too")
    plain_rule, zero_mean = SGD(lr=rate), ZeroMean(SGD(lr=rate))
    say = progress or (lambda _: None)
    target = resolve_device(device)
    drawn, part = excerpt(task, clients, examples, seed)
    weights = task.train.counts[drawn].astype(np.float64)
    followed = np.sort(stream(seed, "probe", "diagnose", "drift").permutation(drawn)[:drifting])
    start = initial_params(task.model, task.init, seed)
    model = start if params is None else _matched(params, start, task)
    layout = in_order_of_use(task, start)

    def measured(model: Tree, at: int) -> Measurement:
        model = model.map(lambda leaf: leaf.to(target, dtype))
        found = replace(measure(gradients(part, model, weights), layout), round=at)
        if len(followed) < 2:
            return found
        both = (updates(task, model, followed, rule, seed) for rule in (plain_rule, zero_mean))
        plain, projected = (spread_of(own, layout) for own in both)
        if not all(map(math.isfinite, [*plain.values(), *projected.values()])):
            return found
        return replace(found, drift={key: Pair(plain[key], projected[key]) for key in plain})

    say("measuring gradients" + (" and drift" if drifting else ""))
    points = [measured(model, round)]
    then = None
    if params is None and (other := centred(part)) is not None:
        say("measuring with centred inputs")
        there = start.map(lambda leaf: leaf.to(target, dtype))
        then = measure(gradients(other, there, weights), layout)
    tried = None
    if trial and len(drawn) > 1:
        say(f"training {trial} rounds at {len(RATES)} learning rates, without and with projection")
        most = min(clients, TRIAL_CLIENTS), min(examples, TRIAL_EXAMPLES)
        tried = short_training(excerpt(task, *most, seed)[1], model, trial, seed, target, dtype)
    if along:
        step = every or max(1, along // 5)

        def observe(report: RoundReport) -> None:
            if report.round % step == 0 or report.round == along:
                say(f"round {report.round} of {along}")
                points.append(measured(row(report.simulation.snapshot.params, 0), report.round))

        # Evaluations are not used: one suffices.
        quiet = replace(task, protocol=replace(task.protocol, eval_every=along))
        simulate(quiet, Trial.of("fedavg", seed, client_lr=rate), rounds=along,
                 device=target.type,  # type: ignore[arg-type]
                 dtype=dtype, observer=observe)  # fmt: skip
    return Diagnosis(
        task=task.name, total=len(task.train), clients=part.train.names, examples=examples,
        seed=seed, lr=rate, drifting=len(followed), points=tuple(points),
        centred=then, progress=tried, verdict=judge(points[0], tried, then),
    )  # fmt: skip


def _matched(params: Mapping[str, Tensor], start: Tree, task: Task) -> Tree:
    """Check a user's model, and order its parameters like the task's own."""
    if not isinstance(params, Mapping):
        raise InputError(f"params is a {type(params).__name__}: pass module.state_dict()")
    check_names("parameter in params", params, {*start, *task.model.source.state_dict()})
    for name, leaf in start.items():
        other, want = params.get(name), tuple(leaf.shape)
        if not isinstance(other, Tensor) or other.shape != want:
            got = tuple(other.shape) if isinstance(other, Tensor) else other
            raise InputError(f"params[{name!r}] is {got}: expected a tensor of shape {want}")
    return Tree({name: params[name].detach() for name in start})


def excerpt(task: Task, most_clients: int, most_examples: int, seed: int) -> tuple[Ids, Task]:
    """Draw clients that have examples; return their positions, and a task of some examples."""
    data = task.train
    present = np.flatnonzero(data.counts)
    chosen = stream(seed, "probe", "diagnose").permutation(len(present))[:most_clients]
    clients = np.sort(present[chosen]).astype(np.int64)
    rows = []
    for client in clients.tolist():
        drawn = stream(seed, "probe", "diagnose", client).permutation(data.counts[client])
        rows.append(data.offsets[client] + np.sort(drawn[:most_examples]))
    # Nothing is trained on this task: it may be smaller than a cohort.
    protocol = replace(task.protocol, cohort=1)
    train = data.take(clients, rows)
    return clients, replace(task, train=train, protocol=protocol, test_owners=None)


def short_training(
    task: Task, params: Tree, rounds: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Progress:
    """Train one model of all clients without and with the projection, at several rates."""
    protocol = replace(task.protocol, cohort=len(task.train), eval_every=rounds)
    own = replace(task, test=task.train.examples, protocol=protocol, parts=Parts(),
                  metric=Metric("loss", task.loss, higher_is_better=False))  # fmt: skip
    start, best = math.inf, []
    for layers in ("none", "all"):
        trials = [Trial.of("fedzmg", seed, client_lr=r, client_project=layers) for r in RATES]
        made = Simulation(own, trials, rounds=rounds, device=device, dtype=dtype, engine="auto")
        begin = stack([params.map(lambda leaf: leaf.to(device, dtype))] * len(RATES))
        made.snapshot = made.snapshot._replace(params=begin)
        start = made.evaluate()[0].loss
        for _ in range(rounds):
            made.run_round()
        after = [one.loss if math.isfinite(one.loss) else math.inf for one in made.evaluate()]
        best.append(min(zip(after, RATES, strict=True)))
    losses, rates = zip(*best, strict=True)
    without, projected = (min(loss, start) for loss in losses)
    return Progress(rounds, len(task.train), start, (without, projected), rates)


def gradients(task: Task, params: Tree, weights: Floats) -> Iterator[Part]:
    """Yield the gradients of every client's mean loss, without dropout, and the weights."""
    size = min(PASS_SIZE, int(task.train.counts.max()))
    none = np.zeros(0, np.int64)
    nothing = Stream(np.zeros((0, size), np.int64), none, none.astype(np.bool_), 0)
    entries = [ClientBatch(0, k, int(n), nothing) for k, n in enumerate(task.train.counts)]
    # Without local steps, MimeLite only uploads its full gradient.
    yield from _uploads(task, MimeLite(), entries, params, weights)


def updates(task: Task, params: Tree, clients: Ids, rule: ClientRule, seed: int) -> Iterator[Part]:
    """Yield the clients' updates ``w - w_k`` after one round of local steps."""
    data, entries = task.train, []
    for client in clients.tolist():
        first, size = int(data.offsets[client]), int(data.counts[client])
        steps = local_stream(task.protocol.batching, seed, 1, client, 0, first, size)
        if len(steps):
            entries.append(ClientBatch(0, client, size, steps))
    sizes = np.array([entry.examples for entry in entries], dtype=np.float64)
    yield from _uploads(task, rule, entries, params, sizes)


def _uploads(
    task: Task, rule: ClientRule, entries: Sequence[ClientBatch], params: Tree, weights: Floats
) -> Iterator[Part]:
    """Yield what clients upload, computed on the device and in the precision of ``params``."""
    layout = task.model.layout
    fitted, split = rule.for_layout(layout), Parts().split(layout)
    if split.averaged:  # running statistics, which the rule must not see
        fitted = PartsClient(fitted, split)
    leaf = next(iter(params.values()))
    program = build_program(task, structure(fitted), leaf.dtype, leaf.device)
    program = replace(program, full_pass_size=PASS_SIZE)
    values = {path: leaf.new_tensor([value]) for path, value in numbers(fitted).items()}
    own, memory = params.map(lambda leaf: leaf[None]), fitted.init_memory(params)
    sent = Broadcast(own, (), values, leaf.new_ones(1, dtype=torch.int64))
    # Each client holds model, scratch, gradient and update at once.
    width = max(2, min(MOST_CLIENTS, MEMORY // (4 * num_bytes(params))))
    for first in range(0, len(entries), width):
        batch = list(entries[first : first + width])
        with onednn(ONEDNN_BY_DEFAULT), rounding("float32"):
            try:
                chunks = list(Vectorized(program).train(batch, sent, memory))
            except InputError:  # the model cannot be vectorized over clients
                chunks = list(Sequential(program).train(batch, sent, memory))
        for chunk in chunks:
            upload = chunk.outcomes.upload
            found = pick(upload.average or upload.delta, split.shared)
            yield row(found, chunk.rows), weights[first + np.array(chunk.batches)]


def centred(task: Task) -> Task | None:
    """Subtract the mean of every input of a task; None for token ids."""
    _, some, _ = task.prepared(task.train.examples)
    if not isinstance(some, Tensor) or not some.is_floating_point() or some.ndim < 2:
        return None
    axes = tuple(range(1 - some.ndim, 0))

    def prepare(x: Tensor, dtype: torch.dtype) -> Tensor:
        made: Tensor = task.prepare(x, dtype)
        return made - made.mean(axes, keepdim=True)

    return replace(task, prepare=prepare)


def in_order_of_use(task: Task, params: Tree) -> Layout:
    """Order a model's layout by use; parameters without a part in the loss come last."""
    own = params.map(lambda leaf: leaf.detach().clone().requires_grad_())
    dtype = next(iter(own.values())).dtype
    x, y = tree_map(torch.clone, row(task.train.examples, slice(1))).to(torch.device("cpu"), dtype)
    seen: list[str] = []
    for name, leaf in own.items():
        # A gradient is complete as soon as the first use of its parameter is differentiated.
        leaf.register_hook(lambda _, name=name: seen.append(name))  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        loss = task.loss(task.model.evaluate(own, task.prepare(x, dtype)), y).sum()
        torch.autograd.backward(loss)
    layout = {n: info for n, info in task.model.layout.items() if not info.is_buffer}
    return {name: layout[name] for name in dict.fromkeys([*reversed(seen), *layout])}
