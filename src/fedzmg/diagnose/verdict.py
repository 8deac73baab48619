"""Turn a measurement into a verdict, by a rule that was fixed before it was tested.

Clients train a few rounds without and with the projection, each at the best of some learning rates,
and the falls of the loss are compared. What is measured on gradients is evidence and decides
nothing: the projection of the first layer alone, where the mean's share is largest, gains little.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from fedzmg.diagnose.measure import Measurement, Pair
from fedzmg.results.formatting import NONE, count_text

Expectation = Literal["gain", "little", "loss", "unclear"]

GAIN, LOSS = 1.15, 0.9  # fall of the loss with the projection over that without
SMALL = 1e-6  # relative fall of the loss below which nothing was learned
ENOUGH = 6  # number of clients below which a verdict is marked as uncertain
TIE = 0.1  # relative change of diversity below which it is not clear


@dataclass(frozen=True)
class Progress:
    """A short training without and with the projection, each at its best client learning rate."""

    rounds: int
    clients: int
    start: float  # loss before it, on the examples of its clients
    losses: tuple[float, float]  # after it; the start's if no learning rate lowers it
    rates: tuple[float, float]

    @property
    def ratio(self) -> float | None:
        """Fall of the loss with the projection over that without; None if neither falls."""
        without, projected = (self.start - loss for loss in self.losses)
        if not max(without, projected) > SMALL * abs(self.start):  # nor if the start is not finite
            return None
        return projected / without if without > 0.0 else inf


@dataclass(frozen=True)
class Verdict:
    """Expected effect of the projection, everything else equal, with reasons."""

    expect: Expectation
    summary: str
    evidence: tuple[str, ...]


def judge(
    found: Measurement, progress: Progress | None, centred: Measurement | None = None
) -> Verdict:
    """Predict the effect of the projection."""
    if not found.layers:
        return Verdict("little", "nothing is projected in this model: expect no difference", ())
    return Verdict(*_expect(progress), tuple(_evidence(found, centred)))


def _expect(progress: Progress | None) -> tuple[Expectation, str]:
    if progress is None:
        return "unclear", "no training of two clients or more: no verdict"
    ratio = progress.ratio
    trained = f"{count_text(progress.rounds, 'round')} on {progress.clients} clients"
    if ratio is None:
        began = f"{trained} lower the loss of {progress.start:.4g} at no learning rate"
        return "unclear", f"{began}: no verdict"
    ends = zip(progress.losses, progress.rates, strict=True)
    without, projected = (f"{loss:.4g} (client learning rate {rate:.2g})" for loss, rate in ends)
    fall = f"{trained} lower the loss from {progress.start:.4g} to {without}"
    fall += f", with the projection to {projected}"
    expect: Expectation = "gain" if ratio >= GAIN else "loss" if ratio <= LOSS else "little"
    words = {"gain": "expect a gain", "loss": "expect a loss", "little": "expect little"}[expect]
    far = "which alone lowers it" if ratio == inf else f"{ratio:.2f} times as far"
    return expect, f"{fall}, {far}: {words}"


def _evidence(found: Measurement, centred: Measurement | None) -> Iterator[str]:
    """Describe the measurements behind a verdict, one sentence each."""
    why = "has one input per unit, so its gradient is its mean: projected, it stays where it starts"
    yield from (f"{layer.name} {why}" for layer in found.layers if layer.inputs == 1)
    first = next((layer for layer in found.layers if layer.inputs > 1), found.layers[0])
    whole, clients = found.whole, len(found.whole.shares)
    share, kept = whole.share, whole.distance.kept
    if share.mean is not None:
        spread = f"{percent(share.low)} to {percent(share.high)}"
        yield f"{percent(share.mean)} of a client's whole gradient is mean component ({spread})"
    if kept is not None:
        closer = f"closer by {percent(1.0 - kept)} of their squared distance"
        yield f"the projection brings gradients of two clients {closer}"
    if whole.forbidden is None:
        yield "the averaged gradient is zero: this is a stationary point"
    else:
        sums = f"{percent(whole.forbidden)} of the loss gradient lies along sums that never move"
        yield f"{sums}; biases can do the same but for {percent(whole.lost)}"
    shares = {layer.name: layer.share.mean for layer in centred.layers} if centred else {}
    if shares.get(first.name) is not None:
        left = f"leaves {percent(shares[first.name])} of the first layer's gradient in its mean"
        yield f"centring every input instead {left}, now {percent(first.share.mean)}"
    kept = first.diversity.kept
    if kept is not None and clients > 1:
        meaning = "is what clients agree on" if kept > 1.0 else "is where clients differ"
        if abs(kept - 1.0) < TIE:
            meaning = "is spread over clients like the rest"
        diverse = f"{kept:.2f} times as diverse over clients"
        yield f"without its mean the first layer's gradient is {diverse}: the mean {meaning}"
    if clients < ENOUGH:
        yield f"a verdict on so few clients ({clients}) is uncertain: {ENOUGH} or more are better"


def rows(point: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return every layer of a measurement, and the whole model at the end."""
    return [*point["layers"], point["whole"]]


def by_name(measurement: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the same by name; empty if nothing was measured."""
    return {one["name"]: one for one in rows(measurement)} if measurement else {}


def when(point: Mapping[str, Any]) -> str:
    """Describe the round of a point."""
    return "before training" if point["round"] == 0 else f"after round {point['round']}"


def ratio(pair: Mapping[str, Any] | None) -> float | None:
    """Return after over before; None if there was nothing before."""
    return Pair(**pair).kept if pair else None


def percent(value: float | None) -> str:
    """Format a share."""
    if value is None:
        return NONE
    if 0 < value < 0.001:
        return "< 0.1 %"
    return f"{100 * value:.1f} %" if 0 < value < 0.095 else f"{100 * value:.0f} %"
