"""A run is trained again to the same bits; what was tampered with is found and named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Stop, toy

from fedzmg.errors import InputError
from fedzmg.experiment import run_directory, training
from fedzmg.experiment import verify as module
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import change_manifest
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.experiment.verify import verify
from fedzmg.participation import Participation
from fedzmg.simulation import RoundReport, Simulation
from fedzmg.storage.files import log_marks
from fedzmg.storage.formats import file_sha256


def train(out: Path, algorithm: str = "fedzmg", **changes: Any) -> None:
    """Two runs side by side, interrupted and resumed, so that the log has lines twice."""
    task = toy(rounds=5, eval_every=2)
    specs = [
        RunSpec(task="toy", algorithm=algorithm, seed=seed, engine="vectorized", **changes)
        for seed in (0, 1)
    ]
    places = [out / f"seed-{seed}" for seed in (0, 1)]
    with pytest.raises(MemoryError):
        run_pack(task, specs, places, progress=Stop(2), checkpoint_seconds=1e9)
    run_pack(task, specs, places)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    train(place)
    return place


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Two runs, to be tampered with."""
    return shutil.copytree(trained, tmp_path / "runs")


def edit(path: Path, **changes: Any) -> None:
    change_manifest(path.parent, **changes)


def rewrite(log: Path, text: str) -> None:
    """Change a log on purpose, which its manifest then names."""
    log.write_text(text)
    change_manifest(log.parent, logs=log_marks(log.parent, log.name))


def content(place: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("fedzmg", {}), ("scaffold", {"dtype": "float64", "client": {"lr": 0.2}})],
)
def test_same_machine_reproduces_and_nothing_is_touched(
    tmp_path: Path, algorithm: str, changes: dict[str, Any]
) -> None:
    train(tmp_path, algorithm, **changes)
    before = content(tmp_path)
    found = verify(tmp_path, rounds=9, task=toy())
    assert [(v.name, v.rounds, v.reproduced) for v in found] == [
        ("seed-0", 5, True), ("seed-1", 5, True),
    ]  # fmt: skip
    assert all(v.facts == () for v in found)
    # Alone, without the neighbour it trained with, bits are the same on a processor.
    [alone] = verify(tmp_path / "seed-1", rounds=3, task=toy())
    assert (alone.reproduced, alone.rounds) == (True, 3)
    assert alone.facts == ()
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("device", "recorded", "chunk"),
    [("cpu", None, None), ("cpu", 4, 4), ("cuda", 4, 4), ("cuda", None, 15)],
)
def test_all_clients_at_once_is_a_width_on_a_gpu(
    device: str, recorded: int | None, chunk: int | None
) -> None:
    facts = {"device": device, "chunk": recorded}
    assert run_directory.clients_at_once(facts, toy(), 5, Participation()) == chunk, (
        "five trials of three clients"
    )


def test_difference_is_found_in_its_round_with_its_size(runs: Path) -> None:
    path = runs / "seed-1" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["round"] == 3:
            line["loss"] += 2**-30
    rewrite(path, "".join(json.dumps(line) + "\n" for line in lines))
    edit(runs / "seed-1" / "manifest.json", torch="1.0", device_name="abacus")
    good, bad = verify(runs, rounds=4, task=toy())
    assert good.reproduced
    assert (bad.reproduced, bad.first, bad.fields) == (False, 3, ("loss",))
    assert bad.size == pytest.approx(2**-30, rel=1e-6)
    assert {(f.name, f.then, f.now) for f in bad.facts} == {
        ("torch", "1.0", torch.__version__),
        ("device_name", "abacus", json.loads(
            (runs / "seed-0" / "manifest.json").read_text())["device_name"]),
    }  # fmt: skip
    # Rounds before the difference are fine.
    assert verify(runs / "seed-1", rounds=2, task=toy())[0].reproduced
    json.dumps(bad.as_dict(), allow_nan=False)


def test_recorded_engine_precision_and_threads_are_used(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(runs / "seed-0" / "manifest.json", engine="sequential", onednn=False, threads=2)
    seen = []
    real = training.Simulation

    def simulation(*args: Any, **options: Any) -> Any:
        seen.append(
            (
                options["engine"].engine.path,
                options["engine"].engine.onednn,
                torch.get_num_threads(),
            )
        )
        return real(*args, **options)

    monkeypatch.setattr(training, "Simulation", simulation)
    threads = torch.get_num_threads()
    verify(runs / "seed-0", rounds=1, task=toy())
    assert seen == [("sequential", False, 2)]
    assert [v.name for v in verify(runs, runs=1, rounds=1, task=toy())] == ["seed-0"]
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two variants of one algorithm that train in one pack."""
    place = tmp_path_factory.mktemp("varied") / "study"
    variants = {
        "no momentum": {"algorithm": "fedzmg", "label": "plain", "client": {"momentum": 0.0}},
        "heavy": {"algorithm": "fedzmg", "client": {"momentum": 0.9}},
    }
    plan = {"task": "toy", "algorithms": variants, "rounds": 3, "eval_every": 1, "seeds": [3, 5]}
    run_study(
        StudySpec.parse({**plan, "rates": "given", "engine": "vectorized"}), place, task=toy()
    )
    return place


MEMBERS = ["no-momentum/seed-3", "no-momentum/seed-5", "heavy/seed-3", "heavy/seed-5"]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the packs that simulations trained."""
    sizes: list[int] = []
    real = training.Simulation

    def simulation(task: Any, trials: list[Any], **options: Any) -> Any:
        sizes.append(len(trials))
        return real(task, trials, **options)

    monkeypatch.setattr(training, "Simulation", simulation)
    return sizes


def test_variants_are_packed_again_as_they_were(
    varied: Path, tmp_path: Path, together: list[int]
) -> None:
    found = verify(varied, rounds=2, task=toy())
    assert sorted(v.name for v in found) == sorted(MEMBERS)
    assert all(v.reproduced and v.rounds == 2 for v in found)
    assert together == [4]
    # A copy beside it is a pack of its own.
    for name in ("one", "two"):
        shutil.copytree(varied, tmp_path / name)
    assert all(v.reproduced for v in verify(tmp_path, rounds=1, task=toy()))
    assert together == [4, 4, 4]
    # On a CPU, a missing one does not affect the others.
    shutil.rmtree(tmp_path / "one" / "heavy" / "seed-5")
    assert all(v.reproduced for v in verify(tmp_path / "one", rounds=1, task=toy()))
    assert together == [4, 4, 4, 3]


def test_runs_with_other_facts_are_not_packed_together(
    varied: Path, tmp_path: Path, together: list[int]
) -> None:
    place = shutil.copytree(varied, tmp_path / "study")
    edit(place / "heavy" / "seed-3" / "manifest.json", pack=["heavy/seed-3"])
    edit(place / "heavy" / "seed-5" / "manifest.json", threads=torch.get_num_threads() + 1)
    assert len(verify(place, rounds=1, task=toy())) == 4
    assert together == [1, 1, 2]


def test_only_logged_rounds_are_trained(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, trained, real = runs / "seed-0" / "metrics.jsonl", list[int](), Simulation.run_round
    lines = [line for line in log.read_text().splitlines(True) if json.loads(line)["round"] < 3]
    rewrite(log, "".join(lines))

    def run_round(simulation: Simulation) -> RoundReport:
        trained.append(simulation.round)
        return real(simulation)

    monkeypatch.setattr(Simulation, "run_round", run_round)
    [verdict] = verify(runs / "seed-0", rounds=5, task=toy())
    assert (verdict.rounds, verdict.reproduced, trained) == (2, True, [0, 1])


def test_neighbours_on_a_gpu_are_found_among_all_variants(
    varied: Path, tmp_path: Path, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def any_device(*_: Any) -> Iterator[torch.device]:
        yield torch.device("cpu")

    monkeypatch.setattr(module, "_environment", any_device)
    place = shutil.copytree(varied, tmp_path / "study")
    for name in MEMBERS:
        edit(place / name / "manifest.json", device="cuda")
    monkeypatch.chdir(place / "heavy" / "seed-5")
    [verdict] = verify(Path(), rounds=1, task=toy())
    assert together == [4]
    assert verdict.reproduced
    assert "pack" not in [fact.name for fact in verdict.facts], "the same ones, in their order"


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        # Round 4 itself trained in another width.
        ({"chunk_changes": [{"round": 4, "chunk": 2}]}, 3),
        # On a CPU the last bits do not depend on the others.
        ({"pack_changes": [{"round": 2, "pack": ["fedzmg/seed-0"]}]}, 5),
        # A change in the first round came before anything was stored.
        ({"chunk_changes": [{"round": 1, "chunk": 2}]}, 5),
    ],
)
def test_rounds_after_a_change_of_shape_are_left_out(
    runs: Path, changes: dict[str, Any], rounds: int
) -> None:
    for seed in (0, 1):
        edit(runs / f"seed-{seed}" / "manifest.json", **changes)
    found = verify(runs, rounds=5, task=toy())
    assert [(v.rounds, v.reproduced) for v in found] == [(rounds, True), (rounds, True)]
    assert (f"only up to round {rounds}" in found[0].note) == (rounds < 5)


def test_other_data_is_reported_and_nothing_trained(runs: Path) -> None:
    other = replace(toy(seed=1), name="toy")
    for verdict in verify(runs, task=other):
        assert (verdict.reproduced, verdict.rounds) == (False, 0)
        assert "data_sha256" in [fact.name for fact in verdict.facts]
        assert "other data" in verdict.note


def test_bad_input_is_one_line(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDZMG_DATA", str(tmp_path / "data"))  # this machine may have CIFAR-100
    with pytest.raises(InputError, match="none is not a directory"):
        verify(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"spec\.toml"):
        verify(tmp_path / "empty")
    with pytest.raises(InputError, match=r"'toy'.*verify\(DIR, task=task\)"):
        verify(runs)
    manifest = runs / "seed-0" / "manifest.json"
    edit(manifest, device="cuda", device_name="A100", pack=["fedzmg/seed-0"])
    with pytest.raises(InputError, match=r"GPU \(A100\)"):
        verify(runs / "seed-0", task=toy())
    spec = runs / "seed-0" / "spec.toml"
    spec.write_text(spec.read_text().replace('"toy"', '"cifar100"'))
    edit(manifest, spec_sha256=file_sha256(spec))
    with pytest.raises(InputError, match="cifar100"):
        verify(runs / "seed-0")
    rewrite(runs / "seed-1" / "metrics.jsonl", "")
    with pytest.raises(InputError, match="no finished round yet"):
        verify(runs / "seed-1", task=toy())


def grid(*algorithms: str, **changes: Any) -> GridSpec:
    return GridSpec.parse(
        {
            "task": "toy", "algorithms": list(algorithms), "rounds": 5, "last": 2, "seeds": [7, 8],
            "engine": "vectorized", "axes": {"client.lr": [0.1, 0.5]},
            **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("algorithms", "changes"),
    [
        (("scaffold",), {"together": 3}),
        (("fedavg",), {"search": {"halving": [[2, 1]]}, "seeds": [1, 2]}),
        (("fedavg",), {"axes": {"client.lr": [0.1, 1e25]}, "stop": {"diverged": True}}),
    ],
)
def test_grid_is_trained_again_to_the_same_bits_and_not_touched(
    tmp_path: Path, algorithms: tuple[str, ...], changes: dict[str, Any]
) -> None:
    plan = grid(*algorithms, **changes)
    with pytest.raises(MemoryError):
        run_grid(plan, tmp_path, task=toy(), progress=Stop(3), checkpoint_seconds=0)
    run_grid(plan, tmp_path, task=toy())
    before = content(tmp_path)
    found = verify(tmp_path, rounds=9, task=toy())
    assert [v.name for v in found] == list(algorithms)
    # Round 1, that of a halving, and the two that count.
    logged = 4 if plan.search.halving else 3
    assert [(v.rounds, v.reproduced, v.facts) for v in found] == [
        (logged, True, ()) for _ in algorithms
    ]
    assert content(tmp_path) == before


def test_difference_in_a_grid_is_found_in_its_round(tmp_path: Path) -> None:
    run_grid(grid("fedavg", "fedadam"), tmp_path, task=toy())
    log = tmp_path / "fedadam" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if (line["trial"], line["round"]) == (3, 4):
            line["train_loss"] += 2**-30
    rewrite(log, "".join(json.dumps(line) + "\n" for line in lines))
    edit(tmp_path / "fedadam" / "manifest.json", torch="1.0")
    good, bad = verify(tmp_path, rounds=4, task=toy())
    assert (good.reproduced, good.rounds) == (True, 2)
    assert "only some rounds, here 1, 4" in good.note
    assert (bad.reproduced, bad.first, bad.fields) == (False, 4, ("train_loss",))
    assert bad.size == pytest.approx(2**-30, rel=1e-6)
    assert [fact.name for fact in bad.facts] == ["torch"]
    # The default of three rounds sees the first one.
    assert [(v.rounds, v.reproduced) for v in verify(tmp_path, task=toy())] == [(1, True)] * 2
    assert [v.name for v in verify(tmp_path, runs=1, task=toy())] == ["fedavg"]
    [other, _] = verify(tmp_path, task=replace(toy(seed=1), name="toy"))
    assert (other.reproduced, other.rounds) == (False, 0)
    assert "other data" in other.note


def test_grid_that_has_not_begun_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(grid("fedavg").to_toml())
    with pytest.raises(InputError, match="no finished round yet"):
        verify(tmp_path, task=toy())
    (tmp_path / "fedavg").mkdir()
    with pytest.raises(InputError, match=r"cannot read .*manifest\.json"):
        verify(tmp_path, task=toy())
