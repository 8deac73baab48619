"""Devices of a federation as the server knows them, and their health."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedzmg.deploy.codec import BadMessage
from fedzmg.storage.formats import read_json, write_json

FORMAT = 1
LONGEST_NAME = 60


@dataclass
class Node:
    """One device."""

    client: int
    node: int  # number of the device in Flower, bound to its key
    name: str
    examples: int
    data: str  # hash of its examples
    last_seen: float = 0.0  # time of its last answer, in seconds since 1970
    rounds: int = 0  # answers that were used
    seconds: float = 0.0  # time of its last local training
    refused: int = 0
    late: int = 0
    absent: int = 0  # rounds of its cohorts that ended without an answer
    lost: int = 0  # answers that began without the memory that the server named
    reason: str = ""  # reason of the last refusal


@dataclass
class Nodes:
    """All devices of a federation, in a file of its run directory."""

    path: Path
    federation: str
    nodes: dict[int, Node] = field(default_factory=dict)  # devices by client
    bound: Mapping[int, int] = field(default_factory=dict)  # clients of nodes with a bound key
    refused: int = 0  # messages of nodes that are not a device of this federation

    @classmethod
    def open(cls, path: Path, bound: Mapping[int, int]) -> "Nodes":
        """Read the file, or begin a federation with a new random id."""
        if not path.exists():
            return cls(path, secrets.token_hex(8), bound=bound)
        values = read_json(path, wanted=FORMAT)  # checks the hash of what :meth:`save` wrote
        known = {one["client"]: Node(**one) for one in values["nodes"]}
        return cls(path, values["federation"], known, bound, values["refused"])

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        nodes = [asdict(self.nodes[client]) for client in sorted(self.nodes)]
        known = {"federation": self.federation, "nodes": nodes, "refused": self.refused}
        write_json(self.path, {"format": FORMAT, **known})

    def register(
        self, number: int, facts: Mapping[str, Any], online: set[int], population: int,
        structure: str, most: int,
    ) -> Node:  # fmt: skip
        """Add a device by its answer to a greeting, or find it again; refuse a wrong answer."""
        for key in ("client", "examples"):
            if type(facts.get(key)) is not int:
                raise BadMessage(f"{key} = {str(facts.get(key))[:40]!r}: expected a whole number")
        client, examples = facts["client"], facts["examples"]
        name, data = (str(facts.get(key, ""))[:LONGEST_NAME] for key in ("name", "data"))
        if not 0 <= client < population:
            raise BadMessage(f"client {client}: expected 0 to {population - 1}")
        if self.bound.get(number, client) != client:
            raise BadMessage(f"client {client} with the key of client {self.bound[number]}")
        if not 1 <= examples <= most:
            raise BadMessage(f"{examples} examples: expected 1 to {most}; see --max-examples")
        if facts.get("structure") != structure:
            raise BadMessage("another model or rule than the server's: use the same on both sides")
        known = self.nodes.get(client)
        if known is None:
            taken = {one.name for one in self.nodes.values()}
            name = name if name.isprintable() and name.strip() else str(client)
            name = f"{name} ({client})" if name in taken else name
            known = self.nodes[client] = Node(client, number, name, examples, data)
        elif (known.examples, known.data) != (examples, data):
            raise BadMessage(f"client {client} began with other data")
        elif known.node != number and known.node in online:
            raise BadMessage(f"client {client} is another node, which is online")
        self.nodes[client] = replace(known, node=number, last_seen=time.time())
        return self.nodes[client]
