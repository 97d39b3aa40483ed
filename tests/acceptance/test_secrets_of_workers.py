"""
Secrets stay in, on a worker's way: fifty of them in what steps fail with and what people say when they cancel work.

What is searched is everything that a worker makes. An assignment's own payload and outputs are the caller's data and
come back as they were given. At the end a step uses the library without `secrets=`, in a process of its own.
"""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import ACK, CANCEL, RESULT, Cancel, StepResult, StepStatus, encode
from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import default_settings
from tests.acceptance.test_secrets_stay_in import MESSAGES, Plant, secret, without_redaction
from tests.warm_commands import run_cold
from tests.workshop import Shop, Step, with_shop, work

ANYWHERE = [
    lambda s: f"the server said {s} is wrong",
    lambda s: f"near{s}glued",
    lambda s: json.dumps({"it": s}),
    lambda s: f"two {s} and {s}",
    lambda s: f"path /v1/{s}/items not found",
]
"""Only the configuration knows that this is secret."""


def plants() -> list[Plant]:
    """Half are secret by their place, half because the configuration says so."""
    found: list[Plant] = []
    while len(found) < 25:
        text = secret(len(found))
        found.append(Plant(text, message=MESSAGES[len(found) % len(MESSAGES)](text)))
    while len(found) < 50:
        text = secret(len(found))
        found.append(Plant(text, configured=True, message=ANYWHERE[len(found) % len(ANYWHERE)](text)))
    return found


PLANTED = plants()
SECRETS = tuple(plant.secret for plant in PLANTED if plant.configured)


class Leaky(Step):
    """Fails with a plant's message, as an exception or as a result; both are retried once."""

    async def run(self, inputs: Any, context: Any) -> StepResult:
        plant = PLANTED[inputs["plant"]]
        match inputs["how"]:
            case "raises":
                raise ConnectionError(plant.message)
            case "refuses":
                return StepResult(StepStatus.ERROR, ErrorCode.permission_denied, error_message=plant.message)
            case _:
                await asyncio.sleep(60)
                return StepResult()


async def everything(shop: Shop, records: list[logging.LogRecord]) -> dict[str, str]:
    """All the work with all the secrets, and what each sink of a worker has got of it."""
    settings = default_settings(quarantine_failed=True, concurrency={"cpu": 200})
    parts: dict[str, Any] = {"store": shop.store, "transport": shop.transport, "clock": shop.clock}
    worker = Worker("w1", settings=settings, blocks={"test.step": Leaky()}, secrets=SECRETS, seed=1, **parts)
    shop.members.append(worker)
    await worker.start()
    sent = shop.heard(ACK, RESULT)
    for number, plant in enumerate(PLANTED):
        for how in ("raises", "refuses", "waits"):
            await shop.send(work(f"{how}-{number}", {"plant": number, "how": how}, retry_count=1))
        await shop.transport.publish(CANCEL, encode(Cancel(f"waits-{number}", plant.message)))
        await asyncio.sleep(5)
    found = [one for state in WorkState for one in await shop.store.work.by_id(WorkFilter(state=state), limit=500)]
    items = [msgspec.structs.replace(one, payload=b"") for one in found]
    assert len(items) == 150
    aside = [one for one in items if one.state is WorkState.QUARANTINED]
    assert len(aside) == 100
    lines = [f"{one.getMessage()} {one.__dict__}" for one in records]
    return {
        "work": repr(items),
        "quarantine": repr([(one.reason, one.failure, one.history) for one in aside]),
        "events": repr(await shop.events()),
        "wire": repr(sent),
        "log": "\n".join(lines),
        "status": repr(worker.snapshot()),
    }


def held_by(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    found: dict[str, str] = {}

    async def story(shop: Shop) -> None:
        found.update(await everything(shop, caplog.records))

    with caplog.at_level(logging.DEBUG, "reefknot"):
        with_shop(story)
    return found


def leaked(held: dict[str, str]) -> set[tuple[str, str]]:
    pairs = ((sink, plant) for sink in held for plant in PLANTED)
    return {(sink, plant.secret) for sink, plant in pairs if any(form in held[sink].encode() for form in plant.forms)}


def test_none_of_fifty_secrets_reaches_anything_that_a_worker_makes(caplog: pytest.LogCaptureFixture) -> None:
    held = held_by(caplog)
    assert len({plant.secret for plant in PLANTED}) == 50
    assert leaked(held) == set()
    assert [sink for sink, text in held.items() if "[redacted]" not in text] == ["status"], "the others had them"


def test_without_redaction_it_finds_them(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control. The log is bounded, and a status tells nothing of any work, whatever is redacted."""
    monkeypatch.setattr("reefknot.core.failure.redact", lambda text: text, raising=False)
    without_redaction(monkeypatch)
    found = leaked(held_by(caplog))
    for sink in ("work", "quarantine", "events", "wire"):
        missed = [plant.secret for plant in PLANTED if (sink, plant.secret) not in found]
        assert missed == [], sink
    assert len([one for one in found if one[0] == "log"]) >= 10


SECRET = "zander-Trockenfisch_9!"
PAYING = """\
import os
import reefknot as rk

SECRET = os.environ["SHOP_SECRET"]

@rk.idempotent(key=lambda order: f"{SECRET}/{order}", mode="guard", name="charge")
async def charge(order):
    raise ConnectionError(f"the bank refused {SECRET} today")

@rk.retry(attempts=3, base_delay=0.01)
def fetch():
    raise ConnectionError(f"the shop refused {SECRET} today")

@rk.block("shop.order")
def order(inputs, context):
    fetch()

@rk.block("shop.pay")
async def pay(inputs, context):
    await charge(inputs["order"])
"""


def run_steps(folder: Path, *, configured: bool) -> dict[str, str]:
    """Everything that the run leaves, by place."""
    (folder / "steps.py").write_text(PAYING)
    (folder / "reefknot.yaml").write_text("secrets: {shop: 'env:SHOP_SECRET'}\n" if configured else "{}\n")
    kinds = ("shop.order", "shop.pay")
    lines = [{"assignment_id": kind, "job": {"type": kind, "payload": {"order": "7"}}} for kind in kinds]
    (folder / "work.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    own = {"SHOP_SECRET": SECRET, "WORKER_RETRIES_V2_ENABLED": "true"}
    command = (sys.executable, "-m", "reefknot", "run", "work.jsonl", "--module", "steps")
    ended = run_cold(*command, cwd=folder, env=os.environ | own)
    assert ended.returncode == 1, ended.stderr
    assert "2 failed" in ended.stdout, ended.stderr
    database = apsw.Connection(str(folder / ".reefknot" / "state.db"))
    queries = {
        "events": "SELECT body FROM audit",
        "work": "SELECT reason, failure, result, history FROM work",
        "recorded failures": "SELECT failure FROM idempotency",
        "keys": "SELECT key FROM idempotency",
    }
    found = {name: repr(list(database.execute(query))) for name, query in queries.items()}
    database.close()
    return found | {"log": ended.stderr}


def test_no_secret_of_the_configuration_leaves_a_step_that_uses_the_library(tmp_path: Path) -> None:
    left = run_steps(tmp_path, configured=True)
    assert {place for place, text in left.items() if SECRET in text} == {"keys"}, "a key is stored as it was given"
    assert all("[redacted]" in left[place] for place in ("events", "work", "recorded failures", "log"))
    assert '"idempotency_key":"charge:[redacted]/7"' in left["events"]
    assert "fetch: attempt 1 of 3 failed with ConnectionError" in left["log"]


def test_without_the_configuration_the_same_search_finds_it_everywhere(tmp_path: Path) -> None:
    """The control."""
    left = run_steps(tmp_path, configured=False)
    assert {place for place, text in left.items() if SECRET in text} == set(left)
