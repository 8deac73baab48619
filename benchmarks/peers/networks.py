"""Networks in plain PyTorch for peers without fedzmg, with equal parameter names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from peers.work import Arrays, Facts, Work


def mlp(dropout: bool) -> nn.Sequential:
    """Build the workload ``mlp``."""
    del dropout
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    )


def cifar100(dropout: bool) -> nn.Sequential:
    """Build the workload ``cifar100``: the paper's CNN."""
    light, heavy = (0.25, 0.5) if dropout else (0.0, 0.0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Dropout(light)]
    layers += [nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Dropout(heavy)]
    return nn.Sequential(*layers, nn.Linear(512, 100))


def pfl_cifar10(dropout: bool) -> nn.Sequential:
    """Build the workload ``pfl-cifar10``: pfl-research's own CNN."""
    light, heavy = (0.25, 0.5) if dropout else (0.0, 0.0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(light), nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(),
        nn.Dropout(heavy), nn.Linear(128, 10),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[bool], nn.Sequential]] = {
    "mlp": mlp, "cifar100": cifar100, "pfl-cifar10": pfl_cifar10
}  # fmt: skip


def build(facts: Facts, start: Arrays) -> nn.Sequential:
    """Build the network with given parameters, in training mode, on the work's device."""
    model = NETWORKS[facts.network](facts.dropout)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in start.items()})
    return model.to(facts.device).train()


def examples(work: Work) -> tuple[Tensor, Tensor]:
    """Load all examples to the work's device."""
    device = work.facts.device
    return torch.from_numpy(work.x).to(device), torch.from_numpy(work.y).to(device)


def prepare(x: Tensor) -> Tensor:
    """Bytes to the unit interval; floats as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def arrays(model: nn.Module) -> Arrays:
    """Copy the parameters to the host, by name."""
    return {name: p.detach().cpu().numpy().copy() for name, p in model.named_parameters()}


def set_precision(facts: Facts) -> None:
    """Let a GPU round the inputs of matrix products, if that is asked for."""
    rounded = facts.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = rounded
    torch.backends.cudnn.allow_tf32 = rounded


def wait(facts: Facts) -> None:
    """Until the device has done all it was given."""
    if facts.device == "cuda":
        torch.cuda.synchronize()
