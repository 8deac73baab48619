"""Tables of the reports of :func:`fedzmg.data.heterogeneity.describe`, and their formats."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results import paper
from fedzmg.results.formatting import MINUS, count_text

Report: TypeAlias = Mapping[str, Any]
SHOWN_CLIENTS = 10
NAMES = {
    "volume": "volume", "distinct": "distinct classes", "entropy": "entropy", "gini": "Gini",
    "kl": "KL", "dominant_share": "dominant share",
}  # fmt: skip
_VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥", "": "∅"}


def side_by_side(reports: Sequence[Report]) -> Table:
    """Make a row per data set, each followed by the paper's numbers where it has some."""
    rows = []
    records: list[Record] = []

    def add(key: str, shown: str, clients: str, summary: Mapping[str, Any]) -> None:
        texts = [spread_text(m, summary[m]) if m in summary else None for m in NAMES]
        cells = [NOTHING if text is None else Cell(text) for text in texts]
        rows.append([Cell(shown), Cell(clients), *cells])
        flat = {f"{m}_{part}": own[part] for m, own in summary.items() for part in ("mean", "sd")}
        records.append({"data": key, **flat})

    for report in reports:
        name, printed = str(report["name"]), _printed(report)
        add(name, paper.shown(name), _clients_of(report), report.get("summary", {}))
        if printed is not None:
            title = f"paper: {paper.COUNTERPARTS[name].title}"
            add(title, title, str(printed["sample"]), _summary(printed))
    heads = ("data", "clients", *NAMES.values())
    caption = "Mean ± standard deviation over clients; details below."
    title = "How much clients differ, all data sets"
    return Table("heterogeneity", title, heads, rows, caption, records)


def heterogeneity(report: Report, printed: Mapping[str, Any] | None = None) -> Table:
    """Make a row per measure: mean and deviation over clients, here and in the paper."""
    printed = printed or _printed(report)
    theirs = {} if printed is None else _summary(printed)
    rows = []
    records: list[Record] = []
    for measure, found in report.get("summary", {}).items():
        row = [Cell(NAMES.get(measure, measure)), Cell(spread_text(measure, found))]
        record: Record = {"measure": measure, "mean": found["mean"], "sd": found["sd"]}
        if measure in theirs:
            own, gap = theirs[measure], float(found["mean"] - theirs[measure]["mean"])
            text = number_text(measure, gap, "+").replace("-", MINUS) if gap else "0"
            row += [Cell(spread_text(measure, own)), Cell(text, gap)]
            record |= {"paper_mean": own["mean"], "paper_sd": own["sd"], "difference": gap}
        elif theirs:
            row += [NOTHING, NOTHING]
            record |= dict.fromkeys(("paper_mean", "paper_sd", "difference"))
        rows.append(row)
        records.append(record)
    heads = ("measure", "mean ± sd", *(("paper", "difference") if printed is not None else ()))
    title = f"How much clients of {paper.shown(str(report['name']))} differ"
    return Table("heterogeneity", title, heads, rows, _caption(report, printed), records)


def client_by_client(report: Report, printed: Mapping[str, Any] | None = None) -> Table:
    """Make a row for each of the first clients of a report, and for those the paper names."""
    printed = printed or _printed(report)
    listed = [("here", client) for client in report.get("clients", [])[:SHOWN_CLIENTS]]
    listed += [("paper", client) for client in ([] if printed is None else printed["clients"])]
    rows = []
    records: list[Record] = []
    for source, client in listed:
        shown, values = str(client["client"]), {measure: client.get(measure) for measure in NAMES}
        row = [Cell(shown if source == "here" else f"paper: {shown}")]
        row += [NOTHING if v is None else Cell(number_text(m, v), v) for m, v in values.items()]
        if "dominant_class" in client:
            label = visible(str(client["dominant_class"]))
            row[-1] = row[-1]._replace(text=f"{row[-1].text} ({label})")
        rows.append(row)
        records.append({"source": source, "client": shown, **values})
    title = f"Clients of {paper.shown(str(report['name']))} one by one"
    heads, caption = ("client", *NAMES.values()), _caption(report, printed)
    return Table("clients-described", title, heads, rows, caption, records)


def _printed(report: Report) -> Mapping[str, Any] | None:
    """Find the paper's numbers for a data set or for the one it stands in for."""
    name = str(report["name"])
    return paper.described(name) if name in paper.COUNTERPARTS else None


def _summary(printed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the paper's means and deviations, with texts that have its own digits."""
    found = {}
    for measure, (mean, sd) in printed["summary"].items():
        form = "," if isinstance(mean, int) else ".2f"
        found[measure] = {"mean": mean, "sd": sd, "text": f"{mean:{form}} ± {sd:{form}}"}
    return found


def _clients_of(report: Report) -> str:
    return f"{len(report.get('clients', [])):,} of {report.get('total', 0):,}"


def _caption(report: Report, printed: Mapping[str, Any] | None) -> str:
    caption = f"{_clients_of(report)} clients; volume in {report.get('unit', 'examples')}; entropy "
    caption += f"over {divisor(report)}; KL from {origin(report)}, in nats."
    if printed is not None:
        caption += f" Paper: {printed['sample']} clients; volume in {printed['unit']}; its numbers "
        caption += f"fit entropy over {divisor(printed)} and KL from {origin(printed)}."
        if (name := str(report["name"])) in paper.COUNTERPARTS and name != paper.TWINS[name]:
            title = paper.COUNTERPARTS[name].title
            caption += f" The paper's numbers are about its own {title}, not about {name}."
    return caption


def number_text(measure: str, value: float, sign: str = "") -> str:
    """Format a value of one measure; ``sign`` is "+" for a difference."""
    if measure == "dominant_share":
        return f"{100 * value:{sign}.1f} %"
    whole = measure == "distinct" and isinstance(value, int)
    form = {"volume": ",.0f", "distinct": "" if whole else ".1f"}.get(measure, ".3f")
    return f"{value:{sign}{form}}"


def spread_text(measure: str, found: Mapping[str, Any]) -> str:
    """Format mean and standard deviation over clients."""
    if "text" in found:
        return str(found["text"])
    mean = number_text(measure, found["mean"])
    if found["sd"] is None:
        return mean
    return f"{mean.removesuffix(' %')} ± {number_text(measure, found['sd'])}"


def who(report: Report) -> str:
    """Name the clients that are described."""
    if len(report["clients"]) == report["total"]:
        return count_text(report["total"], "client")
    return f"{_clients_of(report)} clients (seed {report['seed']})"


def divisor(report: Report) -> str:
    """Name the divisor of entropies."""
    return "ln(classes present)" if report["entropy"] == "present" else "ln(all classes)"


def origin(report: Report) -> str:
    """Name the distribution that clients are compared with."""
    if report["reference"] == "global":
        return "all clients"
    return "the pooled sample" if report["sample"] else "the pooled clients"


def visible(label: str) -> str:
    """Replace invisible characters of a class name."""
    return _VISIBLE.get(label, label if label.isprintable() else ascii(label)[1:-1])
