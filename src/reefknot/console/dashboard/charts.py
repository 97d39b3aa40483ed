"""
Charts as SVG text: counters of the last minutes, the attempts of a job, the waits of a policy.

Pure functions. Every text is escaped here, because templates take the SVG as it is. Nothing has a `style` attribute or
a colour of its own: classes name them, so that the strict content policy holds and both colour schemes are drawn by one
sheet. Every chart says in words what it shows, for those who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from msgspec import Struct

from reefknot.console.operations.values import duration
from reefknot.runtime.log import printable

WIDTH, HEIGHT = 400, 168
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 22
MOST_POINTS = 360
MOST_ROWS = 100
DASH = 3.0
"""Half of the width of a point that stands alone."""
MOST_NUMBERED = 8
"""Bars from which on there is no room for a number above each."""
KINDS = 6
"""Kinds of lines and areas that the sheet tells apart by colour and by pattern."""


class Series(Struct, frozen=True):
    """A named row of numbers, the oldest first. None where nothing is known."""

    name: str
    values: Sequence[float | None]


class Span(Struct, frozen=True):
    """A stretch of time in a row of a timeline: an attempt, or the wait before it."""

    begins: float
    ends: float
    kind: str
    """The class of its colour: succeeded, failed, waiting, running, other."""


def lines(series: Sequence[Series], *, title: str, unit: str, step_s: float) -> str:
    """A chart of lines over time, the newest value at the right edge."""
    shown = [_cut(one) for one in series]
    top = _ceiling(max((value for one in shown for value in one.values if value is not None), default=0.0), unit)
    parts = [_grid(top, unit), _time_axis(_length(shown) * step_s)]
    for number, one in enumerate(shown):
        for run in _runs(one.values, top):
            name = _safe(one.name)
            kind = f"line kind-{number % KINDS + 1}"
            parts.append(f'<polyline class="{kind}" points="{run}"><title>{name}</title></polyline>')
    return _svg(title, _in_words(shown, unit), parts, _points(shown, unit, step_s, is_stacked=False))


def stacked(series: Sequence[Series], *, title: str, unit: str, step_s: float) -> str:
    """A chart of stacked bars over time, the newest bar at the right edge."""
    shown = [_cut(one) for one in series]
    length = _length(shown)
    sums = [sum(_at(one.values, place) for one in shown) for place in range(length)]
    top = _ceiling(max(sums, default=0.0))
    parts = [_grid(top, unit), _time_axis(length * step_s)]
    width = (WIDTH - LEFT - RIGHT) / max(1, length)
    floors = [0.0] * length
    for number, one in enumerate(shown):
        boxes = []
        for place in range(length):
            value = _at(one.values, place)
            if value > 0:
                x, y = LEFT + place * width, _y(floors[place] + value, top)
                height = _y(floors[place], top) - y
                boxes.append(f"M{x:.1f} {y:.1f}h{max(0.6, width - 0.6):.1f}v{height:.1f}h-{max(0.6, width - 0.6):.1f}z")
                floors[place] += value
        if boxes:
            kind = f"area kind-{number % KINDS + 1}"
            parts.append(f'<path class="{kind}" d="{"".join(boxes)}"><title>{_safe(one.name)}</title></path>')
    return _svg(title, _in_words(shown, unit), parts, _points(shown, unit, step_s, is_stacked=True))


def waits(schedule: Sequence[tuple[float, float]], *, title: str) -> str:
    """The waits before each retry as bars from the shortest to the longest possible one, in seconds."""
    shown = [(max(0.0, _finite(low)), max(0.0, _finite(high))) for low, high in schedule[:MOST_ROWS]]
    top = _ceiling(max((high for _, high in shown), default=0.0), "s")
    parts = [_grid(top, "s")]
    width = (WIDTH - LEFT - RIGHT) / max(1, len(shown))
    every = max(1, math.ceil(len(shown) / 10))
    for place, (low, high) in enumerate(shown):
        x, bar = LEFT + place * width + width * 0.15, max(1.0, width * 0.7)
        words = f"retry {place + 1}: {duration(low)}" + ("" if low == high else f" to {duration(high)}")
        y_low, y_high = _y(low, top), _y(high, top)
        sure, jitter = max(0.8, HEIGHT - BOTTOM - y_low), max(0.0, y_low - y_high)
        parts.append(
            f"<g><title>{_safe(words)}</title>"
            f'<rect class="sure" x="{x:.1f}" y="{y_low:.1f}" width="{bar:.1f}" height="{sure:.1f}"/>'
            f'<rect class="jitter" x="{x:.1f}" y="{y_high:.1f}" width="{bar:.1f}" height="{jitter:.1f}"/></g>'
        )
        if place % every == 0:
            parts.append(_text(x + bar / 2, HEIGHT - 6, str(place + 1), anchor="middle"))
        if len(shown) <= MOST_NUMBERED:
            parts.append(_text(x + bar / 2, max(9.0, y_high - 4), short_duration(high), anchor="middle"))
    words = "; ".join(
        f"before retry {place + 1} {duration(low)}" + ("" if low == high else f" to {duration(high)}")
        for place, (low, high) in enumerate(shown)
    )
    return _svg(title, words or "no waits", parts)


def timeline(
    rows: Sequence[tuple[str, str, Sequence[Span]]], *, title: str, begins: float | None = None, ends: float = 0.0
) -> str:
    """
    Rows of spans over one axis of seconds; each row has a name, and words about it.

    The axis goes from `begins`, or from the first span, to `ends`, or to the last span. A long idle stretch is cut, so
    that the spans stay readable. Words stand next to the bars, or above them on a narrow page, and every position is a
    share of the width, so that the page never scrolls sideways.
    """
    shown = rows[:MOST_ROWS]
    spans = [span for _, _, row in shown for span in row]
    start = min([span.begins for span in spans] if begins is None else [begins, *(span.begins for span in spans)])
    axis = _Axis.of(spans, start, max([ends, *(span.ends for span in spans)]))
    marks = "".join(f'<rect class="break" x="{at:.2f}%" width="{CUT:.2f}%" height="100%"/>' for at in axis.cuts_at)
    ticks = axis.ticks()
    grid = marks + "".join(f'<line class="grid" x1="{at:.2f}%" x2="{at:.2f}%" y2="100%"/>' for at, _, _ in ticks)
    parts = []
    for name, about, row in shown:
        words = "; ".join(
            f"{one.kind} after {duration(one.begins - start)} for {duration(one.ends - one.begins)}" for one in row
        )
        bars = "".join(_span(span, axis.at(span.begins), axis.at(span.ends)) for span in row)
        parts.append(
            f'<div class="row"><p><b>{_safe(name)}</b> {_safe(about)}</p><svg class="bars" role="img" '
            f'aria-label="{_safe(f"{name}: {words}")}">{grid}{bars}</svg></div>'
        )
    signs = [(at + CUT / 2, "//", "middle") for at in axis.cuts_at]
    labels = "".join(_share_text(at, words, anchor) for at, words, anchor in [*ticks, *signs])
    parts.append(
        f'<div class="row"><p>since submission</p><svg class="bars" aria-hidden="true">{marks}{labels}</svg></div>'
    )
    return f'<div class="timeline" role="group" aria-label="{_safe(title)}">{"".join(parts)}</div>'


CUT = 12.0
"""The width of a stretch that is cut, in percent."""
MOST_CUTS = 3
TOO_LONG = 3.0
"""How much longer than all the rest an idle stretch has to be to be cut."""
WIDTH_OF_A_SIGN = 2.1
"""The width of a sign of a label on the narrowest page, in percent."""


class _Axis(Struct, frozen=True):
    """An axis of time from 0 to 100 percent, without the idle stretches that are cut."""

    begins: float
    ends: float
    cuts: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, spans: Sequence[Span], begins: float, ends: float) -> _Axis:
        """The axis over these spans; whatever waits is idle."""
        gaps, until = [], begins
        for span in sorted((one for one in spans if one.kind != "waiting"), key=lambda one: one.begins):
            gaps.append((until, span.begins))
            until = max(until, span.ends)
        rest, cuts = ends - begins, []
        for gap in sorted([*gaps, (until, ends)], key=lambda one: one[0] - one[1])[:MOST_CUTS]:
            length = gap[1] - gap[0]
            if not 0 < TOO_LONG * (rest - length) < length:
                break
            rest -= length
            cuts.append(gap)
        return cls(begins, ends, tuple(sorted(cuts)))

    def at(self, moment: float) -> float:
        """The place of a moment."""
        idle = sum(end - begin for begin, end in self.cuts)
        scale = (100 - CUT * len(self.cuts)) / max(0.001, self.ends - self.begins - idle)
        place = (moment - self.begins) * scale
        for begin, end in self.cuts:
            share = min(1.0, max(0.0, (moment - begin) / (end - begin)))
            place += share * (CUT - (end - begin) * scale)
        return min(100.0, max(0.0, place))

    @property
    def cuts_at(self) -> list[float]:
        return [self.at(begin) for begin, _ in self.cuts]

    def ticks(self) -> list[tuple[float, str, str]]:
        """Places with their labels and how these are anchored: the ends of the axis and of what is cut, and others
        where there is room, also on the narrowest page."""
        whole = self.ends - self.begins
        wanted = [(self.begins, "start")]
        wanted += [one for begin, end in self.cuts for one in ((end, "start"), (begin, "end"))]
        wanted += [(self.ends, "end"), *((self.begins + whole * part, "middle") for part in (0.5, 0.25, 0.75))]
        found: list[tuple[float, str, str]] = []
        taken: list[tuple[float, float]] = []
        for moment, anchor in wanted:
            at, words = self.at(moment), duration(moment - self.begins)
            width = WIDTH_OF_A_SIGN * (len(words) + 1)
            left = at - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
            if left >= 0 and left + width <= 100 and all(left + width < low or high < left for low, high in taken):
                found.append((at, words, anchor))
                taken.append((left, left + width))
        return sorted(found)


def meter(value: float, limit: float, *, title: str) -> str:
    """A small bar that is full at `limit`."""
    share = min(1.0, max(0.0, value / limit)) if limit > 0 else 0.0
    level = "high" if share >= 0.9 else "raised" if share >= 0.7 else "low"
    words = _safe(title)
    return (
        f'<svg class="meter {level}" viewBox="0 0 100 8" width="100" height="8" role="img" preserveAspectRatio="none" '
        f'aria-label="{words}"><title>{words}</title><rect class="track" width="100" height="8" rx="2"/>'
        f'<rect class="fill" width="{share * 100:.1f}" height="8" rx="2"/></svg>'
    )


def number(value: float) -> str:
    """A number on an axis or in a tile: `0`, `0.25`, `40`, `1.2k`, `3M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def short_duration(value: float) -> str:
    """A duration on an axis, in one unit: `250 ms`, `40 s`, `13.3 min`, `4 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1000:.3g} ms" if value > 0 else "0 s"


# ---- parts -----------------------------------------------------------------------------------------------------------


def _safe(text: str) -> str:
    """A text for an element or an attribute, with control characters as escapes."""
    return escape(printable(text))


def _points(series: Sequence[Series], unit: str, step_s: float, *, is_stacked: bool) -> str:
    """The attributes from which the script shows the values of one step, to a pointer or to the arrow keys."""
    names = "|".join(one.name.replace("|", " ") for one in series)
    texts = duration if unit == "s" else number
    values = "|".join(",".join("" if one is None else texts(one) for one in row.values) for row in series)
    place = f'data-left="{LEFT}" data-right="{WIDTH - RIGHT}"' + (' data-stacked="1"' if is_stacked else "")
    return f'tabindex="0" data-step="{step_s:g}" data-names="{_safe(names)}" data-values="{_safe(values)}" {place} '


def _svg(title: str, words: str, parts: Iterable[str], more: str = "") -> str:
    return (
        f'<svg class="chart" {more}viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{_safe(title)}: {_safe(words)}"><title>{_safe(title)}</title><desc>{_safe(words)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _grid(top: float, unit: str) -> str:
    """The horizontal lines with their numbers; the highest with the unit."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _y(top * share, top)
        value = short_duration(top * share) if unit == "s" else number(top * share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, value, anchor="end"))
    return "".join(parts)


def _time_axis(whole_s: float) -> str:
    """Labels below: how long ago, at the left edge, in the thirds, and `now`."""
    inner = WIDTH - LEFT - RIGHT
    parts = []
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        ago = whole_s * (1 - share)
        words = "now" if share == 1.0 else f"−{duration(ago)}"
        anchor = "start" if share == 0.0 else "end" if share == 1.0 else "middle"
        parts.append(_text(LEFT + inner * share, HEIGHT - 6, words, anchor=anchor))
    return "".join(parts)


def _text(x: float, y: float, words: str, *, anchor: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(words)}</text>'


def _share_text(at: float, words: str, anchor: str) -> str:
    return f'<text class="label" x="{at:.2f}%" y="14" text-anchor="{anchor}">{_safe(words)}</text>'


def _span(span: Span, begins: float, ends: float) -> str:
    """A bar, or the dashes of a wait, between two places in percent; a bar is never too narrow to be seen."""
    words = f"{span.kind}, {duration(span.ends - span.begins)}"
    if span.kind == "waiting":
        shape = f'<line class="span waiting" x1="{begins:.2f}%" x2="{ends:.2f}%" y1="10" y2="10"/>'
    else:
        width = max(0.6, ends - begins)
        x = min(begins, 100 - width)
        shape = f'<rect class="span {_safe(span.kind)}" x="{x:.2f}%" y="2" width="{width:.2f}%" height="16"/>'
    return f"<g><title>{_safe(words)}</title>{shape}</g>"


def _cut(series: Series) -> Series:
    """The newest points, and numbers only where there are finite ones."""
    values = list(series.values)[-MOST_POINTS:]
    return Series(
        series.name, [None if value is None or not math.isfinite(value) else float(value) for value in values]
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _length(series: Sequence[Series]) -> int:
    return max((len(one.values) for one in series), default=0)


def _at(values: Sequence[float | None], place: int) -> float:
    value = values[place] if place < len(values) else None
    return max(0.0, value or 0.0)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value / top)


def _runs(values: Sequence[float | None], top: float) -> list[str]:
    """Points of connected lines; a gap ends one, and a lone point becomes a short dash."""
    step = (WIDTH - LEFT - RIGHT) / max(1, len(values) - 1)
    runs: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((LEFT + place * step, _y(max(0.0, value), top)))
    drawn = [run if len(run) > 1 else [(x + way, y) for x, y in run for way in (-DASH, DASH)] for run in runs if run]
    return [" ".join(f"{x:.1f},{y:.1f}" for x, y in run) for run in drawn]


_ROUND_S = (60, 120, 240, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 43_200, 86_400, 172_800, 345_600, 864_000)
"""Tops of an axis of minutes, hours and days, whose halves are round as well."""


def _ceiling(value: float, unit: str = "") -> float:
    """The next round number for the top of an axis: 1, 2, 4, 5 or 10 times a power of ten, or a round time."""
    if value <= 0:
        return 1.0
    if unit == "s" and 40 < value <= _ROUND_S[-1]:
        return next(one for one in _ROUND_S if one >= value * 0.999999)
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 10, 20) if step * power >= value * 0.999999)


def _in_words(series: Sequence[Series], unit: str) -> str:
    words = []
    for one in series:
        known = [value for value in one.values if value is not None]
        if known:
            last, most = _amount(known[-1], unit), _amount(max(known), unit)
            when = "last" if one.values[-1] is None else "now"
            words.append(f"{one.name}: {last} {when}, at most {most}")
    return "; ".join(words) or "nothing recorded yet"


def _amount(value: float, unit: str) -> str:
    return duration(value) if unit == "s" else f"{number(value)} {unit}".strip()
