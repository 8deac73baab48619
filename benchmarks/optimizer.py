"""Cost of a step of ``ZeroMeanSGD`` beside ``torch.optim.SGD``, and the bytes that each moves.

    python benchmarks/optimizer.py [--device cuda] [--out benchmarks/results/optimizer-cpu.json]

The paper's three models and a ResNet-18, float32, momentum 0.9, with and without weight decay. All
optimizers have the same options and fixed random gradients: only the step is measured. Steps are
interleaved against the effect of a busy machine. Ratios of medians and of the fastest steps are
reported. Medians are CPU time on one thread and wall-clock time otherwise; the fastest step is
always wall-clock time. Bytes are counted, not measured.

Needs torch, and triton for the fused kernel; nothing else of the library's dependencies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn


def library() -> tuple[Any, Any]:
    """Import ``fedzmg.models`` and ``fedzmg.optim``, even if only torch is installed."""
    source = Path(__file__).resolve().parents[1] / "src"
    try:
        importlib.import_module("fedzmg")
    except ImportError:
        sys.path.insert(0, str(source))
        # The package without what its front page imports; its parts need no more than torch.
        bare = types.ModuleType("fedzmg")
        bare.__path__ = [str(source / "fedzmg")]
        sys.modules["fedzmg"] = bare
    return importlib.import_module("fedzmg.models"), importlib.import_module("fedzmg.optim")


MODELS, OPTIM = library()
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "emnist_cnn": MODELS.emnist_cnn,
    "cifar100_cnn": MODELS.cifar100_cnn,
    "shakespeare_gru": MODELS.shakespeare_gru,
    "resnet18_gn": lambda: MODELS.resnet18_gn(10),
}
DECAYS = (0.0, 5e-4)
LIMITS = {"cpu": 0.15, "cuda": 0.25}
"""Largest overhead relative to torch's SGD with foreach."""
BYTES_LIMIT = 1.1
"""Largest ratio of bytes to torch's fused SGD, for the fused kernel on a GPU."""


def ways(device: str) -> dict[str, dict[str, Any]]:
    """Return the options of every measured optimizer by name, torch's first."""
    found: dict[str, dict[str, Any]] = {
        "SGD foreach": {"foreach": True},
        "SGD fused": {"fused": True},
        "ours": {},
        "ours foreach": {"foreach": True},
        "ours fused": {"fused": True},
    }
    if device == "cuda" and not OPTIM.fused.HAS_TRITON:
        print("triton is not installed: the fused kernel is left out")
        del found["ours fused"]
    return found


def bytes_moved(name: str, model: nn.Module, decay: bool, device: str) -> tuple[float, float]:
    """Count the bytes that a step reads and writes, and those that a cache may serve."""
    entries = sum(p.numel() for p in model.parameters())
    layout = MODELS.layout_of(model)
    weights = [(p, layout[n].input_axes) for n, p in model.named_parameters()]
    centred = sum(p.numel() for p, axes in weights if axes)
    fused_kernel = device == "cuda" and OPTIM.fused.HAS_TRITON
    cached = 0.0
    if name == "SGD foreach":
        # velocity *= momentum, velocity += g, w -= lr velocity; decay is another list of gradients
        moved = 8 * entries + (3 * entries if decay else 0)
    elif name == "SGD fused":
        moved = 5 * entries
    elif fused_kernel:
        # Long rows and columns are read twice; what lies further apart is summed by torch first.
        forms = [OPTIM.fused.form_of(p, axes) for p, axes in weights]
        again = [
            p.numel()
            for (p, axes), form in zip(weights, forms, strict=True)
            if axes and (form.shape in (OPTIM.fused.LONG, OPTIM.fused.COLUMNS) or form.needs_sums)
        ]
        cached = 4.0 * sum(again)
        moved = 5 * entries + sum(again)
    else:
        # sum of g, mean off the velocity; then torch's fused kernel, or velocity and weights apart
        moved = 3 * centred + (5 if device == "cpu" else 8) * entries
        moved += 2 * entries if decay else 0
    return 4.0 * moved, cached


def optimizer_of(name: str, model: nn.Module, decay: float, options: dict[str, Any]) -> Any:
    """Build one of the measured optimizers."""
    if name.startswith("SGD"):
        params = list(model.parameters())
        return torch.optim.SGD(params, 0.01, momentum=0.9, weight_decay=decay, **options)
    return OPTIM.ZeroMeanSGD.for_model(model, 0.01, weight_decay=decay, **options)


def timed(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Return milliseconds of a step: CPU time where it is meaningful, and wall-clock time."""
    if device == "cuda":
        torch.cuda.synchronize()
    began, spent = time.perf_counter(), time.process_time()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    spent, clock = 1e3 * (time.process_time() - spent), 1e3 * (time.perf_counter() - began)
    # Threads that wait for each other spin, which counts as computing.
    return spent if device == "cpu" and torch.get_num_threads() == 1 else clock, clock


def device_ms(step: Callable[[], object], repeats: int = 30) -> float:
    """Measure a step on the GPU alone, without synchronising between steps."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def graph_ms(step: Callable[[], object]) -> float | None:
    """Measure a step replayed from a CUDA graph, without Python."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return device_ms(graph.replay)
    except RuntimeError as error:
        print(f"  no graph: {str(error).splitlines()[0]}")
        return None


def measure(
    network: str, decay: float, device: str, steps: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure all optimizers on one model, interleaved, after kernels are compiled."""
    torch.manual_seed(0)
    optimizers: dict[str, Any] = {}
    model = NETWORKS[network]().to(device)
    grads = [1e-3 * torch.randn_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    for name, options in ways(device).items():
        # One set of weights and gradients for all, each with its own velocity.
        optimizers[name] = optimizer_of(name, model, decay, {"capturable": True, **options}
                                        if name.startswith("ours") and device == "cuda"
                                        else options)  # fmt: skip
    for name, optimizer in list(optimizers.items()):
        try:
            for _ in range(3):
                timed(optimizer.step, device)
        except Exception as error:  # one way that fails must not hide the others
            print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
            del optimizers[name]
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    clocks: dict[str, list[float]] = {name: [] for name in optimizers}
    deadline = time.monotonic() + seconds
    for _ in range(steps):
        for name, optimizer in optimizers.items():
            spent, clock = timed(optimizer.step, device)
            times[name].append(spent)
            clocks[name].append(clock)
        if time.monotonic() > deadline:
            break
    base, fastest = statistics.median(times["SGD foreach"]), min(clocks["SGD foreach"])
    rows = []
    for name, values in times.items():
        moved, cached = bytes_moved(name, model, decay > 0, device)
        row = {
            "model": network,
            "decay": decay,
            "way": name,
            "ms": statistics.median(values),
            "ms_fastest": min(clocks[name]),
            "over_sgd_foreach": statistics.median(values) / base - 1,
            "over_sgd_foreach_fastest": min(clocks[name]) / fastest - 1,
            "steps": len(values),
            "megabytes": moved / 1e6,
            "megabytes_second_reads": cached / 1e6,
            "bytes_over_sgd_fused": moved / bytes_moved("SGD fused", model, decay > 0, device)[0],
        }
        if device == "cuda":
            row["device_ms"] = device_ms(optimizers[name].step)
            row["graph_ms"] = graph_ms(optimizers[name].step)
            alone = row["graph_ms"] or row["device_ms"]
            row["gigabytes_per_second"] = moved / alone / 1e6
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], device: str) -> None:
    """Print the results of one model."""
    first = rows[0]
    print(f"\n{first['model']}, decay {first['decay']:g}, {first['steps']} steps each")
    on_gpu = f"{'on GPU ms':>10} {'graph ms':>9} {'GB/s':>6}" if device == "cuda" else ""
    print(f"{'way':<14} {'ms':>8} {'over SGD':>9} {'fastest':>8} {'MB':>8} {'/ fused':>8} {on_gpu}")
    for row in rows:
        line = (
            f"{row['way']:<14} {row['ms']:8.3f} {row['over_sgd_foreach']:+9.1%} "
            f"{row['over_sgd_foreach_fastest']:+8.1%} {row['megabytes']:8.1f} "
            f"{row['bytes_over_sgd_fused']:8.2f}"
        )
        if device == "cuda":
            graph = "-" if row["graph_ms"] is None else f"{row['graph_ms']:.4f}"
            line += f" {row['device_ms']:10.4f} {graph:>9} {row['gigabytes_per_second']:6.0f}"
        print(line, flush=True)


def verdicts(rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Compare the largest overheads with the limits."""

    def worst(way: str, key: str) -> float | None:
        return max((row[key] for row in rows if row["way"] == way), default=None)

    return {
        "limit": LIMITS[device],
        "bytes_limit": BYTES_LIMIT,
        "worst_over_sgd_foreach": {
            way: worst(way, "over_sgd_foreach") for way in ("ours", "ours foreach", "ours fused")
        },
        "worst_over_sgd_foreach_fastest": {
            way: worst(way, "over_sgd_foreach_fastest")
            for way in ("ours", "ours foreach", "ours fused")
        },
        "worst_bytes_of_fused_over_sgd_fused": worst("ours fused", "bytes_over_sgd_fused"),
    }


def main() -> None:
    """Measure all models and print a table each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=sorted(LIMITS))
    parser.add_argument("--steps", type=int, default=None, help="of each way; default 40 or 200")
    parser.add_argument("--seconds", type=float, default=75.0, help="stop measuring after that")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, began = arguments.device, time.monotonic()
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    warnings.simplefilter("ignore")  # compilers warn of what is inside them
    steps = arguments.steps or (200 if device == "cuda" else 40)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads")
    rows: list[dict[str, Any]] = []
    cases = [(network, decay) for network in NETWORKS for decay in DECAYS]
    for i, (network, decay) in enumerate(cases):
        left = arguments.seconds - (time.monotonic() - began)
        some = measure(network, decay, device, steps, max(left, 0.0) / (len(cases) - i))
        table(some, device)
        rows += some
    found = verdicts(rows, device)
    print(f"\nlargest overheads (limit {LIMITS[device]:.0%}): ", end="")
    print(json.dumps(found, indent=1))
    if arguments.out:
        results = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **importlib.import_module("fedzmg.provenance").provenance(),
            "torch": torch.__version__,
            "device": name,
            "threads": torch.get_num_threads(),
            "command": " ".join(["python", *sys.argv]),
            "rows": rows,
            **found,
        }
        written = arguments.out.with_name(arguments.out.name + ".part")
        written.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(written, arguments.out)


if __name__ == "__main__":
    main()
