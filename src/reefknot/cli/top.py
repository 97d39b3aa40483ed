"""`reefknot top`: a running system at a glance: queues, workers, retries per second, and the last jobs that ended."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from time import time
from typing import TYPE_CHECKING, Annotated, Any

from reefknot.cli.app import noun
from reefknot.cli.options import STORE, StoreFlags, arg
from reefknot.cli.output import age, plural, put, put_json, put_table, relative, time_text
from reefknot.cli.parts import worker_rows
from reefknot.cli.store import StoreAddress, address_to_read, with_store
from reefknot.cli.watch import check_every, repeated, seconds_arg
from reefknot.operations.jobs import counts_in
from reefknot.operations.systems import workers_of
from reefknot.ports.audit_log import AuditQuery

if TYPE_CHECKING:
    from reefknot.ports.audit_log import KeptEntry
    from reefknot.ports.store import Store

WINDOW_S = 10
MOST_COUNTED = 5000
MOST_ENDS = 8

app = noun(
    "top",
    "top",
    "top --once --json",
    help="Show a running system live: queues, workers, retries per second and the last jobs that ended. q or Ctrl-C "
    "leaves. Through a pipe, and with --once, it prints one view.",
)


@app.default
def top(
    *,
    once: Annotated[bool, arg("Print one view and end.")] = False,
    every: Annotated[float, seconds_arg("Seconds between two views. Default: 1.")] = 1.0,
    options: StoreFlags = STORE,
) -> None:
    """Show queues, workers, retries per second and the last ends, drawn again until q or Ctrl-C."""
    check_every("--every", every)
    address = address_to_read(options)

    def draw() -> None:
        _put_view(with_store(address, _view), address)

    if options.json:
        put_json(address.redactor.tree(with_store(address, _view)))
    else:
        repeated(None if once or not sys.stdout.isatty() else every, draw)


async def _view(store: Store) -> dict[str, Any]:
    """Everything that `top` shows, read from the store."""
    from reefknot.app.presence import living_systems

    now = int(time() * 1000)
    systems = await living_systems(store)
    return {
        "at": time_text(now),
        **await counts_in(store),
        "window_s": WINDOW_S,
        "ended_per_s": await _rate(store, "completed", now),
        "retries_per_s": await _rate(store, "retry_attempt", now),
        "routers": sum(bool(one["router"]) for one in systems),
        "workers": workers_of(systems),
        "last_ends": [_end(kept) for kept in await store.audit.read(_LAST_ENDS)],
    }


_LAST_ENDS = AuditQuery(event_type="completed", newest_first=True, limit=MOST_ENDS)


async def _rate(store: Store, event_type: str, now: int) -> float:
    """Events of this type per second, over the last seconds."""
    query = AuditQuery(event_type=event_type, since=now - WINDOW_S * 1000, newest_first=True, limit=MOST_COUNTED)
    return len(await store.audit.read(query)) / WINDOW_S


def _end(kept: KeptEntry) -> dict[str, Any]:
    """The end of a job by its event. Of one that was damaged, what the store has beside its body."""
    import msgspec

    from reefknot.core.audit.event import Completed, decode, timestamp_ms

    try:
        event = decode(kept.entry.body)
    except msgspec.DecodeError:
        event = None
    if not isinstance(event, Completed) or timestamp_ms(event.timestamp) is None:
        unknown = dict.fromkeys(("tenant_id", "attempts", "worker_id"))
        return {"at": time_text(kept.entry.at), "id": kept.entry.work_id, "status": "unreadable", **unknown}
    return {
        "at": event.timestamp,
        "id": event.work_id,
        "tenant_id": event.tenant_id,
        "status": event.status,
        "attempts": event.attempts,
        "worker_id": event.worker_id,
    }


def _put_view(view: dict[str, Any], address: StoreAddress) -> None:
    """The view in lines of at most 80 columns, and tables that fit."""
    clock = f"{datetime.now(UTC).astimezone():%H:%M:%S}"
    leave = "  q leaves" if sys.stdout.isatty() else ""
    put(f"reefknot top  {clock}  {relative(address.shown.removeprefix('sqlite:'))}{leave}")
    states = ", ".join(f"{number} {name}" for name, number in view["states"].items() if number)
    oldest = f"; the oldest due one waits {age(view['oldest_due_s'])}" if view["oldest_due_s"] else ""
    put(f"jobs   {states or 'none yet'}{oldest}")
    ended, retries = view["ended_per_s"], view["retries_per_s"]
    most = MOST_COUNTED / WINDOW_S
    put(
        f"rates  {_at_most(ended, most)} ended/s, {_at_most(retries, most)} retries/s, over the last {WINDOW_S} s;"
        f" {plural(view['routers'], 'router')}, {plural(len(view['workers']), 'worker')}"
    )
    put()
    if view["workers"]:
        columns = ("worker", "class", "status", "queued", "running", "oldest")
        rows = [row[: len(columns)] for row in worker_rows(view["workers"])]
        put_table(columns, rows, styles=("cyan", "", "bold"), whole=columns[:3])
    else:
        put("no worker is running on this store; start a system with: reefknot up")
    put()
    if view["last_ends"]:
        ends = [_end_row(one, address) for one in view["last_ends"]]
        titles = ("ended", "job", "status", "attempts", "worker")
        put_table(titles, ends, styles=("", "cyan", "bold"), whole=("ended", "status"))
    else:
        put("no job has ended yet")


def _at_most(rate: float, most: float) -> str:
    return f"{most:g} or more" if rate >= most else f"{rate:.1f}"


def _end_row(one: dict[str, Any], address: StoreAddress) -> tuple[str, ...]:
    at = datetime.fromisoformat(one["at"]).astimezone()
    job = one["id"] or ""
    if one["tenant_id"]:
        job = f"{job} of {one['tenant_id']}"
    attempts = "" if one["attempts"] is None else str(one["attempts"])
    return f"{at:%H:%M:%S}", address.redactor(job)[:60], one["status"], attempts, one["worker_id"] or ""
