"""Frames as Flower's records; imports no torch."""

import json

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedzmg.deploy.frames import Frame, Wire

RAW = "fedzmg.raw"  # serialization of arrays: their bytes, little-endian, without a header


def to_records(frame: Frame) -> RecordDict:
    """Put a frame into records."""
    arrays = {n: Array(w.dtype, tuple(w.shape), RAW, w.data) for n, w in frame.arrays.items()}
    facts = ConfigRecord({"facts": json.dumps(dict(frame.facts))})
    return RecordDict({"facts": facts, "arrays": ArrayRecord(arrays)})


def from_records(content: RecordDict) -> Frame:
    """Read a frame; anything unexpected raises ``ValueError``."""
    try:
        facts = json.loads(str(content.config_records["facts"]["facts"]))
        if not isinstance(facts, dict):
            raise TypeError("facts")
        arrays = {
            str(name): Wire(str(a.dtype), tuple(map(int, a.shape)), a.data)
            for name, a in content.array_records["arrays"].items()
        }
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a message of this federation ({type(error).__name__})") from None
    return Frame(facts, arrays)
