"""Specifications: strict, with the nearest name for a mistake, and a faithful TOML round trip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedzmg import tasks
from fedzmg.errors import InputError
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.strict import parse_settings
from fedzmg.storage.fields import Value

DIGITS = tasks.get("digits")

values = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), values, max_size=4))
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, table: dict) -> None:  # type: ignore[type-arg]
    spec = RunSpec(task="digits", client=table, weights="uniform")
    path = tmp_path_factory.mktemp("spec") / "spec.toml"
    path.write_text(spec.to_toml(), encoding="utf-8")
    assert RunSpec.read(path) == spec


def test_resolved_writes_every_default_out_and_is_stable() -> None:
    spec = RunSpec(task="digits", algorithm="fedzmg", client={"lr": 0.5}).resolve(DIGITS).spec
    words = {"form": "heavy_ball", "decay_scope": "all", "project": "all"}
    words |= {"embedding_axis": "vocab", "biases": "free"}
    assert spec.client == {"lr": 0.5, "momentum": 0.9, "decay": 5e-4, **words}
    assert spec.server.keys() == {"lr"}
    assert spec.weights == "examples"
    assert spec.protocol["cohort"] == DIGITS.protocol.cohort
    assert spec.resolve(DIGITS).spec == spec
    resolved, trial = spec.resolve(DIGITS)
    assert resolved.resolve(DIGITS) == (spec, trial) == (resolved, trial)
    assert trial.algorithm == spec.build_algorithm(DIGITS)


def test_preset_fields_are_written_out_and_read_back(tmp_path: Path) -> None:
    """The task says what it was built with, so a run directory stands for itself."""
    built = replace(DIGITS, name="cifar100", preset={"centring": "image", "partition_seed": 0})
    spec = RunSpec(task="cifar100").with_settings({"preset.centring": "image"})
    assert spec.preset == {"centring": "image"}
    resolved = spec.resolve(built).spec
    assert resolved.preset == {"centring": "image", "partition_seed": 0}
    path = tmp_path / "spec.toml"
    path.write_text(resolved.to_toml(), encoding="utf-8")
    assert '[preset]\ncentring = "image"\npartition_seed = 0\n' in path.read_text()
    assert RunSpec.read(path) == resolved
    assert "[preset]" not in RunSpec(task="digits").resolve(DIGITS).spec.to_toml()


def test_options_do_not_follow_to_another_algorithm() -> None:
    spec = RunSpec(task="digits", algorithm="fedadam", seed=3).resolve(DIGITS).spec
    other, left_out = spec.for_algorithm("fedavg")
    assert (other.client, other.server, other.weights) == ({}, {}, None)
    assert (other.algorithm, other.seed, other.protocol) == ("fedavg", 3, spec.protocol)
    assert {"client.lr", "server.lr", "server.beta2", "weights"} <= set(left_out)
    plain = RunSpec(task="digits", algorithm="fedavg", seed=3).resolve(DIGITS).spec
    assert other.resolve(DIGITS).spec == plain
    assert spec.for_algorithm("fedadam") == (spec, [])
    with pytest.raises(InputError, match="unknown algorithm 'fedavgg': did you mean 'fedavg'"):
        spec.for_algorithm("fedavgg")


WRAPPED = [
    {"client.clip_norm": 1.0},
    {"client.clip_value": 0.1, "client.clip_norm": 2},
    {"client.schedule": "cosine", "client.horizon": 100, "client.floor": 0.01},
    {"client.schedule": "exponential", "client.gamma": 0.99, "server.schedule": "constant"},
    {"server.schedule": "step", "server.every": 10, "server.gamma": 0.5, "client.clip_norm": 3.0},
]


@pytest.mark.parametrize("settings", WRAPPED, ids=lambda settings: " ".join(settings))
@pytest.mark.parametrize("name", ["fedzmg", "fedadam:reddi"])
def test_resolved_file_builds_the_equal_algorithm(
    tmp_path: Path, name: str, settings: dict[str, Value]
) -> None:
    """Wrappers that were added by key are there again when a run directory is read."""
    spec = RunSpec(task="digits", algorithm=name).with_settings(settings)
    resolved = spec.resolve(DIGITS).spec
    path = tmp_path / "spec.toml"
    path.write_text(resolved.to_toml(), encoding="utf-8")
    back = RunSpec.read(path)
    assert back == resolved == back.resolve(DIGITS).spec
    assert back.build_algorithm(DIGITS) == spec.build_algorithm(DIGITS)
    assert back.build_algorithm(DIGITS) != RunSpec(task="digits", algorithm=name).build_algorithm(
        DIGITS
    )
    for key, value in settings.items():
        side, _, field = key.partition(".")
        assert getattr(back, side)[field] == value


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"clip_nrom": 1.0}, r"'client\.clip_norm'"),
        ({"shedule": "step"}, r"'client\.schedule'"),
        ({"schedule": "step"}, r"client\.schedule.*every and gamma"),
        ({"every": 3}, r"client\.every = 3"),
        ({"clip_norm": 0.0}, r"clip_norm = 0\.0"),
        ({"clip_value": "x"}, r"clip_value = 'x'"),
    ],
)
def test_wrong_wrappers_are_refused_in_one_line(client: dict[str, Value], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        RunSpec(task="digits", client=client).build_algorithm(DIGITS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tsk = 'digits'", "'tsk'.*'task'"),
        ("seed = 1", "task is missing.*'fedzmg schema run'"),
        ("task = 'digits'\nseed = 'one'", "seed = 'one': expected a whole number"),
        ("task = 'digits'\nengine = 'fast'", r"engine = 'fast': expected 'auto', 'sequential'"),
        (
            "task = 'digits'\nclient_metrics_every = -1",
            "every = -1: expected at least 0",
        ),
        ("task = 'digits'\nseed = -1", "seed = -1: expected at least 0"),
        ("task = [", r"is not valid TOML"),
        ("task = 'digits'\nclient = 3", "client = 3: expected a table"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        RunSpec.read(path)
    assert "\n" not in str(caught.value)
    assert "spec.toml" in str(caught.value)


def test_settings_reach_their_tables() -> None:
    spec = RunSpec(task="digits").with_settings(
        {"client.lr": 0.3, "server.lr": 2.0, "protocol.cohort": 7, "seed": 4}
    )
    assert (spec.client, spec.server) == ({"lr": 0.3}, {"lr": 2.0})
    assert spec.build_protocol(DIGITS).cohort == 7
    assert spec.resolve(DIGITS).trial.seed == 4


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("centring", "preset.centring"),
        ("cohort", "protocol.cohort"),
        ("clien.lr", "client.lr"),
        ("sead", "seed"),
        ("lr", ".lr"),
        ("clip_norm", "client.clip_norm"),
        ("schedule", "client.schedule"),
    ],
)
def test_unknown_settings_suggest_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"unknown key .*did you mean '.*{hint}'"):
        RunSpec(task="cifar100").with_settings({key: 1})


def test_fields_of_what_is_not_a_table_are_refused() -> None:
    with pytest.raises(InputError, match=r"preset = 3: .*preset\.centring"):
        RunSpec(task="cifar100").with_settings({"preset": 3, "preset.centring": 1})


@pytest.mark.parametrize("text", ["client.lr", "=3", " =1"])
def test_malformed_settings_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--set"):
        parse_settings([text])


def test_settings_are_read_as_toml_or_words() -> None:
    given = ["a=1", "b = 1e-3 ", "c=true", "d='x'", "e=some words", "f=[1, 2]"]
    assert list(parse_settings(given).values()) == [1, 1e-3, True, "x", "some words", [1, 2]]
