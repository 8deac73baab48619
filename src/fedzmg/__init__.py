"""fedzmg: train, compare and deploy federated algorithms.

>>> import fedzmg
>>> task = fedzmg.tasks.get("digits")
>>> [history] = fedzmg.simulate(task, [fedzmg.Trial.of("fedzmg", seed=0)], rounds=1)
>>> history.rounds
[1]
"""

from importlib import import_module

from fedzmg.version import __version__

TYPE_CHECKING = False  # typing itself is not loaded before a command can answer to Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    import fedzmg.testing as testing
    import fedzmg.trackers as trackers
    from fedzmg import aggregators, algorithms, data, diagnose, draw, metrics, models, optim, tasks
    from fedzmg.api import compare, register, tune
    from fedzmg.contract import Aggregator, Algorithm, ClientRule, ServerRule
    from fedzmg.errors import InputError
    from fedzmg.evaluation import ACCURACY, Metric
    from fedzmg.experiment.grids.grid import Tuned
    from fedzmg.experiment.verify import verify
    from fedzmg.federation import Federation
    from fedzmg.participation import Participation
    from fedzmg.parts import Parts
    from fedzmg.results.study_result import StudyResult
    from fedzmg.simulation import History, Trial, simulate
    from fedzmg.tasks.protocol import Protocol
    from fedzmg.tasks.task import Task
    from fedzmg.tree import Tree

__all__ = [
    "ACCURACY", "Aggregator", "Algorithm", "ClientRule", "Federation", "History", "InputError",
    "Metric", "Participation", "Parts", "Protocol", "ServerRule", "StudyResult", "Task", "Tree",
    "Trial", "Tuned", "__version__", "aggregators", "algorithms", "compare", "data", "diagnose",
    "draw", "metrics", "models", "optim", "register", "simulate", "tasks", "testing", "trackers",
    "tune", "verify",
]  # fmt: skip

_MODULES = {
    "ACCURACY": "evaluation", "Aggregator": "contract", "Algorithm": "contract",
    "ClientRule": "contract", "Federation": "federation", "History": "simulation",
    "InputError": "errors", "Metric": "evaluation", "Participation": "participation",
    "Parts": "parts", "Protocol": "tasks.protocol", "ServerRule": "contract",
    "StudyResult": "results.study_result", "Task": "tasks.task", "Tree": "tree",
    "Trial": "simulation", "Tuned": "experiment.grids.grid", "compare": "api",
    "register": "api", "simulate": "simulation", "tune": "api", "verify": "experiment.verify",
}  # fmt: skip


def __getattr__(name: str) -> "Any":
    """Load a name when it is asked for: torch takes seconds, and ``fedzmg --help`` needs none."""
    if name in _MODULES:
        return getattr(import_module(f"fedzmg.{_MODULES[name]}"), name)
    if name in __all__:
        return import_module(f"fedzmg.{name}")
    raise AttributeError(f"module 'fedzmg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
