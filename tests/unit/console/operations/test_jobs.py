"""Operations on jobs: checked filters, counts before a change, refusals by kind, and an event for each change."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.audit.model.event import Submitted, decode
from reefknot.console.operations.bulk import BulkListener
from reefknot.console.operations.jobs import (
    JobQuery,
    RetryQuery,
    SubmissionRefusedError,
    cancel_job,
    job_counts,
    job_story,
    list_jobs,
    retry_jobs,
    show_job,
    submit_job,
)
from reefknot.errors import OperationError, ParameterError
from reefknot.queue.model.work import WorkDone, WorkFailed, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene, names_of

SMALL = "router: {max_queue_size: 1}\n"
STEP: dict[str, Any] = {"assignment_id": "order-7", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}


async def kept(scene: OperatorScene, item: WorkItem, settled: WorkDone | WorkFailed | None = None) -> None:
    """A job of this store, ended as given."""
    work = scene.world.store.work
    await work.enqueue([item])
    if settled is not None:
        (held,) = await work.claim(1, WorkClaim(owner="w", only=[item.id]))
        assert await work.settle([Settlement(item.id, "w", held.fence, settled)]) == [True]


async def three(scene: OperatorScene) -> None:
    """One that failed for a tenant, one of a source, and one that waits."""
    failed = WorkFailed('{"code": "HTTP_ERROR", "message": "it answered 503"}', None, f"attempts_spent, {SECRET}")
    await kept(scene, WorkItem("acme|paid", "http.request", tenant_id="acme"), failed)
    await kept(scene, WorkItem("notes/1", "local_files", "ingest.notes", "notes"))
    await kept(scene, WorkItem("waits", "local_files"))


async def test_a_list_takes_every_filter_and_hides_secrets(scene: OperatorScene) -> None:
    await three(scene)

    async def ids(**fields: Any) -> list[str]:
        return [one["id"] for one in (await list_jobs(scene.operator, JobQuery(**fields)))["jobs"]]

    assert await ids() == ["waits", "notes/1", "paid"]
    assert await ids(tenant="acme") == ["paid"]
    assert await ids(source="notes") == ["notes/1"]
    assert await ids(type="local_files") == ["waits", "notes/1"]
    assert await ids(connector="local_files") == ["notes/1"]
    assert await ids(error="503") == await ids(error="attempts_spent") == await ids(state="failed") == ["paid"]
    assert await ids(since="1m", sort="oldest") == ["paid", "notes/1", "waits"]
    assert await ids(before="1m") == []
    found = await list_jobs(scene.operator, JobQuery())
    assert SECRET not in str(found)
    assert (found["states"]["failed"], found["next"]) == (1, None)
    assert (await job_counts(scene.operator))["states"] == found["states"]


async def test_one_job_is_shown_without_secrets_in_any_of_its_fields(scene: OperatorScene) -> None:
    spoilt = WorkItem("a", "local_files", correlation_id=SECRET, trace_id=f"t {SECRET}")
    await kept(scene, spoilt, WorkFailed("{}", None, f"attempts_spent, {SECRET}"))
    for found in (await show_job(scene.operator, "a"), await job_story(scene.operator, "a")):
        assert SECRET not in str(found)
        assert "attempts_spent" in found["reason"]


async def test_a_page_goes_on_where_the_last_one_ended_unless_that_job_is_gone(scene: OperatorScene) -> None:
    await three(scene)
    seen, after = [], ""
    for _ in range(3):
        page = await list_jobs(scene.operator, JobQuery(limit=1, after=after))
        seen += [one["id"] for one in page["jobs"]]
        after = page["next"]
    assert seen == ["waits", "notes/1", "paid"]
    with pytest.raises(OperationError, match="no job 'gone' any more") as gone:
        await list_jobs(scene.operator, JobQuery(after="gone"))
    assert gone.value.kind == "not_found"
    assert (gone.value.advice, gone.value.parameter) == ("start again without", "after")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"state": "pendng"}, "state"),
        ({"sort": "sideways"}, "sort"),
        ({"since": "yesterday"}, "since"),
        ({"before": "-1h"}, "before"),
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"tenant": " "}, "tenant"),
        ({"error": ""}, "error"),
        ({"connector": "imap_mailbox", "type": "http.request"}, "connector"),
    ],
)
def test_a_filter_with_bad_syntax_is_refused_by_its_name_with_what_is_accepted(
    fields: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        JobQuery(**fields)
    assert refused.value.parameter == parameter
    assert refused.value.accepted


async def test_a_cancel_is_audited_and_refused_for_what_has_ended(scene: OperatorScene) -> None:
    await three(scene)
    dry = await cancel_job(scene.operator, "waits", dry_run=True)
    assert (dry["was"], dry["state"], dry["cancelled"]) == ("pending", "pending", False)
    done = await cancel_job(scene.operator, "waits", because="withdrawn")
    assert (done["was"], done["state"], done["actor"]) == ("pending", "cancelled", "ann")
    for job, tenant, kind in (
        ("waits", None, "conflict"),
        ("paid", None, "conflict"),
        ("paid", "acme", "conflict"),
        ("paid", "bolt", "not_found"),
        ("none", None, "not_found"),
    ):
        with pytest.raises(OperationError) as refused:
            await cancel_job(scene.operator, job, tenant=tenant)
        assert refused.value.kind == kind
    assert names_of(await scene.actions()) == [("job.cancel", "waits", "ann")]


async def test_a_retry_tells_its_count_before_the_first_change_and_why_named_jobs_are_left(
    scene: OperatorScene,
) -> None:
    await three(scene)
    heard: list[Any] = []
    listener = BulkListener(heard.append, heard.append, lambda records: heard.append(list(records)))
    query = RetryQuery(state="failed", reason="spent")
    dry = await retry_jobs(scene.operator, query, dry_run=True)
    assert (dry["retried"], dry["tenant_ids"], dry["count"], dry["by_type"]) == (
        ["paid"],
        ["acme"],
        1,
        {"http.request": 1},
    )
    assert (await show_job(scene.operator, "paid", "acme"))["state"] == "failed"
    done = await retry_jobs(scene.operator, query, because="fixed", listener=listener)
    assert (done["retried"], done["count"], done["missing"]) == (["paid"], 1, [])
    assert heard == [{"http.request": 1}, ["acme|paid"], 1]
    named = await retry_jobs(scene.operator, RetryQuery(ids=("paid", "waits")))
    assert (named["missing"], named["count"]) == (["paid", "waits"], 0)
    assert "'paid' of tenant 'acme' cannot be retried: it is pending" in named["reasons"][0]
    assert "it is pending; accepted: failed" in named["reasons"][1]
    assert names_of(await scene.actions()) == [("job.retry", "paid", "ann")]


def test_no_selection_never_means_all_jobs() -> None:
    with pytest.raises(OperationError, match="select jobs by ids") as refused:
        RetryQuery()
    assert refused.value.kind == "invalid"
    for fields in ({"all": True, "ids": ("a",)}, {"ids": ("a",), "state": "failed"}, {"tenant": " "}):
        with pytest.raises(ParameterError):
            RetryQuery(**fields)


async def test_a_submission_is_kept_once_audited_and_refused_with_another_content(scene: OperatorScene) -> None:
    first = await submit_job(scene.operator, STEP)
    assert first == {"id": "order-7", "tenant_id": None, "state": "pending", "created": True}
    assert (await submit_job(scene.operator, STEP))["created"] is False
    with pytest.raises(OperationError, match="assignment_id: id 'order-7' was used with another job") as conflict:
        await submit_job(scene.operator, {**STEP, "job": {"type": "fs.blob_get", "payload": {"path": "b.txt"}}})
    assert conflict.value.kind == "conflict"
    unnamed = await submit_job(scene.operator, {"job": STEP["job"], "tenant_id": "acme"})
    assert (unnamed["tenant_id"], unnamed["created"]) == ("acme", True)
    events = [decode(one.entry.body) for one in await scene.world.store.audit.read()]
    assert [one.work_id for one in events if isinstance(one, Submitted)] == ["order-7", unnamed["id"]]


@pytest.mark.parametrize("scene", [SMALL], indirect=True)
async def test_a_submission_that_does_not_fit_says_when_to_come_back(scene: OperatorScene) -> None:
    await submit_job(scene.operator, STEP)
    with pytest.raises(SubmissionRefusedError, match="1 of 1 places taken; try again in") as full:
        await submit_job(scene.operator, {**STEP, "assignment_id": "order-8"})
    assert (full.value.kind, full.value.retry_after_ms > 0) == ("temporary", True)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({}, "job"),
        ({"job": {"type": 7}}, "job.type"),
        ({**STEP, "optoins": {}}, "optoins"),
        ({**STEP, "assignment_id": ""}, "assignment_id"),
    ],
)
async def test_an_assignment_with_a_mistake_is_refused_by_its_field(
    scene: OperatorScene, fields: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        await submit_job(scene.operator, fields)
    assert refused.value.parameter == parameter
