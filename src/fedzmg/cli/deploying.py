"""Commands of real federations: ``fedzmg deploy``."""

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Typer

from fedzmg.cli import common
from fedzmg.cli.common import Texts, opt, setting, with_plugins
from fedzmg.errors import InputError

app = Typer(
    help="Run federations on real devices, over Flower (extra: flower).", no_args_is_help=True
)
PORT = 8443
Keys = Annotated[Path, opt("Directory of 'fedzmg deploy keys'.")]
Insecure = Annotated[bool, opt("Plain text, without keys: everyone can read and take part.")]


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


def _serve(
    place: tuple[str, int, Path] | None,
    file: Annotated[Path, Argument(help="A run as a TOML file, such as 'fedzmg run' takes.")],
    clients: Annotated[int | None, opt("Number of clients.", "those of the task", min=1)] = None,
    set_: Annotated[Texts, setting("e.g. protocol.rounds=20, algorithm=scaffold.")] = None,
    out: Annotated[Path | None, opt("Run directory.", "runs/ and the file's name")] = None,
    insecure: Insecure = False,
    deadline: Annotated[float, opt("Seconds that a round waits for answers.", min=1)] = 300.0,
    min_replies: Annotated[int, opt("Answers that a round needs.", min=1)] = 1,
    max_examples: Annotated[int, opt("Examples that a client may claim.", min=1)] = 1_000_000,
    max_update: Annotated[
        float, opt("Largest norm of an upload, in multiples of 1 + the model's.", min=0)
    ] = 100.0,
    track: Annotated[
        str | None, opt("Trackers, comma-separated: tensorboard, mlflow, wandb.")
    ] = None,
) -> None:
    """Run a server at a host and port with a folder of keys; without a place, also its devices."""
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
    loaded = {path.name: str(path) for path in plugins.loaded_files()}
    limits, files = Limits(deadline, min_replies, max_examples, max_update), tuple(loaded.values())
    settings = Settings("", str(directory), number, str(home), limits, files, track)
    host, port, folder = place or ("127.0.0.1", free_port(), home / "keys")
    keys = None if insecure else folder.absolute()
    with contextlib.ExitStack() as stack:
        if place is None:
            if keys is not None:
                make_keys(keys, [], number)
            own = plugins.split_reference(spec.task)
            data = f"{loaded[own[0]]}:{own[1]}" if own else spec.task
            stack.enter_context(local_clients(data, number, f"{host}:{port}", home, keys, files))
        elif keys is not None and not (keys / "ca.crt").is_file():
            raise InputError(f"{keys} holds no ca.crt: make keys with 'fedzmg deploy keys'")
        run_server(spec, settings, host, port, keys, common.say)
    common.print_path("run", directory)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :func:`_serve`."""
    known = [*inspect.signature(_serve, eval_str=True).parameters.values()][1:]
    own = [*inspect.signature(command, eval_str=True).parameters.values()][:-1]
    signature = inspect.Signature([known[0], *own, *known[1:]])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


@app.command()
@with_plugins
@_with_options
def server(
    host: Annotated[str, opt("Interface to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, opt("Port to listen on.", min=1, max=65535)] = PORT,
    keys: Keys = Path("keys"),
    **given: Any,
) -> None:
    """Train a run with devices; the same command continues it."""
    _serve((host, port, keys), **given)


@app.command()
@with_plugins
@_with_options
def local(**given: Any) -> None:
    """Try a federation on this machine: server and all devices as processes."""
    _serve(None, **given)


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
