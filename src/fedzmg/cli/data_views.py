"""``fedzmg data describe`` and ``show``: what clients hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedzmg.cli import output
from fedzmg.cli.options import Cache, Json
from fedzmg.errors import InputError

if TYPE_CHECKING:
    from fedzmg.data.population import Population

EXAMPLES = tuple(f"examples.{suffix}" for suffix in ("png", "svg"))

Split = Annotated[str, typer.Option(help="train or test.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for files.", show_default="runs/data-NAME", metavar="DIR"),
]
PartitionName = Annotated[
    str | None,
    typer.Option(help="Deal examples out: iid, dirichlet, shards, quantity, pachinko."),
]
Clients = Annotated[int | None, typer.Option(min=1, help="Number of clients to deal out to.")]
Seed = Annotated[int, typer.Option(help="Of the partition and of the sample.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Of the partition, e.g. alpha=0.1."),
]


Shown = Annotated[
    str,
    typer.Argument(
        help="A data set of 'fedzmg data list', digits, plays, or the path of data of your own."
    ),
]
Client = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="A table's column of clients.", show_default="client"),
]
Label = Annotated[str, typer.Option(metavar="COLUMN", help="A table's column of labels.")]


def describe(
    name: Shown,
    split: Split = "train",
    sample: Annotated[
        int | None, typer.Option(min=2, help="Measure this many clients.", show_default="all")
    ] = None,
    entropy: Annotated[
        str | None,
        typer.Option(help="Divide by the logarithm of all 'classes' or of those 'present'."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="KL from 'global' or from the 'pooled' sample.")
    ] = None,
    as_paper: Annotated[
        bool, typer.Option("--as-paper", help="Ten clients, pooled, measured as in the paper.")
    ] = False,
    client_column: Client = None,
    label_column: Label = "label",
    partition: PartitionName = None,
    clients: Clients = None,
    seed: Seed = 0,
    set_: Settings = None,
    cache: Cache = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure how much clients differ: table, figure, CSV and JSON, beside the paper's table."""
    from fedzmg.data import heterogeneity
    from fedzmg.provenance import provenance
    from fedzmg.report.exports.heterogeneity import FILES, write_description
    from fedzmg.report.terminal.heterogeneity import table
    from fedzmg.report.writing import check_place, refuse_foreign, staged
    from fedzmg.results import paper

    place = out or Path("runs") / f"data-{_title(name)}"
    check_place(place)
    refuse_foreign(place, FILES, "data describe")
    columns = (client_column, label_column)
    people = _population(name, split, partition, clients, seed, set_, cache, columns)
    twin = paper.twin(name)
    if as_paper:
        sample = sample or 10
        reference = reference or "pooled"
        entropy = entropy or ("present" if people.unit == "characters" else "classes")
    found = heterogeneity.describe(
        people.counts, people.names, unit=people.unit, labels=people.labels, name=_title(name),
        entropy=entropy or "classes", reference=reference or "global",  # type: ignore[arg-type]
        sample=sample, seed=seed,
    )  # fmt: skip
    part = None if _is_own(name) else split
    where = {"split": part, "partition": people.partition, "made": provenance()}
    data = {**found.as_dict(), **where}
    with staged(place, "data describe") as folder:
        write_description(data, paper.described(name), folder)
    if as_json:
        typer.echo(json.dumps({**data, "directory": str(place)}))
        return
    console = Console()
    console.print(table(data, paper.described(name)))
    if twin is not None and twin != name:
        output.plain(console, f"The paper's column is about its own {twin}, not about {name}.")
    for note in people.notes:
        output.plain(console, f"note: {note}")
    output.place("figure", place / "heterogeneity.png")
    output.place("files", place)


def show(
    name: Shown,
    split: Split = "train",
    rows: Annotated[int, typer.Option(min=1, max=40, help="Clients to show.")] = 6,
    columns: Annotated[int, typer.Option(min=1, max=40, help="Examples of each.")] = 10,
    partition: PartitionName = None,
    clients: Clients = None,
    seed: Seed = 0,
    set_: Settings = None,
    cache: Cache = None,
    out: Out = None,
) -> None:
    """Show some clients' examples: a picture of images, the beginnings of texts."""
    from fedzmg.data.formats.by_path import is_table
    from fedzmg.report import figures
    from fedzmg.report.writing import check_place, refuse_foreign, staged

    if is_table(name):
        raise InputError(f"{name}: a table has no pictures: use 'fedzmg data describe {name}'")
    people = _population(name, split, partition, clients, seed, set_, cache)
    owners = people.columns.owners
    assert owners is not None
    places = [owners.names.index(client) for client in people.names[:rows]]
    console = Console()
    if people.unit == "characters":
        text = people.columns.strings("text")
        for i in places:
            first, last = owners.offsets[i : i + 2]
            output.plain(console, f"{owners.names[i]}: {last - first:,} snippets")
            for row in range(first, min(last, first + min(columns, 3))):
                start, end = text.offsets[row : row + 2]
                words = bytes(text.text[start : min(end, start + 200)]).decode(errors="replace")
                output.plain(console, "    " + words.replace("\n", "\n    "))
        return
    x, y = people.columns.array("x"), people.columns.array("y")
    if x.ndim not in (3, 4):
        raise InputError(f"{name!r} holds no images but arrays of shape {x.shape[1:]}")
    place = out or Path("runs") / f"data-{_title(name)}"
    check_place(place)
    refuse_foreign(place, EXAMPLES, "data show")
    spans = [range(o, min(o + columns, e)) for o, e in
             ((owners.offsets[i], owners.offsets[i + 1]) for i in places)]  # fmt: skip
    picture = figures.examples(
        f"{_title(name, split)}: {len(places)} of {len(people.names):,} clients",
        [owners.names[i] for i in places],
        [x[span.start : span.stop] for span in spans],
        [[people.labels[label] for label in y[span.start : span.stop]] for span in spans],
    )
    with staged(place, "data show") as folder:
        figures.save(picture, folder / "examples")
    output.place("figure", place / "examples.png")


def _is_own(name: str) -> bool:
    """Whether it is the path of a user's own data, and no data set that is known by its name."""
    from fedzmg.data.sources import EMBEDDED, SOURCES

    return name not in EMBEDDED and name not in SOURCES


def _title(name: str, split: str = "") -> str:
    """What figures and folders call it; a path has no splits."""
    if _is_own(name):
        return Path(name).resolve().stem
    return f"{name}, {split}" if split else name


def _population(
    name: str,
    split: str,
    partition: str | None,
    clients: int | None,
    seed: int,
    settings: list[str] | None,
    cache: Path | None,
    table: tuple[str | None, str] = (None, "label"),
) -> Population:
    from fedzmg.data import catalog
    from fedzmg.data.formats import by_path
    from fedzmg.data.population import (
        DEFAULT_PARTITIONS,
        embedded_columns,
        population,
    )
    from fedzmg.data.sources import EMBEDDED, SOURCES, source
    from fedzmg.errors import unknown
    from fedzmg.experiment.specs.run import parse_setting

    own = _is_own(name)
    if own and not by_path.is_path(name):
        near = str(unknown("data set", name, [*SOURCES, *EMBEDDED], "fedzmg data list"))
        near = near.removeprefix(f"unknown data set {name!r}")
        raise InputError(f"{name!r} is neither a data set nor a file or folder{near}")
    if table != (None, "label") and not (own and by_path.is_table(name)):
        raise InputError("--client-column and --label-column belong to tables: leave them out")
    classes: int | None = 10
    if own:
        if split != "train":
            raise InputError(f"{name}: a path has no splits: leave out --split")
        client, label = table
        client = client or ("client" if partition is None else None)
        try:
            columns, classes = by_path.read(name, client, label), None
        except InputError as error:
            lacks = by_path.is_table(name) and "unknown column" in str(error)
            remedy = "; --client-column and --label-column say which" if lacks else ""
            raise InputError(f"{error}{remedy}") from None
    elif name in EMBEDDED:
        columns = embedded_columns(name, split)
    else:
        splits = catalog.load(name, cache).splits
        if split not in splits:
            raise unknown("split", split, splits)
        columns, classes = splits[split], source(name).classes
    options: dict[str, Any] | None = None
    if partition is not None:
        options = {"name": partition, "clients": clients}
        options |= dict(parse_setting(text) for text in settings or [])
    elif settings or clients:
        raise InputError("--set and --clients belong to a partition: add --partition NAME")
    elif columns.owners is None and (name, split) in DEFAULT_PARTITIONS:
        options = dict(DEFAULT_PARTITIONS[name, split])
    if options is not None:
        options["seed"] = seed
    return population(columns, classes=classes, partition=options)
