"""Flower's simulation runtime: its FedAvg, Ray actors of one core and a share of a GPU each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers.flower_client import app as client
from peers.work import Stopwatch, Work, begin, cores


class Timed(FedAvg):
    """Federated averaging that names each client's batches, and stops the time of every round."""

    def __init__(self, work: Work, watch: Stopwatch) -> None:
        cohort = work.batches.shape[1]
        super().__init__(
            fraction_train=cohort / work.facts.population, fraction_evaluate=0.0,
            min_train_nodes=cohort, min_available_nodes=work.facts.population,
        )  # fmt: skip
        self._watch = watch

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._watch.begin()
        sampled = super().configure_train(server_round, arrays, config, grid)
        common = {"work": os.path.abspath(sys.argv[1]), "round": server_round - 1}
        return [
            Message(
                RecordDict({"arrays": arrays, "config": ConfigRecord({**common, "row": row})}),
                message.metadata.dst_node_id,
                message.metadata.message_type,
            )
            for row, message in enumerate(sampled)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = list(replies)
        arrays, metrics = super().aggregate_train(server_round, received)
        if arrays is None:
            raise RuntimeError("no client replied")
        new = arrays
        steps = sum(m.content["metrics"]["steps"] for m in received if not m.has_error())
        self._watch.end(steps, lambda: {name: array.numpy() for name, array in new.items()})
        return arrays, metrics


def main() -> None:
    """Train all rounds of the work."""
    work, watch = begin()
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        del context
        start = {name: torch.from_numpy(array) for name, array in work.start.items()}
        Timed(work, watch).start(
            grid=grid, initial_arrays=ArrayRecord(start), num_rounds=len(work.batches)
        )

    share = 1 / cores() if work.facts.device == "cuda" else 0.0  # of one GPU, for each actor
    run_simulation(
        server, client, num_supernodes=work.facts.population,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": share},
            "init_args": {"num_cpus": cores()},
        },
    )  # fmt: skip
    watch.report(["flwr", "ray", "torch"], f"actors: {cores()}")


if __name__ == "__main__":
    main()
