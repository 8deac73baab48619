"""FedJAX: its federated averaging, whose compiled steps train one client after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from peers.work import Arrays, begin, cores

Params = dict[str, jax.Array]
Network = Callable[[Params, jax.Array, "jax.Array | None"], jax.Array]


def mlp(params: Params, x: jax.Array, rng: jax.Array | None) -> jax.Array:
    """Build the workload ``mlp``."""
    del rng
    x = jax.nn.relu(dense(params, "1", x.reshape(len(x), -1)))
    return dense(params, "5", jax.nn.relu(dense(params, "3", x)))


def cifar100(params: Params, x: jax.Array, rng: jax.Array | None) -> jax.Array:
    """Build the workload ``cifar100``, channels last for XLA on a CPU."""
    keys = [None] * 3 if rng is None else list(jax.random.split(rng, 3))
    x = x.transpose(0, 2, 3, 1)
    for first, second, key in (("0", "2", keys[0]), ("6", "8", keys[1])):
        x = jax.nn.relu(convolution(params, first, x))
        x = pool(jax.nn.relu(convolution(params, second, x)))
        x = dropout(x, 0.25, key)
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    x = dropout(jax.nn.relu(dense(params, "13", x)), 0.5, keys[2])
    return dense(params, "16", x)


def pfl_cifar10(params: Params, x: jax.Array, rng: jax.Array | None) -> jax.Array:
    """Build the workload ``pfl-cifar10``, channels last."""
    first, second = [None] * 2 if rng is None else list(jax.random.split(rng))
    x = jax.nn.relu(convolution(params, "0", x.transpose(0, 2, 3, 1), "VALID"))
    x = dropout(pool(jax.nn.relu(convolution(params, "2", x, "VALID"))), 0.25, first)
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return dense(params, "10", dropout(jax.nn.relu(dense(params, "7", x)), 0.5, second))


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Apply a dense layer."""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def convolution(params: Params, name: str, x: jax.Array, padding: str = "SAME") -> jax.Array:
    """Apply a convolution; by default it keeps the image size."""
    layout = ("NHWC", "OIHW", "NHWC")
    kernel = params[f"{name}.weight"]
    out = jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=layout)
    return out + params[f"{name}.bias"]


def pool(x: jax.Array) -> jax.Array:
    """Take the maximum of 2 x 2 windows."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Apply dropout if there is a key."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


NETWORKS: dict[str, Network] = {"mlp": mlp, "cifar100": cifar100, "pfl-cifar10": pfl_cifar10}


def main() -> None:
    """Train all rounds of the work."""
    work, watch = begin()
    facts, (_, cohort, steps, size) = work.facts, work.batches.shape
    network = NETWORKS[facts.network]
    if facts.device == "cuda":
        rounded = "tensorfloat32" if facts.precision == "tf32" else "float32"
        jax.config.update("jax_default_matmul_precision", rounded)

    def loss(params: Params, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        x = batch["x"]
        x = x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x
        logits = network(params, x, rng if facts.dropout else None)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(facts.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=size, num_epochs=1, skip_shuffle=True),
    )
    taken = 0

    def count(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return batch

    counting = fedjax.BatchPreprocessor([count])
    y = work.y.astype(np.int32)

    def client(rows: np.ndarray) -> fedjax.ClientDataset:
        # In the order of the batches, which FedJAX cuts from the front.
        return fedjax.ClientDataset({"x": work.x[rows], "y": y[rows]}, counting)

    state = algorithm.init({name: jnp.asarray(array) for name, array in work.start.items()})

    def model() -> Arrays:
        return {name: np.asarray(array) for name, array in state.params.items()}

    for number, batches in enumerate(work.batches):
        taken = 0
        watch.begin()
        keys = jax.random.split(jax.random.PRNGKey(number), cohort)
        clients = batches.reshape(cohort, steps * size)
        state, _ = algorithm.apply(
            state, [(k, client(rows), keys[k]) for k, rows in enumerate(clients)]
        )
        jax.block_until_ready(state.params)
        watch.end(taken, model)
    watch.report(["fedjax", "jax"], f"cores: {cores()}")


if __name__ == "__main__":
    main()
