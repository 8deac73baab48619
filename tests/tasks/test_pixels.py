"""Pixels: known answers for polarity and centring, whatever stands before an image's axes."""

from __future__ import annotations

import pytest
import torch

from fedzmg.tasks.pixels import Pixels

BYTES = torch.tensor([[[255, 0], [51, 204]], [[0, 0], [0, 255]]], dtype=torch.uint8)


def test_known_answers() -> None:
    dtype = torch.float64
    one = torch.tensor([[1.0, 0.0], [0.2, 0.8]], dtype=dtype)
    assert torch.equal(Pixels()(BYTES[:1], dtype)[0], one)
    torch.testing.assert_close(Pixels("ink-one")(BYTES[:1], dtype)[0], 1 - one)
    centred = Pixels(centring="image")(BYTES, dtype)
    torch.testing.assert_close(centred[0], one - 0.5)
    torch.testing.assert_close(
        centred[1], torch.tensor([[-0.25, -0.25], [-0.25, 0.75]], dtype=dtype)
    )
    assert BYTES[0, 0, 0] == 255


def test_centring_turned_over_is_the_negative() -> None:
    stored = torch.randint(0, 256, (3, 28, 28), generator=torch.Generator().manual_seed(0)).byte()
    light, dark = (Pixels(p, "image")(stored, torch.float64) for p in ("background-one", "ink-one"))  # type: ignore[arg-type]
    torch.testing.assert_close(light, -dark)
    torch.testing.assert_close(light.mean((1, 2)), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(7, 3, 4, 4), (2, 7, 3, 4, 4), (1, 3, 4, 4)])
def test_each_colour_image_has_its_own_mean(shape: tuple[int, ...]) -> None:
    """Over pixels and channels, not over the batch or the clients that are stacked before it."""
    stored = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).byte()
    centred = Pixels(centring="image", axes=3)(stored, torch.float64)
    flat, plain = centred.flatten(0, -4), stored.double().flatten(0, -4) / 255
    for image, before in zip(flat, plain, strict=True):
        torch.testing.assert_close(image, before - before.mean())


def test_fractions_are_taken_as_they_are() -> None:
    stored = torch.tensor([[[0.25, 0.5], [0.75, 1.0]]])
    assert torch.equal(Pixels()(stored, torch.float64), stored.double())
    assert torch.equal(Pixels("ink-one")(stored, torch.float64), 1 - stored.double())


def test_settings_are_in_the_name() -> None:
    assert (
        repr(Pixels("ink-one", "image")) == "Pixels(polarity='ink-one', centring='image', axes=2)"
    )
