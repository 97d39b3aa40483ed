"""`reefknot submit`."""

import json
import time
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from reefknot.console.cli import submit
from reefknot.errors import StoreFullError
from reefknot.queue.client import Client
from reefknot.queue.model.messages import ExecAssignment
from tests.unit.console.cli import work_items
from tests.unit.console.cli.running import Commands
from tests.unit.console.cli.steps import Folder, get, lines, prepared, up_until_ended

pytestmark = pytest.mark.usefixtures("own")


def test_submissions_are_kept_before_a_system_runs_and_work_for_later_until_due(rk: Commands, own: Folder) -> None:
    step = ("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--id")
    ended = rk(*step, "x")
    assert (ended.code, ended.out) == (0, "x\n")
    assert rk(*step, "later", "--in", "1s").code == 0
    assert up_until_ended(rk, "x", "later", module=own.module).code == 0
    assert rk("job", "show", "x", "--json").json["result"]["output"]["content"] == "ahoy"
    shown = rk("job", "show", "later", "--json").json
    assert shown["state"] == "succeeded"
    assert shown["updated_at"] >= shown["history"][0]["at"], "the history has its due time"


def test_a_header_that_no_request_can_carry_is_refused_and_nothing_is_kept(rk: Commands) -> None:
    """By the flags and by a line of a file; a parameter that can be encoded is accepted."""
    for value, code in (("José", 2), ("a; filename=José", 0)):
        inputs = {"url": "https://example.org/", "headers": {"X-Name": value}}
        ended = rk("submit", "--type", "http", "--inputs", json.dumps(inputs), "--id", f"flags-{code}")
        assert ended.code == code, ended.err
        if code:
            assert "headers.X-Name" in ended.err
            assert "accepted: ASCII text" in ended.err
    line = {"assignment_id": "line", "job": {"type": "http.request", "payload": {**inputs, "headers": {"A": "é"}}}}
    ended = rk("submit", lines(rk, json.dumps(line)), "--json")
    assert ended.code == 1
    assert "job.payload.headers.A" in ended.err
    assert [one["id"] for one in rk("job", "list", "--json").json["jobs"]] == ["flags-0"]


def test_a_queue_that_stays_full_is_reported_with_75(rk: Commands) -> None:
    prepared(rk, size=1)
    rk.environment.setattr(submit, "GIVE_UP_S", 0.0)
    ended = rk("submit", lines(rk, get("a.txt", "one"), get("a.txt", "two")))
    assert (ended.code, "queue is full: 1 of 1" in ended.err) == (75, True)
    assert work_items.item(rk.folder / ".reefknot" / "state.db", "two") is None
    assert ended.out == "one\n", "the ids of what was accepted"


@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [
        (StoreFullError("a.db", "the disk is full", "make room"), 69, "the disk is full; make room"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["full", "interrupted"],
)
def test_a_file_that_breaks_off_names_the_accepted_ids(rk: Commands, failure: Any, code: int, told: str) -> None:
    hand_in = Client.hand_in

    async def until_two(self: Client, assignment: ExecAssignment, **more: Any) -> Any:
        if assignment.assignment_id == "two":
            raise failure
        return await hand_in(self, assignment, **more)

    rk.environment.setattr(Client, "hand_in", until_two)
    file = lines(rk, get("a.txt", "one"), get("a.txt", "two"), get("a.txt", "three"))
    plain, as_json = rk("submit", file), rk("submit", file, "--json", "--engine", "sqlite:other.db")
    for ended in (plain, as_json):
        assert (ended.code, told in ended.err) == (code, True), ended.err
    assert (plain.out, as_json.json["handed_in"]) == ("one\n", ["one"])
    assert rk("submit", lines(rk, get("a.txt", "two")), "--json")[:2] == (code, ""), "nothing was accepted"


def test_a_file_whose_name_looks_like_an_option_is_named_with_its_folder(rk: Commands) -> None:
    lines(rk, get("a.txt", "one"), name="--typ")
    assert rk("submit", "./--typ", "--json").json["handed_in"] == ["one"]


def test_a_bad_line_and_an_id_of_another_job_are_mistakes_and_the_rest_is_submitted(rk: Commands) -> None:
    ended = rk("submit", lines(rk, get("a.txt", "one"), "not json", get("a.txt", "two")), "--json")
    assert (ended.code, ended.json["handed_in"], ended.json["mistakes"]) == (1, ["one", "two"], 1)
    assert "work.jsonl:2: not JSON" in ended.err
    ended = rk("submit", lines(rk, get("b.txt", "one"), get("a.txt", "three")), "--json")
    assert (ended.code, ended.json["handed_in"], ended.json["mistakes"]) == (1, ["three"], 1)
    assert "work.jsonl:1: assignment_id: id 'one' was used with another job (fingerprint " in ended.err
    alone = rk("submit", "--type", "fs.blob_get", "--id", "one", "--inputs", '{"path": "c"}')
    assert (alone.code, "reefknot: id 'one' was used with another job" in alone.err) == (1, True)
    assert "key" not in ended.err + alone.err


def test_work_for_later_is_listed_as_scheduled_with_its_due_time(rk: Commands) -> None:
    for name in ("x", "given-up"):
        ended = rk("submit", "--type", "fs.blob_get", "--id", name, "--in", "10m")
        assert (ended.code, ended.out, ", due at 20" in ended.err) == (0, f"{name}\n", True)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    assert rk("submit", lines(rk, get("a.txt", "y")), "--at", tomorrow.isoformat()).code == 0
    jobs = {one["id"]: one for one in rk("job", "list", "--json").json["jobs"]}
    assert (jobs["x"]["state"], jobs["x"]["reason"]) == ("pending", "scheduled")
    assert 590 < jobs["x"]["due_in_s"] <= 600
    assert jobs["y"]["due_at"] == f"{tomorrow:%Y-%m-%dT%H:%M:%S}.000Z"
    listed = rk("job", "list").out
    assert ("scheduled" in listed, "in 10 min" in listed or "in 9" in listed) == (True, True)
    assert rk("job", "cancel", "given-up").code == 0
    assert [one["what"] for one in rk("job", "show", "given-up", "--json").json["history"]] == ["cancelled"]
    due = [name for name in ("x", "y", "given-up") if "due: scheduled" in rk("job", "show", name).out]
    assert due == ["x", "y"], "one that was cancelled before its time does not list it"


def test_a_wait_that_ends_before_the_work_is_due_says_so_at_once(rk: Commands) -> None:
    step = ("submit", "--type", "fs.blob_get", "--wait", "--timeout", "0.1")
    late = rk(*step, "--id", "x", "--in", "1h")
    assert late.code == 75
    assert "1 of 1 due later than --wait lasts (0.1 s), the first in 3" in late.err
    assert "due later than --wait lasts" in rk(*step, "--id", "x").err, "the job that is there is due later"
    assert "due later" not in rk(*step, "--id", "y").err


def test_a_local_time_that_the_clock_change_skips_is_not_taken_earlier(rk: Commands) -> None:
    """02:30 does not exist on that day in New York: the clock goes from 02:00 EST to 03:00 EDT."""
    year = datetime.now(UTC).year + 1
    sunday = next(day for day in (date(year, 3, n) for n in range(8, 15)) if day.weekday() == 6)
    with rk.environment.context() as inside:
        inside.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
        time.tzset()
        for name, at in (("before", "01:30"), ("gap", "02:30"), ("after", "03:30")):
            assert rk("submit", "--type", "fs.blob_get", "--id", name, "--at", f"{sunday}T{at}").code == 0
    time.tzset()
    due = {one["id"]: one["due_at"][11:16] for one in rk("job", "list", "--json").json["jobs"]}
    assert due == {"before": "06:30", "gap": "07:30", "after": "07:30"}


def test_an_id_that_is_scheduled_already_keeps_its_due_time_and_that_is_said(rk: Commands) -> None:
    step = ("submit", "--type", "fs.blob_get", "--id", "x")
    first = rk(*step, "--in", "2h", "--json").json
    assert (first["handed_in"], first["existing"]) == (["x"], [])
    again = rk(*step, "--in", "10m")
    assert (again.code, again.out) == (0, "x\n")
    assert "'x' was there already and is pending: it stays due at 20" in again.err
    assert "0 submitted, 1 there already; list them" in again.err
    (told,) = rk(*step, "--in", "10m", "--json").json["existing"]
    assert (told["id"], told["tenant_id"], told["state"]) == ("x", None, "pending")
    assert told["due_in_s"] > 7000
    assert told["due_at"] == rk("job", "show", "x", "--json").json["due_at"]


def test_an_id_that_has_ended_is_told_with_its_state_and_the_way_to_run_it_again(rk: Commands) -> None:
    file = lines(rk, get("a.txt", "good"), get("gone.txt", "bad"), get("a.txt", "off", tenant_id="acme"))
    rk("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--id", "off", "--tenant", "acme")
    assert rk("job", "cancel", "off", "--tenant", "acme").code == 0
    rk("run", file)
    ended = rk("submit", lines(rk, *map(json.loads, (rk.folder / file).read_text().splitlines()), get("a.txt", "new")))
    assert ended.code == 0
    assert "'good' was there already and is succeeded: to see its result: reefknot job show good" in ended.err
    assert "'bad' was there already and is failed: to run it again: reefknot job retry bad\n" in ended.err
    assert "is cancelled: to run it again: reefknot job retry off --tenant acme\n" in ended.err
    assert "1 submitted, 3 there already" in ended.err
    assert rk("job", "retry", "bad").code == 0
    assert rk("job", "retry", "off", "--tenant", "acme").code == 0


def test_only_the_first_of_many_ids_that_are_there_are_told_one_by_one(rk: Commands) -> None:
    file = lines(rk, *(get("a.txt", f"job-{number}") for number in range(25)))
    assert "25 submitted; list" in rk("submit", file).err
    again = rk("submit", file)
    assert again.err.count("was there already and is pending: it goes on as it was") == 20
    assert "… and 5 more were there already" in again.err
    assert len(rk("submit", file, "--json").json["existing"]) == 25


def test_a_key_of_unique_work_is_one_job_and_bad_ones_are_refused(rk: Commands) -> None:
    step = ("submit", "--type", "fs.blob_get", "--inputs", '{"path": "a.txt"}', "--unique", "report")
    first, again = rk(*step, "--for", "1h"), rk(*step)
    assert (first.code, again.code, again.out) == (0, 0, first.out)
    assert "was there already and is pending" in again.err
    assert "0 submitted, 1 there already" in again.err
    assert rk(*step, "--tenant", "acme").out != first.out
    for flags, told in (
        (("--for", "1h"), "--for: 3600.0 is not accepted: only together with --unique"),
        (("--unique", ""), "--unique: '' is not accepted: printable text of 1 to 256 characters"),
        (("--unique", "a", "--for", "31d"), "--for: 2678400.0 is not accepted: a number of seconds from 0 to 2592000"),
        (("--unique", "a", "--for", "soon"), "--for: 'soon' is not accepted: a duration such as 90s"),
    ):
        refused = rk("submit", "--type", "fs.blob_get", *flags)
        assert (refused.code, told in refused.err) == (2, True), refused.err
    refused = rk("submit", lines(rk, get("a.txt", "one")), "--unique", "a")
    assert (refused.code, "--unique: accepted with --type" in refused.err) == (2, True)
