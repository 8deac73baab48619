"""Flower's client side; a module of its own, so that its actors import it and keep the data."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from peers.networks import build, examples, prepare, set_precision
from peers.work import Work

app = ClientApp()


@functools.cache
def loaded(folder: str) -> tuple[Work, Tensor, Tensor, nn.Sequential]:
    """Work, examples and a network; read once by every actor, which has one core."""
    torch.set_num_threads(1)
    work = Work.load(Path(folder))
    set_precision(work.facts)
    return work, *examples(work), build(work.facts, work.start)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local steps of one client."""
    del context
    config = message.content["config"]
    work, x, y, model = loaded(config["work"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.facts.lr)
    batches = torch.from_numpy(work.batches[config["round"], config["row"]])
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(prepare(x[rows])), y[rows]).backward()
        optimizer.step()
    done = MetricRecord({"num-examples": batches.numel(), "steps": len(batches)})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": done})
    return Message(reply, reply_to=message)
