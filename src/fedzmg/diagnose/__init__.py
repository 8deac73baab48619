"""WILL IT HELP: does FedZMG's premise hold for a model and its clients?"""

from fedzmg.diagnose.diagnosis import Diagnosis, Point, diagnose
from fedzmg.diagnose.measure import Layer, Measurement, Spread, measure
from fedzmg.diagnose.verdict import Verdict, judge

__all__ = [
    "Diagnosis",
    "Layer",
    "Measurement",
    "Point",
    "Spread",
    "Verdict",
    "diagnose",
    "judge",
    "measure",
]
