"""`reefknot top`: a running system at a glance: queues, workers, retries per second, and the last jobs that ended."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

from reefknot.console.cli.app import noun
from reefknot.console.cli.doctor import configuration_problems, disk_problems
from reefknot.console.cli.options import STORE, StoreFlags, arg
from reefknot.console.cli.output import put, put_json, put_table, say, table_width
from reefknot.console.cli.store import StoreAddress, address_to_read, place_of, with_store
from reefknot.console.cli.watch import check_every, repeated, seconds_arg
from reefknot.console.cli.worker_and_router import gone_rows, put_troubles, worker_rows
from reefknot.console.operations.job_notes import progress_in_words
from reefknot.console.operations.values import age, plural

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
    """Show queues, workers, retries per second and finished jobs, redrawn until q or Ctrl-C."""
    check_every("--every", every)
    address = address_to_read(options)
    wrong = configuration_problems(options, address)

    def view() -> dict[str, Any]:
        from reefknot.console.operations.overview import overview

        return with_store(address, lambda store: overview(address.operator(store)))

    def draw() -> None:
        _put_view(view(), address, [*wrong, *disk_problems(address)])

    if options.json:
        put_json(view())
        for line in (*wrong, *disk_problems(address)):
            say(line)
    else:
        repeated(None if once or not sys.stdout.isatty() else every, draw)


def _put_view(view: dict[str, Any], address: StoreAddress, problems: list[str]) -> None:
    """Print the view, no line wider than the terminal. `problems` are those that no job or system line shows."""
    clock = f"{datetime.now(UTC).astimezone():%H:%M:%S}"
    leave = "  q leaves" if sys.stdout.isatty() else ""
    name = place_of(address.url)
    room = max(10, table_width() - len(f"reefknot top  {clock}  {leave}"))
    put(f"reefknot top  {clock}  {name if len(name) <= room else '…' + name[1 - room :]}{leave}")
    states = ", ".join(f"{number} {name}" for name, number in view["states"].items() if number)
    oldest = f"; the oldest job has been due for {age(view['oldest_due_s'])}" if view["oldest_due_s"] else ""
    _put_wrapped("jobs   ", f"{states or 'none yet'}{oldest}")
    _put_wrapped(
        "rates  ",
        f"{view['ended_per_s']:.1f} ended/s, {view['retries_per_s']:.1f} retries/s,"
        f" over the last {view['window_s']} s;"
        f" {plural(view['routers'], 'router')}, {plural(len(view['workers']), 'worker')}",
    )
    for problem in (*problems, *(f"problem: {one['text']}; {one['remedy']}" for one in view["unserved"])):
        _put_wrapped("", problem)
    if number := view["quarantine"]["size"]:
        _put_wrapped("", f"{plural(number, 'job')} in quarantine; the causes: reefknot quarantine stats --group")
    put()
    if view["workers"] or view["gone"]:
        columns = ("worker", "class", "status", "queued", "running", "oldest")
        rows = [row[: len(columns)] for row in worker_rows(view["workers"]) + gone_rows(view["gone"])]
        put_table(columns, rows, styles=("cyan", "", "bold"), whole=columns[:3])
        put_troubles(view["workers"], view["breakers"], view["gone"])
    if not view["workers"]:
        put("no worker is running on this store; start a system with: reefknot up")
    put()
    if view["under_way"]:
        put_table(("job", "type", "worker", "progress"), [_step_row(one, address) for one in view["under_way"]])
        put()
    if view["last_ends"]:
        ends = [_end_row(one, address) for one in view["last_ends"]]
        titles = ("ended", "job", "status", "attempts", "worker")
        put_table(titles, ends, styles=("", "cyan", "bold"), whole=("ended", "status"))
    else:
        put("no job has ended yet")


def _put_wrapped(title: str, text: str) -> None:
    """A line below its title, on as many lines as the terminal needs."""
    from textwrap import wrap

    for line in wrap(text, max(20, table_width()), initial_indent=title, subsequent_indent=" " * len(title)):
        put(line)


def _step_row(one: dict[str, Any], address: StoreAddress) -> tuple[str, ...]:
    return _named(one, address), one["type"], one["worker"], progress_in_words(one["progress"])


def _end_row(one: dict[str, Any], address: StoreAddress) -> tuple[str, ...]:
    at = datetime.fromisoformat(one["at"]).astimezone()
    attempts = "" if one["attempts"] is None else str(one["attempts"])
    return f"{at:%H:%M:%S}", _named(one, address), one["status"], attempts, one["worker_id"] or ""


def _named(one: dict[str, Any], address: StoreAddress) -> str:
    job = str(one["id"] or "")
    if one["tenant_id"]:
        job = f"{job} of {one['tenant_id']}"
    shown: str = address.redactor(job)
    return shown[:60]
