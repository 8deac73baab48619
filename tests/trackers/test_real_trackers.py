"""Real trackers, where they are installed: their files are read back.

Each runs in its own process: they import slowly and emit warnings.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import log_of

from fedzmg.trackers import TRACKERS

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tracked_runs import ProgressLog, toy_task
from fedzmg import trackers
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.run import RunSpec

name, out, stop = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]) or None
specs = [RunSpec(task="toy", seed=seed, engine="vectorized") for seed in (0, 1)]
directories = [out / "fedzmg" / f"seed-{seed}" for seed in (0, 1)]
shown = ProgressLog(stop)
try:
    with trackers.Tracking(trackers.named(name), out, shown) as progress:
        # No checkpoint before the crash: all of its rounds are trained again.
        run_pack(toy_task(), specs, directories, progress=progress, checkpoint_seconds=1e9)
except MemoryError:
    print("stopped")
assert not shown.messages, shown.messages
"""


def track(name: str, out: Path, stop: int = 0) -> str:
    for module in TRACKERS[name][1]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'fedzmg[{name}]'")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_"))}
    # A closed proxy blocks the network.
    closed = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), name, str(out), str(stop)],
        env={**kept, **closed, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False, cwd=out.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    return done.stdout


def expected(out: Path, seed: int) -> dict[str, dict[int, float]]:
    """Read the log; later lines supersede earlier ones."""
    lines = {line["round"]: line for line in log_of(out / "fedzmg" / f"seed-{seed}")}
    keys = {"train/loss": "train_loss", "eval/accuracy": "metric", "eval/loss": "loss"}
    return {
        key: {r: line[field] for r, line in lines.items() if line[field] is not None}
        for key, field in keys.items()
    }


def read(script: str, *arguments: Any, text: str | None = None) -> list[Any]:
    """Run a script in a process of its own, and return the JSON lines that it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    printed = subprocess.check_output(command, input=text, text=True, env=environment)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_tensorboard(out: Path) -> None:
    assert track("tensorboard", out, stop=3) == "stopped\n"
    track("tensorboard", out)
    script = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
keys = found.Tags()["scalars"]
print(json.dumps({key: [(e.step, e.value) for e in found.Scalars(key)] for key in keys}))
"""
    for seed in (0, 1):
        folder = out / "tracking" / "tensorboard" / "fedzmg" / f"seed-{seed}"
        assert len(list(folder.iterdir())) == 2
        [shown] = read(script, folder)
        for key, values in expected(out, seed).items():
            # As a list: rounds that were trained again are there once.
            rounds, scalars = zip(*shown[key], strict=True)
            assert list(rounds) == sorted(values)
            assert list(scalars) == pytest.approx([values[r] for r in rounds], rel=1e-7)


def test_mlflow(out: Path) -> None:
    assert track("mlflow", out, stop=3) == "stopped\n"
    track("mlflow", out)
    script = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("out").experiment_id
found = {}
for run in client.search_runs([experiment]):
    found[run.info.run_name] = {
        "status": run.info.status, "params": run.data.params,
        "metrics": {
            key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        },
    }
print(json.dumps(found))
"""
    [runs] = read(script, f"sqlite:///{out / 'tracking' / 'mlflow' / 'mlflow.db'}")
    assert sorted(runs) == ["fedzmg/seed-0", "fedzmg/seed-1"]
    for seed in (0, 1):
        run = runs[f"fedzmg/seed-{seed}"]
        assert run["status"] == "FINISHED"
        assert run["params"]["seed"] == str(seed)
        assert run["params"]["client.momentum"] == "0.9"
        for key, values in expected(out, seed).items():
            assert sorted(map(tuple, run["metrics"][key])) == sorted(values.items())
        assert [step for step, _ in run["metrics"]["time/seconds"]] == [1, 2, 3, 4, 5]


def test_wandb_offline(out: Path) -> None:
    assert track("wandb", out, stop=3) == "stopped\n"
    track("wandb", out)
    files = sorted((out / "tracking" / "wandb" / "wandb").glob("offline-run-*/run-*.wandb"))
    ids = [
        (out / "tracking" / "wandb" / "ids" / f"fedzmg--seed-{seed}.txt").read_text()
        for seed in (0, 1)
    ]
    # Two pieces each, under one id, so that they become one run when they are synced.
    assert sorted(path.stem for path in files) == sorted(f"run-{i}" for i in ids * 2)
    for seed, identity in enumerate(ids):
        pieces = [history(path) for path in files if identity in path.name]
        assert [[step for step, _ in piece] for piece in pieces] == [[1, 2, 3], [1, 2, 3, 4, 5]]
        for key, values in expected(out, seed).items():
            for piece in pieces:
                shown = {step: row[key] for step, row in piece if key in row}
                assert shown == {step: values[step] for step in shown}
        assert {s for s, row in pieces[1] if "eval/accuracy" in row} == {1, 3, 5}


def history(path: Path) -> list[Any]:
    """Steps and values of an offline run: protocol buffers in a log of blocks, as LevelDB's is."""
    script = """
import json, sys
from wandb.proto import wandb_internal_pb2 as format
for line in sys.stdin:
    record = format.Record.FromString(bytes.fromhex(line))
    if record.WhichOneof("record_type") == "history":
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json)
               for item in record.history.item}
        print(json.dumps([record.history.step.num, row]))
"""
    return read(script, text="\n".join(one.hex() for one in records(path.read_bytes())))


def records(content: bytes) -> Iterator[bytes]:
    at, block, whole = 7, 2**15, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # no room for a header: the rest of the block is empty
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""
