"""
Secrets stay in: fifty of them, planted where secrets turn up, and none in anything that is written.

Half are secret by their place, half because the configuration says so. Every byte that is written is searched for the
secret as it is, in base64 and URL-encoded; the control finds them all. A *result* is the caller's own data: its
store keeps it as it was given, and no event, log line or error has it.
"""

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from msgspec import Struct

from reefknot.app.managers import RetryManager
from reefknot.app.system import System
from reefknot.audit.journal import FanOut
from reefknot.audit.jsonlines import JsonLinesLog
from reefknot.audit.log_sink import LogSink
from reefknot.console.cli import main as command
from reefknot.console.cli.serve import UpSession, startup
from reefknot.core.policy import RetryPolicy
from reefknot.core.redaction import Redactor
from reefknot.errors import QueueFullError, RetryError
from reefknot.queue.client import Client
from reefknot.queue.model.messages import ExecAssignment, Job
from reefknot.queue.model.work import record_id
from reefknot.runtime.clocks import LoopClock, SystemClock, VirtualLoop
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import open_store
from reefknot.testing import run_virtual

POLICY = RetryPolicy(2, 0.0, jitter="none")


def without_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of each search: it is the redaction that keeps secrets in."""
    monkeypatch.setattr("reefknot.retrying.failures.redact", lambda text: text)
    monkeypatch.setattr(Redactor, "__call__", lambda self, text: text)
    monkeypatch.setattr(Redactor, "tree", lambda self, value, **_: value)
    monkeypatch.setattr(Redactor, "values_out_of", lambda self, text: text)


class Plant(Struct, frozen=True):
    """One operation with a secret in it."""

    secret: str
    configured: bool = False
    message: str = "it broke"
    operation: str = "work"
    context: dict[str, Any] | None = None
    correlation_id: str | None = None
    trace_id: str | None = None
    tenant_id: str | None = None
    key: str | None = None
    result: Any = None

    @property
    def forms(self) -> list[bytes]:
        """As it is, in base64, URL-encoded, and as JSON and Python write it."""
        raw = self.secret.encode()
        quoted = {repr(self.secret), json.dumps(self.secret), json.dumps(self.secret, ensure_ascii=False)}
        twice = {json.dumps(text[1:-1], ensure_ascii=False) for text in quoted}  # a text with JSON in it, in an event
        shown = [*(text[1:-1] for text in quoted | twice), quote(self.secret, safe="")]
        return [raw, b64encode(raw).rstrip(b"="), *(text.encode() for text in shown)]


def secret(number: int) -> str:
    return f"Canary/{number:02d}+Zq7xW{number * 7919:06x}"


def basic(text: str) -> str:
    return b64encode(text.encode()).decode()


MESSAGES: list[Callable[[str], str]] = [
    lambda s: f"GET https://me:{s}@example.org/orders failed",
    lambda s: f"GET https://example.org/orders?token={s}&page=2 failed",
    lambda s: f"GET https://example.org/orders?page=2&api_key={s}",
    lambda s: f"https://blob.example.org/x?sv=1&sig={s}",
    lambda s: f"could not connect to amqp://guest:{s}@mq:5672/",
    lambda s: f"request had Authorization: Bearer {s}",
    lambda s: f"request had Authorization: Basic {basic(s)}",
    lambda s: f"sent Cookie: session={s}; theme=dark",
    lambda s: f"got Set-Cookie: sid={s}; Path=/",
    lambda s: f"headers were X-Api-Key: {s}",
    lambda s: f"login with password={s} refused",
    lambda s: f'body was {{"user": "ann", "password": "{s}"}}',
    lambda s: f"config is {{'client_secret': '{s}', 'id': 1}}",
    lambda s: f"AWS_SECRET_ACCESS_KEY={s} is not valid",
    lambda s: f"the passphrase: {s}",
    lambda s: f"access_token={s}, refresh later",
]
"""Places that tell by themselves that what stands there is secret."""

CONTEXTS: list[Callable[[str], dict[str, Any]]] = [
    lambda s: {"password": s},
    lambda s: {"headers": {"Authorization": f"Bearer {s}"}},
    lambda s: {"steps": [{"args": [{"api_key": s}]}]},
    lambda s: {"url": f"postgresql://app:{s}@db/orders"},
    lambda s: {f"https://me:{s}@example.org": 1},
    lambda s: {"note": f"retry with token={s}"},
    lambda s: {"credentials": {"user": "ann", "code": s}},
]

ANYWHERE: list[Callable[[str], dict[str, Any]]] = [
    lambda s: {"message": f"the server said {s} is wrong"},
    lambda s: {"message": f"the server said {basic(s)} is wrong"},
    lambda s: {"message": f"GET /find?q={quote(s, safe='')} failed"},
    lambda s: {"message": f"near{s}glued"},
    lambda s: {"message": str(KeyError(s))},
    lambda s: {"message": json.dumps({"it": s})},
    lambda s: {"message": "x" * 4080 + s},
    lambda s: {"operation": f"fetch {s}"},
    lambda s: {"operation": f"fetch {quote(s, safe='')}"},
    lambda s: {"context": {"note": f"with {s}"}},
    lambda s: {"context": {s: "as a key"}},
    lambda s: {"context": {"deep": [[{"x": [s]}]]}},
    lambda s: {"context": {"encoded": basic(s)}},
    lambda s: {"correlation_id": f"c-{s}"},
    lambda s: {"trace_id": f"t-{s}"},
    lambda s: {"tenant_id": s},
    lambda s: {"key": f"order-{s}"},
    lambda s: {"key": quote(s, safe="")},
    lambda s: {"operation": f"post to https://example.org/{s}/hook"},
    lambda s: {"message": f"path /v1/{s}/items not found"},
    lambda s: {"message": f"two {s} and {s}"},
    lambda s: {"context": {"number": 1, "text": f"{s}{s}"}},
]
"""Only the configuration knows that this is secret."""

RESULTS: list[Callable[[str], Any]] = [
    lambda s: s,
    lambda s: {"token": s},
    lambda s: ["a", {"deep": s}],
    lambda s: f"https://me:{s}@example.org/",
    lambda s: {"encoded": basic(s)},
]


def plants() -> list[Plant]:
    found = [Plant(secret(number), message=place(secret(number))) for number, place in enumerate(MESSAGES)]
    for place in CONTEXTS:
        found.append(Plant(secret(len(found)), context=place(secret(len(found)))))
    for spread in ANYWHERE:
        shape = secret(len(found)) if len(found) % 4 else f'Canary "{len(found)}"\nschlüssel\\{len(found) * 7919:06x}'
        found.append(Plant(shape, configured=True, **spread(shape)))
    for number, inside in enumerate(RESULTS):
        text = secret(len(found))
        found.append(Plant(text, configured=True, key=f"result-{number}", result=inside(text)))
    return found


PLANTED = plants()
TOLD = [plant for plant in PLANTED if plant.result is None]
"""Those that events would hold. A result is in none, whatever is redacted."""


def test_there_are_fifty() -> None:
    assert len({plant.secret for plant in PLANTED}) == len(PLANTED) == 50


async def worked(folder: Path) -> dict[str, bytes]:
    """All the work with all the secrets, and everything that every sink has got of it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    clock = LoopClock(loop)
    errors: list[str] = []
    lines = await JsonLinesLog.open(folder / "audit.jsonl", clock, fsync="never", largest=100_000, inline=True)
    memory, keys = MemoryStore(clock), MemoryStore(clock)
    async with open_store(f"sqlite:{folder / 'state.db'}") as store:
        manager = RetryManager(
            idempotency=keys.idempotency,
            audit=FanOut(memory.audit, lines, store.audit, LogSink(longest=1_000_000)),
            secrets=tuple(plant.secret for plant in PLANTED if plant.configured),
        )
        for plant in PLANTED:
            for fails in (1, 2):
                errors += await executed(manager, plant, fails)
        bodies = b"\n".join(kept.entry.body for kept in await memory.audit.read())
        filed = str([kept.entry for kept in await store.audit.read()]).encode()
    await lines.close()
    return {"memory": bodies, "filed under": filed, "errors": "\n".join(errors).encode()}


async def executed(manager: RetryManager, plant: Plant, fails: int) -> list[str]:
    left = fails

    async def work() -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ConnectionError(plant.message)
        return plant.result

    try:
        key = None if plant.key is None else f"{plant.key}-{fails}"
        ids = (plant.tenant_id, plant.correlation_id, plant.trace_id)
        category, operation = "RETRY_API_REQUEST", plant.operation
        found = await manager.execute_with_retry(category, operation, work, POLICY, key, *ids, plant.context)
    except RetryError as error:
        return [str(error), repr(error.attempts), repr(error)]
    assert found == plant.result, "whoever asked gets the result as it is"
    return []


@contextmanager
def logged_to(file: Path) -> Iterator[None]:
    """Every line of every logger of ours, into a file."""
    handler = logging.FileHandler(file, encoding="utf-8")
    logger = logging.getLogger("reefknot")
    old = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(old)
        logger.removeHandler(handler)
        handler.close()


def everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, bytes]:
    """What each sink holds after the work, by the sink's name."""
    with logged_to(folder / "all.log"):
        held = run_virtual(worked(folder))
    engine = f"sqlite:{folder / 'state.db'}"
    assert command(["audit", "export", str(folder / "export.jsonl"), "--engine", engine]) == 0
    capsys.readouterr()
    for words in (["tail", "-n", "1000"], ["tail", "-n", "1000", "--json"], ["analyse"], ["replay"], ["verify"]):
        assert command(["audit", *words, "--engine", engine]) == 0
    out, err = capsys.readouterr()
    held["commands"] = (out + err).encode()
    held["jsonlines"] = b"".join(file.read_bytes() for file in sorted(folder.glob("audit.jsonl*")))
    held["sqlite"] = b"".join(file.read_bytes() for file in sorted(folder.glob("state.db*")))
    held["log"] = (folder / "all.log").read_bytes()
    held["export"] = (folder / "export.jsonl").read_bytes()
    return held


def leaked(held: dict[str, bytes], among: list[Plant]) -> list[tuple[str, str]]:
    return [
        (name, plant.secret) for name, text in held.items() for plant in among if any(f in text for f in plant.forms)
    ]


def test_none_of_fifty_secrets_reaches_any_sink(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = everything(tmp_path, capsys)
    assert leaked(held, PLANTED) == []
    assert all(b"[redacted]" in text for text in held.values()), "every sink got the events"


def test_without_redaction_the_same_search_finds_them_in_every_sink(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: it is the redaction that keeps them in, and the search would see them."""
    without_redaction(monkeypatch)
    held = everything(tmp_path, capsys)
    found = set(leaked(held, TOLD))
    for sink in ("memory", "jsonlines", "sqlite", "log", "export", "commands"):
        missed = [plant.secret for plant in TOLD if (sink, plant.secret) not in found]
        assert missed == [], sink


def test_a_recorded_result_is_kept_as_it_was_and_never_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The store of the keys holds the caller's data; its events, and what commands show of it, do not."""
    plant = Plant("Canary-result-55", configured=True, key="k", result={"note": "Canary-result-55"})
    path = tmp_path / "state.db"

    async def main() -> bytes:
        async with open_store(f"sqlite:{path}") as store:
            manager = RetryManager(idempotency=store.idempotency, audit=store.audit, secrets=(plant.secret,))
            await executed(manager, plant, 1)
            again = await executed(manager, plant, 1)
            assert again == []
            return b"".join(kept.entry.body for kept in await store.audit.read())

    assert plant.secret.encode() not in run_virtual(main())
    assert plant.secret.encode() in b"".join(file.read_bytes() for file in tmp_path.glob("state.db*"))
    assert command(["audit", "tail", "--json", "--engine", f"sqlite:{path}"]) == 0
    assert plant.secret not in capsys.readouterr().out


@pytest.mark.parametrize("redacting", [True, False])
def test_a_recorded_failure_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redacting: bool) -> None:
    """A failure is told to whoever asks for the key, unlike a result; the control does not redact."""
    canary = "Canary-guarded-56"
    if not redacting:
        without_redaction(monkeypatch)

    async def fails() -> None:
        raise ValueError(f"it does not know {canary}")

    async def main() -> None:
        async with open_store(f"sqlite:{tmp_path / 'state.db'}") as store:
            manager = RetryManager(idempotency=store.idempotency, audit=store.audit, secrets=(canary,))
            never = POLICY.replace(non_retryable_exceptions=("ValueError",))
            with pytest.raises(ValueError, match="does not know"):
                await manager.execute_with_retry("KV_PUT", "put", fails, never, "k", mode="guard")

    run_virtual(main())
    written = b"".join(file.read_bytes() for file in tmp_path.glob("state.db*"))
    assert (canary.encode() in written) is not redacting


ROUTED = "Canary/routed+Zq7xW57"
CONFIGURED = """\
secrets: {{token: "env:CANARY"}}
worker:
  retries: {{v2: {{enabled: true}}}}
  queue: {{v2: {{enabled: true, max_queue_size: {size}}}}}
blocks: {{fs: {{roots: [files]}}}}
"""


def assignments() -> list[dict[str, Any]]:
    """A secret in everything that a router puts on record of an assignment."""
    get = {"type": "fs.blob_get", "payload": {"path": "a"}}
    return [
        {"assignment_id": "tenant", "tenant_id": ROUTED, "job": get},
        {"assignment_id": "trace", "correlation": {"trace_id": ROUTED}, "job": get},
        {"assignment_id": "request", "request_id": ROUTED, "job": get},
        {"assignment_id": ROUTED, "job": get},
        {"assignment_id": "refused", "job": {"type": ROUTED}},
        {"assignment_id": "class", "job": get, "resource_class": ROUTED},
        {"assignment_id": "late", "tenant_id": ROUTED, "job": {"type": "nobody.has"}, "options": {"deadline_ms": 1}},
    ]


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, *, redacting: bool, size: int = 1000) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CANARY", ROUTED)
    (folder / "files").mkdir()
    (folder / "files" / "a").write_text("x")
    (folder / "reefknot.yaml").write_text(CONFIGURED.format(size=size))
    lines = [{"request_id": "r", **one} for one in assignments()]
    (folder / "work.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    if not redacting:
        without_redaction(monkeypatch)


def on_record(folder: Path) -> bytes:
    assert command(["audit", "export", "export.jsonl"]) == 0
    return (folder / "export.jsonl").read_bytes()


@pytest.mark.parametrize("redacting", [True, False])
def test_what_a_router_tells_of_assignments_holds_no_configured_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, redacting: bool
) -> None:
    """`run`: events of router and worker, and every line that is said. The control does not redact."""
    prepared(tmp_path, monkeypatch, redacting=redacting)
    with logged_to(tmp_path / "all.log"):
        assert command(["run", "work.jsonl"]) == 1
    out, err = capsys.readouterr()
    told = on_record(tmp_path)

    for event in (b'"routing"', b'"admission"'):
        assert event in told, "there is something to be found in"
    found = [ROUTED.encode() in text for text in (told, (out + err).encode())]
    assert found == [not redacting] * 2
    assert redacting is (ROUTED.encode() not in (tmp_path / "all.log").read_bytes() + told)


@pytest.mark.parametrize("redacting", [True, False])
def test_a_system_that_is_up_keeps_secrets_out_of_refusals_and_cancel_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, redacting: bool
) -> None:
    """`up`: what others hand in, what is refused at a full door, what is called off and why."""
    prepared(tmp_path, monkeypatch, redacting=redacting, size=2)

    async def beside(system: System) -> None:
        nobody = Job("fs.blob_get", {"path": "a"})
        for number in range(2):
            waiting = ExecAssignment(f"w{number}", ROUTED, nobody, tenant_id=ROUTED, resource_class="nowhere")
            await system.submit(waiting)
        with pytest.raises(QueueFullError):
            await system.submit(ExecAssignment("refused", ROUTED, nobody, tenant_id=ROUTED, resource_class="nowhere"))
        await system.router.cancel("w0", f"it is about {ROUTED}", tenant_id=ROUTED)
        await Client(system.store, SystemClock()).cancel("w1", f"and this about {ROUTED}", tenant_id=ROUTED)
        while await system.router.submissions.answer(record_id("w1", ROUTED)) is None:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.01)

    assert asyncio.run(UpSession(startup(None, None)).serve(60, drain=0, beside=beside)) == 0
    out, err = capsys.readouterr()
    told = on_record(tmp_path)

    assert told.count(b'"action":"cancel"') == 2
    assert b'"reason":"queue_full"' in told
    found = [ROUTED.encode() in text for text in (told, (out + err).encode())]
    assert found == [not redacting] * 2, "tenants are shown"
