"""
`reefknot alert`: the alerts that running systems have raised and resolved.

The list can be asked for when nothing is running: it says how old the last look is.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from reefknot.console.cli.app import examples, noun
from reefknot.console.cli.options import STORE, StoreFlags, Wide
from reefknot.console.cli.output import put, put_table, say, show
from reefknot.console.cli.store import address_of, with_store
from reefknot.console.cli.watch import Watch, repeated
from reefknot.console.operations.values import age

app = noun("alert", "alert list", "alert list --json")


@app.command(name="list", help_epilogue=examples("alert list", "alert list --watch", "alert list --json"))
def list_(*, wide: Wide = False, watch: Watch = None, options: StoreFlags = STORE) -> None:
    """List the alerts that are active, with what to do, and the last ones that were resolved."""
    address = address_of(options, looks=True)  # with its settings: they have the limits

    def draw() -> None:
        from reefknot.console.operations.alerts import list_alerts

        found = with_store(address, lambda store: list_alerts(address.operator(store)))
        show(found, lambda: _put(found, wide=wide), json=options.json)

    repeated(watch, draw)


def _put(found: dict[str, Any], *, wide: bool) -> None:
    if found["alerts"]:
        titles = ("alert", "since", "now", "what")
        rows = [(one["alert"], _clock(one["since"]), _value(one["now"]), one["text"]) for one in found["alerts"]]
        put_table(titles, rows, styles=("bold",), whole=titles[:3], wide=wide)
        put()
        for one in found["alerts"]:
            put(f"{one['alert']}: {one['advice']}")
    else:
        put("no alert is active")
    if found["resolved"]:
        put()
        titles = ("resolved", "since", "until", "what")
        over = [
            (one["alert"], _clock(one["since"]), _clock(one["resolved_at"]), one["text"]) for one in found["resolved"]
        ]
        put_table(titles, over, whole=titles[:3], wide=wide)
    say(_look(found))


def _look(found: dict[str, Any]) -> str:
    """The sentence about the last look."""
    if found["looked_s"] is None:
        return "no system has looked yet; one that runs looks every 5 s: reefknot up"
    when = f"the last look was {age(found['looked_s'])} ago"
    return when if found["watched"] else f"{when}, and no system is running now; start one with: reefknot up"


def _value(now: float | None) -> str:
    return "-" if now is None else f"{now:g}"


def _clock(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"
