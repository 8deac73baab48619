"""Run directories made by hand, as a run would have left them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

MANIFEST = {
    "format": 1, "fedzmg": "0.1.0", "commit": "c0ffee", "dirty": False,
    "started": "2026-01-02T03:04:05+00:00", "python": "3.11.7", "torch": "2.13.0",
    "numpy": "2.4.6", "platform": "Linux", "device": "cpu", "device_name": "x86_64", "threads": 1,
    "engine": "sequential", "onednn": True, "clients": 20, "examples": 400,
    "data_sha256": "a" * 64, "task_sha256": "b" * 64, "metric": "accuracy",
}  # fmt: skip


def line(round_: int, metric: float | str | None, **changes: Any) -> dict[str, Any]:
    """One round: a mebibyte down, one up."""
    values = {
        "round": round_, "clients": 2, "dropped": 0, "steps": 10, "train_loss": 1.0,
        "bytes_down": 2**20, "bytes_up": 2**20, "bytes_up_bound": 2**19, "scalar_bytes_down": 0,
        "scalar_bytes_up": 0, "bytes_kept": 0, "total_bytes_down": round_ * 2**20,
        "total_bytes_up": round_ * 2**20, "seconds": 0.5,
        "loss": None if metric is None else 1.0, "metric": metric, "diverged": False,
    }  # fmt: skip
    return {**values, **changes}


Write = Callable[..., Path]


def write(
    directory: Path,
    algorithm: str,
    seed: int,
    metrics: Sequence[float],
    *,
    every: int = 1,
    rounds: int | None = None,
    task: str = "digits",
    threshold: float = 0.5,
    lr: float = 0.1,
    lines: Sequence[dict[str, Any]] | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Write a run with one evaluation every ``every`` rounds, starting with the first."""
    directory.mkdir(parents=True)
    if lines is None:
        lines = [
            line(r, metrics[(r - 1) // every] if (r - 1) % every == 0 else None)
            for r in range(1, every * len(metrics) + 1)
        ]
    asked = rounds if rounds is not None else len(lines)
    (directory / "spec.toml").write_text(
        f'task = "{task}"\nalgorithm = "{algorithm}"\nseed = {seed}\n\n[protocol]\n'
        f"rounds = {asked}\ncohort = 2\neval_every = {every}\nthreshold = {threshold}\n\n"
        f"[client]\nlr = {lr}\n\n[server]\nlr = 1.0\n"
    )
    (directory / "manifest.json").write_text(json.dumps({**MANIFEST, **(manifest or {})}))
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (directory / "metrics.jsonl").write_text(text)
    return directory


def write_study(place: Path) -> Path:
    """Write two algorithms, three seeds, ten rounds; differences 0.1, 0.2 and 0.3."""
    for seed, (ours, theirs) in enumerate([(0.6, 0.5), (0.8, 0.6), (1.0, 0.7)]):
        for name, top in (("fedzmg", ours), ("fedavg", theirs)):
            rising = [top * share for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1, 1, 1)]
            write(place / name / f"seed-{seed}", name, seed, rising)
    return place


@pytest.fixture
def write_run(tmp_path: Path) -> Write:
    """Write a run below the temporary directory."""
    return lambda place, *args, **options: write(tmp_path / place, *args, **options)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of two algorithms."""
    return write_study(tmp_path / "study")


@pytest.fixture(scope="session")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the study, with its figures."""
    from fedzmg.report.html.page import render
    from fedzmg.results.reading import read

    return render(read([write_study(tmp_path_factory.mktemp("page") / "study")]))


@pytest.fixture
def log_line() -> Callable[..., dict[str, Any]]:
    """A line of a log."""
    return line


@pytest.fixture
def grid() -> dict[str, Any]:
    """Content of a ``grid.json``: two by three points, the best in a corner."""
    axes = {"client.lr": [0.01, 0.1], "server.lr": [0.1, 1.0, 10.0]}
    points = [
        {"options": {"client.lr": c, "server.lr": s}, "score": 0.1 * i, "diverged": 0}
        for i, (c, s) in enumerate((c, s) for c in axes["client.lr"] for s in axes["server.lr"])
    ]
    best = {"options": points[-1]["options"], "score": 0.5, "border": True,
            "border_axes": ["client.lr"], "neighbours": [{"score": 0.4}]}  # fmt: skip
    entry = {"label": "fedzmg", "axes": axes, "points": points, "best": best}
    return {
        "format": 1, "task": "digits", "label": "", "metric": "accuracy", "selection": "tune",
        "higher_is_better": True, "rounds": 50, "last": 10, "complete": True, "seeds": [0],
        "examples": 10, "precision": "float32", "algorithms": {"fedzmg": entry},
    }  # fmt: skip
