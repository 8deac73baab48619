"""The engine of a deployed server: clients train on their own devices.

It takes the place of the loop over clients in a simulation, so planning, merging, the server rule,
evaluation, records and checkpoints are those of a simulation. Client memory stays on the device.
The server keeps the round of each client's last accepted upload in its place, under the same
checkpoints, and names it to the device, which has the memory of that round on its disk.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fedzmg.data.plan import ClientBatch
from fedzmg.deploy.blueprint import Blueprint, Down
from fedzmg.deploy.codec import BadMessage, decode, encode
from fedzmg.deploy.frames import UNKNOWN, Frame, Wire
from fedzmg.deploy.nodes import Node, Nodes
from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.engine.client_memory import MemoryStore
from fedzmg.engine.local import Broadcast, Chunk, Engine, Outcome, Program
from fedzmg.tree import State, leaves, row, stack, tree_map
from fedzmg.wrappers.parts import travelling

TICK = 1.0  # seconds between two looks for answers


class Limits(NamedTuple):
    """Bounds of a round, and of what a device may claim."""

    deadline: float = 300.0  # seconds until a round continues without those that have not answered
    min_replies: int = 1  # answers that a round needs; with fewer, it is sent again
    max_examples: int = 1_000_000  # largest count of a client's examples, and largest weight
    max_update: float = 100.0  # largest norm of an upload, in multiples of 1 + the model's norm


class Reply(NamedTuple):
    """An answer, or the reason why there is none."""

    message: str
    node: int
    frame: Frame | None
    error: str = ""


class Link(Protocol):
    """Messages to and from nodes."""

    def online(self) -> set[int]:
        """Return the numbers of the nodes that are connected."""

    def push(self, node: int, frame: Frame, seconds: float) -> str:
        """Send a message that is valid for some seconds; return its id."""

    def pull(self, messages: Sequence[str]) -> list[Reply]:
        """Return the replies to some messages that have arrived."""

    def cut_off(self) -> set[int]:
        """Return the nodes that have sent too many bytes since the last call."""
        return set()


@dataclass
class Remote:
    """Exchange with all devices of one federation."""

    link: Link
    nodes: Nodes
    blueprint: Blueprint
    population: int
    limits: Limits
    say: Callable[[str], None]
    _greeted: dict[int, str | None] = field(default_factory=dict)
    """Nodes that were greeted: the message, empty after an answer, None after a wrong one."""
    _late: dict[str, float] = field(default_factory=dict)  # ends of messages answered too late

    @property
    def _valid_seconds(self) -> float:
        return 2 * self.limits.deadline + 60

    def greet(self) -> set[int]:
        """Greet nodes that are new, read their answers, and return the nodes online."""
        online = self.link.online()
        self._greeted = {n: message for n, message in self._greeted.items() if n in online}
        facts = {
            "kind": "hello", "federation": self.nodes.federation,
            "spec": self.blueprint.run.spec.to_toml(), "population": self.population,
        }  # fmt: skip
        for number in online - self._greeted.keys():
            self._greeted[number] = self.link.push(number, Frame(facts), self._valid_seconds)
        for reply in self.link.pull([message for message in self._greeted.values() if message]):
            number = reply.node
            try:
                node = self.nodes.register(
                    number, _answer(reply).facts, online, self.population,
                    self.blueprint.structure(), self.limits.max_examples,
                )  # fmt: skip
                self.say(f"client {node.client} is {node.name!r} with {node.examples} examples")
                self._greeted[number] = ""
            except BadMessage as error:
                self.nodes.refused += 1
                self.say(f"node {number} refused: {error}")
                self._greeted[number] = None
                if reply.frame is None:  # Flower's own error, such as an expired message
                    del self._greeted[number]
                elif "error" not in reply.frame.facts:
                    told = {**facts, "kind": "refused", "reason": str(error)}
                    self.link.push(number, Frame(told), self._valid_seconds)
            self.nodes.save()
        return online

    def gather(self) -> None:
        """Wait until every client has been there once."""
        self.say(f"{len(self.nodes.nodes)} of {self.population} clients are known; waiting for all")
        while len(self.nodes.nodes) < self.population:
            self.greet()
            time.sleep(TICK)

    def exchange(
        self, down: Down, round_: int, planned: dict[int, list[ClientBatch]],
        about: Mapping[int, Mapping[str, Any]],
    ) -> dict[int, list[Outcome]]:  # fmt: skip
        """Send a round to its clients and collect their answers until the deadline.

        With too few answers, the round is sent again to the clients that have not answered.
        """
        arrays, need = encode(down), min(self.limits.min_replies, len(planned))
        largest = self.limits.max_update * (1 + _norm(down.params))
        found: dict[int, list[Outcome]] = {}
        facts = {"kind": "train", "federation": self.nodes.federation, "round": round_}
        facts["nonce"] = secrets.token_hex(8)
        sent, failed, asked, end = dict[str, int](), set[int](), set[int](), 0.0
        while len(found) < need or planned.keys() - found.keys() - failed:
            if time.monotonic() >= end:
                if end:
                    if len(found) >= need:
                        break
                    self.say(f"round {round_}: {len(found)} answers of {need}; sending it again")
                # Answers to what was sent before still count: a device may only be slow.
                failed, asked, end = set(), set(), time.monotonic() + self.limits.deadline
            online, cut = self.greet(), self.link.cut_off()
            for message, client in list(sent.items()):
                if self.nodes.nodes[client].node not in online:  # it may come back without it
                    self._leave({message: sent.pop(message)})
                    asked.discard(client)
            for client in planned.keys() - found.keys() - failed:
                node = self.nodes.nodes[client]
                if node.node in cut:
                    failed.add(client)
                    self._refuse(node, round_, "it has too many bytes")
                elif client not in asked and self._greeted.get(node.node) == "":
                    own = {**facts, "occurrences": len(planned[client]), **about[client]}
                    message = self.link.push(node.node, Frame(own, arrays), self._valid_seconds)
                    sent[message] = client
                    asked.add(client)
            for reply in self.link.pull([*sent, *self._late]):
                if reply.message not in sent:
                    self._count_other(reply, round_)
                    continue
                client, frame = sent.pop(reply.message), None
                node = self.nodes.nodes[client]
                if client in found:
                    continue
                try:
                    frame = self._checked(reply, node, facts)
                    found[client] = self._outcomes(frame, planned[client], largest)
                    self._count(node, frame)
                except BadMessage as error:
                    if frame is not None:
                        found[client] = [_refused(self.blueprint.up)] * len(planned[client])
                    elif UNKNOWN in str(error):  # it has lost its disk
                        self._greeted.pop(node.node, None)
                        asked.discard(client)
                        continue
                    else:
                        failed.add(client)
                    self._refuse(node, round_, str(error))
            if planned.keys() - found.keys() - failed:
                time.sleep(TICK)
        self._leave(sent)
        for client in planned.keys() - found.keys():
            self.nodes.nodes[client].absent += 1
        self.nodes.save()
        return found

    def _checked(self, reply: Reply, node: Node, sent: Mapping[str, Any]) -> Frame:
        """Refuse an error, and an answer of another client or to another message."""
        frame = _answer(reply)
        for key in ("federation", "round", "nonce", "client"):
            if frame.facts.get(key) != {**sent, "client": node.client}[key]:
                raise BadMessage(f"{key} = {str(frame.facts.get(key))[:40]!r}")
        return frame

    def _refuse(self, node: Node, round_: int, reason: str) -> None:
        node.refused, node.reason = node.refused + 1, reason[:200]
        self.say(f"round {round_}: answer of client {node.client} refused: {reason}")

    def _leave(self, sent: dict[str, int]) -> None:
        """Count later answers to some messages as late."""
        now = time.monotonic()
        self._late |= dict.fromkeys(sent, now + self._valid_seconds)
        self._late = {message: end for message, end in self._late.items() if end > now}

    def _count_other(self, reply: Reply, round_: int) -> None:
        """Count an answer that comes too late, or a second time."""
        node = next((n for n in self.nodes.nodes.values() if n.node == reply.node), None)
        late = self._late.pop(reply.message, None) is not None
        if node is None or reply.frame is None:
            return
        node.last_seen = time.time()
        if late:
            node.late += 1
            self.say(f"a late answer of client {node.client} is ignored")
        else:
            self._refuse(node, round_, "it has answered this message before")

    def _count(self, node: Node, frame: Frame) -> None:
        node.rounds, node.last_seen = node.rounds + 1, time.time()
        seconds = frame.facts.get("seconds")
        node.seconds = float(seconds) if isinstance(seconds, float) and 0 <= seconds < 1e9 else 0.0
        if frame.facts.get("lost"):
            node.lost += 1
            self.say(f"client {node.client} has lost its memory and began anew")

    def _outcomes(self, frame: Frame, planned: list[ClientBatch], largest: float) -> list[Outcome]:
        """Check the arrays of an answer and return them by occurrence."""
        parts: dict[str, dict[str, Wire]] = {str(i): {} for i in range(len(planned))}
        for name, wire in frame.arrays.items():
            number, _, rest = name.partition(".")
            if number not in parts:
                raise BadMessage(f"array {name[:80]!r}")
            parts[number][f".{rest}"] = wire
        found = [decode(part, self.blueprint.up) for part in parts.values()]
        for (upload, _, steps, _), batch in zip(found, planned, strict=True):
            most = len(batch.stream)
            if not 0 <= int(steps) <= most:
                raise BadMessage(f"{int(steps)} steps: expected up to {most}")
            if any(float(w) > self.limits.max_examples for w in leaves(upload.weight)):
                raise BadMessage("a weight above --max-examples")
            whole = [t for t in leaves(upload) if not t.is_floating_point() and t.numel()]
            if any(int(t.max()) > most or int(t.min()) < -most for t in whole):
                raise BadMessage(f"whole numbers above the {most} local steps")
            if not (norm := _norm(upload)) <= largest:
                raise BadMessage(f"an update of norm {norm:.3g}: more than --max-update")
        return found


def _answer(reply: Reply) -> Frame:
    """Return an answer that is not an error."""
    if reply.frame is None or "error" in reply.frame.facts:
        raise BadMessage(reply.error or str(reply.frame and reply.frame.facts["error"]))
    return reply.frame


def _norm(value: Any) -> float:
    real = [leaf.double() for leaf in leaves(value) if leaf.is_floating_point()]
    return math.sqrt(sum(float(leaf.square().sum()) for leaf in real))


def _refused(like: Outcome) -> Outcome:
    """Return an outcome that the merger rejects, counts and names in the log."""
    return tree_map(lambda t: torch.full_like(t, math.nan if t.is_floating_point() else 0), like)


class RemotePlanner(EnginePlanner, Engine):
    """The engine of a deployed server, in place of the choice among engines of one machine."""

    remote = True

    def __init__(self, remote: Remote) -> None:
        super().__init__("sequential")
        self._remote = remote

    def plan(self, program: Program, *_: Any, **__: Any) -> None:
        self.choice = EngineChoice("sequential", "clients train on their own devices")

    def build(self, program: Program) -> Engine:
        return self

    def memory(self, fresh: State, clients: int, places: Sequence[Path] | None) -> MemoryStore:
        """Keep the round of every client's memory in place of the memory."""
        kept = {"round": torch.zeros(1, 1)} if leaves(fresh) else fresh
        self._store = MemoryStore(kept, clients, places)
        self._store.kept_bytes = MemoryStore(fresh, 0, ()).kept_bytes
        return self._store

    def train(
        self, batches: list[ClientBatch], broadcast: Broadcast, memory: State
    ) -> Iterator[Chunk]:
        """Yield the answers in the order of the cohort; clients without one are left out."""
        remote, round_ = self._remote, int(broadcast.round[0])
        planned: dict[int, list[ClientBatch]] = {}
        about: dict[int, dict[str, Any]] = {}
        for i, batch in enumerate(batches):
            if len(batch.stream):
                planned.setdefault(batch.client, []).append(batch)
                base = int(memory["round"][i]) if leaves(memory) else 0
                about[batch.client] = {"base": base, "keep": self._store.rounds(0, batch.client)}
        one = row(broadcast, 0)
        down = Down(travelling(remote.blueprint.rule, one.params), one.shared)
        found = remote.exchange(down, round_, planned, about) if planned else {}
        token = {"round": torch.full((1,), float(round_))} if leaves(memory) else ()
        order = [i for i, batch in enumerate(batches) if found.get(batch.client)]
        rows = [found[batches[i].client].pop(0)._replace(memory=token) for i in order]
        if not rows:  # an empty cohort
            order = [0]
            rows = [tree_map(torch.zeros_like, remote.blueprint.up)._replace(memory=token)]
        yield Chunk(order, list(range(len(order))), stack(rows))
