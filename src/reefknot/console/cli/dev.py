"""
`reefknot dev`: NATS servers to develop against, on this machine and for as long as the command runs.

The URL goes to stdout as soon as clients can use it. The first signal stops the servers in order, the second ends the
command at once, and the servers with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, Signals, getsignal, signal
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from reefknot.console.cli.app import CommandError, Exit, examples, noun
from reefknot.console.cli.options import STORE, Json, StoreFlags, arg, check_number, check_seconds, unwritable
from reefknot.console.cli.output import OutputError, flush_stdout, put, put_document, say, show
from reefknot.console.cli.serve import For, until_text
from reefknot.policy.schema import NatsRole

if TYPE_CHECKING:
    from reefknot.console.nats_servers import NatsServer

CLUSTER_SIZE = 3
POLL_S = 0.1
_CODES = {SIGINT: Exit.INTERRUPTED, SIGTERM: Exit.TERMINATED, SIGHUP: Exit.HUNG_UP}

app = noun("dev", "dev nats", "dev cluster --for 600", "dev permissions --role worker")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Options of every command that starts NATS servers."""

    store: Annotated[Path | None, arg("Folder that keeps the data. Default: a temporary one, deleted at the end.")] = (
        None
    )
    sync_always: Annotated[bool, arg("Sync each message to the disk before it is acknowledged.")] = False
    seconds: For = None
    json: Json = False


SERVERS = ServerFlags()


@app.command(help_epilogue=examples("dev nats", "dev nats --port 4222 --store .nats"))
def nats(
    *,
    port: Annotated[int | None, arg("Port on 127.0.0.1. Default: a free one.")] = None,
    options: ServerFlags = SERVERS,
) -> int:
    """Start a NATS server with JetStream on 127.0.0.1, print its URL, and stop it on Ctrl-C."""
    check_number("--port", port, 1, 65535, "a port from 1 to 65535")
    return _serve(options, count=1, port=port)


Roles = Annotated[
    list[NatsRole], arg("client, worker, router, operator or reader; several for one user of all.", "--role")
]


@app.command(help_epilogue=examples("dev permissions --role worker --engine nats://127.0.0.1:4222/orders"))
def permissions(*, role: Roles, options: StoreFlags = STORE) -> None:
    """Print the NATS permissions that a role needs in a store, for the configuration of a nats-server.

    The user's own configuration names the same roles: nats.roles. Strangers to a store need an account of their own.
    """
    from reefknot.console.cli.store import address_of
    from reefknot.stores.jetstream import options_from_url
    from reefknot.stores.jetstream import roles as table
    from reefknot.stores.opening import options_of

    address = address_of(options, looks=True)
    if address.has_file:
        raise CommandError(
            f"{address.shown} is a file and has no users; name a store on NATS: --engine nats://HOST/NAME"
        )
    given = {} if address.settings is None else options_of(address.settings)["nats"]
    found = table.permissions(tuple(role), options_from_url(address.url, **{**given, "roles": tuple(role)}))
    data = {verb: {"allow": list(getattr(found, verb))} for verb in ("publish", "subscribe")}

    def block(verb: str) -> str:
        subjects = "".join(f'      "{one}"\n' for one in data[verb]["allow"])
        return f"  {verb} {{\n    allow: [\n{subjects}    ]\n  }}\n"

    show(
        {"permissions": data},
        lambda: put_document(f"permissions {{\n{block('publish')}{block('subscribe')}}}"),
        json=options.json,
    )
    say(f"in the configuration of this user: nats: {{roles: [{', '.join(sorted(set(role)))}]}}")


@app.command(help_epilogue=examples("dev cluster", "dev cluster --store .nats --sync-always"))
def cluster(*, options: ServerFlags = SERVERS) -> int:
    """Start three NATS servers as a cluster on 127.0.0.1, print their URL, and stop them on Ctrl-C.

    A stream can have three replicas there.
    """
    return _serve(options, count=CLUSTER_SIZE)


def _serve(options: ServerFlags, *, count: int, port: int | None = None) -> int:
    """Run servers until a signal comes or the time is over; the result is the exit code."""
    from reefknot.console.nats_servers import SYNC_INTERVAL, NatsServerError, running_nats

    check_seconds("--for", options.seconds)
    sync_interval = "always" if options.sync_always else SYNC_INTERVAL
    with _signals() as ended, ExitStack() as stack:
        if options.store is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="reefknot-nats-", ignore_cleanup_errors=True)))
        else:
            folder = options.store.absolute()
        try:
            running = running_nats(folder, count=count, port=port, sync_interval=sync_interval)
            servers = stack.enter_context(running)
            if ended.code is None:
                _announce(servers, options)
            _wait(servers, ended, options.seconds)
        except NatsServerError as error:
            raise CommandError(str(error), Exit.UNREACHABLE) from error
        except OSError as error:
            if options.store is None or isinstance(error, OutputError):
                raise
            raise unwritable(f"--store {options.store}", error) from error
        say("stopping")
    return Exit.FINE if ended.code is None else ended.code


def _announce(servers: Sequence[NatsServer], options: ServerFlags) -> None:
    """Print the URL, and what to do with it."""
    from reefknot.console.nats_servers import url_of

    url = url_of(servers)
    listed = [{"name": one.name, "url": one.url, "pid": one.pid, "folder": str(one.folder)} for one in servers]
    data: dict[str, Any] = {"url": url, "servers": listed, "temporary": options.store is None}
    show(data, lambda: put(url), json=options.json)
    flush_stdout()
    started = "nats-server" if len(servers) == 1 else f"a cluster of {len(servers)} nats-servers"
    kept = "deleted at the end; --store DIR keeps it" if options.store is None else f"kept in {options.store}"
    say(f"{started} up {until_text(options.seconds)}; its data is {kept}")
    say(f"use it from another terminal: reefknot up --engine {url}")


class _FirstSignal:
    """The exit code of the first signal; None before it."""

    def __init__(self) -> None:
        self.code: Exit | None = None

    def on_signal(self, number: int, _: object) -> None:
        if self.code is None:
            self.code = _CODES[Signals(number)]
        elif number != SIGHUP:  # a terminal that closes may send it twice
            os._exit(self.code)


@contextmanager
def _signals() -> Iterator[_FirstSignal]:
    """Inside, the first signal is noted and the second ends the process. An ignored SIGHUP stays ignored."""
    ended = _FirstSignal()
    before = {}
    for number in _CODES:
        if number == SIGHUP and getsignal(number) == SIG_IGN:
            continue
        before[number] = signal(number, ended.on_signal)
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal(number, handler)


def _wait(servers: Sequence[NatsServer], ended: _FirstSignal, seconds: float | None) -> None:
    """Return after a signal, or when the time is over. Too few servers for a majority are an error."""
    from reefknot.console.nats_servers import NatsServerError

    ends = None if seconds is None else time.monotonic() + seconds
    gone: list[NatsServer] = []
    while ended.code is None and (ends is None or time.monotonic() < ends):
        for server in servers:
            if server.is_running or server in gone:
                continue
            gone.append(server)
            if 2 * (len(servers) - len(gone)) <= len(servers):
                raise NatsServerError(f"nats-server {server.name} ended by itself: {server.last_words()}")
            say(f"nats-server {server.name} ended by itself; the other {len(servers) - len(gone)} go on without it")
        time.sleep(POLL_S if ends is None else max(0.0, min(POLL_S, ends - time.monotonic())))
