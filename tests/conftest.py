"""What every test runs under: one thread, and properties that are the same in every run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are promised on processors; only tests marked ``gpu`` see a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("fedzmg.simulation.devices.has_gpu", lambda: False)
