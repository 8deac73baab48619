"""Fine-tune a small GPT by federated LoRA: FedIT, FFA-LoRA, FLoRA, FedZMG on adapters.

    python tools/lora_plays.py --small --out runs/lora-small        (two minutes on a CPU)
    python tools/lora_plays.py --device cuda --seeds 5 --out runs/lora
    fedzmg report runs/lora

A character model is trained on half of Shakespeare's plays, then fine-tuned on the roles of the
other half, a client each. Learning rates are searched first, for every method alike. Full
fine-tuning by FedAvg is a study of its own. The same command continues an interrupted one.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import fedzmg
from fedzmg.data.embedded import load_plays
from fedzmg.data.text import VOCABULARY, encode, sequences
from fedzmg.models import CharTransformer, add_lora
from fedzmg.models.objective import cross_entropy
from fedzmg.seeds import stream, torch_stream
from fedzmg.simulation import resolve_device

SEED = 0
"""Seed of the base model and of its half of the plays."""
ROLES_OF_A_PLAY = 12
"""Every play has more; the longest prefix that so many roles share is the title."""
RATES = {"adapters": [0.03, 0.1, 0.3, 1.0], "full": [0.003, 0.01, 0.03, 0.1]}
ADAPTERS = {
    "fedit": ("fedit", {"client.momentum": 0.9}),
    "ffa-lora": ("ffa-lora", {"client.momentum": 0.9}),
    "flora": ("flora", {"client.momentum": 0.9}),
    "fedzmg-lora": ("fedit", {"client.momentum": 0.9, "client.zero_mean": True}),
}
FULL = {"full-fedavg": ("fedavg", {"client.momentum": 0.9})}


class Size(NamedTuple):
    """Model, pre-training and federation."""

    dim: int
    heads: int
    layers: int
    length: int
    steps: int
    windows: int
    """Windows of a role at most."""
    cohort: int
    held: int
    """Windows for tuning, and as many for the test."""


SMALL = Size(dim=32, heads=2, layers=2, length=32, steps=300, windows=40, cohort=4, held=100)
LARGE = Size(dim=128, heads=4, layers=4, length=128, steps=3000, windows=100, cohort=10, held=800)


class Windows(NamedTuple):
    """Inputs, targets and roles of windows of text."""

    x: np.ndarray
    y: np.ndarray
    role: np.ndarray

    def pick(self, chosen: np.ndarray) -> Windows:
        """Return some windows."""
        return Windows(*(column[chosen] for column in self))


def halves(length: int) -> tuple[Windows, Windows]:
    """Cut the plays into windows, and split the plays by a seed."""
    plays = load_plays()
    prefixes = [[r[:i] for i, c in enumerate(r) if c == "_"] for r in plays.roles]
    count = Counter(p for own in prefixes for p in own)
    title = [max(p for p in own if count[p] >= ROLES_OF_A_PLAY) for own in prefixes]
    titles = sorted(set(title))
    first = set(stream(SEED, "partition", "plays").permutation(titles)[: len(titles) // 2])
    cut = sequences(*encode(plays.text, plays.offsets), length)
    role = np.repeat(np.arange(len(plays.roles)), np.diff(cut.offsets))
    names = np.array(plays.roles)[role]
    x, y = cut.inputs.astype(np.int64), cut.targets
    is_first = np.array([t in first for t in title])[role]
    return tuple(Windows(x[own], y[own], names[own]) for own in (is_first, ~is_first))


def pretrain(data: Windows, size: Size, device: torch.device, file: Path) -> nn.Module:
    """Train the base model with AdamW, or read it from a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = CharTransformer(VOCABULARY, size.dim, size.heads, size.layers, size.length)
    if file.exists():
        model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return model
    model.to(device)
    x, y = (torch.from_numpy(part).to(device) for part in data[:2])
    order = torch.randint(len(x), (size.steps, 64), generator=torch_stream(SEED, "order"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=size.steps)
    for chosen in order.to(device):
        loss = cross_entropy(model(x[chosen]), y[chosen]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"base model: perplexity {math.exp(loss.item()):.2f} on its last batch")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.cpu().state_dict(), file)
    return model


def federation(data: Windows, model: nn.Module, name: str, size: Size, rounds: int) -> fedzmg.Task:
    """Make every role a client; every fifth window is held out."""
    _, start, count = np.unique(data.role, return_index=True, return_counts=True)
    position = np.arange(len(data.role)) - np.repeat(start, count)
    usable = np.repeat(count >= 8, count) & (position < size.windows)
    train, held = (data.pick(usable & own) for own in (position % 5 != 4, position % 5 == 4))
    some = stream(SEED, "partition", "held").permutation(len(held.role))
    tune, test = (held.pick(some[i : 2 * size.held : 2]) for i in (0, 1))
    return fedzmg.Task.from_arrays(
        model, train.x, train.y, train.role, tune=tune[:2], test=test[:2], name=name,
        metric=fedzmg.Metric("cross-entropy", cross_entropy, higher_is_better=False),
        init="torch" if name == "adapters" else "given", rounds=rounds, cohort=size.cohort,
        batch_size=8, eval_every=max(1, rounds // 20), threshold=1.6,
    )  # fmt: skip


def main() -> None:
    """Pre-train, search learning rates, fine-tune and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--engine", help="execution path; 'auto' measures and chooses")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    given = parser.parse_args()
    size = SMALL if given.small else LARGE
    rounds = given.rounds or (20 if given.small else 200)
    seeds = given.seeds or (2 if given.small else 5)
    device = resolve_device(given.device)
    first, second = halves(size.length)
    base = pretrain(first, size, device, given.out / "base.pt")
    # FLoRA moves the adapted weights, so they are a part of the model here.
    adapted = add_lora(base, given.rank, 2 * given.rank, "*.attention.*", merge=True)
    # Compiling would take longer than it saves here.
    engine = given.engine or ("cuda_graph" if device.type == "cuda" else "vectorized")
    rows = []
    for name, model, methods in (("adapters", adapted, ADAPTERS), ("full", base, FULL)):
        task = federation(second, model, name, size, rounds)
        print(task)
        options = {"device": given.device, "engine": engine}
        tuned = fedzmg.tune(
            task, methods, {"client.lr": RATES[name]}, rounds=max(2, rounds // 4),
            out=given.out / f"{name}-rates", **options,
        )  # fmt: skip
        print(tuned)
        result = fedzmg.compare(
            task, methods, seeds=seeds, settings=tuned.settings, out=given.out / name, **options
        )
        print(result)
        for method, histories in result.histories.items():
            lasts = [history.records[-1] for history in histories]
            messages = task.protocol.cohort * lasts[0].round
            rows.append(
                (
                    method,
                    math.exp(histories[0].records[0].loss),
                    math.exp(np.mean([last.loss for last in lasts])),
                    lasts[0].total_bytes_up / messages / 1e3,
                    lasts[0].total_bytes_down / messages / 1e3,
                )
            )
    print("method           perplexity: round 1      last    kB up  kB down (client and round)")
    for method, before, after, up, down in rows:
        print(f"{method:<28} {before:9.3f} {after:9.3f} {up:8.1f} {down:8.1f}")
    print(f"fedzmg report {given.out}")


if __name__ == "__main__":
    main()
