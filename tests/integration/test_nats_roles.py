"""
Roles on a real server: each part works with exactly the permissions of its role, and is refused everything else.

The users of the server have the permissions that `reefknot dev permissions` prints. One session runs every part with
every feature; the server's trace shows which subjects each user used, and its log which it refused.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from signal import SIGHUP, SIGTERM
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import nats
import pytest
from msgspec import structs

import reefknot as rk
from reefknot.console.cli import main
from reefknot.console.nats_servers import NatsServer, start_all, stop_all
from reefknot.errors import StorePermissionError
from reefknot.idempotency.model import Claimed, Done, Unknown
from reefknot.queue.client import Handle
from reefknot.queue.model.arguments import SubmitItem
from reefknot.queue.model.work import ROUTER, Quarantine, Settled, WorkDone, WorkFailed
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.jetstream import store as jetstream_store
from reefknot.stores.jetstream.connection import Connection, NatsOptions, options_from_url
from reefknot.stores.jetstream.roles import ROLES, Permissions, check, covers, overlap, permissions
from reefknot.stores.jetstream.state import StoredCommand
from tests.acceptance.folder import until

STORE = "orders"
BACKLOG, MANY = 600, 300
ADMIN = "admin"
STEPS = """\
import asyncio
import reefknot as rk

@rk.block("own.hello")
def hello(inputs, context):
    return {"hello": len(inputs.get("name", "")), "text": "y" * inputs.get("size", 0)}

@rk.block("own.nap")
async def nap(inputs, context):
    await asyncio.sleep(inputs["seconds"])
    return {}

@rk.block("own.flaky")
async def flaky(inputs, context):
    if context.attempt <= inputs.get("failures", 1):
        raise ConnectionError("not now")
    return {}

@rk.block("own.bad")
def bad(inputs, context):
    raise ValueError("never")

@rk.idempotent(key=lambda name: f"once-{name}")
def once(name):
    return name

@rk.block("own.once")
def own_once(inputs, context):
    return {"once": once(inputs["name"])}
"""
CONFIG = """\
engine: {url}
nats: {{user: {user}, password: "env:ROLE_PASSWORD", roles: [{roles}], patience_seconds: 5}}
worker:
  quarantine_failed: true
  retries: {{v2: {{enabled: true, default_policy: {{max_attempts: 2, base_delay_ms: 20, jitter_type: none}}}}}}
  queue: {{v2: {{enabled: true}}}}
dashboard: {{enabled: false}}
sources:
  notes: {{connector: local_files, path: files, every: 1h}}
schedules:
  nightly: {{cron: "0 3 * * *", assignment: {{job: {{type: own.hello, payload: {{}}}}}}}}
  often: {{every: 1s, assignment: {{job: {{type: own.hello, payload: {{}}}}}}}}
"""


def of_role(role: str, url: str = f"nats://127.0.0.1/{STORE}") -> Permissions:
    return permissions((role,), options_from_url(url, roles=(role,)))


MISSING = f"{STORE}.blob.*.*.*"


def without(may: Permissions, subject: str) -> Permissions:
    return Permissions([one for one in may.publish if one != subject], may.subscribe)


EVERY = ("client", "operator", "router", "worker")
ALL = {"all": permissions(EVERY, options_from_url(f"nats://127.0.0.1/{STORE}", roles=EVERY))}
LESS = {
    "client-less": without(of_role("client"), MISSING),
    "worker-less": without(of_role("worker"), MISSING),
    "unnamed-worker": Permissions(of_role("worker").publish, ["_INBOX.>", *of_role("worker").subscribe]),
    "unnamed-less": Permissions(without(of_role("client"), MISSING).publish, ["_INBOX.>", f"{STORE}.over.*"]),
}
"""Users without one permission of their role; the last one's configuration names no role."""
ROLES_OF = {
    "client-less": "client",
    "worker-less": "worker",
    "all": ", ".join(EVERY),
    "unnamed-less": "",
    "unnamed-worker": "",
    ADMIN: "",
}


def block_of(may: Permissions) -> dict[str, Any]:
    return {"publish": {"allow": may.publish}, "subscribe": {"allow": may.subscribe}}


class RolesServer(NatsServer):
    """A server with a user for each role, and an administrator, which notes all that its clients send."""

    def __init__(self, folder: Path, users: dict[str, Permissions | None]) -> None:
        super().__init__(folder)
        self._users = users

    def _configuration(self) -> str:
        users = [
            {"user": name, "password": f"pw-{name}"}
            | (
                {}
                if may is None
                else {"permissions": {"publish": {"allow": may.publish}, "subscribe": {"allow": may.subscribe}}}
            )
            for name, may in self._users.items()
        ]
        more = f"authorization {{ users: {json.dumps(users)} }}\ntrace: true\nmax_traced_msg_len: 1\n"
        whole_log = re.sub(r"logfile_size_limit: \d+, ", "", super()._configuration())
        return f"{whole_log}{more}max_payload: 700000\n"

    def used(self) -> dict[str, Permissions]:
        """By user: the subjects that it published and subscribed to."""
        users: dict[str, str] = {}
        found: dict[str, tuple[set[str], set[str]]] = {}
        for line in self.log.splitlines():
            sent = re.search(r"cid:(\d+) - .*?<<- \[(CONNECT|H?PUB|SUB) (.*)\]$", line)
            if sent is None:
                continue
            cid, verb, rest = sent.groups()
            if verb == "CONNECT":
                users[cid] = json.loads(rest).get("user", "")
            else:
                found.setdefault(users[cid], (set(), set()))[verb == "SUB"].add(rest.split()[0])
        return {user: Permissions(sorted(sent), sorted(heard)) for user, (sent, heard) in found.items()}

    def refused(self, user: str) -> set[str]:
        """What the server refused to this user, as it says it."""
        return set(re.findall(rf'\[ERR\] .*/user:{user}" - (.*Violation.*)', self.log))

    @contextmanager
    def changed(self, user: str, *, without: str) -> Iterator[None]:
        """Inside, the user lacks a permission to publish; the server reads its configuration again."""
        before = self._users[user]
        assert before is not None
        self._users[user] = Permissions([one for one in before.publish if one != without], before.subscribe)
        self._reload()
        try:
            yield
        finally:
            self._users[user] = before
            self._reload()

    def _reload(self) -> None:
        (self.folder / "nats-server.conf").write_text(self._configuration())
        os.kill(self.pid, SIGHUP)

    @property
    def log(self) -> str:
        return (self.folder / "nats-server.log").read_text(errors="replace")


class Yard:
    """The server, a folder with a configuration for each role, and what was done with them."""

    def __init__(self, server: RolesServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.url = f"{server.url}/{STORE}"
        (folder / "files").mkdir(parents=True)
        (folder / "files" / "a.txt").write_text("a document")
        (folder / "steps.py").write_text(STEPS)
        for user in server._users:
            text = CONFIG.format(url=self.url, user=user, roles=ROLES_OF.get(user, user))
            (folder / f"{user}.yaml").write_text(text)

    def options(self, user: str) -> dict[str, Any]:
        roles = () if user == ADMIN else (user,)
        return {"user": user, "password": f"pw-{user}", "roles": roles, "patience": 5.0}

    def __call__(self, user: str, *words: str) -> tuple[int, str, str]:
        """A command of this user, in this process: its exit code, stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        os.environ["ROLE_PASSWORD"] = f"pw-{user}"
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*words, "--config", str(self.folder / f"{user}.yaml")])
        return code, out.getvalue(), err.getvalue()

    def done(self, user: str, *words: str) -> str:
        code, out, err = self(user, *words)
        assert code == 0, (user, words, code, err)
        return out

    @contextmanager
    def running(self, user: str, *words: str, waits: bool = True) -> Iterator[Path]:
        """A part that runs as a process of its own, and the file with what it says."""
        said = self.folder / f"said-{'-'.join(words[:2])}-{user}.txt"
        config = str(self.folder / f"{user}.yaml")
        environment = dict(os.environ) | {"ROLE_PASSWORD": f"pw-{user}", "COLUMNS": "200"}
        with said.open("w") as file:
            streams: dict[str, Any] = {"stdout": file, "stderr": file}
            process = subprocess.Popen(
                [sys.executable, "-m", "reefknot", *words, "--config", config],
                cwd=self.folder,
                env=environment,
                **streams,
            )
        try:
            until(lambda: not waits or "is ready" in said.read_text() or process.poll() is not None)
            yield said
            process.send_signal(SIGTERM)
            process.wait(30)
        finally:
            process.kill()
            process.wait()


async def as_application(yard: Yard) -> None:
    """Idempotency keys of an application, and jobs that are submitted while no router runs."""
    large = '"' + "y" * 600_000 + '"'
    async with rk.open_store(yard.url, nats=yard.options("client"), largest_result=1 << 20) as store:
        for name, ending in (("order", Done("7")), ("large", Done(large)), ("charge", Unknown())):
            claimed = await store.idempotency.claim(name, owner="a", guard=name == "charge")
            assert isinstance(claimed, Claimed)
            await store.idempotency.renew(claimed.claim)
            await store.idempotency.finish(claimed.claim, ending)
        assert not isinstance(await store.idempotency.claim("large", owner="b"), Claimed)
    async with rk.connect(yard.url, create=False, nats=yard.options("client")) as client:
        await client.submit("own.hello", {"name": "x" * 9000}, assignment_id="early")
        for name in ("withdrawn", "revoked"):
            await client.submit("own.hello", {"name": "x" * 9000}, assignment_id=name, delay=3600)
        await client.job("withdrawn").cancel()
        one: SubmitItem = {"job_type": "own.hello", "inputs": {"name": "x" * 3500}, "delay": 3600}
        await client.submit_many([one] * BACKLOG)


async def as_client(yard: Yard) -> None:
    """Submissions of every kind while a system runs, from a program."""
    async with rk.connect(yard.url, create=False, nats=yard.options("client")) as client:
        large = await client.submit("own.hello", {"name": "x" * 900_000, "size": 900_000}, assignment_id="large")
        await client.submit("own.hello", delay=0.2, priority="high", assignment_id="delayed")
        await client.submit("own.hello", delay=3600, assignment_id="later")
        await client.submit("own.hello", delay=3600, assignment_id="operators")
        late = await client.submit("own.nap", {"seconds": 60}, timeout=0.2, assignment_id="late")
        napping = await client.submit("own.nap", {"seconds": 60}, assignment_id="napping")
        await client.submit_many([("own.flaky", None), ("own.once", {"name": "a"}), ("own.once", {"name": "a"})])
        bad = [await client.submit("own.bad", {"name": "x" * 9000}, assignment_id=f"bad-{n}") for n in range(4)]
        many = [one for one in await client.submit_many([("own.hello", None)] * MANY) if isinstance(one, Handle)]
        assert (await large.result(20)).status == "success"
        assert {(await one.result(20)).status for one in bad} == {"error"}
        await late.result(20)
        await napping.cancel("enough")
        assert (await napping.result(20)).status == "cancelled"
        await client.job("later").cancel()
        assert {(await one.result(20)).status for one in many} == {"success"}


async def settled(yard: Yard, user: str, *ends: Settled) -> None:
    """Ends of work that a session has no quick way to: results of workers of other makes, suspects, plain failures."""
    async with rk.connect(yard.url, create=False, nats=yard.options("client")) as client:
        for number in range(len(ends)):
            await client.submit("own.hello", assignment_id=f"{user}-{number}")
    async with rk.open_store(yard.url, nats=yard.options(user)) as store:
        held = await store.work.claim(len(ends), WorkClaim(owner="r2#1", classes=(ROUTER,), lease=60))
        reports = [Settlement(one.id, one.owner, one.fence, end) for one, end in zip(held, ends, strict=True)]
        assert await store.work.settle(reports) == [True] * len(ends)


async def as_peer(yard: Yard) -> None:
    """An assignment of a program that knows the documented subjects alone."""
    client = await nats.connect(yard.server.url, user=ADMIN, password=f"pw-{ADMIN}")
    heard = await client.subscribe(f"{STORE}.caf.exec.result.v1")
    assignment = {"assignment_id": "of-a-peer", "request_id": "r", "job": {"type": "own.hello", "payload": {}}}
    await client.publish(f"{STORE}.caf.exec.assign.v1", json.dumps(assignment).encode())
    async with asyncio.timeout(20):
        while json.loads((await heard.next_msg(20)).data)["assignment_id"] != "of-a-peer":
            pass
    await client.close()


LOOKS = (
    *("job list", "job show large", "job list --state quarantined", "quarantine list", "quarantine stats"),
    *("quarantine show bad-1", "worker list", "router status", "alert list", "source list", "source show notes"),
    *("schedule list", "schedule show often", "telemetry show", "idempotency stats", "idempotency show large"),
    *("audit tail", "audit verify", "audit head", "audit replay", "audit analyse", "top --once", "doctor"),
    *("audit tail --type operator_action", "audit tail --work large", "audit export EXPORT"),
    "audit tail --follow --for 0.3",
)
ACTS = (
    *("worker pause", "worker resume", "worker reload", "router reload", "job cancel operators", "job retry router-1"),
    *("quarantine requeue bad-0", "quarantine discard bad-1 --because x", "quarantine purge bad-2", "job retry late"),
    *("source pause notes --because x", "source resume notes", "schedule pause nightly --because x"),
    *("schedule resume nightly", "schedule run nightly", "idempotency forget order", "telemetry reset local_files"),
    *("idempotency resolve charge --released", "job retry withdrawn", "doctor", "audit verify", "quarantine list"),
    "worker drain --seconds 5",
)


def every_feature(yard: Yard) -> dict[str, tuple[int, str]]:
    """Run every part with its role and every feature; by command its exit code and what it says on stderr."""
    found: dict[str, tuple[int, str]] = {}

    def run(user: str, *words: str) -> None:
        for one in words:
            code, _, err = yard(user, *one.replace("EXPORT", str(yard.folder / "events.jsonl")).split())
            found[f"{user}: {one}"] = code, err

    failed = WorkFailed("attempts_spent", "{}")
    asyncio.run(settled(yard, "router", WorkDone("y" * 100_000), failed, Quarantine("crashed", "{}")))
    asyncio.run(settled(yard, "worker", failed))
    asyncio.run(as_application(yard))
    run("operator", "job cancel revoked", "schedule run nightly")
    router = yard.running("router", "router", "start", "--router-id", "r1", waits=False)
    worker = yard.running("worker", "worker", "start", "--worker-id", "w1", "--module", "steps")
    with router as said, worker:
        until(lambda: "is ready" in said.read_text())
        asyncio.run(as_client(yard))
        asyncio.run(as_peer(yard))
        run("reader", *LOOKS)
        run("operator", *ACTS)
    return found


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("roles")
    server = RolesServer(folder / "nats", {ADMIN: None, **{role: of_role(role) for role in ROLES}, **LESS, **ALL})
    start_all([server])
    before = os.environ.get("ROLE_PASSWORD")
    try:
        made = Yard(server, folder / "work")
        created = made.done(ADMIN, "store", "create")
        assert f"made: {STORE}_state, {STORE}_assign" in created
        yield made
    finally:
        stop_all([server])
        os.environ.pop("ROLE_PASSWORD", None)
        if before is not None:
            os.environ["ROLE_PASSWORD"] = before


class Session(NamedTuple):
    """A session with every feature: how its commands ended, and what each user used and was refused."""

    commands: dict[str, tuple[int, str]]
    used: dict[str, Permissions]
    refused: dict[str, set[str]]


@pytest.fixture(scope="module")
def session(yard: Yard) -> Session:
    commands = every_feature(yard)
    return Session(commands, yard.server.used(), {role: yard.server.refused(role) for role in ROLES})


def unused(table: Permissions, used: Permissions) -> list[str]:
    """The permissions of a table that were not used."""
    return [
        f"{verb} {pattern}"
        for verb, patterns, subjects in (
            ("publish", table.publish, used.publish),
            ("subscribe", table.subscribe, used.subscribe),
        )
        for pattern in patterns
        if not any(covers(pattern, one) for one in subjects)
    ]


# ---- exactly what a role needs --------------------------------------------------------------------------------------


def test_every_command_and_part_works_with_the_permissions_of_its_role(session: Session, yard: Yard) -> None:
    assert {words: ended for words, ended in session.commands.items() if ended[0] != 0} == {}
    for part in ("router", "worker"):
        said = (yard.folder / f"said-{part}-start-{part}.txt").read_text()
        assert "refuses this user" not in said
        assert "trying again" not in said.replace("trying again in 0.02 s", ""), said


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_refused_nothing_that_it_needs(session: Session, role: str) -> None:
    assert session.refused[role] == set()


@pytest.mark.parametrize("role", ROLES)
def test_a_role_uses_each_of_its_permissions(session: Session, role: str) -> None:
    assert unused(of_role(role), session.used[role]) == []


def test_a_permission_too_many_is_noticed(session: Session) -> None:
    """The control of the test above."""
    more = Permissions([*of_role("worker").publish, f"{STORE}.command.*.*"], of_role("worker").subscribe)
    assert unused(more, session.used["worker"]) == [f"publish {STORE}.command.*.*"]


def test_a_permission_too_few_is_noticed_and_ends_a_command_at_once(yard: Yard) -> None:
    """The control of the test of what is refused; and 77 with the subject and the role, found by the start itself."""
    code, out, err = yard("client-less", "submit", "--type", "own.hello")
    assert (code, out) == (77, "")
    assert f"the role client needs to publish to {MISSING}, and this user may not" in err
    assert "reefknot dev permissions --role client" in err
    code, _, err = yard("unnamed-less", "submit", "--type", "own.hello", "--inputs", json.dumps({"x": "y" * 9000}))
    assert code == 77
    assert f"the roles client, worker, router and operator need to publish to {MISSING}" in err
    assert any("blob" in one for one in yard.server.refused("unnamed-less"))


def test_what_another_role_may_do_is_said(yard: Yard) -> None:
    with yard.running("router", "router", "start", "--router-id", "r2"):
        code, _, err = yard("client", "router", "reload")
    assert code == 77
    assert "only the role operator may, and this user has the role client" in err


def test_a_part_that_lacks_a_permission_ends_at_once(yard: Yard) -> None:
    with yard.running("worker-less", "worker", "start", "--module", "steps") as said:
        assert f"the role worker needs to publish to {MISSING}, and this user may not" in said.read_text()


async def test_each_missing_permission_of_each_role_is_named() -> None:
    for role in ROLES:
        options = options_from_url(f"nats://h/{STORE}", roles=(role,))
        table = of_role(role)
        await check(cast(Connection, Answering(options, table)))
        for verb, subjects in (("publish", table.publish), ("subscribe", table.subscribe)):
            for subject in subjects:
                left = {"publish": table.publish, "subscribe": table.subscribe}
                left[verb] = [one for one in subjects if one != subject]
                with pytest.raises(
                    StorePermissionError, match=re.escape(f"the role {role} needs to {verb} to {subject},")
                ):
                    await check(cast(Connection, Answering(options, Permissions(**left))))


class Answering:
    """A connection to a server that says what its user may do."""

    def __init__(self, options: NatsOptions, may: Permissions) -> None:
        self.options = options
        self._may = may

    async def request(self, subject: str, *, timeout: float) -> Any:
        allowed = {"publish": {"allow": self._may.publish}, "subscribe": {"allow": self._may.subscribe}}
        data = json.dumps({"data": {"user": "u", "permissions": allowed}}).encode()
        return SimpleNamespace(data=data)


@pytest.mark.real_time
async def test_a_running_part_that_loses_a_permission_says_so(
    yard: Yard, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = f"the role reader needs to publish to $JS.API.STREAM.MSG.GET.{STORE}_state"
    monkeypatch.setattr(jetstream_store, "ALIGN_EVERY_S", 0.02)
    async with rk.open_store(yard.url, nats=yard.options("reader")) as store:
        assert await store.work.get("nothing") is None
        assert needed not in caplog.text
        with yard.server.changed("reader", without=f"$JS.API.STREAM.MSG.GET.{STORE}_state"):
            await seen(lambda: needed in caplog.text)
            with pytest.raises(StorePermissionError, match=re.escape(needed)):
                await store.work.get("nothing")
            await asyncio.sleep(0)
        assert caplog.text.count(f"{needed}, and this user may not") == 1


async def seen(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in a server
        await asyncio.sleep(0.02)


def test_users_of_several_roles_run_a_system_of_their_own(yard: Yard) -> None:
    (yard.folder / "jobs.jsonl").write_text('{"job": {"type": "own.hello", "payload": {}}}\n')
    yard.done("all", "run", str(yard.folder / "jobs.jsonl"), "--module", str(yard.folder / "steps.py"))
    assert yard.server.refused("all") == set()


# ---- and nothing else -----------------------------------------------------------------------------------------------

STATE, ASSIGN = f"{STORE}_state", f"{STORE}_assign"
VERBS = ("PURGE", "DELETE", "UPDATE", "CREATE", "SNAPSHOT", "MSG.DELETE")
NO_ROLE_MAY = [
    *(f"$JS.API.STREAM.{verb}.{stream}" for verb in VERBS for stream in (STATE, ASSIGN)),
    *("$JS.API.STREAM.CREATE.other", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$SYS.REQ.SERVER.PING"),
    *(f"$JS.API.CONSUMER.{one}.{STATE}.x" for one in ("DURABLE.CREATE", "INFO", "PAUSE")),
    *(f"$JS.API.CONSUMER.{one}.{STATE}" for one in ("LIST", "NAMES")),
    *(f"$JS.API.CONSUMER.CREATE.{ASSIGN}.thief", f"$JS.API.CONSUMER.DELETE.{ASSIGN}.workers"),
    *(f"{STORE}.trim.events", f"{STORE}.caf.exec.assign.v1", "elsewhere.work.open.cpu.x"),
]
RESULTS = ("succeeded", "failed", "quarantined", "discarded")
NEXT_SHARED = f"$JS.API.CONSUMER.MSG.NEXT.{ASSIGN}.workers"
MESSAGES = ("caf.exec.result.v1", "caf.exec.cancel.v1", "caf.worker.heartbeat.v1", "caf.exec.assign.v1.w.w1")
FORBIDDEN: dict[str, list[str]] = {
    "reader": ["work.open.cpu.x", "audit.c.1._", "command.cancel.x", "key.x", "value.x", "submissions", *MESSAGES],
    "client": [
        *(f"work.{state}.cpu.x" for state in RESULTS),
        *(f"command.{verb}.x" for verb in ("drain", "pause", "resume", "reload", "router")),
        *("status.x", "value.x", "pool.cpu.service", *MESSAGES),
    ],
    "worker": ["command.cancel.x", "command.drain.x", "submissions", "work.discarded.cpu.x", *MESSAGES[1::2]],
    "router": ["command.cancel.x", "command.drain.x", "work.discarded.cpu.x", "key.x", MESSAGES[0], MESSAGES[2]],
    "operator": ["work.succeeded.cpu.x", "status.x", "pool.cpu.service", *MESSAGES],
}
"""By role: what only other roles may publish."""
HEARD_BY_OTHERS = ["work.>", "audit.>", "key.*", "command.>", "status.*"]


def acts(role: str) -> tuple[list[str], list[str]]:
    """The subjects that this role may not publish to, and not subscribe to."""
    own = [f"{STORE}.{one}" for one in FORBIDDEN[role]]
    next_of_worker = [] if role == "worker" else [NEXT_SHARED]
    answers = [] if role == "router" else [f"_INBOX.{STORE}.client.x.1"]
    inboxes = [f"_INBOX.{STORE}.{one}.>" for one in ROLES if one != role]
    heard = [f"{STORE}.{one}" for one in HEARD_BY_OTHERS]
    everything = [">", "$SYS.>", "_INBOX.>"]
    return [*NO_ROLE_MAY, *own, *next_of_worker, *answers, "_INBOX.other.client.x"], [*inboxes, *heard, *everything]


@pytest.mark.real_time
@pytest.mark.parametrize("role", ROLES)
async def test_a_role_is_refused_everything_else(yard: Yard, role: str) -> None:
    found = await denied(yard, role, *acts(role))
    assert [one for one in found if not found[one]] == []


@pytest.mark.real_time
async def test_an_act_that_is_not_refused_is_noticed(yard: Yard) -> None:
    """The control of the test above: an administrator may do all of it, and a worker what its table has."""
    assert set((await denied(yard, "worker", [f"{STORE}.over.x"], [f"{STORE}.listeners"])).values()) == {False}
    assert set((await denied(yard, ADMIN, [f"{STORE}.command.cancel.x"], ["_INBOX.>"])).values()) == {False}


@pytest.mark.real_time
async def test_a_command_in_the_place_of_another_one_is_not_obeyed(yard: Yard) -> None:
    """A client may cancel, and cannot pass a drain off as a cancellation; where it belongs, a drain is read."""
    admin = await nats.connect(yard.server.url, user=ADMIN, password=f"pw-{ADMIN}")
    async with rk.open_store(yard.url, nats=yard.options("reader")) as store:
        before = await store.control.latest()
        drain = StoredCommand("drain", "router", "{}", "x", 0, 2**53)
        for place in ("cancel", "drain", "router"):
            body = msgspec.json.encode(structs.replace(drain, sender=place))
            await admin.request(f"{STORE}.command.{place}.c", body, timeout=10)
        async with asyncio.timeout(20):
            while len(found := await store.control.poll("router", after=before)) < 2:
                await store.control.wait(1.0, after=found[-1].sequence if found else before)
    await admin.close()
    assert [one.sender for one in found] == ["drain", "router"], "the last one as an earlier version puts it"


@pytest.mark.real_time
async def test_a_change_of_another_role_fails_at_once_also_after_others_were_stored(yard: Yard) -> None:
    async with rk.open_store(yard.url, nats=yard.options("client")) as store:
        await store.control.post("cancel", target="router", keep=1.0)
        with pytest.raises(StorePermissionError, match="only the role operator may"):
            async with asyncio.timeout(20):
                await store.control.post("pause", target="router", keep=1.0)


@pytest.mark.real_time
async def test_a_user_who_may_not_change_the_streams_uses_them_as_they_are(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    options = yard.options("unnamed-worker") | {"roles": (), "replicas": 3, "max_shared_assignments": 7}
    async with rk.open_store(yard.url, nats=options) as store:
        assert isinstance(store, jetstream_store.JetStreamStore)
        await store.transport(keeps_shared=True).ensure_stream()
    assert f"the stream {ASSIGN} is used as it is" in caplog.text


@pytest.mark.real_time
async def test_no_part_with_a_role_runs_retention(yard: Yard) -> None:
    for user in ("worker", ADMIN):
        async with rk.open_store(yard.url, nats=yard.options(user), tidy=False) as store:
            assert store.acquire_retention_lock() is (user == ADMIN)


@pytest.mark.parametrize(
    ("pattern", "needed", "is_covered", "overlaps"),
    [
        ("a.*", "a.b", True, True),
        ("a.*", "a.*", True, True),
        ("a.>", "a.*.*", True, True),
        ("a.*", "a.>", False, True),
        ("a.b", "a.*", False, True),
        ("a.>", "a", False, False),
        ("a.b", "a.c", False, False),
        ("a.b.c", "a.b", False, False),
        (">", "$JS.API.INFO", True, True),
    ],
)
def test_subjects_with_wildcards_are_compared_as_a_server_does(
    pattern: str, needed: str, is_covered: bool, overlaps: bool
) -> None:
    assert (covers(pattern, needed), overlap(pattern, needed)) == (is_covered, overlaps)


@pytest.mark.real_time
async def test_what_roles_do_not_stop(yard: Yard) -> None:
    """
    A server checks where a user publishes, not where it has an answer sent: a reader has the server store a copy.

    The guide of security says so. If this fails, the server has learnt better, and the guide can promise more.
    """
    forged = f"{STORE}.work.succeeded.cpu.forged"
    admin = await nats.connect(yard.server.url, user=ADMIN, password=f"pw-{ADMIN}")
    await admin.request(f"{STORE}.key.forgery", b"as I like it", timeout=10)
    inbox = f"_INBOX.{STORE}.reader".encode()
    reader = await nats.connect(yard.server.url, user="reader", password="pw-reader", inbox_prefix=inbox)
    asked = json.dumps({"last_by_subj": f"{STORE}.key.forgery"}).encode()
    await reader.publish(f"$JS.API.DIRECT.GET.{STATE}", asked, reply=forged)
    await reader.request("$SYS.REQ.USER.INFO", timeout=10)

    async def stored() -> bytes:
        wanted = json.dumps({"last_by_subj": forged}).encode()
        return (await admin.request(f"$JS.API.STREAM.MSG.GET.{STATE}", wanted, timeout=10)).data

    while b"no message found" in (answer := await stored()):  # noqa: ASYNC110 - it happens in a server
        await asyncio.sleep(0.02)
    assert b64decode(json.loads(answer)["message"]["data"]) == b"as I like it"
    await admin.publish(forged, b"", headers={"Nats-TTL": "1s"})
    await admin.close()
    await reader.close()


async def denied(yard: Yard, user: str, publish: list[str], subscribe: list[str]) -> dict[str, bool]:
    """By subject whether the server refuses it to this user."""
    said: list[str] = []

    async def failed(error: Exception) -> None:
        said.append(str(error).lower())

    inbox = b"_INBOX" if user == ADMIN else f"_INBOX.{STORE}.{user}".encode()
    given: dict[str, Any] = {"inbox_prefix": inbox, "error_cb": failed}
    client = await nats.connect(yard.server.url, user=user, password=f"pw-{user}", **given)
    for subject in publish:
        await client.publish(subject, b"{}")
    for subject in subscribe:
        await client.subscribe(subject)
    await client.request("$SYS.REQ.USER.INFO", timeout=10)  # behind all of these
    await client.close()
    return {one: any(f'to "{one.lower()}"' in line for line in said) for one in [*publish, *subscribe]}


# ---- stores made by an administrator ---------------------------------------------------------------------------------


def test_a_store_is_made_once_and_what_differs_is_named(yard: Yard) -> None:
    assert "is there already" in yard.done(ADMIN, "store", "create")
    code, _, err = yard(ADMIN, "store", "create", "--max-bytes", "10000000")
    assert code == 78
    assert f"the stream {STATE} is there: max_bytes is -1, not 10000000" in err
    code, _, err = yard(ADMIN, "store", "create", "--replicas", "3")
    assert (code, "num_replicas is 1, not 3" in err) == (78, True)
    assert "store.create" in yard.done("reader", "audit", "tail", "--type", "operator_action", "-n", "1000")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_makes_no_store_and_says_who_does(yard: Yard, role: str) -> None:
    code, _, err = yard(role, "store", "create")
    assert (code, f"a user with the role {role} makes no store" in err) == (77, True), err
