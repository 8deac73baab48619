"""Server and devices without Flower: the same bits as a simulation, and hostile answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedzmg import algorithms, tasks
from fedzmg.deploy import codec, remote
from fedzmg.deploy.codec import BadMessage
from fedzmg.deploy.device import Device
from fedzmg.deploy.frames import Frame, Wire
from fedzmg.deploy.remote import Limits, Reply
from fedzmg.deploy.server import LOG, Settings, train
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import NODES
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.messages import Upload
from fedzmg.plugins import load_reference
from fedzmg.report.tables.clients import devices
from fedzmg.results import reading
from fedzmg.results.study_result import study_result
from fedzmg.storage.formats import read_json
from fedzmg.tree import Tree, named_leaves

OWN = f"{Path(__file__).with_name('own_task.py')}:task"
NORMALIZED = OWN.replace(":task", ":normalized")
Change = Callable[[Frame, int, int], Frame | None]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TICK", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Direct(remote.Link):
    """Devices in this process; ``change`` is applied to the answer of a node to a round."""

    def __init__(self, state: Path, change: Change | None = None, data: str = OWN) -> None:
        self.devices = {
            100 + client: Device(data, client, state, torch.device("cpu")) for client in range(3)
        }
        self._change = change or (lambda frame, *_: frame)
        self._answers: dict[str, Reply] = {}
        self._sent = 0

    def online(self) -> set[int]:
        return set(self.devices)

    def push(self, node: int, frame: Frame, seconds: float) -> str:
        self._sent += 1
        answer = self.devices[node].answer(frame)
        round_ = int(frame.facts.get("round", 0))
        changed = self._change(answer, node - 100, round_)
        if changed is not None:
            self._answers[str(self._sent)] = Reply(str(self._sent), node, changed)
        return str(self._sent)

    def pull(self, messages: Sequence[str]) -> list[Reply]:
        return [self._answers.pop(m) for m in messages if m in self._answers]


def specification(algorithm: str, data: str = OWN, **settings: Any) -> RunSpec:
    name = load_reference(data)
    spec = RunSpec(task=name, algorithm=algorithm, device="cpu", engine="sequential")
    return spec.with_settings(settings)


def deployed(link: remote.Link, spec: RunSpec, path: Path, limits: Limits | None = None) -> Any:
    home = path / "home"
    home.mkdir(exist_ok=True)
    own = Settings(spec.to_toml(), str(path / "run"), 3, str(home), limits or Limits())
    return train(link, own)


def equal(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    return all(torch.equal(leaf, two[name]) for name, leaf in one.items())


TRIMMED = {"federation.aggregator": "trimmed_mean", "protocol.cohort": 3}
SLOW = sorted(set(algorithms.ALGORITHMS) - {"fedlion", "fedper"})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedlion", {"protocol.replacement": True, "protocol.cohort": 4, "protocol.rounds": 2}),
        ("fedper", {"protocol.rounds": 3}),
        ("fedavg", {**TRIMMED, "protocol.rounds": 2}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_devices_give_the_bits_and_records_of_a_simulation(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    data = NORMALIZED if name == "fedbn" else OWN
    spec = specification(name, data, **settings)
    history = deployed(Direct(tmp_path / "state", data=data), spec, tmp_path)
    [simulated] = run_pack(tasks.get(data), [spec], [tmp_path / "simulated"])
    assert equal(history.params, simulated.params)
    for one, two in zip(history.records, simulated.records, strict=True):
        assert one._replace(seconds=0) == two._replace(seconds=0)


class Killed(BaseException):
    """Stands for ``kill -9``."""


def test_killed_server_continues_with_the_memory_that_its_checkpoint_names(tmp_path: Path) -> None:
    spec = specification("scaffold", **{"protocol.rounds": 4, "protocol.cohort": 3})

    def kill(frame: Frame, client: int, round_: int) -> Frame:
        # Devices have already written the memory of the round in which the server dies.
        if (client, round_) == (2, 3):
            raise Killed
        return frame

    with pytest.raises(Killed):
        deployed(Direct(tmp_path / "state", kill), spec, tmp_path)
    history = deployed(Direct(tmp_path / "state"), spec, tmp_path)
    [simulated] = run_pack(tasks.get(OWN), [spec], [tmp_path / "simulated"])
    assert equal(history.params, simulated.params)
    assert not any(node["lost"] for node in read_json(tmp_path / "run" / NODES)["nodes"])


def first(frame: Frame, **fields: Any) -> Frame:
    """Change the first array of an answer."""
    name = next(iter(frame.arrays))
    return frame._replace(arrays={**frame.arrays, name: frame.arrays[name]._replace(**fields)})


def filled(frame: Frame, value: float) -> Frame:
    wire = next(iter(frame.arrays.values()))
    return first(frame, data=np.full(wire.shape, value, np.float32).tobytes())


HOSTILE: dict[str, Change] = {
    "shape": lambda frame, *_: first(frame, shape=(10**12, 10**12)),
    "type": lambda frame, *_: first(frame, dtype="float64"),
    "object": lambda frame, *_: first(frame, dtype="object"),
    "short": lambda frame, *_: first(frame, data=b"\0"),
    "long": lambda frame, *_: first(frame, data=bytes(1 << 20)),
    "missing": lambda frame, *_: frame._replace(arrays=dict(list(frame.arrays.items())[1:])),
    "more": lambda frame, *_: frame._replace(
        arrays={**frame.arrays, "0.more": Wire("int8", (), b"\0")}
    ),
    "occurrence": lambda frame, *_: frame._replace(
        arrays={**frame.arrays, "7.steps": Wire("int8", (), b"\0")}
    ),
    "nan": lambda frame, *_: filled(frame, np.nan),
    "infinite": lambda frame, *_: filled(frame, np.inf),
    "norm": lambda frame, *_: filled(frame, 1e6),
    "steps": lambda frame, *_: frame._replace(
        arrays={**frame.arrays, "0.steps": Wire("int8", (), b"\x64")}
    ),
    "replay": lambda frame, *_: frame._replace(facts={**frame.facts, "nonce": "0" * 16}),
    "round": lambda frame, *_: frame._replace(facts={**frame.facts, "round": 1}),
    "another": lambda frame, *_: frame._replace(facts={**frame.facts, "client": 0}),
    "error": lambda frame, *_: Frame({"error": "x" * 1000}),
    "nothing": lambda *_: Frame({}),
}


def test_hostile_answers_are_refused_and_counted_and_every_round_continues(tmp_path: Path) -> None:
    kinds = list(HOSTILE)
    rounds = -(-len(kinds) // 2)

    def attack(frame: Frame, client: int, round_: int) -> Frame | None:
        kind = 2 * (round_ - 1) + client - 1
        if client == 0 or round_ == 0 or kind == len(kinds):
            return frame
        return HOSTILE[kinds[kind]](frame, client, round_)

    spec = specification("fedzmg", **{"protocol.cohort": 3, "protocol.rounds": rounds})
    history = deployed(Direct(tmp_path / "state", attack), spec, tmp_path)
    assert [record.clients for record in history.records] == [1] * (rounds - 1) + [2]
    assert all(torch.isfinite(leaf).all() for leaf in history.params.values())
    # Answers to this very message count as uploads; the merger names their clients in the log.
    assert sum(len(record.rejected) for record in history.records) == kinds.index("replay")
    log = (tmp_path / "home" / LOG).read_text()
    assert all(f"answer of client {client} refused" in log for client in (1, 2))
    table = devices(study_result(reading.read([tmp_path / "run"]).studies[0]))
    assert table is not None
    assert [row["refused"] for row in table.records] == [0, rounds, rounds - 1]
    assert [row["rounds"] for row in table.records] == [rounds, 0, 1]


def test_client_that_claims_too_many_examples_or_another_key_is_not_registered(
    tmp_path: Path,
) -> None:
    said: list[str] = []

    def claim(frame: Frame, client: int, round_: int) -> Frame:
        if client == 2 and round_ == 0 and len(said) < 1:
            said.append("claimed")
            return frame._replace(facts={**frame.facts, "examples": 10**12})
        return frame

    link = Direct(tmp_path / "state", claim)
    online = link.online
    seen: list[int] = []

    def sometimes() -> set[int]:
        seen.append(0)
        # The node comes back after its refusal, with an honest number.
        return online() if len(seen) != 3 else online() - {102}

    link.online = sometimes  # type: ignore[method-assign]
    deployed(link, specification("fedzmg", **{"protocol.rounds": 1}), tmp_path)
    assert "--max-examples" in (tmp_path / "home" / LOG).read_text()
    assert read_json(tmp_path / "run" / NODES)["refused"] == 1


def test_late_and_second_answers_and_lost_memory_are_counted_and_do_not_stop_a_round(
    tmp_path: Path,
) -> None:
    class Slow(Direct):
        """Client 1 answers round 2 during round 3; client 2 answers round 1 twice."""

        def pull(self, messages: Sequence[str]) -> list[Reply]:
            found = super().pull(messages)
            parts = [(r.node, r.frame.facts.get("round")) for r in found if r.frame]
            if (100, 3) not in parts and (101, 2) in parts:
                late = found.pop(parts.index((101, 2)))
                self._answers[late.message] = late
            return found + [found[i] for i, part in enumerate(parts) if part == (102, 1)]

    def damage(frame: Frame, client: int, round_: int) -> Frame:
        if (client, round_) == (0, 1):
            [file] = tmp_path.glob("state/*/0/memory-1.safetensors")
            file.write_bytes(file.read_bytes()[:-1] + b"\7")
        return frame

    spec = specification("scaffold", **{"protocol.cohort": 3, "protocol.rounds": 3})
    link, limits = Slow(tmp_path / "state", damage), Limits(deadline=0.3, min_replies=2)
    history = deployed(link, spec, tmp_path, limits)
    assert [record.clients for record in history.records] == [3, 2, 3]
    keys = ("rounds", "absent", "late", "refused", "lost")
    counts = [[node[key] for key in keys] for node in read_json(tmp_path / "run" / NODES)["nodes"]]
    assert counts == [[3, 0, 0, 0, 1], [2, 1, 1, 0, 0], [3, 0, 0, 1, 0]]


def test_codec_keeps_types_and_sends_whole_numbers_in_few_bytes() -> None:
    value = Upload(
        Tree({"a": torch.tensor([[-3, 127]], dtype=torch.int32), "b": torch.zeros(0, 2)}),
        average=(torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor([True, False])),
        total=torch.tensor([2**40]),
        each=torch.tensor([1e-300], dtype=torch.float64),
    )
    arrays = codec.encode(value)
    assert [arrays[name].dtype for name in (".delta['a']", ".total")] == ["int8", "int64"]
    like = value._replace(total=torch.zeros(1, dtype=torch.int64))
    found = codec.decode(arrays, like)
    for name, leaf in named_leaves(value).items():
        other = named_leaves(found)[name]
        assert other.dtype == leaf.dtype
        assert torch.equal(other, leaf)
    wrong = {**arrays, ".average[1]": Wire("bool", (2,), b"\1\2")}
    with pytest.raises(BadMessage, match="average"):
        codec.decode(wrong, value)
