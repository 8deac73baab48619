"""Compiled code is kept on disk under all that it depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedzmg.engine.cuda_graph import compile_apart
from fedzmg.models.kernels import convolution
from fedzmg.models.kernels.precision import same_bits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in itself


def double(x: Tensor) -> Tensor:
    return 2 * x


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def watched(graph: Any, inputs: Any) -> Any:
        seen.append(torch.compiler.config.cache_key_tag)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", watched)
    return seen


def test_what_operators_become_is_part_of_the_key(
    tags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled() -> None:
        assert torch.equal(compile_apart(double)(torch.ones(3)), 2 * torch.ones(3))

    compiled()
    compiled()
    monkeypatch.setattr(convolution, "_chosen", {("some shape",): True})
    compiled()
    monkeypatch.setattr(convolution, "_chosen", {("some shape",): False})
    compiled()
    with same_bits(True):
        compiled()
    with torch.compiler.config.patch(cache_key_tag="the user's"):
        compiled()
    assert tags[0] == tags[1]
    assert len(set(tags)) == 5
    assert tags[-1].startswith("the user's fedzmg ")
    assert torch.compiler.config.cache_key_tag == ""
