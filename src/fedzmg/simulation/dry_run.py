"""Run one round of the rules alone before training, to report mistakes by rule and method.

Inside an engine, which maps, compiles and replays rules, a forgotten state would end in an error
about something else. Only the structure of returned values is checked.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fedzmg.contract import (
    ClientContext,
    ClientRule,
    Cohort,
    FullPass,
    Rule,
    ServerRule,
    Upload,
    bind,
    chain,
)
from fedzmg.errors import InputError
from fedzmg.simulation.trial import PackedRule
from fedzmg.tree import Tree, leaves, row, tree_map

PAIRS = {
    "step": "the parameters and the state after the step, (params, scratch)",
    "end_epoch": "the state and whether to continue, (scratch, True)",
    "finish": "an upload and the memory, (Upload(context.params - params), context.memory)",
    "update": "the next model and the next state of the server, (params, state)",
}
"""Return values of methods that return two things."""


def dry_run(clients: PackedRule, servers: PackedRule, models: Tree) -> None:
    """Run one step and the end of a round with the first trial's rules, on gradients of one."""

    def once(client: dict[str, Tensor], server: dict[str, Tensor], params: Tree) -> tuple[()]:
        _round(bind(clients.rule, client), bind(servers.rule, server), params)
        return ()

    first = row((clients.numbers, servers.numbers, models), slice(0, 1))
    try:
        # Mapped, as in an engine: numbers have no value there that Python could branch on.
        with torch.no_grad():
            torch.vmap(once)(*first)
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        where = _failing_method(error.__traceback__)
        if where is None:
            raise
        raise InputError(f"{where}: {_reason(error)}") from error


def _round(client: ClientRule, server: ServerRule, params: Tree) -> None:
    one = next(iter(params.values()))
    count = torch.ones((), dtype=torch.int64, device=one.device)
    grad = params.map(torch.ones_like)
    state = _state(server, "init", server.init(params))
    shared = _state(server, "share", server.share(state))
    memory = _state(client, "init_memory", client.init_memory(params))
    context = ClientContext(params, shared, memory, count, count)
    full_pass: FullPass | tuple[()] = ()
    if client.full_pass != "never":
        full_pass = FullPass(one.sum(), grad if client.full_pass == "start" else Tree({}))
    scratch = _state(client, "begin", client.begin(context, full_pass))
    moved, after = _pair(client, "step", client.step(context, params, scratch, grad))
    _same(client, "step", "parameters", moved, "given", params)
    _same(client, "step", "state", after, "begin gave", scratch)
    if client.uses_epoch_end:
        after, _ = _pair(client, "end_epoch", client.end_epoch(after, one.sum()))
        _same(client, "end_epoch", "state", after, "begin gave", scratch)
    upload, kept = _pair(client, "finish", client.finish(context, moved, after, count))
    if not isinstance(upload, Upload):
        raise InputError(
            f"{_name(client)}.finish returned {_describe(upload)}: return {PAIRS['finish']}"
        )
    _same(client, "finish", "delta", upload.delta, "given", params)
    _same(client, "finish", "memory", kept, "init_memory gave", memory)
    # Averages are floating point numbers whatever was uploaded.
    floats = tree_map(lambda leaf: leaf.to(one.dtype), upload)
    cohort = Cohort(floats.delta, floats.average, floats.total, count, count, count)
    new, last = _pair(server, "update", server.update(params, state, cohort))
    _same(server, "update", "model", new, "given", params)
    _same(server, "update", "state", last, "init gave", state)


def _state(rule: Rule, method: str, value: Any) -> Any:
    """Return a state; reject anything else."""
    for leaf in leaves(value):
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"{_name(rule)}.{method} returned {_describe(value)}: return tensors, trees or "
                "tuples of them; () for nothing"
            )
    return value


def _pair(rule: Rule, method: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise InputError(
            f"{_name(rule)}.{method} returned {_describe(value)}: return {PAIRS[method]}"
        )
    return value[0], value[1]


def _same(rule: Rule, method: str, what: str, new: Any, source: str, old: Any) -> None:
    """Reject a value of another structure or with tensors of other shapes."""
    if _form(new) != _form(old):
        raise InputError(
            f"{_name(rule)}.{method} returned {_describe(new)} as {what}: expected the form of "
            f"what {'it was given' if source == 'given' else source}, {_describe(old)}"
        )


def _form(value: Any) -> Any:
    """Reduce a value to names and shapes; plain and named tuples are equal."""
    if isinstance(value, Tree):
        return {name: leaf.shape for name, leaf in value.items()}
    if isinstance(value, tuple):
        return [_form(part) for part in value]
    return value.shape if isinstance(value, Tensor) else type(value)


def _describe(value: Any) -> str:
    """Describe a value in few words: trees by their names, tensors by their shapes."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tree):
        names = list(value)
        return f"a Tree of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))}{',' if len(value) == 1 else ''})"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_foreign(rule: Rule) -> bool:
    return not type(rule).__module__.startswith("fedzmg.")


def _name(rule: Rule) -> str:
    """Name the outermost user rule of a chain; the rule itself if there is none."""
    return type(next(filter(_is_foreign, chain(rule)), rule)).__name__


def _failing_method(trace: TracebackType | None) -> str | None:
    """Name the rule's method in which an error arose; None: it was in none.

    The innermost method of a user rule wins: built-in rules fail on values that it returned.
    """
    found: dict[bool, str] = {}
    while trace is not None:
        rule = trace.tb_frame.f_locals.get("self")
        if isinstance(rule, Rule):
            found[_is_foreign(rule)] = f"{_name(rule)}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return found.get(True, found.get(False))


def _reason(error: Exception) -> str:
    message = (str(error).splitlines() or [""])[0]
    if "data-dependent control flow" in message or ".item()" in message:
        return (
            "the numbers of a rule are tensors without a value while it is mapped over clients: "
            "use them in arithmetic and choose with torch.where, not with if, float() or item()"
        )
    return f"{type(error).__name__}: {message}"
