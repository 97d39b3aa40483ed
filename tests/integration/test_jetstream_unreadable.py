"""Records on NATS with garbage in them: named, left out of lists, and removed by a command that is audited."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from reefknot.audit.port import AuditQuery
from reefknot.console.nats_servers import NatsServer
from reefknot.errors import OperationError, StoreCorruptError, StoreFullError
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import JetStreamStore
from tests.stories import InLoop
from tests.warm_commands import run_warm

pytestmark = pytest.mark.real_time

GARBAGE = b'\xff{"not": a record'
BRANCHES = ("work.open.cpu.bad", "work.failed.cpu.bad", "key.bad", "status.bad", "command.all.bad", "value.bad")


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[JetStreamStore]:
    store = await JetStreamStore.open(url, SystemClock())
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    return f"{nats_server.url}/{new_id()}"


@pytest.fixture
def store(url: str) -> InLoop:
    return InLoop(lambda: opened(url))


async def spoil(store: JetStreamStore, branch: str, body: bytes = GARBAGE) -> str:
    """Put garbage on a subject of the store, as no process of it does."""
    subject = f"{store.names.name}.{branch}"
    store.connection.check((await store.connection.request(subject, body)).data)
    return subject


async def listed(store: JetStreamStore) -> list[str]:
    """What a process that has just begun lists."""
    other = await JetStreamStore(store.options, SystemClock()).start()
    try:
        found = [one.id for one in (await other.work.search(WorkFilter())).items]
        assert sum((await other.work.count(WorkFilter())).values()) == len(found)
        assert [one.id for one in await other.work.by_id()] == sorted(found)
        await other.work.groups()
        await other.work.quarantine_stats()
        await other.work.snapshot()
        await other.control.reports()
        await other.values.list()
        await other.idempotency.counts()
        return found
    finally:
        await other.close()


@pytest.mark.parametrize("branch", BRANCHES)
async def test_a_record_with_garbage_is_left_out_named_and_removed(store: JetStreamStore, branch: str) -> None:
    await store.work.enqueue([WorkItem("good", "t", "cpu")])
    await store.values.put("good", "1", version=0)
    subject = await spoil(store, branch)
    assert await listed(store) == ["good"]
    report = await store.check_records()
    assert [one.subject for one in report.found] == [subject]
    assert report.is_whole
    would = await store.forget_record(subject, events=[], dry_run=True)
    assert would == report.found[0]
    assert await store.forget_record(subject, events=[], dry_run=False) == would
    assert (await store.check_records()).found == []
    with pytest.raises(OperationError, match="there is no record"):
        await store.forget_record(subject, events=[], dry_run=False)


async def test_a_record_that_is_asked_for_says_how_it_is_removed(store: JetStreamStore) -> None:
    await spoil(store, "work.open.cpu.bad")
    await spoil(store, "value.bad")
    with pytest.raises(StoreCorruptError, match=r"open\.cpu\.bad \(sequence \d+\) cannot be read; reefknot store"):
        await store.work.get("bad")
    with pytest.raises(StoreCorruptError, match=r"value\.bad \(sequence \d+\) cannot be read"):
        await store.values.get("bad")


async def test_a_record_that_can_be_read_stays(store: JetStreamStore) -> None:
    """The control: forgetting is for garbage alone, and for one subject at a time."""
    await store.work.enqueue([WorkItem("good", "t", "cpu")])
    with pytest.raises(OperationError, match="can be read, and stays"):
        await store.forget_record(f"{store.names.name}.work.open.cpu.good", events=[], dry_run=False)
    await spoil(store, "work.open.cpu.bad")
    for subject in (f"{store.names.name}.work.open.cpu.*", f"{store.names.name}.>", "elsewhere.work.open.cpu.bad"):
        with pytest.raises(OperationError, match="there is no record"):
            await store.forget_record(subject, events=[], dry_run=False)
    assert await store.work.get("good") is not None


async def test_garbage_under_the_id_of_open_work_fails_no_other_change(store: JetStreamStore) -> None:
    await store.work.enqueue([WorkItem("good", "t", "cpu")])
    await spoil(store, "work.open.cpu.bad")
    answers = await asyncio.gather(
        store.work.cancel("bad"), store.work.cancel("good"), store.work.enqueue([WorkItem("new", "t", "cpu")])
    )
    assert list(answers[:2]) == [False, True]


async def test_the_commands_name_and_remove_it(tmp_path: Path, store: JetStreamStore, url: str) -> None:
    subject = await spoil(store, "work.open.cpu.bad")
    environment = dict(os.environ)

    def run(*words: str) -> Any:
        return run_warm(*words, "--engine", url, cwd=tmp_path, env=environment)

    doctor = await asyncio.to_thread(run, "doctor")
    assert doctor.returncode == 65, doctor.stdout
    assert f"{subject} (" in doctor.stdout
    found = await asyncio.to_thread(run, "job", "list", "--json")
    assert (found.returncode, json.loads(found.stdout)["jobs"]) == (0, [])
    assert f"record {subject} (sequence" in found.stderr
    checked = await asyncio.to_thread(run, "store", "check")
    assert checked.returncode == 65
    assert f"{subject} (sequence" in checked.stdout
    dry = await asyncio.to_thread(run, "store", "forget-record", subject, "--dry-run")
    assert "would be removed" in dry.stdout, dry.stderr
    assert (await asyncio.to_thread(run, "store", "check")).returncode == 65
    done = await asyncio.to_thread(run, "store", "forget-record", subject, "--as", "ada")
    assert done.returncode == 0, done.stderr
    assert (await asyncio.to_thread(run, "store", "check")).returncode == 0
    (event,) = await store.audit.read(AuditQuery(event_type="operator_action"))
    assert json.loads(event.entry.body)["action"] == "store.forget_record"


async def test_more_items_than_one_batch_holds_are_refused_with_the_limit(store: JetStreamStore) -> None:
    with pytest.raises(StoreFullError, match=r"900 jobs have 900 records, .*at most 880: .*500 jobs in each call"):
        await store.work.enqueue([WorkItem(f"m{number}", "t", "cpu") for number in range(900)])
    assert await store.work.get("m0") is None
    await store.work.enqueue([WorkItem(f"m{number}", "t", "cpu") for number in range(880)])
    assert await store.work.get("m879") is not None
