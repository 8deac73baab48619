"""ResNet-18 with group normalisation: the usual network but for the norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedzmg.errors import InputError
from fedzmg.models import FunctionalModel, layout_of, resnet18_gn


@pytest.mark.parametrize(
    ("outputs", "channels", "count"),
    # Published for the CIFAR form of ResNet-18; group norm has as many parameters as batch norm.
    [(10, 3, 11_173_962), (100, 3, 11_220_132), (10, 1, 11_172_810)],
)
def test_parameters(outputs: int, channels: int, count: int) -> None:
    with torch.device("meta"):
        module = resnet18_gn(outputs, channels)
    assert sum(p.numel() for p in module.parameters()) == count
    assert not list(module.buffers())
    assert sum(isinstance(m, nn.Conv2d) for m in module.modules()) == 17 + 3
    layout = layout_of(module)
    assert [info.layer for info in layout.values()][-1] == "Linear"


@pytest.mark.parametrize("size", [8, 13, 32])
def test_reads_images_of_any_size(size: int) -> None:
    model = FunctionalModel(resnet18_gn(5, channels=2, width=4, groups=4))
    x = torch.randn(3, 2, size, size, generator=torch.Generator().manual_seed(0))
    out = model.try_out(model.params(), x)
    assert out.shape == (3, 5)
    torch.testing.assert_close(model.evaluate(model.params(), x[1:2]), out[1:2], rtol=0, atol=1e-4)


def test_resolution_halves_three_times() -> None:
    x, sizes = torch.zeros(1, 3, 32, 32), []
    for layer in resnet18_gn(4, width=2, groups=1)[:-2]:
        x = layer(x)
        sizes.append(tuple(x.shape[1:]))
    assert sizes[2:] == [
        (2, 32, 32), (2, 32, 32), (2, 32, 32),
        (4, 16, 16), (4, 16, 16), (8, 8, 8), (8, 8, 8), (16, 4, 4), (16, 4, 4),
    ]  # fmt: skip


def test_inputs_pass_by_the_convolutions() -> None:
    """With its last norm silenced, a block gives its input, or what its shortcut makes of it."""
    net = resnet18_gn(4, width=2, groups=1)
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    for block in net[3:5]:
        nn.init.zeros_(block.norm2.weight)  # type: ignore[union-attr,arg-type]
        torch.testing.assert_close(block(x), x.relu())
    nn.init.zeros_(net[5].norm2.weight)  # type: ignore[union-attr,arg-type]
    torch.testing.assert_close(net[5](x), net[5].shortcut(x).relu())  # type: ignore[operator,union-attr]
    assert net[5](x).shape == (2, 4, 4, 4)


@pytest.mark.parametrize("groups", [0, 3])
def test_groups_that_do_not_divide_are_refused(groups: int) -> None:
    with pytest.raises(InputError, match=rf"groups = {groups}: expected a divisor of width = 4"):
        resnet18_gn(10, width=4, groups=groups)
