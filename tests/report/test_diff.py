"""Differences that ``fedzmg diff`` finds: every kind, and none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fedzmg.errors import InputError
from fedzmg.results.diff import aspects, compare

Write = Callable[..., Path]
Line = Callable[..., dict[str, Any]]


def test_options_versions_and_data_are_told_apart(write_run: Write) -> None:
    one = write_run("a", "fedzmg", 0, [0.5] * 3)
    facts = {"torch": "9.9", "started": "later", "command": "x", "data_sha256": "f" * 64}
    other = write_run("b", "fedavg", 1, [0.5] * 3, lr=0.3, threshold=0.7, manifest=facts)
    found = compare(one, other)
    assert {(c.aspect, c.key, c.left, c.right) for c in found.changes} == {
        ("options", "algorithm", "fedzmg", "fedavg"),
        ("options", "client.lr", 0.1, 0.3),
        ("spec", "seed", 0, 1),
        ("spec", "protocol.threshold", 0.5, 0.7),
        ("versions", "torch", "2.13.0", "9.9"),
        ("data", "data_sha256", "a" * 64, "f" * 64),
    }
    assert [found.differs([aspect]) for aspect in ("curves", "spec")] == [False, True]
    assert not found.differs(aspects("curves,runs"))


@pytest.mark.parametrize(("device", "differs"), [("cpu", False), ("cuda", True)])
def test_packing_counts_only_where_it_moves_bits(
    write_run: Write, device: str, differs: bool
) -> None:
    facts = {"device": device, "pack": ["fedzmg/seed-0"], "seconds": 1.0}
    one = write_run("a", "fedzmg", 0, [0.5] * 3, manifest=facts)
    packed = {**facts, "pack": ["fedzmg/seed-0", "fedzmg/seed-1"], "seconds": 2.0}
    other = write_run("b", "fedzmg", 0, [0.5] * 3, manifest=packed)
    assert compare(one, other).differs() is differs


def test_curves_first_difference_and_its_size(write_run: Write, log_line: Line) -> None:
    lines = [log_line(r, r / 10, train_loss=1 / r) for r in range(1, 6)]
    one = write_run("a", "fedzmg", 0, [], lines=lines)
    moved = [dict(line) for line in lines]
    moved[2]["train_loss"] += 2**-40
    moved[4]["metric"] = "nan"
    for line in moved:
        line["seconds"] = 9.0  # times never count
        line["brand_new"] = 1  # nor does what only one version logs
    other = write_run("b", "fedzmg", 0, [], lines=moved)
    [pair] = compare(one, other).curves
    assert (pair.first, pair.fields, pair.identical) == (3, ("train_loss",), False)
    assert pair.largest["train_loss"] == (1 / 3 + 2**-40) - 1 / 3
    assert pair.largest["metric"] == float("inf")
    assert pair.largest["loss"] == 0.0
    assert json.loads(json.dumps(compare(one, other).as_dict(), allow_nan=False))


def test_shorter_and_resumed_runs(write_run: Write, log_line: Line) -> None:
    one = write_run("a", "fedzmg", 0, [0.1, 0.2], rounds=4)
    other = write_run("b", "fedzmg", 0, [0.1, 0.2, 0.3, 0.4])
    found = compare(one, other)
    [pair] = found.curves
    assert (pair.first, pair.shared, pair.rounds, pair.identical) == (None, 2, (2, 4), False)
    # Half a run has no final score.
    assert (dict(found.scores[0].left), dict(found.scores[0].right)) == ({}, {"seed 0": 0.4})
    # Repeated lines of a resumed run do not count.
    lines = [log_line(r, r / 10) for r in (1, 2, 3, 4)]
    again = [lines[0], log_line(2, 0.9), *lines[1:]]
    assert not compare(write_run("c", "fedzmg", 0, [], lines=again, rounds=4), other).differs()


def test_paired_test_over_shared_seeds(study: Path) -> None:
    found = compare(study / "fedzmg", study / "fedavg")
    [pair] = found.scores
    assert pair.name == "fedzmg, fedavg"
    assert pair.test is not None
    expected = stats.ttest_rel([0.6, 0.8, 1.0], [0.5, 0.6, 0.7])
    assert pair.test.p == pytest.approx(expected.pvalue)
    assert pair.test.n == 3
    assert [c.key for c in found.changes] == ["algorithm"]
    assert found.changes[0].runs == ("seed-0", "seed-1", "seed-2")


def test_runs_are_paired_by_place_then_by_algorithm_and_seed(study: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(study / "fedzmg" / "seed-1", other / "elsewhere")
    shutil.copytree(study / "fedavg" / "seed-0", other / "fedavg" / "seed-0")
    found = compare(study, other)
    assert [pair.name for pair in found.curves] == ["fedavg/seed-0", "fedzmg/seed-1"]
    assert len(found.only_left) == 4
    assert not found.differs(["curves", "spec", "options", "versions", "data"])
    assert found.differs(["runs"])


def test_bad_input(tmp_path: Path, study: Path, write_run: Write) -> None:
    with pytest.raises(InputError, match="did you mean 'curves'"):
        aspects("curve")
    with pytest.raises(InputError, match="none is not a directory"):
        compare(tmp_path / "none", study)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no run"):
        compare(study, tmp_path / "empty")
    write_run("x/one", "fedadam", 0, [0.5])
    write_run("x/two", "fedadam", 1, [0.5])
    with pytest.raises(InputError, match="no run in common"):
        compare(study, tmp_path / "x")
    shutil.copytree(study, tmp_path / "other")
    log = tmp_path / "other" / "fedavg" / "seed-0" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"loss": 1.0', '"loss": "high"', 1))
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1"):
        compare(study, tmp_path / "other")


def test_diverged_runs_have_no_score_and_leave_the_other_seeds_to_the_test(
    study: Path, tmp_path: Path, log_line: Line
) -> None:
    shutil.copytree(study, tmp_path / "other")
    log = tmp_path / "other" / "fedavg" / "seed-0" / "metrics.jsonl"
    lines = [log_line(r, 0.0, diverged=r > 3) for r in range(1, 11)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fedavg, fedzmg = compare(study, tmp_path / "other").scores
    assert (fedavg.equal, fedzmg.equal) == (False, True)
    assert json.dumps(fedavg.right["seed 0"]) == "NaN"
    assert fedavg.test is not None
    assert fedavg.test.n == 2
