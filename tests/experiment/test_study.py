"""Studies: scores as the paper takes them, rates from a grid, and pieces that make a whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import Press, Stop, bare, toy

from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment import run
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import RunDirectory, change_manifest
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import find_rates, run_study, study_packs, study_runs
from fedzmg.experiment.training import TimeLimitReached
from fedzmg.results.runs import Run
from fedzmg.results.scores import finals
from fedzmg.results.study_result import StudyResult, summary
from fedzmg.simulation import History, Record, Simulation, Trial
from fedzmg.storage.formats import read_json, write_json
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree


def spec(**changes: Any) -> StudySpec:
    values: dict[str, Any] = {
        "task": "toy", "algorithms": ["fedzmg", "fedavg"], "seeds": [3, 5], "rounds": 3,
        "eval_every": 2, "rates": "given", "engine": "vectorized", "thresholds": [0.2],
    }  # fmt: skip
    return StudySpec.parse({**values, **changes})


def scored(plan: StudySpec, out: Path, task: Task | None = None, **options: Any) -> dict[str, Any]:
    """Train a study and return its scores without times."""
    data = run_study(plan, out, task=task or toy(), **options).as_dict()
    for row in data["algorithms"].values():
        del row["seconds"]
    return data


def history(curve: dict[int, float], rounds: int, seed: int = 0, diverged: int = 0) -> History:
    """A run with given evaluations, by round."""
    records = tuple(
        Record(
            round=r, clients=1, dropped=0, steps=1, train_loss=1.0, bytes_down=1, bytes_up=1,
            bytes_up_bound=1, scalar_bytes_down=0, scalar_bytes_up=0, bytes_kept=0,
            total_bytes_down=r, total_bytes_up=r, seconds=0.0, metric=curve.get(r),
            diverged=bool(diverged) and r >= diverged,
        )
        for r in range(1, rounds + 1)
    )  # fmt: skip
    return History(toy(rounds=rounds, eval_every=5), Trial.of("fedavg", seed), records, Tree({}))


def test_final_accuracy_takes_the_twenty_evaluations_901_to_996() -> None:
    """And not the one after the last round, which every run has and the paper does not."""
    curve = {r: float(r) for r in range(1, 1000, 5)} | {1000: 1e6}
    run = Run.of_history(history(curve, 1000), "fedavg")
    assert finals([run]) == {0: np.mean(range(901, 1000, 5))}
    assert finals([run], "author") == {0: np.mean(range(906, 1000, 5))}
    result = StudyResult.from_histories({"fedavg": [history(curve, 1000)]})
    assert result.curves["fedavg"]["rounds"] == list(range(1, 1000, 5))


def test_curve_of_a_run_that_diverged_ends_where_it_did() -> None:
    """The evaluation after the round in which it diverged does not count."""
    curve = {1: 0.1, 6: 0.2, 11: 0.3}
    for diverged, expected in ((5, [0.1, None, None]), (6, [0.1, None, None]),
                               (7, [0.1, 0.2, None]), (0, [0.1, 0.2, 0.3])):  # fmt: skip
        result = StudyResult.from_histories({"fedavg": [history(curve, 11, diverged=diverged)]})
        assert result.curves["fedavg"] == {"rounds": [1, 6, 11], "runs": [expected]}


def test_diverged_runs_are_left_out_of_means_and_tests_and_counted() -> None:
    """Not counted as 0: a test of such zeros would find a difference of certainty."""
    tops = {"a": [0.8, 0.7, 0.9, 0.8], "b": [0.6, 0.6, 0.6, 0.7], "c": [0.5] * 4}
    lost = {"a": [], "b": [1], "c": [0, 1, 2, 3]}
    runs = {
        name: [
            history(dict.fromkeys(range(1, 51, 5), top), 50, seed, 30 if seed in lost[name] else 0)
            for seed, top in enumerate(each)
        ]
        for name, each in tops.items()
    }
    result = StudyResult.from_histories(runs)
    a, b, c = result.scores
    assert list(b.finals) == [0, 2, 3]
    assert b.mean == pytest.approx(1.9 / 3)
    assert b.test is not None
    assert (b.test.n, b.diverged, b.runs) == (3, 1, 4)
    assert b.test.mean_difference == pytest.approx((0.2 + 0.3 + 0.1) / 3)
    assert (c.mean, c.sd, c.test, c.diverged) == (None, None, None, 4)
    assert [test.second for test in result.tests] == ["b"]
    assert a.diverged == 0
    assert any("1 of 4" in note and note.startswith("b:") for note in result.notes)
    data = result.as_dict()["algorithms"]
    assert data["b"]["final"]["full"]["runs"] == [0.6, None, 0.6, 0.7]
    assert data["c"]["final"]["full"]["mean"] is None
    assert "diverged" in str(result).splitlines()[5]
    assert "4 of 5 runs" not in summary(result)[-1]
    assert summary(result)[-1].startswith("5 of 12 runs diverged")


def test_rates_can_be_those_that_all_test_examples_choose(tmp_path: Path) -> None:
    plan = GridSpec.parse({
        "task": "toy", "algorithms": ["fedavg"], "rounds": 2, "last": 1, "engine": "vectorized",
        "axes": {"client.lr": [0.03, 0.3]},
    })  # fmt: skip
    run_grid(plan, tmp_path, task=toy())
    asked = spec(algorithms=["fedavg"], rates=str(tmp_path), rates_by="test")
    with pytest.raises(InputError, match="also_by_test = true"):
        find_rates(asked)
    kept = read_json(tmp_path / "grid.json")
    kept["also_by_test"] = True
    entry = kept["algorithms"]["fedavg"]
    [other] = {0.03, 0.3} - {entry["best"]["options"]["client.lr"]}
    entry["best_by_test"] = {**entry["best"], "options": {"client.lr": other}}
    write_json(tmp_path / "grid.json", kept)
    assert find_rates(asked)["fedavg"]["client.lr"] == other
    by_tune = spec(algorithms=["fedavg"], rates=str(tmp_path))
    assert find_rates(by_tune)["fedavg"]["client.lr"] != other


def test_a_grid_of_the_whole_test_set_gives_rates_to_reports_on_all_of_it(tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "results/cifar100-grid/grid.json"
    grid = {**json.loads(kept.read_text()), "selection": "test"}
    rates = grid["algorithms"]["fedavg"]["best"]["options"]
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    plan = {"task": "cifar100", "algorithms": ["fedavg"], "rates": str(tmp_path)}
    with pytest.raises(InputError, match="whole test set"):
        find_rates(StudySpec.parse(plan))
    on_all = StudySpec.parse({**plan, "preset": {"selection": "test"}})
    assert find_rates(on_all) == {"fedavg": rates}


def test_examples_that_chose_the_rates_are_not_reported_on_as_if_they_had_not() -> None:
    plan = {"algorithms": ["fedavg"], "rates": "runs/grid", "rates_by": "test"}
    with pytest.raises(InputError, match="rates = 'given' names none: leave it out"):
        StudySpec.parse({**plan, "task": "digits", "rates": "given"})
    paper = StudySpec.parse({**plan, "task": "cifar100"})
    with pytest.raises(InputError, match=r'say preset\.selection = "test" as well'):
        paper.check()
    paper.with_settings({"preset.selection": "test"}).check()
    with pytest.raises(InputError, match="chose its rates: leave it out"):
        StudySpec.parse({**plan, "task": "digits"}).check()
    # A user's own task, whose examples tell.
    own = spec(algorithms=["fedavg"], rates="runs/grid", rates_by="test")
    with pytest.raises(InputError, match="toy would report on some of the examples"):
        own.check(toy())
    own.check(replace(toy(), tune=None))
    task = toy()
    own.check(replace(task, tune=task.test))


def test_summary_of_known_curves() -> None:
    """Arrivals, late-stage means and tests that can be told by hand."""
    plan = spec(
        algorithms={"a": {"algorithm": "fedzmg"}, "b": {"algorithm": "fedavg"}},
        rounds=50, eval_every=5, thresholds=[0.5, 0.95], seeds=[0, 1],
    )  # fmt: skip
    steps = list(range(1, 51, 5))
    fast = {i: 0.0 if i < 11 else 0.9 for i in steps}
    faster = {i: 0.0 if i < 6 else 0.9 for i in steps}
    slow = {i: 0.0 if i < 26 else 0.6 for i in steps}
    runs = {
        "a": [history(fast, 50, 0), history(faster, 50, 1)],
        "b": [history(slow, 50, 0), history({**slow, 46: 0.7}, 50, 1)],
    }
    data = StudyResult.from_histories(runs, plan.model_dump(exclude_none=True)).as_dict()
    low, high = data["thresholds"]
    mean, smallest = (low["rules"][rule]["arrival"] for rule in ("rolling_mean", "rolling_min"))
    # a: the averaged curve is 0, .45, .9, ...: the window that ends at 16 has the mean .5625.
    assert mean["a"]["averaged"] == 16
    assert mean["a"]["runs"] == [21, 16]
    assert (mean["a"]["mean"], mean["a"]["never"]) == (18.5, 0)
    assert mean["a"]["sd"] == pytest.approx(np.std([20, 15], ddof=1))
    assert smallest["a"]["averaged"] == 26
    assert smallest["a"]["runs"] == [26, 21]
    # b: 0, .6, .6, .6 has the mean .45, so only the window of four times .6 arrives, at 41.
    assert mean["b"]["averaged"] == 41
    late = low["rules"]["rolling_mean"]["late_stage_mean"]
    assert late == {"a": pytest.approx(0.9), "b": pytest.approx(0.65)}
    assert high["rules"]["stays_above"]["late_stage_mean"] is None
    assert high["rules"]["stays_above"]["arrival"]["a"]["never"] == 2
    finals = data["algorithms"]["b"]["final"]["full"]
    assert finals["runs"] == [0.6, 0.7]
    assert finals["sd"] == pytest.approx(np.std([0.6, 0.7], ddof=1))
    [pair] = data["tests"]["pairs"]
    assert (pair["first"], pair["second"]) == ("a", "b")
    assert pair["test"]["mean_difference"] == pytest.approx(0.25)
    assert pair["p_holm"] == pair["test"]["p"]
    assert pair["smallest_sign_flip"] == 0.5


def test_study_is_a_directory_of_paired_runs(tmp_path: Path) -> None:
    result = run_study(spec(), tmp_path, task=toy())
    data = result.as_dict()
    assert data["complete"]
    assert read_json(tmp_path / "study.json") == json.loads(json.dumps(data))
    for name in ("fedzmg", "fedavg"):
        for seed in (3, 5):
            run = RunDirectory(tmp_path / name / f"seed-{seed}")
            assert run.spec().seed == seed
            assert run.spec().protocol["eval_every"] == 2
            assert len(run.records()) == 3
    steps = [[r.steps for r in h.records] for h in result.histories["fedzmg"]]
    assert steps == [[r.steps for r in h.records] for h in result.histories["fedavg"]]
    assert data["curves"]["fedzmg"]["rounds"] == [1, 3]
    assert StudySpec.read(tmp_path / "study.toml") == spec()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return scored(spec(), tmp_path_factory.mktemp("whole"))


def test_study_in_pieces_is_the_same_study(tmp_path: Path, whole: dict[str, Any]) -> None:
    with pytest.raises(MemoryError):
        run_study(spec(), tmp_path / "s", task=toy(), progress=Stop(2, pack=1))
    done = []
    while len(done) < 20:
        try:
            found = scored(spec(), tmp_path / "s", max_minutes=1e-9)
            break
        except TimeLimitReached as stopped:
            done.append(stopped.done)
    # A round each time, none of them twice; the last round of an algorithm begins the next one.
    assert done == [1, 2, 1, 2]
    assert found == whole


def test_ctrl_c_in_the_last_round_of_a_pack_begins_no_other(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    pressed = Press(spec().rounds)
    with pytest.raises(Interrupted):
        run_study(spec(), tmp_path / "s", task=toy(), progress=pressed)
    assert len(pressed.begun) == 1
    assert scored(spec(), tmp_path / "s") == whole


def test_a_finished_study_reads_no_checkpoint(tmp_path: Path) -> None:
    whole, damaged = scored(spec(), tmp_path), b"another format"
    for file in tmp_path.rglob("checkpoint*"):
        file.write_bytes(damaged)
    assert scored(spec(), tmp_path) == whole
    assert {file.read_bytes() for file in tmp_path.rglob("checkpoint*")} == {damaged}


def test_checkpoints_of_finished_runs_may_be_removed(tmp_path: Path) -> None:
    """They are most of a study's bytes, and its scores do not need them."""
    whole = scored(spec(), tmp_path)
    runs = {
        p.parent: (p.parent / "metrics.jsonl").read_bytes() for p in tmp_path.rglob("*-*/spec.toml")
    }
    assert len(runs) == 4
    for place in runs:
        for file in place.glob("checkpoint*"):
            file.unlink()
    last = tmp_path / "fedavg" / "seed-5" / "metrics.jsonl"
    lines = last.read_bytes().splitlines(keepends=True)
    last.write_bytes(b"".join(lines[:-1]))  # this one is not finished, and starts again
    change_manifest(last.parent, finished=None, logs=None)
    again = scored(spec(), tmp_path)
    assert again == whole
    for place, before in runs.items():
        if place != last.parent:
            assert (place / "metrics.jsonl").read_bytes() == before
            assert not list(place.glob("checkpoint*"))
    assert (last.parent / "checkpoint.safetensors").is_file()


def test_a_whole_log_is_no_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last line is written before the last checkpoint, and before clients are looked at."""

    def die(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "evaluate_clients", die)
        with pytest.raises(MemoryError):
            run_study(spec(), tmp_path, task=toy())
    place = RunDirectory(tmp_path / "fedzmg" / "seed-3")
    assert len(place.records()) == 3
    assert place.checkpoint() is None
    run_study(spec(), tmp_path, task=toy())
    assert place.checkpoint() is not None
    assert place.clients()
    # Trained again in place, but not to the end: old lines do not stand for new ones.
    (place.path / "checkpoint.safetensors").unlink()
    with pytest.raises(MemoryError):
        run_pack(toy(), [place.spec()], [place.path], progress=Stop(1), checkpoint_seconds=1e9)
    run_study(spec(), tmp_path, task=toy())
    assert place.checkpoint() is not None


def test_deterministic_pack_without_checkpoints_starts_again_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, that is; what else trains decides the last bits there."""
    monkeypatch.setattr(run, "_must_stay_together", lambda _: True)
    plan = spec(algorithms=["fedavg"], seeds=[3, 5, 7])
    whole = scored(plan, tmp_path)
    for file in tmp_path.rglob("checkpoint*"):
        file.unlink()
    run_study(plan, tmp_path, task=toy(), progress=Stop(1))  # nothing is trained
    late = RunDirectory(tmp_path / "fedavg" / "seed-5")
    asked = late.spec()
    shutil.rmtree(late.path)
    with pytest.raises(MemoryError):
        run_pack(toy(), [asked], [late.path], progress=Stop(2), checkpoint_seconds=0)
    assert late.checkpoint().round == 2  # type: ignore[union-attr]
    seen = Stop(99)
    again = scored(plan, tmp_path, progress=seen)
    assert "back to round 0" in seen.said
    assert again == whole
    for seed in (3, 7):
        log = (tmp_path / "fedavg" / f"seed-{seed}" / "metrics.jsonl").read_bytes()
        assert len(log.splitlines()) == 2 * 3


def test_algorithms_that_differ_in_numbers_train_in_one_pack(tmp_path: Path) -> None:
    variants = {
        "plain": {"algorithm": "fedzmg", "client": {"momentum": 0.0}},
        "fedavg": {},
        "heavy": {"algorithm": "fedzmg", "client": {"momentum": 0.9}},
    }
    data = scored(spec(algorithms=variants), tmp_path / "all")
    assert list(data["algorithms"]) == ["plain", "fedavg", "heavy"], "as they were asked for"

    def fact(name: str) -> Any:
        return RunDirectory(tmp_path / "all" / name / "seed-3").manifest()["pack"]

    both = ["plain/seed-3", "plain/seed-5", "heavy/seed-3", "heavy/seed-5"]
    assert fact("plain") == fact("heavy") == both, "each by its directory"
    assert fact("fedavg") == ["fedavg/seed-3", "fedavg/seed-5"]
    run_study(spec(algorithms={"heavy": variants["heavy"]}), tmp_path / "heavy", task=toy())
    for seed in (3, 5):
        packed, alone = (
            RunDirectory(tmp_path / place / "heavy" / f"seed-{seed}").records()
            for place in ("all", "heavy")
        )
        assert bare(packed) == bare(alone)


def test_packs_of_a_study_are_not_too_large_and_keep_promised_bits() -> None:
    momenta = {f"m{i}": {"algorithm": "fedzmg", "client": {"momentum": i / 10}} for i in range(9)}
    plan = spec(algorithms={**momenta, "fedavg": {}}, seeds=[1, 2, 3])
    assert study_packs(plan, toy()) == {
        "m0 and 4 more": ["m0", "m1", "m2", "m3", "m4"],
        "m5 and 3 more": ["m5", "m6", "m7", "m8"],
        "fedavg": ["fedavg"],
    }
    kept = spec(algorithms={"m0": momenta["m0"], "m9": momenta["m8"]}, deterministic=True)
    assert list(study_packs(kept, toy())) == ["m0", "m9"]
    many = spec(algorithms=momenta, seeds=list(range(20)))
    assert list(study_packs(many, toy())) == list(momenta)


def test_rates_come_from_the_source_that_the_study_names(tmp_path: Path) -> None:
    fixed = {"weights": "uniform", "client": {"momentum": 0.5}}
    grid = GridSpec.parse(
        {
            "task": "toy", "algorithms": {"fedzmg": fixed, "fedavg": {}}, "rounds": 2, "last": 1,
            "engine": "vectorized", "axes": {"client.lr": [0.02, 0.2]},
        }
    )  # fmt: skip
    chosen = run_grid(grid, tmp_path / "grid", task=toy())["algorithms"]
    best = {name: chosen[name]["best"]["options"]["client.lr"] for name in chosen}

    def planned(**changes: Any) -> dict[str, RunSpec]:
        plan = spec(**{"rates": str(tmp_path / "grid"), "seeds": [0], **changes})
        rates = find_rates(plan)
        return {n: study_runs(plan, n, rates.get(n, {}))[0] for n in plan.algorithms}

    runs = planned()
    assert runs["fedavg"].client == {"lr": best["fedavg"]}
    # Options that the grid held fixed come with its rates; those of the study go first.
    assert (runs["fedzmg"].client, runs["fedzmg"].weights) == (
        {"lr": best["fedzmg"], "momentum": 0.5}, "uniform",
    )  # fmt: skip
    own = {"weights": "examples", "client": {"momentum": 0.25, "lr": 0.7}}
    changed = planned(algorithms={"fedzmg": own})["fedzmg"]
    assert (changed.client, changed.weights) == ({"lr": 0.7, "momentum": 0.25}, "examples")
    # One that the grid does not know brings its own.
    brought = {"client": {"lr": 0.4}, "server": {"lr": 0.9}}
    mixed = planned(algorithms={"fedavg": {}, "scaffold": brought})
    assert (mixed["scaffold"].client, mixed["scaffold"].server) == ({"lr": 0.4}, {"lr": 0.9})
    for message, changes in (
        ("rates = 'nowhere'", {"rates": "nowhere"}),
        ("'toy', not for 'digits'", {"task": "digits"}),
        ("fedadam is not in the grid .*, or set its client.lr", {"algorithms": ["fedadam"]}),
        ("is fedavg in the grid .* and mfl", {"algorithms": {"fedavg": {"algorithm": "mfl"}}}),
    ):
        with pytest.raises(InputError, match=message):
            planned(**changes)
    recommended = replace(toy(), options={n: {"client.lr": 0.06} for n in ("fedzmg", "fedavg")})
    for source, rate in (("tuned", 0.06), ("given", 0.1)):
        data = scored(spec(rates=source, seeds=[0], rounds=1), tmp_path / source, recommended)
        assert data["algorithms"]["fedavg"]["options"]["client.lr"] == rate


def test_untuned_task_asks_for_rates() -> None:
    plan = StudySpec.parse({"task": "emnist62", "algorithms": ["fedzmg"]})
    with pytest.raises(InputError, match="fedzmg on emnist62"):
        plan.check()
    plan.with_settings({"rates": "given"}).check()
    plan.with_settings({"fedzmg.client.lr": 0.1}).check()


def test_directory_of_another_study_is_refused(tmp_path: Path) -> None:
    run_study(spec(rounds=1, seeds=[0]), tmp_path, task=toy())
    with pytest.raises(InputError, match=r"holds another study \(seeds is \[0\] there"):
        run_study(spec(rounds=1, seeds=[1]), tmp_path, task=toy())
    # The first algorithm is the reference of the tests.
    turned = spec(rounds=1, seeds=[0], algorithms=["fedavg", "fedzmg"])
    with pytest.raises(InputError, match=r"study \(reference is \['fedzmg'\]"):
        run_study(turned, tmp_path, task=toy())


def test_a_comparison_may_grow_in_its_directory(tmp_path: Path) -> None:
    small = spec(rounds=1, seeds=[0])
    run_study(small, tmp_path, task=toy(), grow=True)
    before = (tmp_path / "fedzmg" / "seed-0" / "metrics.jsonl").read_bytes()
    large = spec(rounds=1, seeds=[0, 1], algorithms=["mfl", "fedzmg", "fedavg"])
    data = scored(large, tmp_path, grow=True)
    assert list(data["algorithms"]) == ["mfl", "fedzmg", "fedavg"]
    assert StudySpec.read(tmp_path / "study.toml") == large
    assert (tmp_path / "fedzmg" / "seed-0" / "metrics.jsonl").read_bytes() == before
    # A part is read, and leaves the whole as it is.
    kept = (tmp_path / "study.json").read_bytes()
    assert list(scored(small, tmp_path, grow=True)["algorithms"]) == ["fedzmg", "fedavg"]
    assert StudySpec.read(tmp_path / "study.toml") == large
    assert (tmp_path / "study.json").read_bytes() == kept
    with pytest.raises(InputError, match="rounds"):
        run_study(large.with_settings({"rounds": 2}), tmp_path, task=toy(), grow=True)
