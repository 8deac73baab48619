"""Errors that users can cause, and suggestions of the nearest name."""

import contextlib
import difflib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from fedzmg.plain_text import plain


class InputError(ValueError):
    """Input that cannot be used, in one line with a remedy; the command line exits with code 2."""

    def __str__(self) -> str:
        """Return the message without control characters, also in a traceback."""
        return plain(super().__str__())


class UserCodeError(InputError):
    """A user's own function that raised; the cause has its traceback, which is shown as well."""


class CannotMap(InputError):
    """A model or loss that does not map over clients; ``engine="auto"`` then trains in a loop."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after ``done`` of ``rounds`` rounds; ``kept``: the same call continues from files."""

    def __init__(self, done: int, rounds: int, *, kept: bool = True) -> None:
        remedy = "nothing is lost, make the same call again to continue"
        if not kept:
            remedy = "nothing was kept: no out= was given"
        super().__init__(f"interrupted after round {done} of {rounds}; {remedy}")
        self.done, self.rounds = done, rounds


@contextlib.contextmanager
def noted(where: Callable[[], str]) -> Iterator[None]:
    """Note on any error, which may be one of the user's own code, where it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(where())
        raise


_MOST_NAMED = 8
_LONGEST_VALUE = 200
LONGEST_TEXT = 100  # longest name or label, in characters


def check_text(what: str, text: str) -> None:
    """Refuse a name or label that a table, a figure or a terminal cannot show in one line."""
    if not text.strip() or len(text) > LONGEST_TEXT:
        raise InputError(f"{what} = {text[:LONGEST_TEXT]!r}: expected 1 to {LONGEST_TEXT} letters")
    if any(unicodedata.category(c) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp") for c in text):
        raise InputError(f"{what} = {text!r}: expected one line without control characters")


def brief(value: object) -> str:
    """Format a wrong value for a message; the middle of a long one is left out."""
    text, half = repr(value), _LONGEST_VALUE // 2
    return text if len(text) <= _LONGEST_VALUE else f"{text[:half]} ... {text[-half:]}"


_OTHER_WORDS = {
    "lr": "learning_rate eta step_size stepsize local_lr",
    "rounds": "num_rounds n_rounds comm_rounds global_rounds global_epochs",
    "cohort": "fraction_fit clients_per_round min_fit_clients join_ratio participation_rate "
    "sample_rate num_sampled_clients frac num_clients n_clients num_users n_parties",
    "clients": "num_clients n_clients num_users n_parties num_partitions",
    "epochs": "local_epochs num_epochs n_epochs local_ep epochs_per_round num_local_epochs",
    "batch_size": "local_batch_size train_batch_size batchsize local_bs bs",
    "eval_every": "eval_interval eval_gap evaluate_every test_every test_interval",
    "decay": "weight_decay wd l2", "mu": "proximal_mu prox_mu", "seed": "random_state",
    "accuracy": "acc top1", "fedavg": "fedsgd localsgd local_sgd", "fedadam": "fedopt",
}  # fmt: skip
"""Words of other frameworks for our options."""


def unknown(kind: str, name: str, known: Iterable[str], *commands: str) -> InputError:
    """Return an error with the nearest ``known`` names; ``commands`` show all of this ``kind``."""
    names = sorted(set(known))
    close = _close(name, names)
    hint = f": did you mean {listed(map(repr, close), 'or')}?" if close else ""
    more = len(names) - _MOST_NAMED
    tail = f" and {more} more" if more > 0 else ""
    rest = f" (known: {', '.join(names[:_MOST_NAMED])}{tail})"
    if commands and (close or more > 0):
        verb = "show" if len(commands) > 1 else "shows"
        rest = f" ({listed(map(repr, commands))} {verb} all)"
    elif close and more > 0:
        rest = ""
    return InputError(f"unknown {kind} {name!r}{hint}{rest}")


def check_names(kind: str, names: Iterable[Any], known: Collection[Any], *commands: str) -> None:
    """Refuse the first name that is unknown; ``commands`` show all of this ``kind``."""
    for name in names:
        if name not in known:
            raise unknown(kind, str(name), known, *commands)


def listed(words: Iterable[str], last: str = "and") -> str:
    """Join words as in a sentence."""
    *some, final = words
    return f" {last} ".join(filter(None, [", ".join(some), final]))


def _close(name: str, names: list[str]) -> list[str]:
    table, _, last = name.lower().rpartition(".")
    same = {last, *(ours for ours, words in _OTHER_WORDS.items() if last in words.split())}
    # "cohort" means "protocol.cohort".
    ends = [found for found in names if found.rpartition(".")[2].lower() in same]
    # Compare without the common prefix, which would make all names of a table similar.
    inside = {n.rpartition(".")[2].lower(): n for n in names if n.startswith(f"{table}.")}
    known = inside if table and inside else {n.lower(): n for n in names}
    given = last if known is inside else name.lower()
    return ends or [known[n] for n in difflib.get_close_matches(given, known, n=1, cutoff=0.5)]
