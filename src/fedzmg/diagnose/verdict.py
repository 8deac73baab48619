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
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedzmg.diagnose.measure import Layer, Measurement

Expectation = Literal["gain", "little", "loss"]

LOST = 0.25
"""Expect a loss from a quarter of the loss gradient on, forbidden, not replaced and agreed upon."""
SHARE = 0.5
"""Expect a gain where at least half of the first layer's gradient is its mean."""
CENTRED = 0.01
"""Inputs with less of their energy in their mean count as centred."""


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
    found: Measurement, *, inputs: float | None = None, centred: Measurement | None = None
) -> Verdict:
    """Say what to expect.

    Args:
        found: the model and clients as they are.
        inputs: share of the inputs' energy that is the mean of each example, if known.
        centred: the same with every input centred, if it was measured.
    """
    if not found.layers:
        return Verdict("little", "nothing is projected in this model: expect no difference", ())
    first, whole = found.layers[0], found.whole
    share, lost = first.share.mean or 0.0, whole.lost or 0.0
    evidence = [*_about_clients(whole), *_about_loss(whole)]
    if centred is not None:
        evidence += _about_centring(first, centred.layers[0])
    diversity = first.diversity.kept
    if diversity is not None:
        evidence.append(_about_diversity(diversity))
    if lost >= LOST and diversity is not None and diversity > 1.0:
        return Verdict(
            "loss",
            f"the projection forbids {_percent(lost)} of the loss gradient for good, which clients "
            "agree on and no bias can make up for: expect a loss",
            tuple(evidence),
        )
    mean = f"{_percent(share)} of the first layer's gradient ({first.name}) is its mean component"
    if share >= SHARE:
        return Verdict("gain", f"{mean}: expect a gain", tuple(evidence))
    if inputs is not None and inputs < CENTRED:
        return Verdict(
            "little", f"inputs are centred already, {mean}: expect little", tuple(evidence)
        )
    return Verdict("little", f"only {mean}: expect little", tuple(evidence))


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


def _about_diversity(kept: float) -> str:
    if abs(kept - 1.0) < 0.1:
        meaning = "is spread over clients like the rest"
    else:
        meaning = "is what clients agree on" if kept > 1.0 else "is where clients differ"
    return (
        f"without its mean the first layer's gradient is {kept:.2f} times as diverse over clients: "
        f"the mean {meaning}"
    )


def _about_centring(now: Layer, then: Layer) -> list[str]:
    if now.share.mean is None or then.share.mean is None:
        return []
    return [
        f"centring every input instead leaves {_percent(then.share.mean)} of the first layer's "
        f"gradient in its mean, now {_percent(now.share.mean)}"
    ]


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
