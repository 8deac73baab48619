"""Trials of a federation, side by side on one client axis.

:func:`simulate` trains a list of *trials* (algorithm, seed) of equal structure and returns one
history each. A trial's history does not depend on its neighbours.
"""

from fedzmg.engine.choose import EngineName, EnginePlanner
from fedzmg.simulation.history import History, Record
from fedzmg.simulation.planner import RoundPlanner
from fedzmg.simulation.rounds import RoundReport, Simulation
from fedzmg.simulation.server import Checkpoint, Snapshot
from fedzmg.simulation.training import Device, Observer, resolve_device, simulate
from fedzmg.simulation.trial import Trial, packs
from fedzmg.storage.client_metrics import ClientMetrics

__all__ = [
    "Checkpoint", "ClientMetrics", "Device", "EngineName", "EnginePlanner", "History", "Observer",
    "Record", "RoundPlanner", "RoundReport", "Simulation", "Snapshot", "Trial", "packs",
    "resolve_device", "simulate",
]  # fmt: skip
