"""Participation in files: recorded, resumed, verified, estimated and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import Stop, same, toy

from fedzmg import InputError
from fedzmg.experiment.estimate import estimate
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.strict import parse_settings
from fedzmg.experiment.studies.study import run_study
from fedzmg.experiment.verify import verify
from fedzmg.report.html.sections import of_studies
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result

TABLE = "federation.participation"
POISSON = [f"{TABLE}.sampler=poisson", f"{TABLE}.steps=[1,4]"]
ROUNDS = 6


def runs(*settings: str) -> list[RunSpec]:
    plain = RunSpec(
        task="toy", algorithm="scaffold", protocol={"rounds": ROUNDS}, client={"lr": 0.1}
    )
    chosen = plain.with_settings(parse_settings(settings))
    return [chosen.with_settings({"seed": seed, "engine": "vectorized"}) for seed in (0, 1)]


def test_interrupted_and_repeated_rounds_are_the_same(tmp_path: Path) -> None:
    paths = [tmp_path / f"seed-{i}" for i in (0, 1)]
    whole = run_pack(toy(), runs(*POISSON))
    with pytest.raises(MemoryError):
        run_pack(toy(), runs(*POISSON), paths, progress=Stop(after=3), checkpoint_seconds=0)
    resumed = run_pack(toy(), runs(*POISSON), paths)
    assert same(whole, resumed)
    assert len({r.clients for history in whole for r in history.records}) > 1
    stored = RunDirectory(paths[0]).spec()
    assert stored.federation == runs(*POISSON)[0].federation
    assert RunSpec.read(paths[0] / "spec.toml") == stored
    assert [(v.rounds, v.reproduced) for v in verify(tmp_path, rounds=ROUNDS, task=toy())] == [
        (ROUNDS, True)
    ] * 2
    # Another choice of clients is another run.
    with pytest.raises(InputError, match="seed-0"):
        run_pack(toy(), runs(f"{TABLE}.sampler=poisson"), paths)


def test_default_is_not_written(tmp_path: Path) -> None:
    run_pack(toy(), runs(), [tmp_path / "a", tmp_path / "b"])
    assert "federation" not in (tmp_path / "a" / "spec.toml").read_text()
    guarded = runs("federation.guard=true")[0].to_toml()
    assert "participation" not in guarded
    assert RunSpec.parse({"task": "toy", "federation": {"participation": {}}}).to_toml() == (
        RunSpec(task="toy").to_toml()
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (POISSON, ["poisson", "[1, 4]"]),
        ([f"{TABLE}.sampler=examples"], ["participation: sampler", "examples"]),
        (
            [f"{TABLE}.sampler=schedule", f'{TABLE}.schedule=[[0, "3"], []]'],
            ["participation: schedule"],
        ),
    ],
)
def test_reports_name_the_choice(tmp_path: Path, settings: list[str], words: list[str]) -> None:
    spec = StudySpec.parse(
        {"task": "toy", "algorithms": ["fedavg"], "seeds": [0, 1], "rounds": 3, "rates": "given"}
    ).with_settings({**parse_settings(settings), "engine": "vectorized"})
    in_memory = run_study(spec, None, task=toy())
    run_study(spec, tmp_path / "chosen", task=toy())
    usual = spec.model_copy(update={"federation": type(spec.federation)()})
    run_study(usual, tmp_path / "usual", task=toy())
    studies = read([tmp_path]).studies
    # Cohorts differ, so the runs are not paired.
    assert len(studies) == 2
    [chosen] = [study for study in studies if study.participation]
    result = study_result(chosen)
    assert result.as_dict()["participation"] == in_memory.as_dict()["participation"]
    [page] = of_studies([result], {})
    section = f"{page.facts} {[repr(block) for block in page.blocks]}"
    for word in words:
        assert word in section


def test_estimate_follows_the_choice() -> None:
    plain = RunSpec(task="digits", protocol={"rounds": 10, "cohort": 4})
    usual = estimate(plain)
    steps = estimate(plain.with_settings({f"{TABLE}.steps": 7}))
    assert steps["steps"] == 10 * 4 * 7
    assert steps["bytes_down"] == usual["bytes_down"]
    lists = {f"{TABLE}.sampler": "schedule", f"{TABLE}.schedule": [[0, 1], []]}
    scheduled = estimate(plain.with_settings({**lists, f"{TABLE}.steps": [2, 6]}))
    assert scheduled["steps"] == 10 * 1 * 4
    assert scheduled["bytes_down"] * 4 == usual["bytes_down"]
    by_examples = estimate(plain.with_settings({f"{TABLE}.sampler": "examples"}))
    assert by_examples["steps"] == usual["steps"]  # clients of digits are of equal size


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ([f"{TABLE}.sampler=poison"], "poisson"),
        ([f"{TABLE}.steps=3", f"{TABLE}.epochs=2"], "epochs = 2"),
        ([f"{TABLE}.epochs=none"], "none"),
        ([f"{TABLE}.step=3"], "steps"),
        ([f"{TABLE}.sampler=schedule", f'{TABLE}.schedule=[["x"]]'], "'x'"),
        ([f"{TABLE}.sampler=poisson", "protocol.replacement=true"], "replacement"),
        ([f"{TABLE}=3"], "3"),
    ],
)
def test_bad_choices_end_before_anything_is_written(
    tmp_path: Path, settings: list[str], value: str
) -> None:
    plain: dict[str, Any] = {"task": "toy", "algorithms": ["fedavg"], "rounds": 20}
    grid = GridSpec.parse({**plain, "axes": {"client.lr": [0.1]}})
    study = StudySpec.parse({**plain, "rates": "given"})
    for spec, train in ((grid, run_grid), (study, run_study)):
        with pytest.raises(InputError, match=value):
            train(spec.with_settings(parse_settings(settings)), tmp_path / "out", task=toy())  # type: ignore[operator]
    with pytest.raises(InputError, match=value):
        run_pack(toy(), runs(*settings), [tmp_path / "a", tmp_path / "b"])
    assert list(tmp_path.iterdir()) == []


def test_largest_seed_can_be_read_again(tmp_path: Path) -> None:
    [largest, _] = runs("protocol.rounds=1")
    run_pack(toy(), [largest.with_settings({"seed": 2**128 - 1})], [tmp_path])
    [study] = read([tmp_path]).studies
    assert study.seeds == [2**128 - 1]


def test_cohort_of_an_aggregator_is_checked_with_the_plan() -> None:
    [large, _] = runs("federation.aggregator=krum", "federation.aggregator.byzantine=1000000")
    with pytest.raises(InputError, match="2000003"):
        large.check_participation(toy())
