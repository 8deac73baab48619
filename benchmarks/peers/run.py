"""FedAvg rounds of fedzmg and of other systems: the same work, one machine, one run.

python benchmarks/peers/run.py [--workload mlp|cifar100|pfl-cifar10] [--rounds N] [--out FILE.json]
"""

import sys
from pathlib import Path

# Peers are modules of the package `peers`, so that none of their names hides the system it runs.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from peers.command import main  # noqa: E402

if __name__ == "__main__":
    main()
