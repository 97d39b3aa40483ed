"""
The page of events, written from their definitions.

`events_page.py` writes `docs/events.md`; `events_page.py --check` only compares, and fails when the page on disk says
something else.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from textwrap import wrap
from types import UnionType

import msgspec

from reefknot.audit.model.event import BRIEF_DEFAULTS, EVENT_TYPES, DecisionRecord, Event, FailureRecord, PolicyRecord
from reefknot.core.decide import History, ThrottleView

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "events.md"

_WORDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "NoneType": "null",
    "dict[str, typing.Any]": "object",
    "tuple[str, ...]": "list of texts",
}
_PARTS = (DecisionRecord, PolicyRecord, FailureRecord, History, ThrottleView)

HEAD = """\
# Events

<!-- Written by tools/events_page.py from src/reefknot/audit/model/event.py. Change that, not this page. -->

All audit events. The set is closed, and a code is stable for ever: build alerts on codes. An event is flat JSON with
sorted keys; times are UTC, durations are seconds unless the name says otherwise, and a field without a value is `null`.
The event of a decision holds all of its inputs, so that the decision can be replayed: see
[audit and replay](guides/audit-and-replay.md).

Every assignment has `submitted`, `routing`, `admission` and `completed`. These four are small: fields that have their
default are left out, `event_code` and `event_id` among them, and a `correlation_id` that is the `work_id`. Any other
correlation, and the trace, is in `submitted`, in refusals and in every event of a failure. A tenant of more than 14
characters is in `submitted` and `completed`, in refusals and in every event of a failure; where a worker was chosen or
accepted the assignment, its `tenant_hash` is there instead. Filters by tenant, correlation and trace find all of them.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_summary(), *_common(), *_each(), *_parts()])


def _summary() -> list[str]:
    lines = ["| code | event_type | when |", "| --- | --- | --- |"]
    lines += [f"| {_code(kind)} | [`{_tag(kind)}`](#{_tag(kind)}) | {_first(kind)} |" for kind in _by_code()]
    return [*lines, ""]


def _common() -> list[str]:
    return ["## In every event", "", "`event_type`, and:", "", *_table(Event, ()), ""]


def _each() -> list[str]:
    lines: list[str] = []
    for kind in _by_code():
        lines += [f"## {_tag(kind)}", "", *_prose(f"{_code(kind)}. {_text(kind)}"), ""]
        own = _table(kind, Event.__struct_fields__)
        lines += [*own, ""] if len(own) > 2 else ["Nothing beyond what every event has.", ""]
    return lines


def _parts() -> list[str]:
    lines: list[str] = []
    for part in _PARTS:
        lines += [f"## {part.__name__}", "", *_prose(_text(part)), "", *_table(part, ()), ""]
    return lines


def _by_code() -> list[type[Event]]:
    return sorted(EVENT_TYPES, key=_code)


def _table(kind: type[msgspec.Struct], but: tuple[str, ...]) -> list[str]:
    lines = ["| field | value |", "| --- | --- |"]
    fields = [field for field in msgspec.structs.fields(kind) if field.name not in but]
    return [*lines, *(f"| `{field.name}` | {_type(field.type)}{_default(kind, field.name)} |" for field in fields)]


def _default(kind: type[msgspec.Struct], name: str) -> str:
    """The value of a field that is left out, where that is not null or empty."""
    default = BRIEF_DEFAULTS.get(str(kind.__struct_config__.tag), {}).get(name)
    return "" if default is None else f"; left out: `{default}`"


def _type(annotation: object) -> str:
    """A type in plain words; our own records by their names."""
    said = getattr(annotation, "__args__", None)
    if isinstance(annotation, UnionType) and said is not None:
        return " or ".join(_type(one) for one in said if one is not msgspec.UnsetType)
    return _WORDS.get(str(annotation)) or _WORDS.get(getattr(annotation, "__name__", "")) or _named(annotation)


def _named(annotation: object) -> str:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    assert isinstance(annotation, type), annotation
    return f"[{annotation.__name__}](#{annotation.__name__.lower()})"


def _tag(kind: type[Event]) -> str:
    return str(kind.__struct_config__.tag)


def _code(kind: type[Event]) -> str:
    (code,) = [field.default for field in msgspec.structs.fields(kind) if field.name == "event_code"]
    return str(code)


def _prose(text: str) -> list[str]:
    return wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _text(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _first(kind: type) -> str:
    return (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def main(arguments: list[str]) -> int:
    made = page()
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
            print(f"{PAGE.relative_to(ROOT)} is not what the events say; run tools/events_page.py", file=sys.stderr)
            return 1
        return 0
    if arguments:
        print("usage: events_page.py [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
