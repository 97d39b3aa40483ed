"""
Formats of what pages show: times, durations, numbers, states, addresses and commands, as templates call them.

Charts become markup here, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from json import dumps, loads
from shlex import quote as shell_quoted
from typing import Any
from urllib.parse import quote, unquote, urlencode

from reefknot import clock
from reefknot.console.dashboard import charts
from reefknot.console.dashboard.charts import Series, Span
from reefknot.console.operations.job_notes import progress_in_words
from reefknot.console.operations.values import duration
from reefknot.console.words.policies import field_text
from reefknot.runtime.log import printable

_KINDS = {
    "good": "healthy succeeded ok accepted resolved recovered closed",
    "warn": "warning degraded overloaded cooling resting probing recovering needs_attention retrying rejected deferred "
    "half_open never_synced other_connector kept_elsewhere",
    "bad": "failed quarantined critical full problem dropped unreadable open raised timeout error",
    "busy": "running syncing leaving",
    "still": "paused draining drained cancelled discarded off not_configured",
}
KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words.split()}
LONGEST_JSON = 20_000


def visible(value: Any) -> Any:
    """A value as a template puts it out: of a text, control characters and those that change its direction are written
    as escapes, so that no text looks like another one. Lines stay lines."""
    if type(value) is not str or value.isprintable():
        return value
    return "\n".join(printable(line) for line in value.split("\n"))


def kind_of(word: object) -> str:
    """The CSS class of a word of state; "" for an unknown word."""
    return KIND_OF.get(str(word).lower().replace(" ", "_"), "")


def relative(at: str) -> str:
    """A time as its distance from now: `12 s ago`, `in 3 min`; the script keeps it up to date."""
    moment = _moment(at)
    if moment is None:
        return at
    distance = clock.wall() - moment.timestamp()
    size = abs(distance)
    if size < 1.5:
        return "now"
    for limit, unit, word in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h"), (float("inf"), 86_400, "d")):
        if size < limit:
            words = f"{round(size / unit)} {word}"
            break
    return f"{words} ago" if distance > 0 else f"in {words}"


def absolute(at: str) -> str:
    """A time in full, in UTC."""
    moment = _moment(at)
    return at if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _moment(at: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(at)
    except (ValueError, TypeError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def seconds_at(at: str) -> float:
    """A time as seconds since 1970, 0 for what is no time."""
    moment = _moment(at)
    return 0.0 if moment is None else moment.timestamp()


def amount(value: float | None) -> str:
    """A number for a tile."""
    if value is None:
        return "–"
    if abs(value) >= 10_000:
        return charts.number(value)
    return f"{value:,.3g}" if value % 1 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share from 0 to 1 in percent."""
    return "–" if value is None else f"{value * 100:.3g} %"


def short(text: object, most: int = 80) -> str:
    """A text in one line of at most `most` characters, control characters escaped."""
    return printable(str(text), most=most)


def as_json(value: object) -> str:
    """A value as indented JSON, cut at `LONGEST_JSON` characters."""
    text = dumps(value, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_JSON else f"{text[:LONGEST_JSON]}\n… {len(text) - LONGEST_JSON} characters more"


def command(*words: object, **flags: object) -> str:
    """The command line that does the same; flags without a value are left out."""
    parts = ["reefknot", *(shell_quoted(printable(str(word))) for word in words)]
    for name, value in flags.items():
        flag = f"--{name.rstrip('_').replace('_', '-')}"
        if value is True:
            parts.append(flag)
        elif value not in (None, "", False):
            parts.append(f"{flag} {shell_quoted(printable(str(value)))}")
    return " ".join(parts)


_WORD = re.compile(r"""(?:\\.|[^\s'"]|'[^']*'|"[^"]*")+""")


def words_of(line: str) -> list[str]:
    """The words of a command line, quoted ones as they are: between them, and only there, a line may be broken."""
    found = _WORD.findall(line)
    return found if " ".join(found) == line else [line]


def query_text(asked: Mapping[str, Any]) -> str:
    """The query of a URL, without what is not asked."""
    return urlencode({name: value for name, value in asked.items() if value not in (None, "")})


def path(base: str, *parts: str, **asked: Any) -> str:
    """A path of this server with a query. Browsers take `.` and `..` out of paths: the place of such an id is left
    empty, and it stands in the query, as `job` for the API and as `id` for a page."""
    for dots in {".", ".."}.intersection(parts):
        asked = {"job" if base == "/api/v1" else "id": dots, **asked}
        parts = tuple("" if part == dots else part for part in parts)
    whole = "/".join((base.rstrip("/"), *(quote(part, safe="") for part in parts)))
    query = query_text(asked)
    return f"{whole or '/'}?{query}" if query else whole or "/"


def without(asked: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The parameters, without these."""
    return {name: value for name, value in asked.items() if name not in names}


def with_(asked: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The parameters, and more."""
    return {**asked, **more}


LONGEST_TRAIL = 450
"""Characters of an address for the pages before this one; of a longer trail the oldest are left out."""


def pages_around(asked: Mapping[str, Any], following: str | None) -> dict[str, Any]:
    """The parameters of the previous and of the following page. Lists know only what follows, so an address carries the
    trail of the pages before it."""
    plain, after = without(asked, "after", "back"), asked.get("after")
    trail = [unquote(one) for one in str(asked.get("back") or "").split(",") if one]
    previous = None if not after else {**plain, **({"after": trail[-1], "back": _trail(trail[:-1])} if trail else {})}
    onward = (
        None if not following else {**plain, "after": following, "back": _trail([*trail, *([after] if after else [])])}
    )
    return {"previous": previous, "following": onward}


def _trail(pages_before: list[str]) -> str:
    shown = [quote(one, safe="") for one in pages_before]
    while shown and len(",".join(shown)) > LONGEST_TRAIL:
        del shown[0]
    return ",".join(shown)


def job_path(job: str, tenant: str | None = None) -> str:
    """The address of a job's page."""
    return path("/work", job, tenant=tenant)


def named_jobs(job: str, tenant: str | None) -> dict[str, Any]:
    """The body of an action on one job."""
    return {"ids": [job], **({"tenant": tenant} if tenant else {})}


_POSITION = re.compile(r"(?P<file>.+?):(?P<line>\d+)(:\d+)?")


def places(sources: Sequence[str]) -> str:
    """The places where something is set, without folders, and each file once: `reefknot.yaml:6, 8`."""
    lines: dict[str, list[str]] = {}
    for source in sources:
        found = _POSITION.fullmatch(source)
        name = (found["file"] if found else source).removeprefix("built-in: ").rpartition("/")[2]
        of_file = lines.setdefault(name, [])
        if found and found["line"] not in of_file:
            of_file.append(found["line"])
    return "; ".join(f"{name}:{', '.join(numbers)}" if numbers else name for name, numbers in lines.items())


MOST_PARTS = 4


def cursor_words(cursor: str | None) -> str:
    """The cursor of a source for people: of JSON, its fields; of a long one, the number of its entries."""
    if not cursor:
        return ""
    try:
        found = loads(cursor)
    except ValueError:
        return short(cursor, 60)
    if not isinstance(found, dict):
        return short(cursor, 60)
    parts = [f"{name} {_part(value)}" for name, value in list(found.items())[:MOST_PARTS]]
    return ", ".join(parts) + (" …" if len(found) > MOST_PARTS else "")


def _part(value: object) -> str:
    return f"({len(value)} entries)" if isinstance(value, dict | list) else short(value, 24)


def setting(value: object, name: str) -> str:
    """The value of a policy's field in words."""
    return short(field_text(name, value), 200)


def _drawn(draw: Callable[..., str]) -> Callable[..., Any]:
    """A chart as markup: all texts in it are escaped by `charts`."""

    def markup(*args: Any, **kwargs: Any) -> Any:
        from markupsafe import Markup

        return Markup(draw(*args, **kwargs))  # noqa: S704 - the charts escape every text

    return markup


def chart(kind: str, series: Sequence[Mapping[str, Any]], *, title: str, unit: str, step_s: float) -> str:
    """A chart of named rows of numbers."""
    rows = [Series(one["name"], one["values"]) for one in series]
    draw = charts.stacked if kind == "stacked" else charts.lines
    return draw(rows, title=title, unit=unit, step_s=step_s)


def timeline(
    rows: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]], *, title: str, begins: str, total_s: float
) -> str:
    """A timeline of rows: their name, what they are about, and their spans; `total_s` seconds from `begins` on."""
    start = seconds_at(begins)
    drawn = [(name, about, [Span(**span) for span in spans]) for name, about, spans in rows]
    return charts.timeline(drawn, title=title, begins=start, ends=start + total_s)


FILTERS: dict[str, Callable[..., Any]] = {
    "relative": relative,
    "absolute": absolute,
    "duration": duration,
    "amount": amount,
    "percent": percent,
    "short": short,
    "json": as_json,
    "setting": setting,
    "cursor": cursor_words,
    "progress": progress_in_words,
    "words": words_of,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "kind_of": kind_of,
    "command": command,
    "path": path,
    "without": without,
    "pages_around": pages_around,
    "with_": with_,
    "job_path": job_path,
    "named_jobs": named_jobs,
    "places": places,
    "chart": _drawn(chart),
    "timeline": _drawn(timeline),
    "waits": _drawn(charts.waits),
    "meter": _drawn(charts.meter),
}
