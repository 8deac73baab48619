"""Flower's FedAvg over clients that train by FedZMG: together they are FedZMG."""

import torch
from flower_client import CLIENTS, DECAY, LR, app, batches, new_model
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

ROUNDS = 3
server = ServerApp()


@server.main()
def main(grid: Grid, _: Context) -> None:
    """Every client takes part in every round."""
    torch.manual_seed(0)
    start = new_model().state_dict()
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=ROUNDS)
    losses = [found["loss"] for found in result.train_metrics_clientapp.values()]
    end, steps = result.arrays.to_torch_state_dict(), ROUNDS * len(batches(0, 0))
    decayed = start["1.weight"].sum(1) * (1 - LR * DECAY) ** steps
    drift = (end["1.weight"].sum(1) - decayed).abs().max()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"sums over inputs differ from decay alone by {drift:.1e}")


if __name__ == "__main__":  # `flwr run` finds both apps in a pyproject.toml instead
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=CLIENTS, backend_config=resources)
