"""Run one round of the rules alone before training, to report mistakes by file, rule and method.

Inside an engine, which maps, compiles and replays rules, a forgotten state would give an unrelated
error. Methods are mapped here, too, so a Python branch on a number fails.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedzmg.contract import Aggregator, ClientRule, Rule, ServerRule, bind, chain
from fedzmg.errors import InputError
from fedzmg.messages import Asked, ClientContext, Cohort, FullPass, Rows, Upload
from fedzmg.models.keyed import generator_states
from fedzmg.simulation import rule_errors
from fedzmg.simulation.rule_errors import describe, form, reason, where
from fedzmg.simulation.trial import PackedRule
from fedzmg.tree import Tree, leaves, row, tree_map, vmap
from fedzmg.wrappers.parts import travelling

EXAMPLES, SIZE, POPULATION = 10, 3, 7  # examples of a client; clients of a cohort, and all
_MODERATE = 1e4  # numbers up to this size must not give NaN; larger ones may
_Check: TypeAlias = Callable[[Rule, str, Any, tuple[Any, ...]], Any]


class Returned(NamedTuple):
    """Value that a method of a rule returned, one row per trial."""

    rule: Rule
    method: str
    value: Any


def dry_run(
    clients: PackedRule, servers: PackedRule, models: Tree, aggregators: PackedRule | None = None
) -> None:
    """Run one step and the end of a round with the first trial's rules, on gradients of one.

    A user's rules run method by method and twice, to check that they are pure functions. Rules of
    this package are tested for that.
    """
    given = [clients, servers, *([] if aggregators is None else [aggregators])]
    packed = [p._replace(numbers=row(p.numbers, slice(0, 1))) for p in given]
    first = row(models, slice(0, 1))
    if any(rule_errors.is_foreign(rule) for p in packed for rule in chain(p.rule)):
        check_pure(packed, first)
        return

    def once(numbers: list[dict[str, Tensor]], params: Tree) -> tuple[()]:
        bound = [bind(p.rule, values) for p, values in zip(packed, numbers, strict=True)]
        _round(_call, bound, params, 1.0, ())
        return ()

    with torch.no_grad(), _named_errors():
        vmap(once)([p.numbers for p in packed], first)


def check_pure(packed: Sequence[PackedRule], models: Tree, grad: float = 1.0) -> None:
    """Reject rules that change their arguments, draw random numbers or return NaN."""
    calls = [rehearse(packed, models, grad) for _ in range(2)]
    for one, two in zip(*calls, strict=True):
        if not same(one.value, two.value):
            problem = f"{where(one.rule, one.method)} returned different values"
            remedy = "compute with arguments and fields alone, and return all state"
            raise InputError(f"{problem} for the same arguments: {remedy}")


def same(one: Any, two: Any) -> bool:
    """Compare tensors bit for bit; NaN equals itself."""
    pairs = zip(leaves(one), leaves(two), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def rehearse(packed: Sequence[PackedRule], models: Tree, grad: float = 1.0) -> list[Returned]:
    """Map every method of a round on gradients of ``grad``, and return the checked values."""
    calls: list[Returned] = []
    rows = torch.zeros(len(next(iter(models.values()))))

    def call(packed: PackedRule, method: str, check: _Check, *args: Any) -> Any:
        before = _versions(args), generator_states()
        with _named_errors():
            # Numbers give the map an axis even if all other arguments are empty.
            value = packed.map(lambda rule, _, *a: _call(rule, method, check, *a), rows, *args)
        _check_call(packed, method, args, value, before)
        calls.append(Returned(packed.rule, method, value))
        return value

    _round(call, packed, models, grad, rows.shape)
    return calls


def _call(rule: Any, method: str, check: _Check, *args: Any) -> Any:
    return check(rule, method, getattr(rule, method)(*args), args)


def _round(
    call: Callable[..., Any], rules: Sequence[Any], params: Tree, grad: float, rows: tuple[int, ...]
) -> None:
    """Call every method of a round; ``rows`` is the shape of a number."""
    client, server, *aggregators = rules
    mine, theirs, *others = (r.rule if isinstance(r, PackedRule) else r for r in rules)
    some = next(iter(params.values()))

    def count(value: int, *shape: int) -> Tensor:
        return torch.full((*rows, *shape), value, dtype=torch.int64, device=some.device)

    one, loss = count(1), some.new_full(rows, grad)
    grads = params.map(lambda leaf: torch.full_like(leaf, grad))
    state = call(server, "init", _state, params)
    shared = call(server, "share", _state, state)
    memory = call(client, "init_memory", _state, params)
    sent = call(server, "send", _like(itemgetter(0)), params, state)
    known = {name: one for name in ("client", "key", "steps") if name in mine.needs}
    if "label_counts" in mine.needs:
        known["label_counts"] = count(EXAMPLES // 2, 2)
    asked = Asked(**known) if known else ()
    context = ClientContext(sent, shared, memory, one, count(EXAMPLES), asked)
    begin = call(client, "start", _like(lambda args: args[0].params), context)
    full_pass: FullPass | tuple[()] = ()
    if mine.full_pass != "never":
        full_pass = FullPass(loss, grads if mine.full_pass == "start" else Tree({}))
    later = call(client, "begin", _state, context, full_pass)
    stepped = _like(itemgetter(slice(1, 3)))
    for _ in range(mine.gradients_per_step - 1):
        _, later = call(client, "next_point", stepped, context, begin, later, grads)
    moved, after = call(client, "step", stepped, context, begin, later, grads)
    if mine.uses_epoch_end:
        after, _ = call(client, "end_epoch", _ended, after, loss)
    upload, kept = call(client, "finish", _sent, context, moved, after, one)
    if mine.is_personal:
        call(client, "personal_model", _like(itemgetter(0)), params, kept)
    # A cohort of one client.
    weights = torch.ones((*rows, 1), dtype=torch.float64, device=some.device)
    for aggregator, merging in zip(aggregators, others, strict=True):
        both = [type(rule_errors.culprit(rule)).__name__ for rule in (mine, merging)]
        for name in ("average", "total", "each", "weight"):
            if leaves(getattr(upload, name)):
                problem = f"{both[1]} cannot merge the {name} that {both[0]} uploads"
                raise InputError(f"{problem}: leave federation.aggregator out")
        number = max(merging.fewest, SIZE)
        flat = torch.cat([leaf.reshape(*rows, 1, -1) for leaf in upload.delta.values()], -1)
        given = Rows(torch.cat([flat] * number, -2), torch.cat([weights] * number, -1))
        merged = _like(lambda args: (args[0].deltas[0], args[1]))
        call(aggregator, "aggregate", merged, given, call(aggregator, "init", _state, upload.delta))
    if theirs.own_weights:
        call(server, "weigh", _like(itemgetter(2)), state, count(0, 1), weights)
    # Averages are floating point numbers whatever was uploaded.
    floats = tree_map(lambda leaf: leaf.to(some.dtype), upload)
    named = "client" in theirs.needs
    cohort = Cohort(
        *(floats.delta, floats.average, floats.total, count(SIZE), count(POPULATION), one),
        each=tree_map(lambda leaf: leaf.unsqueeze(len(rows)), upload.each),
        valid=count(1, 1) > 0 if leaves(upload.each) or named else (),
        clients=count(0, 1) if named else (),
        key=one if "key" in theirs.needs else (),
    )
    call(server, "update", _like(itemgetter(slice(2))), params, state, cohort)


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Name the rule, the method and the line of an error in a rule."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        place = rule_errors.failing_method(error.__traceback__)
        if place is None:
            raise
        if "random operation" in str(error):
            raise InputError(_randomness(place, "torch")) from error
        hint = "; return all values, such as (params, scratch)" * ("to unpack" in str(error))
        raise InputError(f"{place}: {reason(error)}{hint}") from error


def _versions(args: Any) -> list[list[int]]:
    return [[leaf._version for leaf in leaves(arg)] for arg in args]


def _check_call(packed: PackedRule, method: str, args: Any, value: Any, before: Any) -> None:
    """Reject changed arguments, used random generators, and NaN from moderate numbers."""
    rule = packed.rule
    base = next(kind for kind in (ClientRule, ServerRule, Aggregator) if isinstance(rule, kind))
    names = list(inspect.signature(getattr(base, method)).parameters)[1:]
    if changed := [n for n, a, b in zip(names, before[0], _versions(args), strict=True) if a != b]:
        problem = f"{where(rule, method)} changed its argument {changed[0]} in place"
        raise InputError(f"{problem}: return new tensors, without add_ and assignments to elements")
    for owner, state in generator_states().items():
        if state != before[1][owner]:
            raise InputError(_randomness(where(rule, method), owner))
    results = value[0] if method in ("step", "finish", "update") else ()
    # The sum of a tensor is finite only if its elements are.
    finite = all(math.isfinite(float(leaf.sum())) for leaf in leaves(results))
    if finite and not any(bool(leaf.isnan().any()) for leaf in leaves(value)):
        return
    if all(float(leaf.abs().max()) < _MODERATE for leaf in leaves((args, packed.numbers))):
        problem = f"{where(rule, method)} returned NaN or infinity for finite arguments"
        raise InputError(f"{problem}: look for a division by zero or the root of a negative number")


def _randomness(place: str, owner: str) -> str:
    return (
        f"{place} uses the random generator of {owner}, whose numbers depend on the order of "
        "clients: add 'key' to `needs` and draw with fedzmg.draw from context.key"
    )


def _state(rule: Rule, method: str, value: Any, _: Any) -> Any:
    """Return a state; reject any other value."""
    if all(isinstance(leaf, Tensor) for leaf in leaves(value)):
        return value
    wanted = "tensors, trees or tuples of them; () for nothing"
    raise InputError(f"{where(rule, method)} returned {describe(value)}: expected {wanted}")


def _like(wanted: Callable[[Any], Any]) -> _Check:
    """Build a check that a value has the form of some arguments."""
    return lambda rule, method, value, args: _same(rule, method, value, wanted(args))


def _ended(rule: Rule, method: str, value: Any, args: Any) -> Any:
    proceed = value[1] if isinstance(value, tuple) and len(value) == 2 else True
    scratch, proceed = _same(rule, method, value, (args[0], proceed))
    return scratch, torch.as_tensor(proceed)


def _sent(rule: Rule, method: str, value: Any, args: Any) -> Any:
    context = args[0]
    upload = value[0] if isinstance(value, tuple) and len(value) == 2 else ()
    travels = travelling(rule, context.params)
    wanted = upload._replace(delta=travels) if isinstance(upload, Upload) else Upload(travels)
    if isinstance(upload, Upload) and leaves(upload.weight):
        wanted = wanted._replace(weight=context.round)
    _same(rule, method, value, (wanted, context.memory))
    _state(rule, method, upload[1:], ())
    return value


def _same(rule: Rule, method: str, value: Any, wanted: Any) -> Any:
    """Return a value; reject one of another structure or with tensors of other shapes."""
    if form(value) == form(wanted):
        return value
    found, expected = describe(value, wanted), describe(wanted, value)
    raise InputError(f"{where(rule, method)} returned {found}: expected {expected}")
