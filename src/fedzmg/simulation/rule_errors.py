"""Names of the rule, method, file and line behind a mistake, and values in few words."""

import inspect
import os
from types import TracebackType
from typing import Any

from torch import Tensor

from fedzmg.contract import Rule, chain
from fedzmg.errors import unknown
from fedzmg.messages import Asked, Upload
from fedzmg.tree import Tree


def form(value: Any) -> Any:
    """Reduce a value to ordered names and shapes; of the named tuples only uploads count."""
    if isinstance(value, Tree):
        return [(name, form(leaf)) for name, leaf in value.items()]
    if isinstance(value, tuple):
        return isinstance(value, Upload), [form(part) for part in value]
    return value.shape if isinstance(value, Tensor) else type(value)


def describe(value: Any, other: Any = None) -> str:
    """Describe a value in few words: the parts of a tree that differ from another, or its names."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tree):
        known = dict(other) if isinstance(other, Tree) else dict(value)
        parts = [
            f"{name} = {describe(leaf)}"
            for name, leaf in value.items()
            if name not in known or form(leaf) != form(known[name])
        ]
        parts = parts or [n for n, m in zip(value, known, strict=False) if n != m] or list(value)
        return f"a Tree of {', '.join(parts[:3])}{', ...' if len(parts) > 3 else ''}"
    if isinstance(value, tuple):
        others = [*(other if isinstance(other, tuple) else ()), *[None] * len(value)]
        inside = ", ".join(map(describe, value, others))
        kind = "Upload" if isinstance(value, Upload) else ""
        return f"{kind}({inside}{',' if len(value) == 1 else ''})"
    plain = value is None or isinstance(value, bool)
    return repr(value) if plain else f"a {type(value).__name__}"


def is_foreign(rule: Rule) -> bool:
    """Return true for a rule from outside this package."""
    return not type(rule).__module__.startswith("fedzmg.")


def culprit(rule: Rule) -> Rule:
    """Return the outermost user rule of a chain; the rule itself if there is none."""
    return next(filter(is_foreign, chain(rule)), rule)


def where(rule: Rule, method: str) -> str:
    """Name a user rule's method with file and line; a built-in rule's without."""
    kind = type(culprit(rule))
    name = f"{kind.__name__}.{method}"
    code = getattr(vars(kind).get(method), "__code__", None)
    if code is not None:
        file, line = code.co_filename, code.co_firstlineno
    else:  # an inherited method
        try:
            file, line = inspect.getfile(kind), inspect.getsourcelines(kind)[1]
        except (OSError, TypeError):  # written at a prompt
            return name
    return f"{_short(file)}:{line}: {name}" if is_foreign(culprit(rule)) else name


def _short(file: str) -> str:
    """Return a path as seen from the current directory if it is inside."""
    inside = os.path.relpath(file) if os.path.exists(file) else file
    return file if inside.startswith(os.pardir) else inside


def failing_method(trace: TracebackType | None) -> str | None:
    """Name the rule's method and line of an error, a user's innermost one first; None: no rule."""
    found: dict[bool, str] = {}
    while trace is not None:
        rule, code = trace.tb_frame.f_locals.get("self"), trace.tb_frame.f_code
        if isinstance(rule, Rule):
            user = culprit(rule)
            name = f"{type(user).__name__}.{code.co_name}"
            own = is_foreign(user) and user is rule
            place = f"{_short(code.co_filename)}:{trace.tb_lineno}: " if own else ""
            found[is_foreign(rule)] = f"{place}{name}"
        trace = trace.tb_next
    return found.get(True, found.get(False))


def reason(error: Exception) -> str:
    """Describe an error of a rule in one line, with a remedy where one is known."""
    message = (str(error).splitlines() or [""])[0]
    if "data-dependent control flow" in message or ".item()" in message:
        return (
            "the numbers of a rule are tensors without a value while it is mapped over clients: "
            "use them in arithmetic and choose with torch.where, not with if, float() or item()"
        )
    if isinstance(error, AttributeError) and error.name is not None:
        if error.obj == () and error.name in Asked._fields:
            return f"there is no {error.name} here: add needs = frozenset({{{error.name!r}}})"
        if fields := getattr(error.obj, "_fields", ()):
            return str(unknown(f"field of {type(error.obj).__name__}", error.name, fields))
    return f"{type(error).__name__}: {message}"
