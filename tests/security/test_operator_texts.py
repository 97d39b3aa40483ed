"""Texts of operators and ids of jobs: no reason carries a secret into the store, and every id stays one."""

import asyncio
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.dashboard import formats
from reefknot.console.dashboard.api_types import PREFIX
from reefknot.console.operations.jobs import JobQuery, RetryQuery, cancel_job, list_jobs, retry_jobs, show_job
from reefknot.console.operations.operator import LONGEST_REASON
from reefknot.console.operations.quarantine import (
    QuarantineQuery,
    discard_jobs,
    edit_and_requeue,
    list_quarantined,
    purge_jobs,
    requeue_jobs,
)
from reefknot.console.operations.sources import forget_source, pause_source
from reefknot.queue.model.work import record_id
from tests.security.site_client import ask, bearer, build, opened_site
from tests.unit.console.cli import work_items
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene
from tests.unit.console.operations.test_quarantine import PAYLOAD, kept

CANARY = "CANARYbec23"
BECAUSE = f"as asked: token={CANARY} or {SECRET}"
LIKE_SECRETS = ("session:42", "auth:login:7", "order token=5", "https://user:pw@host/1")


async def requeue(scene: OperatorScene, because: str) -> Any:
    return await requeue_jobs(scene.operator, QuarantineQuery(ids=("a",)), because=because)


async def discard(scene: OperatorScene, because: str) -> Any:
    return await discard_jobs(scene.operator, QuarantineQuery(ids=("a",)), because=because)


async def purge(scene: OperatorScene, because: str) -> Any:
    return await purge_jobs(scene.operator, QuarantineQuery(ids=("a",)), because=because)


async def edit(scene: OperatorScene, because: str) -> Any:
    return await edit_and_requeue(scene.operator, "a", payload={**PAYLOAD, "path": "b"}, because=because)


async def retry(scene: OperatorScene, because: str) -> Any:
    return await retry_jobs(scene.operator, RetryQuery(ids=("a",)), because=because)


async def cancel(scene: OperatorScene, because: str) -> Any:
    await requeue(scene, "")
    return await cancel_job(scene.operator, "a", because=because)


async def pause(scene: OperatorScene, because: str) -> Any:
    return await pause_source(scene.operator, "notes", because=because)


async def forget(scene: OperatorScene, because: str) -> Any:
    await scene.keep("gone", "x")
    await scene.change("gone")
    return await forget_source(scene.operator, "gone", because=because)


ACTIONS = [requeue, discard, purge, edit, retry, cancel, pause, forget]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda one: str(one.__name__))
async def test_no_reason_carries_a_secret_anywhere_and_none_is_endless(action: Any, scene: OperatorScene) -> None:
    await kept(scene, "a")
    await action(scene, f"{BECAUSE} {'x' * 100_000}")
    store = scene.world.store
    bodies = [one.entry.body.decode() for one in await store.audit.read()]
    items = [await store.work.get(record_id(name, None)) for name in ("a", "a-v2", "a.2", "a~2")]
    texts = [*bodies, repr(items), repr(await scene.records.read("notes"))]
    assert not [text for text in texts if CANARY in text]
    told = [text for text in texts if "as asked" in text]
    assert told, "the reason itself is kept"
    assert all("x" * LONGEST_REASON not in text for text in texts)


async def test_an_id_that_looks_like_a_secret_is_the_same_in_every_list(scene: OperatorScene) -> None:
    await kept(scene, *LIKE_SECRETS, f"of {SECRET}")
    listed = [one["id"] for one in (await list_jobs(scene.operator, JobQuery()))["jobs"]]
    held = [one["id"] for one in (await list_quarantined(scene.operator, QuarantineQuery()))["items"]]
    assert sorted(listed) == sorted(held) == sorted([*LIKE_SECRETS, "of [redacted]"])
    for name in LIKE_SECRETS:
        assert (await show_job(scene.operator, name))["id"] == name


def test_the_pages_lead_to_jobs_whose_ids_look_like_secrets(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    work_items.submitted(path, *LIKE_SECRETS)

    async def work() -> None:
        async with opened_site(path) as site:
            app = build(site)
            page = unescape((await ask(app, "GET", "/work", [bearer()])).text)
            listed = [one["id"] for one in (await ask(app, "GET", f"{PREFIX}/jobs", [bearer()])).json["jobs"]]
            assert sorted(listed) == sorted(LIKE_SECRETS)
            events = (await ask(app, "GET", f"{PREFIX}/audit", [bearer()])).json["events"]
            assert {one["event"]["work_id"] for one in events} == set(LIKE_SECRETS)
            for name in LIKE_SECRETS:
                link = formats.job_path(name)
                assert f'href="{link}"' in page
                assert (await ask(app, "GET", link, [bearer()])).status == 200

    asyncio.run(work())
