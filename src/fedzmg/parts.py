"""Parts of a model: parameters that clients train together, alone, or not at all.

Buffers that change in training, such as running statistics, are not trained. Personal ones stay
with the client; all others travel and are averaged, whole numbers rounded to the nearest.
"""

import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import NamedTuple

from fedzmg.errors import InputError
from fedzmg.rule import Layout

ROLES = ("lora_A", "lora_B", "lora_base")  # patterns for all parameters of a role, if any
BATCH_NORM = "BatchNorm"  # layer type, in a layout, of all that normalises by batches
BUFFER = "buffer"  # layer type, in a layout, of other buffers that change in training
_LAYERS = re.compile(r"(first|last):([1-9]\d{0,5})")


class Split(NamedTuple):
    """Names of a model's parameters by part, each in the model's order."""

    shared: tuple[str, ...]
    personal: tuple[str, ...]
    frozen: tuple[str, ...]
    averaged: tuple[str, ...] = ()  # running statistics and other changing buffers that travel
    own: tuple[str, ...] = ()  # those of personal layers
    counts: tuple[str, ...] = ()  # those among ``averaged`` that are whole numbers


@dataclass(frozen=True)
class Parts:
    """Patterns of parameters that are not trained by all clients together.

    A pattern is a parameter's name with ``*`` and ``?``, ``first:N`` or ``last:N`` for layers,
    ``norm`` for normalisation layers, ``batch_norm`` for those with statistics of batches, or
    ``lora_A``, ``lora_B`` and ``lora_base`` for adapters' factors and adapted weights. Several may
    be given as a list or between commas.
    """

    personal: tuple[str, ...] = ()  # parameters that stay in a client's memory and never travel
    frozen: tuple[str, ...] = ()  # parameters that keep their initial values

    def __post_init__(self) -> None:
        for name in ("personal", "frozen"):
            value = getattr(self, name)
            given = value.split(",") if isinstance(value, str) else value
            if not isinstance(given, list | tuple) or not all(isinstance(p, str) for p in given):
                raise InputError(f"{name} = {value!r}: expected patterns such as 'last:1'")
            object.__setattr__(self, name, tuple(p.strip() for p in given if p.strip()))

    def options(self) -> dict[str, str]:
        """Return the patterns by key, such as ``{"parts.personal": "last:1"}``."""
        named = {f"parts.{field.name}": getattr(self, field.name) for field in fields(self)}
        return {key: ",".join(patterns) for key, patterns in named.items()} if self else {}

    def __bool__(self) -> bool:
        return bool(self.personal or self.frozen)

    def __or__(self, other: "Parts") -> "Parts":
        return Parts(self.personal + other.personal, self.frozen + other.frozen)

    def split(self, layout: Layout) -> Split:
        """Sort the parameters of a model into its parts."""
        both = self.personal, self.frozen
        personal, frozen = ({name for p in own for name in matches(p, layout)} for own in both)
        moving = {name for name, info in layout.items() if info.is_buffer}
        if twice := (personal & frozen) - moving:
            raise InputError(f"parameter {min(twice)!r} is personal and frozen: choose one")
        shared = tuple(n for n in layout if n not in personal | frozen | moving)
        if not shared:
            given = ", ".join((*self.personal, *self.frozen))
            alone = "'ditto' with client.lam = 0 trains clients alone"
            raise InputError(f"parts {given} leave no parameter to share: name fewer; {alone}")
        counts = {n for n in moving - personal if layout[n].role == "counts"}
        rest = personal - moving, frozen - moving, moving - personal, moving & personal, counts
        return Split(shared, *(tuple(n for n in layout if n in part) for part in rest))


def matches(pattern: str, layout: Layout) -> list[str]:
    """Return the parameters that a pattern names."""
    if found := _LAYERS.fullmatch(pattern):
        known = (name for name, info in layout.items() if info.layer != BUFFER)
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in known))
        number = int(found[2])
        chosen = layers[:number] if found[1] == "first" else layers[-number:]
        return [name for name in layout if name.rpartition(".")[0] in chosen]
    if pattern in ROLES:
        return [name for name, info in layout.items() if info.role == pattern]
    if pattern == "norm":
        return [n for n, i in layout.items() if i.role == "norm" or i.layer == BATCH_NORM]
    if pattern == "batch_norm":
        if names := [name for name, info in layout.items() if info.layer == BATCH_NORM]:
            return names
        raise InputError(f"part {pattern!r}: the model has no BatchNorm layer; use fedavg")
    names = [name for name in layout if fnmatchcase(name, pattern)]
    if not names:
        some = ", ".join(list(layout)[:4]) + ", ..." * (len(layout) > 4)
        wanted = f"first:N, last:N, norm, batch_norm or a pattern of {some}"
        raise InputError(f"part {pattern!r} matches no parameter: expected {wanted}")
    return names
