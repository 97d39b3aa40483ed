"""Texts of operators and ids of jobs: no reason carries a secret into the store, and every id stays one."""

from collections.abc import Awaitable, Callable
from html import unescape
from pathlib import Path

import pytest

from reefknot.console.dashboard import formats
from reefknot.console.dashboard.api_types import PREFIX
from reefknot.console.dashboard.site import Site
from reefknot.console.operations import quarantine
from reefknot.console.operations.jobs import JobQuery, RetryQuery, cancel_job, list_jobs, retry_jobs, show_job
from reefknot.console.operations.operator import LONGEST_REASON, Operator
from reefknot.console.operations.sources import forget_source, pause_source
from reefknot.queue.model.work import record_id
from tests.security.site_client import ask, bearer, build, opened_site
from tests.stories import InLoop
from tests.unit.console.cli import work_items
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene
from tests.unit.console.operations.test_quarantine import PAYLOAD, kept

CANARY = "CANARYbec23"
BECAUSE = f"as asked: token={CANARY} or {SECRET}"
EDITED = {**PAYLOAD, "path": "b"}
LIKE_SECRETS = ("session:42", "auth:login:7", "order token=5", "https://user:pw@host/1")


A = quarantine.QuarantineQuery(ids=("a",))


async def cancel(operator: Operator, because: str) -> None:
    await quarantine.requeue_jobs(operator, A, because="")
    await cancel_job(operator, "a", because=because)


ACTIONS: dict[str, Callable[[Operator, str], Awaitable[object]]] = {
    "requeue": lambda operator, because: quarantine.requeue_jobs(operator, A, because=because),
    "discard": lambda operator, because: quarantine.discard_jobs(operator, A, because=because),
    "purge": lambda operator, because: quarantine.purge_jobs(operator, A, because=because),
    "edit": lambda operator, because: quarantine.edit_and_requeue(operator, "a", payload=EDITED, because=because),
    "retry": lambda operator, because: retry_jobs(operator, RetryQuery(ids=("a",)), because=because),
    "cancel": cancel,
    "pause": lambda operator, because: pause_source(operator, "notes", because=because),
    "forget": lambda operator, because: forget_source(operator, "gone", because=because),
}


@pytest.mark.parametrize("action", ACTIONS)
async def test_no_reason_carries_a_secret_anywhere_and_none_is_endless(action: str, scene: OperatorScene) -> None:
    await kept(scene, "a")
    await scene.keep("gone", "x")
    await scene.change("gone")
    await ACTIONS[action](scene.operator, f"{BECAUSE} {'x' * 100_000}")
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
    held = [
        one["id"] for one in (await quarantine.list_quarantined(scene.operator, quarantine.QuarantineQuery()))["items"]
    ]
    assert sorted(listed) == sorted(held) == sorted([*LIKE_SECRETS, "of [redacted]"])
    for name in LIKE_SECRETS:
        assert (await show_job(scene.operator, name))["id"] == name


@pytest.fixture
def secretive(tmp_path: Path) -> InLoop:
    """A site over jobs whose ids look like secrets."""
    work_items.submitted(tmp_path / "state.db", *LIKE_SECRETS)
    return InLoop(lambda: opened_site(tmp_path / "state.db"))


@pytest.mark.real_time
async def test_the_pages_lead_to_jobs_whose_ids_look_like_secrets(secretive: Site) -> None:
    app = build(secretive)
    page = unescape((await ask(app, "GET", "/work", [bearer()])).text)
    listed = [one["id"] for one in (await ask(app, "GET", f"{PREFIX}/jobs", [bearer()])).json["jobs"]]
    assert sorted(listed) == sorted(LIKE_SECRETS)
    events = (await ask(app, "GET", f"{PREFIX}/audit", [bearer()])).json["events"]
    assert {one["event"]["work_id"] for one in events} == set(LIKE_SECRETS)
    for name in LIKE_SECRETS:
        link = formats.job_path(name)
        assert f'href="{link}"' in page
        assert (await ask(app, "GET", link, [bearer()])).status == 200
