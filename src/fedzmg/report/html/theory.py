"""The findings of ``fedzmg theory`` as one self-contained page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from fedzmg.report.html.environment import environment
from fedzmg.report.tables.theory import Finding, number, tolerance
from fedzmg.version import __version__

_LEADS = {
    "T3": "Isotropic noise loses 1/d. The gain is large only where the noise is an intensity "
    "shift.",
    "T5": "Both fall like 1/t. Marks: the exact expectation, by a recursion of mean and "
    "covariance.",
    "T5-gain": "A twelfth of the noise, which is what isotropic noise has along 1.",
    "T6": "FedZMG stays away from the optimum by what is predicted, and converges to the optimum "
    "on the hyperplane through its start.",
    "T7": "The sum that the proof needs to be constant follows the product of (1 - λ n).",
    "T8": "Bars: no shift, shifted optima, gradients shifted by a constant.",
    "T9": "The loss stays above its minimum by the gap to the constrained minimum.",
    "T10": "The bound is true, and far from what happens.",
    "T10-terms": "Projection changes only the last term.",
    "T12": "The first layer sees a white background, so most of its gradient is mean.",
    "E6": "Whatever sum a start has, it dies like a power of t.",
    "E7": "The projected gradient vanishes; the rest of the gradient stays.",
    "E8": "A mark is a Hessian.",
}


class Picture(NamedTuple):
    """A figure that was drawn elsewhere."""

    name: str
    title: str
    svg: bytes


def page(findings: Sequence[Finding], pictures: Mapping[str, Sequence[Picture]]) -> str:
    """The page.

    Args:
        findings: of all checks.
        pictures: those of a check by its name.
    """
    return (
        environment()
        .get_template("theory.html.jinja")
        .render(
            version=__version__,
            findings=[_shown(finding, pictures.get(finding["id"], ())) for finding in findings],
            number=number,
            tolerance=tolerance,
        )
    )


def _shown(finding: Finding, pictures: Sequence[Picture]) -> dict[str, Any]:
    kind = str(finding["verdict"]).split()[0]
    return {**finding, "kind": kind, "figures": [_figure(one) for one in pictures]}


def _figure(picture: Picture) -> dict[str, Any]:
    # As an image: the parts of two SVGs in one page would share their names.
    code = base64.b64encode(picture.svg).decode()
    return {
        "title": picture.title,
        "lead": _LEADS.get(picture.name, ""),
        "source": Markup("data:image/svg+xml;base64,") + code,
    }
