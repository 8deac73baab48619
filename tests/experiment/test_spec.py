"""Specifications: strict, with the nearest name for a mistake, and a faithful TOML round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedzmg import tasks
from fedzmg.errors import InputError
from fedzmg.experiment.spec import RunSpec, parse_setting

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
    spec = RunSpec(task="digits", algorithm="fedzmg", client={"lr": 0.5}).resolved(DIGITS)
    assert spec.client == {"lr": 0.5, "momentum": 0.9, "decay": 5e-4}
    assert spec.server.keys() == {"lr"}
    assert spec.weights == "examples"
    assert spec.protocol["cohort"] == DIGITS.protocol.cohort
    assert spec.resolved(DIGITS) == spec
    assert spec.build_algorithm(DIGITS).client == spec.trial(DIGITS).algorithm.client


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tsk = 'digits'", r"unknown key 'tsk': did you mean 'task'\?"),
        ("seed = 1", "task is missing"),
        ("task = 'digits'\nseed = 'one'", r"seed = 'one': input should be a valid integer"),
        ("task = 'digits'\nengine = 'fast'", r"engine = 'fast': input should be 'auto'"),
        ("task = [", r"is not valid TOML"),
        ("task = 'digits'\nclient = 3", r"client = 3: input should be a valid dictionary"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        RunSpec.read(path)
    assert "\n" not in str(caught.value)
    assert "spec.toml" in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.toml: No such file"):
        RunSpec.read(tmp_path / "none.toml")


def test_settings_reach_their_tables() -> None:
    spec = RunSpec(task="digits").with_settings(
        {"client.lr": 0.3, "server.lr": 2.0, "protocol.cohort": 7, "seed": 4}
    )
    assert (spec.client, spec.server) == ({"lr": 0.3}, {"lr": 2.0})
    assert spec.build_protocol(DIGITS).cohort == 7
    assert spec.trial(DIGITS).seed == 4


@pytest.mark.parametrize(
    ("key", "hint"),
    [("cohort", "protocol.cohort"), ("clien.lr", "client.lr"), ("sead", "seed"), ("lr", ".lr")],
)
def test_unknown_settings_suggest_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"unknown key .*did you mean '.*{hint}'"):
        RunSpec(task="digits").with_settings({key: 1})


@pytest.mark.parametrize("text", ["client.lr", "=3", "a=[1]", " =1"])
def test_malformed_settings_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--set"):
        parse_setting(text)


def test_settings_are_read_as_toml_or_words() -> None:
    assert parse_setting("a=1") == ("a", 1)
    assert parse_setting("a = 1e-3 ") == ("a", 1e-3)
    assert parse_setting("a=true") == ("a", True)
    assert parse_setting("a='x'") == ("a", "x")
    assert parse_setting("a=some words") == ("a", "some words")
