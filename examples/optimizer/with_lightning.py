"""Lightning: `configure_optimizers` returns ZeroMeanSGD; the module itself tells the input axes."""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedzmg.data.embedded import load_digits
from fedzmg.optim import ZeroMeanSGD

LR, DECAY = 0.05, 5e-4


class Classifier(lightning.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> ZeroMeanSGD:
        return ZeroMeanSGD(self, lr=LR, momentum=0.9, weight_decay=DECAY)


lightning.seed_everything(0)
data, module = load_digits(), Classifier()
pairs = TensorDataset(torch.tensor(data.train_x[:1200]) / 255, torch.tensor(data.train_y[:1200]))
before = module.net[1].weight.detach().sum(1)
trainer = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(module, DataLoader(pairs, batch_size=20, shuffle=True))
drift = module.net[1].weight.detach().sum(1) - before * (1 - LR * DECAY) ** len(module.losses)
print(f"loss {module.losses[0]:.3f} -> {sum(module.losses[-20:]) / 20:.3f}")
print(f"sums over inputs differ from decay alone by {drift.abs().max():.1e}")
