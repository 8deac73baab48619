"""Plain ``nn.Module`` models, and what the engines need to know about a model."""

from fedzmg.models.functional import FunctionalModel
from fedzmg.models.layers import RandomFlip, RandomShift
from fedzmg.models.layout import layout_of
from fedzmg.models.lora import add_lora, merge_lora
from fedzmg.models.networks import (
    CharGRU,
    CharTransformer,
    cifar100_cnn,
    digits_cnn,
    emnist_cnn,
    mlp,
    resnet18_gn,
    shakespeare_gru,
)

__all__ = [
    "CharGRU", "CharTransformer", "FunctionalModel", "RandomFlip", "RandomShift",
    "add_lora", "cifar100_cnn", "digits_cnn", "emnist_cnn", "layout_of", "merge_lora",
    "mlp", "resnet18_gn", "shakespeare_gru",
]  # fmt: skip
