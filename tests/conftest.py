"""What every test runs under: one thread, and chance that is the same in every run and order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)


def pytest_runtest_setup() -> None:
    """Weights that a test leaves to torch do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are promised on processors; only tests marked ``gpu`` see a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("fedzmg.simulation.training.has_gpu", lambda: False)
