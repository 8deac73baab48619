"""fedzmg: train, compare and deploy federated algorithms.

>>> import fedzmg
>>> task = fedzmg.tasks.get("digits")
>>> [history] = fedzmg.simulate(task, [fedzmg.Trial.of("fedzmg", seed=0)], rounds=1)
>>> history.rounds
[1]
"""

from fedzmg import algorithms, models, tasks
from fedzmg.api import compare
from fedzmg.contract import Algorithm, ClientRule, ServerRule
from fedzmg.errors import InputError
from fedzmg.evaluation import ACCURACY, Metric
from fedzmg.experiment.compare import Comparison
from fedzmg.simulation import History, Trial, simulate
from fedzmg.tasks.task import Protocol, Task
from fedzmg.tree import Tree
from fedzmg.version import __version__

__all__ = [
    "ACCURACY",
    "Algorithm",
    "ClientRule",
    "Comparison",
    "History",
    "InputError",
    "Metric",
    "Protocol",
    "ServerRule",
    "Task",
    "Tree",
    "Trial",
    "__version__",
    "algorithms",
    "compare",
    "models",
    "simulate",
    "tasks",
]
