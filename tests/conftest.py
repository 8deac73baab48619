"""What every test runs under: one thread, and properties that are the same in every run."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)
