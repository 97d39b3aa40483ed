"""
Secrets stay in, on a worker's way: fifty of them in what steps fail with and what people say when they call work off.

What is searched is everything a worker makes: what is kept of its work (failure, reason, history, quarantine), its
audit events, the results and acks it sends, its log lines, and its status. An assignment's own payload and outputs are
the caller's data and come back as they were given. The control works without redaction and finds them all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import ACK, CANCEL, RESULT, Cancel, StepResult, StepStatus, encode
from reefknot.queue.model.work import WorkState
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import default_settings
from tests.acceptance.test_secrets_stay_in import MESSAGES, Plant, secret, without_redaction
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
    worker = Worker(
        "w1",
        settings=settings,
        store=shop.store,
        transport=shop.transport,
        blocks={"test.step": Leaky()},
        clock=shop.clock,
        secrets=SECRETS,
        seed=1,
    )
    shop.members.append(worker)
    await worker.start()
    sent = shop.heard(ACK, RESULT)
    for number, plant in enumerate(PLANTED):
        for how in ("raises", "refuses", "waits"):
            await shop.send(work(f"{how}-{number}", {"plant": number, "how": how}, retry_count=1))
        await shop.transport.publish(CANCEL, encode(Cancel(f"waits-{number}", plant.message)))
        await asyncio.sleep(5)
    items = []
    for state in WorkState:
        items += [
            msgspec.structs.replace(one, payload=b"") for one in await shop.store.work.find(state=state, limit=500)
        ]
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
    return {
        (sink, plant.secret)
        for sink, text in held.items()
        for plant in PLANTED
        if any(form in text.encode() for form in plant.forms)
    }


def test_none_of_fifty_secrets_reaches_anything_that_a_worker_makes(caplog: pytest.LogCaptureFixture) -> None:
    held = held_by(caplog)

    assert len({plant.secret for plant in PLANTED}) == 50
    assert leaked(held) == set()
    assert [sink for sink, text in held.items() if "[redacted]" not in text] == ["status"], "the others had them"


def test_without_redaction_the_same_search_finds_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control. The log is bounded, and a status tells nothing of any work, whatever is redacted."""
    monkeypatch.setattr("reefknot.core.failure.redact", lambda text: text, raising=False)
    without_redaction(monkeypatch)
    found = leaked(held_by(caplog))

    for sink in ("work", "quarantine", "events", "wire"):
        missed = [plant.secret for plant in PLANTED if (sink, plant.secret) not in found]
        assert missed == [], sink
    assert len([one for one in found if one[0] == "log"]) >= 10
