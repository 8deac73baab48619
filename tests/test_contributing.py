"""Worked examples of CONTRIBUTING.md, taken from the page itself."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Algorithm, Task, Trial, algorithms, simulate

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
FILES = dict(
    re.findall(r"`src/fedzmg/(algorithms/\w+\.py)`\.[^`].*?```python\n(.*?)```", TEXT, re.DOTALL)
)
"""Contents of the new files by their names."""
[CATALOG] = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Load the package of algorithms anew, with the files of the page in it."""
    folder = tmp_path_factory.mktemp("algorithms")
    for name, source in FILES.items():
        (folder / Path(name).name).write_text(source)
    (folder / "catalog.toml").write_text(CATALOG)
    spec = importlib.util.spec_from_file_location(
        "fedzmg.algorithms", algorithms.__file__,
        submodule_search_locations=[*algorithms.__path__, str(folder)],
    )  # fmt: skip
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
        for name in FILES:
            del sys.modules[f"fedzmg.algorithms.{Path(name).stem}"]


def test_a_new_file_adds_an_algorithm_to_the_table(registry: ModuleType) -> None:
    assert {"lean", "pull"} <= registry.ALGORITHMS.keys()
    assert repr(registry.get("pull").client) == "Pull(lr=0.1, mu=0.01)"
    assert registry.ALGORITHMS["pull"].family == "corrected clients"
    assert registry.ALGORITHMS["lean"].up == 2
    assert {"Lean", "Pull"} <= set(registry.__all__)


def task(**protocol: int) -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)), rng.integers(0, 3, 24)
    owner = np.repeat(np.arange(4), [3, 9, 7, 5])
    settings = {"cohort": 3, "batch_size": 4, "epochs": 2, **protocol}
    return Task.from_arrays(nn.Linear(4, 3), x, y, owner, test=(x, y), **settings)


def params(algorithm: Algorithm, engine: str) -> torch.Tensor:
    [history] = simulate(
        task(),
        [Trial(algorithm)],
        rounds=3,
        engine=engine,
        dtype=torch.float64,  # type: ignore[arg-type]
    )
    return history.params["weight"]


@pytest.mark.parametrize(("name", "number"), [("pull", "mu"), ("lean", "lean")])
def test_example_runs_on_both_engines_and_degenerates_to_fedavg(
    name: str, number: str, registry: ModuleType
) -> None:
    algorithm = registry.get(name)
    loop, mapped = params(algorithm, "sequential"), params(algorithm, "vectorized")
    torch.testing.assert_close(loop, mapped, rtol=0, atol=1e-9)
    fedavg = params(algorithms.get("fedavg"), "sequential")
    assert (loop - fedavg).abs().max() > 1e-6
    without = algorithm.with_options({f"client.{number}": 0.0})
    torch.testing.assert_close(params(without, "sequential"), fedavg, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=f"{number} = -1: expected a finite number >= 0"):
        algorithm.with_options({f"client.{number}": -1})


def test_server_example_sends_what_its_clients_sent(registry: ModuleType) -> None:
    """Full batches of all clients, one step a round: by hand, weighted by examples."""
    algorithm = registry.get("lean").with_options({"client.lean": 0.25})
    whole = task(cohort=4, batch_size=9, epochs=1)
    [start] = simulate(whole, [Trial(algorithm.with_options({"client.lr": 1e-12}))], rounds=1)
    [history] = simulate(whole, [Trial(algorithm)], rounds=2, engine="sequential")
    x, y = whole.train.examples
    weight, bias, last = start.params["weight"], start.params["bias"], None
    for _ in range(2):
        weight, bias = (leaf.detach().requires_grad_() for leaf in (weight, bias))
        loss = nn.functional.cross_entropy(x.float() @ weight.T + bias, y)
        grad = torch.autograd.grad(loss, (weight, bias))
        sent = [torch.zeros_like(g) for g in grad] if last is None else last
        weight, bias = (
            w - 0.1 * (0.75 * g + 0.25 * m)
            for w, g, m in zip((weight, bias), grad, sent, strict=True)
        )
        last = grad
    torch.testing.assert_close(history.params["weight"], weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(history.params["bias"], bias, rtol=0, atol=1e-6)


def test_paired_rules_are_not_combined_with_others(registry: ModuleType) -> None:
    lean = registry.get("lean")
    with pytest.raises(ValueError, match="do not work with"):
        Algorithm("alone", lean.client, algorithms.Average())


def test_the_lock_has_the_constraints_hashes_and_no_address() -> None:
    root = Path(__file__).parents[1]
    lock = (root / "requirements.lock").read_text()
    packages = re.findall(r"^([a-z0-9-]+==\S+)(.*(?:\n    .*)*)", lock, re.MULTILINE)
    assert len(packages) == len(re.findall("==.*\\\\$", lock, re.MULTILINE))
    assert all("--hash=sha256:" in hashes for _, hashes in packages)
    wanted = re.findall(r"^[^#\s]+", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert set(wanted) <= {name for name, _ in packages}
    assert not re.search("://|--(extra-)?index|--find-links| @ |file:", lock)
