"""Gradients centred in place, against the golden tensors and the engines' projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg.algorithms.projection import zero_mean
from fedzmg.errors import InputError
from fedzmg.models import CharGRU, layout_of
from fedzmg.optim import zero_mean_
from fedzmg.optim.tensors import centre_
from golden_problems import GOLDEN

TENSORS = GOLDEN["algorithms"]["projection_tensors"]


@pytest.mark.parametrize("name", TENSORS)
def test_golden_tensors(name: str) -> None:
    entry: dict[str, Any] = TENSORS[name]
    grad = torch.tensor(entry["grad"], dtype=torch.float64).reshape(entry["shape"])
    axes = tuple(entry["axes"]) if "axes" in entry else (entry["axis"],)
    centre_([(grad, axes)])
    expected = torch.tensor(entry["projected"], dtype=torch.float64).reshape(entry["shape"])
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_a_model_is_centred_as_the_engines_do_it() -> None:
    torch.manual_seed(0)
    model = CharGRU(9, 5, 6).double()
    model(torch.randint(0, 9, (2, 4))).square().sum().backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    zero_mean_(model)
    for name, info in layout_of(model).items():
        grad: Tensor = model.get_parameter(name).grad
        torch.testing.assert_close(grad, zero_mean(before[name], info.input_axes))
    centred = {n: p.grad.clone() for n, p in model.named_parameters()}
    zero_mean_(model)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, centred[name], rtol=0, atol=1e-14)


def test_parameters_without_gradient_and_sparse_ones() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)])
    zero_mean_(model)
    model[1](torch.tensor([0])).sum().backward()
    with pytest.raises(InputError, match="sparse=False"):
        zero_mean_(model)
    before = model[1].weight.grad.to_dense()
    zero_mean_(model, {"1.weight": ()})
    assert torch.equal(model[1].weight.grad.to_dense(), before)
