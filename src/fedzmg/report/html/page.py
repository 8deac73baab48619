"""One page of words, tables and figures without network, other files or needed scripts."""

import base64
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedzmg.plain_text import plain, printable
from fedzmg.report import figures
from fedzmg.report.figures.style import COLOURS, GHOST, GRID, INK, PAPER, QUIET_INK, rendered
from fedzmg.report.html import sections
from fedzmg.report.html.sections import Block, Section
from fedzmg.report.tables.theory import Finding, finding_table, overview
from fedzmg.results.formatting import count_text
from fedzmg.results.reading import Material, axes_of, name_of
from fedzmg.results.study_result import StudyResult, study_result, summary
from fedzmg.version import __version__

_INKS = {INK: "ink", QUIET_INK: "quiet", GRID: "faint", GHOST: "ghost", PAPER: "paper"}
_INKS |= {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
_DROPPED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_THEORY = (
    "Every check computes the prediction of a claim and measures it. Lines marked as claim decide "
    "whether it holds as printed; the paper does not make those marked as not claimed. All other "
    "lines are derived in docs/theory.md; one that disagreed would void the verdict."
)


def render(
    material: Material, results: Sequence[StudyResult] | None = None,
    drawn: Mapping[str, figures.Chart] | None = None,
) -> str:  # fmt: skip
    """Make the page of a report, with results and figures that are known already if given."""
    results = [study_result(study) for study in material.studies] if results is None else results
    drawn = figures.draw(material, results) if drawn is None else drawn
    summaries = [" ".join(summary(result)) for result in results]
    if not summaries:
        grids, described = material.grids.values(), len(material.heterogeneity)
        summaries = [f"A grid over {' and '.join(axes_of(g))} on {name_of(g)}." for g in grids]
        clients = f"The clients of {count_text(described, 'data set')}, described by their data"
        summaries += [f"{clients}; nothing is trained."] if described else []
    found = [*sections.of_studies(results, drawn), *sections.of_grids(material, drawn)]
    found += [*sections.of_heterogeneity(material, drawn), sections.reproduction(material)]
    return _fill(
        title=_title(material), kicker=f"fedzmg report \u00b7 {', '.join(material.names)}",
        summaries=summaries or ["Nothing can be shown yet: the last section says why."],
        sections=found, footer=f"Made by fedzmg {__version__} from the files of the runs alone.",
    )  # fmt: skip


def theory_page(findings: Sequence[Finding]) -> str:
    """Make the page of the checks of the theory."""
    found = [Section("verdicts", "Verdicts", "", [Block("table", overview(findings), "Verdicts")])]
    for finding in findings:
        key, verdict = str(finding["id"]), str(finding["verdict"])
        blocks = [
            Block("text", str(finding["claim"])),
            Block("text", verdict, style="verdict"),
            Block("table", finding_table(finding), f"Numbers of {key}"),
            Block("pictures", list(figures.theory(finding).values())),
        ]
        title = f"{key} \u00b7 {finding['title']}"
        found.append(Section(key, title, str(finding["setting"]), blocks))
    return _fill(
        title="The theory of FedZMG, checked", kicker="fedzmg theory", summaries=[_THEORY],
        sections=found, footer=f"Made by fedzmg {__version__}: fedzmg theory --html FILE",
    )  # fmt: skip


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedzmg.report.html", "templates"), autoescape=True,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    # A percent sign stays on the line of its number.
    environment.filters["unbroken"] = lambda text: str(text).replace(" %", "\u00a0%")
    environment.filters["svg"] = _inline_svg
    return environment


def _fill(**parts: Any) -> str:
    script = Markup(_environment().get_template("page.js.jinja").render())
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template("page.html.jinja")
    page = template.render(version=__version__, script=script, digest=digest, **parts)
    return re.sub(r"\n\s*\n+", "\n", page)


def _inline_svg(chart: figures.Chart, key: str) -> Markup:
    """Return a figure as an SVG element without its title, which the page shows as a heading."""
    # Colours become custom properties of the page, which follow light and dark mode. Identifiers
    # get the key as a prefix. Series get the attributes that the page's script reads.
    text = _DROPPED.sub("", rendered(chart, "svg").decode()).replace("xlink:href", "href")
    referenced = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text))

    def identifier(found: re.Match[str]) -> str:
        name = found[1]
        if name not in chart.series:
            used = f' id="{key}-{name}"' if name in referenced else ""
            return ' class="heading"' if name == "heading" else used
        label, points, legend = chart.series[name]
        own = f' data-series="{escape(plain(label))}"' + " data-legend" * legend
        texts = "&#10;".join(escape(plain(point)) for point in points)
        return own + (f' data-points="{texts}"' if points else "")

    def tag(found: re.Match[str]) -> str:
        """Rewrite one tag; text between tags stays as it is."""
        own = re.sub("|".join(_INKS), lambda colour: f"var(--{_INKS[colour[0]]})", found[0])
        own = re.sub(r"(\d+\.\d\d)\d+", r"\1", own)
        own = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", own)
        own = re.sub(r"(url\(|href=\")#", rf"\1#{key}-", own)
        return re.sub(r' id="([^"]*)"', identifier, own)

    text = re.sub(r"<[^>]+>", tag, text)
    width, height = 72.0 * chart.get_figwidth(), 72.0 * chart.get_figheight()
    top = height - 72.0 * chart.heading.get_window_extent().y0 / chart.dpi
    opening = (
        f'<svg class="chart" role="img" aria-label="{escape(plain(chart.title))}" '
        f'viewBox="0 {top:.0f} {width:.0f} {height - top:.0f}" '
        f'style="max-width:{width / 10:.0f}rem">'
    )
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    return Markup(re.sub(r"\s*\n\s*(?=<)", "", text).strip())


def _title(material: Material) -> str:
    grids, described = material.grids.values(), material.heterogeneity.values()
    subjects = [study.name for study in material.studies] or [name_of(one) for one in grids]
    if described and not subjects:
        return "How much clients differ: " + ", ".join(str(one["name"]) for one in described)
    shown = list(dict.fromkeys(subjects or material.names))
    return "Federated learning on " + ", ".join(shown[:3]) + " and more" * (len(shown) > 3)
