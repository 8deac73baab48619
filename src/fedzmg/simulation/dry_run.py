"""Run one round of the rules alone before training, to report mistakes by rule and method.

Inside an engine, which maps, compiles and replays rules, a forgotten state would end in an error
about something else. Only the structure of returned values is checked.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fedzmg.algorithms.parts import sent_down
from fedzmg.contract import Rule, bind, chain
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext, Cohort, FullPass, Upload
from fedzmg.simulation.trial import PackedRule
from fedzmg.tree import Tree, leaves, row, tree_map


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


def _round(client: Any, server: Any, params: Tree) -> None:
    one = next(iter(params.values()))
    count = torch.ones((), dtype=torch.int64, device=one.device)
    grad = params.map(torch.ones_like)
    state = _state(server, "init", server.init(params))
    shared = _state(server, "share", server.share(state))
    memory = _state(client, "init_memory", client.init_memory(params))
    sent = _same(server, "send", server.send(params, state), params)
    known = {name: count for name in ("client", "key", "steps") if name in client.needs}
    if "label_counts" in client.needs:
        known["label_counts"] = count.expand(2)
    context = ClientContext(sent, shared, memory, count, count, **known)
    begin = _same(client, "start", client.start(context), params)
    full_pass: FullPass | tuple[()] = ()
    if client.full_pass != "never":
        full_pass = FullPass(one.sum(), grad if client.full_pass == "start" else Tree({}))
    scratch = _state(client, "begin", client.begin(context, full_pass))
    later = scratch
    for _ in range(client.gradients_per_step - 1):
        point = client.next_point(context, begin, later, grad)
        _, later = _same(client, "next_point", point, (params, scratch))
    stepped = client.step(context, begin, later, grad)
    moved, after = _same(client, "step", stepped, (params, scratch))
    if client.uses_epoch_end:
        ended = client.end_epoch(after, one.sum())
        proceed = ended[1] if isinstance(ended, tuple) and len(ended) == 2 else True
        after, _ = _same(client, "end_epoch", ended, (scratch, proceed))
    sent = client.finish(context, moved, after, count)
    upload = sent[0] if isinstance(sent, tuple) and len(sent) == 2 else ()
    travels = sent_down(server, params)
    wanted = upload._replace(delta=travels) if isinstance(upload, Upload) else Upload(travels)
    upload, _ = _same(client, "finish", sent, (wanted, memory))
    # Averages are floating point numbers whatever was uploaded.
    floats = tree_map(lambda leaf: leaf.to(one.dtype), upload)
    one_row = tree_map(lambda leaf: leaf[None], (floats.each, count > 0, count - 1))
    each, valid, clients = one_row
    cohort = Cohort(
        floats.delta, floats.average, floats.total, count, count, count, each, valid, clients, count
    )
    _same(server, "update", server.update(params, state, cohort), (params, state))


def _state(rule: Rule, method: str, value: Any) -> Any:
    """Return a state; reject anything else."""
    if all(isinstance(leaf, Tensor) for leaf in leaves(value)):
        return value
    raise InputError(
        f"{_name(rule)}.{method} returned {_describe(value)}: expected tensors, trees or tuples of "
        "them; () for nothing"
    )


def _same(rule: Rule, method: str, value: Any, wanted: Any) -> Any:
    """Return a value; reject one of another structure or with tensors of other shapes."""
    if _form(value) == _form(wanted):
        return value
    found, expected = _describe(value, wanted), _describe(wanted, value)
    raise InputError(f"{_name(rule)}.{method} returned {found}: expected {expected}")


def _form(value: Any) -> Any:
    """Reduce a value to ordered names and shapes; of the named tuples only uploads count."""
    if isinstance(value, Tree):
        return [(name, _form(leaf)) for name, leaf in value.items()]
    if isinstance(value, tuple):
        return isinstance(value, Upload), [_form(part) for part in value]
    return value.shape if isinstance(value, Tensor) else type(value)


def _describe(value: Any, other: Any = None) -> str:
    """Describe a value in few words: the parts of a tree that differ from another, or its names."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tree):
        known = dict(other) if isinstance(other, Tree) else dict(value)
        parts = [
            f"{name} = {_describe(leaf)}"
            for name, leaf in value.items()
            if name not in known or _form(leaf) != _form(known[name])
        ]
        parts = parts or [n for n, m in zip(value, known, strict=False) if n != m] or list(value)
        return f"a Tree of {', '.join(parts[:3])}{', ...' if len(parts) > 3 else ''}"
    if isinstance(value, tuple):
        others = [*(other if isinstance(other, tuple) else ()), *[None] * len(value)]
        inside = ", ".join(map(_describe, value, others))
        kind = "Upload" if isinstance(value, Upload) else ""
        return f"{kind}({inside}{',' if len(value) == 1 else ''})"
    plain = value is None or isinstance(value, bool)
    return repr(value) if plain else f"a {type(value).__name__}"


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
