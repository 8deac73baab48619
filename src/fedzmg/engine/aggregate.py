"""Merge uploads into one cohort per trial.

Uploads are added in the order of the cohort whatever the chunks are, so packing trials together
or splitting a cohort changes no bit. Every upload is one flat row while it is merged. A guard
that rejects outliers keeps all rows until their median is known; so does an aggregator.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedzmg.data.columns import Ids
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Chunk
from fedzmg.engine.sums import OUTLIER, MergedPart, Sums, add_models, largest, ratios_to_median
from fedzmg.messages import Cohort, Rows, Upload
from fedzmg.tree import Flat, State, flat_form, flatten_rows, leaves, row, tree_map, unflatten_rows


class Tables(NamedTuple):
    """Positions of a chunk's clients in the merge; entry ``i`` is the chunk's ``i``-th client."""

    rows: Tensor  # row of every entry in the outcomes
    weights: Tensor  # weights of entries before the server changes them
    order: Tensor  # entry that every trial adds at every step; -1: none


class _Uploads(NamedTuple):
    """Flat uploads of a chunk by row of its outcomes; ``steps``, ``loss``, ``weights`` by entry."""

    tables: Tables
    trials: slice
    averaged: Tensor
    total: Tensor
    steps: Tensor
    loss: Tensor
    weights: Tensor


def is_at_hand(values: Tensor) -> bool:
    """Tell whether the host can read values without waiting for a device."""
    return values.device.type == "cpu"


class Merger:
    """Adds the uploads of one round, chunk by chunk; :meth:`finish` follows the last one.

    Args:
        batches: clients of the round, sorted by trial.
        trials: number of trials.
        by_examples: weight clients by their examples instead of equally.
        guard: reject outliers like uploads that are not finite.
        weigh: computes weights from client numbers and given weights, both trials x clients.
        fewest: uploads that an aggregator needs; the others of a trial with fewer are dropped.
            Zero: there is no aggregator.
        by_client: the server asks for the numbers of clients.
    """

    sums: Sums  # everything merged so far
    upload: Upload  # uploads of some clients, for their size
    clients: list[list[int | None]]  # clients of every trial; None: no upload
    losses: Tensor  # mean training losses of these clients; NaN: not merged
    norms: Tensor  # of delta, average and total of these clients; NaN: not finite, or none

    def __init__(
        self, batches: list[ClientBatch], trials: int, *, by_examples: bool, guard: bool = False,
        weigh: Callable[[Tensor, Tensor], Tensor] | None = None, fewest: int = 0,
        by_client: bool = False,
    ) -> None:  # fmt: skip
        self._batches, self._trials, self._guard = batches, trials, guard
        self._weigh, self._fewest, self._by_client = weigh, fewest, by_client
        self._sends = [len(b.stream) > 0 for b in batches]  # without a batch nothing is sent
        self._usual = [
            (float(b.examples) if by_examples else 1.0) * sends
            for b, sends in zip(batches, self._sends, strict=True)
        ]
        """Weights on the host; zero for a client that sends nothing."""
        self._weighed_all: Tensor | None = None  # weights that the server computed from these
        self._forms: tuple[Flat, Flat] | None = None
        self._order: list[int] = []  # batches that the facts belong to
        self._facts: list[Tensor] = []  # loss and norms of every client, chunk by chunk
        self._each: list[State] = []
        self._kept: list[_Uploads] = []
        self.accepted: list[Tensor] = []  # flags of the clients whose uploads count, chunk by chunk

    def add(self, chunk: Chunk) -> None:
        """Merge a chunk, or keep it until all chunks are known.

        An upload with a value that is not finite, or a weight below zero, is dropped and counted.
        Nothing here waits for the device.
        """
        if self._add_models(chunk):
            self.upload = chunk.outcomes.upload
            return
        self.add_rows(chunk, *self.tables(chunk))
        self._order += chunk.batches

    def begin_whole(self, chunk: Chunk) -> tuple[slice, Tables, Tensor]:
        """Make the tables of a chunk that is the whole cohort, and the table of :meth:`finish`."""
        self.upload = chunk.outcomes.upload
        trials, tables = self.tables(chunk)
        self._order += chunk.batches
        return trials, tables, _sent(self.line_up(), tables.rows.device)

    def tables(self, chunk: Chunk) -> tuple[slice, Tables]:
        """Make the tables of a chunk, and the trials that have clients in it."""
        trials, order = self._schedule(chunk.batches)
        weights = torch.tensor([self._usual[i] for i in chunk.batches], dtype=torch.float64)
        made, device = (chunk.rows, weights, order), chunk.outcomes.loss.device
        return trials, Tables(*(_sent(table, device) for table in made))

    def add_rows(self, chunk: Chunk, trials: slice, tables: Tables) -> None:
        """Merge a chunk by its tables."""
        self.upload = chunk.outcomes.upload
        if chunk.models is None:
            averaged, form = flatten_rows((self.upload.delta, self.upload.average))
        else:
            averaged = torch.cat(chunk.models.origin) - chunk.models.rows
            form = flat_form((self.upload.delta, self.upload.average))
        total, total_form = flatten_rows(self.upload.total, like=averaged)
        own_weights = isinstance(self.upload.weight, Tensor)
        if self._forms is None:
            self._begin(form, total_form, averaged, total.shape[1])
            if self._weigh and not own_weights:
                table = self._table(range(len(self._batches)))
                usual = _sent(torch.tensor(self._usual, dtype=torch.float64), averaged.device)
                self._weighed_all = self._weighed(table, self._lined_up([usual], table))
        # The largest absolute value is finite only if all are: this takes one pass, without a mask.
        split = sum(shape.numel() for shape in form.shapes[: len(self.upload.delta)])
        parts = (averaged[:, :split], averaged[:, split:], total)
        norms = [largest(part).double() for part in parts if part.shape[1]]
        facts = torch.stack([chunk.outcomes.loss.double(), *norms])
        finite, each = facts[1:].isfinite().all(0), leaves(self.upload.each)
        for leaf in each:
            finite &= leaf.isfinite().reshape(len(leaf), -1).all(1)
        # Zero times a value that is not finite is not zero, so such a row is blanked first. A GPU
        # always blanks: asking whether there is such a row would wait for the device.
        for part in (averaged, total):
            if part.shape[1] and not (is_at_hand(part) and bool(finite.all())):
                part.masked_fill_(~finite[:, None], 0)
        rows, weights = tables.rows, tables.weights
        merged = finite[rows] & (weights > 0)
        if own_weights:
            weights = self.upload.weight[rows].double()
        elif self._weighed_all is not None:
            weights = self._weighed_all[self._index(chunk.batches)]
        if own_weights or self._weigh:
            merged &= _valid(weights, averaged)
        facts, steps = facts[:, rows], chunk.outcomes.steps[rows]
        self._facts.append(torch.where(merged, facts, nan))
        if each:
            self._each.append(row(self.upload.each, rows))
        uploads = _Uploads(tables, trials, averaged, total, steps, facts[0], weights)
        if self._guard or self._fewest or (self._weigh and own_weights):
            self._kept.append(uploads)
        else:
            self._merge(uploads, merged)

    def _begin(
        self, form: Flat, total_form: Flat, like: Tensor, totals: int, *, empty: bool = False
    ) -> None:
        """Start with sums of zero, as wide as an upload; ``empty``: the first overwrites them."""
        self._forms = form, total_form
        make = like.new_empty if empty else like.new_zeros
        rows, total = make(self._trials, like.shape[1]), like.new_zeros(self._trials, totals)
        weight, loss = like.new_zeros(2, self._trials, dtype=torch.float64)
        clients, dropped, steps = like.new_zeros(3, self._trials, dtype=torch.int64)
        self.sums = Sums(rows, total, weight, clients, dropped, steps, loss)

    def _add_models(self, chunk: Chunk) -> bool:
        """Merge models without subtracting them first; return False if this is not possible."""
        special = self._guard or self._fewest or self._weigh or self._trials > 1
        if special or chunk.models is None or not is_at_hand(chunk.models.rows):
            return False
        if chunk.models.rows.dtype not in (torch.float32, torch.float64):  # those of NumPy
            return False
        weights = [self._usual[i] for i in chunk.batches]
        if self._forms is None:
            form = flat_form((chunk.outcomes.upload.delta, ()))
            self._begin(form, flat_form(()), chunk.models.rows, 0, empty=max(weights) > 0)
        if (added := add_models(self.sums, chunk, weights)) is None:
            return False  # the general path drops what is not finite
        facts, counts = added
        self._facts.append(facts)
        self._order += chunk.batches
        self.accepted.append(counts)
        return True

    def part(self) -> MergedPart:
        """Return the sums so far, for the merger of the whole cohort."""
        known = self._order, self._facts, self._each, self.accepted
        return MergedPart(self.sums, row(self.upload, slice(1)), *known)

    def add_part(self, part: MergedPart, first: int) -> None:
        """Add the sums of clients that begin at position ``first`` of the cohort."""
        self.upload = part.upload
        averaged, form = flatten_rows((self.upload.delta, self.upload.average))
        if self._forms is None:
            self._forms = form, flatten_rows(self.upload.total, like=averaged)[1]
            self.sums = tree_map(torch.clone, part.sums)  # it may belong to another process
        else:
            self.sums = tree_map(torch.add, self.sums, part.sums)
        self._order += [first + position for position in part.order]
        self._facts += part.facts
        self._each += part.each
        self.accepted += part.accepted

    def line_up(self) -> list[list[int]]:
        """Line up the clients of every trial; return their entries, -1 is padding."""
        table = self._table(range(len(self._order)))
        sent = [self._batches[b].client if self._sends[b] else None for b in self._order]
        self.clients = [[sent[entry] if entry >= 0 else None for entry in row] for row in table]
        return table

    def finish(self, table: Any = None) -> None:
        """Sort losses and norms of clients by trial, and merge the uploads that were kept."""
        table = self.line_up() if table is None else table
        facts = self._lined_up(self._facts, table)
        self.losses, self.norms = facts[0], facts[1:]
        if self._kept:
            own = torch.cat([uploads.weights for uploads in self._kept])
            if self._weigh and isinstance(self.upload.weight, Tensor):
                known = self.norms.isfinite().all(0)
                own = self._weighed(table, torch.where(known, self._lined_up([own], table), 0.0))
                valid = self._lined_up([_valid(own, self.sums.averaged)], table)
                self.norms = torch.where(valid, self.norms, nan)
            usual = self.norms.isfinite().all(0)
            if self._guard:
                usual = ratios_to_median(self.norms) <= OUTLIER
            if self._fewest:
                usual = usual & (usual.sum(1, keepdim=True) >= self._fewest)
            self.losses = torch.where(usual, self.losses, nan)
            usual = usual.flatten()[self._places(table)]
            for i, uploads in enumerate(self._kept):
                end = len(uploads.weights)
                self._kept[i] = uploads._replace(weights=own[:end])
                self._merge(self._kept[i], usual[:end])
                own, usual = own[end:], usual[end:]
            if not self._fewest:
                self._kept = []

    def rows(self) -> Rows:
        """Return the accepted updates, sorted by client number, and release the kept rows."""
        order, clients = self._order, [self._batches[batch].client for batch in self._order]
        # A client may be drawn twice: then the number of its batch decides the order.
        table = self._table(sorted(range(len(order)), key=lambda e: (clients[e], order[e])))
        places = self._places(table)
        width = self._kept[0].averaged.shape[1]
        deltas = self.sums.averaged.new_zeros(self._trials * len(table[0]), width)
        weights = self.sums.weight.new_zeros(len(deltas))
        for accepted in self.accepted:
            uploads, chosen = self._kept.pop(0), places[: len(accepted)]
            placed = torch.where(accepted[:, None], uploads.averaged[uploads.tables.rows], 0)
            deltas.index_copy_(0, chosen, placed)
            weights.index_copy_(0, chosen, torch.where(accepted, uploads.weights, 0.0))
            places = places[len(accepted) :]
        shape = (self._trials, len(table[0]))
        return Rows(deltas.reshape(*shape, width), weights.reshape(shape))

    def cohort_sizes(self) -> list[int]:
        """Return the number of clients of every trial."""
        return [*map(Counter(b.trial for b in self._batches).__getitem__, range(self._trials))]

    def _table(self, entries: Iterable[int]) -> list[list[int]]:
        """Line up entries by trial; -1 is padding."""
        own: list[list[int]] = [[] for _ in range(self._trials)]
        for entry in entries:
            batch = self._order[entry] if self._order else entry
            own[self._batches[batch].trial].append(entry)
        return [found + [-1] * (max(map(len, own)) - len(found)) for found in own]

    def _index(self, table: Any) -> Tensor:
        return _sent(table, self.sums.weight.device)

    def _places(self, table: list[list[int]]) -> Tensor:
        """Return the position of every entry in the flat table."""
        return self._index(np.argsort(table, axis=None)[np.sort(table, axis=None) >= 0])

    def _lined_up(self, parts: list[Tensor], table: Any) -> Tensor:
        """Order values by a table, entries on the last axis; NaN or false in padding."""
        blank = False if parts[0].dtype == torch.bool else nan
        padding = parts[0].new_full((*parts[0].shape[:-1], 1), blank)
        return torch.cat([*parts, padding], -1)[..., self._index(table)]

    def _numbers(self, table: list[list[int]]) -> Tensor:
        """Return the numbers of the clients in a table; 0 is padding."""
        batches = self._order or range(len(self._batches))
        return self._index(
            [[self._batches[batches[e]].client if e >= 0 else 0 for e in row] for row in table]
        )

    def _weighed(self, table: list[list[int]], weights: Tensor) -> Tensor:
        assert self._weigh is not None
        found = self._weigh(self._numbers(table), weights.nan_to_num(0.0))
        return found.double().flatten()[self._places(table)]

    def _merge(self, uploads: _Uploads, merged: Tensor) -> None:
        """Add uploads to the sums; ``merged`` flags those that count."""
        averaged, total, places = uploads.averaged, uploads.total, uploads.tables.order
        uploaded = places >= 0
        accepted = uploaded & merged[places]
        weights = torch.where(accepted, uploads.weights[places], 0.0)
        factors = weights.to(averaged.dtype)[:, :, None]
        sums = Sums(*(part[uploads.trials] for part in self.sums))
        # Whole numbers have the same sum in any order, weights of rules do not.
        rounds = self._weigh is not None or isinstance(self.upload.weight, Tensor)
        for part in weights if rounds else [weights.sum(0)]:
            sums.weight.add_(part)
        sums.clients.add_(accepted.sum(0))
        sums.dropped.add_((uploaded & ~accepted).sum(0))
        sums.steps.add_(torch.where(accepted, uploads.steps[places], 0).sum(0))
        losses = torch.where(accepted, uploads.loss[places], 0.0)
        for i, chosen in enumerate(uploads.tables.rows[places]):
            if not self._fewest:
                sums.averaged.add_(averaged[chosen] * factors[i])
            sums.loss.add_(losses[i])
            if total.shape[1]:
                sums.total.add_(torch.where(accepted[i][:, None], total[chosen], 0))
        self.accepted.append(merged)

    def _schedule(self, batches: list[int]) -> tuple[slice, Ids]:
        """Order clients as the cohort; return trials, and each one's entry by step; -1: none."""
        queues: dict[int, list[int]] = {}
        for i in sorted(range(len(batches)), key=batches.__getitem__):
            queue = queues.setdefault(self._batches[batches[i]].trial, [])
            if self._sends[batches[i]]:
                queue.append(i)
        # Batches are sorted by trial, so the trials of a chunk are neighbours.
        trials = slice(min(queues), max(queues) + 1)
        own = [queues.get(trial, []) for trial in range(trials.start, trials.stop)]
        return trials, np.array([*zip_longest(*own, fillvalue=-1)], np.int64).reshape(-1, len(own))

    def cohort(
        self, population: int, round_: Tensor, key: Any = (), delta: Tensor | None = None
    ) -> Cohort:
        """Sum up every trial's uploads; an aggregator's ``delta`` replaces their average."""
        assert self._forms is not None
        sums = self.sums
        if delta is None:
            weight = torch.where(sums.weight > 0, sums.weight, 1.0).to(sums.averaged.dtype)
            delta = sums.averaged.div_(weight[:, None])
        merged, average = unflatten_rows(delta, self._forms[0])
        total = unflatten_rows(sums.total, self._forms[1])
        population_ = torch.full_like(sums.clients, population)
        cohort = Cohort(merged, average, total, sums.clients, population_, round_, key=key)
        if not self._each and not self._by_client:
            return cohort
        table = self._table(sorted(range(len(self._order)), key=self._order.__getitem__))
        valid = self._lined_up(self.accepted, table)
        each = ()
        if self._each:
            index = self._index(table)
            each = tree_map(lambda *own: _blanked(torch.cat(own)[index], valid), *self._each)
        clients = self._numbers(table) if self._by_client else ()
        return cohort._replace(each=each, valid=valid, clients=clients)


def _sent(table: Any, device: torch.device) -> Tensor:
    """Copy a table to a device without waiting for it."""
    return torch.as_tensor(table).to(device, non_blocking=True)


def _blanked(rows: Tensor, valid: Tensor) -> Tensor:
    """Put zeros where an upload does not count."""
    return rows.masked_fill(~valid.reshape(*valid.shape, *[1] * (rows.ndim - 2)), 0)


def _valid(weights: Tensor, like: Tensor) -> Tensor:
    """Tell weights from values that are negative or not finite in the type of ``like``."""
    return weights.to(like.dtype).isfinite() & (weights >= 0)
