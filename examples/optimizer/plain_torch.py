"""A training loop of your own: ZeroMeanSGD where SGD was, and what it keeps."""

import torch
from torch import Tensor, nn

from fedzmg.data.embedded import load_digits
from fedzmg.optim import ZeroMeanSGD

LR, DECAY = 0.05, 5e-4

torch.manual_seed(0)
data = load_digits()
x = torch.tensor(data.train_x[:1200, None]) / 255
y = torch.tensor(data.train_y[:1200])
model = nn.Sequential(
    nn.Conv2d(1, 8, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 10)
)


def sums() -> Tensor:
    """Over the inputs of every unit, of all layers."""
    return torch.cat([w.detach().flatten(1).sum(1) for w in model.parameters() if w.ndim > 1])


optimizer = ZeroMeanSGD(model, lr=LR, momentum=0.9, weight_decay=DECAY)
before, losses = sums(), []
for _ in range(2):
    for batch in torch.randperm(len(x)).split(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

drift = (sums() - before * (1 - LR * DECAY) ** len(losses)).abs().max()
print(f"loss {losses[0]:.3f} -> {sum(losses[-20:]) / 20:.3f}")
print(f"sums over inputs differ from decay alone by {drift:.1e}")
