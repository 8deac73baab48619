"""Terminal output of commands that train, measure, list and describe."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedzmg.algorithms import ALGORITHMS
from fedzmg.diagnose.verdict import by_name, percent, ratio, rows, when
from fedzmg.report.tables import heterogeneity as described
from fedzmg.report.tables.clients import own_models
from fedzmg.report.tables.heterogeneity import SHOWN_CLIENTS, Report, who
from fedzmg.report.tables.study import paired_tests, scores, thresholds
from fedzmg.report.tables.table import Table
from fedzmg.report.tables.theory import Finding, finding_table
from fedzmg.results.formatting import NONE, bytes_text, count_text, duration
from fedzmg.results.study_result import StudyResult
from fedzmg.terminal.render import bold, render

_VERDICTS = {
    "holds": "green", "fails as stated": "yellow", "not covered by the paper": "cyan",
    "not reproduced": "bold red",
    "gain": "bold green", "little": "bold", "loss": "bold yellow", "unclear": "bold",
}  # fmt: skip
_COSTS = {
    "down": "travels to a client, every round", "up": "travels back",
    "client_keeps": "kept by a client between rounds",
    "server_keeps": "kept by the server besides the model",
}  # fmt: skip
_LAYERS = (
    "energy: share of clients' gradient energy. mean: share of it that is the mean over the "
    "inputs, ± sd over clients. forbidden: the same of the loss gradient; lost: what of that no "
    "bias can do instead. distance, drift: squared distance of clients' gradients, and of their "
    "local models, after the projection over before. diversity: 1 if clients agree."
)


def study(result: StudyResult, width: int) -> RenderableType:
    """Show scores, thresholds, paired tests and notes of a study or comparison."""
    tables = [scores(result), thresholds(result), paired_tests(result), own_models(result)]
    names = dict.fromkeys(score.algorithm for score in result.scores)
    own = [name for name in names if name in ALGORITHMS.data and ALGORITHMS[name].inferred]
    inferred = f"Partly inferred, see 'fedzmg list NAME': {', '.join(own)}." if own else None
    return render([*tables, *result.notes, inferred], width)


def description(report: Report, paper: Report | None, width: int) -> RenderableType:
    """Show the heterogeneity of clients, beside the paper's numbers if given."""
    named = {**report, "name": report["name"] or "data"}
    table = described.heterogeneity(named, paper)._replace(caption="")
    clients = described.client_by_client(named, paper)
    total = len(report["clients"])
    if total > SHOWN_CLIENTS:
        clients = clients._replace(title=f"{clients.title}, first {SHOWN_CLIENTS} of {total:,}")
    return render([bold(f"{named['name']}: {who(report)}"), "", table, clients], width)


def estimate(data: Mapping[str, Any]) -> dict[str, str]:
    """Describe the cost of a specification by name."""
    sizes = ("bytes_down", "bytes_up", "disk_bytes", "disk_bytes_after")
    down, up, disk, kept = (bytes_text(data[key]) for key in sizes)
    found = {
        data["kind"]: f"{data['task']}, {count_text(data['algorithms'], 'algorithm')}",
        "trials": f"{data['trials']:,}",
        "rounds": f"{data['rounds']:,} each, {data['trial_rounds']:,} in all",
        "evaluations": f"{data['evaluations']:,} each",
        "steps": f"{data['steps']:,} local steps" if data["steps"] else "unknown without data",
        "traffic": f"{down} down, {up} up (simulated)",
        "disk": f"{disk} at most while it runs, {kept} after",
    }  # fmt: skip
    if data["missing"]:
        found["time"] = f"unknown: the data is not here yet ({data['missing']})"
    elif data["seconds"] is not None:
        less = data.get("extrapolated")
        source = "extrapolated from less than a round" if less else "from a few measured steps"
        probe = f" ({data['probe']})" if data.get("probe") else ""
        here = f"about {duration(data['seconds'])} here ({data['device']}, {data['engine']})"
        found["time"] = f"{here}, {source}{probe}"
    if data.get("wall_seconds") is not None:
        many = f"{count_text(data['workers'], 'worker')}, {count_text(data['packs'], 'pack')}"
        found[f"on {data['on']}"] = f"about {duration(data['wall_seconds'])} ({many})"
    return found


def finding(found: Finding, width: int) -> RenderableType:
    """Show a check of the theory: claim, setting, verdict and numbers."""
    style = _VERDICTS[found["verdict"].partition(";")[0]]
    head, verdict = bold(f"{found['id']}  {found['title']}"), (found["verdict"], style)
    facts = [f"claim    {found['claim']}", f"setting  {found['setting']}"]
    table = finding_table(found)
    return render([head, *facts, Text.assemble("verdict  ", verdict), "", table], width)


def findings_summary(findings: Sequence[Finding], seconds: float) -> str:
    """Count the checks by verdict and name those that do not hold."""
    by_verdict: dict[str, list[str]] = {}
    for one in findings:
        by_verdict.setdefault(str(one["verdict"]).partition(";")[0], []).append(str(one["id"]))
    words = [f"{len(by_verdict.pop('holds', []))} hold"]
    for what, own in by_verdict.items():
        words.append(f"{len(own)} {what.replace('fails', 'fail')} ({', '.join(own)})")
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
    parts.append(Text.assemble("verdict  ", (verdict["summary"], _VERDICTS[verdict["expect"]])))
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
    return Table.of(f"{data['task']}, {when(point)}: {who(data)}", heads, cells)


def tables(data: Mapping[str, Any], width: int) -> RenderableType:
    """Show the algorithms and tasks of ``fedzmg list --json``."""
    algorithms = [
        (name, card["summary"] + (" (inferred)" if card["inferred"] else ""), _source(card))
        for name, card in data["algorithms"].items()
    ]
    tasks = [
        (name, _source(one | {"source": one["summary"]}), one["missing"])
        for name, one in data["tasks"].items()
    ]
    found = data.get("installed", {}).items()
    installed = [(name, kind, package) for kind, own in found for name, package in own.items()]
    tables = [("Algorithms", "source", algorithms), ("Tasks", "data to get first", tasks)]
    tables += [("Installed, not imported yet", "package", installed)] if installed else []
    heads = ("name", "what it is")
    return render([Table.of(title, (*heads, last), own, 3) for title, last, own in tables], width)


def aggregators(data: Mapping[str, Any], width: int) -> RenderableType:
    """Show the aggregators of ``fedzmg list --aggregators --json``."""
    rows = [(name, one["summary"], one["source"]) for name, one in data.items()]
    options = []
    for name, one in data.items():
        options += [(f"{name}: {o['key']}", _default(o), o["doc"]) for o in one["options"]]
    parts = [
        Table.of("Aggregators (--set federation.aggregator=NAME)",
                 ("name", "what it is", "source"), rows, words=3),
        Table.of("Options (--set federation.aggregator.KEY=VALUE)",
                 ("key", "default", "what it is"), options, words=3),
    ]  # fmt: skip
    return render(parts, width)


def _default(option: Mapping[str, Any]) -> str:
    return "absent" if option["default"] is None else str(option["default"])


def _source(card: Mapping[str, Any]) -> str:
    """Describe where something is from: its paper, and its file if it is not of the package."""
    origin = card.get("origin", {})
    files = ", ".join(origin[key] for key in ("distribution", "file") if key in origin)
    return "; ".join(filter(None, [card["source"], files]))


def algorithm_card(data: Mapping[str, Any], width: int, task: str | None = None) -> RenderableType:
    """Show the card that :func:`fedzmg.algorithms.options` makes."""
    options = [(o["key"], _default(o), o["range"], o["doc"]) for o in data["options"]]
    heads = ("key", "default", "range", "what it is")
    costs = []
    for name, what in _COSTS.items():
        size = [bytes_text(data["costs"][f"{name}_bytes"])] if task else []
        costs.append([what, f"{data['costs'][name]:g}", *size])
    split = any(option["key"].startswith("parts.") for option in data["options"])
    parts = [
        bold(f"{data['name']}  ({_source(data)})"),
        data["summary"],
        f"inferred: {data['inferred']}" if data["inferred"] else None,
        Text(f"\n{prose(data['about'], width)}\n"),
        Table.of("Options (--set KEY=VALUE)", heads, options, 4),
        *([f"also: {', '.join(own)}", ""] if (own := data["wrapper_options"]) else []),
        Table.of("Costs, scalars left out", ("", "models", *([task] if task else [])), costs),
        "Models here are the shared part; personal layers are kept besides." if split else None,
    ]
    return render(parts, width)


def task_card(data: Mapping[str, Any], name: str, width: int) -> RenderableType:
    """Show the card that :meth:`fedzmg.tasks.Preset.describe` makes."""
    model, tuned = data["model"], data["tuned"]
    state = f"not here yet: {data['missing']}" if data["missing"] else "here"
    facts = {
        "data": _source({**data, "source": ""}) or "ships with fedzmg"
        if data["data"] is None
        else f"{data['data']} ({state})",
        "clients": f"{data['clients']:,}",
        "model": f"{model['parameters']:,} parameters, {bytes_text(model['bytes'])}",
        "protocol": ", ".join(f"{k} {v}" for k, v in data["protocol"].items()),
        "tuned": f"learning rates of {len(tuned)} algorithms" if tuned
        else "no learning rates; defaults of the algorithms apply ('fedzmg tune' searches)",
    }  # fmt: skip
    parts: list[Any] = [bold(f"{name}: {data['summary']}"), "", Text(prose(data["about"], width))]
    parts += ["", *(f"{what:<9} {text}" for what, text in facts.items()), ""]
    if data["fields"]:
        rows = [(f["key"], str(f["default"]), f["range"], f["doc"]) for f in data["fields"]]
        heads = ("key", "default", "allowed", "what it is")
        parts.append(Table.of("Options (--set KEY=VALUE)", heads, rows, 4))
    if tuned:
        chosen = []
        for key, row in tuned.items():
            rates = (row["options"].get(f"{side}.lr") for side in ("client", "server"))
            texts = ("" if rate is None else f"{rate:.4g}" for rate in rates)
            chosen.append((key, *texts, row["source"], row["remark"]))
        columns = ("algorithm", "client", "server", "source", "remark")
        parts.append(Table.of("Tuned learning rates", columns, chosen, 5))
    return render(parts, width)


def data_sets(found: Mapping[str, Mapping[str, Any]], width: int) -> RenderableType:
    """Show the data sets of ``fedzmg data list --json``."""
    rows = []
    for name, one in found.items():
        numbers = []
        for what in ("clients", "examples"):
            counts = (split[what] for split in one["counts"].values())
            texts = ("" if count is None else f"{count:,}" for count in counts)
            numbers.append(" / ".join(dict.fromkeys(texts)))  # equal numbers once
        size = bytes_text(one["bytes"]) if one["state"] == "here" else one["state"]
        rows.append((name, one["title"], *numbers, size))
    heads = ("name", "what it is", "clients", "examples", "here")
    return render([Table.of("", heads, rows, 2)], width)


def prose(text: str, width: int) -> str:
    """Strip a docstring of its markup, join lines of paragraphs and break long indented lines."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        joined = re.sub(r"(?<!\.)\n", " ", re.sub(r":?:$", ":", block.replace("``", "")))
        lines = []
        for line in block.split("\n"):  # the rest of a long one is indented deeper
            deeper = " " * (len(line) - len(line.lstrip()) + 4)
            lines += textwrap.wrap(line, width, subsequent_indent=deeper, break_on_hyphens=False)
        blocks.append("\n".join(lines) if block.startswith(" ") else joined.removeprefix(":"))
    return "\n\n".join(filter(None, blocks))
