"""Studies and grids in processes and on a real Ray cluster: equal bits, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedzmg import InputError, tasks
from fedzmg.cluster import worker
from fedzmg.cluster.connect import connected
from fedzmg.cluster.estimate import by_default
from fedzmg.cluster.processes import Processes
from fedzmg.cluster.workers import Needs
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.storage.lock import read_owner

ENVIRONMENT = {
    **os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "FEDZMG_CHECKPOINT_SECONDS": "0.2",
}  # fmt: skip
PLUGIN = Path(__file__).with_name("slow_task.py")
ROUNDS = 40
SECONDS = 240.0


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fz-") as made:  # short, for names of sockets
        yield Path(made)


@pytest.fixture(scope="module")
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Start a cluster with a token; return the environment that finds it."""
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    own = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789" * 4}
    words = ["start", "--head", "--block", "--num-cpus=2", f"--port={address.split(':')[1]}",
             "--object-store-memory=100000000", "--include-dashboard=false",
             "--disable-usage-stats", f"--temp-dir={directory / 'ray'}",
             "--node-ip-address=127.0.0.1"]  # fmt: skip
    environment = {k: v for k, v in (ENVIRONMENT | own).items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as head:
        wait_for(lambda: is_open(address))
        yield own | {"HEAD": str(head.pid)}
        children = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(60)
        for child in psutil.wait_procs(children, timeout=20)[1]:
            child.kill()


@pytest.fixture(params=["processes:2", pytest.param("auto", marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest) -> tuple[list[str], dict[str, str]]:
    """Return options and the environment of a command with two workers."""
    own = {} if ":" in request.param else request.getfixturevalue("cluster")
    return ["--on", request.param], own


def is_open(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_for(happens: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (found := happens()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a command as a shell does: in a group of its own, with Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedzmg", *arguments, "--plugin", str(PLUGIN)],
        env=ENVIRONMENT | environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a command; return its messages."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, out + err
    return out + err


def study(**more: Any) -> StudySpec:
    given = {
        "task": "slow", "algorithms": ["fedavg", "scaffold"], "seeds": [0, 1], "rates": "known",
        "rounds": ROUNDS, "eval_every": 3, "engine": "vectorized", "device": "cpu", **more,
    }  # fmt: skip
    return StudySpec.parse(given)


def grid(**more: Any) -> GridSpec:
    axes = {"client.lr": [0.01, 0.1, 1.0, 100.0]}
    given = {"task": "slow", "algorithms": ["fedavg", "scaffold"], "axes": axes, "rounds": 12,
             "last": 4, "engine": "vectorized", "device": "cpu", **more}  # fmt: skip
    return GridSpec.parse(given)


def logged(directory: Path) -> dict[str, Any]:
    """Everything that was logged, without times; later lines win."""
    found = {}
    for path in sorted(directory.rglob("metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            del line["seconds"]
        named = {(line.get("trial"), line["round"]): line for line in lines}
        found[str(path.relative_to(directory))] = named
    return found


def pid_of(directory: Path, after: int = 5) -> int:
    """Wait for a run that has a checkpoint and some rounds; return the process that trains it."""

    def trains() -> int | None:
        owner, log = read_owner(directory), directory / "metrics.jsonl"
        has = owner and log.exists() and (directory / "checkpoint.safetensors").exists()
        return owner.pid if has and log.read_bytes().count(b"\n") >= after and owner else None

    found: int = wait_for(trains)
    return found


def write(path: Path, spec: StudySpec | GridSpec) -> str:
    path.write_text(spec.to_toml())
    return str(path)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("local")
    finish(start("study", write(where / "study.toml", study()), "--out", str(where / "out")))
    return logged(where / "out")


def test_study_has_the_bits_of_a_local_one_after_a_worker_was_killed(
    workers: tuple[list[str], dict[str, str]], local: dict[str, Any], tmp_path: Path
) -> None:
    out, file = tmp_path / "out", write(tmp_path / "study.toml", study())
    with start("study", file, "--out", str(out), *workers[0], **workers[1]) as process:
        os.kill(pid_of(out / "fedavg" / "seed-0"), signal.SIGKILL)
        text = finish(process)
    assert logged(out) == local
    assert text.count("worker lost") == 1
    # The rounds before the checkpoint were not trained again.
    assert (out / "fedavg" / "seed-0" / "metrics.jsonl").read_text().count('"round": 1,') == 1


@pytest.mark.slow
def test_one_worker_trains_one_pack_at_a_time(tmp_path: Path) -> None:
    """Ray lends the core of a task that waits in ``ray.get`` to the next task.

    A pack must take longer than the start of a process that could train the next one.
    """
    pytest.importorskip("ray")
    spec, out = study(rounds=20 * ROUNDS), tmp_path / "out"
    file = write(tmp_path / "study.toml", spec)
    finish(start("study", file, "--out", str(out), "--on", "ray:1"))
    spans = []
    for run in out.glob("*/seed-0"):
        first, last = run / "spec.toml", run / "metrics.jsonl"
        spans.append((first.stat().st_mtime, last.stat().st_mtime))
    assert len(spans) == 2
    assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(spans)))


@pytest.mark.slow
def test_slow_node_and_full_object_store_change_nothing(
    cluster: dict[str, str], local: dict[str, Any], tmp_path: Path
) -> None:
    code = """
import ray, time
ray.init("auto", log_to_driver=False)
kept = []
try:
    while len(kept) < 6:
        kept.append(ray.put(bytes(30 * 2**20)))
except ray.exceptions.ObjectStoreFullError:
    pass
print("full", flush=True)
time.sleep(600)
"""
    out, file = tmp_path / "out", write(tmp_path / "study.toml", study())
    environment = ENVIRONMENT | cluster
    filling = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with filling, start("study", file, "--out", str(out), "--on", "auto", **cluster) as process:
        assert filling.stdout is not None
        assert filling.stdout.readline() == "full\n"
        slow = psutil.Process(pid_of(out / "scaffold" / "seed-1", after=1))
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.poll() is None and not (out / "scaffold" / "seed-1" / "done").exists():
                slow.suspend()
                time.sleep(0.09)
                slow.resume()
                time.sleep(0.01)
                if read_owner(out / "scaffold" / "seed-1") is None:
                    break
        finish(process)
        filling.kill()
    assert logged(out) == local


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"stop": {"diverged": True}, "together": 3},
        {"search": {"halving": [[6, 1]]}},
        {"search": {"method": "optuna", "budget": 3, "batch": 2}},
    ],
)
def test_grid_has_the_scores_of_a_local_one(
    workers: tuple[list[str], dict[str, str]], tmp_path: Path, more: dict[str, Any]
) -> None:
    if "method" in more.get("search", ()):
        pytest.importorskip("optuna")
    here, there = tmp_path / "here", tmp_path / "there"
    file = write(tmp_path / "grid.toml", grid(**more))
    finish(start("grid", file, "--out", str(here)))
    finish(start("grid", file, "--out", str(there), *workers[0], **workers[1]))
    scores = [json.loads((path / "grid.json").read_text()) for path in (here, there)]
    points = [{n: own["points"] for n, own in s["algorithms"].items()} for s in scores]
    assert points[0] == points[1]
    assert list(points[0]) == list(points[1])
    assert logged(here) == logged(there)
    assert not list(there.rglob("packs"))
    finish(start("verify", str(there)))


@pytest.mark.slow
def test_error_of_own_code_keeps_its_traceback(
    workers: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    file = write(tmp_path / "study.toml", study(task="failing"))
    process = start("study", file, "--out", str(tmp_path / "out"), *workers[0], **workers[1])
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "ZeroDivisionError" in err
    assert "slow_task.py" in err


@pytest.mark.slow
def test_run_in_shards_has_the_bits_of_one_process_after_a_worker_was_killed(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    words = ["run", "slow", "--algorithm", "scaffold", "--rounds", "40", "--set", "shards=3",
             "--device", "cpu", "--out"]  # fmt: skip
    finish(start(*words, str(tmp_path / "here")))
    with start(*words, str(tmp_path / "there"), "--on", "auto", **cluster) as process:
        pid_of(tmp_path / "there")
        started = psutil.Process(int(cluster["HEAD"])).children(recursive=True)
        next(p for p in started if "ShardWorker" in " ".join(p.cmdline())).kill()
        text = finish(process)
    assert text.count("worker lost") == 1
    assert logged(tmp_path / "here") == logged(tmp_path / "there")


class Deaf:
    """A board that takes messages and answers nothing."""

    def post(self, label: str, message: Any) -> None:
        pass

    def stops(self, seconds: float = 0.0) -> bool:
        return False


def test_directory_that_workers_do_not_share_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "study.toml"
    setup = worker.Setup("", 1, worker.versions(), (), plan, "another", None, Deaf())
    found = worker.train_runs(setup, "fedavg", [], [], False)
    assert found is not None
    assert found.kind is InputError
    assert str(tmp_path) in found.message


@pytest.mark.slow
@pytest.mark.parametrize("on", ["processes:2", "ray:2"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ended_driver_leaves_no_process_and_continues(
    how: signal.Signals, on: str, local: dict[str, Any], tmp_path: Path
) -> None:
    if on == "ray:2":
        pytest.importorskip("ray")
    out, file = tmp_path / "out", write(tmp_path / "study.toml", study())
    words = ["study", file, "--out", str(out), "--on", on]
    process = start(*words)
    pid_of(out / "fedavg" / "seed-0")
    children = psutil.Process(process.pid).children(recursive=True)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: to every process of the group
    else:
        process.send_signal(how)
    finish(process, 130 if how == signal.SIGINT else -9)
    finish(start(*words))
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert logged(out) == local
    text = (out / "fedavg" / "seed-0" / "metrics.jsonl").read_text()
    assert text.count('"round": 1,') == 1
    if how == signal.SIGINT:  # not a round was trained twice
        assert text.count("\n") == ROUNDS


@pytest.mark.slow
def test_ctrl_c_while_processes_start_is_one_line(tmp_path: Path) -> None:
    out, file = tmp_path / "out", write(tmp_path / "study.toml", study())
    process = start("study", file, "--out", str(out), "--on", "processes:2")
    wait_for((out / "study.toml").exists)  # written just before the workers are started
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert "Traceback" not in finish(process, 130)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorized", "cuda_graph"])
def test_two_workers_that_share_a_gpu_have_the_bits_of_a_local_study(
    engine: str, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    spec = study(device="cuda", deterministic=True, engine=engine)
    file, here, there = write(tmp_path / "study.toml", spec), tmp_path / "here", tmp_path / "there"
    own = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    finish(start("study", file, "--out", str(here), **own))
    finish(start("study", file, "--out", str(there), "--on", "ray:2", **own))
    assert logged(here) == logged(there)
    for path in there.rglob("seed-*/manifest.json"):
        facts = json.loads(path.read_text())
        assert (facts["engine"], facts["device"]) == (engine, "cuda")


def test_work_waits_for_a_process_and_is_dropped_by_a_stop() -> None:
    with Processes("processes:1", 1).pool() as pool:
        given = worker.Setup("", 1, "another version", ()), "fedavg", [], [], False
        first, second, third = (
            pool.submit(worker.train_runs, given, Needs(1), 0.0) for _ in range(3)
        )
        while not (ended := pool.wait([first, second, third], SECONDS)):
            pass
        assert ended == [first]
        assert pool.result(first).kind is InputError
        pool.stop()
        assert third in pool.wait([second, third], 0.0)
        assert pool.result(third) is None


def test_long_plans_on_a_cpu_take_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedzmg.cluster.estimate.cores", lambda: 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr("sys.platform", "linux")
    long, task = study(task="digits", rounds=60), tasks.get("digits")
    assert by_default(long, task) == "processes:4"  # two algorithms and two seeds
    assert by_default(long.with_settings({"rounds": 5}), task) is None  # too short
    one = study(task="digits", rounds=60, algorithms=["fedavg"], seeds=[0, 1, 2])
    assert by_default(one, task) is None  # three trials train better together
    seeds = list(range(192))
    assert by_default(one.with_settings({"seeds": seeds}), task) == "processes:64"
    assert by_default(long.with_settings({"deterministic": True}), task) is None
    wide = long.with_settings({"protocol.batch_size": 100})
    assert by_default(wide, task) == "processes:4"  # fewer steps, but longer ones
    optuna = grid(task="digits", rounds=60, search={"method": "optuna", "budget": 40, "batch": 2})
    assert by_default(optuna, task) == "processes:4"  # two algorithms, one batch at a time
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)  # as OMP_NUM_THREADS=1 does
    assert by_default(long, task) is None


@pytest.mark.parametrize(
    "on", ["", "rai", "processes:0", "processes:x", "ray:0", "ray:x", "ray://", "127.0.0.1"]
)
def test_other_addresses_are_refused(on: str) -> None:
    with pytest.raises(InputError, match="ray://HOST:PORT"), connected(on):
        pass


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    with pytest.raises(InputError, match=r"fedzmg\[ray\]"), connected("ray"):
        pass


@pytest.mark.slow
def test_cluster_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    file = write(tmp_path / "study.toml", study())
    text = finish(start("study", file, "--on", "ray://127.0.0.1:9", "--out", str(tmp_path)), 2)
    assert text.count("\n") == 1
    assert "ray://127.0.0.1:9" in text
