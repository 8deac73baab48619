"""Clients with poisoned updates: named in records, logs and reports, rejected by the guard."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedzmg import Federation, InputError, Task, Trial, simulate
from fedzmg.data.federated import Examples
from fedzmg.data.plan import ClientBatch, full_pass
from fedzmg.engine import aggregate
from fedzmg.engine.aggregate import Merger
from fedzmg.engine.local import Chunk, Outcome
from fedzmg.engine.sums import FEWEST, OUTLIER
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.messages import Upload
from fedzmg.report.tables.clients import uploads
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result
from fedzmg.simulation.records import MOST_NAMED, unusual_uploads
from fedzmg.terminal.live import Display
from fedzmg.terminal.render import Terminal
from fedzmg.tree import Tree

aten = torch.ops.aten
CLIENTS, EACH, BAD = 6, 20, 4
FEDAVG = [Trial.of("fedavg", client_lr=0.1)]


def blobs(poison: float = 1.0) -> Task:
    """Two classes that a line separates; the inputs of one client are multiplied."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, CLIENTS * EACH)
    x = rng.normal(size=(len(y), 3)) + 3.0 * (2 * y[:, None] - 1)
    owners = np.repeat([f"client-{i}" for i in range(CLIENTS)], EACH)
    test = (x.astype(np.float32).copy(), y)
    x[owners == f"client-{BAD}"] *= poison
    return Task.from_arrays(
        nn.Linear(3, 2), x.astype(np.float32), y, owners, test=test, cohort=CLIENTS, rounds=3
    )


@given(
    st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(0, 1e9)), min_size=1, max_size=9),
    st.integers(1, 2),
)
def test_outliers_are_those_of_numpys_median(found: list[float | None], parts: int) -> None:
    """None is a client without an upload, NaN one whose upload is not finite."""
    owners = [None if norm is None else i for i, norm in enumerate(found)]
    norms = [math.nan if norm is None else norm for norm in found]
    finite = [norm for norm in norms if not math.isnan(norm)]
    median = float(np.median(finite)) if len(finite) >= FEWEST else 0.0
    expected = {
        str(i): math.inf if math.isnan(norm) else pytest.approx(norm / median, rel=1e-5)
        for i, norm in enumerate(norms)
        if owners[i] is not None and (math.isnan(norm) or (median > 0 and norm / median > OUTLIER))
    }
    rows = norms + [0.0 if norm == norm else norm for norm in norms] * (parts - 1)
    assert dict(unusual_uploads(rows, owners, [str(i) for i in range(9)])) == expected


def test_a_poisoned_client_is_flagged_and_with_a_guard_has_no_effect() -> None:
    [clean], [spoilt] = (simulate(blobs(factor), FEDAVG) for factor in (1.0, -1e8))
    [guarded] = simulate(blobs(-1e8), FEDAVG, federation=Federation(guard=True))
    assert clean.metrics[-1] > 0.95 > 0.5 > spoilt.metrics[-1]
    assert not any(r.flagged or r.rejected or r.dropped for r in clean.records)
    [(name, ratio)] = spoilt.records[0].flagged
    assert name == f"client-{BAD}"
    assert ratio > 1e7
    assert (spoilt.records[0].rejected, spoilt.records[0].clients) == ((), CLIENTS)
    for record in guarded.records:
        assert [name for name, _ in record.rejected] == [f"client-{BAD}"]
        assert (record.flagged, record.dropped, record.clients) == ((), 1, CLIENTS - 1)
        assert record.bytes_up == clean.records[0].bytes_up
    # A client whose upload is not finite is left out, too.
    task = blobs()
    x = task.train.examples.x.clone()
    x[BAD * EACH : (BAD + 1) * EACH] = math.nan
    data = replace(task.train, examples=Examples(x, task.train.examples.y))
    [without] = simulate(replace(task, train=data), FEDAVG)
    assert without.records[0].rejected == ((f"client-{BAD}", math.inf),)
    for a, b in zip(guarded.params.values(), without.params.values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match="guard = 1"):
        Federation(guard=1)  # type: ignore[arg-type]


class NoRead(TorchDispatchMode):
    """Rejects every operation for which a host would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (aten._local_scalar_dense, aten.nonzero, aten.equal)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("guard", [False, True])
def test_merge_reads_nothing_back(guard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "is_at_hand", lambda _: False)  # as on a GPU
    stream, norms = full_pass(1, 0, 1), [1.0, 2.0, math.nan, 1e9, 3.0]
    merger = Merger(
        [ClientBatch(0, i, 1, stream) for i in range(5)], 1, by_examples=True, guard=guard
    )
    upload = Upload(Tree({"w": torch.tensor(norms)[:, None]}), total=torch.ones(5))
    outcome = Outcome(upload, (), torch.ones(5, dtype=torch.int64), torch.ones(5))
    with NoRead():
        merger.add(Chunk(list(range(5)), list(range(5)), outcome))
        merger.finish()
        cohort = merger.cohort(5, torch.ones(1))
    assert (merger.sums.clients.tolist(), merger.sums.dropped.tolist()) == (
        ([3], [2]) if guard else ([4], [1])
    )
    assert cohort.delta["w"].item() == (2.0 if guard else pytest.approx(2.5e8))
    assert cohort.total.item() == (3.0 if guard else 4.0)


def test_log_report_and_terminal_name_the_client(tmp_path: Path) -> None:
    task, text = blobs(-1e8), io.StringIO()
    spec = RunSpec(task=task.name, algorithm="fedavg", client={"lr": 0.1})
    for guard in (False, True):
        path, fate = tmp_path / str(guard), "rejected" if guard else "flagged"
        own = spec.with_settings({"federation.guard": guard})
        with Display(Terminal(file=text, width=200), "accuracy") as display:
            [history] = run_pack(task, [own], [path], progress=display)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        named = [{"flagged", "rejected"} & line.keys() for line in lines]
        assert named[0] == {fate}
        directory = RunDirectory(path)
        assert directory.records() == list(history.records)
        assert directory.spec().federation.guard == guard
        assert ("federation" in (path / "spec.toml").read_text()) == guard
        [study] = read([path]).studies
        table = uploads(study_result(study))
        assert table is not None
        [row] = table.records
        assert (row["client"], row[fate]) == (f"client-{BAD}", sum(map(bool, named)))
        [said] = [line for line in text.getvalue().splitlines() if fate in line]
        assert f"client-{BAD}" in said
    run_pack(blobs(), [spec], [tmp_path / "clean"])
    assert "flagged" not in (tmp_path / "clean" / "metrics.jsonl").read_text()
    [study] = read([tmp_path / "clean"]).studies
    assert uploads(study_result(study)) is None


@pytest.mark.slow
def test_many_rejected_clients_fit_into_a_log(tmp_path: Path) -> None:
    many = 3 * MOST_NAMED
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4 * many, 3)).astype(np.float32), np.arange(4 * many) % 2
    # The longest line: names of characters that JSON writes as twelve.
    owners = np.repeat([f"{i:04d}" + "\U0001f600" * 200 for i in range(many)], 4)
    test = (np.ones((4, 3), np.float32), np.arange(4) % 2)
    task = Task.from_arrays(nn.Linear(3, 2), x, y, owners, test=test, cohort=many, rounds=12)
    task.train.examples.x[: 4 * 2 * MOST_NAMED] = math.nan  # in place: arrays are checked
    spec = RunSpec(task=task.name, algorithm="fedavg", client={"lr": 0.1})
    [history] = run_pack(task, [spec], [tmp_path / "run"])
    assert [(len(r.rejected), r.dropped) for r in history.records] == 12 * [(50, 100)]
    assert RunDirectory(tmp_path / "run").records() == list(history.records)
    [study] = read([tmp_path / "run"]).studies
    assert len(study.runs[0].unusual) >= MOST_NAMED
