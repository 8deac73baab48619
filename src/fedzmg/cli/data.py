"""Commands of ``fedzmg data``: list, get, import, remove and path."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedzmg.cli import data_views, output
from fedzmg.cli.options import Cache, Json
from fedzmg.errors import InputError

if TYPE_CHECKING:
    from fedzmg.data.catalog import Dataset
    from fedzmg.terminal.downloads import Downloads

app = typer.Typer(help="Show, get and import data sets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A data set of 'fedzmg data list'.")]


@app.command(name="list")
def list_(cache: Cache = None, as_json: Json = False) -> None:
    """List all data sets and which of them are stored here."""
    from fedzmg.data.sources import SOURCES
    from fedzmg.terminal import cards

    found = {name: _summary(name, cache) for name in SOURCES}
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    console.print(cards.data_sets(found, console.width))
    for name, one in found.items():
        for note in one["notes"]:
            output.plain(console, f"note: {name}: {note}")


@app.command()
def get(
    name: Name,
    cache: Cache = None,
    mirror: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Address or folder to download from.", show_default="$FEDZMG_MIRROR"
        ),
    ] = None,
) -> None:
    """Download a data set from its official address and check it."""
    from fedzmg.data import catalog

    with _progress() as progress:
        dataset = catalog.get(name, cache, mirror, progress)
    _report(dataset, cache)


@app.command(name="import")
def import_(
    name: Name,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="The files, an archive or a folder of them."),
    ],
    cache: Cache = None,
) -> None:
    """Make a data set from files you have."""
    from fedzmg.data import catalog

    with _progress() as progress:
        dataset = catalog.import_files(name, files, cache, progress)
    _report(dataset, cache)


@app.command()
def remove(name: Name, cache: Cache = None) -> None:
    """Delete a data set and its downloads."""
    from fedzmg.data import catalog
    from fedzmg.results.formatting import bytes_text

    freed = catalog.remove(name, cache)
    typer.echo(f"removed {name}: {bytes_text(freed)}")


@app.command()
def path(
    name: Annotated[str | None, typer.Argument(help="A data set that is here.")] = None,
    cache: Cache = None,
) -> None:
    """Print the data folder, or the folder of one data set."""
    from fedzmg.data import catalog
    from fedzmg.data.cache import root

    if name is None:
        typer.echo(str(root(cache)))
        return
    catalog.load(name, cache)  # raises if it is not stored
    found = catalog.stored(name, cache)
    assert found is not None
    typer.echo(str(found.path))


app.command()(data_views.describe)
app.command()(data_views.show)


def _summary(name: str, cache: Path | None) -> dict[str, Any]:
    """Summarise a data set as plain values."""
    from fedzmg.data import catalog
    from fedzmg.data.cache import root, size_of
    from fedzmg.data.sources import SOURCES

    known = SOURCES[name]
    state, notes = ("no: get" if known.remotes else "no: import"), []
    found = None
    try:
        found = catalog.stored(name, cache)
    except InputError as error:
        state, notes = "damaged", [str(error)]
    if found is not None:
        state, notes = "here", list(found.notes)
    counts = known.counts if found is None else found.counts
    folders = [root(cache) / part / name for part in ("sets", "downloads")]
    return {
        "title": known.title,
        "citation": known.citation,
        "terms": known.terms,
        "state": state,
        "counts": {
            split: {"clients": clients, "examples": examples}
            for split, (clients, examples) in counts.items()
        },
        "classes": known.classes,
        "bytes": sum(size_of(folder) for folder in folders),
        "fingerprint": None if found is None else found.fingerprint,
        "path": None if found is None else str(found.path),
        "notes": notes,
        "addresses": [remote.url for remote in known.remotes],
        "files": [form.files for form in known.forms],
    }


@contextlib.contextmanager
def _progress() -> Iterator[Downloads]:
    """Show progress; after Ctrl-C, explain how to continue."""
    from fedzmg.terminal.downloads import Downloads

    try:
        with Downloads(Console(stderr=True)) as progress:
            yield progress
    except KeyboardInterrupt:
        typer.echo("\nfedzmg: interrupted; run the same command again to continue", err=True)
        sys.exit(output.INTERRUPTED)


def _report(dataset: Dataset, cache: Path | None) -> None:
    from fedzmg.data import catalog

    console = Console()
    for split, columns in dataset.splits.items():
        clients = "" if columns.clients is None else f"{columns.clients:,} clients, "
        output.plain(console, f"{dataset.name} {split}: {clients}{columns.rows:,} examples")
    for note in dataset.notes:
        output.plain(console, f"note: {note}")
    found = catalog.stored(dataset.name, cache)
    if found is not None:
        output.plain(console, f"stored in {found.path}")
