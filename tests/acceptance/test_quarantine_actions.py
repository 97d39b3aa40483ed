"""The quarantine as an operator works with it: groups of one cause, edited payloads, jobs of sources."""

import json

import reefknot as rk
from tests.acceptance.folder import Folder, until

CONFIG = """
sources:
  sea: {connector: own_sea, every: 1h}
"""
MODULE = """\
import asyncio
import os
import reefknot as rk
from reefknot.core.failure import FailureType

@rk.connector("own_sea")
class Sea:
    def __init__(self, context):
        pass

    async def fetch(self, request):
        while os.path.exists("slow"):
            await asyncio.sleep(0.05)
        failures = tuple(rk.ItemFailure(f"{name}|x.md", "1", ValueError(name)) for name in ("a", "b", "c"))
        return rk.Page("1", (rk.Document("ok", "ok.md", "1", text="ahoy"),), failures=failures)

    async def fetch_item(self, location, known):
        if os.path.exists("mended"):
            return rk.Document(location, location, "1", text="mended")
        raise rk.SourceError(f"cannot parse '{location}' at line 17", FailureType.PERMANENT)

@rk.block("own.order")
async def order(inputs, context):
    if inputs.get("city") != "Rome":
        raise ValueError(f"no such city '{inputs.get('city')}'")
    return {"city": inputs["city"]}
"""


def prepared(folder: Folder) -> None:
    folder.configure(CONFIG)
    folder.write("sea.py", MODULE)


def test_failures_of_one_cause_are_one_group_and_an_edited_payload_is_a_new_version(folder: Folder) -> None:
    prepared(folder)
    folder.up("--module", "sea")
    folder.submit("own.order", "order", city="Roma")
    until(lambda: folder.json("quarantine", "stats")["total"] == 4)

    largest, other = folder.json("quarantine", "stats", "--group")["groups"]
    assert (largest["count"], largest["sources"], largest["failure_type"]) == (3, ["sea"], "permanent")
    assert (other["count"], other["message"]) == (1, "ValueError: no such city 'Roma'")
    listed = folder.json("quarantine", "list", "--fingerprint", largest["fingerprint"])["items"]
    names = sorted(one["id"] for one in listed)
    assert [name.partition("@")[0] for name in names] == [f"sea/{name}|x.md" for name in ("a", "b", "c")]
    assert listed == folder.json("quarantine", "list", "--source", "sea")["items"]
    kept = folder.json("quarantine", "show", names[0])
    assert (kept["ingestion_job"]["item"], kept["class"], kept["result"]) == ("a|x.md", "ingest.sea", None)

    assert folder("quarantine", "discard", names[2]).code == 2
    assert folder("quarantine", "discard", names[2], "--because", "not wanted", "--as", "ann").code == 0
    (folder.path / "mended").touch()
    of_group = ("quarantine", "requeue", "--fingerprint", largest["fingerprint"])
    assert sorted(folder.json(*of_group, "--dry-run")["requeued"]) == names[:2]
    again = folder.json(*of_group, "--because", "the parser was mended", "--as", "ann")
    assert sorted(again["requeued"]) == names[:2]
    until(lambda: all(folder.states()[name] == "succeeded" for name in names[:2]))
    assert folder.states()[names[2]] == "discarded"

    original = folder("quarantine", "show", "order", "--payload-only").out
    folder.write("order.json", original.replace("Roma", "Rome"))
    edit = ("quarantine", "requeue", "order", "--payload", "order.json")
    assert '-  "city": "Roma"\n+  "city": "Rome"' in folder(*edit, "--dry-run").out
    for _ in range(2):  # the second time as after a command that was cut off
        assert folder.json(*edit, "--because", "a typo", "--as", "ann")["requeued"] == ["order~2"]
    until(lambda: folder.states()["order~2"] == "succeeded")
    shown = folder.job("order")
    assert (shown["state"], shown["history"][-1]["why"]) == ("discarded", "replaced by order~2")
    assert shown["assignment"]["job"]["payload"] == json.loads(original)
    assert folder.json("job", "show", "order~2")["history"][0]["why"] == "order: a typo"
    with rk.connect_sync(folder.engine) as client:  # as a web application that knows the order's id alone
        latest = client.job("order").latest()
        assert (latest.assignment_id, latest.result().output) == ("order~2", {"city": "Rome"})
        assert latest.latest().assignment_id == "order~2"
        assert client.job("nothing").latest().status() == "unknown"

    assert folder.json("quarantine", "purge", "--before", "30d", "--because", "old")["count"] == 0
    assert [(one["action"], one["actor"], one["details"]["reason"]) for one in folder.events("operator_action")] == [
        ("quarantine.discard", "ann", "not wanted"),
        ("quarantine.requeue", "ann", "the parser was mended"),
        ("quarantine.requeue", "ann", "a typo"),
    ]
    assert folder("audit", "verify").code == 0
    assert folder("doctor").code == 0


def test_a_running_job_of_a_source_is_cancelled_and_run_again_by_hand(folder: Folder) -> None:
    prepared(folder)
    (folder.path / "slow").touch()
    folder.up("--module", "sea")
    until(lambda: folder.states().get("sea@first") == "running")
    assert "sea@first" in folder("top").out or "1 running" in folder("top").out

    done = folder.json("job", "cancel", "sea@first", "--because", "too slow", "--as", "ann")
    assert (done["was"], done["state"]) == ("running", "cancelled")
    shown = folder.json("job", "show", "sea@first")
    assert (shown["reason"], shown["history"][-1]["who"]) == ("too slow", "ann")
    assert folder.events("operator_action")[-1]["details"] == {"reason": "too slow"}

    (folder.path / "slow").unlink()
    (folder.path / "mended").touch()
    assert folder.json("job", "retry", "sea@first", "--because", "faster now")["retried"] == ["sea@first"]
    until(lambda: folder.states()["sea@first"] == "succeeded")
    assert folder("audit", "verify").code == 0


def test_jobs_of_a_source_that_no_system_has_are_said_to_wait_and_others_are_not(folder: Folder) -> None:
    bare = folder.config.read_text()
    prepared(folder)
    system = folder.up("--module", "sea")
    until(lambda: folder.json("quarantine", "stats")["total"] == 3)
    first, second, third = [one["id"] for one in folder.json("quarantine", "list")["items"]]

    folder.config.write_text(bare)  # but the system that runs has the source still
    requeue = ("quarantine", "requeue", first, "--json")
    until(lambda: folder(*requeue, "--dry-run").json["unconfigured_sources"] == [])  # it reports every second
    done = folder(*requeue)
    assert (done.json["unconfigured_sources"], "picks it up within seconds" in done.err) == ([], True)
    until(lambda: folder.states()[first] == "quarantined" and folder.job(first)["generation"] == 1)

    folder.stop(system)
    folder.up()
    done = folder("quarantine", "requeue", "--source", "sea", "--because", "again")
    assert (done.code, "within seconds" in done.err) == (0, False)
    assert "3 jobs wait for sea (not configured here, and in no running system)" in done.err
    assert {folder.states()[name] for name in (first, second, third)} == {"pending"}
