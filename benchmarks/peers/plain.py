"""Plain eager PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from peers.networks import arrays, build, examples, prepare, set_precision, wait
from peers.work import begin
from plain_loop import Batch, plain_round


def main() -> None:
    """Train all rounds of the work."""
    work, watch = begin()
    facts = work.facts
    set_precision(facts)
    model = build(facts, work.start)
    x, y = examples(work)

    def batches(client: np.ndarray) -> Iterator[Batch]:
        for rows in torch.from_numpy(client).to(facts.device):
            yield prepare(x[rows]), y[rows]

    for cohort in work.batches:
        watch.begin()
        steps = plain_round(model, [batches(client) for client in cohort], lr=facts.lr)
        wait(facts)
        watch.end(steps, lambda: arrays(model))
    watch.report(["torch"], f"threads: {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
