"""Opacus clips and adds noise, then ZeroMeanSGD projects: post-processing, the guarantee stays."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedzmg.data.embedded import load_digits
from fedzmg.optim import ZeroMeanSGD

LR, DECAY = 0.1, 5e-4

torch.manual_seed(0)
data = load_digits()
pairs = TensorDataset(torch.tensor(data.train_x[:2000]) / 255, torch.tensor(data.train_y[:2000]))
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
weight, losses = model[1].weight, []
before = weight.detach().sum(1)
# Made from the model before Opacus wraps it. Its optimizer writes the clipped, noisy sum to `grad`
# and then calls this one, which centres that: noise along the mean is removed as well.
inner = ZeroMeanSGD(model, lr=LR, momentum=0.9, weight_decay=DECAY)
engine = PrivacyEngine()
private, optimizer, loader = engine.make_private(
    module=model, optimizer=inner, data_loader=DataLoader(pairs, batch_size=100),
    noise_multiplier=0.8, max_grad_norm=1.0,
)  # fmt: skip
for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(private(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

drift = (weight.detach().sum(1) - before * (1 - LR * DECAY) ** len(losses)).abs().max()
print(f"epsilon {engine.get_epsilon(delta=1e-4):.2f} at delta 1e-4")
print(f"loss {losses[0]:.3f} -> {sum(losses[-20:]) / 20:.3f}")
print(f"sums over inputs differ from decay alone by {drift:.1e}")
