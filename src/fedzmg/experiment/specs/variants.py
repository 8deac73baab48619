"""Algorithms that a call or a command names, as the tables of a study or grid."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedzmg import algorithms as registry
from fedzmg.algorithms import ALGORITHMS
from fedzmg.algorithms.options import known_options
from fedzmg.contract import Algorithm, AlgorithmInfo
from fedzmg.errors import InputError, brief, unknown
from fedzmg.experiment.specs.run import SIDES, by_side

EXAMPLE = '["fedavg", my_algorithm] or {"heavy": ("fedavg", {"client.momentum": 0.9})}'
Chosen = Algorithm | AlgorithmInfo | str  # an algorithm, or the name of one
Algorithms = Chosen | Sequence[Chosen] | Mapping[str, Chosen | tuple[Chosen, Mapping[str, Any]]]
"""Algorithms of a comparison: names and objects, or variants by names of your own."""


class NamedAlgorithms(NamedTuple):
    """Algorithms as a study or grid has them, and those that only the caller knows."""

    table: dict[str, dict[str, Any]]  # options by name, as in a file
    objects: dict[str, Algorithm | AlgorithmInfo]
    """Algorithms that were passed as objects, by the name they have in this call."""


def named_algorithms(given: Any) -> NamedAlgorithms:
    """Return algorithms by name: of a text, a list, or a mapping with variants."""
    if isinstance(given, str):
        given = algorithm_names(given)
    elif isinstance(given, Algorithm | AlgorithmInfo):
        given = [given]
    if isinstance(given, Mapping):
        pairs = [(name, *_base_and_options(name, value)) for name, value in given.items()]
    elif isinstance(given, Sequence):
        pairs = [(_name(value), value, {}) for value in given]
    else:
        raise InputError(f"algorithms = {brief(given)}: expected names, {EXAMPLE}")
    found = NamedAlgorithms({}, {})
    for name, base, options in pairs:
        if not isinstance(name, str) or name in found.table:
            raise InputError(f"algorithms: {name!r}: expected names, each once")
        if not isinstance(base, str):
            known, algorithm = ALGORITHMS.data.get(name), getattr(base, "algorithm", base)
            if known is not None and known.algorithm == algorithm:
                # An object keeps its numbers; a name would start from those of the task.
                options = {**algorithm.options(), **options}
            else:
                # Known by the name that the caller gives it.
                found.objects[name] = base
        of = {"algorithm": base} if isinstance(base, str) and base != name else {}
        weights = {"weights": options["weights"]} if "weights" in options else {}
        found.table[name] = {**of, **weights, **{k: v for k, v in by_side(options).items() if v}}
    return found


def _name(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, AlgorithmInfo):
        return value.algorithm.name
    if isinstance(value, Algorithm):
        return value.name
    raise InputError(f"algorithms: {brief(value)}: expected {EXAMPLE}")


def _base_and_options(name: str, value: Any) -> tuple[Any, Mapping[str, Any]]:
    base, options = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    _name(base)
    if not isinstance(options, Mapping):
        raise InputError(f"algorithms, {name}: {brief(options)}: expected options, {EXAMPLE}")
    for key in options:
        if key != "weights" and str(key).partition(".")[0] not in SIDES:
            known = known_options(registry.get(base)) if isinstance(base, str) else ()
            raise unknown(f"option of {name}", str(key), known)
    return base, options


def algorithm_names(given: str) -> list[str]:
    """Return comma-separated names of algorithms; ``all`` means every one."""
    names = [name.strip() for name in given.split(",")]
    if "" in names:
        raise InputError(f"algorithms = {given!r}: a name is empty, remove a comma")
    return list(ALGORITHMS) if names == ["all"] else names
