"""Terminal output of commands, as far as it is tables made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedzmg.algorithms import ALGORITHMS
from fedzmg.diagnose.verdict import percent
from fedzmg.report.tables.grids import best_points
from fedzmg.report.tables.heterogeneity import SHOWN_CLIENTS, client_by_client, heterogeneity, who
from fedzmg.report.tables.study import paired_tests, scores, thresholds
from fedzmg.report.tables.table import Table
from fedzmg.report.tables.theory import Finding, finding_table
from fedzmg.results.diagnosis import by_name, ratio, rows, when
from fedzmg.results.formatting import NONE, bytes_text, count_text, duration
from fedzmg.results.study_result import StudyResult
from fedzmg.terminal.render import bold, render

_VERDICTS = {
    "holds": "green", "fails": "yellow", "not": "bold red",
    "gain": "bold green", "little": "bold", "loss": "bold yellow", "unclear": "bold",
}  # fmt: skip
_LAYERS = (
    "energy: share of clients' gradient energy. mean: share of it that is the mean over the "
    "inputs, ± sd over clients. forbidden: the same of the loss gradient; lost: what of that no "
    "bias can do instead. distance, drift: squared distance of clients' gradients, and of their "
    "local models, after the projection over before. diversity: 1 if clients agree."
)


def study(result: StudyResult, width: int) -> RenderableType:
    """Show scores, thresholds, paired tests and notes of a study or comparison."""
    parts: list[Any] = [scores(result), thresholds(result), paired_tests(result)]
    for label, runs in result.study.members.items():
        lost = [f"seed {r.seed} in round {r.diverged}" for r in runs if r.diverged is not None]
        parts += [f"{label} diverged: {', '.join(lost)}."] if lost else []
    names = dict.fromkeys(score.algorithm for score in result.scores)
    own = [name for name in names if name in ALGORITHMS and ALGORITHMS[name].inferred]
    parts += result.notes
    parts += [f"Partly inferred, see 'fedzmg list NAME': {', '.join(own)}."] if own else []
    return render(parts, width)


def grid(data: Mapping[str, Any], width: int) -> RenderableType:
    """Show the best points of a ``grid.json``."""
    return render([best_points(data)], width)


def description(
    report: Mapping[str, Any], paper: Mapping[str, Any] | None, width: int
) -> RenderableType:
    """Show the heterogeneity of clients, beside the paper's numbers if given."""
    named = {**report, "name": report["name"] or "data"}
    table = heterogeneity(named, paper)._replace(caption="")
    clients = client_by_client(named, paper)
    total = len(report["clients"])
    if total > SHOWN_CLIENTS:
        clients = clients._replace(title=f"{clients.title}, first {SHOWN_CLIENTS} of {total:,}")
    return render([bold(f"{named['name']}: {who(report)}"), "", table, clients], width)


def estimate(data: Mapping[str, Any]) -> dict[str, str]:
    """Describe the cost of a specification by name."""
    trials, rounds = data["trials"], data["rounds"]
    down, up, disk, kept = (
        bytes_text(data[key])
        for key in ("bytes_down", "bytes_up", "disk_bytes", "disk_bytes_after")
    )
    found = {
        data["kind"]: f"{data['task']}, {count_text(data['algorithms'], 'algorithm')}",
        "trials": f"{trials:,}",
        "rounds": f"{rounds:,} each, {trials * rounds:,} in all",
        "evaluations": f"{data['evaluations']:,} each",
        "steps": f"{data['steps']:,} local steps" if data["steps"] else "unknown without data",
        "traffic": f"{down} down, {up} up (simulated)",
        "disk": f"{disk} at most while it runs, {kept} after",
    }
    if data["missing"]:
        found["time"] = f"unknown: the data is not here yet ({data['missing']})"
    elif data["seconds"] is not None:
        less = data.get("extrapolated")
        source = "extrapolated from less than a round" if less else "from a few measured steps"
        probe = f" ({data['probe']})" if data.get("probe") else ""
        here = f"about {duration(data['seconds'])} here ({data['device']}, {data['engine']})"
        found["time"] = f"{here}, {source}{probe}"
    return found


def timing_line(timing: Mapping[str, Any]) -> str:
    """Describe one timing in a line."""
    return f"{_workload(timing)}: {timing['trial_round_ms']:.2f} ms per trial and round"


def timings(data: Mapping[str, Any], width: int) -> RenderableType:
    """Show the timings that ``fedzmg bench --json`` prints."""
    facts = data["environment"]
    heads = ("workload", "ms / round", "ms / trial round", "steps / s", "of matmul", "of memory",
             "over floor", "not steps", "peak MiB", "padded", "cold s")  # fmt: skip
    cells = []
    for t in data["timings"]:
        outside = t.get("outside_steps")
        cells.append([
            _workload(t), f"{t['round_ms']:.1f}", f"{t['trial_round_ms']:.2f}",
            f"{t['steps_per_second']:,.0f}", f"{t['matmul_share']:.1%}",
            f"{t['bandwidth_share']:.1%}", f"{t['over_floor']:.1f} x",
            "" if outside is None else f"{outside:.1%}", f"{t['peak_mib']:,.0f}",
            f"{t['padded_over_useful']:.2f}", f"{t['cold_seconds']:.1f}",
        ])  # fmt: skip
    return render([Table.of(f"{facts['machine']}, torch {facts['torch']}", heads, cells)], width)


def _workload(timing: Mapping[str, Any]) -> str:
    return f"{timing['workload']} {timing['engine']} {timing['precision']} x {timing['trials']}"


def finding(found: Finding, width: int) -> RenderableType:
    """Show a check of the theory: claim, setting, verdict and numbers."""
    style = _VERDICTS[found["verdict"].split()[0]]
    parts: list[Any] = [
        bold(f"{found['id']}  {found['title']}"),
        f"claim    {found['claim']}",
        f"setting  {found['setting']}",
        Text.assemble("verdict  ", (found["verdict"], style)),
        "",
        finding_table(found),
    ]
    return render(parts, width)


def findings_summary(findings: Sequence[Finding], seconds: float) -> str:
    """Count the checks by verdict and name those that do not hold."""
    words = []
    for what, first in (("hold", "holds"), ("fail as stated", "fails"), ("not reproduced", "not")):
        own = [str(one["id"]) for one in findings if str(one["verdict"]).split()[0] == first]
        named = f" ({', '.join(own)})" if first != "holds" and len(findings) > 1 else ""
        words += [f"{len(own)} {what}{named}"] if own else []
    return f"{count_text(len(findings), 'check')} in {seconds:.0f} s: {', '.join(words)}"


def diagnosis(data: Mapping[str, Any], width: int) -> RenderableType:
    """Show a diagnosis: its first point by layer, the later ones, and the verdict."""
    point, verdict = data["points"][0], data["verdict"]
    steps = f" Local steps: lr {data['lr']:g}, {data['drifting']} clients."
    caption = _LAYERS + (steps if point["drift"] else "")
    parts: list[Any] = [_layers(data)._replace(caption=caption)]
    if len(data["points"]) > 1:
        heads = ["layer", *(str(point["round"]) for point in data["points"])]
        layers = zip(*(rows(point) for point in data["points"]), strict=True)
        along = [[own[0]["name"], *(percent(o["share"]["mean"]) for o in own)] for own in layers]
        title = "Mean component along plain FedAvg by round, mean over clients"
        parts.append(Table.of(title, heads, along))
    style = _VERDICTS[verdict["expect"]]
    parts.append(Text.assemble("verdict  ", (verdict["summary"], style)))
    return render([*parts, *(f"  - {line}" for line in verdict["evidence"])], width)


def _layers(data: Mapping[str, Any]) -> Table:
    point, centred = data["points"][0], by_name(data["centred"])
    heads = ["layer", "inputs", "energy", "mean", "forbidden", "lost", "distance", "diversity",
             "drift", *["mean if inputs are centred"] * bool(centred)]  # fmt: skip
    cells = []
    for layer in rows(point):
        name, share = layer["name"], layer["share"]
        mean = percent(share["mean"])
        if share["sd"] is not None:
            mean = f"{100 * share['mean']:.0f} ± {100 * share['sd']:.0f} %"
        diversity = (layer["diversity"][side] for side in ("before", "after"))
        cells.append([
            name, f"{layer['inputs']:,}" if layer["inputs"] else "", percent(layer["energy"]),
            mean, percent(layer["forbidden"]), percent(layer["lost"]),
            percent(ratio(layer["distance"])),
            " → ".join(NONE if one is None else f"{one:.3g}" for one in diversity),
            percent(ratio(point["drift"].get(name))),
            *([percent(centred[name]["share"]["mean"])] if centred else []),
        ])  # fmt: skip
    who = f"{len(data['clients']):,} clients"
    if len(data["clients"]) != data["total"]:
        who = f"{len(data['clients']):,} of {data['total']:,} clients (seed {data['seed']})"
    return Table.of(f"{data['task']}, {when(point)}: {who}", heads, cells)
