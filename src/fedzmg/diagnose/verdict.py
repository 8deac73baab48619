"""What a measurement means: a rule that was fixed before it was tested.

The reasons behind it:

1. A mean component that is signal must not be removed. Then much of the loss gradient lies along
   sums of weights that the projection never moves, no bias can do the same, and it is what clients
   agree on: without it their first layers' gradients are more diverse, not less. Training would end
   at the best model that has the sums of its start, not at the best model.
2. Otherwise the mean component of the *first* layer decides. A dense layer's projected gradient is
   that of centred inputs. Inputs that are mostly their mean make one direction much steeper than
   all others, it bounds the learning rate, and clients disagree along it. Layers inside have a mean
   component as well (about a third after a ReLU), but the layers and biases before them can shift
   their inputs; nothing before the first layer can.
3. Otherwise there is little to remove.

Before these comes what needs no weighing: a layer with one input per unit is its mean and nothing
else, so the projection leaves it where it starts. Where the evidence does not reach, for want of
clients or of a gradient, the verdict says so and expects nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedzmg.diagnose.measure import Layer, Measurement

Expectation = Literal["gain", "little", "loss", "unclear"]

LOST = 0.25
"""Expect a loss from a quarter of the loss gradient on, forbidden, not replaced and agreed upon."""
SHARE = 0.5
"""Expect a gain where at least half of the first layer's gradient is its mean."""
CENTRED = 0.01
"""Inputs with less of their energy in their mean count as centred."""
ENOUGH = 6
"""Fewer clients than this show what all of them agree on only where it is plain."""
TIE = 0.1
"""Diversity that changes by less is not plain."""


@dataclass(frozen=True)
class Verdict:
    """What to expect of the projection, everything else equal, and why."""

    expect: Expectation
    summary: str
    evidence: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "evidence": list(self.evidence)}


def judge(
    found: Measurement,
    *,
    inputs: float | None = None,
    centred: Measurement | None = None,
    notes: Sequence[str] = (),
) -> Verdict:
    """Say what to expect.

    Args:
        found: the model and clients as they are, layers in the order in which the model uses them.
        inputs: share of the inputs' energy that is the mean of each example, if known.
        centred: the same with every input centred, if it was measured.
        notes: what else a reader should know; they end the evidence.
    """
    if not found.layers:
        return Verdict("little", "nothing is projected in this model: expect no difference", ())
    frozen = [layer for layer in found.layers if layer.inputs == 1]
    moving = [layer for layer in found.layers if layer.inputs > 1]
    first, clients = (moving or frozen)[0], len(found.whole.shares)
    evidence = [
        *_about_frozen(frozen), *_about_clients(found.whole), *_about_loss(found.whole),
        *_about_centring(first, centred), *_about_diversity(first), *_about_number(clients), *notes,
    ]  # fmt: skip
    expect, summary = _expect(found, frozen, first, clients, inputs)
    return Verdict(expect, summary, tuple(evidence))


def _expect(
    found: Measurement, frozen: Sequence[Layer], first: Layer, clients: int, inputs: float | None
) -> tuple[Expectation, str]:
    if stuck := _missed(found.layers, frozen):
        return "loss", f"{stuck} cannot learn, the projection leaves it nothing: expect a loss"
    if first.share.mean is None or first.diversity.before is None:
        return "unclear", (
            f"the first layer ({first.name}) has no gradient (all inputs are zero, the start "
            "blocks it, or clients cancel): no verdict, look again after some training"
        )
    share, lost = first.share.mean, found.whole.lost or 0.0
    # Where nothing is left of the first layer there is no diversity after the projection.
    kept = first.diversity.kept
    plain = kept is not None and abs(kept - 1.0) >= TIE
    if lost >= LOST and clients < ENOUGH and not plain:
        return "unclear", (
            f"the projection forbids {_percent(lost)} of the loss gradient for good, and {clients} "
            f"client{'s are' if clients > 1 else ' is'} too few to say whether that is signal: "
            "no verdict, look at more or train with and without"
        )
    if lost >= LOST and (kept is None or kept > 1.0):
        return "loss", (
            f"the projection forbids {_percent(lost)} of the loss gradient for good, which clients "
            "agree on and no bias can make up for: expect a loss"
        )
    mean = f"{_percent(share)} of the first layer's gradient ({first.name}) is its mean component"
    if clients == 1:
        return "unclear", f"{mean}, but one client does not speak for others: no verdict"
    if share >= SHARE:
        return "gain", f"{mean}: expect a gain"
    if inputs is not None and inputs < CENTRED:
        return "little", f"inputs are centred already, {mean}: expect little"
    return "little", f"only {mean}: expect little"


def _missed(layers: Sequence[Layer], frozen: Sequence[Layer]) -> str:
    """The frozen layer that training will miss, if there is one.

    What reads the inputs is missed, unless it is an embedding: one with a single row is a constant,
    which the layer after it makes up for. Others are missed if much of the gradient is theirs.
    """
    felt = [layer for layer in frozen if layer.energy]
    kernels = [layer for layer in felt if "Embedding" not in layer.kind]
    if kernels and kernels[0] is layers[0]:
        return f"the first layer ({layers[0].name})"
    if len(felt) == len(layers) or sum(layer.energy or 0.0 for layer in kernels) >= LOST:
        return max(felt, key=lambda layer: layer.energy or 0.0).name
    return ""


def _about_frozen(frozen: Sequence[Layer]) -> list[str]:
    return [
        f"{layer.name} has one input per unit, so its gradient is its mean: projected, it stays "
        "where it starts"
        for layer in frozen
    ]


def _about_clients(whole: Layer) -> list[str]:
    words = []
    if whole.share.mean is not None:
        words.append(
            f"{_percent(whole.share.mean)} of a client's whole gradient is mean component "
            f"({_percent(whole.share.low)} to {_percent(whole.share.high)})"
        )
    kept = whole.distance.kept
    if kept is not None:
        words.append(
            f"the projection brings gradients of two clients closer by {_percent(1.0 - kept)} of "
            "their squared distance"
        )
    return words


def _about_loss(whole: Layer) -> list[str]:
    if whole.forbidden is None or whole.lost is None:
        return ["the averaged gradient is zero: this is a stationary point"]
    return [
        f"{_percent(whole.forbidden)} of the loss gradient lies along sums that can never move; "
        f"biases can do the same but for {_percent(whole.lost)}"
    ]


def _about_diversity(first: Layer) -> list[str]:
    kept = first.diversity.kept
    if kept is None or len(first.shares) < 2:
        return []
    if abs(kept - 1.0) < TIE:
        meaning = "is spread over clients like the rest"
    else:
        meaning = "is what clients agree on" if kept > 1.0 else "is where clients differ"
    return [
        f"without its mean the first layer's gradient is {kept:.2f} times as diverse over clients: "
        f"the mean {meaning}"
    ]


def _about_centring(now: Layer, centred: Measurement | None) -> list[str]:
    layers = () if centred is None else centred.layers
    then = next((layer for layer in layers if layer.name == now.name), now)
    if then is now or now.share.mean is None or then.share.mean is None:
        return []
    return [
        f"centring every input instead leaves {_percent(then.share.mean)} of the first layer's "
        f"gradient in its mean, now {_percent(now.share.mean)}"
    ]


def _about_number(clients: int) -> list[str]:
    if clients >= ENOUGH:
        return []
    return [f"a verdict on so few clients ({clients}) is uncertain: {ENOUGH} or more are better"]


def _percent(value: float | None) -> str:
    r"""A share for people.

    >>> _percent(0.314), _percent(0.0042), _percent(0.00001), _percent(0.0)
    ('31 %', '0.4 %', 'less than 0.1 %', '0 %')
    """
    if value is None:
        return "?"
    if 0 < value < 0.001:
        return "less than 0.1 %"
    return f"{100 * value:.1f} %" if 0 < value < 0.095 else f"{100 * value:.0f} %"
