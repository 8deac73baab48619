"""Client memory: slots of a checkpoint are never overwritten, and the process stays small."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedzmg import Task
from fedzmg.engine import client_memory
from fedzmg.engine.choose import EnginePlanner
from fedzmg.engine.client_memory import MemoryStore, Slots
from fedzmg.errors import InputError
from fedzmg.simulation import Simulation, Trial
from fedzmg.tree import Tree, row

CLIENTS = 4


def slots(path: Path) -> Slots:
    return Slots(path, CLIENTS, 2, np.float64)


actions = st.lists(
    st.one_of(
        st.sets(st.integers(0, CLIENTS - 1), min_size=1),
        st.sampled_from(["checkpoint", "crash", "damage"]),
    ),
    max_size=30,
)


@given(actions)
def test_every_crash_leads_back_to_either_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, actions: list[object]
) -> None:
    """A model of the store: a dict now, and the dicts at the last two checkpoints."""
    path = tmp_path_factory.mktemp("memory")
    store = slots(path)
    now: dict[int, float] = {}
    kept, round_ = [(0, dict(now))] * 2, 0
    for action in actions:
        if action == "checkpoint":
            store.flush()
            kept = [kept[1], (round_, dict(now))]
            store.committed = (kept[0][0], round_)
        elif action in ("crash", "damage"):
            store = slots(path)
            kept = kept if action == "crash" else kept[:1] * 2
            round_, now = kept[1][0], dict(kept[1][1])
            store.rewind(round_)
            store.committed = (kept[0][0], round_)
        else:
            round_ += 1
            for client in action:  # type: ignore[attr-defined]
                now[client] = 100.0 * round_ + client
                store.write(client, round_, np.array([now[client], -1.0]))
        assert store.visited() == sorted(now)
        for client in range(CLIENTS):
            found = store.read(client)
            assert (None if found is None else found[0]) == now.get(client)


def test_half_written_row_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = slots(tmp_path)
    store.write(1, 1, np.array([1.0, 1.0]))
    store.committed = (1,)

    def power_loss(self: object, index: int, values: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        rows = store._rows
        patch.setattr(rows, "write", power_loss.__get__(rows))
        with pytest.raises(KeyboardInterrupt):
            store.write(1, 2, np.array([2.0, 2.0]))
    again = slots(tmp_path)
    again.rewind(1)
    found = again.read(1)
    assert found is not None
    assert found.tolist() == [1.0, 1.0]


def fresh() -> object:
    """Two trials, a tree and a whole number each."""
    return Tree({"a": torch.zeros(2, 3)}), torch.zeros(2, dtype=torch.int64)


def test_store_keeps_types_and_trials_apart() -> None:
    store = MemoryStore(fresh(), CLIENTS)
    owners = [(0, 2), (1, 2), (0, 3)]
    rows = Tree({"a": torch.arange(9.0).reshape(3, 3)}), torch.tensor([7, 8, 9])
    store.write(owners, 1, store.flat(rows), [True, True, False])
    tree, count = store.read([(1, 2), (0, 2), (0, 3)])
    assert tree["a"].tolist() == [[3, 4, 5], [0, 1, 2], [0, 0, 0]]
    assert (count.tolist(), count.dtype) == ([8, 7, 0], torch.int64)
    assert store.of_trial(0).keys() == {2}
    assert store.kept_bytes == 4 * 4


@given(actions)
def test_memory_that_a_gpu_holds_is_that_of_files(
    tmp_path_factory: pytest.TempPathFactory, actions: list[object]
) -> None:
    """Both stores have the same memories after any writes, checkpoints and crashes."""
    places = [tmp_path_factory.mktemp("memory") for _ in range(4)]
    owners, kept, round_ = [(t, c) for t in range(2) for c in range(CLIENTS)], 0, 0

    def opened(held: bool) -> MemoryStore:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_memory, "_room", lambda _: held * 10**6)
            return MemoryStore(fresh(), CLIENTS, places[2 * held : 2 * held + 2])

    stores = [opened(False), opened(True)]
    for action in actions:
        if action == "checkpoint":
            kept = round_
            for store in stores:
                store.flush()
                store.commit(kept)
            assert stores[0].mark(0, kept) == stores[1].mark(0, kept)
        elif action in ("crash", "damage"):
            # A crash loses what is not in files; a run that goes back to a checkpoint does not.
            stores = [opened(False), opened(True)] if action == "crash" else stores
            round_ = kept
            for store, trial in itertools.product(stores, range(2)):
                store.rewind(trial, kept)
        else:
            round_ += 1
            some = sorted((c % 2, c) for c in action)  # type: ignore[attr-defined]
            values = torch.tensor([100.0 * round_ + c for _, c in some])
            written = Tree({"a": values[:, None].expand(-1, 3)}), values.long()
            for store in stores:
                store.write(some, round_, store.flat(written), [c != 3 for _, c in some])
        (tree, count), (other, other_count) = (store.read(owners) for store in stores)
        assert torch.equal(tree["a"], other["a"])
        assert torch.equal(count, other_count)
        assert stores[0].of_trial(1).keys() == stores[1].of_trial(1).keys()


def test_round_without_gpu_memory_for_client_memory_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is repeated from the memories before it, not from those that some chunks have changed."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)).astype(np.float32), rng.integers(0, 3, 40)
    task = Task.from_arrays(
        nn.Linear(5, 3), x, y, np.arange(40) % 8, test=(x, y), cohort=8, batch_size=5, epochs=1
    )
    monkeypatch.setattr(client_memory, "_room", lambda _: 10**9)
    calls, usual = [0], client_memory.flatten_rows

    def flat(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 7:  # one of the store, two of each round, and the second of the third
            raise torch.OutOfMemoryError
        return usual(*args)  # type: ignore[arg-type]

    found = []
    for function in (usual, flat):
        monkeypatch.setattr(client_memory, "flatten_rows", function)
        simulation = Simulation(
            task, [Trial.of("scaffold", 0)], rounds=4, device=torch.device("cpu"),
            dtype=torch.float64, engine=EnginePlanner("vectorized", chunk=4),
        )  # fmt: skip
        for _ in range(4):
            simulation.run_round()
        found.append(simulation)
    assert [simulation.chunk for simulation in found] == [4, 2]
    for name, leaf in found[0].snapshot.params.items():
        torch.testing.assert_close(found[1].snapshot.params[name], leaf, rtol=0, atol=1e-12)


def test_full_temporary_folder_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary, kept = MemoryStore(fresh(), CLIENTS), MemoryStore(fresh(), CLIENTS, [tmp_path] * 2)
    written = [(0, 2)], 1, kept.flat(row(fresh(), slice(1))), [True]
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InputError, match=f"{tmp_path}.*TMPDIR"):
        temporary.write(*written)
    with pytest.raises(OSError, match="space"):
        kept.write(*written)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"missing.*TMPDIR"):
        MemoryStore(fresh(), CLIENTS)


SCRIPT = """
import resource, sys
import torch
from fedzmg.engine.client_memory import MemoryStore
from fedzmg.tree import Tree
width, clients = 422_511, 3_400
store = MemoryStore(Tree({"c": torch.zeros(1, width)}), clients)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for round_ in range(1, int(sys.argv[1]) + 1):
    cohort = [(0, (37 * (10 * round_ + i)) % clients) for i in range(10)]
    memory = store.read(cohort)
    new = memory.map(lambda leaf: leaf + round_)
    store.write(cohort, round_, store.flat(new), [True] * 10)
kept = float(store.read([cohort[0]])["c"][0, -1])
assert kept == round_, (kept, round_)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="reads the peak of a POSIX process")
def test_memory_of_3400_clients_of_a_large_model_stays_off_the_process() -> None:
    """6 GB in float32 for the whole population; the process holds a few cohorts at most."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "5"], capture_output=True, text=True, check=True
    )
    cohort = 10 * 422_511 * 4 / 2**20
    assert int(done.stdout) < 8 * cohort
