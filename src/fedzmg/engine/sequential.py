"""The reference engine: clients in a loop."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedzmg import tree
from fedzmg.contract import ClientRule, bind, chain
from fedzmg.data.plan import ClientBatch, Stream, full_pass
from fedzmg.engine import local
from fedzmg.engine.local import Broadcast, Chunk, Models, Outcome, Program
from fedzmg.engine.replay import unshared
from fedzmg.errors import noted
from fedzmg.kernels import threads
from fedzmg.messages import FullPass, Upload
from fedzmg.models.gradients import eager_gradient, own_gradient
from fedzmg.models.objective import Batch
from fedzmg.models.recurrent import join_weights
from fedzmg.tree import State, Tree, leaves, num_bytes, row, rows_like, stack, tree_map
from fedzmg.wrappers.parts import PartsClient
from fedzmg.wrappers.wrapper import Wrapper

Places: TypeAlias = tuple[Tensor, Tree, list[Tree]]  # memory of models, see :func:`rows_like`
CHUNK_BYTES = 1 << 22  # models that the loop collects before they are merged
TOGETHER, TOGETHER_BYTES = 4, 1 << 28  # large models that are merged together, at most
_on_host = functools.lru_cache(8)(Tensor.cpu)


@dataclass(frozen=True)
class Sequential:
    """Reference engine: clients in a loop, as in a deployed client; errors name ``path``.

    With ``subtracts=False``, the merger subtracts models where uploads are their difference.
    ``parallel`` is the number of clients that train at once; if more than one, each has one thread
    of torch.
    """

    program: Program
    path: str = "sequential"
    subtracts: bool = True
    parallel: int = 1
    # Memory of merged models is kept: getting it from the system every round takes long.
    kept: list[Places | None] = field(default_factory=list, repr=False, compare=False)
    lasting: list[Tree] = field(default_factory=list, repr=False, compare=False)
    _weights: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def train(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Iterator[Chunk]:
        """Yield chunks of clients whose uploads are merged together."""
        model = max(1, num_bytes(broadcast.params) // len(broadcast.round))
        fitting, parallel = CHUNK_BYTES // model, self.parallel
        size = parallel * max(1, fitting // parallel)
        own = {trial: row(broadcast, trial) for trial in {b.trial for b in batches}}
        rule, places = self.program.rule, None
        origin = None if self.subtracts else common_origin(rule, batches, broadcast)
        # Steps on lists of tensors take numbers of the host.
        numbers = tree_map(_on_host if takes_out(rule) else Tensor.detach, broadcast.numbers)
        rules = {trial: bind(rule, row(numbers, trial)) for trial in own}
        facts = torch.tensor([*self.program.facts(batches), [len(b.stream) for b in batches]])
        facts = facts.to(self.program.device, non_blocking=True)
        if origin is not None:
            together = max(fitting, min(TOGETHER, TOGETHER_BYTES // model))
            most = min(parallel * max(1, together // parallel), len(batches))
            if not self.kept or (self.kept[0] is not None and len(self.kept[0][2]) < most):
                self.kept[:] = [self._places(own[batches[0].trial].params, most)]
            if (places := self.kept[0]) is not None:
                size = most
        for first in range(0, len(batches), size):
            part = list(range(first, min(first + size, len(batches))))
            clients = [
                (rules[b.trial], b, own[b.trial], row(memory, i), facts[:, i].unbind(),
                 origin is None, places and places[2][i - first])
                for i, b in zip(part, batches[first:], strict=False)
            ]  # fmt: skip
            outcomes = self._train_part(clients)
            all_ = row(outcomes[0], None) if len(part) == 1 else stack(outcomes)
            models = None
            if places is not None and origin is not None:
                all_ = all_._replace(upload=Upload(row(places[1], slice(len(part)))))
                models = Models(places[0][: len(part)], origin)
            elif origin is not None:
                models = Models(tree.flatten_rows(all_.upload.delta)[0], origin)
            yield Chunk(part, [*range(len(part))], all_, models)

    def _train_part(self, clients: list[tuple[Any, ...]]) -> list[Outcome]:
        if self.parallel == 1:
            return [self._train_one(*client) for client in clients]
        idle: SimpleQueue[Sequential] = SimpleQueue()
        for twin in self.twins:
            idle.put(twin)
        learns = torch.is_grad_enabled()

        def train(client: tuple[Any, ...]) -> Outcome:
            twin = idle.get()
            try:
                with torch.set_grad_enabled(learns):  # new threads begin with True
                    return twin._train_one(*client)
            finally:
                idle.put(twin)

        # Some kernels of a new thread would use all cores.
        one: Any = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with threads(1), ThreadPoolExecutor(self.parallel, **one) as pool:
            return list(pool.map(train, clients))

    @functools.cached_property
    def twins(self) -> "list[Sequential]":
        """Engines for threads, each with a copy of the module, which a pass changes for a while."""
        own = self.program.objective
        models = [own.model.twin() for _ in range(self.parallel)]
        made = [replace(self.program, objective=replace(own, model=model)) for model in models]
        return [Sequential(program, self.path, self.subtracts) for program in made]

    def _train_one(
        self, rule: ClientRule, batch: ClientBatch, sent: Broadcast, memory: State,
        facts: Sequence[Tensor], subtract: bool, place: Tree | None,
    ) -> Outcome:  # fmt: skip
        program, stream, given = self.program, batch.stream, place is not None
        parts = self._batches(stream)
        context = program.context(sent, memory, *facts[:-1])
        passed = () if rule.full_pass == "never" else self._full_pass(batch, rule.start(context))
        work = local.start(rule, context, passed)
        if program.objective.model.direct:  # a pass may change them: not the server's own
            work = work._replace(params=work.params.map(torch.clone))

        def loss_of(params: Tree, examples: Batch) -> tuple[Tensor, Tree]:
            with torch.enable_grad():
                if rule.own_loss:
                    return local.client_loss(rule, program.objective, context, params, examples)
                return program.objective.train(params, examples, statistics)

        def apply(function: Callable[..., Any], *args: Any) -> Any:
            found = rule.step(*args, *out) if function is local.step else function(rule, *args)
            leaves(found)  # a product must not wait until the next step has changed its factors
            return found

        statistics: dict[str, Tensor] = {}
        stays = place is None and self._moves and takes_out(rule)
        if stays:
            place = self._lasting(work.params)
            work = work._replace(params=place)
        elif place is None and (alone := self._places(sent.params, 1)) is not None:
            place = alone[2][0]
        out = [] if place is None else [place]
        if out:
            if rule.gradients_per_step == 1:  # only the first gradient of a batch moves them
                names = program.objective.model.running
                statistics = {n: out[0][n].detach().copy_(work.params[n]) for n in names}
            if leaves(work.scratch):
                work = work._replace(scratch=unshared(work.scratch, context))
        t = 0
        with noted(lambda: self._at(batch, f"local step {t + 1}")), torch.set_grad_enabled(not out):
            for t in range(len(stream)):
                gradient = functools.partial(self._gradient, loss_of, batch=next(parts))
                after = local.full_step(rule, apply, gradient, context, work.params, work.scratch)
                work = (local.count if rule.uses_epoch_end else local.move)(work, *after)
                if rule.uses_epoch_end and stream.closes[t]:
                    full = rule.full_pass == "epochs"
                    seen = self._full_pass(batch, work.params).loss if full else None
                    work = local.close_epoch(rule, work, torch.ones_like(work.active), seen)
                    if not bool(work.active):
                        break
        if not rule.uses_epoch_end:
            work = work._replace(steps=facts[-1])
        for all_ in out:
            for name, trained in work.params.items():  # others are statistics, or all of no step
                if trained.data_ptr() != all_[name].data_ptr():
                    all_[name].detach().copy_(trained)
            mine = all_.map(lambda leaf: leaf.detach().clone() if stays else leaf.detach())
            work = work._replace(params=Tree({}) if given else mine)
        return local.finish(rule, context, work, subtract=subtract)

    def _places(self, params: Tree, number: int) -> Places | None:
        """Make memory for models of clients, if they are to be trained in place."""
        program, one_type = self.program, len({leaf.dtype for leaf in params.values()}) == 1
        stays = not (program.objective.model.direct or self._moves)
        fits = one_type and stays and takes_out(program.rule)
        return rows_like(params, number) if fits else None

    @property
    def _moves(self) -> bool:
        """Tell whether cuDNN moves weights that it has not seen before to memory of its own."""
        model = self.program.objective.model
        return self.program.device.type != "cpu" and model.relocates and not model.direct

    def _lasting(self, params: Tree) -> Tree:
        """Copy a model to the memory of all clients, whose tensors cuDNN has seen before."""
        if not self.lasting:
            self.lasting.append(params.map(lambda leaf: leaf.detach().clone().requires_grad_()))
            join_weights(self.program.objective.model.module, self.lasting[0])
        [place] = self.lasting
        with torch.no_grad():
            torch._foreach_copy_(leaves(place), [params[name] for name in place])
        return place

    def _batches(self, stream: Stream, divisor: int = 0) -> Iterator[Batch]:
        """Gather one batch after another; examples weigh ``1 / divisor``, or sum to one."""
        program, keyed = self.program, self.program.objective.model.needs_key
        indices = torch.from_numpy(stream.indices).to(program.device, non_blocking=True).unbind()
        kind: Any = {"dtype": program.dtype, "device": program.device}
        keys = torch.from_numpy(stream.keys).to(program.device, non_blocking=True) if keyed else ()
        for t, real in enumerate(stream.counts.tolist()):
            x, y = program.batch_inputs(indices[t][:real])
            if (sizes := (real, divisor)) not in self._weights:
                self._weights[sizes] = torch.full((real,), 1 / (divisor or real), **kind)
            yield Batch(x, y, self._weights[sizes], keys[t] if keyed else ())

    def _full_pass(self, batch: ClientBatch, params: Tree) -> FullPass:
        program, loss = self.program, next(iter(params.values())).new_zeros(())
        first = int(program.data.offsets[batch.client])
        stream = full_pass(program.full_pass_size, first, batch.examples)
        parts, timing = self._batches(stream, batch.examples), program.rule.full_pass
        with noted(lambda: self._at(batch, "full pass")):
            copy = params.map(torch.clone) if program.objective.model.direct else params
            given = program.objective.eval_loss, copy, parts, loss, timing, self._gradient
            return local.add_full_pass(*given)

    @property
    def _gradient(self) -> Callable[..., tuple[Tensor, Tree]]:
        model = self.program.objective.model
        return functools.partial(own_gradient, model) if model.direct else eager_gradient

    def _at(self, batch: ClientBatch, what: str) -> str:
        return f"client {self.program.data.names[batch.client]!r}, {what}, engine {self.path!r}"


def takes_out(rule: ClientRule) -> bool:
    """Tell whether steps of a rule can write the model to memory of the engine."""
    return all("out" in inspect.signature(type(one).step).parameters for one in chain(rule))


def common_origin(
    rule: ClientRule, batches: list[ClientBatch], broadcast: Broadcast
) -> list[Tensor] | None:
    """Return the global model in parts, if uploads are only its difference from clients' models."""

    def plain(one: Any) -> bool:
        if isinstance(one, PartsClient):
            return not (one.split.personal or one.split.frozen or one.split.own)
        return type(one).finish in (ClientRule.finish, Wrapper.finish)

    trials, types = {b.trial for b in batches}, {leaf.dtype for leaf in leaves(broadcast.params)}
    if len(trials) > 1 or len(types) > 1 or not all(map(plain, chain(rule))):
        return None
    alone = len(broadcast.round) == 1
    return tree.flat_parts(broadcast.params if alone else row(broadcast.params, *trials))
