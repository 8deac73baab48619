"""Plain ``nn.Module`` models without buffers, and what the engines need to know about a model."""

from __future__ import annotations

from fedzmg.models.augment import RandomFlip, RandomShift
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.layout import layout_of
from fedzmg.models.networks import CharGRU, digits_cnn, logistic_regression, mlp
from fedzmg.models.paper import cifar100_cnn, emnist_cnn, shakespeare_gru
from fedzmg.models.recurrent import GRU
from fedzmg.models.resnet import resnet18_gn
from fedzmg.models.transformer import CharTransformer

__all__ = [
    "GRU",
    "CharGRU",
    "CharTransformer",
    "FunctionalModel",
    "RandomFlip",
    "RandomShift",
    "cifar100_cnn",
    "digits_cnn",
    "emnist_cnn",
    "layout_of",
    "logistic_regression",
    "mlp",
    "resnet18_gn",
    "shakespeare_gru",
]
