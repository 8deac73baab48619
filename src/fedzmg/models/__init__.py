"""Plain ``nn.Module`` models without buffers, and what the engines need to know about a model."""

from __future__ import annotations

from fedzmg.models.functional import FunctionalModel
from fedzmg.models.layout import layout_of
from fedzmg.models.networks import CharGRU, digits_cnn, mlp
from fedzmg.models.recurrent import GRU

__all__ = ["GRU", "CharGRU", "FunctionalModel", "digits_cnn", "layout_of", "mlp"]
