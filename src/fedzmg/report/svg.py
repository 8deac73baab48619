"""Charts as small inline SVG: colours come from the page's style sheet, so they follow its theme.

Every chart carries a title and a description for those who do not see it. Lines differ in dashes,
not only in colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

MINUS, NONE = "\u2212", "\u2013"
"""A minus as wide as a plus, and what stands where there is no number."""
COLOURS = 7
"""Classes ``c0`` to ``c6`` of the style sheet."""
DASHES = ("", "7 3", "9 3 2 3", "2 2.5", "12 3 2 3 2 3")
MOST_DIRECT_LABELS = 8
MOST_POINTS = 300
_CHARACTER = 6.7
_LINE = 14.0
FULL, LOW, HALF, NARROW = (1040.0, 400.0), (1040.0, 320.0), (560.0, 330.0), (360.0, 300.0)


class Line(NamedTuple):
    """A curve, with a band around it if ``spread`` is given."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    broke_off: bool = False


class Level(NamedTuple):
    """A horizontal line to be reached."""

    value: float
    label: str


class Dots(NamedTuple):
    """A row of values, each with a name; ``centre`` and ``interval`` are marked."""

    label: str
    style: int
    values: Sequence[tuple[str, float]]
    centre: float | None
    interval: tuple[float, float] | None = None
    note: str = ""
    strong: bool = False


class Frame(NamedTuple):
    """Words that every chart needs."""

    key: str
    """Unique in the page."""
    title: str
    description: str
    xlabel: str
    ylabel: str = ""


Number = Callable[[float], str]


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two values, at most so many.

    >>> ticks(0.0, 0.93, 6)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    power = math.floor(math.log10((high - low) / most))
    for factor in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0, 25.0, 50.0):
        step = factor * 10.0**power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def plain(value: float) -> str:
    """A number at a tick."""
    return f"{value:,.10g}".replace("-", MINUS)


def percent(value: float) -> str:
    """A share at a tick, in percent."""
    return f"{100 * value:.6g}".replace("-", MINUS) + " %"


def extent(values: Sequence[float], margin: float = 0.05) -> tuple[float, float]:
    """The range of some values with a little room; never empty."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = margin * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def curves(
    lines: Sequence[Line],
    frame: Frame,
    *,
    levels: Sequence[Level] = (),
    number: Number = plain,
    size: tuple[float, float] = HALF,
    whole: bool = False,
) -> Markup:
    """Draw lines with bands, for a wide page and for a narrow one; one of them is shown.

    Args:
        lines: what to draw; the first comes out on top.
        frame: words around it.
        levels: what is to be reached.
        number: writes a tick of the vertical axis.
        size: of the wide chart.
        whole: whether heights are counts, so that no tick lies between two of them.
    """
    lines = [_thinned(line) for line in lines if len(line.x)]
    return Markup("").join(
        _curves(lines, frame, levels, number, area, name, whole)
        for area, name in ((size, "wide"), (NARROW, "narrow"))
    )


def _curves(
    lines: Sequence[Line],
    frame: Frame,
    levels: Sequence[Level],
    number: Number,
    size: tuple[float, float],
    name: str,
    whole: bool,
) -> Markup:
    width, height = size
    direct = name == "wide" and len(lines) <= MOST_DIRECT_LABELS
    ends = [line.label for line in lines] + [level.label for level in levels]
    right = 26.0 + _CHARACTER * max(map(len, ends)) if direct else 12.0
    right = min(right, 0.4 * width)
    low, high = extent(_heights(lines, levels))
    y = _Scale(low, high, height - 42.0, 12.0)
    y_ticks = [t for t in ticks(low, high, 7) if not whole or t == int(t)] or [0.0]
    left = 32.0 + _CHARACTER * max(len(number(tick)) for tick in y_ticks)
    end = max(line.x[-1] for line in lines)
    x = _Scale(0.0, end or 1.0, left, width - right)
    x_ticks = ticks(0.0, end or 1.0, 10 if width > 800.0 else 6)
    parts = [
        _grid(x, y, x_ticks, y_ticks, plain, number),
        _axis_names(frame, x, y, height),
        *(_level(level, x, y) for level in levels),
    ]
    # The first one on top: it is the reference.
    parts += [_band(line, x, y) for line in reversed(lines)]
    parts += [_path(line, x, y) for line in reversed(lines)]
    if direct:
        parts.append(_end_labels(lines, levels, x, y, height))
    return _document(frame, width, height, parts, name)


def panel(
    members: Sequence[Line],
    background: str,
    frame: Frame,
    limits: tuple[float, float, float],
    *,
    levels: Sequence[Level] = (),
    number: Number = plain,
) -> Markup:
    """Draw one of many small charts with the same scales: ``limits`` are x end, y low, y high."""
    x, y = _panel_scales(limits, number)
    end, low, high = limits
    parts = [
        _grid(x, y, ticks(0.0, end, 4), ticks(low, high, 4), plain, number),
        Markup('<use href="#{}"/>').format(background),
        *(_level(level, x, y) for level in levels),
        *(_band(_thinned(line), x, y) for line in reversed(members)),
        *(_path(_thinned(line), x, y) for line in reversed(members)),
    ]
    return _document(frame, *_PANEL, parts, "panel")


_PANEL = (260.0, 170.0)


def background(
    lines: Sequence[Line], key: str, limits: tuple[float, float, float], number: Number = plain
) -> Markup:
    """All lines in grey, once, for every panel to refer to."""
    x, y = _panel_scales(limits, number)
    paths = Markup("").join(
        Markup('<path class="ghost" d="{}"/>').format(_d(line.x, line.y, x, y))
        for line in map(_thinned, lines)
        if len(line.x)
    )
    return Markup(
        '<svg width="0" height="0" class="defs" aria-hidden="true"><defs><g id="{}">{}</g></defs>'
        "</svg>"
    ).format(key, paths)


def panel_limits(lines: Sequence[Line], levels: Sequence[Level]) -> tuple[float, float, float]:
    """Scales that all panels share."""
    low, high = extent(_heights(lines, levels))
    return max(line.x[-1] for line in lines if len(line.x)) or 1.0, low, high


def _panel_scales(limits: tuple[float, float, float], number: Number) -> tuple[_Scale, _Scale]:
    end, low, high = limits
    left = 12.0 + _CHARACTER * max(len(number(tick)) for tick in ticks(low, high, 4))
    return _Scale(0.0, end, left, _PANEL[0] - 8.0), _Scale(low, high, _PANEL[1] - 24.0, 8.0)


def rows(
    dots: Sequence[Dots],
    frame: Frame,
    *,
    number: Number = plain,
    paired: bool = False,
    zero: bool = False,
) -> Markup:
    """Draw one row of dots per label.

    Args:
        dots: the rows from top to bottom.
        frame: words around it.
        number: writes a tick.
        paired: connect the dots of the same name.
        zero: mark zero with a line.
    """
    return Markup("").join(
        _rows(dots, frame, number, paired, zero, size[0], name)
        for size, name in ((HALF, "wide"), (NARROW, "narrow"))
    )


def _rows(
    dots: Sequence[Dots],
    frame: Frame,
    number: Number,
    paired: bool,
    zero: bool,
    width: float,
    name: str,
) -> Markup:
    wide = name == "wide"
    pitch = (
        (34.0 if wide else 44.0) if len(dots) <= MOST_DIRECT_LABELS else (20.0 if wide else 32.0)
    )
    height = 14.0 + pitch * len(dots) + 44.0
    longest = _CHARACTER * max(len(one.label) for one in dots)
    # A narrow page has no room beside the dots: labels stand above their row.
    left = min(22.0 + longest, 0.4 * width) if wide else 14.0
    noted = 14.0 + _CHARACTER * max(len(one.note) for one in dots)
    right = max(18.0, noted if wide else 0.0)
    values = [value for one in dots for _, value in one.values]
    values += [one.centre for one in dots if one.centre is not None]
    values += [end for one in dots if one.interval for end in one.interval]
    low, high = extent([*values, 0.0] if zero else values)
    x = _Scale(low, high, left, width - right)
    bottom = height - 44.0
    shift = 0.0 if wide else 8.0
    level = [14.0 + pitch * (i + 0.5) for i in range(len(dots))]
    parts = []
    for tick in ticks(low, high, 6 if wide else 4):
        d = f"M{_f(x(tick))} 10V{_f(bottom)}"
        parts.append(Markup('<path class="grid" d="{}"/>').format(d))
        parts.append(_text(x(tick), bottom + 17.0, number(tick), "mid"))
    if zero:
        parts.append(Markup('<path class="zero" d="M{} 8V{}"/>').format(_f(x(0.0)), _f(bottom)))
    if paired:
        parts += _pairs(dots, x, [place + shift for place in level])
    for one, place in zip(dots, level, strict=True):
        parts.append(_row(one, x, place, shift, left, width, wide))
    middle = (x.start + x.end) / 2.0
    parts.append(
        Markup('<text x="{}" y="{}" class="mid name">{}</text>').format(
            _f(middle), _f(height - 8.0), frame.xlabel
        )
    )
    return _document(frame, width, height, parts, name)


def _pairs(dots: Sequence[Dots], x: _Scale, level: Sequence[float]) -> list[Markup]:
    parts = []
    names = dict.fromkeys(name for one in dots for name, _ in one.values)
    for name in names:
        found = [
            (x(value), place)
            for one, place in zip(dots, level, strict=True)
            for own, value in one.values
            if own == name
        ]
        points = " ".join(f"{_f(a)},{_f(b)}" for a, b in found)
        parts.append(Markup('<polyline class="pair" points="{}"/>').format(points))
    return parts


def _row(
    one: Dots, x: _Scale, place: float, shift: float, left: float, width: float, wide: bool
) -> Markup:
    colour = f"c{one.style % COLOURS}"
    parts = []
    centre = place + shift
    height = place + 4.0 if wide else place - 6.0
    parts.append(
        _text(left - 10.0, height, one.label, "end")
        if wide
        else _text(x.start, height, one.label, "start")
    )
    if one.note:
        parts.append(_text(width - 4.0, height, one.note, "end quiet"))
    if one.interval is not None:
        low, high = (_f(x(end)) for end in one.interval)
        ends = f"M{low} {_f(centre)}H{high}M{low} {_f(centre - 4)}v8M{high} {_f(centre - 4)}v8"
        parts.append(Markup('<path class="whisker {}" d="{}"/>').format(colour, ends))
    if one.centre is not None and one.interval is None:
        d = f"M{_f(x(one.centre))} {_f(centre - 9)}v18"
        parts.append(Markup('<path class="mean {}" d="{}"/>').format(colour, d))
    for name, value in one.values:
        parts.append(
            Markup('<circle class="dot {}" cx="{}" cy="{}" r="4"><title>{}</title></circle>')
            .format(colour, _f(x(value)), _f(centre), name)
        )  # fmt: skip
    if one.centre is not None and one.interval is not None:
        shape = "full" if one.strong else "hollow"
        parts.append(
            Markup('<circle class="{} {}" cx="{}" cy="{}" r="5"/>')
            .format(shape, colour, _f(x(one.centre)), _f(centre))
        )  # fmt: skip
    return Markup('<g data-series="{}">{}</g>').format(one.label, Markup("").join(parts))


def heat_map(
    frame: Frame,
    columns: Sequence[str],
    lines: Sequence[str],
    cells: Sequence[Sequence[float | None]],
    *,
    best: tuple[int, int] | None,
    number: Number = plain,
) -> Markup:
    """Draw a table of scores as shades; ``cells[i][j]`` belongs to ``lines[i]``, ``columns[j]``."""
    side, tall = 58.0, 32.0
    left = 34.0 + _CHARACTER * max(map(len, lines))
    width, height = left + side * len(columns) + 8.0, 8.0 + tall * len(lines) + 46.0
    known = [value for line in cells for value in line if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    parts = []
    for i, line in enumerate(cells):
        top = 8.0 + tall * i
        parts.append(_text(left - 8.0, top + tall / 2 + 4.0, lines[i], "end"))
        for j, value in enumerate(line):
            share = 0.0 if value is None or high == low else (value - low) / (high - low)
            text = NONE if value is None else number(value)
            place = f"{columns[j]}, {lines[i]}: {text}"
            parts.append(
                Markup(
                    '<rect class="cell" x="{}" y="{}" width="{}" height="{}" fill-opacity="{}">'
                    "<title>{}</title></rect>"
                ).format(_f(left + side * j), _f(top), _f(side), _f(tall), f"{share:.2f}", place)
            )
            shade = "mid on" if share > 0.45 else "mid"
            parts.append(_text(left + side * (j + 0.5), top + tall / 2 + 4.0, text, shade))
    if best is not None:
        i, j = best
        parts.append(
            Markup('<rect class="best" x="{}" y="{}" width="{}" height="{}"/>').format(
                _f(left + side * j + 1), _f(9.0 + tall * i), _f(side - 2), _f(tall - 2)
            )
        )
    foot = 8.0 + tall * len(lines)
    for j, column in enumerate(columns):
        parts.append(_text(left + side * (j + 0.5), foot + 17.0, column, "mid"))
    parts.append(_text((left + width) / 2.0, height - 8.0, frame.xlabel, "mid name"))
    turned = f"translate(14 {_f(foot / 2)}) rotate(-90)"
    parts.append(
        Markup('<text transform="{}" class="mid name">{}</text>').format(turned, frame.ylabel)
    )
    return _document(frame, width, height, parts, "any")


def scatter(
    points: Sequence[tuple[str, float, float]],
    frame: Frame,
    *,
    number: Number = plain,
    named: bool = False,
    size: tuple[float, float] = HALF,
) -> Markup:
    """Draw points; ``named`` ones bear their names where these do not cover each other."""
    out = []
    for (width, height), name in ((size, "wide"), (NARROW, "narrow")):
        x_low, x_high = extent([point[1] for point in points])
        y_low, y_high = extent([point[2] for point in points])
        y_ticks = ticks(y_low, y_high, 6)
        left = 32.0 + _CHARACTER * max(len(number(tick)) for tick in y_ticks)
        x = _Scale(x_low, x_high, left, width - (90.0 if named else 14.0))
        y = _Scale(y_low, y_high, height - 42.0, 12.0)
        x_ticks = ticks(x_low, x_high, 10 if width > 800.0 else 5)
        parts = [_grid(x, y, x_ticks, y_ticks, plain, number), _axis_names(frame, x, y, height)]
        parts += [
            Markup('<circle class="dot c0" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
            .format(_f(x(a)), _f(y(b)), 4 if named else 3, label)
            for label, a, b in points
        ]  # fmt: skip
        if named:
            parts += _names([(label, x(a), y(b)) for label, a, b in points])
        out.append(_document(frame, width, height, parts, name))
    return Markup("").join(out)


def _names(points: Sequence[tuple[str, float, float]]) -> list[Markup]:
    """Names right of their points; one that would cover another name or point is left out."""
    taken = [(a - 4.0, b - 4.0, a + 4.0, b + 4.0) for _, a, b in points]
    parts = []
    for label, a, b in points:
        box = (a + 6.0, b - 6.0, a + 8.0 + _CHARACTER * len(label), b + 6.0)
        if not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
            for other in taken
        ):
            taken.append(box)
            parts.append(_text(a + 8.0, b + 4.0, label, "start"))
    return parts


def swatch(style: int) -> Markup:
    """A short piece of a line for a legend."""
    return Markup(
        '<svg class="swatch" viewBox="0 0 34 10" width="34" height="10" aria-hidden="true">'
        '<path class="line c{}" d="M1 5H33"{}/></svg>'
    ).format(style % COLOURS, _dash(style))


def _document(
    frame: Frame, width: float, height: float, parts: Sequence[str | Markup], name: str
) -> Markup:
    key = f"{frame.key}-{name}"
    return Markup(
        '<svg class="chart {name}"{limit} viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{title}</title>'
        '<desc id="{key}-d">{description}</desc>{inside}</svg>'
    ).format(
        name=name,
        # A small table of cells must not be blown up to the width of the page.
        limit=Markup(' style="max-width:{}px"').format(_f(width)) if name == "any" else "",
        width=_f(width),
        height=_f(height),
        key=key,
        title=frame.title,
        description=frame.description,
        inside=Markup("").join(parts),
    )


def _grid(
    x: _Scale,
    y: _Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_number: Number,
    y_number: Number,
) -> Markup:
    parts = []
    for tick in y_ticks:
        d = f"M{_f(x.start)} {_f(y(tick))}H{_f(x.end)}"
        parts.append(Markup('<path class="grid" d="{}"/>').format(d))
        parts.append(_text(x.start - 6.0, y(tick) + 4.0, y_number(tick), "end"))
    for tick in x_ticks:
        parts.append(_text(x(tick), y.start + 16.0, x_number(tick), "mid"))
        d = f"M{_f(x(tick))} {_f(y.start)}v4"
        parts.append(Markup('<path class="axis" d="{}"/>').format(d))
    d = f"M{_f(x.start)} {_f(y.start)}H{_f(x.end)}"
    parts.append(Markup('<path class="axis" d="{}"/>').format(d))
    return Markup("").join(parts)


def _axis_names(frame: Frame, x: _Scale, y: _Scale, height: float) -> Markup:
    turned = f"translate(12 {_f((y.start + y.end) / 2)}) rotate(-90)"
    return _text((x.start + x.end) / 2.0, height - 7.0, frame.xlabel, "mid name") + Markup(
        '<text transform="{}" class="mid name">{}</text>'
    ).format(turned, frame.ylabel)


def _level(level: Level, x: _Scale, y: _Scale) -> Markup:
    d = f"M{_f(x.start)} {_f(y(level.value))}H{_f(x.end)}"
    return Markup('<path class="level" d="{}"><title>{}</title></path>').format(d, level.label)


def _band(line: Line, x: _Scale, y: _Scale) -> Markup:
    if line.spread is None:
        return Markup("")
    there = [(a, b + s) for a, b, s in zip(line.x, line.y, line.spread, strict=True)]
    back = [(a, b - s) for a, b, s in zip(line.x, line.y, line.spread, strict=True)][::-1]
    outline = [*there, *back]
    d = _d([a for a, _ in outline], [b for _, b in outline], x, y)
    return Markup('<path class="band c{}" data-series="{}" d="{}Z"/>').format(
        line.style % COLOURS, line.label, d
    )


def _path(line: Line, x: _Scale, y: _Scale) -> Markup:
    d = _d(line.x, line.y, x, y)
    drawn = Markup(
        '<path class="line c{}" data-series="{}" d="{}"{}><title>{}</title></path>'
    ).format(line.style % COLOURS, line.label, d, _dash(line.style), line.label)
    if line.broke_off:
        a, b = x(line.x[-1]), y(line.y[-1])
        cross = f"M{_f(a - 4)} {_f(b - 4)}l8 8m0 -8l-8 8"
        drawn += Markup('<path class="mean c{}" d="{}"/>').format(line.style % COLOURS, cross)
    if len(line.x) == 1:
        drawn += Markup('<circle class="dot c{}" cx="{}" cy="{}" r="3"/>').format(
            line.style % COLOURS, _f(x(line.x[0])), _f(y(line.y[0]))
        )
    return drawn


def _end_labels(
    lines: Sequence[Line], levels: Sequence[Level], x: _Scale, y: _Scale, height: float
) -> Markup:
    found = [
        (y(line.y[-1]), x(line.x[-1]), line.label, f"c{line.style % COLOURS}") for line in lines
    ]
    found += [(y(level.value), x.end, level.label, "quiet") for level in levels]
    found.sort(key=lambda entry: entry[0])
    places = _moved_apart([entry[0] for entry in found], _LINE, height - 36.0)
    parts = []
    for (wanted, start, label, colour), place in zip(found, places, strict=True):
        leader = f"M{_f(start + 2)} {_f(wanted)}L{_f(x.end + 14)} {_f(place)}"
        parts.append(Markup('<path class="leader {}" d="{}"/>').format(colour, leader))
        parts.append(
            Markup('<text x="{}" y="{}" class="label {}" data-series="{}">{}</text>').format(
                _f(x.end + 18.0), _f(place + 4.0), colour, label, label
            )
        )
    return Markup("").join(parts)


def _moved_apart(wanted: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Heights in the same order with a gap between neighbours, near the wanted ones."""
    groups: list[tuple[list[float], float]] = []
    for height in wanted:
        members, top = [height], height
        # Groups that would touch are merged around the mean of what their members want.
        while groups and groups[-1][1] + gap * len(groups[-1][0]) > top:
            members = groups.pop()[0] + members
            middle = sum(w - i * gap for i, w in enumerate(members)) / len(members)
            top = middle
        groups.append((members, top))
    places = [top + i * gap for members, top in groups for i in range(len(members))]
    excess = max(0.0, places[-1] - bottom) if places else 0.0
    return [place - excess for place in places]


def _heights(lines: Sequence[Line], levels: Sequence[Level]) -> list[float]:
    values = [level.value for level in levels]
    for line in lines:
        spread = line.spread if line.spread is not None else [0.0] * len(line.y)
        values += [b + s for b, s in zip(line.y, spread, strict=True)]
        values += [b - s for b, s in zip(line.y, spread, strict=True)]
    return values


def _thinned(line: Line) -> Line:
    """Every so many points of a long line, and its end: no screen shows more."""
    step = -(-len(line.x) // MOST_POINTS)
    if step <= 1:
        return line
    kept = sorted({*range(0, len(line.x), step), len(line.x) - 1})
    spread = None if line.spread is None else [line.spread[i] for i in kept]
    return line._replace(x=[line.x[i] for i in kept], y=[line.y[i] for i in kept], spread=spread)


def _d(xs: Sequence[float], ys: Sequence[float], x: _Scale, y: _Scale) -> str:
    points = [(x(a), y(b)) for a, b in zip(xs, ys, strict=True) if math.isfinite(b)]
    return "M" + "L".join(f"{_f(a)} {_f(b)}" for a, b in points)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(_f(x), _f(y), kind, text)


def _dash(style: int) -> Markup:
    dash = DASHES[style % len(DASHES)]
    return Markup(' stroke-dasharray="{}"').format(dash) if dash else Markup("")


def _f(value: float) -> str:
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")
