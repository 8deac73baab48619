"""Personal algorithms against numbers that were computed independently."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedzmg
from fedzmg import Parts, Task, Trial, algorithms
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree, row
from fedzmg.wrappers.parts import fit
from golden_problems import outputs_themselves

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "golden_personal.json").read_text()
)
P2 = GOLDEN["problem"]
HALVES = {"parts.personal": ("personal",)}


class TwoParts(nn.Module):
    """``0.5 (w - c)' Q (w - c)`` of a shared and a personal weight; rows ``[H | c]``."""

    def __init__(self, coupling: float) -> None:
        super().__init__()
        start = torch.tensor(P2["w0"], dtype=torch.float64)
        self.shared, self.personal = (nn.Parameter(part.reshape(1)) for part in start)
        self.coupling = coupling

    def forward(self, rows: Tensor) -> Tensor:
        curvature, centre = rows.chunk(2, dim=1)
        apart = torch.cat([self.shared, self.personal]) - centre
        mixed = 2 * self.coupling * apart[:, 0] * apart[:, 1]
        return 0.5 * ((curvature * apart**2).sum(1) + mixed)


def task(coupling: float, epochs: int) -> Task:
    rows, owners = [], []
    for name, count in P2["n"].items():
        rows += [P2["H"][name] + P2["c"][name]] * count
        owners += [name] * count
    x, y = torch.tensor(rows), torch.zeros(len(rows))
    return Task.from_arrays(
        TwoParts(coupling), x, y, owners, test=(x, y), loss=outputs_themselves,
        metric=fedzmg.Metric("loss", outputs_themselves, higher_is_better=False),
        axes={"shared": (), "personal": ()}, init="given", cohort=2, batch_size=30, epochs=epochs,
        rounds=P2["rounds"],
    )  # fmt: skip


CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "fedper": ("fedper", HALVES, 2),
    "lg_fedavg_no_warmup": ("lg-fedavg", HALVES | {"weights": "examples"}, 2),
    "fedbabu": ("fedbabu", {"parts.frozen": ("personal",)}, 2),
    "fedrep": ("fedrep", HALVES | {"client.head_epochs": 2}, 2),
    "fedrep_uniform_1body": (
        "fedrep",
        HALVES | {"client.head_epochs": 2, "weights": "uniform"},
        1,
    ),
    "ditto": ("ditto", {"client.lam": 0.5}, 2),
    "ditto_lambda0": ("ditto", {"client.lam": 0.0}, 2),
    "apfl": ("apfl", {"client.adapt": "never"}, 2),
    "apfl_adaptive": ("apfl", {"client.adapt": "every_step"}, 2),
    "apfl_adaptive_per_round": ("apfl", {}, 2),
    "pfedme": (
        "pfedme",
        {"client.lam": 2.0, "client.personal_lr": 0.1, "client.inner_steps": 3},
        2,
    ),
    "pfedme_uniform_beta2": (
        "pfedme",
        {
            "client.lam": 2.0,
            "client.personal_lr": 0.1,
            "client.inner_steps": 3,
            "server.lr": 2.0,
            "weights": "uniform",
        },
        2,
    ),
    "pfedme_restart": (
        "pfedme",
        {
            "client.lam": 2.0,
            "client.personal_lr": 0.1,
            "client.inner_steps": 3,
            "client.inner_start": "restart",
        },
        2,
    ),
    "perfedavg_fo": ("perfedavg", {"client.alpha": 0.1, "weights": "examples"}, 4),
    "perfedavg_fo_uniform": ("perfedavg", {"client.alpha": 0.1}, 4),
    "perfedavg_hf": ("perfedavg:hf", {"client.alpha": 0.1, "weights": "examples"}, 6),
    "fedala": ("fedala", {"client.layers": 1, "client.start_epochs": 5}, 2),
}


def vector(tree: Tree) -> np.ndarray[Any, Any]:
    return torch.stack([tree["shared"], tree["personal"]]).reshape(2).numpy()


@pytest.mark.parametrize("problem", ["algorithms", "algorithms_coupled"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_every_round(problem: str, case: str, engine: Any) -> None:
    name, options, epochs = CASES[case]
    algorithm = algorithms.get(name).with_options({"client.lr": 0.1} | options)
    coupling = 0.5 if problem == "algorithms_coupled" else 0.0
    sim = Simulation(
        task(coupling, epochs),
        [Trial(algorithm)],
        rounds=P2["rounds"],
        device=torch.device("cpu"),
        dtype=torch.float64,
        engine=engine,
    )
    rule = fit(algorithm, sim.task.model.layout, Parts(), 2).client
    for expected in GOLDEN[problem][case]["rounds"]:
        sim.run_round()
        params = row(sim.snapshot.params, 0)
        near = partial(np.testing.assert_allclose, rtol=0, atol=1e-9)
        near(
            vector(params)[: 2 if "w" in expected else 1], expected.get("w", expected.get("shared"))
        )
        wanted = expected.get("mixed_with_global", expected.get("model", expected.get("personal")))
        memories = sim.memory.of_trial(0)
        for i, client in enumerate(P2["n"]):
            if case == "fedala":  # its clients are evaluated with the newest model
                near(vector(memories[i][0]), wanted[client])
            elif rule.is_personal:
                near(vector(rule.personal_model(params, memories[i])), wanted[client])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_clients_are_evaluated_with_their_own_models(engine: Any) -> None:
    """Losses of FedBABU's fine-tuned models, and of FedPer's personal ones, by hand."""

    def loss(client: str, w: list[float]) -> float:
        apart = np.array(w) - P2["c"][client]
        return float(0.5 * (np.array(P2["H"][client]) * apart**2).sum())

    for case, key, of in (
        ("fedbabu", "finetuned_full", "tuned"),
        ("fedper", "model", "personal"),
        ("ditto", "personal", "personal"),
    ):
        name, options, epochs = CASES[case]
        problem = task(0.0, epochs)
        problem = replace(problem, protocol=replace(problem.protocol, fine_tune=2))
        sim = Simulation(
            problem,
            [Trial(algorithms.get(name).with_options({"client.lr": 0.1} | options))],
            rounds=P2["rounds"],
            device=torch.device("cpu"),
            dtype=torch.float64,
            engine=engine,
        )
        for expected in GOLDEN["algorithms"][case]["rounds"]:
            sim.run_round()
            found = getattr(sim.evaluate_clients()[0], of)
            wanted = [loss(client, expected[key][client]) for client in P2["n"]]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def test_meta_learned_models_are_fine_tuned_at_the_inner_rate() -> None:
    problem = task(0.0, 4)
    problem = replace(problem, protocol=replace(problem.protocol, fine_tune=1))
    rule = algorithms.get("perfedavg").with_options({"client.lr": 0.1, "client.alpha": 0.03})
    sim = Simulation(
        problem,
        [Trial(rule)],
        rounds=1,
        device=torch.device("cpu"),
        dtype=torch.float64,
        engine="vectorized",
    )
    sim.run_round()
    model, tuned = vector(row(sim.snapshot.params, 0)), sim.evaluate_clients()[0].tuned
    for client, found in zip(P2["n"], tuned, strict=True):
        curvature, centre = np.array(P2["H"][client]), np.array(P2["c"][client])
        apart = (1 - 0.03 * curvature) * (model - centre)
        np.testing.assert_allclose(found, 0.5 * (curvature * apart**2).sum(), rtol=0, atol=1e-9)
