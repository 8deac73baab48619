"""An NVFlare client that trains by FedZMG, with the Client API; `nvflare_job.py` runs it."""

import nvflare.client as flare
import torch
from torch import nn

from fedzmg.data.embedded import load_digits
from fedzmg.optim import ZeroMeanSGD

LR, DECAY = 0.05, 5e-4


class Net(nn.Sequential):
    """Model of server and clients."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


if __name__ == "__main__":
    flare.init()
    site, data, model = int(flare.get_site_name()[-1]), load_digits(), Net()
    x, y = torch.tensor(data.train_x[site::20]) / 255, torch.tensor(data.train_y[site::20])
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict(received.params)
        before, losses = model[1].weight.detach().sum(1), []
        optimizer = ZeroMeanSGD(model, lr=LR, momentum=0.9, weight_decay=DECAY)  # no momentum yet
        for batch in torch.randperm(len(x)).split(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        drift = model[1].weight.detach().sum(1) - before * (1 - LR * DECAY) ** len(losses)
        found = {"loss": sum(losses) / len(losses), "drift": drift.abs().max().item()}
        flare.send(flare.FLModel(params=model.state_dict(), metrics=found))
