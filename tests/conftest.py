"""What every test runs under: one thread, and chance that is the same in every run and order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of GPUs where there is none; warnings of their compilers change often."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(absent)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_runtest_setup() -> None:
    """Weights that a test leaves to torch do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are promised on CPUs; only tests marked ``gpu`` see a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("fedzmg.simulation.training.has_gpu", lambda: False)
