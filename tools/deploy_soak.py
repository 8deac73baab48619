"""Load and faults for deployed federations: many nodes, kills, delays and corrupt answers.

::

    python tools/deploy_soak.py load --nodes 16 --rounds 50          real processes
    python tools/deploy_soak.py faults --nodes 8 --rounds 100        kills, delays, corrupt answers
    python tools/deploy_soak.py simulation --nodes 200 --rounds 40   Flower's own simulation (Ray)
    python tools/deploy_soak.py all                                  these three at once: 16 cores

Each prints times of rounds, health of nodes and memory of the server's processes, early (second
fifth of the rounds) and late (last fifth). It fails if memory grows by more than 5 %, if a round or
a client's memory is lost, or if the model is not that of a simulation; with faults, if its accuracy
is 0.05 lower.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

GROWTH, WORSE = 0.05, 0.05
ALL = {"load": (16, 50), "faults": (8, 100), "simulation": (200, 40)}
"""Nodes and rounds."""
TASK = '''
"""Digits on equal clients, and a small network; a device may be faulty."""
import os, random, signal, sys, threading, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
from fedzmg import Task, tasks
from fedzmg.deploy import device

FAULTS, NODES = float(os.environ["SOAK_FAULTS"]), int(os.environ["SOAK_NODES"])
train, DEVICES = device.Device._train, {}

def end_with(soak):
    """Clean up and end soon after the soak has ended, however that happens."""
    while os.getppid() == soak:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)

if os.getppid() == int(os.environ["SOAK_PROCESS"]):
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()

def task():
    digits = tasks.get("digits")
    own, test = digits.train.examples, digits.test
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    clients = np.arange(len(own.y)) % NODES
    return Task.from_arrays(model, 255 - own.x, own.y, clients, test=(255 - test.x, test.y),
                            cohort=min(-(-NODES // 2), 8), batch_size=20, epochs=1, eval_every=1)

def faulty(self, path, frame):
    reply, luck = train(self, path, frame), random.random()
    if luck < FAULTS:
        time.sleep(random.uniform(0, 20))
    elif luck < 2 * FAULTS:
        name, wire = next(iter(reply.arrays.items()))
        wrong = random.choice([wire._replace(data=wire.data[:-4]), wire._replace(dtype="int64"),
                               wire._replace(data=b"\\xff" * len(wire.data))])
        reply = reply._replace(arrays={**reply.arrays, name: wrong})
    elif luck < 2.2 * FAULTS:
        reply = reply._replace(facts={**reply.facts, "nonce": "0" * 16})
    return reply

if FAULTS and "client" in sys.argv:
    device.Device._train = faulty

def answer(message, context):
    """Train a client in Flower's simulation, where one process has many."""
    from flwr.app import Message
    from fedzmg.deploy.flower import from_records, to_records
    client, place = int(context.node_config["partition-id"]), Path(os.environ["SOAK_FOLDER"])
    if client not in DEVICES:
        data = f"{place / 'soak_task.py'}:task"
        DEVICES[client] = device.Device(data, client, place / "state", torch.device("cpu"))
    reply = DEVICES[client].answer(from_records(message.content))
    return Message(to_records(reply), reply_to=message)
'''


def simulate_nodes(nodes: int) -> None:
    """Run the server app with nodes of Flower's simulation, in this process."""
    import soak_task
    from flwr.clientapp import ClientApp
    from flwr.simulation import run_simulation

    from fedzmg.deploy import server, server_app
    from fedzmg.experiment.specs import files

    home = Path("runs/run.deploy").absolute()
    home.mkdir(parents=True)
    spec = files.read(Path("run.toml"), "run")
    _, run = server.prepare(spec, spec.build_task(), nodes)
    places = str(home.with_name("run")), nodes, str(home)
    own = {"plugins": (soak_task.__file__,), "parent": os.getpid()}
    settings = server.Settings(run.spec.to_toml(), *places, **own)
    settings.write(home / "settings.json")
    os.environ[server.SETTINGS] = str(home / "settings.json")
    client = ClientApp()
    client.train()(soak_task.answer)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app.app, client, nodes, backend_config=resources)
    error = json.loads((home / server.DONE).read_text())["error"]
    if error:
        raise SystemExit(error)


def memory(server: psutil.Process) -> dict[str, float]:
    """Return MiB of the server's processes by name, without devices."""
    found = {"launcher": server.memory_info().rss / 2**20}
    links = [child for child in server.children() if child.name().startswith("flower-superl")]
    for one in [process for link in links for process in (link, *link.children(recursive=True))]:
        with contextlib.suppress(psutil.Error):
            found[one.name()] = found.get(one.name(), 0) + one.memory_info().rss / 2**20
    return found


def kill_one(server: psutil.Process) -> int:
    """Kill a node in one of ten rounds, and the server app in one of fifty."""
    name = random.choices(["", "flower-supern", "flwr-serverapp"], [0.88, 0.1, 0.02])[0]
    with contextlib.suppress(psutil.Error):
        own = [c for c in server.children(recursive=True) if name and c.name().startswith(name)]
        if own:
            random.choice(own).send_signal(signal.SIGKILL)
            print(f"killed {name}", flush=True)
            return 1
    return 0


def reference(folder: Path) -> tuple[dict[str, Any], float]:
    """Return model and last metric of a simulation of the same run."""
    from fedzmg import plugins
    from fedzmg.experiment.run import run_pack
    from fedzmg.experiment.run_directory import RunDirectory

    plugins.load(folder / "soak_task.py")
    spec = RunDirectory(folder / "runs" / "run").spec()
    [history] = run_pack(spec.build_task(), [spec], [folder / "simulated"])
    return dict(history.params), float(history.records[-1].metric or 0)


def run_all() -> None:
    """Run everything at once; print the figures of each when it has ended."""
    running = {}
    for kind, (nodes, rounds) in ALL.items():
        if kind != "simulation" or importlib.util.find_spec("ray"):
            command = [sys.executable, __file__, kind, "--nodes", str(nodes)]
            command += ["--rounds", str(rounds), "--deadline", "4"]
            running[kind] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
    failed = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        outputs = {kind: pool.submit(one.communicate) for kind, one in running.items()}
        for kind, output in outputs.items():
            lines = output.result()[0].splitlines()
            shown = [line for line in lines if not line.startswith("round ")]
            print("\n".join([f"== {kind}", *shown]), flush=True)
            failed += [kind] if running[kind].returncode else []
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def main() -> None:
    """Run a federation, print its figures, and fail if one is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("all", *ALL, "inside"))
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--algorithm", default="scaffold")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds, with faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    given = parser.parse_args()
    if given.kind == "inside":
        simulate_nodes(given.nodes)
        return
    if given.kind == "all":
        run_all()
    random.seed(given.seed)
    folder, faults = Path(tempfile.mkdtemp(prefix="fedzmg-soak-")), given.kind == "faults"
    (folder / "soak_task.py").write_text(TASK)
    (folder / "run.toml").write_text(
        f'task = "soak_task.py:task"\nalgorithm = "{given.algorithm}"\n'
        f"[protocol]\nrounds = {given.rounds}\n[client]\nlr = 0.1\n"
    )
    os.environ |= {"SOAK_NODES": str(given.nodes), "SOAK_FOLDER": str(folder)}
    os.environ["SOAK_PROCESS"] = str(os.getpid())
    os.environ |= {"SOAK_FAULTS": "0.04" if faults else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedzmg", "deploy", "local", "run.toml"]
    command += ["--clients", str(given.nodes)]
    command += ["--deadline", str(given.deadline if faults else 600)]
    if given.kind == "simulation":
        command = [sys.executable, str(Path(__file__).resolve()), "inside"]
        command += ["--nodes", str(given.nodes)]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    began, log = time.monotonic(), (folder / "soak.log").open("w")
    process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    server, sizes, killed = psutil.Process(process.pid), [], 0
    records: list[dict[str, Any]] = []
    path = folder / "runs" / "run" / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(0.5)
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > len(records):
            records = [json.loads(line) for line in lines]
            sizes.append(memory(server))
            shown = {name: round(size) for name, size in sizes[-1].items()}
            print(f"round {len(records)}: metric {records[-1]['metric']}, MiB {shown}", flush=True)
            killed += kill_one(server) if faults else 0
    if process.returncode or not records:
        raise SystemExit((folder / "soak.log").read_text()[-2000:])
    wrong = report(folder, records, sizes, given)
    print(f"{time.monotonic() - began:.0f} s, {killed} processes killed, files: {folder}")
    raise SystemExit("; ".join(wrong) or 0)


def report(
    folder: Path, records: list[dict[str, Any]], sizes: list[dict[str, float]], given: Any
) -> list[str]:
    """Print the figures; return those that are wrong."""
    import torch

    from fedzmg.experiment.run_directory import RunDirectory

    wrong = []
    nodes = json.loads((folder / "runs" / "run" / "nodes.json").read_text())["nodes"]
    keys = ("rounds", "absent", "late", "refused", "lost")
    sums = {key: sum(node[key] for node in nodes) for key in keys}
    print(f"{given.nodes} nodes, {len(records)} rounds; answers of nodes: {sums}")
    if [record["round"] for record in records] != list(range(1, given.rounds + 1)) or sums["lost"]:
        wrong.append("a round or a client's memory is lost")
    seconds = [record["seconds"] for record in records]
    print(f"seconds per round: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}")
    fifth = max(1, len(sizes) // 5)
    for name in sizes[-1]:
        parts = [
            [s[name] for s in part if name in s]
            for part in (sizes[fifth : 2 * fifth], sizes[-fifth:])
        ]
        if all(parts):
            early, late = map(statistics.median, parts)
            print(f"{name}: {early:.0f} MiB early, {late:.0f} MiB late ({late / early - 1:+.1%})")
            if late > early * (1 + GROWTH):
                wrong.append(f"{name} grows")
    model, metric = reference(folder)
    checkpoint = RunDirectory(folder / "runs" / "run").checkpoint()
    own = {} if checkpoint is None else checkpoint.params()
    same = own.keys() == model.keys() and all(torch.equal(own[n], model[n]) for n in own)
    last = records[-1]["metric"]
    print(f"accuracy {records[0]['metric']:.3f} to {last:.3f}, of a simulation {metric:.3f}")
    print(f"the model is {'' if same else 'not '}that of the simulation, bit for bit")
    if last < metric - WORSE or not (same or given.kind == "faults"):
        wrong.append("the model is not that of a simulation")
    return wrong


if __name__ == "__main__":
    main()
