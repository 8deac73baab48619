"""Which axes an optimizer takes for inputs, and what it says when it cannot know."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fedzmg.errors import InputError
from fedzmg.optim import ZeroMeanSGD, axes


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "_told", False)


def found(optimizer: ZeroMeanSGD) -> list[list[tuple[int, ...]]]:
    return [group["input_axes"] for group in optimizer.param_groups]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 3))
        self.offset = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.usefixtures("untold")
def test_a_bare_list_warns_once_and_keeps_the_first_axis() -> None:
    params = [nn.Parameter(torch.ones(s)) for s in ((2, 3), (2, 3, 4, 5), (3,), ())]
    with pytest.warns(UserWarning, match=r"for_model.*input_axes") as told:
        optimizer = ZeroMeanSGD(params, 0.1)
    assert told[0].filename == __file__
    assert found(optimizer) == [[(1,), (1, 2, 3), (), ()]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZeroMeanSGD(params, 0.1)


@pytest.mark.usefixtures("untold")
def test_vectors_alone_give_no_reason_to_warn() -> None:
    assert found(ZeroMeanSGD([nn.Parameter(torch.ones(3))], 0.1)) == [[()]]


def test_a_model_knows_its_axes() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.ConvTranspose2d(3, 2, 2), nn.Linear(4, 2))
    for optimizer in (ZeroMeanSGD(model, 0.1), ZeroMeanSGD.for_model(model, 0.1)):
        assert found(optimizer) == [[(0,), (0, 2, 3), (), (1,), ()]]
        assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


def test_unknown_modules_matter_only_for_their_matrices() -> None:
    with pytest.raises(InputError, match="'matrix' belongs to a Own"):
        ZeroMeanSGD(Own(), 0.1)
    optimizer = ZeroMeanSGD(Own(), 0.1, axes={"matrix": (0,)})
    assert found(optimizer) == [[(0,), (), (), ()]]
    assert "frozen.weight" not in optimizer.param_groups[0]["param_names"]


def test_decay_can_spare_vectors() -> None:
    optimizer = ZeroMeanSGD.for_model(nn.Linear(3, 2), 0.1, decay_scope="kernels")
    assert [g["weight_decay"] for g in optimizer.param_groups] == [5e-4, 0.0]
    assert found(optimizer) == [[(1,)], [()]]
    with pytest.raises(InputError, match="did you mean 'kernels'"):
        ZeroMeanSGD.for_model(nn.Linear(3, 2), 0.1, decay_scope="kernel")  # type: ignore[arg-type]


def test_named_parameters_with_a_map() -> None:
    layer = nn.Embedding(4, 3)
    optimizer = ZeroMeanSGD(layer.named_parameters(), 0.1, axes={"weight": (-2,)})
    assert found(optimizer) == [[(0,)]]


@pytest.mark.parametrize(
    ("params", "given", "match"),
    [
        (lambda m: m.parameters(), {"weight": (1,)}, "no names"),
        (lambda m: m.named_parameters(), {"bias": ()}, "does not name parameter 'weight'"),
        (lambda m: m.named_parameters(), {"weight": (1,), "wieght": ()}, "did you mean 'weight'"),
        (lambda m: m.named_parameters(), {"weight": (2,)}, "it has 2 axes"),
        (lambda m: m.named_parameters(), {"weight": (1, -1)}, "named twice"),
        (lambda m: m, {"weights": (1,)}, "no trainable parameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:input axes are not known")
def test_maps_that_do_not_fit_are_refused(params: Any, given: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        ZeroMeanSGD(params(nn.Linear(3, 2)), 0.1, axes=given)


@pytest.mark.parametrize("given", [[(1,)], [(1,), (0,), ()], (3,), [(1,), (1,)]])
def test_groups_that_do_not_fit_are_refused(given: Any) -> None:
    params = list(nn.Linear(3, 2).parameters())
    with pytest.raises(InputError):
        ZeroMeanSGD([{"params": params, "input_axes": given}], 0.1)
