"""Train models of other people's packages, and time them against a plain PyTorch loop.

    python benchmarks/zoo.py --device cpu --threads 1
    python benchmarks/zoo.py --models resnet18 gpt2 --device cuda

Every model is small or starts from a small configuration, with random weights, on random data of
eight clients. A row says whether the model trains, the path that ``auto`` chose, its time per round
and its speed relative to the loop (:mod:`plain_loop`; above 1 is faster); on a CPU also the speeds
of the loop without oneDNN and with channels last. A model whose package is not installed, or that
fails, has a row that says so. On a GPU the last column is the share of an
H200's peak that the loop uses; its precision is that of ours.

All models, and the networks of the benchmarks' CPU table, with one and with two threads, side by
side on cores of their own. Rows that miss a goal are marked: ``auto`` at least 0.97 of the loop's
speed, ``sequential`` at most 1.1 times the loop's time. On a CPU, choosing takes at most 5 % of 100
rounds, and the first round ends at most 2 s after the loop's. On a GPU, where choosing compiles
kernels, the 100 rounds with their start are not slower than the loop's, either::

    for n in 1 2; do taskset -c $((4 * n))-$((4 * n + n - 1)) python benchmarks/zoo.py --all \
        --device cpu --threads $n --turns 5 --out benchmarks/results/zoo-cpu-$n.json & done; wait
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg import Metric, Task

CLASSES, VOCABULARY, LENGTH, PIXELS = 10, 200, 32, 32
EXAMPLES = 128  # of all clients together


def task_of(model: nn.Module, x: Any, y: Any, **options: Any) -> Task:
    """Build a task of eight clients, four of which train two batches in a round."""
    owners = np.arange(len(x)) % 8
    return Task.from_arrays(
        model, x, y, owners, test=(x[:4], y[:4]), cohort=4, batch_size=8,
        **{"init": "given", **options},
    )  # fmt: skip


def images(model: nn.Module) -> Task:
    """Build a task of labelled images."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 3, PIXELS, PIXELS)).astype(np.float32)
    return task_of(model, x, rng.integers(0, CLASSES, len(x)))


def sentences(model: nn.Module) -> Task:
    """Build a task of labelled sentences."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, VOCABULARY, (EXAMPLES, LENGTH))
    return task_of(model, x, rng.integers(0, CLASSES, len(x)))


def language(model: nn.Module) -> Task:
    """Build a task of next words."""
    text = np.random.default_rng(0).integers(1, VOCABULARY, (EXAMPLES, LENGTH + 1))
    return task_of(model, text[:, :-1], text[:, 1:])


def torchvision_models() -> Any:
    """Import the models of torchvision, on which transformers depend, too."""
    try:
        from torchvision import models
    except RuntimeError:
        # A CUDA build beside a CPU build of torch lacks operations of detectors.
        for operation in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            torch.library.define(f"torchvision::{operation}", signature)
        from torchvision import models
    return models


def torchvision(name: str, **options: Any) -> nn.Module:
    """Build a model of torchvision."""
    return getattr(torchvision_models(), name)(num_classes=CLASSES, **options)  # type: ignore[no-any-return]


def convnext() -> nn.Module:
    """Build timm's smallest ConvNeXt."""
    from timm import create_model

    return create_model("convnext_atto", num_classes=CLASSES)


def mixer() -> nn.Module:
    """Build a small MLP-Mixer of timm."""
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(CLASSES, img_size=PIXELS, patch_size=4, num_blocks=4, embed_dim=96)


class Logits(nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, config: str, model: str, **sizes: Any) -> None:
        super().__init__()
        with contextlib.suppress(ImportError):
            torchvision_models()
        import transformers

        ids = {"bos_token_id": 1, "eos_token_id": 2, "num_labels": CLASSES}
        made = getattr(transformers, config)(vocab_size=VOCABULARY, **ids, **sizes)
        self.model = getattr(transformers, model)(made)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


class WordModel(nn.Module):
    """PyTorch's example of a word language model: dropout, two LSTM layers, tied embedding."""

    def __init__(self, units: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, units)
        self.drop = nn.Dropout(0.2)
        self.rnn = nn.LSTM(units, units, 2, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(units, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.drop(self.rnn(self.drop(self.encoder(ids)))[0]))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """A small U-Net: two levels down, two up, with skip connections."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, width), _block(width, 2 * width)])
        self.bottom = _block(2 * width, 4 * width)
        self.widen = nn.ModuleList(
            [
                nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
                nn.ConvTranspose2d(2 * width, width, 2, 2),
            ]
        )
        self.up = nn.ModuleList([_block(4 * width, 2 * width), _block(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([widen(x), skipped.pop()], 1))
        return self.head(x)  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class GraphNet(nn.Module):
    """Graph convolutions (Kipf, Welling 2017) on features and a normalised adjacency matrix.

    An example is ``(nodes, features + nodes)``: both side by side.
    """

    def __init__(self, features: int, units: int = 32) -> None:
        super().__init__()
        self.features = features
        self.first, self.second = nn.Linear(features, units), nn.Linear(units, units)
        self.head = nn.Linear(units, CLASSES)

    def forward(self, graph: Tensor) -> Tensor:
        x, adjacency = graph.split([self.features, graph.shape[-1] - self.features], -1)
        x = torch.relu(adjacency @ self.first(x))
        x = torch.relu(adjacency @ self.second(x))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def graphs(nodes: int = 20, features: int = 8) -> Task:
    """Build a task of labelled random graphs."""
    rng = np.random.default_rng(0)
    edges = rng.random((EXAMPLES, nodes, nodes)) < 0.2
    linked = (edges | edges.swapaxes(1, 2) | np.eye(nodes, dtype=bool)).astype(np.float32)
    degree = linked.sum(2) ** -0.5
    adjacency = degree[:, :, None] * linked * degree[:, None]
    x = np.concatenate([rng.normal(size=(EXAMPLES, nodes, features)), adjacency], 2)
    y = rng.integers(0, CLASSES, len(x))
    return task_of(GraphNet(features), x.astype(np.float32), y)


class Mixture(nn.Module):
    """Experts of which a gate chooses one for each example: nothing that can be mapped."""

    def __init__(self, inputs: int, units: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.units = nn.Linear(inputs, experts), units
        self.experts = nn.ModuleList([nn.Linear(inputs, units) for _ in range(experts)])
        self.head = nn.Linear(units, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        hidden = x.new_zeros(len(x), self.units)
        for i, expert in enumerate(self.experts):
            if (mine := chosen == i).any():
                hidden[mine] = weight[mine, None] * torch.relu(expert(x[mine]))
        return self.head(hidden)  # type: ignore[no-any-return]


def vectors(model: nn.Module, inputs: int = 64) -> Task:
    """Build a task of labelled vectors."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, inputs)).astype(np.float32)
    return task_of(model, x, rng.integers(0, CLASSES, len(x)))


def pixel_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute cross-entropy per image, averaged over pixels."""
    return F.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)


def pixel_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the share of pixels with the right class."""
    return (outputs.argmax(1) == targets).float().flatten(1).mean(1)


def segmentation() -> Task:
    """Build a task of images with a class per pixel."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 3, PIXELS, PIXELS)).astype(np.float32)
    y = rng.integers(0, 3, (len(x), PIXELS, PIXELS))
    metric = Metric("pixel accuracy", pixel_accuracy)
    return task_of(UNet(), x, y, loss=pixel_entropy, metric=metric)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the squared error per example."""
    return (outputs - targets).square().mean(1)


def autoencoder() -> Task:
    """Build a task of vectors that are their own targets."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 64)).astype(np.float32)
    sizes = [64, 128, 32, 128, 64]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
    model = nn.Sequential(*layers[:-1], layers[-1][0])
    return task_of(model, x, x, loss=squared, metric=Metric("error", squared, False))


SMALL_BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "max_position_embeddings": 64}  # fmt: skip

ZOO: dict[str, tuple[str, Callable[[], Task]]] = {
    "resnet18": ("torchvision", lambda: images(torchvision("resnet18"))),
    "resnet18-groupnorm": (
        "torchvision",
        lambda: images(torchvision("resnet18", norm_layer=partial(nn.GroupNorm, 8))),
    ),
    "mobilenet-v3-small": ("torchvision", lambda: images(torchvision("mobilenet_v3_small"))),
    "efficientnet-b0": ("torchvision", lambda: images(torchvision("efficientnet_b0"))),
    "vit-tiny": (
        "torchvision",
        lambda: images(
            torchvision(
                "VisionTransformer", image_size=PIXELS, patch_size=4, num_layers=4, num_heads=3,
                hidden_dim=96, mlp_dim=192,
            )
        ),
    ),
    "convnext-atto": ("timm", lambda: images(convnext())),
    "mlp-mixer": ("timm", lambda: images(mixer())),
    "bert": (
        "transformers",
        lambda: sentences(Logits("BertConfig", "BertForSequenceClassification", **SMALL_BERT)),
    ),
    "distilbert": (
        "transformers",
        lambda: sentences(
            Logits(
                "DistilBertConfig", "DistilBertForSequenceClassification",
                dim=64, n_layers=2, n_heads=4, hidden_dim=128, max_position_embeddings=64,
            )
        ),
    ),
    "gpt2": (
        "transformers",
        lambda: language(
            Logits("GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=64)
        ),
    ),
    "llama": (
        "transformers",
        lambda: language(
            Logits("LlamaConfig", "LlamaForCausalLM", **SMALL_BERT, num_key_value_heads=2)
        ),
    ),
    "word-lstm": ("torch", lambda: language(WordModel())),
    "u-net": ("torch", segmentation),
    "graph-net": ("torch", graphs),
    "autoencoder": ("torch", autoencoder),
    "mixture": ("torch", lambda: vectors(Mixture(64))),
}  # fmt: skip
"""Package and builder of each task."""


# Networks of plain_loop in the benchmarks' CPU table.
NETWORKS = (
    "logistic", "mlp", "digits", "gru", "transformer", "small-resnet", "emnist-cnn", "wide-mlp",
)  # fmt: skip
GOALS = {"auto": 0.97, "sequential": 1 / 1.1}  # least speeds relative to the loop
MOST_CHOOSING = 0.05  # share of the planned training
LATEST = 2.0  # most seconds from the end of the loop's first round to the end of ours, on a CPU


def measure(name: str, engines: list[str], device: torch.device, **options: Any) -> dict[str, Any]:
    """Return the row of one model: its path and speed, or the reason why there is none."""
    import plain_loop

    try:
        task = ZOO[name][1]() if name in ZOO else plain_loop.NETWORKS[name]()
        found = plain_loop.compare(task, engines, device=device, **options)
    except ImportError as error:
        return {"works": f"not installed: {error.name or error}"}
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        return {"works": f"{type(error).__name__}: {line}"}
    weights = sum(leaf.numel() for leaf in task.model.source.parameters())
    auto = found.pop("auto")
    return {"works": "yes", "parameters": weights, **found, **auto}


def row(name: str, facts: dict[str, Any]) -> str:
    """Format a row of the table."""
    package = ZOO[name][0] if name in ZOO else "fedzmg"
    if facts["works"] != "yes":
        return f"| {name} | {package} | {facts['works']}{' |' * 12}"
    times = f"{facts['plain']['round_ms']:.0f} | {facts['round_ms']:.0f} | {facts['speed']:.3f}"
    times += f" | {facts['cpu_speed']:.3f} | {facts['total_speed']:.3f}"
    later = facts["first_s"] - facts["plain"]["first_s"]
    loops = "sequential", "plain without oneDNN", "plain channels last"
    speeds = [facts.get(path, {}).get("speed") for path in loops]
    loop, without, last = ("" if speed is None else f"{speed:.3f}" for speed in speeds)
    times += f" | {loop} | {later:.1f} | {without} | {last}"
    if facts["path"].endswith("graph"):
        times += f" | {facts['plain']['peak_share']:.2%}"
    else:
        times += " | "
    path = [facts["path"]]
    if facts["path"] == "sequential":
        path += [f"{facts['parallel']} in parallel"] * (facts["parallel"] > 1)
        path += ["without oneDNN"] * (not facts["onednn"])
        path += ["channels last"] * facts["channels_last"]
    return f"| {name} | {package} | {facts['parameters']:,} | {', '.join(path)} | {times} |"


def missed(facts: dict[str, Any], device: torch.device) -> list[str]:
    """Name the goals that a row does not reach."""
    if facts["works"] != "yes":
        return []
    speeds = {"auto": facts["speed"]} | {
        path: facts[path]["speed"] for path in GOALS if path in facts
    }
    found = [f"{path} {s:.3f} < {GOALS[path]:.3f}" for path, s in speeds.items() if s < GOALS[path]]
    later = facts["first_s"] - facts["plain"]["first_s"]
    if device.type == "cuda":
        if facts["total_speed"] < GOALS["auto"]:
            found.append(f"whole training {facts['total_speed']:.3f} < {GOALS['auto']:.3f}")
    elif facts["choosing_share"] > MOST_CHOOSING:
        found.append(f"choosing {facts['choosing_share']:.1%} of the training")
    late = device.type == "cpu" and later > LATEST
    return [*found, f"first round {later:.1f} s later"] if late else found


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*ZOO, *NETWORKS], default=list(ZOO))
    parser.add_argument("--all", action="store_true", help="all models, and `sequential` as well")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=100, help="planned length of the training")
    parser.add_argument("--turns", type=int, default=7, help="measured rounds of each path")
    parser.add_argument("--seconds", type=float, default=15, help="of a model, after three turns")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from fedzmg.provenance import environment
    from fedzmg.simulation import resolve_device

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    models, engines = arguments.models, ["auto"]
    if arguments.all:
        models, engines = [*NETWORKS, *ZOO], ["sequential", "auto"]
    device = resolve_device(arguments.device)
    command = shlex.join(["python", *sys.argv])
    kept: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():  # rows of other models stay
        kept = json.loads(arguments.out.read_text())
    kept["environment"] = {**environment(device), "command": command}
    print(
        "| model | package | parameters | path | loop, ms per round | fedzmg, ms | speed | by CPU "
        "| all rounds, start included | `sequential` | first round later by, s "
        "| loop without oneDNN | loop channels last "
        f"| loop's share of the peak |\n{'|---' * 14}|",
        flush=True,
    )
    options = {name: getattr(arguments, name) for name in ("turns", "rounds", "seconds")}
    if device.type == "cuda":
        options["precision"] = arguments.precision
    reasons = []
    for name in models:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept[name] = measure(name, engines, device, **options)
        print(row(name, kept[name]), flush=True)
        below = missed(kept[name], device)
        reason = kept[name].get("reason", kept[name]["works"])
        reasons.append(" ".join([f"{name}: {reason}", *(f"[{goal}]" for goal in below)]))
        if arguments.out:
            _write(arguments.out, kept)
    print("", *reasons, sep="\n")


def _write(place: Path, kept: dict[str, Any]) -> None:
    """Replace a file of results at once: a run that is killed leaves whole rows."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_suffix(".part")
    part.write_text(json.dumps(kept, indent=1) + "\n")
    part.replace(place)


if __name__ == "__main__":
    main()
