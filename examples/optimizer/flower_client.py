"""A Flower client that trains by FedZMG: the optimizer is all there is to it."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedzmg.data.embedded import load_digits
from fedzmg.optim import ZeroMeanSGD

CLIENTS, EXAMPLES, LR, DECAY, app = 4, 200, 0.05, 5e-4, ClientApp()


def new_model() -> nn.Module:
    """Make the model of server and clients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def batches(client: int, round_: int) -> list[Tensor]:
    """Return the indices of the client's examples for each step."""
    shuffle = torch.Generator().manual_seed(round_ * CLIENTS + client)
    return list(torch.randperm(EXAMPLES, generator=shuffle).split(20))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Begin at the global model, and without momentum: with a new optimizer every round."""
    client, model, data = int(context.node_config["partition-id"]), new_model(), load_digits()
    x, y = torch.tensor(data.train_x[client::40]) / 255, torch.tensor(data.train_y[client::40])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = ZeroMeanSGD(model, lr=LR, momentum=0.9, weight_decay=DECAY)
    for batch in batches(client, message.content["config"]["server-round"]):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    found = MetricRecord({"loss": loss.item(), "num-examples": len(x)})
    trained = {"arrays": ArrayRecord(model.state_dict()), "metrics": found}
    return Message(RecordDict(trained), reply_to=message)
