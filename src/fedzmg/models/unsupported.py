"""Reject unsupported modules with an actionable message."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.models.call import HIDDEN_RANDOMNESS
from fedzmg.models.keyed import KeyedLayer
from fedzmg.tree import leaves


def check_module(module: nn.Module) -> None:
    """Reject layers that keep state, or that cannot be mapped over clients."""
    if isinstance(module, type):
        raise InputError(f"the model is the class {module.__name__}: give {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise InputError(f"the model is a {type(module).__name__}: give an nn.Module")
    for prefix, child in module.named_modules():
        layer, kind = f"layer {prefix or 'model'!r}", type(child).__name__
        _check_buffers(child, layer, kind)
        if isinstance(child, nn.MultiheadAttention) and child.dropout:
            raise InputError(
                f"{layer} is a {kind} with dropout inside, whose masks have no address: set its "
                "dropout to 0; nn.Dropout layers around it are fine"
            )
        table = child if isinstance(child, nn.Embedding | nn.EmbeddingBag) else None
        if table is not None and (table.padding_idx is not None or table.max_norm is not None):
            raise InputError(
                f"{layer} is an {kind} with padding_idx or max_norm, which do not map over "
                "clients: leave them out"
            )
        if isinstance(child, nn.RNNBase):
            remedy = "fedzmg.models.GRU" if isinstance(child, nn.GRU) else "cells (nn.LSTMCell)"
            raise InputError(
                f"{layer} is a fused {kind}, which cannot be mapped over clients: "
                f"use {remedy} instead"
            )


def _check_buffers(child: nn.Module, layer: str, kind: str) -> None:
    if isinstance(child, nn.modules.batchnorm._BatchNorm):
        raise InputError(
            f"{layer} is a {kind}, whose running statistics average badly over clients: "
            "use nn.GroupNorm instead"
        )
    own = [name for name, _ in child.named_buffers(recurse=False)]
    if not own or isinstance(child, KeyedLayer):
        return
    remedy = "leave the layer out, or make it a plain attribute if it never changes"
    if isinstance(child, nn.modules.batchnorm._NormBase):
        remedy = "use track_running_stats=False"
    raise InputError(
        f"{layer} ({kind}) has the buffer {own[0]!r}; buffers are not trained or averaged: {remedy}"
    )


def private_copy(module: nn.Module) -> nn.Module:
    """Copy a module completely."""
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"the model cannot be copied ({reason}): keep only parameters and plain values in "
            "its modules; for weight norm, use torch.nn.utils.parametrizations"
        ) from None


def check_independence(batch: Any, alone: Any, examples: int) -> None:
    """Reject outputs that change with the other examples of a batch.

    Engines pad and split batches; such a model would learn from the padding.
    """
    for among, lone in zip(leaves(batch), leaves(alone), strict=True):
        if not isinstance(among, Tensor) or among.shape[:1] != (examples,):
            continue  # not one output per example, which the loss will say better
        scale = float(among.abs().nan_to_num().max()) if among.numel() else 0.0
        same = among[:1].shape == lone.shape and torch.allclose(
            among[:1].double(), lone.double(), rtol=0, atol=1e-3 * scale + 1e-12, equal_nan=True
        )
        if not same:
            raise InputError(
                "the model's outputs for an example depend on the other examples of its batch: "
                "treat each by itself (attention with batch_first=True, nn.GroupNorm, no squeeze)"
            )


class NoHiddenRandomness:
    """Context in which no global random generator may be used."""

    def __enter__(self) -> None:
        self._before = _global_generators()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and _global_generators() != self._before:
            raise InputError(HIDDEN_RANDOMNESS)


def _global_generators() -> tuple[object, ...]:
    # NumPy's old generator is read because models draw from it; nothing is drawn here.
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    words, position = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return random.getstate(), words, position, torch.get_rng_state().numpy().tobytes()
