"""Two processes train one model, spread in several ways; prints the differences from one process.

Run by ``test_torch_features.py`` with torch's launcher; talks over the loopback only.
"""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fedzmg.optim import Centred, ZeroMeanSGD, zero_mean_

STEPS = 4


class Words(nn.Module):
    """An embedding whose 11 words do not divide by two processes, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.hidden(self.embedding(ids)))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for ids in batches:
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(whole(one), whole(other), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    start = Words().double()
    batches = [torch.randint(0, 11, (8, 5)) for _ in range(STEPS)]
    mine = [b[rank::2] for b in batches]
    alone = copy.deepcopy(start)
    train(alone, ZeroMeanSGD.for_model(alone, 0.3), batches)
    found: dict[str, float] = {"moved": apart(alone, start)}

    model = copy.deepcopy(start)
    parallel = DistributedDataParallel(model)
    train(parallel, ZeroMeanSGD.for_model(parallel, 0.3), mine)
    found["ddp"] = apart(model, alone)

    mesh = init_device_mesh("cpu", (2,))
    for options in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):
        model = copy.deepcopy(start)
        for part in (model.embedding, model.hidden, model.out, model):
            fully_shard(part, mesh=mesh)
        optimizer = ZeroMeanSGD.for_model(model, 0.3, **options)
        train(model, optimizer, mine)
        found[f"fsdp {options}"] = apart(model, alone)
    buffers = [s["momentum_buffer"] for s in optimizer.state.values()]
    found["fsdp state is spread"] = 0.0 if all(isinstance(b, DTensor) for b in buffers) else 1.0

    # Split over the inputs by hand, as a row-wise parallel layer is.
    weight = nn.Parameter(torch.randn(4, 10).double())
    grads = [torch.randn(4, 10).double() for _ in range(STEPS)]
    split = nn.Parameter(distribute_tensor(weight.detach().clone(), mesh, [Shard(1)]))
    plain = ZeroMeanSGD([{"params": [weight], "input_axes": (1,)}], 0.1)
    spread = ZeroMeanSGD([{"params": [split], "input_axes": (1,)}], 0.1)
    for grad in grads:
        weight.grad, split.grad = grad, distribute_tensor(grad, mesh, [Shard(1)])
        plain.step()
        spread.step()
    found["row-wise"] = float((split.detach().full_tensor() - weight.detach()).abs().max())

    reference, model = copy.deepcopy(start), copy.deepcopy(start)
    for part in (model.embedding, model.hidden, model.out, model):
        fully_shard(part, mesh=mesh)
    train(reference, Centred(torch.optim.Adam(reference.parameters(), 0.1), reference), batches)
    train(model, Centred(torch.optim.Adam(model.parameters(), 0.1), model), mine)
    found["centred adam"] = apart(model, reference)

    for each, given in ((reference, batches[0]), (model, mine[0])):
        each.zero_grad()
        each(given).square().mean().backward()
        zero_mean_(each)
    found["zero_mean_"] = max(
        float((b.grad.full_tensor() - a.grad).abs().max())
        for a, b in zip(reference.parameters(), model.parameters(), strict=True)
    )
    if rank == 0:
        json.dump(found, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
