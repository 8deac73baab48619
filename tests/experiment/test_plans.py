"""Grid and study files: strict, with the nearest name, and all of ours are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedzmg import tasks
from fedzmg.errors import InputError
from fedzmg.experiment import estimate as pace
from fedzmg.experiment.estimate import estimate
from fedzmg.experiment.specs import files as spec_files
from fedzmg.experiment.specs.files import GridSpec, StudySpec, schema
from fedzmg.experiment.specs.plan import PAPER_RATES, named_algorithms
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.strict import parse_settings
from fedzmg.tasks.protocol import LARGEST
from fedzmg.terminal import views

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").glob("*.toml"))


UNFIT_NAMES = (
    "study.json", "lock.json", "Grid.TOML", "memory", "Report", "tracking", "seed-0", "nul", "..",
    ".", "/etc", "a/b", "", " ", "a.", "a\nb", "a\x1b[31m", "a" * 101,
)  # fmt: skip
UNFIT_LABELS = ("a\nb", "a\x1b[31m", "\u202eabc", "\ud800", "a" * 101, " ")
PROTOCOL = [(k, v) for k, v in LARGEST.items() if k not in ("rounds", "eval_every")]
MANY = [0.001 * i for i in range(1, 1001)]


def grid(**changes: Any) -> GridSpec:
    return GridSpec.parse({"task": "digits", "algorithms": ["fedzmg", "mfl"], **changes})


def test_usual_grid_is_the_papers() -> None:
    assert pytest.approx(np.logspace(-3, 1, 9)) == PAPER_RATES
    plan = grid()
    assert (plan.rounds, plan.last, plan.seeds, plan.selection) == (50, 10, [1000], "tune")
    assert len(plan.points("fedzmg")) == 81
    assert plan.points("fedzmg")[1] == {"client.lr": PAPER_RATES[0], "server.lr": PAPER_RATES[1]}
    # An algorithm without a server rate has one axis less.
    assert plan.points("mfl") == [{"client.lr": rate} for rate in PAPER_RATES]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"roundz": 3}, "'roundz'.*'rounds'"),
        ({"algorithms": {"fedzmg": {"cleint": {}}}}, "'algorithms.fedzmg.client'"),
        ({"algorithms": []}, r"algorithms = \{\}"),
        ({"algorithms": ["fedzmg", "fedzmg"]}, "algorithms: .*each once"),
        ({"algorithms": {"../up": {}}}, r"'\.\./up'"),
        ({"algorithms": {"a:b": {}, "A-b": {}}}, "'a:b' and 'A-b' .*directory 'a-b'"),
        *(({"algorithms": {name: {}}}, re.escape(repr(name)[:90])) for name in UNFIT_NAMES),
        *(({"label": text}, f"label = {re.escape(repr(text)[:90])}") for text in UNFIT_LABELS),
        *(
            ({"algorithms": {"a": {"label": text}}}, r"algorithms.a.label = ")
            for text in UNFIT_LABELS
        ),
        ({"together": 10**9 + 1}, "together = 1000000001: .*at most"),
        ({"rounds": 500_001}, "rounds = 500001: .*at most 500000"),
        ({"seeds": [2**128]}, r"seeds\[0\] = 3402"),
        ({"seeds": list(range(10_001))}, r"seeds = \[0, 1.* \.\.\. .*10000\]: expected at most"),
        ({"rounds": 500_000, "last": 10**9}, "last = 1000000000: expected at most"),
        ({"search": {"halving": [[i, 1] for i in range(101)]}}, "halving = .*at most"),
        ({"axes": {"client.lr": [float(i) for i in range(1001)]}}, "client.lr = .*at most"),
        ({"algorithms": {f"a{i}": {} for i in range(1001)}}, "algorithms = .*at most"),
        ({"algorithms": {"a": {"label": "b"}, "b": {}}}, "called 'b'"),
        ({"algorithms": {"fedzmg": 3}}, "algorithms.fedzmg = 3: expected a table"),
        ({"algorithms": 3}, "algorithms = 3: expected a table"),
        ({"seeds": []}, r"seeds = \[\]: expected at least 1"),
        ({"seeds": [3, -1]}, r"seeds\[1\] = -1: expected at least 0"),
        ({"seeds": [True]}, r"seeds\[0\] = True: expected a whole number"),
        ({"seeds": 3}, "seeds = 3: expected a list"),
        ({"seeds": [3, 3]}, r"seeds = \[3, 3\]"),
        ({"rounds": "x"}, "rounds = 'x': expected"),
        ({"rounds": 1.5}, "rounds = 1.5: expected"),
        ({"rounds": -5}, "rounds = -5: .*at least 1"),
        ({"rounds": 0, "last": 0}, "rounds = 0"),
        ({"label": 3}, "label = 3: expected text"),
        ({"stop": 3}, "stop = 3: expected a table"),
        ({"weights": "uniform"}, r"'weights'.*'algorithms\.NAME\.weights'"),
        ({"protocol": {"cohort": [1]}}, r"protocol.cohort = \[1\]: expected a number"),
        ({"protocol": {"rounds": 3}}, "protocol.rounds"),
        ({"last": 51}, "last = 51: expected 1 to 50"),
        ({"together": -1}, "together = -1"),
        ({"stop": {"divergd": True}}, "'stop.divergd'.*'stop.diverged'"),
        ({"stop": {"diverged": 1}}, "stop.diverged = 1: expected true or false"),
        *(
            ({"search": {"halving": wrong}}, r"10 \(last\) to 49")
            for wrong in ([[20, 4], [15, 2]], [[50, 2]], [[9, 2]], [[20, 2], [30, 4]], [[20, 0]])
        ),
        ({"search": {"halving": [[20]]}}, r"halving\[0\]"),
        ({"search": {"halving": [[20, 2]]}, "together": 2}, "together"),
        ({"thresholds": [0.5]}, "eval_every"),
        ({"selection": "half"}, "selection = 'half': expected 'tune' or 'test'"),
        ({"selection": "test", "also_by_test": True}, "also_by_test"),
        ({"preset": {"selection": "test"}}, 'preset.selection = "test"'),
        ({"axes": {"client.lr": []}}, r"client.lr = \[\]"),
        ({"axes": {"client": {"lr": ["x"]}}}, r"axes.client.lr\[0\] = 'x': expected a number"),
        ({"axes": {"client": {"lr": 0.1}}}, "axes.client.lr = 0.1: expected a list"),
        ({"axes": {"client": {"lr": "papr"}}}, "axes.client.lr = 'papr'"),
    ],
)
def test_mistakes_in_a_file_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        grid(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "digit"}, "'digit'.*'digits'"),
        ({"algorithms": ["fedagv"]}, "'fedagv'.*'fedavg'"),
        ({"axes": {"client.lrr": [1.0]}}, "'client.lrr'.*'client.lr'"),
        # Options with text values cannot be axes, so "client.form" is not suggested.
        ({"axes": {"client.frm": [1.0]}}, "'client.frm'.*'client.floor'"),
        ({"axes": {"server.lr": [1.0]}}, "mfl .*server.lr"),
        ({"axes": {"client.lr": [-1.0]}}, "lr = -1.0"),
        ({"algorithms": {"fedzmg": {"client": {"momentun": 1}}}}, "'client.momentum'"),
        ({"algorithms": {"fedzmg": {"client": {"lr": 1}}}}, "client.lr is both"),
        ({"algorithms": {"fedavg": {"axes": {"client.b": [1]}}}}, "fedavg"),
        ({"protocol": {"cohort": 161}}, "cohort = 161 .*160 clients"),
        *(({"protocol": {k: v + 1}}, f"{k} = {v + 1}: .*from [01] to {v}") for k, v in PROTOCOL),
        ({"protocol": {"epochs": 10**400}}, r"epochs = 1000* \.\.\. 0*: .*from 1 to"),
        ({"axes": dict.fromkeys(("client.lr", "server.lr"), MANY)}, "1,000,000|1,001,000"),
        ({"axes": {"client.lr": MANY}, "rounds": 501, "last": 501}, "501,000.*last = 501"),
        ({"preset": {"alfa": 1}}, "'alpha'"),
    ],
)
def test_mistakes_of_names_and_values_are_found_without_data(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        grid(**values).check()


def test_settings_reach_every_part() -> None:
    texts = [
        "rounds=20", "seeds=[4,5]", "protocol.cohort=3", "preset.alpha=0.5",
        "axes.client.lr=[1,0.1]", "fedzmg.client.momentum=0.5", "client.decay=0.001",
        "fedzmg.axes.server.lr=[2]", "weights=uniform", "algorithms=['fedzmg', 'fedavg']",
    ]  # fmt: skip
    plan = grid(algorithms=["fedzmg", "mfl"]).with_settings(parse_settings(texts))
    assert (plan.rounds, plan.seeds) == (20, [4, 5])
    assert plan.protocol == {"cohort": 3}
    assert plan.preset == {"alpha": 0.5}
    assert plan.axes["client.lr"] == [0.1, 1.0]
    assert plan.algorithms["fedzmg"].client == {"momentum": 0.5, "decay": 0.001}
    assert plan.algorithms["fedavg"].client == {"decay": 0.001}
    assert {variant.weights for variant in plan.algorithms.values()} == {"uniform"}
    assert plan.axes_of("fedzmg") == {"server.lr": [2.0]}
    for wrong, message in (
        ("cohort=3", "did you mean 'protocol.cohort'"),
        ("fedzmg.lable=x", "did you mean 'algorithms.fedzmg.label'"),
        ("lr=1", "did you mean 'client.lr'"),
        ("fedavg.client=3 fedavg.client.lr=1", r"client = 3: .*fedavg\.client\.lr"),
        ("algorithms=3 client.lr=1", r"algorithms = 3: .*client\.lr"),
        ("seeds=[[[1]]]", r"seeds\[0\] = .*expected a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            plan.with_settings(parse_settings(wrong.split()))


@pytest.mark.parametrize(
    ("given", "value"),
    [
        *((".5", 0.5), ("-.5", -0.5), ("[.1, 1.5]", [0.1, 1.5])),
        *(("a/.5", "a/.5"), ("v.5", "v.5"), ("'a .5'", "a .5")),
    ],
)
def test_numbers_may_begin_with_a_point(given: str, value: object) -> None:
    assert parse_settings([f"key={given}"]) == {"key": value}


def test_stopping_is_off_unless_a_file_says_so(tmp_path: Path) -> None:
    plan = grid()
    assert "stop" not in plan.to_toml()
    assert "search" not in plan.to_toml()
    chosen = plan.with_settings(
        parse_settings(["stop.diverged=true", "search.halving=[[20, 4], [30, 2]]"])
    )
    (tmp_path / "copy.toml").write_text(chosen.to_toml())
    assert GridSpec.read(tmp_path / "copy.toml") == chosen
    assert "halving" in schema("grid")["$defs"]["Search"]["properties"]
    with pytest.raises(InputError, match=r"did you mean 'search\.halving'"):
        plan.with_settings({"search.halvings": [[20, 4]]})
    with pytest.raises(InputError, match="unknown key 'search'"):
        StudySpec.parse({"task": "digits", "algorithms": ["mfl"], "search": {}})


@pytest.mark.parametrize("text", ["", "fedavg,,mfl", "fedavg,"])
def test_empty_names_of_algorithms_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="''"):
        named_algorithms(text)


def test_packs_are_counted() -> None:
    assert grid().packs() == {"fedzmg": 1, "mfl": 1}
    assert grid(together=10, seeds=[1, 2]).packs() == {"fedzmg": 17, "mfl": 2}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_experiment_is_valid_and_round_trips(path: Path, tmp_path: Path) -> None:
    plan = spec_files.read(path)
    assert isinstance(plan, GridSpec | StudySpec)
    plan.check()
    (tmp_path / "copy.toml").write_text(plan.to_toml(), encoding="utf-8")
    assert spec_files.read(tmp_path / "copy.toml") == plan
    if isinstance(plan, StudySpec) and plan.rates.startswith("runs/"):
        # The grid that it takes rates from is a file of ours with the same algorithms.
        other = spec_files.read(path.with_name(f"{Path(plan.rates).name}.toml"))
        assert isinstance(other, GridSpec)
        assert (other.task, other.preset) == (plan.task, plan.preset)
        assert {n: other.base(n) for n in plan.algorithms} == {
            n: plan.base(n) for n in plan.algorithms
        }
        assert all(other.fixed(n) == plan.fixed(n) for n in plan.algorithms)


def test_searches_that_are_compared_have_equal_budgets() -> None:
    points: dict[str, set[int]] = {}
    for path in FILES:
        plan = spec_files.read(path)
        if isinstance(plan, GridSpec):
            # The ablations are compared with each other.
            compared = path.stem.partition("-")[0] if "ablation" in path.stem else path.stem
            sizes = {len(plan.points(name)) * plan.rounds for name in plan.algorithms}
            assert len(sizes) == 1, path
            points.setdefault(compared, set()).update(sizes)
    # 3 x 5 points with the average on the server, 4 x 4 with Adam.
    assert points.pop("ablation") == {15 * 50, 16 * 50}
    assert {name: len(sizes) for name, sizes in points.items()} == dict.fromkeys(points, 1)


def test_kind_decides_how_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('task = "digits"\n')
    assert spec_files.read(path) == RunSpec(task="digits")
    path.write_text('kind = "study"\ntask = "digits"\nalgorithms = "all"\n')
    study = spec_files.read(path)
    assert isinstance(study, StudySpec)
    assert len(study.algorithms) > 20
    with pytest.raises(InputError, match="is a study: use 'fedzmg study"):
        spec_files.read(path, "grid")
    path.write_text('kind = "gird"\n')
    with pytest.raises(InputError, match="unknown kind 'gird': did you mean 'grid'"):
        spec_files.read(path)
    for kind in ("3", '["grid"]'):
        path.write_text(f"kind = {kind}\n")
        with pytest.raises(InputError, match=r"unknown kind .* \(known: grid, run, study\)"):
            spec_files.read(path)
    with pytest.raises(InputError, match="cannot read"):
        spec_files.read(tmp_path / "none.toml")
    path.write_text('task = "digits"\nalgorithms = ["fedzmg"]\n')
    assert isinstance(spec_files.read(path, "grid"), GridSpec)
    with pytest.raises(InputError, match=r"a\.toml: kind is missing"):
        spec_files.read(path)


def test_thresholds_of_accuracies_are_shares() -> None:
    plan = StudySpec.parse({"task": "digits", "algorithms": ["fedzmg"], "thresholds": [80]})
    said = "thresholds = 80: an accuracy is a share, so expected 0 to 1, 0.80 for 80 %"
    with pytest.raises(InputError, match=f"^{said}$"):
        plan.check(plan.build_task())
    # A distance has no highest value.
    other = StudySpec.parse(
        {"task": "quadratic", "algorithms": ["fedzmg"], "thresholds": [80], "rates": "given"}
    )
    other.check(other.build_task())


@pytest.mark.parametrize("kind", ["run", "grid", "study"])
def test_schema_names_what_there_is(kind: str) -> None:
    found = schema(kind)
    assert "digits" in found["properties"]["task"]["anyOf"][0]["enum"]
    assert "plugins" in found["properties"]
    assert not found["additionalProperties"]
    assert "fedzmg-adam:projected" in json.dumps(found)
    assert found["properties"]["precision"]["description"]
    with pytest.raises(InputError, match="unknown kind 'x'"):
        schema("x")


def test_estimate_counts_what_the_paper_does() -> None:
    """The numbers of CIFAR-100 by hand; no data is needed for them."""
    plan = spec_files.read(ROOT / "experiments" / "cifar100-grid.toml")
    found = estimate(plan)
    model = 4 * 2_214_532
    assert (found["trials"], found["rounds"], found["evaluations"]) == (3 * 81, 50, 11)
    assert found["bytes_down"] == found["bytes_up"] == 3 * 81 * 50 * 10 * model
    # FedAdam's server keeps two more models; an old and a new checkpoint lie side by side.
    assert found["disk_bytes"] - found["disk_bytes_after"] == 2 * 81 * 3 * model
    study = estimate(spec_files.read(ROOT / "experiments" / "cifar100-study.toml"))
    # After rounds 1, 6, ..., 996 and after the last.
    assert (study["trials"], study["rounds"], study["evaluations"]) == (15, 1000, 201)


def test_what_takes_long_is_extrapolated_from_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SECONDS", 0.0)
    found = estimate(RunSpec(task="digits", protocol={"rounds": 3}))
    assert found["extrapolated"]
    assert found["probe"] == "one step of one client on 10 examples"
    assert found["seconds"] is not None
    assert found["seconds"] > 0
    shown = dict(views.estimate(found))["time"]
    assert found["probe"] in shown


def test_estimate_of_embedded_data_counts_steps_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SECONDS", 600.0)  # also on a busy machine
    found = estimate(RunSpec(task="digits", engine="vectorized", protocol={"rounds": 3}))
    # 160 clients of 50 images each, batches of 10, two epochs: ten steps for each of five clients.
    assert found["steps"] == 3 * 5 * 10
    assert found["seconds"] is not None
    assert 0 < found["seconds"] < 600
    assert (found["device"], found["engine"], found["missing"]) == ("cpu", "vectorized", "")
    assert found["probe"].endswith("of 5 clients")
    task = tasks.get("digits")
    assert found["bytes_down"] == 3 * 5 * task.model_bytes
