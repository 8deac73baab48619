"""Commands ``fedzmg data describe`` and ``show``."""

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
    str | None, typer.Option(help="Partition: iid, dirichlet, shards, quantity, pachinko.")
]
Clients = Annotated[int | None, typer.Option(min=1, help="Number of clients of the partition.")]
Seed = Annotated[int, typer.Option(help="Seed of the partition and of the sample.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Option of the partition, e.g. alpha=0.1."),
]


Shown = Annotated[
    str,
    typer.Argument(
        help="A data set of 'fedzmg data list', digits, plays, or the path of your own data."
    ),
]
Client = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Client column of a table.", show_default="client"),
]
Label = Annotated[str, typer.Option(metavar="COLUMN", help="Label column of a table.")]


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
    """Measure client heterogeneity: table, figure, CSV and JSON, beside the paper's table."""
    from fedzmg.data import heterogeneity
    from fedzmg.provenance import provenance
    from fedzmg.report.exports import DESCRIPTION, write_description
    from fedzmg.report.writing import check_place, refuse_foreign, staged
    from fedzmg.results import paper
    from fedzmg.terminal import views

    directory = out or Path("runs") / f"data-{_title(name)}"
    check_place(directory)
    refuse_foreign(directory, DESCRIPTION, "data describe")
    columns = (client_column, label_column)
    shown = _population(name, split, partition, clients, seed, set_, cache, columns)
    twin = paper.twin(name)
    if as_paper:
        sample = sample or 10
        reference = reference or "pooled"
        entropy = entropy or ("present" if shown.unit == "characters" else "classes")
    found = heterogeneity.describe(
        shown.counts, shown.names, unit=shown.unit, labels=shown.labels, name=_title(name),
        entropy=entropy or "classes", reference=reference or "global",  # type: ignore[arg-type]
        sample=sample, seed=seed,
    )  # fmt: skip
    part = None if _is_own(name) else split
    where = {"split": part, "partition": shown.partition, "made": provenance()}
    data = {**found.as_dict(), **where}
    with staged(directory, "data describe") as folder:
        write_description(data, paper.described(name), folder)
    if as_json:
        typer.echo(json.dumps({**data, "directory": str(directory)}))
        return
    console = Console()
    console.print(views.description(data, paper.described(name), console.width))
    if twin is not None and twin != name:
        output.plain(console, f"The paper's column is about its own {twin}, not about {name}.")
    for note in shown.notes:
        output.plain(console, f"note: {note}")
    output.place("figure", directory / "heterogeneity.png")
    output.place("files", directory)


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
    """Show examples of some clients: a picture of images, the beginnings of texts."""
    from fedzmg.data.formats import is_table
    from fedzmg.report import figures
    from fedzmg.report.writing import check_place, refuse_foreign, staged

    if is_table(name):
        raise InputError(f"{name}: a table has no pictures: use 'fedzmg data describe {name}'")
    shown = _population(name, split, partition, clients, seed, set_, cache)
    owners = shown.columns.owners
    assert owners is not None
    rows_shown = [owners.names.index(client) for client in shown.names[:rows]]
    console = Console()
    if shown.unit == "characters":
        text = shown.columns.strings("text")
        for i in rows_shown:
            first, last = owners.offsets[i : i + 2]
            output.plain(console, f"{owners.names[i]}: {last - first:,} snippets")
            for row in range(first, min(last, first + min(columns, 3))):
                start, end = text.offsets[row : row + 2]
                words = bytes(text.text[start : min(end, start + 200)]).decode(errors="replace")
                output.plain(console, "    " + words.replace("\n", "\n    "))
        return
    x, y = shown.columns.array("x"), shown.columns.array("y")
    if x.ndim not in (3, 4):
        raise InputError(f"{name!r} holds arrays of shape {x.shape[1:]}, not images")
    directory = out or Path("runs") / f"data-{_title(name)}"
    check_place(directory)
    refuse_foreign(directory, EXAMPLES, "data show")
    spans = [range(o, min(o + columns, e)) for o, e in
             ((owners.offsets[i], owners.offsets[i + 1]) for i in rows_shown)]  # fmt: skip
    picture = figures.examples(
        f"{_title(name, split)}: {len(rows_shown)} of {len(shown.names):,} clients",
        [owners.names[i] for i in rows_shown],
        [x[span.start : span.stop] for span in spans],
        [[shown.labels[label] for label in y[span.start : span.stop]] for span in spans],
    )
    with staged(directory, "data show") as folder:
        figures.save(picture, folder / "examples")
    output.place("figure", directory / "examples.png")


def _is_own(name: str) -> bool:
    """Tell whether a name is the path of a user's own data."""
    from fedzmg.data.sources import EMBEDDED, SOURCES

    return name not in EMBEDDED and name not in SOURCES


def _title(name: str, split: str = "") -> str:
    """Return the title for figures and folders; a path has no splits."""
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
    from fedzmg.data.formats import is_path, is_table, read_path
    from fedzmg.data.population import DEFAULT_PARTITIONS, embedded_columns, population
    from fedzmg.data.sources import EMBEDDED, SOURCES, source
    from fedzmg.errors import unknown
    from fedzmg.experiment.specs.run import parse_setting

    own = _is_own(name)
    if own and not is_path(name):
        near = str(unknown("data set", name, [*SOURCES, *EMBEDDED], "fedzmg data list"))
        near = near.removeprefix(f"unknown data set {name!r}")
        raise InputError(f"{name!r} is neither a data set nor a file or folder{near}")
    if table != (None, "label") and not (own and is_table(name)):
        raise InputError("--client-column and --label-column are for tables: leave them out")
    classes: int | None = 10
    if own:
        if split != "train":
            raise InputError(f"{name}: a path has no splits: leave out --split")
        client, label = table
        client = client or ("client" if partition is None else None)
        try:
            columns, classes = read_path(name, client, label), None
        except InputError as error:
            lacks = is_table(name) and "unknown column" in str(error)
            remedy = "; set --client-column and --label-column" if lacks else ""
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
        raise InputError("--set and --clients need a partition: add --partition NAME")
    elif columns.owners is None and (name, split) in DEFAULT_PARTITIONS:
        options = dict(DEFAULT_PARTITIONS[name, split])
    if options is not None:
        options["seed"] = seed
    return population(columns, classes=classes, partition=options)
