"""Presets on small data sets in the real layouts: the paper's numbers, options, tuned defaults."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_sets import COUNTS, ROLES, WRITERS, characters, lines, photographs, write_h5

from fedzmg import InputError, Task, Trial, algorithms, simulate, tasks
from fedzmg.api import tuning_notes
from fedzmg.data import catalog
from fedzmg.data.plan import local_stream
from fedzmg.data.text import CHARACTERS
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.tasks.preset import TUNED_ON, tunings
from fedzmg.tasks.real import Pixels

IMAGES = ("emnist62", "emnist10", "emnist10-head62", "mnist-by-writer", "chars74k")
TEXTS = ("shakespeare", "shakespeare-by-role")
PAPER = {
    # data set, clients, parameters, batch size, first threshold of the paper's text
    "emnist62": ("emnist62", 3400, 1_690_046, 16, 0.75),
    "emnist10": ("emnist10", 3383, 1_663_370, 16, 0.75),
    "emnist10-head62": ("emnist10", 3383, 1_690_046, 16, 0.75),
    "mnist-by-writer": ("mnist-by-writer", 834, 1_690_046, 16, 0.75),
    "chars74k": ("chars74k", 55, 1_690_046, 16, 0.75),
    "cifar100": ("cifar100", 500, 2_214_532, 16, 0.20),
    "shakespeare": ("shakespeare", 715, 4_022_850, 8, 0.35),
    "shakespeare-by-role": ("shakespeare-by-role", 715, 4_022_850, 8, 0.35),
}


def steps(task: Task, client: int) -> list[int]:
    """Batch sizes of a client's local steps."""
    first, last = task.train.offsets[client : client + 2]
    plan = local_stream(task.protocol.batching, 0, 1, client, 0, int(first), int(last - first))
    return [int(count) for count in plan.counts]


@pytest.mark.parametrize("name", PAPER)
def test_cards_show_the_papers_numbers(name: str) -> None:
    shown = tasks.info(name).describe()
    protocol = shown["protocol"]
    found = (shown["data"], shown["clients"], shown["model"]["parameters"])
    assert (*found, protocol["batch_size"], protocol["threshold"]) == PAPER[name]
    common = {"rounds": 1000, "cohort": 10, "epochs": 4, "eval_every": 5, "replacement": False}
    text = name in TEXTS
    assert protocol.items() >= {**common, "straddle": not text, "keep_partial": not text}.items()
    assert shown["model"]["bytes"] == 4 * shown["model"]["parameters"]


def test_every_task_is_in_the_papers_table_or_embedded() -> None:
    known = [*PAPER, "digits", "digits-personal", "plays", "quadratic", "logistic"]
    assert known == sorted(tasks.TASKS, key=known.index)
    for name in ("digits", "digits-personal", "plays"):
        task, shown = tasks.get(name), tasks.info(name).describe()
        assert (len(task.train), task.name) == (shown["clients"], name)
        assert shown["protocol"] == vars(task.protocol)
        assert task.model_bytes == shown["model"]["bytes"]


def test_embedded_data_stays_what_it_was() -> None:
    found = {}
    for name in ("digits", "plays"):
        task = tasks.get(name)
        digest = hashlib.sha256()
        for column in (*task.tune, *task.test):  # type: ignore[misc]
            digest.update(column.numpy().tobytes())
        found[name] = task.train.fingerprint()[:16], digest.hexdigest()[:16]
        assert not task.preset
    assert found == {
        "digits": ("94393f732ee0be7b", "ceeb47552b12efe4"),
        "plays": ("6678c973e5507bc9", "881c46349893f82a"),
    }


@pytest.mark.parametrize("name", IMAGES)
def test_characters_are_the_files_images_by_writer(name: str, cache: Path) -> None:
    task = tasks.get(name)
    classes = 62 if tasks.info(name).data in ("emnist62", "chars74k") else 10
    written = characters(0, classes)
    assert task.train.names == WRITERS
    assert tuple(task.train.counts) == COUNTS
    assert task.train.examples.x.dtype == torch.uint8
    pixels = np.concatenate([written[writer]["pixels"] for writer in WRITERS])
    labels = np.concatenate([written[writer]["label"] for writer in WRITERS])
    read = task.prepare(task.train.examples.x, torch.float32).numpy()
    np.testing.assert_allclose(read, pixels, atol=1e-6)
    assert task.train.examples.y.tolist() == labels.tolist()
    assert task.model.evaluate(task.model.params(), torch.zeros(1, 28, 28)).shape == (
        1, 10 if name == "emnist10" else 62,
    )  # fmt: skip
    # Four epochs of 17 images without borders: 68 = 4 x 16 + 4.
    assert steps(task, COUNTS.index(17)) == [16, 16, 16, 16, 4]
    assert steps(task, COUNTS.index(1)) == [4]


@pytest.mark.parametrize("name", ["chars74k", "cifar100", "shakespeare"])
def test_half_of_the_test_examples_report_or_all_do(name: str, cache: Path) -> None:
    short = {"length": 9} if name == "shakespeare" else {}
    half, whole = (tasks.get(name, {**short, "selection": way}) for way in ("half", "test"))
    assert half.tune is not None
    assert whole.tune is not None
    assert whole.tune.x is whole.test.x
    assert half.tune.size + half.test.size == whole.test.size
    assert torch.equal(whole.test.x[0::2], half.tune.x)
    assert torch.equal(whole.test.y[1::2], half.test.y)
    assert half.fingerprint() != whole.fingerprint()


def test_cifar_clients_take_exactly_25_steps(cache: Path) -> None:
    """1,050 images are enough for ten clients; the rest is left over."""
    task = tasks.get("cifar100")
    assert task.train.names == tuple(str(i) for i in range(10))
    assert set(task.train.counts) == {100}
    assert all(steps(task, client) == [16] * 25 for client in range(10))
    assert (task.tune.size, task.test.size) == (16, 15)  # type: ignore[union-attr]
    stored = catalog.load("cifar100").splits["train"]
    label = {x.tobytes(): y for x, y in zip(stored.array("x"), stored.array("y"), strict=True)}
    used = {x.numpy().tobytes(): int(y) for x, y in zip(*task.train.examples, strict=True)}
    assert len(used) == 1000
    assert used.items() < label.items()
    other = tasks.get("cifar100", {"partition_seed": 1})
    assert other.train.fingerprint() != task.train.fingerprint()
    assert tasks.get("cifar100").train.fingerprint() == task.train.fingerprint()


def test_cifar_on_clients_that_differ_less_or_more(cache: Path) -> None:
    def labels(**options: Any) -> float:
        train = tasks.get("cifar100", options).train
        counts = [len(own.unique()) for own in train.examples.y.split(train.counts.tolist())]
        assert (len(counts), train.examples.y.numel()) == (10, 1050)
        return float(np.mean(counts))

    even, mild, strong = (
        labels(**how)
        for how in ({"split": "iid"}, {"split": "dirichlet", "alpha": 1.0}, {"split": "dirichlet"})
    )
    assert even > mild > strong


def test_cifar_as_in_tffs_files(cache: Path) -> None:
    task = tasks.get("cifar100", {"split": "tff"})
    written = photographs(0, 11, 6)
    assert task.train.names == tuple(sorted(written))
    assert set(task.train.counts) == {6}
    ours = task.train.examples.x[:6].permute(0, 2, 3, 1).numpy()
    assert (ours == written["0"]["image"]).all()
    assert (task.tune.size, task.test.size) == (6, 6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "oov"), [("shakespeare", "last"), ("shakespeare-by-role", "author")]
)
def test_text_is_joined_end_to_end(name: str, oov: str, cache: Path) -> None:
    task = tasks.get(name, {"oov": oov})
    assert task.train.names == tuple(sorted(ROLES))
    assert task.train.examples.x.dtype == torch.uint8
    written = lines(0)
    for i, role in enumerate(sorted(ROLES)):
        text = "".join(written[role]["snippets"])
        unknown = 65 if oov == "last" else 0
        ids = [CHARACTERS.index(c) if c in CHARACTERS else unknown for c in text]
        windows = [ids[k : k + 101] for k in range(0, len(ids) - 100, 101)]
        mine = slice(*task.train.offsets[i : i + 2].tolist())
        assert task.train.examples.x[mine].tolist() == [w[:-1] for w in windows]
        assert task.train.examples.y[mine].tolist() == [w[1:] for w in windows]
        # The paper's count of steps: a role of 808 characters makes four, one of 807 none.
        assert steps(task, i) == [8] * (4 * (len(text) // 101 // 8))
    assert steps(task, 0) == [8] * 4
    assert steps(task, 1) == []
    assert task.train.counts[2] == 0
    tokens = task.prepare(task.train.examples.x[:2], torch.float32)
    assert tokens.dtype == torch.int64


def test_ends_of_texts_can_be_kept(cache: Path) -> None:
    task = tasks.get("shakespeare", {"length": 20, "partial_sequences": "pad"})
    whole = tasks.get("shakespeare", {"length": 20})
    sizes = np.array([sum(ROLES[role]) for role in sorted(ROLES)])
    kept = sizes // 21 + (sizes % 21 > 1)
    assert task.train.counts.tolist() == kept.tolist()
    assert int((task.train.examples.y == -1).sum()) == int(
        sum(21 - rest for rest in sizes % 21 if rest > 1)
    )
    assert (whole.train.examples.y >= 0).all()
    assert task.fingerprint() != whole.fingerprint()
    outputs = task.model.evaluate(task.model.params(), task.prepare(task.test.x[:3], torch.float32))
    assert task.loss(outputs, task.test.y[:3]).isfinite().all()


DECISIONS: dict[str, list[Mapping[str, Any]]] = {
    "chars74k": [
        {}, {"outputs": 70}, {"polarity": "ink-one"}, {"centring": "image"},
        {"selection": "test"}, {"initializer": "torch"},
    ],
    "cifar100": [
        {}, {"augment": "flip"}, {"centring": "image"}, {"partition_seed": 3}, {"split": "tff"},
    ],
    "shakespeare": [  # short sequences, to be quick
        {"length": 10}, {"length": 9}, {"length": 10, "oov": "author"},
        {"length": 10, "partial_sequences": "pad"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [n if n != "shakespeare" else pytest.param(n, marks=pytest.mark.slow) for n in DECISIONS],
)
def test_every_decision_is_recorded_and_moves_the_fingerprint(name: str, cache: Path) -> None:
    seen: set[str] = set()
    for options in DECISIONS[name]:
        task = tasks.get(name, options)
        assert task.preset == {**tasks.info(name).options(), **options}
        assert task.fingerprint() not in seen
        seen.add(task.fingerprint())
    assert task.fingerprint() == tasks.get(name, DECISIONS[name][-1]).fingerprint()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar100", {"centrng": "image"}, "did you mean 'centring'"),
        ("cifar100", {"centring": "imag"}, "preset.centring = 'imag': expected none or image"),
        ("cifar100", {"augment": 3}, "augment = 3: expected none, flip, shift or flip-shift"),
        ("cifar100", {"outputs": 0}, "preset.outputs = 0: .* from 1 to"),
        ("cifar100", {"outputs": True}, "preset.outputs = True"),
        ("shakespeare", {"length": 99.5}, "preset.length = 99.5"),
        ("plays", {"centring": "image"}, "'plays' has no options"),
        ("digits", {"alpha": 0.0}, "preset.alpha = 0.0: .* above 0"),
        ("digits", {"alpha": True}, "preset.alpha = True"),
        ("digits", {"partition_seed": 1.5}, "partition_seed = 1.5"),
        ("emnist62", {"name": "x"}, "emnist62 'name'"),
        ("emnist6", {}, "'emnist6': did you mean 'emnist62'"),
    ],
)
def test_wrong_options_are_rejected_in_one_line(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        tasks.get(name, options)
    assert "\n" not in str(caught.value)


def test_absent_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDZMG_DATA", str(tmp_path))
    with pytest.raises(InputError, match="'fedzmg data get emnist10'"):
        tasks.get("emnist10-head62")
    assert tasks.info("emnist10-head62").missing == "fedzmg data get emnist10"
    assert tasks.info("chars74k").missing == "fedzmg data import chars74k FILE..."
    assert tasks.info("digits").missing == ""


def test_a_cohort_is_at_most_the_clients_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a few writers train in every round; a note says so, and a user can choose fewer."""
    parts = []
    for seed, split in enumerate(("train", "test")):
        few = dict(list(characters(seed, 62).items())[:4])
        parts.append(write_h5(tmp_path / f"emnist62_{split}.h5", few))
    catalog.import_files("emnist62", parts, tmp_path / "cache")
    monkeypatch.setenv("FEDZMG_DATA", str(tmp_path / "cache"))
    task = tasks.get("emnist62")
    assert task.protocol == tasks.info("emnist62").protocol.with_options({"cohort": 4})
    assert "4 clients" in task.notes[-1]
    spec = RunSpec(task="emnist62", algorithm="fedavg", protocol={"cohort": 3})
    assert replace(task, protocol=spec.build_protocol(task)).protocol.cohort == 3
    with pytest.raises(InputError, match="cohort = 5 but there are 4 clients"):
        replace(task, protocol=task.protocol.with_options({"cohort": 5}))


def test_tuned_options_are_the_best_of_kept_searches() -> None:
    path = Path(__file__).parents[2] / "tools/tune.py"
    kept = runpy.run_path(str(path))["kept_tunings"]()
    own = set(tasks.TASKS) - set(TUNED_ON)
    found = {name: {a: t._asdict() for a, t in tunings(name).items()} for name in own}
    assert {name: rows for name, rows in found.items() if rows} == {
        task: {a: {"remark": "", **row} for a, row in rows.items()} for task, rows in kept.items()
    }
    assert found["cifar100"]["fedzmg"]["options"] == {"client.lr": 0.01, "server.lr": 1.0}
    remarks = {name: row["remark"] for name, row in found["shakespeare-by-role"].items()}
    assert [name for name, remark in remarks.items() if "border" not in remark] == [
        "fedavg:momentum"
    ]
    for task, rows in found.items():
        for name, row in rows.items():
            algorithms.get(name).with_options(row["options"])
        if task in ("digits", "plays"):
            scores = json.loads((path.parents[1] / f"results/tuning/{task}.json").read_text())
            assert all(s["score"] == max(p[-1] for p in s["grid"]) for s in scores.values())


@pytest.mark.parametrize(
    ("task", "names", "lr", "expected"),
    [
        ("quadratic", ["fedavg"], None, ["fedavg: "]),
        ("emnist62", ["fedavg", "fedprox"], 0.1, []),
        ("emnist62", ["fedprx"], None, []),  # reported elsewhere
        ("emnist10", ["mfl", "fedgbo", "fedprox", "feddyn"], None, ["and 1 more.*emnist10"]),
        ("emnist62", ["fedzmg"], None, ["fedzmg: .*emnist62"]),
        ("cifar100", ["fedzmg", "fedavg:momentum"], None, []),
        ("digits-personal", ["fedper", "ditto"], None, ["digits-personal: .* on digits$"]),
        ("shakespeare-by-role", ["fedadam"], None, ["fedadam .*border.*client.lr"]),
    ],
)
def test_untuned_and_doubtful_learning_rates_are_noted(
    task: str, names: list[str], lr: float | None, expected: list[str]
) -> None:
    notes = tuning_notes(task, names, [] if lr is None else ["client.lr"])
    assert len(notes) == len(expected)
    assert all(re.search(part, note) for part, note in zip(expected, notes, strict=True))


BYTES = torch.tensor([[[255, 0], [51, 204]], [[0, 0], [0, 255]]], dtype=torch.uint8)


def test_pixels_have_known_values() -> None:
    dtype = torch.float64
    one = torch.tensor([[1.0, 0.0], [0.2, 0.8]], dtype=dtype)
    corner = torch.tensor([[-0.25, -0.25], [-0.25, 0.75]], dtype=dtype)
    fractions = torch.tensor([[[0.25, 0.5], [0.75, 1.0]]])
    for pixels, stored, expected in (
        (Pixels(), BYTES[:1], one[None]),
        (Pixels("ink-one"), BYTES[:1], 1 - one[None]),
        (Pixels(centring="image"), BYTES, torch.stack([one - 0.5, corner])),
        (Pixels("ink-one", "image"), BYTES, torch.stack([0.5 - one, -corner])),
        (Pixels(), fractions, fractions.double()),
        (Pixels("ink-one"), fractions, 1 - fractions.double()),
    ):
        torch.testing.assert_close(pixels(stored, dtype), expected)
    name = "Pixels(polarity='ink-one', centring='image', axes=2)"
    assert repr(Pixels("ink-one", "image")) == name  # part of fingerprints


@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_convex_tasks_give_the_same_bits_alone_and_together(name: str) -> None:
    task = tasks.get(name)
    trials = [Trial.of("scaffold", seed=seed) for seed in (0, 1)]
    together = simulate(task, trials, rounds=6, engine="vectorized", device="cpu")
    for trial, packed in zip(trials, together, strict=True):
        [alone] = simulate(task, [trial], rounds=6, engine="vectorized", device="cpu")
        assert [r.train_loss for r in packed.records] == [r.train_loss for r in alone.records]
        assert all(torch.equal(packed.params[key], alone.params[key]) for key in alone.params)
