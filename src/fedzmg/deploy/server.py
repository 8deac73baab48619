"""A deployed run: the training loop and run directory of a simulation, with remote clients."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from fedzmg import plugins, trackers
from fedzmg.deploy.blueprint import Blueprint, ReportedData
from fedzmg.deploy.nodes import Nodes
from fedzmg.deploy.remote import Limits, Link, Remote, RemotePlanner
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import NODES
from fedzmg.experiment.specs.run import ResolvedRun, RunSpec
from fedzmg.plain_text import plain
from fedzmg.simulation import History, RoundReport
from fedzmg.tasks.task import Task

SETTINGS = "FEDZMG_DEPLOY"  # environment variable with the file of settings of the server app
LOG, PID, DONE = "server.log", "server.pid", "done.json"
"""Files of the server app for its launcher: messages, process id, and the end with its error."""
CUT = "cut_off.txt"  # file of the launcher for the server app: nodes that sent too many bytes


class Settings(NamedTuple):
    """Everything that the server app needs to know."""

    spec: str  # text of the specification
    out: str
    clients: int
    home: str  # directory of the server app's own files
    limits: Limits = Limits()
    plugins: tuple[str, ...] = ()
    track: str | None = None
    bound: Mapping[str, int] = {}  # clients of nodes with a bound key
    parent: int = 0  # process that started the server app, which ends with it


def prepare(spec: RunSpec, task: Task, clients: int) -> tuple[Task, ResolvedRun]:
    """Return a task of so many remote clients, whose data are not known yet, and its run."""
    known = spec.model_copy(update={"device": "cpu", "engine": "sequential"})
    names = tuple(str(i) for i in range(clients))
    protocol = known.build_protocol(task)
    cohort = protocol.cohort if protocol.replacement else min(protocol.cohort, clients)
    known = known.with_settings({"protocol.cohort": cohort})
    data = ReportedData.of(task.test, [1] * clients, names, names)
    task = replace(task, train=data, test_owners=None, protocol=replace(protocol, cohort=cohort))
    return task, known.resolve(task)


class Log(Progress):
    """A line per round and message in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def advance(self, report: RoundReport) -> None:
        record = report.records[0]
        score = "" if record.metric is None else f", metric {record.metric:.4f}"
        used = f"{record.clients} clients, {record.dropped} dropped"
        self.say(f"round {record.round}: {used}, loss {record.train_loss:.4f}{score}")

    def say(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{plain(text)}\n")


def train(link: Link, settings: Settings) -> History:
    """Wait for all clients, then train the run or continue it."""
    log = Log(Path(settings.home) / LOG)
    for file in settings.plugins:
        plugins.load(file)
    spec = RunSpec.parse(tomllib.loads(settings.spec))
    task, run = prepare(spec, spec.build_task(), settings.clients)
    blueprint = Blueprint.of(task, run.spec, torch.device("cpu"))
    out = Path(settings.out)
    nodes = Nodes.open(out / NODES, {int(node): c for node, c in settings.bound.items()})
    remote = Remote(link, nodes, blueprint, settings.clients, settings.limits, log.say)
    remote.gather()
    found = [nodes.nodes[client] for client in range(settings.clients)]
    names, prints = (tuple(getattr(n, key) for n in found) for key in ("name", "data"))
    data = ReportedData.of(task.test, [n.examples for n in found], names, prints)
    task = replace(task, train=data)
    with trackers.Tracking(trackers.named(settings.track), out, log, None) as progress:
        own = RemotePlanner(remote)
        return run_pack(task, [run], [out], progress=progress, checkpoint_seconds=0, engines=own)[0]
