"""FedSAM, MoFedSAM, FedSpeed, FedMuon, MOON, FedLC and FedNTD: known answers and properties."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from known_answers import ENGINES, close, made, named, simulation
from test_golden import Recorder, compare
from torch import Tensor, nn

import fedzmg
from fedzmg.algorithms import (
    SAM,
    SGD,
    Aligned,
    CalibratedLogits,
    ClipNorm,
    FedSpeed,
    Moon,
    Muon,
    NotTrueDistillation,
    Scaffold,
    ZeroMean,
)
from fedzmg.algorithms.ditto import OwnModel
from fedzmg.algorithms.fedmuon import newton_schulz, polar
from fedzmg.algorithms.options import configure
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError
from fedzmg.messages import Asked, BatchOutputs
from fedzmg.models.objective import cross_entropy
from fedzmg.tree import Tree, row
from golden_problems import (
    P2,
    Net,
    make_context,
    models,
    outputs_themselves,
    quadratic_task,
    random_task,
)

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "more_b.json").read_text()
)
Q34: dict[str, Any] = GOLDEN["problem_Q34"]
LOSSES: dict[str, Any] = GOLDEN["losses"]
CLIENTS = ["A", "B"]


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def matrix_task() -> fedzmg.Task:
    """Quadratics of a 3x4 matrix, ``0.5 sum d_i (W_ij - T_ij)^2``, one example per client."""
    curvature = torch.stack([double(Q34["d"][k])[:, None].expand(3, 4) for k in CLIENTS])
    x = torch.stack([curvature, double([Q34["T"][k] for k in CLIENTS])], 1)
    return fedzmg.Task.from_arrays(
        Net(
            lambda m, rows: 0.5 * (rows[:, 0] * (m.weight - rows[:, 1]) ** 2).sum((1, 2)),
            weight=nn.Parameter(double(Q34["W0"])),
        ),
        x,
        torch.zeros(2),
        CLIENTS,
        test=(x, torch.zeros(2)),
        loss=outputs_themselves,
        metric=fedzmg.Metric("loss", outputs_themselves, higher_is_better=False),
        axes={"weight": (1,)},
        init="given",
        cohort=2,
        batch_size=1,
        epochs=Q34["local_steps"],
    )


def muon(name: str, **options: Any) -> Algorithm:
    return named(name, client_beta=0.95, client_decay=0.0, **options)


SPEED = {"client_rho": 0.1, "client_lam": 1.0}
ENTRIES: dict[str, Algorithm] = {
    "fedsam": named("fedsam"),
    "fedsam_uniform": named("fedsam", weights="uniform"),
    "mofedsam": named("mofedsam"),
    "mofedsam_cold_start": named("mofedsam:cold-start"),
    "mofedsam_beta1_equals_fedsam_uniform": named("mofedsam", client_alpha=1.0),
    "fedspeed": named("fedspeed", **SPEED),
    "fedspeed_unit": named("fedspeed", client_alpha=1.0, client_perturbation="unit"),
    "fedspeed_no_perturbation": named("fedspeed", client_alpha=None, client_lam=1.0),
    "fedmuon": muon("fedmuon"),
    "fedmuon_exact_polar": muon("fedmuon", client_form="plain", client_orthogonal="polar"),
    "local_muon": muon("fedmuon:local"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", GOLDEN["trajectories"])
def test_federation_after_every_round(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, stored = ENTRIES[name], GOLDEN["trajectories"][name]["rounds"]
    task = matrix_task() if "muon" in name else quadratic_task(P2)
    sim, recorder = simulation(task, algorithm, engine=engine), Recorder(monkeypatch)
    assert len(stored) == 4
    for expected in stored:
        recorder.clear()
        before = sim.snapshot.params["weight"][0]
        sim.run_round()
        after, state = sim.snapshot.params["weight"][0], row(sim.snapshot.state, 0)
        order = [CLIENTS[batch.client] for batch in sim.planner.batches(sim.round)]
        last = {c: own[-1] for c, own in recorder.by_client(recorder.works, order).items()}
        local = {client: work.params["weight"] for client, work in last.items()}
        memories = {c: row(sim.memory.read([(0, i)]), 0) for i, c in enumerate(CLIENTS)}
        found = {
            "w": after,
            "local": local,
            "delta": {client: before - weight for client, weight in local.items()},
            "mean_delta": before - after,
            "g_hat": memories,
            "momentum": getattr(state, "momentum", state),
        }
        if name == "local_muon":
            found["momentum"] = sum(work.scratch.first["weight"] for work in last.values()) / 2
        compare(found, expected, 1e-9)


BATCH = {name: double(v) for name, v in GOLDEN["batch"].items() if name != "reduction"}
LABELS = BATCH["labels"].long()


def own_loss(rule: Any, context: Any, references: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rule's mean loss of the golden batch, and its gradients for logits and features."""
    logits = BATCH["local_logits"].clone().requires_grad_()
    features = BATCH["local_projection"].clone().requires_grad_()
    others = (BATCH["global_projection"], BATCH["previous_projection"])[:references]
    batch = BatchOutputs(
        cross_entropy(logits, LABELS),
        logits,
        LABELS,
        features,
        (BATCH["global_logits"],) * references,
        others,
    )
    loss = rule.loss(context, batch).mean()
    by_logits, by_features = torch.autograd.grad(
        loss, (logits, features), allow_unused=True, materialize_grads=True
    )
    return loss.detach(), by_logits, by_features


SENT = Tree({"w": torch.zeros(1, dtype=torch.float64)})
COUNTED = make_context(SENT)._replace(asked=Asked(label_counts=BATCH["client_label_counts"].long()))
KNOWN = make_context(SENT, memory=OwnModel(SENT, torch.tensor(1.0)))
NEW = make_context(SENT, memory=Moon(SGD()).init_memory(SENT))
LOSS_ENTRIES: dict[str, tuple[Any, Any]] = {
    "cross_entropy": (SGD(), COUNTED),
    "fedlc": (CalibratedLogits(SGD()), COUNTED),  # counts of at least 1e-8: equal to rounding
    "fedlc_masked": (CalibratedLogits(SGD()), COUNTED),
    "fedlc_floor1": (CalibratedLogits(SGD(), absent="counted"), COUNTED),
    "fedntd_total_tau1": (NotTrueDistillation(SGD()), COUNTED),
    "fedntd_total_tau3": (NotTrueDistillation(SGD(), tau=3.0), COUNTED),
}


def test_every_stored_answer_is_used() -> None:
    assert set(GOLDEN["trajectories"]) == set(ENTRIES)
    elsewhere = {"moon_contrastive", "moon_total", "fedlc_as_printed"}
    parts = {"fedntd_distillation_tau1", "fedntd_distillation_tau3"}
    assert set(LOSSES) == set(LOSS_ENTRIES) | elsewhere | parts


@pytest.mark.parametrize("name", LOSS_ENTRIES)
def test_losses_and_their_gradients(name: str) -> None:
    loss, by_logits, _ = own_loss(*LOSS_ENTRIES[name])
    close(loss, LOSSES[name]["loss"])
    close(by_logits, LOSSES[name]["gradient"])
    if name.startswith("fedntd"):
        part, plain = LOSSES[name.replace("total", "distillation")], LOSSES["cross_entropy"]
        close(loss - plain["loss"], part["loss"])
        close(by_logits - double(plain["gradient"]), part["gradient"])


def test_calibration_as_printed_is_another_loss() -> None:
    """The sum without the true class gives the stored number, and is not what clients minimise."""
    scores = BATCH["local_logits"] - double(LOSSES["fedlc"]["margins"])
    true = scores.gather(1, LABELS[:, None]).squeeze(1)
    rest = scores.scatter(1, LABELS[:, None], -math.inf).logsumexp(1)
    close((rest - true).mean(), LOSSES["fedlc_as_printed"]["loss"])
    assert abs(LOSSES["fedlc_as_printed"]["loss"] - LOSSES["fedlc"]["loss"]) > 0.5


def test_contrast_and_its_gradient() -> None:
    part, plain = LOSSES["moon_contrastive"], LOSSES["cross_entropy"]
    loss, by_logits, by_features = own_loss(Moon(SGD()), KNOWN, 2)
    close(loss, LOSSES["moon_total"]["loss"])
    close(loss - plain["loss"], part["loss"])
    close(by_logits, plain["gradient"])
    close(by_features, part["gradient"])
    loss, _, by_features = own_loss(Moon(SGD()), NEW, 2)
    close(loss, plain["loss"])
    assert not by_features.any()


# Whole federations.


def network() -> nn.Module:
    """A hidden layer, the features, and a layer of scores."""
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def classes(module: nn.Module | None = None, count: int = 3, **settings: Any) -> fedzmg.Task:
    protocol = {"cohort": 3, "batch_size": 4, "epochs": 2} | settings
    sizes = [9, 5, 7]
    made_of = {"inputs": 5, "classes": count, "seed": 3}
    return random_task(module or network(), sizes, **made_of, **protocol)


NAMES = ["fedsam", "mofedsam", "fedspeed", "fedspeed:all", "fedmuon", "fedmuon:local"]
NAMES += ["moon", "fedlc", "fedntd"]


def test_default_settings_are_not_degenerate() -> None:
    """With absent clients all rules differ, both servers of FedSpeed too."""
    task = classes(cohort=2)
    trained = {
        name: models(task, named(name), engine="vectorized", rounds=3)[-1]["0.weight"]
        for name in ("fedavg", *NAMES)
    }
    for name, weight in trained.items():
        others = [w for n, w in trained.items() if n != name]
        assert min(float((weight - other).abs().max()) for other in others) > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_clipped_zero_mean_clients_keep_column_sums_on_a_schedule(name: str) -> None:
    options = {"client.zero_mean": True, "client.clip_norm": 0.1}
    options |= {"client.schedule": "cosine", "client.horizon": 4}
    algorithm = configure(muon(name) if "muon" in name else named(name), options)
    task = classes(cohort=2)
    loop, mapped = (models(task, algorithm, engine=e, rounds=3) for e in ENGINES)
    for layer in ("0.weight", "2.weight"):
        close(mapped[-1][layer], loop[-1][layer])
        close(mapped[-1][layer].sum(1), mapped[0][layer].sum(1), 1e-12)
        assert (mapped[-1][layer] - mapped[0][layer]).abs().max() > 1e-4


# Pieces.


def test_ascent_and_wrappers() -> None:
    grad = Tree({"a": double([3.0, 1.0]), "b": double([0.0, 4.0])})
    params, context = grad * 0.5, make_context(grad)
    for rule in (SAM(SGD(), rho=2.0), FedSpeed(rho=2.0, alpha=0.5, perturbation="unit")):
        point, _ = rule.next_point(context, params, (), grad)
        far = math.sqrt(26)
        close(point["a"], params["a"] + 2 * grad["a"] / far)
        still, _ = rule.next_point(context, params, (), grad.zeros())
        close(still["a"], params["a"])
        clipped, _ = ClipNorm(rule, clip_norm=0.1).next_point(context, params, (), grad)
        close(clipped["a"], point["a"])
        axes = {"a": (0,), "b": ()}
        centred, _ = ZeroMean(rule, axes=axes).next_point(context, params, (), grad)
        close(centred["a"].sum(), params["a"].sum())
        assert (centred["a"] - point["a"]).abs().max() > 0.1
    # The last gradient alone is clipped, and the model steps from where it was.
    moved, _ = ClipNorm(SAM(SGD(lr=1.0)), clip_norm=0.1).step(context, params, (), grad)
    close(moved["a"], params["a"] - 0.1 * grad["a"] / math.sqrt(26))


@pytest.mark.parametrize(
    ("outer", "inner"), [(SAM, SAM(SGD())), (SAM, FedSpeed(alpha=0.5)), (Moon, Scaffold())]
)
def test_rules_that_do_not_fit_are_rejected(outer: Any, inner: Any) -> None:
    with pytest.raises(InputError, match=type(inner).__name__):
        outer(inner)


@pytest.mark.parametrize("name", ["fedlc", "fedntd"])
@pytest.mark.parametrize("engine", ENGINES)
def test_regression_is_rejected_with_one_line(name: str, engine: str) -> None:
    with pytest.raises(InputError) as caught:
        models(quadratic_task(P2), named(name), engine=engine, rounds=1)
    assert "\n" not in str(caught.value)


def test_own_losses_average_positions_and_skip_padding() -> None:
    """Two positions, the second one padding, are one position."""
    targets = torch.stack([LABELS, torch.full_like(LABELS, -1)], 1)

    def twice(value: Tensor) -> Tensor:
        return torch.stack([value, value.flip(-1) + 1], 1)

    long = BatchOutputs(
        torch.zeros(3).double(),
        *(twice(BATCH["local_logits"]), targets, twice(BATCH["local_projection"])),
        (twice(BATCH["global_logits"]),) * 2,
        (twice(BATCH["global_projection"]), twice(BATCH["previous_projection"])),
    )
    for rule, context, name in (
        (NotTrueDistillation(SGD()), COUNTED, "fedntd_distillation_tau1"),
        (Moon(SGD()), KNOWN, "moon_contrastive"),
    ):
        close(rule.loss(context, long).mean(), LOSSES[name]["loss"])


def test_zero_features_have_a_finite_gradient() -> None:
    features = torch.zeros(3, 3).double().requires_grad_()
    same = (BATCH["global_projection"],) * 2
    batch = BatchOutputs(torch.zeros(3).double(), features, LABELS, features, same, same)
    loss = Moon(SGD()).loss(KNOWN, batch).sum()
    [slope] = torch.autograd.grad(loss, features)
    close(loss, 3 * math.log(2))  # both other models are equal
    assert not slope.any()


# FedMuon.


def test_orthogonalisation() -> None:
    stored = GOLDEN["newton_schulz_check"]
    matrix = double(stored["input"])
    for given, wanted in ((matrix, "output"), (matrix.T, "output")):
        got = newton_schulz(given)
        close(got if given is matrix else got.T, stored[wanted])
    close(torch.linalg.svdvals(newton_schulz(matrix)), stored["singular_values"])
    close(polar(matrix), stored["exact"])
    for function in (newton_schulz, polar):
        assert not function(torch.zeros(3, 4)).any()
        centred = matrix - matrix.mean(1, keepdim=True)
        close(function(centred).sum(1), torch.zeros(3))


def test_vectors_get_adamw_and_kernels_their_flattened_shape() -> None:
    generator = torch.Generator().manual_seed(6)
    conv = nn.Conv2d(2, 12, 2).double()
    params = Tree({n: p.detach().clone() for n, p in conv.named_parameters()})
    optimiser = torch.optim.AdamW(
        [conv.bias], lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.3
    )
    rule, context = Muon(lr=0.1, scale=0.5, beta=0.9, decay=0.3), make_context(params)
    scratch, momentum, weight = rule.begin(context, ()), 0.0, params["weight"]
    for _ in range(3):
        grad = params.map(lambda leaf: torch.randn(leaf.shape, generator=generator).to(leaf))
        conv.bias.grad = grad["bias"].clone()
        optimiser.step()
        momentum = 0.9 * momentum + 0.1 * grad["weight"].reshape(12, 8)
        step = newton_schulz(0.9 * momentum + 0.1 * grad["weight"].reshape(12, 8))
        weight = weight * (1 - 0.05 * 0.3) - 0.05 * (12 / 8) ** 0.5 * step.reshape(12, 2, 2, 2)
        params, scratch = rule.step(context, params, scratch, grad)
        close(params["bias"], conv.bias)
        close(params["weight"], weight)


def test_hidden_matrices_alone() -> None:
    layout = fedzmg.tasks.get("plays").model.layout
    rule = Muon(matrices="hidden").for_layout(layout)
    leaf = torch.zeros(2, 2)
    orthogonal = {name for name in layout if rule.is_matrix(name, leaf)}
    roles = {layout[name].role for name in orthogonal}
    last = list(layout)[-1].rpartition(".")[0]
    assert orthogonal
    assert "embedding" not in roles
    assert not any(name.rpartition(".")[0] == last for name in orthogonal)
    with pytest.raises(InputError, match="Muon"):
        Muon(matrices="hidden").is_matrix("a", leaf)


def test_last_step_is_scaled_with_the_learning_rate_and_shared_by_all_steps() -> None:
    """Clients without a gradient repeat alpha times the server's last step."""
    w = Tree({"weight": double(Q34["W0"])})
    algorithm = muon("fedmuon", client_alpha=0.25)
    server = algorithm.server.init(w)._replace(step=w, lr=double(0.2))
    context = make_context(w, shared=server)._replace(asked=Asked(steps=torch.tensor(4)))
    rule = dataclasses.replace(algorithm.client)
    assert isinstance(rule, Aligned)
    params, scratch = w, rule.begin(context, ())
    for _ in range(4):
        params, scratch = rule.step(context, params, scratch, w.zeros())
    close(params["weight"], w["weight"] * (1 - 0.25 * 0.1 / 0.2))
    upload, _ = rule.finish(context, params, scratch, torch.tensor(4))
    close(upload.average[1], 0.1)


def test_first_round_from_no_momentum_is_local_and_zero_mean_keeps_sums() -> None:
    task = classes()
    [shared], [local] = (
        models(task, muon(name, **more), engine="vectorized", rounds=1)
        for name, more in (("fedmuon", {"client_alpha": 0.0}), ("fedmuon:local", {}))
    )
    for name, leaf in local.items():
        assert torch.equal(shared[name], leaf)
    base = muon("fedmuon")
    centred = dataclasses.replace(base, client=ZeroMean(base.client))
    start = task.model.params()
    trained = models(task, centred, engine="vectorized", rounds=2)[-1]
    for name in ("0.weight", "2.weight"):
        close(trained[name].sum(1), models(task, centred, rounds=1)[-1][name].sum(1))
        assert (trained[name] - start[name]).abs().max() > 1e-3


# Independent traces: mutable modules, losses written out example by example.


def moon_term(local: nn.Module, sent: nn.Module, last: Any, x: Tensor, y: int, n: Any) -> Tensor:
    if last is None:
        return torch.zeros(()).double()
    z = local[:2](x)
    with torch.no_grad():
        there, before = sent[:2](x), last[:2](x)
    near, far = (torch.exp(F.cosine_similarity(z, other, 0) / 0.4) for other in (there, before))
    return -2.0 * torch.log(near / (near + far))


def calibrated(local: nn.Module, sent: nn.Module, last: Any, x: Tensor, y: int, n: Any) -> Tensor:
    """Return the difference to the plain cross-entropy."""
    logits = local(x)
    shifted = {c: logits[c] - 0.8 / n[c] ** 0.25 for c in range(3) if n[c]}
    total = torch.stack([s.exp() for s in shifted.values()]).sum()
    return torch.log(total) - shifted[y] - F.cross_entropy(logits[None], torch.tensor([y]))


def not_true(local: nn.Module, sent: nn.Module, last: Any, x: Tensor, y: int, n: Any) -> Tensor:
    keep = [c for c in range(3) if c != y]
    own = torch.softmax(local(x)[keep] / 2.0, 0)
    with torch.no_grad():
        given = torch.softmax(sent(x)[keep] / 2.0, 0)
    return 1.5 * 4.0 * (given * torch.log(given / own)).sum()


ORACLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "moon": (moon_term, {"client_mu": 2.0, "client_temperature": 0.4}),
    "fedlc": (calibrated, {"client_tau": 0.8}),
    "fedntd": (not_true, {"client_beta": 1.5, "client_tau": 2.0}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ORACLES)
def test_training_equals_a_mutable_loop(name: str, engine: str) -> None:
    term, options = ORACLES[name]
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(12, 5, generator=generator).double()
    y = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 0, 2, 2, 0])  # the second client has no class 1
    owners = ["A"] * 5 + ["B"] * 7
    server = network().double()
    task = fedzmg.Task.from_arrays(
        copy.deepcopy(server), x, y, owners, test=(x, y), init="given",
        cohort=2, batch_size=12, epochs=3,
    )  # fmt: skip
    participants = [["A"], ["A", "B"], ["B", "A"]]
    sim = simulation(
        task, made(name, client_lr=0.5, **options), engine=engine, participants=participants
    )
    rows = {"A": slice(0, 5), "B": slice(5, 12)}
    kept: dict[str, Any] = {"A": None, "B": None}
    for present in participants:
        ends: dict[str, nn.Module] = {}
        for client in present:
            local, own, labels = copy.deepcopy(server), x[rows[client]], y[rows[client]]
            counts = labels.bincount(minlength=3).tolist()
            optimiser = torch.optim.SGD(local.parameters(), lr=0.5)
            for _ in range(3):
                optimiser.zero_grad()
                added = [
                    term(local, server, kept[client], own[i], int(labels[i]), counts)
                    for i in range(len(own))
                ]
                (F.cross_entropy(local(own), labels) + torch.stack(added).mean()).backward()
                optimiser.step()
            ends[client] = local
        kept |= ends
        sizes = {client: len(y[rows[client]]) for client in present}
        with torch.no_grad():
            for key, leaf in server.named_parameters():
                parts = (sizes[c] * dict(ends[c].named_parameters())[key] for c in present)
                leaf.copy_(sum(parts) / sum(sizes.values()))
        sim.run_round()
        for key, leaf in server.named_parameters():
            close(sim.snapshot.params[key][0], leaf.detach())
