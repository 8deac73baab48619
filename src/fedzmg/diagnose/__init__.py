"""Measure whether FedZMG's premise holds for a model and its clients."""

from fedzmg.diagnose.diagnosis import Diagnosis, diagnose
from fedzmg.diagnose.measure import ClientSpread, Layer, Measurement, measure
from fedzmg.diagnose.verdict import Progress, Verdict, judge

__all__ = [
    "ClientSpread", "Diagnosis", "Layer", "Measurement", "Progress", "Verdict", "diagnose",
    "judge", "measure",
]  # fmt: skip
