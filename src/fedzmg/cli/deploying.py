"""Commands of real federations: ``fedzmg deploy``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from fedzmg.cli import common
from fedzmg.cli.common import Texts, opt, setting, with_plugins
from fedzmg.errors import InputError

app = typer.Typer(
    help="Run federations on real devices, over Flower (extra: flower).", no_args_is_help=True
)
PORT = 8443
File = Annotated[Path, Argument(help="A run as a TOML file, such as 'fedzmg run' takes.")]
Clients = Annotated[int | None, opt("Number of clients.", "those of the task", min=1)]
Settings = Annotated[Texts, setting("e.g. protocol.rounds=20, algorithm=scaffold.")]
Out = Annotated[Path | None, opt("Run directory.", "runs/ and the file's name")]
Keys = Annotated[Path, opt("Directory of 'fedzmg deploy keys'.")]
Insecure = Annotated[bool, opt("Plain text, without keys: everyone can read and take part.")]
Deadline = Annotated[float, opt("Seconds that a round waits for answers.", min=1)]
Replies = Annotated[int, opt("Answers that a round needs.", min=1)]
Examples = Annotated[int, opt("Examples that a client may claim.", min=1)]
Update = Annotated[float, opt("Largest norm of an upload, in multiples of 1 + the model's.")]
Track = Annotated[str | None, opt("Trackers, comma-separated: tensorboard, mlflow, wandb.")]


@app.command()
def keys(
    host: Annotated[Texts, opt("Name or IP address of the server; several are possible.")] = None,
    devices: Annotated[int, opt("Number of devices.", min=1)] = 2,
    out: Keys = Path("keys"),
) -> None:
    """Make a CA, the server's certificate and a key per device; existing files stay."""
    from fedzmg.deploy.keys import make_keys
    from fedzmg.deploy.processes import require_flower

    require_flower()
    for path in make_keys(out, host or [], devices):
        common.print_path("written", path)
    common.say(f"give device N: {out}/ca.crt and {out}/device-N; keep {out}/server.key here")


@app.command()
@with_plugins
def server(
    file: File,
    clients: Clients = None,
    set_: Settings = None,
    out: Out = None,
    host: Annotated[str, opt("Interface to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, opt("Port to listen on.", min=1, max=65535)] = PORT,
    keys: Keys = Path("keys"),
    insecure: Insecure = False,
    deadline: Deadline = 300.0,
    min_replies: Replies = 1,
    max_examples: Examples = 1_000_000,
    max_update: Update = 100.0,
    track: Track = None,
) -> None:
    """Train a run with devices; the same command continues it."""
    limits = (deadline, min_replies, max_examples, max_update)
    _serve(
        file, clients, set_, out, host, port, None if insecure else keys.absolute(), limits, track
    )


@app.command()
@with_plugins
def client(
    server: Annotated[str, opt("Server, HOST or HOST:PORT.")],
    data: Annotated[str, opt("A task of 'fedzmg list', or FILE.py:NAME with your own data.")],
    partition: Annotated[int, opt("Number of this client in the federation, from 0.", min=0)],
    keys: Keys = Path("keys"),
    insecure: Insecure = False,
    state: Annotated[
        Path | None, opt("Directory of this client's memory.", "fedzmg-client-PARTITION")
    ] = None,
    device: Annotated[str, opt("cpu, cuda or auto.")] = "cpu",
) -> None:
    """Run a device: it trains on its own data whenever the server asks."""
    from fedzmg.deploy.launch import run_client
    from fedzmg.deploy.processes import require_flower
    from fedzmg.simulation import resolve_device

    require_flower()
    files = None if insecure else (keys / "ca.crt", keys / f"device-{partition}")
    address = server if ":" in server else f"{server}:{PORT}"
    folder = state or Path(f"fedzmg-client-{partition}")
    run_client(data, partition, address, folder, files, common.say, resolve_device(device))


@app.command()
@with_plugins
def local(
    file: File,
    clients: Clients = None,
    set_: Settings = None,
    out: Out = None,
    insecure: Insecure = False,
    deadline: Deadline = 300.0,
    min_replies: Replies = 1,
    max_examples: Examples = 1_000_000,
    max_update: Update = 100.0,
    track: Track = None,
) -> None:
    """Try a federation on this machine: server and all devices as processes."""
    limits = (deadline, min_replies, max_examples, max_update)
    _serve(file, clients, set_, out, "", 0, None if insecure else Path(), limits, track)


def _serve(
    file: Path, clients: int | None, set_: Texts, out: Path | None, host: str, port: int,
    keys: Path | None, limits: tuple[float, int, int, float], track: str | None,
) -> None:  # fmt: skip
    """Run a server; without a host, also its devices."""
    import contextlib

    from fedzmg import plugins, trackers
    from fedzmg.deploy.keys import make_keys
    from fedzmg.deploy.launch import local_clients, run_server
    from fedzmg.deploy.processes import free_port, require_flower
    from fedzmg.deploy.remote import Limits
    from fedzmg.deploy.server import Settings
    from fedzmg.experiment.specs import files as spec_files
    from fedzmg.experiment.specs.run import RunSpec
    from fedzmg.experiment.specs.strict import parse_settings

    require_flower()
    trackers.named(track)
    spec = spec_files.read(file, "run")
    assert isinstance(spec, RunSpec)
    with common.mistakes_in(file, set_):
        spec = spec.with_settings(parse_settings(set_ or []))
        task = spec.build_task()
        spec.resolve(task)
    number = clients or len(task.train)
    directory = (out or Path("runs") / file.stem).absolute()
    home = directory.with_name(f"{directory.name}.deploy")
    loaded = tuple(str(path) for path in plugins.loaded_files())
    settings = Settings("", str(directory), number, str(home), Limits(*limits), loaded, track)
    with contextlib.ExitStack() as stack:
        if not host:
            host, port, keys = "127.0.0.1", free_port(), keys and home / "keys"
            if keys is not None:
                make_keys(keys, [], number)
            data = next((p for p in loaded if Path(p).name == spec.task.partition(":")[0]), "")
            name = f"{data}:{spec.task.partition(':')[2]}" if data else spec.task
            started = local_clients(name, number, f"{host}:{port}", home, keys, loaded)
            stack.enter_context(started)
        elif keys is not None and not (keys / "ca.crt").is_file():
            raise InputError(f"{keys} holds no ca.crt: make keys with 'fedzmg deploy keys'")
        run_server(spec, settings, host, port, keys, common.say)
    common.print_path("run", directory)
