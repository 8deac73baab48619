"""The hash of an algorithm's equations: changes that move it, and their report."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from toys import Stop, toy

from fedzmg import Federation, Parts, aggregators, algorithms, tasks
from fedzmg.contract import Algorithm, ServerRule
from fedzmg.experiment import rules_hash as rules
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.rules_hash import rules_sha256
from fedzmg.experiment.run_directory import change_manifest
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.experiment.verify import verify
from fedzmg.results.diff import compare as compare_directories
from fedzmg.simulation import RoundReport

OWN = '''
from dataclasses import dataclass

from fedzmg.algorithms.fedavg import SGD
from fedzmg.contract import ServerRule
from fedzmg.messages import Cohort

FACTOR = 0.5


def scaled(delta):
    """A helper."""
    return delta * FACTOR


def elsewhere():
    return 1


@dataclass(frozen=True)
class Mine(ServerRule):
    """Its equations."""

    def update(self, params, state, cohort: Cohort):
        # a remark
        return params - scaled(cohort.delta), state
'''


@pytest.fixture(autouse=True)
def anew() -> None:
    """Processes do not see sources change; tests do."""
    rules._hash.cache_clear()


def hash_of(text: str, place: Path) -> str | None:
    """The hash of an algorithm whose server rule is in a file of its own."""
    place.mkdir(exist_ok=True)
    path = place / f"mine_{len(list(place.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["mine"] = module
    try:
        spec.loader.exec_module(module)
        return rules_sha256(Algorithm("mine", algorithms.get("fedavg").client, module.Mine()))
    finally:
        del sys.modules["mine"]


@pytest.mark.parametrize(
    ("old", "new", "moves"),
    [
        ("params - scaled", "params + scaled", True),
        ("return delta * FACTOR", "return delta / FACTOR", True),
        ("FACTOR = 0.5", "FACTOR = 0.25", True),
        ("# a remark", "# another", False),
        ('"""Its equations."""', '"""Their words,\n\n    in several lines."""', False),
        ("A helper.", "Helps.", False),
        ("return 1", "return 2", False),
        ("\n\n\n@dataclass", "\n\n\n\n# more\n@dataclass", False),
    ],
)
def test_equations_move_it_and_words_do_not(
    tmp_path: Path, old: str, new: str, moves: bool
) -> None:
    assert old in OWN
    before, after = (hash_of(t, tmp_path / "o") for t in (OWN, OWN.replace(old, new)))
    assert None not in (before, after)
    assert (before != after) == moves


def test_the_projection_counts_for_fedzmg_and_rates_do_not() -> None:
    fedzmg = algorithms.get("fedzmg")
    kinds = [type(rule) for rule in rules.chain(fedzmg.client)]
    assert any("def zero_mean(" in part for part in rules._parts(kinds))
    other = replace(fedzmg, server=replace(fedzmg.server, lr=0.125))
    assert rules_sha256(other) == rules_sha256(fedzmg) != rules_sha256(algorithms.get("fedavg"))


def test_parts_and_aggregators_count() -> None:
    fedavg, task = algorithms.get("fedavg"), tasks.get("quadratic")
    median = Federation(aggregator=aggregators.get("median"))
    kinds = [
        rules_sha256(fedavg, task, Federation()),
        rules_sha256(replace(fedavg, parts=Parts(frozen=("norm",))), task),
        rules_sha256(fedavg, replace(task, parts=Parts(frozen=("norm",)))),
        rules_sha256(fedavg, task, median),
        rules_sha256(replace(fedavg, aggregator=aggregators.get("median"))),
    ]
    assert kinds[0] == rules_sha256(fedavg)
    assert kinds[1] == kinds[2]
    assert kinds[3] == kinds[4]
    assert len(set(kinds)) == 3


def test_rules_without_a_source_have_none() -> None:
    space: dict[str, Any] = {"ServerRule": ServerRule, "dataclass": dataclass, "__name__": "typed"}
    exec("@dataclass(frozen=True)\nclass Typed(ServerRule):\n"
         "    def update(self, params, state, cohort): return params, state", space)  # fmt: skip
    assert rules_sha256(replace(algorithms.get("fedavg"), server=space["Typed"]())) is None


class Told(Stop):
    """Counts the rounds that were trained."""

    def __init__(self, after: int = 0) -> None:
        super().__init__(after)
        self.rounds = 0

    def advance(self, report: RoundReport) -> None:
        self.rounds += 1
        super().advance(report)


STUDY = StudySpec.parse(
    {
        "task": "toy", "seeds": [3, 5], "rounds": 3, "rates": "given", "engine": "vectorized",
        "algorithms": {"a": {"algorithm": "fedavg", "label": "plain"}, "fedadam": {}},
    }
)  # fmt: skip
GRID = GridSpec.parse(
    {
        "task": "toy", "algorithms": ["fedavg", "fedadam"], "seeds": [1], "rounds": 3, "last": 1,
        "engine": "vectorized", "axes": {"client.lr": [0.1, 0.5]},
    }
)  # fmt: skip


def train(kind: str, out: Path, told: Told) -> None:
    if kind == "study":
        run_study(STUDY, out, task=toy(), progress=told)
    else:
        run_grid(GRID, out, task=toy(), progress=told, checkpoint_seconds=0)


def rewrite(manifests: Iterable[Path], **facts: Any) -> None:
    """Change facts of manifests; None takes one away."""
    for path in manifests:
        change_manifest(path.parent, **facts)


@pytest.mark.parametrize("kind", ["study", "grid"])
def test_changed_rules_are_reported_in_a_line_and_nothing_is_trained(
    tmp_path: Path, kind: str
) -> None:
    train(kind, tmp_path / "r", first := Told())
    train(kind, tmp_path / "r", again := Told())
    assert first.lines == again.lines == []
    assert (first.rounds > 0, again.rounds) == (True, 0)
    manifests = sorted((tmp_path / "r").rglob("manifest.json"))
    expected = {name: rules_sha256(algorithms.get(name)) for name in ("fedavg", "fedadam")}
    for path in manifests:
        name = "fedadam" if "fedadam" in path.parts else "fedavg"
        assert json.loads(path.read_text())["rules_sha256"] == expected[name]

    rewrite([path for path in manifests if "fedadam" in path.parts], rules_sha256="0" * 64)
    train(kind, tmp_path / "r", one := Told())
    assert (len(one.lines), one.rounds) == (1, 0)
    assert one.said.startswith("fedadam: rules have changed")

    rewrite(manifests, rules_sha256="0" * 64)
    train(kind, tmp_path / "r", both := Told())
    names = "plain, fedadam" if kind == "study" else "fedavg, fedadam"
    assert (len(both.lines), both.rounds) == (1, 0)
    assert both.said.startswith(f"{names}: rules have changed")


def test_verify_and_diff_name_the_change(tmp_path: Path) -> None:
    train("study", tmp_path / "r", Told())
    copy = shutil.copytree(tmp_path / "r", tmp_path / "copy")
    rewrite(copy.rglob("manifest.json"), rules_sha256="0" * 64)
    assert not compare_directories(tmp_path / "r", tmp_path / "r").differs()
    changes = compare_directories(tmp_path / "r", copy).changes
    assert [(one.aspect, one.key, len(one.runs)) for one in changes] == [
        ("versions", "rules_sha256", 2)
    ] * 2, "one for each algorithm"
    verdicts = verify(copy, rounds=1, task=toy())
    assert all("rules_sha256" in [fact.name for fact in one.facts] for one in verdicts)
    rewrite(copy.rglob("manifest.json"), rules_sha256=None)
    assert not compare_directories(tmp_path / "r", copy).differs()
    verdicts = verify(copy, rounds=1, task=toy())
    assert not any("rules_sha256" in [fact.name for fact in one.facts] for one in verdicts)
