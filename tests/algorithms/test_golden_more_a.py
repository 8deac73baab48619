"""FedNova, FedExP, FedCM, FedDC, FedACG, FedAMS, q-FedAvg and AFL: known answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from known_answers import ENGINES, close, named, simulation

from fedzmg.algorithms.afl import nearest_mixture
from fedzmg.algorithms.fedexp import Extrapolate, Extrapolated
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError
from fedzmg.messages import Cohort
from fedzmg.simulation import Simulation
from fedzmg.tree import Tree, row
from fedzmg.wrappers.wrapper import ServerDecay
from golden_problems import P2, quadratic_task

STORED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "more_a.json").read_text()
)
UNIFORM = {"weights": "uniform"}
MEAN = {"server_output": "mean"}
ENTRIES: dict[str, Algorithm] = {
    "ref_fedavg_weighted": named("fedavg"),
    "ref_fedavg_uniform": named("fedavg", **UNIFORM),
    "ref_fedavg_unequal_steps": named("fedavg"),
    "fednova_sgd": named("fednova"),
    "fednova_momentum": named("fednova", client_momentum=0.9),
    "fednova_server_momentum": named("fednova", server_beta=0.9),
    "fednova_prox": named("fednova", client_mu=0.5),
    "fednova_prox_tau_norm": named("fednova", client_mu=0.5, client_tau="norm"),
    "fednova_equal_steps": named("fednova"),
    "fedexp": named("fedexp"),
    "fedexp_code_eps": named("fedexp", server_eps_scale="cohort"),
    "fedexp_weighted": named("fedexp", weights="examples"),
    "fedexp_active": named("fedexp"),
    "fedexp_active_code_eps": named("fedexp", server_eps_scale="cohort"),
    "fedcm": named("fedcm"),
    "fedcm_alpha_0.5": named("fedcm", client_alpha=0.5),
    "fedcm_alpha_1": named("fedcm", client_alpha=1.0),
    "feddc": named("feddc", client_alpha=0.1),
    "feddc_code_weighted": named("feddc", client_alpha=0.1, client_mean_examples=20.0),
    "feddc_last_update_state": named("feddc", client_alpha=0.1, client_state="last"),
    "feddc_alpha0_no_drift": named("scaffold"),
    "fedacg": named("fedacg", client_mu=0.01),
    "fedacg_beta_0.5": named("fedacg", client_mu=0.5),
    "fedacg_lam0_beta0": named("fedacg", client_mu=0.0, server_beta=0.0),
    "fedams_max_eps": named("fedams"),
    "fedams_amsgrad": named("fedams:amsgrad"),
    "fedams_code_bias_corrected": named("fedams:code"),
    "fedams_max_eps_active": named("fedams", server_eps=0.01),
    **{f"qfedavg_q{q}": named("qfedavg", client_q=float(q)) for q in ("0", "0.1", "1", "5")},
    "afl": named("afl", **MEAN),
    "afl_gamma0": named("afl", **MEAN, server_mixture_lr=0.0),
    "afl_gamma_0.1": named("afl", **MEAN, server_mixture_lr=0.1),
    "afl_exponentiated": named("afl", **MEAN, server_mixture_lr=0.05, server_rule="exponential"),
    "afl_one_step": named("afl", **MEAN),
    "afl_sampled": named("afl", **MEAN),
    "afl_sampled_unbiased": named("afl", **MEAN, server_sampled="unbiased"),
}


@pytest.mark.parametrize("name", ["fedexp_active", "afl_gamma_0.1", "afl_sampled_unbiased"])
def test_the_kept_model_does_not_affect_training(name: str) -> None:
    last = ENTRIES[name].with_options({"server.output": "last"})
    sim = run(name, last, "vectorized")
    for expected in STORED[name]["rounds"]:
        sim.run_round()
        close(sim.snapshot.params["weight"], expected["w"])
    with pytest.raises(InputError, match=r"server\.output=last"):
        ServerDecay(named("afl", **MEAN).server)


def test_eps_follows_the_client_learning_rate() -> None:
    """Halving the learning rate quarters squared norms and eps, so that ratios stay."""
    base = run("fedexp_active", ENTRIES["fedexp_active"], "sequential")
    state = row(base.snapshot.state, 0)
    server, delta = Extrapolate(output="last"), Tree({"weight": torch.tensor([1.0, 2.0])})
    for rate in (0.1, 0.05):
        scale = rate / 0.1
        average = torch.tensor(50.0) * scale**2, torch.tensor(rate)
        state, before = Extrapolated((), state.rate), delta.zeros()
        size = torch.tensor(2)
        cohort = Cohort(delta * scale, average, (), size, size, torch.tensor(1))
        after, state = server.update(before, state, cohort)
        close(after["weight"] / scale, -delta["weight"] * 50 / (2 * 5.001), 1e-5)


def test_projection_onto_mixtures_against_bisection() -> None:
    generator = torch.Generator().manual_seed(3)
    for size in (1, 2, 7, 100):
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        low, high = values.min() - 1, values.max()
        for _ in range(200):
            middle = (low + high) / 2
            below = (values - middle).clamp(min=0).sum() < 1
            low, high = torch.where(below, low, middle), torch.where(below, middle, high)
        close(nearest_mixture(values), (values - low).clamp(min=0), 1e-12)


def test_q_fedavg_drops_a_negative_loss() -> None:
    shifted = replace(quadratic_task(P2), loss=lambda outputs, targets: outputs - 12)
    sim = simulation(shifted, named("qfedavg", client_q=1.0))
    [record] = sim.run_round().records
    assert (record.clients, record.dropped) == (1, 1)


def run(name: str, algorithm: Algorithm, engine: str) -> Simulation:
    """Set up the federation of a stored case."""
    hyper = STORED[name]["hyper"]
    steps = hyper.get("steps", 2)
    steps = steps if isinstance(steps, dict) else {"A": steps, "B": steps}
    task = quadratic_task(P2 | {"w0": hyper.get("w0", P2["w0"])}, epochs=max(steps.values()))
    who = hyper.get("schedule")
    return simulation(task, algorithm, engine=engine, participants=who, steps=steps)


def found_in(sim: Simulation, kind: str) -> dict[str, Any]:
    """Return models, server state and client memories by the names of the specification."""
    state, model = row(sim.snapshot.state, 0), row(sim.snapshot.params, 0)
    memory = {name: row(sim.memory.read([(0, i)]), 0) for i, name in enumerate("AB")}
    if kind == "fedexp":
        return {"w": state.params, "w_eval_last_two": model}
    if kind in ("fedcm", "fedacg"):
        return {"w": model, "m": state}
    if kind == "feddc":
        own = {
            "h": {k: m.drift for k, m in memory.items()},
            "s": {k: m.state for k, m in memory.items()},
        }
        return {"w": model, "S": state.state, **own}
    if kind == "fedams":
        moments, largest = state
        return {"w": model, "m": moments.first, "v": moments.second, "v_hat": largest}
    if kind == "afl":
        return {
            "w": state.params,
            "w_running_mean": model,
            "lam": dict(zip("AB", state.weights, strict=True)),
        }
    return {"w": model}


def compare(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            compare(found[key], value)
    else:
        close(found["weight"] if isinstance(found, Tree) else found, expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", STORED)
def test_every_round_of_every_stored_case(name: str, engine: str) -> None:
    sim = run(name, ENTRIES[name], engine)
    for expected in STORED[name]["rounds"]:
        sim.run_round()
        found = found_in(sim, ENTRIES[name].name.partition(":")[0])
        assert "w" in found
        compare(found, {key: value for key, value in expected.items() if key in found})
