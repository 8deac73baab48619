"""Time ``fedzmg compare`` in one process and in one per core, in turns.

    python benchmarks/compare.py --turns 3 --out benchmarks/results/compare-x86-2.json

Every turn is a new process with its start, data, training, tables and figure.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fedzmg.cluster.processes import cores
from fedzmg.provenance import environment
from fedzmg.storage.formats import write_json


def seconds(options: list[str]) -> float:
    """Run the command; return its wall time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedzmg", "compare", "--device", "cpu", *options]
        began = time.perf_counter()
        subprocess.run([*command, "--out", f"{folder}/out"], check=True, capture_output=True)
        return time.perf_counter() - began


def main() -> None:
    """Measure in turns, and print the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ways = {"one process": ["--on", "processes:1"], "processes": ["--on", "processes"]}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(given.turns):
        for way, options in ways.items():
            found[way].append(seconds(options))
            print(f"turn {turn + 1}, {way}: {found[way][-1]:.1f} s", flush=True)
    ratio = statistics.median(one / more for one, more in zip(*found.values(), strict=True))
    print(f"{cores()} cores: {ratio:.2f} times as fast in processes (median of turns)")
    if given.out:
        command = shlex.join(["python", os.path.relpath(__file__), *sys.argv[1:]])
        facts = {**environment(torch.device("cpu")), "command": command, "cores": cores()}
        write_json(given.out, {"environment": facts, "seconds": found, "ratio": ratio})


if __name__ == "__main__":
    main()
