"""Load and faults for a federation of real processes: kills, delays and corrupt answers.

::

    python tools/deploy_soak.py --nodes 16 --rounds 50            load
    python tools/deploy_soak.py --nodes 4 --rounds 100 --faults   kills, delays, corrupt answers

It prints the memory of the server's processes over time, times of rounds, the health of nodes and
the metric at the start and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
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

import psutil

TASK = '''
"""Task of the soak test: the first clients of digits; a device may be faulty."""
import os, random, time
from dataclasses import replace
import torch
from fedzmg import tasks
from fedzmg.data.federated import FederatedData
from fedzmg.tree import row

N = int(os.environ["SOAK_NODES"])

def task():
    whole = tasks.get("digits")
    end = int(whole.train.offsets[N])
    offsets, names = whole.train.offsets[: N + 1], whole.train.names[:N]
    own = FederatedData(row(whole.train.examples, slice(0, end)), offsets, names)
    return replace(whole, train=own, protocol=replace(whole.protocol, cohort=min(N, 8)))

share = float(os.environ.get("SOAK_FAULTS", "0"))
if share and "client" in os.sys.argv:
    from fedzmg.deploy import codec, device
    from fedzmg.deploy.frames import Frame
    answer = device.Device._train

    def faulty(self, federation, frame):
        reply, luck = answer(self, federation, frame), random.random()
        if luck < share:
            time.sleep(random.uniform(0, 60))
        elif luck < 2 * share:
            name, wire = next(iter(reply.arrays.items()))
            wrong = random.choice([wire._replace(data=wire.data[:-4]), wire._replace(dtype="int64"),
                                   wire._replace(data=b"\\xff" * len(wire.data))])
            reply = reply._replace(arrays={**reply.arrays, name: wrong})
        return reply

    device.Device._train = faulty
'''


def memory(server: psutil.Process) -> dict[str, float]:
    """Return MiB of the server's processes by name."""
    found: dict[str, float] = {}
    for one in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            name = next((Path(p).name for p in one.cmdline()[1:] if "bin/" in p), "launcher")
            found[name] = found.get(name, 0) + one.memory_info().rss / 2**20
    return found


def main() -> None:
    """Run a federation and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--faults", action="store_true", help="kill, delay and corrupt at random")
    parser.add_argument("--algorithm", default="scaffold")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fedzmg-soak-"))
    (folder / "soak_task.py").write_text(TASK)
    (folder / "run.toml").write_text(
        f'task = "soak_task.py:task"\nalgorithm = "{given.algorithm}"\n[protocol]\n'
        f"rounds = {given.rounds}\neval_every = 1\n"
    )
    environment = {**os.environ, "SOAK_NODES": str(given.nodes), "OMP_NUM_THREADS": "1"}
    environment |= {"SOAK_FAULTS": "0.05"} if given.faults else {}
    command = [sys.executable, "-m", "fedzmg", "deploy", "local", "run.toml"]
    command += ["--clients", str(given.nodes), "--deadline", "60" if given.faults else "600"]
    log = (folder / "soak.log").open("w")
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    server, records, sizes, killed = psutil.Process(process.pid), [], [], 0
    path = folder / "runs" / "run" / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(2)
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > len(records):
            records = [json.loads(line) for line in lines]
            sizes.append(memory(server))
            shown = {name: round(size) for name, size in sizes[-1].items()}
            print(f"round {len(records)}: metric {records[-1]['metric']}, MiB {shown}", flush=True)
            if given.faults and random.random() < 0.1:
                own = [
                    c
                    for c in server.children(recursive=True)
                    if c.name().startswith("flower-supern")
                ]
                for one in random.sample(own, min(1, len(own))):
                    one.send_signal(signal.SIGKILL)
                    killed += 1
    nodes = json.loads(path.with_name("nodes.json").read_text())["nodes"]
    print(f"exit code {process.returncode}, {len(records)} rounds, {killed} nodes killed")
    for key in ("rounds", "absent", "late", "refused", "lost"):
        print(f"{key}: {sum(node[key] for node in nodes)}")
    seconds = [record["seconds"] for record in records]
    print(f"seconds per round: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}")
    print(f"metric: {records[0]['metric']} to {records[-1]['metric']}")
    early, late = sizes[len(sizes) // 5], sizes[-1]
    for name in late:
        if name in early and "supernode" not in name and "client" not in name:
            print(f"{name}: {early[name]:.0f} MiB early, {late[name]:.0f} MiB late")
    print(f"files: {folder}")


if __name__ == "__main__":
    main()
