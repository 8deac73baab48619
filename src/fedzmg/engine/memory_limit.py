"""How many clients fit on a GPU at once, by a measured model of bytes per client."""

from __future__ import annotations

import math

import torch

from fedzmg.contract import State
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.round import Broadcast, Program
from fedzmg.engine.vectorized import MIN_WIDTH, Vectorized
from fedzmg.tree import num_bytes, row

SHARE = 0.85
"""Of the free memory, what clients may take; the rest is for evaluation and for fragments."""
ENOUGH = 1.25e9
"""Bytes of weights of clients that train at once: with more of them each is hardly faster (seen on
an H200: 0.069 ms a step at 0.9 GB, 0.065 at 2.4, 0.063 at 7), and small parts follow a pack that
loses trials."""


def clients_that_fit(
    program: Program, entries: list[ClientBatch], sent: Broadcast, memory: State
) -> int | None:
    """How many clients of this program should train at once on its device; None: no limit is known.

    One step of few clients and one of a cohort are run; what the second needs beyond the first is
    what clients cost. Buffers that keep their place hold each client's state once more.
    """
    few = max(MIN_WIDTH, len(entries) // 2)
    if program.device.type != "cuda" or len(entries) <= few:
        return None
    engine = Vectorized(program)
    short = [entry._replace(stream=entry.stream[:1]) for entry in entries]
    peaks = [
        _peak(engine, short[:count], sent, row(memory, list(range(count))))
        for count in (few, len(short))
    ]
    model = num_bytes(sent.params) // len(sent.round)
    each = max((peaks[1] - peaks[0]) / (len(short) - few), model) + 3 * model
    free, _ = torch.cuda.mem_get_info(program.device)
    idle = torch.cuda.memory_reserved(program.device) - torch.cuda.memory_allocated(program.device)
    room = SHARE * (free + idle) / each
    return max(MIN_WIDTH, math.floor(min(room, max(ENOUGH / model, len(entries)))))


def even(total: int, limit: int | None) -> int | None:
    """The size of equal chunks of at most ``limit``: fewest chunks, so fewest widths to compile."""
    if limit is None or total <= limit:
        return None
    return math.ceil(total / math.ceil(total / limit))


def _peak(engine: Vectorized, entries: list[ClientBatch], sent: Broadcast, memory: State) -> int:
    device = engine.program.device
    for _ in engine.train(entries, sent, memory):  # libraries take their workspaces
        pass
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for _ in engine.train(entries, sent, memory):
        pass
    return torch.cuda.max_memory_allocated(device) - before
