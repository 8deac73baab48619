"""A task's card: everything a user asks about it, known without its data."""

from __future__ import annotations

import inspect
from typing import Any

from fedzmg.models.functional import FunctionalModel
from fedzmg.tasks.preset import TaskInfo
from fedzmg.tree import num_bytes


def card(entry: TaskInfo) -> dict[str, Any]:
    """Data, clients, model, protocol and fields of a preset, ready for JSON."""
    preset = entry.preset
    params = FunctionalModel(preset.network()).params()
    return {
        "name": preset.name,
        "summary": entry.summary,
        "about": inspect.cleandoc(type(preset).__doc__ or ""),
        "data": entry.data,
        "missing": entry.missing,
        "clients": preset.clients,
        "model": {
            "parameters": sum(leaf.numel() for leaf in params.values()),
            "bytes": num_bytes(params),
        },
        "protocol": dict(vars(preset.protocol)),
        "fields": [
            {
                "key": f"preset.{option.name}",
                "default": option.value,
                "range": option.range,
                "doc": option.doc,
            }
            for option in preset.decisions()
        ],
    }
