"""Turn a measurement into a verdict, by a rule that was fixed before it was tested.

The rule is in ``docs/diagnose.md``. A mean component that clients agree on is signal: without it
training ends at the best model with the sums of its start, not at the best model. Otherwise the
mean component of the first layer decides. Inputs that are mostly their mean make one direction much
steeper than all others, which bounds the learning rate, and clients disagree along it. Inner layers
have a mean component too, but layers and biases before them can shift their inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedzmg.diagnose.measure import Layer, Measurement, Pair
from fedzmg.results.formatting import NONE

Expectation = Literal["gain", "little", "loss", "unclear"]

LOST = 0.25  # share of the loss gradient lost from which on a loss is expected
SHARE = 0.5  # mean share of the first layer's gradient from which on a gain is expected
CENTRED = 0.01  # mean share of the inputs' energy below which they count as centred
ENOUGH = 6  # number of clients below which only a clear change of diversity counts
TIE = 0.1  # relative change of diversity below which it is not clear


@dataclass(frozen=True)
class Verdict:
    """Expected effect of the projection, everything else equal, with reasons."""

    expect: Expectation
    summary: str
    evidence: tuple[str, ...]


def judge(
    found: Measurement, *, inputs: float | None = None, centred: Measurement | None = None
) -> Verdict:
    """Predict the effect of the projection; ``inputs`` is the mean's share of their energy."""
    if not found.layers:
        return Verdict("little", "nothing is projected in this model: expect no difference", ())
    frozen = [layer for layer in found.layers if layer.inputs == 1]
    moving = [layer for layer in found.layers if layer.inputs > 1]
    first, clients = (moving or frozen)[0], len(found.whole.shares)
    expect, summary = _expect(found, frozen, first, clients, inputs)
    why = "has one input per unit, so its gradient is its mean: projected, it stays where it starts"
    stuck = (f"{layer.name} {why}" for layer in frozen)
    return Verdict(expect, summary, (*stuck, *_evidence(found.whole, first, clients, centred)))


def _expect(
    found: Measurement, frozen: Sequence[Layer], first: Layer, clients: int, inputs: float | None
) -> tuple[Expectation, str]:
    if stuck := _important_frozen(found.layers, frozen):
        return "loss", f"{stuck} cannot learn, the projection leaves it nothing: expect a loss"
    if first.share.mean is None or first.diversity.before is None:
        return "unclear", (
            f"the first layer ({first.name}) has no gradient (all inputs are zero, the start "
            "blocks it, or clients cancel): no verdict, look again after some training"
        )
    share, lost = first.share.mean, found.whole.lost or 0.0
    kept = first.diversity.kept  # None if the projection leaves nothing of the first layer
    clear = kept is not None and abs(kept - 1.0) >= TIE
    forbids = f"the projection forbids {percent(lost)} of the loss gradient for good"
    if lost >= LOST and clients < ENOUGH and not clear:
        few = f"{clients} client{'s are' if clients > 1 else ' is'} too few to say whether that is"
        remedy = "no verdict, look at more or train with and without"
        return "unclear", f"{forbids}, and {few} signal: {remedy}"
    if lost >= LOST and (kept is None or kept > 1.0):
        why = "which clients agree on and no bias can make up for"
        return "loss", f"{forbids}, {why}: expect a loss"
    mean = f"{percent(share)} of the first layer's gradient ({first.name}) is its mean component"
    if clients == 1:
        return "unclear", f"{mean}, but one client does not speak for others: no verdict"
    if share >= SHARE:
        return "gain", f"{mean}: expect a gain"
    if inputs is not None and inputs < CENTRED:
        return "little", f"inputs are centred already, {mean}: expect little"
    return "little", f"only {mean}: expect little"


def _important_frozen(layers: Sequence[Layer], frozen: Sequence[Layer]) -> str:
    """Name the frozen layer whose training matters; empty if there is none."""
    # The layer that reads the inputs matters, except an embedding of a single row: the layer after
    # it replaces a constant. Others matter if much of the gradient is theirs.
    active = [layer for layer in frozen if layer.energy]
    kernels = [layer for layer in active if "Embedding" not in layer.kind]
    if kernels and kernels[0] is layers[0]:
        return f"the first layer ({layers[0].name})"
    if len(active) == len(layers) or sum(layer.energy or 0.0 for layer in kernels) >= LOST:
        return max(active, key=lambda layer: layer.energy or 0.0).name
    return ""


def _evidence(
    whole: Layer, first: Layer, clients: int, centred: Measurement | None
) -> Iterator[str]:
    """Describe the measurements behind a verdict, one sentence each."""
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
