"""How templates become pages."""

from __future__ import annotations

import jinja2


def environment() -> jinja2.Environment:
    """What finds the templates: words are escaped, and a name that is missing is a mistake."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("fedzmg.report.html", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
