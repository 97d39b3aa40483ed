"""Jobs that failed, timed out or were cancelled, without quarantine: an operator runs them again under their ids."""

from tests.acceptance.folder import CONFIG, Folder, until

STEPS = """\
import asyncio
import os
import reefknot as rk

@rk.block("own.order")
async def order(inputs, context):
    if os.path.exists("repaired"):
        with open("done.txt", "a") as file:
            file.write(context.assignment_id + "\\n")
        return {}
    if inputs.get("slow"):
        await asyncio.sleep(60)
    raise ConnectionError("not now")
"""
ENDS = {"failed-1": "failed", "failed-2": "failed", "late": "failed", "expired": "failed", "withdrawn": "cancelled"}


def prepared(folder: Folder) -> None:
    """Jobs with every end that is no success."""
    folder.write("reefknot.yaml", CONFIG.replace("quarantine_failed: true", "quarantine_failed: false"))
    folder.write("orders.py", STEPS)
    for name in ("failed-1", "failed-2", "withdrawn"):
        folder.submit("own.order", name)
    folder.submit("own.order", "late", "--timeout-ms", "100", slow=True)
    assert folder("job", "cancel", "withdrawn", "--because", "a mistake").code == 0
    assert folder("submit", "--type", "own.order", "--id", "expired", "--deadline", "0.001", "--wait").code == 1
    folder.submit("own.order", "fine", fine=1)
    process = folder.start("up", "--module", "orders")
    until(lambda: folder.states() == {**ENDS, "fine": "failed"})
    assert folder.stop(process)[0] == 143


def test_every_job_that_ended_without_success_runs_again_under_its_id(folder: Folder) -> None:
    prepared(folder)
    said = folder("quarantine", "list").err
    assert "worker.quarantine_failed is off here" in said
    assert "`job retry` runs them again" in said
    assert folder.json("quarantine", "list")["quarantine_failed"] is False

    dry = folder.json("job", "retry", "--all", "--dry-run")
    assert (sorted(dry["retried"]), dry["dry_run"]) == (sorted([*ENDS, "fine"]), True)
    assert folder.state("failed-1") == "failed"
    done = folder.json("job", "retry", "failed-1", "withdrawn", "--because", "repaired", "--as", "ann")
    assert (sorted(done["retried"]), done["missing"], done["actor"]) == (["failed-1", "withdrawn"], [], "ann")
    rest = folder.json("job", "retry", "--type", "own.order", "--because", "all the rest", "--as", "bob")
    assert sorted(rest["retried"]) == ["expired", "failed-2", "fine", "late"]

    (folder.path / "repaired").touch()
    folder.start("up", "--module", "orders")
    expected = {*ENDS, "fine"} - {"expired"}  # which has a millisecond again
    until(lambda: all(folder.state(name) == "succeeded" for name in expected))
    assert sorted((folder.path / "done.txt").read_text().split()) == sorted(expected)
    assert folder.job("expired")["generation"] == 1
    shown = folder.job("withdrawn")
    assert (shown["generation"], shown["result"]["status"]) == (1, "success")
    requeued = [(one["why"], one["who"]) for one in shown["history"] if one["what"] == "requeued"]
    assert requeued == [("repaired", "ann")]
    answered = folder("submit", "--type", "own.order", "--id", "failed-1", "--wait", "--json").json["results"]
    assert [one["status"] for one in answered] == ["success"], "its caller gets the new result"

    deeds = [one for one in folder.events("operator_action") if one["action"] == "job.retry"]
    told = {(one["actor"], one["details"]["reason"]) for one in deeds}
    assert told == {("ann", "repaired"), ("bob", "all the rest")}
    assert sum(one["details"]["count"] for one in deeds) == 6
    again = [one for one in folder.events("requeued") if one["reason"].startswith("retried by")]
    assert {one["work_id"] for one in again} == {*ENDS, "fine"}


def test_a_quarantined_job_that_is_named_is_retried_and_a_filter_leaves_it(folder: Folder) -> None:
    folder.write("orders.py", STEPS)
    assert folder("submit", "--type", "own.order", "--id", "aside").code == 0
    folder.start("up", "--module", "orders")
    until(lambda: folder.state("aside") == "quarantined")
    assert folder("quarantine", "list").err.strip() == "1 shown"
    assert folder.json("job", "retry", "--all")["retried"] == []
    (folder.path / "repaired").touch()
    assert folder.json("job", "retry", "aside")["retried"] == ["aside"]
    until(lambda: folder.state("aside") == "succeeded")
