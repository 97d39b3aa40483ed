"""
`reefknot top`, and `--watch` of the commands that list: a view of a store, drawn again until somebody leaves it.

On a terminal each view takes the place of the last one, and q or Ctrl-C leaves; the terminal is then as it was before,
whatever ended the command. Elsewhere the views of `--watch` follow one another, and `top` prints one.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from time import sleep, time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from reefknot.cli.app import CommandError, Exit, noun
from reefknot.cli.options import STORE, StoreFlags, arg, check_number
from reefknot.cli.output import age, plural, put, put_json, put_table, queue_depth, relative, say, time_text
from reefknot.cli.stores import StoreAddress, address_of, with_store
from reefknot.core.work import ROUTER, WorkState
from reefknot.ports.audit_log import AuditQuery

if TYPE_CHECKING:
    from reefknot.ports.audit_log import KeptEntry
    from reefknot.ports.store import Store

SHORTEST_S, LONGEST_S = 0.1, 3600.0
Watch = Annotated[float | None, arg("Draw it again every SECONDS, default: 2. q or Ctrl-C leaves.", "--watch")]

# ---- a view that is drawn again --------------------------------------------------------------------------------------

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def repeated(watch: float | None, draw: Callable[[], None]) -> None:
    """Print one view, or with `--watch` a view every so many seconds. Only a first view that fails ends the command."""
    if watch is None:
        draw()
        return
    check_number("--watch", watch, SHORTEST_S, LONGEST_S, f"seconds from {SHORTEST_S:g} to {LONGEST_S:g}")
    if sys.stdout.isatty():
        _on_screen(draw, watch)
        return
    draw()
    while True:
        sys.stdout.flush()
        sleep(watch)
        try:
            draw()
        except CommandError as error:
            say(f"reefknot: {error}")


def _on_screen(draw: Callable[[], None], every: float) -> None:
    """Draw in place until q is typed."""
    page = _drawn(draw, first=True)
    with _screen() as typed:
        while True:
            sys.stdout.write(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in _fitting(page)) + _END_OF_SCREEN)
            sys.stdout.flush()
            if typed(every):
                return
            page = _drawn(draw)


class _Page(StringIO):
    """The text of one view for a terminal: it counts as one, so that colours and width are the terminal's."""

    def isatty(self) -> bool:
        return True


def _drawn(draw: Callable[[], None], *, first: bool = False) -> str:
    """The lines that one view prints on both streams. A later one that fails is the error's sentence: it may pass."""
    page = _Page()
    try:
        with redirect_stdout(page), redirect_stderr(page):
            draw()
    except CommandError as error:
        if first:
            raise
        page.write(f"reefknot: {error}\n")
    return page.getvalue()


def _fitting(page: str) -> list[str]:
    """The lines that fit on the screen; the last one says how many do not."""
    height = max(2, os.get_terminal_size(sys.stdout.fileno()).lines - 1)
    lines = page.splitlines()
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"… {plural(len(lines) - height + 1, 'more line')}; a taller terminal shows them"]


@contextmanager
def _screen() -> Iterator[Callable[[float], bool]]:
    """A screen of its own, and a function that waits for `q`. Whatever ends it, the terminal is left as it was."""
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _without_echo(keyboard):
            sys.stdout.write(_ENTER)
            try:
                yield lambda seconds: _is_left(keyboard, seconds)
            finally:
                sys.stdout.write(_LEAVE)
                sys.stdout.flush()
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(int(Exit.TERMINATED))


@contextmanager
def _without_echo(keyboard: int | None) -> Iterator[None]:
    """Keys arrive at once and unseen. Ctrl-Z does nothing: a stopped view would leave its screen behind."""
    if keyboard is None:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        inside = termios.tcgetattr(keyboard)
        inside[6][termios.VSUSP] = b"\x00"
        termios.tcsetattr(keyboard, termios.TCSADRAIN, inside)
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _is_left(keyboard: int | None, seconds: float) -> bool:
    """Wait this long for a key, and tell whether it was `q`. Another key draws the next view at once."""
    if keyboard is None:
        sleep(seconds)
        return False
    ready, _, _ = select.select([keyboard], [], [], seconds)
    return bool(ready) and os.read(keyboard, 64)[:1] in (b"q", b"Q", b"")


# ---- top -------------------------------------------------------------------------------------------------------------

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
    every: Annotated[float, arg("Seconds between two views. Default: 1.")] = 1.0,
    options: StoreFlags = STORE,
) -> None:
    """Show queues, workers, retries per second and the last ends, drawn again until q or Ctrl-C."""
    check_number("--every", every, SHORTEST_S, LONGEST_S, f"seconds from {SHORTEST_S:g} to {LONGEST_S:g}")
    address = address_of(options)

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
    snapshot = await store.work.snapshot()
    states = {state.value: 0 for state in WorkState}
    for counts in snapshot.counts.values():
        for state, number in counts.items():
            states[state.value] += number
    return {
        "at": time_text(now),
        "states": states,
        "waiting_for_router": snapshot.counts.get(ROUTER, {}).get(WorkState.PENDING, 0),
        "oldest_due_s": snapshot.oldest_due_ms / 1000,
        "window_s": WINDOW_S,
        "ended_per_s": await _rate(store, "completed", now),
        "retries_per_s": await _rate(store, "retry_attempt", now),
        "routers": sum(bool(one["router"]) for one in systems),
        "workers": [{**worker, "pid": one["pid"]} for one in systems for worker in one["workers"]],
        "last_ends": [_end(kept) for kept in await store.audit.read(_LAST_ENDS)],
    }


_LAST_ENDS = AuditQuery(event_type="completed", newest_first=True, limit=MOST_ENDS)


async def _rate(store: Store, event_type: str, now: int) -> float:
    """Events of this type per second, over the last seconds."""
    query = AuditQuery(event_type=event_type, since=now - WINDOW_S * 1000, newest_first=True, limit=MOST_COUNTED)
    return len(await store.audit.read(query)) / WINDOW_S


def _end(kept: KeptEntry) -> dict[str, Any]:
    from reefknot.core.audit.event import Completed, decode

    event = decode(kept.entry.body)
    assert isinstance(event, Completed), event
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
    put(f"reefknot top  {clock}  {relative(address.url.removeprefix('sqlite:'))}")
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
        rows, columns = _worker_rows(view["workers"]), ("worker", "class", "status", "queued", "running", "oldest")
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


def _worker_rows(workers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            worker["worker_id"],
            name,
            "draining" if worker["draining"] else state["status"],
            queue_depth(state["depth"], state["size"]),
            f"{state['active']} of {state['capacity']}",
            age(state["oldest_age_s"]) if state["depth"] else "",
        )
        for worker in workers
        for name, state in worker["classes"].items()
    ]


def _end_row(one: dict[str, Any], address: StoreAddress) -> tuple[str, ...]:
    at = datetime.fromisoformat(one["at"]).astimezone()
    job = one["id"] or ""
    if one["tenant_id"]:
        job = f"{job} of {one['tenant_id']}"
    attempts = "" if one["attempts"] is None else str(one["attempts"])
    return f"{at:%H:%M:%S}", address.redactor(job)[:60], one["status"], attempts, one["worker_id"] or ""
