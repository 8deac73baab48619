"""``digits``: real handwritten digits on clients that each know few of them."""

from __future__ import annotations

from fedzmg.data.embedded import load_digits
from fedzmg.data.federated import FederatedData, examples
from fedzmg.data.partition import dirichlet
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.networks import digits_cnn
from fedzmg.tasks.task import Protocol, Task, unit_pixels
from fedzmg.tasks.tuned import tuned

CLIENTS = 160
ALPHA = 0.1
PARTITION_SEED = 0


def digits() -> Task:
    """160 clients of 50 images each, labels skewed by Dirichlet(0.1); pixels 1.0 = background.

    Half of the test images choose learning rates, the other half report results.
    """
    data = load_digits()
    owners = dirichlet(data.train_y, CLIENTS, alpha=ALPHA, seed=PARTITION_SEED)
    return Task(
        name="digits",
        model=FunctionalModel(digits_cnn()),
        train=FederatedData.from_arrays(data.train_x, data.train_y, owners),
        tune=examples(data.test_x[0::2], data.test_y[0::2]),
        test=examples(data.test_x[1::2], data.test_y[1::2]),
        prepare=unit_pixels,
        init="keras",
        protocol=Protocol(
            rounds=50, cohort=5, batch_size=10, epochs=2, eval_every=2, threshold=0.8
        ),
        options=tuned("digits"),
    )
