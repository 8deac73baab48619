"""The findings of ``fedzmg theory``: as a table in a terminal, in Markdown, and as one HTML page.

A finding is the dictionary that the command prints as JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.errors import InputError
from fedzmg.report.writing import check_place, write
from fedzmg.version import __version__

ANOTHER_FILE = "choose another file"
Finding = Mapping[str, Any]
_MINUS = "\u2212"
_STYLES = {"holds": "green", "fails": "yellow", "not": "bold red"}
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


def number(value: float) -> str:
    r"""A number with as many digits as it deserves.

    >>> number(13.799966), number(-1.0225), number(9.2e-06), number(300)
    ('13.8', '\u22121.0225', '9.2e\u221206', '300')
    """
    return f"{value:.5g}".replace("-", _MINUS)


def tolerance(line: Mapping[str, Any]) -> str:
    """What a measured number may differ by.

    >>> tolerance({"rule": "relative", "tolerance": 0.01})
    '± 1 %'
    """
    room = float(line["tolerance"])
    if line["rule"] == "relative":
        return f"± {100 * room:.2g} %" if room >= 1e-4 else f"rel. {room:.0e}".replace("-", _MINUS)
    if line["rule"] == "near":
        return "exact" if room == 0 else f"± {room:.2g}".replace("-", _MINUS)
    return str(line["rule"])


def one(finding: Finding) -> RenderableType:
    """A check as a block of a terminal: claim, setting, lines and verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    # The words break where the terminal is narrow; cut off, numbers would be worth nothing.
    table.add_column("what", overflow="fold")
    for head in ("predicted", "measured", "tolerance"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("agrees", no_wrap=True)
    for line in finding["lines"]:
        agrees = "yes" if line["agrees"] else "no"
        table.add_row(
            Text(line["what"] + (" [claim]" if line["stated"] else "")),
            number(line["predicted"]), number(line["measured"]), tolerance(line),
            Text(agrees, style="" if line["agrees"] else "bold"),
        )  # fmt: skip
    style = _STYLES[finding["verdict"].split()[0]]
    return Group(
        Text(f"{finding['id']}  {finding['title']}", style="bold"),
        Text(f"claim    {finding['claim']}"),
        Text(f"setting  {finding['setting']}"),
        Text.assemble("verdict  ", (finding["verdict"], style)),
        table,
    )


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """One line about all checks."""
    verdicts = [str(finding["verdict"]) for finding in findings]
    counts = {
        "hold": sum(v == "holds" for v in verdicts),
        "fail as stated": sum(v.startswith("fails") for v in verdicts),
        "not reproduced": sum(v.startswith("not") for v in verdicts),
    }
    words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    number_of = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    return f"{number_of} in {seconds:.0f} s: {words}"


def markdown(findings: Sequence[Finding]) -> str:
    """All lines of all checks as one Markdown table."""
    out = ["| check | what | predicted | measured | tolerance | agrees |",
           "|:--|:--|--:|--:|:--|:--|"]  # fmt: skip
    for finding in findings:
        out.append(
            f"| **{finding['id']}** | **{finding['title']}: {finding['verdict']}** | | | | |"
        )
        for line in finding["lines"]:
            what = line["what"].replace("|", "\\|") + (" *(claim)*" if line["stated"] else "")
            cells = [
                "", what, number(line["predicted"]), number(line["measured"]), tolerance(line),
                "yes" if line["agrees"] else "**no**",
            ]  # fmt: skip
            out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def check_places(out: Path | None, html: Path | None) -> None:
    """Find out before the work whether figures and page can be written.

    Args:
        out: directory of the figures; None: none are asked for.
        html: file of the page.

    Raises:
        InputError: if one of them cannot.
    """
    if out is not None:
        check_place(out)
    if html is not None and html.is_dir():
        raise InputError(f"cannot write {html}: it is a directory; {ANOTHER_FILE}")
    if html is not None:
        check_place(html.parent, ANOTHER_FILE)


def write_figures(findings: Sequence[Finding], out: Path) -> list[Path]:
    """Write every figure as PNG and SVG.

    Raises:
        InputError: if one cannot be written.
    """
    from fedzmg.report.plots.style import save
    from fedzmg.report.plots.theory import figures

    written: list[Path] = []
    for finding in findings:
        for name, figure in figures(finding).items():
            written += save(figure, out / name)
    return written


def page(findings: Sequence[Finding]) -> str:
    """One self-contained HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedzmg.report.html", "templates"),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("theory.html.jinja").render(
        version=__version__,
        findings=[_shown(finding) for finding in findings],
        number=number,
        tolerance=tolerance,
    )


def write_page(findings: Sequence[Finding], path: Path) -> None:
    """Write the page.

    Raises:
        InputError: if it cannot be written.
    """
    write(path, page(findings).encode(), ANOTHER_FILE)


def _shown(finding: Finding) -> dict[str, Any]:
    kind = str(finding["verdict"]).split()[0]
    return {**finding, "kind": kind, "figures": list(_drawings(finding))}


def _drawings(finding: Finding) -> Iterator[dict[str, Any]]:
    from fedzmg.report.plots.style import rendered
    from fedzmg.report.plots.theory import figures

    for name, figure in figures(finding).items():
        # As an image: the parts of two SVGs in one page would share their names.
        code = base64.b64encode(rendered(figure, "svg")).decode()
        title = figure.axes[0].get_title(loc="left")
        yield {
            "title": title,
            "lead": _LEADS.get(name, ""),
            "source": Markup("data:image/svg+xml;base64,") + code,
        }
