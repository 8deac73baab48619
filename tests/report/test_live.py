"""The display: every trial of a pack, plain lines where there is no terminal."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fedzmg import Trial
from fedzmg.evaluation import ACCURACY
from fedzmg.terminal import live
from fedzmg.terminal.live import Display, TrialState, names
from fedzmg.terminal.render import Terminal


def report(
    round_: int, metrics: Sequence[float | None], stopped: Collection[int] = (), lost: int = 99
) -> Any:
    """Make the report of a round that an observer receives."""
    trials = [Trial.of("fedavg", 0, client_lr=0.1 * (i + 1)) for i in range(len(metrics))]
    records = [
        SimpleNamespace(
            round=round_, metric=m, train_loss=2.0, diverged=i == lost, rejected=(), flagged=()
        )
        for i, m in enumerate(metrics)
    ]
    task = SimpleNamespace(metric=ACCURACY)
    simulation = SimpleNamespace(trials=trials, stopped_trials=frozenset(stopped), task=task)
    return SimpleNamespace(round=round_, records=records, simulation=simulation)


def shown(*, terminal: bool) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    console = Terminal(file=out, width=100, force_terminal=terminal, color_system=None)
    return Display(console, "accuracy", {"fedavg": 1, "fedadam": 2}), out


def drawn(display: Display) -> list[str]:
    """Return the lines that the terminal shows now."""
    console = Terminal(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as capture:
        console.print(display._view())
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_names_of_trials_show_only_differences() -> None:
    rates = [Trial.of("fedavg", 7, client_lr=lr) for lr in (0.1, 0.3)]
    assert names(rates) == ["client.lr 0.1", "client.lr 0.3"]
    assert names([Trial.of("fedavg", s) for s in (3, 5)]) == ["seed 3", "seed 5"]
    both = [Trial.of("fedavg", s, client_lr=lr) for lr in (0.1, 0.3) for s in (1, 2)]
    assert names(both)[2] == "client.lr 0.3, seed 1"
    named = [replace(trial, name=f"no {i // 2}") for i, trial in enumerate(both)]
    assert names(named)[2] == "no 1, seed 1"


def test_best_round_is_kept_and_a_stopped_trial_keeps_its_state() -> None:
    seen, lower = TrialState("a", None), TrialState("b", None)
    for round_, metric in ((1, 0.1), (6, 0.5), (11, 0.3)):
        one = SimpleNamespace(round=round_, metric=metric, train_loss=1.0, diverged=False)
        seen.update(one, stopped=False, sign=1)
        lower.update(one, stopped=False, sign=-1)
    assert (seen.evaluated.round, seen.best.round, lower.best.round) == (11, 6, 1)
    gone = SimpleNamespace(round=12, metric=0.9, train_loss=9.0, diverged=True)
    seen.update(gone, stopped=True, sign=1)
    later = SimpleNamespace(round=13, metric=None, train_loss=float("nan"), diverged=True)
    seen.update(later, stopped=True, sign=1)
    assert (seen.state, seen.last, seen.best.round) == ("diverged, stopped after round 12", gone, 6)


def test_plain_lines_describe_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LINE_SECONDS", -1.0)
    display, out = shown(terminal=False)
    with display:
        display.begin("fedavg", 50, 0)
        display.advance(report(1, [None] * 20))
        display.advance(report(2, [0.01 * i for i in range(20)], {3, 4}, lost=3))
        display.begin("fedadam", 50, 50)
        display.begin("fedadam", 50, 10)
    first, second, third, fourth = out.getvalue().splitlines()
    assert first == "fedavg: round 1 of 50, 20 trials, training loss 2"
    assert second.startswith(
        "fedavg: round 2 of 50, 20 trials, best accuracy 19.00 % (client.lr 2), median 9.50 %, "
        "1 diverged, 2 stopped, "
    )
    assert second.endswith(" s left")
    assert (third, fourth) == ("fedadam: complete already", "fedadam: continues after round 10")


def test_time_for_all_packs_goes_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(live.time, "monotonic", lambda: now)
    console = Terminal(file=io.StringIO(), width=100)
    display = Display(console, "accuracy", {"large": 1, "small": 1}, {"large": 4, "small": 1})
    display.begin("large", 10, 0)
    for round_ in range(1, 5):
        now += 8.0
        display.advance(report(round_, [0.5]))
    # 8 s a round: 6 rounds are left, and 10 of a pack that is a quarter as large.
    assert display._left() == (48.0, 68.0)


def test_terminal_shows_a_line_per_trial_or_the_best_of_many() -> None:
    display, out = shown(terminal=True)
    with display:
        display.begin("fedavg", 50, 0)
        for round_ in (1, 2, 3):
            display.advance(report(round_, [0.2, 0.6, 0.4], {0}, lost=0))
        few = drawn(display)
        display.begin("fedadam", 50, 0)
        display.advance(report(1, [0.01 * i for i in range(81)]))
        many = drawn(display)
    assert "round 3 of 50" in few[0]
    assert "in all" in few[0]  # three packs are known, and one is at work
    assert "3 trials, best accuracy 60.00 % (client.lr 0.2), median 40.00 %" in few[1]
    assert few[2].endswith("diverged, stopped after round 1")
    assert few[3] == "client.lr 0.2 60.00 % best 60.00 % at round 1"
    assert len(few) == 5
    assert len(many) == 2 + live.BEST_SHOWN
    assert "81 trials, best accuracy 80.00 % (client.lr 8.1), median 40.00 %" in many[1]
    # What is over stays as a line.
    assert "fedavg: round 3 of 50, 3 trials, best accuracy 60.00 %" in out.getvalue()


def test_packs_in_other_processes_share_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    display, _ = shown(terminal=True)
    display.show_packs({"fedavg": (10, 50, None), "fedadam": (0, 50, None), "mine": (0, 50, None)})
    assert drawn(display)[1] == "0 of 3 packs trained"
    now[0] = 30.0  # processes have started
    display.show_packs({"fedavg": (11, 50, 0.5), "fedadam": (0, 50, None), "mine": (0, 50, None)})
    now[0] = 50.0
    display.show_packs({"fedavg": (50, 50, None), "fedadam": (2, 50, 0.25), "mine": (0, 50, None)})
    bar, whole = drawn(display)
    assert bar.startswith("fedadam")
    assert bar.endswith("round 2 of 50, median accuracy 25.00 %")
    # 41 rounds since the first, which also starts the clock; 98 are left.
    assert whole == f"1 of 3 packs trained, {live.duration(98 * 20 / 40)} left"
