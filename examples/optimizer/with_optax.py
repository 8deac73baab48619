"""JAX: `zero_mean()` in an optax chain. Kernels of Flax have their inputs first, outputs last."""

import jax
import optax
from flax import linen as nn
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

from fedzmg.data.embedded import load_digits
from fedzmg.optim.jax import zero_mean

LR, DECAY, STEPS = 0.05, 5e-4, 120
x, y = load_digits().train_x[:1200, ..., None] / 255, load_digits().train_y[:1200]
model = nn.Sequential(
    [nn.Conv(8, (5, 5), strides=3), lambda h: nn.relu(h).reshape(len(h), -1), nn.Dense(10)]
)
momentum, decay = optax.trace(0.9), optax.add_decayed_weights(DECAY)
fedzmg = optax.chain(zero_mean(), momentum, decay, optax.scale_by_learning_rate(LR))


@jax.jit
def step(params: dict, state: tuple, x: jax.Array, y: jax.Array) -> tuple:
    """Centring, momentum and decay are compiled with the rest."""
    loss, grads = jax.value_and_grad(lambda p: cross_entropy(model.apply(p, x), y).mean())(params)
    updates, state = fedzmg.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = first = model.init(jax.random.key(0), x[:1])
state, losses = fedzmg.init(params), []
for at in range(0, 20 * STEPS, 20):
    rows = slice(at % len(x), at % len(x) + 20)
    params, state, loss = step(params, state, x[rows], y[rows])
    losses.append(float(loss))
kept = (1 - LR * DECAY) ** STEPS
moved = jax.tree.map(lambda a, b: (b - kept * a).sum(tuple(range(a.ndim - 1))), first, params)
drift = max(abs(layer["kernel"]).max() for layer in moved["params"].values())
print(f"loss {losses[0]:.3f} -> {sum(losses[-20:]) / 20:.3f}")
print(f"sums over inputs differ from decay alone by {drift:.1e}")
