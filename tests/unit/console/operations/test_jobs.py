"""Operations on jobs: checked filters, counts before a change, refusals by kind, and an event for each change."""

from typing import Any

import pytest

from reefknot.console.operations import bulk, jobs
from reefknot.errors import OperationError, ParameterError
from reefknot.queue.model.work import WorkDone, WorkFailed, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene

SMALL = "router: {max_queue_size: 1}\n"
STEP: dict[str, Any] = {"assignment_id": "order-7", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}


async def kept(scene: OperatorScene, item: WorkItem, settled: WorkDone | WorkFailed | None = None) -> None:
    work = scene.world.store.work
    await work.enqueue([item])
    if settled is not None:
        (held,) = await work.claim(1, WorkClaim(owner="w", only=[item.id]))
        assert await work.settle([Settlement(item.id, "w", held.fence, settled)]) == [True]


async def test_one_job_is_shown_without_secrets_in_any_of_its_fields(scene: OperatorScene) -> None:
    spoilt = WorkItem("a", "local_files", correlation_id=SECRET, trace_id=f"t {SECRET}")
    await kept(scene, spoilt, WorkFailed("{}", None, f"attempts_spent, {SECRET}"))
    for found in (await jobs.show_job(scene.operator, "a"), await jobs.job_story(scene.operator, "a")):
        assert SECRET not in str(found)
        assert "attempts_spent" in found["reason"]


def test_a_filter_with_bad_syntax_is_refused_by_its_name_and_no_selection_never_means_all_jobs() -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("state", {"state": "pendng"}),
        ("sort", {"sort": "sideways"}),
        ("since", {"since": "yesterday"}),
        ("before", {"before": "-1h"}),
        ("limit", {"limit": 0}),
        ("limit", {"limit": 10_001}),
        ("tenant", {"tenant": " "}),
        ("error", {"error": ""}),
        ("connector", {"connector": "imap_mailbox", "type": "http.request"}),
    ]
    for parameter, fields in bad:
        with pytest.raises(ParameterError) as named:
            jobs.JobQuery(**fields)
        assert (named.value.parameter, named.value.accepted != "") == (parameter, True)
    with pytest.raises(OperationError, match="select jobs by ids") as refused:
        jobs.RetryQuery()
    assert refused.value.kind == "invalid"
    for selection in (
        {"all": True, "ids": ("a",)},
        {"ids": ("a",), "state": "failed"},
        {"tenant": " "},
        {"state": "running"},
    ):
        with pytest.raises(ParameterError):
            jobs.RetryQuery(**selection)


async def test_a_retry_has_its_count_before_the_first_change_and_why_named_jobs_are_left(scene: OperatorScene) -> None:
    heard: list[Any] = []
    listener = bulk.BulkListener(heard.append, heard.append, lambda records: heard.append(list(records)))
    await kept(scene, WorkItem("waits", "local_files"))
    failed = WorkItem("acme|paid", "http.request", tenant_id="acme")
    await kept(scene, failed, WorkFailed('{"code": "HTTP_ERROR", "message": "it answered 503"}', None, "spent"))
    query = jobs.RetryQuery(state="failed", reason="spent")
    dry = await jobs.retry_jobs(scene.operator, query, dry_run=True)
    assert (dry["retried"], dry["tenant_ids"], dry["by_type"]) == (["paid"], ["acme"], {"http.request": 1})
    done = await jobs.retry_jobs(scene.operator, query, because="fixed", listener=listener)
    assert (done["retried"], done["count"], done["missing"]) == (["paid"], 1, [])
    assert heard == [{"http.request": 1}, ["acme|paid"], 1]
    named = await jobs.retry_jobs(scene.operator, jobs.RetryQuery(ids=("paid", "waits", "gone")))
    assert (named["missing"], named["count"]) == (["paid", "gone", "waits"], 0)
    assert "'paid' of tenant 'acme' cannot be retried: it is pending" in named["reasons"][0]
    assert "it is pending; accepted: failed, cancelled, quarantined" in named["reasons"][2]
    assert "'gone' cannot be retried: there is no such job; `job list` lists all jobs" in named["reasons"][1]


@pytest.mark.parametrize("scene", [SMALL], indirect=True)
async def test_a_submission_that_does_not_fit_says_when_to_come_back(scene: OperatorScene) -> None:
    await jobs.submit_job(scene.operator, STEP)
    with pytest.raises(jobs.SubmissionRefusedError, match="1 of 1 places taken; try again in") as full:
        await jobs.submit_job(scene.operator, {**STEP, "assignment_id": "order-8"})
    assert (full.value.kind, full.value.retry_after_ms > 0) == ("temporary", True)
