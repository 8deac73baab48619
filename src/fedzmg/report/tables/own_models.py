"""Table of clients with models of their own: personal ones, and fine-tuned ones."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedzmg.evaluation import OverClients
from fedzmg.report.tables.table import NOTHING, Cell, Table
from fedzmg.results import formatting as fmt
from fedzmg.results.reading import Study
from fedzmg.results.scores import client_tables, over_seeds
from fedzmg.results.study_result import StudyResult
from fedzmg.storage.client_metrics import ClientTable

_MODELS = {"metric": "common model", "personal": "own model", "tuned": "fine-tuned"}
_VALUES = ("mean", "worst_tenth", "sd")


def own_models(result: StudyResult) -> Table | None:
    """Make the table of clients' own models; None if there are none, nor fine-tuned ones."""
    study, found = result.study, client_tables(result.study)
    tables = [one for runs in found.values() for one in runs.values()]
    kinds = [k for k in _MODELS if any(getattr(one, k) is not None for one in tables)]
    if kinds in ([], ["metric"]):
        return None
    records: list[dict[str, Any]] = []
    for label, runs in found.items():
        for seed, one in runs.items():
            record: dict[str, Any] = {"algorithm": label, "seed": seed}
            for kind in kinds:
                spread = OverClients.of(_final(one, kind), higher_is_better=study.higher_is_better)
                record |= {f"{kind}_{name}": getattr(spread, name) for name in _VALUES}
            records.append(record)
    rows, heads = [[Cell(label)] for label in found], ["algorithm"]
    for kind in kinds:
        name = _MODELS[kind]
        texts = {"mean": name, "worst_tenth": f"{name}, worst 10 %", "sd": f"{name}, deviation"}
        # The table of clients describes the common model further.
        for value in _VALUES[:1] if kind == "metric" else _VALUES:
            heads.append(texts[value])
            spreads = over_seeds(records, found, f"{kind}_{value}")
            for row, cell in zip(rows, _cells(spreads, value, study), strict=True):
                row.append(cell)
    epochs = int(study.protocol.get("fine_tune") or 0)
    tuned = f" Fine-tuned: after {fmt.count_text(epochs, 'epoch')} of SGD on the client's training "
    tuned += "examples at the client learning rate, on a copy."
    caption = (
        "Each client's own examples after the last round; every client counts once. Own model: the "
        "personal model of the algorithm, or the common one if it has none."
        f"{tuned if 'tuned' in kinds and epochs else ''}"
    )
    title = f"Clients' own models on {study.name}"
    return Table("own_models", title, tuple(heads), rows, caption, records)


def _final(table: ClientTable, kind: str) -> npt.NDArray[np.float64]:
    """Return the last evaluation of a kind of model; the common one in place of none."""
    values = getattr(table, kind)
    last: npt.NDArray[np.float64] = (table.metric if values is None else values)[-1]
    return last


def _cells(
    spreads: Sequence[tuple[float | None, float | None]], value: str, study: Study
) -> Iterator[Cell]:
    """Yield the mean over seeds by algorithm, the best marked; means with their deviation."""
    finite = [mean for mean, _ in spreads if mean is not None and math.isfinite(mean)]
    best = (max if study.higher_is_better else min)(finite, default=None)
    marked = value != "sd" and len(finite) > 1
    for mean, sd in spreads:
        text = fmt.spread_text(mean, sd if value == "mean" else None, study.metric)
        yield NOTHING if mean is None else Cell(text, mean, "best" * (marked and mean == best))
