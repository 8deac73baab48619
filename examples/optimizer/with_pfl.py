"""pfl-research: make ZeroMeanSGD from the model, not from the bare parameters that pfl passes."""

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from fedzmg.data.embedded import load_digits
from fedzmg.optim import ZeroMeanSGD

USERS, ROUNDS, LR, DECAY = 8, 6, 0.05, 5e-4
torch.manual_seed(0)
x, y = load_digits().train_x[:1600] / 255, load_digits().train_y[:1600]
model, losses = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)), []


def loss(inputs: Tensor, targets: Tensor) -> Tensor:
    """A module with the methods that pfl needs; all data arrive as float32."""
    found = nn.functional.cross_entropy(model(inputs), targets.long())
    losses.append(found.item())
    return found


model.loss, model.metrics = loss, lambda *_: {}
central = torch.optim.SGD(model.parameters(), lr=1.0)  # the plain average
federated = PyTorchModel(model, lambda _, lr: ZeroMeanSGD(model, lr, 0.9, DECAY), central)
before, sampler = model[1].weight.detach().sum(1), torch.randint(USERS, (99,)).tolist().pop
users = FederatedDataset(lambda user: Dataset((x[user::USERS], y[user::USERS])), sampler)
local = NNTrainHyperParams(local_batch_size=20, local_num_epochs=1, local_learning_rate=LR)
settings = NNAlgorithmParams(ROUNDS, ROUNDS, train_cohort_size=4, val_cohort_size=0)
FederatedAveraging().run(settings, SimulatedBackend(users, users), federated, local)
drift = model[1].weight.detach().sum(1) - before * (1 - LR * DECAY) ** (len(losses) // 4)
print(f"loss {losses[0]:.3f} -> {sum(losses[-20:]) / 20:.3f}")
print(f"sums over inputs differ from decay alone by {drift.abs().max():.1e}")
