"""Workers that a user names: processes of this machine, or a Ray cluster here or elsewhere."""

import contextlib
import importlib.util
import logging
import math
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fedzmg.cluster.processes import Processes, ProcessPool, cores
from fedzmg.cluster.ray_pool import RayPool
from fedzmg.cluster.workers import Needs
from fedzmg.errors import InputError

PASSED = re.compile(
    "FEDZMG_|OMP_|MKL_|KMP_|ATEN_|ONEDNN_|DNNL_|CUBLAS_|NVIDIA_TF32|MLFLOW_TRACKING_URI|WANDB_MODE"
)
"""Variables of the environment that affect results or name data and trackers."""
STORE_BYTES = 200 * 2**20  # object store of a cluster on this machine; packs hardly use it
EXPECTED = "expected processes, processes:N, ray (this machine), ray:N, auto or ray://HOST:PORT"


class RayCluster:
    """A connected Ray cluster, used like :class:`Processes`; ``share`` is N of ``ray:N``."""

    def __init__(self, on: str, ray: Any, threads: int, share: int | None = None) -> None:
        self.on, self.ray, self.threads, self._share = on, ray, threads, share

    def nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def needs(self, device: str) -> Needs:
        gpus = sum(node.get("GPU", 0.0) for node in self.nodes())
        if device == "cpu" or (device == "auto" and not gpus):
            found = Needs(self.threads)
        elif self._share is None or not gpus:
            found = Needs(1, 1.0)
        else:
            # More workers than GPUs share them. Ray counts in parts of 10,000.
            each = math.ceil(self._share / gpus)
            found = Needs(self.threads, 10_000 // each / 10_000)
        if not self.workers(found):
            wanted = f"{found.gpus:g} GPU and " * bool(found.gpus) + f"{found.cpus:g} CPU cores"
            remedy = "add nodes, change the device or set OMP_NUM_THREADS"
            raise InputError(f"--on {self.on}: no node has {wanted} for a worker: {remedy}")
        return found

    def workers(self, needs: Needs) -> int:
        return sum(needs.fit(node) for node in self.nodes())

    def remote(self, function: Callable[..., Any], needs: Needs, memory: float = 0.0) -> Any:
        """Return a function or class for Ray, placed by what it needs; retries are the caller's."""
        # A need above every node would wait forever.
        most = max(node.get("memory", 0.0) for node in self.nodes())
        placed = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "memory": int(min(memory, most))}
        is_class = isinstance(function, type)
        return self.ray.remote(**placed, **({} if is_class else {"max_retries": 0}))(function)

    @contextlib.contextmanager
    def pool(self) -> Iterator[RayPool]:
        """Start the message board of a training; Ray starts workers when there is work."""
        pool = RayPool(self)
        yield pool
        self.ray.kill(pool.board.actor)


Cluster: TypeAlias = Processes | RayCluster
Pool: TypeAlias = ProcessPool | RayPool


@contextlib.contextmanager
def connected(on: str) -> Iterator[Cluster]:
    """Connect to a cluster, and leave it at the end; one on this machine is started and stopped.

    Workers of Ray have as many threads as this process: their number decides the last bits.
    """
    if own := re.fullmatch(r"processes(?::([1-9]\d{0,5}))?", on):
        yield Processes(on, int(own[1]) if own[1] else None)
        return
    local = re.fullmatch(r"ray(?::([1-9]\d{0,5}))?", on)
    if local is None and on != "auto" and not re.match(r"ray://[^/]", on):
        raise InputError(f"--on {on}: {EXPECTED}")
    # Nothing phones home. Ray reads these while it is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        given = not os.environ.keys().isdisjoint(("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        if local and not given:
            # Ray listens on every network interface; versions without tokens ignore this.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        if local or given or (Path.home() / ".ray" / "auth_token").is_file():
            os.environ["RAY_AUTH_MODE"] = "token"
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"--on {on} needs the package 'ray': pip install 'fedzmg[ray]'")
    ray = importlib.import_module("ray")
    share = int(local[1]) if local and local[1] else None
    threads = torch.get_num_threads()
    variables = {name: value for name, value in os.environ.items() if PASSED.match(name)}
    options: dict[str, Any] = {"address": on, "runtime_env": {"env_vars": variables}}
    if local:
        room = share * threads if share else max(cores(), threads)
        options = {"address": "local", "num_cpus": room, "object_store_memory": STORE_BYTES}
        options["include_dashboard"] = False
    try:
        with warnings.catch_warnings(action="ignore"):
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[:300]
        remedy = "start it, check the address, or pass its token in RAY_AUTH_TOKEN"
        raise InputError(f"--on {on}: the cluster does not answer ({reason}): {remedy}") from None
    try:
        yield RayCluster(on, ray, threads, share)
    finally:
        ray.shutdown()
