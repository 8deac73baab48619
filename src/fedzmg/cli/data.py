"""Commands of ``fedzmg data``: list, get, import, remove, path, describe and show."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Typer

from fedzmg.cli import common
from fedzmg.cli.common import Cache, Json, Texts, flag, opt, setting
from fedzmg.errors import InputError, check_names, unknown
from fedzmg.terminal.render import Terminal, print_line, print_text

if TYPE_CHECKING:
    from fedzmg.data.catalog import Dataset
    from fedzmg.data.heterogeneity import Population
    from fedzmg.terminal.live import Downloads

app = Typer(help="Show, get and import data sets.", no_args_is_help=True)

Name = Annotated[str, Argument(help="A data set of 'fedzmg data list'.")]
Mirror = Annotated[
    str | None, opt("Address or folder to download from.", "$FEDZMG_MIRROR", metavar="URL")
]
Files = Annotated[
    list[Path], Argument(metavar="FILE...", help="The files, an archive or a folder of them.")
]
Shown = Annotated[
    str, Argument(help="A data set of 'fedzmg data list', digits, plays, or a path of yours.")
]
Split = Annotated[str, opt("train or test.")]
Out = Annotated[Path | None, opt("Folder for files.", "runs/data-NAME", metavar="DIR")]
PartitionName = Annotated[str | None, opt("Partition, e.g. iid, dirichlet_by_label or shards.")]
Clients = Annotated[int | None, opt("Number of clients of the partition.", min=1)]
Seed = Annotated[int, opt("Seed of the partition and of the sample.")]
Settings = Annotated[Texts, setting("Option of the partition, e.g. alpha=0.1.")]


@app.command(name="list")
def list_(cache: Cache = None, as_json: Json = False) -> None:
    """List all data sets and which of them are stored here."""
    from fedzmg.data.sources import SOURCES
    from fedzmg.terminal import views

    found = {name: _summary(name, cache) for name in SOURCES}
    common.show(found, partial(views.data_sets, found), as_json)
    for name, one in found.items():
        _print_notes((f"{name}: {note}" for note in one["notes"]), err=as_json)


@app.command()
def get(name: Name, cache: Cache = None, mirror: Mirror = None) -> None:
    """Download a data set from its official address and check it."""
    from fedzmg.data import catalog

    _store(partial(catalog.get, name, cache, mirror))


@app.command(name="import")
def import_(name: Name, files: Files, cache: Cache = None) -> None:
    """Make a data set from files you have."""
    from fedzmg.data import catalog

    _store(partial(catalog.import_files, name, files, cache))


@app.command()
def remove(name: Name, cache: Cache = None) -> None:
    """Delete a data set and its downloads."""
    from fedzmg.data import catalog
    from fedzmg.results.formatting import bytes_text

    print_line(f"removed {name}: {bytes_text(catalog.remove(name, cache))}")


@app.command()
def path(
    name: Annotated[str | None, Argument(help="A data set that is here.")] = None,
    cache: Cache = None,
) -> None:
    """Print the data folder, or the folder of one data set."""
    from fedzmg.data import catalog
    from fedzmg.data.cache import root

    print_line(root(cache) if name is None else catalog.load(name, cache).path)


@app.command()
def describe(
    name: Shown,
    split: Split = "train",
    as_paper: Annotated[bool, flag("--as-paper", "Measure ten clients as in the paper.")] = False,
    client_column: Annotated[str | None, opt("Client column of a table.", "client")] = None,
    label_column: Annotated[str, opt("Label column of a table.")] = "label",
    partition: PartitionName = None, clients: Clients = None, seed: Seed = 0,
    set_: Settings = None, cache: Cache = None, out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Measure client heterogeneity: table, figure, CSV and JSON, beside the paper's table."""
    from fedzmg.data import heterogeneity
    from fedzmg.provenance import provenance
    from fedzmg.report import exports, writing
    from fedzmg.results import paper
    from fedzmg.terminal import views

    title = _title(name)
    directory = out or Path("runs") / f"data-{title}"
    common.check_output(directory, exports.DESCRIPTION, "data describe")
    columns = (client_column, label_column)
    shown = _population(name, split, partition, clients, seed, set_, cache, columns)
    found = heterogeneity.describe(
        shown.counts, shown.names, unit=shown.unit, labels=shown.labels, name=title, seed=seed,
        entropy="present" if as_paper and shown.unit == "characters" else "classes",
        reference="pooled" if as_paper else "global", sample=10 if as_paper else None,
    )  # fmt: skip
    part = split if _is_named(name) else None
    data = {**found, "split": part, "partition": shown.partition, "made": provenance()}
    with writing.staged(directory, "data describe") as folder:
        exports.write_description(data, paper.described(name), folder)
    view, figure = partial(views.description, data, paper.described(name)), "heterogeneity.png"
    common.show(data, view, as_json, directory, figure=directory / figure, files=directory)
    twin = paper.TWINS.get(name, name)
    if twin != name:
        print_line(f"The paper's column is about its own {twin}, not about {name}.", err=as_json)
    _print_notes(shown.notes, err=as_json)


@app.command()
def show(
    name: Shown,
    split: Split = "train",
    rows: Annotated[int, opt("Clients to show.", min=1, max=40)] = 6,
    columns: Annotated[int, opt("Examples of each.", min=1, max=40)] = 10,
    partition: PartitionName = None, clients: Clients = None, seed: Seed = 0,
    set_: Settings = None, cache: Cache = None, out: Out = None,
) -> None:  # fmt: skip
    """Show examples of some clients: a picture of images, the beginnings of texts."""
    from fedzmg.data.formats import is_table
    from fedzmg.report import figures, writing

    if is_table(name):
        raise InputError(f"{name}: a table has no pictures: use 'fedzmg data describe {name}'")
    shown = _population(name, split, partition, clients, seed, set_, cache)
    owners = shown.columns.owners
    assert owners is not None
    starts = {name: owners.offsets[owners.names.index(name) :] for name in shown.names[:rows]}
    spans = {client: slice(*start[:2]) for client, start in starts.items()}  # rows of the file
    if shown.unit == "characters":
        text = shown.columns.strings("text")
        for client, span in spans.items():
            print_line(f"{client}: {span.stop - span.start:,} snippets")
            for row in range(span.start, min(span.stop, span.start + min(columns, 3))):
                start, end = text.offsets[row : row + 2]
                words = bytes(text.text[start : min(end, start + 200)]).decode(errors="replace")
                print_text("    " + words.replace("\n", "\n    "))
        return
    x, y = shown.columns.array("x"), shown.columns.array("y")
    if x.ndim not in (3, 4):
        raise InputError(f"{name!r} holds arrays of shape {x.shape[1:]}, not images")
    directory = out or Path("runs") / f"data-{_title(name)}"
    common.check_output(directory, ("examples.png", "examples.svg"), "data show")
    part = f", {split}" if _is_named(name) else ""
    picture = figures.examples(
        f"{_title(name)}{part}: {len(spans)} of {len(shown.names):,} clients",
        list(spans),
        [x[span][:columns] for span in spans.values()],
        [[shown.labels[label] for label in y[span][:columns]] for span in spans.values()],
    )
    with writing.staged(directory, "data show") as folder:
        figures.save(picture, folder / "examples")
    common.print_path("figure", directory / "examples.png")


def _is_named(name: str) -> bool:
    from fedzmg.data.sources import EMBEDDED, SOURCES

    return name in EMBEDDED or name in SOURCES


def _title(name: str) -> str:
    return name if _is_named(name) else Path(name).resolve().stem


def _population(
    name: str, split: str, partition: str | None, clients: int | None, seed: int,
    settings: Texts, cache: Path | None, table: tuple[str | None, str] = (None, "label"),
) -> "Population":  # fmt: skip
    """Read a data set or a path and count what every client holds."""
    from fedzmg.data import catalog, formats, heterogeneity
    from fedzmg.data.sources import EMBEDDED, SOURCES
    from fedzmg.experiment.specs.strict import parse_settings

    if table != (None, "label") and not formats.is_table(name):
        raise InputError("--client-column and --label-column are for tables: leave them out")
    classes: int | None = None
    if name in EMBEDDED:
        columns, classes = heterogeneity.embedded_columns(name, split), 10
    elif name in SOURCES:
        splits = catalog.load(name, cache).splits
        check_names("split", [split], splits)
        columns, classes = splits[split], SOURCES[name].classes
    elif not formats.is_path(name):
        raise unknown("data set, file or folder", name, [*SOURCES, *EMBEDDED], "fedzmg data list")
    elif split != "train":
        raise InputError(f"{name}: a path has no splits: leave out --split")
    else:
        client = table[0] or ("client" if partition is None else None)
        columns = formats.read_path(name, client, table[1])
    options: dict[str, Any] = {}
    if partition == "natural":
        raise InputError("--partition natural: leave it out for the clients that the files name")
    if partition is not None:
        given = parse_settings(settings or [])
        options = {"name": partition, "clients": clients, "seed": seed, **given}
    elif settings or clients:
        raise InputError("--set and --clients need a partition: add --partition NAME")
    elif columns.owners is None and (name, split) in heterogeneity.DEFAULT_PARTITIONS:
        options = {**heterogeneity.DEFAULT_PARTITIONS[name, split], "seed": seed}
    return heterogeneity.population(columns, classes=classes, partition=options or None)


def _summary(name: str, cache: Path | None) -> dict[str, Any]:
    from fedzmg.data import catalog
    from fedzmg.data.cache import root, size_of
    from fedzmg.data.sources import SOURCES

    known, found = SOURCES[name], None
    state, notes = ("no: get" if known.remotes else "no: import"), []
    try:
        found = catalog.stored(name, cache)
    except InputError as error:
        state, notes = "damaged", [str(error)]
    if found is not None:
        state, notes = "here", list(found.notes)
    counts = (found or known).counts.items()
    return {
        **{key: getattr(known, key) for key in ("title", "citation", "terms")}, "state": state,
        "counts": {k: dict(zip(("clients", "examples"), v, strict=True)) for k, v in counts},
        "classes": known.classes,
        "bytes": sum(size_of(root(cache) / part / name) for part in ("sets", "downloads")),
        "fingerprint": found and found.fingerprint, "path": found and str(found.path),
        "notes": notes, "addresses": [remote.url for remote in known.remotes],
        "files": [form.files for form in known.forms],
    }  # fmt: skip


def _store(make: "Callable[[Downloads], Dataset]") -> None:
    from fedzmg.terminal.live import Downloads

    with Downloads(Terminal(stderr=True)) as progress:
        dataset = make(progress)
    for split, columns in dataset.splits.items():
        clients = "" if columns.clients is None else f"{columns.clients:,} clients, "
        print_line(f"{dataset.name} {split}: {clients}{columns.rows:,} examples")
    _print_notes(dataset.notes)
    print_line(f"stored in {dataset.path}")


def _print_notes(notes: Iterable[str], *, err: bool = False) -> None:
    for note in notes:
        print_line(f"note: {note}", err=err)
