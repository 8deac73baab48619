"""Copies of modules whose functions and hooks use the copy."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterable
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedzmg.errors import InputError

ModuleT = TypeVar("ModuleT", bound=nn.Module)
PARAMETER_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_PARTS = ("_parameters", "_buffers", "_modules")


def copy_module(module: ModuleT, shared: Iterable[nn.Parameter] = ()) -> ModuleT:
    """Copy a module, but not the ``shared`` parameters.

    ``copy.deepcopy`` leaves out the hooks of parameters, and functions that a module holds would
    go on using the original. Tensors that it has computed from parameters become constants.
    """
    memo: dict[int, Any] = {id(p): p for p in shared}
    held = (value for child in module.modules() for value in vars(child).values())
    for value in held:
        for t in value if isinstance(value, list | tuple) else (value,):
            if isinstance(t, Tensor) and not t.is_leaf:
                memo[id(t)] = t.detach().clone()
    try:
        made = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        problem = f"the model cannot be copied ({str(error).splitlines()[0]})"
        raise InputError(f"{problem}: keep only parameters and plain values in it") from error
    for child in made.modules():
        own = {name: value for name, value in vars(child).items() if name not in _PARTS}
        vars(child).update({name: _following(value, memo) for name, value in own.items()})
    for p in module.parameters():
        for table, register in PARAMETER_HOOKS.items() if memo[id(p)] is not p else ():
            for hook in (getattr(p, table) or {}).values():
                getattr(memo[id(p)], register)(_following(hook, memo))
    return made


def _following(value: Any, memo: dict[int, Any]) -> Any:
    """Exchange what was copied for its copy, also inside of functions and collections."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _twin(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _following(value.__self__, memo))
    if isinstance(value, functools.partial):
        function, args, named = _following((value.func, value.args, value.keywords), memo)
        return functools.partial(function, *args, **named)
    parts: Any = None
    if type(value) in (dict, OrderedDict):
        parts = {key: _following(part, memo) for key, part in value.items()}
        same = all(parts[key] is part for key, part in value.items())
    elif type(value) in (list, tuple):
        parts = [_following(part, memo) for part in value]
        same = all(new is part for new, part in zip(parts, value, strict=True))
    return value if parts is None or same else type(value)(parts)


def _twin(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    memo[id(function)] = function  # it may use itself
    before = function.__closure__ or ()
    cells = tuple(_cell(cell, memo) for cell in before)
    given = function.__defaults__, function.__kwdefaults__
    defaults = _following(given, memo)
    if defaults is given and all(new is cell for new, cell in zip(cells, before, strict=True)):
        return function
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    made.__defaults__, made.__kwdefaults__ = defaults
    made.__qualname__, made.__dict__ = function.__qualname__, {**function.__dict__}
    memo[id(function)] = made
    return made


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """Share a variable of a function unless it holds something that was copied."""
    try:
        held = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    found = _following(held, memo)
    return cell if found is held else CellType(found)


def module_to(module: ModuleT, device: torch.device, dtype: torch.dtype) -> ModuleT:
    """Copy a module to a device; floating point tensors, plain attributes too, become ``dtype``."""

    def converted(t: Tensor) -> Tensor:
        real = dtype if t.is_floating_point() else t.dtype
        return t.to(device, dtype.to_complex() if t.is_complex() else real)

    moved = copy_module(module)
    moved._apply(converted)  # type: ignore[no-untyped-call]
    for child in moved.modules():
        plain = {name: value for name, value in vars(child).items() if isinstance(value, Tensor)}
        vars(child).update({name: converted(value) for name, value in plain.items()})
    return moved
