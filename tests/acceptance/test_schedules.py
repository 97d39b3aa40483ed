"""Schedules as a user meets them: written in the configuration, followed by `up`, looked at and changed by commands."""

import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.acceptance.folder import Folder, until

TICK = """
schedules:
  tick:
    every: 1s
    assignment: {job: {type: own.nap, payload: {name: tick, seconds: 0}}}
"""
NIGHTLY = """
schedules:
  nightly:
    cron: "0 3 * * *"
    time_zone: Europe/Berlin
    assignment: {job: {type: own.nap, payload: {name: nightly, seconds: 0}}, tenant_id: acme}
  by-hand:
    assignment: {job: {type: own.nap, payload: {name: by-hand, seconds: 0}}}
sources:
  notes: {connector: local_files, path: notes, every: 15m}
"""


def schedule(folder: Folder, name: str) -> dict[str, Any]:
    (found,) = [one for one in folder.json("schedule", "list")["schedules"] if one["name"] == name]
    return dict(found)


def ran_once_each(folder: Folder) -> bool:
    """Whether all jobs have succeeded, with one execution each; one that was submitted just now has not yet."""
    states = folder.states()
    return set(states.values()) == {"succeeded"} and folder.begun().count("tick") == len(states)


def test_what_was_missed_while_no_system_ran_is_shown_and_run_by_one_command(folder: Folder) -> None:
    folder.configure(TICK)
    process = folder.up()
    until(lambda: "succeeded" in folder.states().values())
    folder.kill(process)
    last = datetime.fromisoformat(schedule(folder, "tick")["last_due"])
    until(lambda: datetime.now(UTC) - last > timedelta(seconds=3))
    folder.up()
    until(lambda: schedule(folder, "tick")["missed_count"] >= 2)
    folder("schedule", "pause", "tick", "--because", "a test")

    missed = [one["due"] for one in folder.json("schedule", "show", "tick")["runs"] if one["job"] is None]
    assert len(missed) >= 2
    assert "missed: no system was running" in folder("schedule", "show", "tick").out
    would = folder("schedule", "run", "tick", "--missed", "--dry-run")
    assert would.out.count(" would be submitted\n") == len(missed)
    done = folder("schedule", "run", "tick", "--missed")
    assert sorted(done.out.splitlines()) == sorted(f"tick@{due}" for due in missed)
    until(lambda: all(folder.states()[f"tick@{due}"] == "succeeded" for due in missed))
    assert folder("schedule", "run", "tick", "--missed").out == "tick has missed no due time\n"
    assert folder.events("operator_action")[-1]["details"] == {"missed": len(missed)}


def test_two_systems_over_one_store_run_each_due_time_once_and_a_pause_holds_for_both(folder: Folder) -> None:
    folder.configure(TICK)
    systems = [folder.up(), folder.up()]
    until(lambda: list(folder.states().values()).count("succeeded") >= 4)
    done = folder("schedule", "pause", "tick", "--because", "the stock is counted", "--as", "ann")
    assert (done.code, done.out) == (0, "tick paused\n")
    found = schedule(folder, "tick")
    assert (found["paused_by"], found["why"], found["next_due"]) == ("ann", "the stock is counted", None)
    assert "paused by ann: the stock is counted" in folder("schedule", "list").out
    until(lambda: ran_once_each(folder))
    names = sorted(folder.states())
    assert all(name.startswith("tick@20") and name.endswith("Z") for name in names)

    assert folder("schedule", "resume", "tick").out.startswith("tick resumed; next due: 20")
    until(lambda: len(folder.states()) > len(names))
    for process in systems:
        process.send_signal(signal.SIGTERM)
    for process in systems:
        assert folder.ends(process)[0] == 143
    assert folder.begun().count("tick") == list(folder.states().values()).count("succeeded")
    assert folder("audit", "verify").code == 0


def test_operators_run_pause_and_resume_and_all_of_it_is_audited(folder: Folder) -> None:
    folder.configure(NIGHTLY)
    folder.nap("first", 0)  # the store is made by a submission
    for name in ("nightly", "by-hand"):
        done = folder("schedule", "run", name, "--as", "ann")
        assert done.code == 0
        assert done.out.startswith(f"{name}@20")
        found = schedule(folder, name)
        assert (f"{name}@{found['last_due']}\n", found["last_outcome"]) == (done.out, "pending")
    folder("schedule", "pause", "nightly", "--because", "a reason", "--as", "ann")
    assert folder("schedule", "pause", "nightly", "--because", "again").out == "nightly is paused already\n"
    assert folder("schedule", "resume", "nightly", "--dry-run").out == "nightly would be resumed\n"
    folder("schedule", "resume", "nightly", "--as", "bob")
    assert folder("schedule", "resume", "nightly").out == "nightly is not paused\n"

    told = [f"{one['action']} {one['subject']} by {one['actor']}" for one in folder.events("operator_action")]
    ran = ["schedule.run nightly by ann", "schedule.run by-hand by ann"]
    assert told == [*ran, "schedule.pause nightly by ann", "schedule.resume nightly by bob"]
    assert folder.events("operator_action")[2]["details"] == {"reason": "a reason"}


def test_what_cannot_be_is_refused_with_what_can(folder: Folder) -> None:
    folder.configure(NIGHTLY)
    folder.nap("first", 0)
    for words, message in (
        (("run", "nigtly"), "'nigtly' is unknown; accepted: nightly, by-hand; did you mean 'nightly'?"),
        (("run", "notes"), "notes is a source; run it with: reefknot source run notes"),
        (("pause", "nightly", "--because", " "), "--because: give the reason"),
        (("pause", "nightly"), "--because"),
        (("resume", "x"), "'x' is unknown; accepted: nightly, by-hand"),
        (("pause", "notes", "--because", "x"), "notes is a source; pause it with: reefknot source pause notes"),
        (("resume", "notes"), "notes is a source; resume it with: reefknot source resume notes"),
    ):
        done = folder("schedule", *words)
        assert (done.code, message in done.err) == (2, True), (words, done.err)
    assert folder.events("operator_action") == []


def test_a_source_is_listed_as_it_is_with_the_outcome_of_its_last_sync(folder: Folder) -> None:
    folder.configure(NIGHTLY)
    folder.nap("first", 0)
    assert schedule(folder, "notes")["last_outcome"] is None
    assert folder("source", "run", "notes").code == 1
    assert schedule(folder, "notes")["last_outcome"] == "quarantined"
    (folder.path / "notes").mkdir()
    assert folder("source", "run", "notes").code == 0
    assert schedule(folder, "notes")["last_outcome"] == "succeeded"
    assert folder("source", "pause", "notes", "--because", "it moves", "--as", "ann").code == 0
    found = schedule(folder, "notes")
    assert (found["paused"], found["next_due"]) == (True, None)
    assert "paused by ann: it moves" in folder("schedule", "list").out
    assert folder("source", "resume", "notes").code == 0
    assert schedule(folder, "notes")["next_due"] is not None


def test_without_a_schedule_the_list_says_where_to_write_one(folder: Folder) -> None:
    folder.nap("first", 0)
    done = folder("schedule", "list")
    assert (done.code, done.err) == (0, "no schedule is configured; add one under `schedules:` in reefknot.yaml\n")


def test_before_anything_has_run_schedules_are_listed_and_a_list_makes_no_store(folder: Folder) -> None:
    folder.configure(NIGHTLY)
    listed = folder.json("schedule", "list")["schedules"]
    assert [(one["name"], one["kind"], one["timetable"]) for one in listed] == [
        ("nightly", "schedule", "0 3 * * * (At 03:00 every day, Europe/Berlin)"),
        ("by-hand", "schedule", "by hand"),
        ("notes", "source", "every 15m"),
    ]
    assert listed[0]["next_due"].endswith(("T01:00:00Z", "T02:00:00Z"))
    assert listed[1]["next_due"] is None
    assert {(one["last_due"], one["last_outcome"], one["paused"]) for one in listed} == {(None, None, False)}
    assert folder("schedule", "resume", "nightly").out == "nightly is not paused\n"
    assert folder("schedule", "pause", "nightly", "--because", "x", "--dry-run").out == "nightly would be paused\n"
    assert folder("schedule", "run", "nightly", "--dry-run").out == "nightly would be submitted\n"
    assert not folder.has_store


@pytest.mark.parametrize("first", ["pause", "run"])
def test_a_schedule_can_be_paused_and_run_before_the_first_start_of_a_system(folder: Folder, first: str) -> None:
    folder.configure(TICK)
    actions_in_order = {"pause": ("pause", "tick", "--because", "not yet"), "run": ("run", "tick")}
    is_new = not folder.has_store
    done = folder("schedule", *actions_in_order.pop(first))
    assert done.code == 0
    assert (done.err == "there was no store at .reefknot/state.db: a new one was made\n") == is_new
    ((_, words),) = actions_in_order.items()
    again = folder("schedule", *words)
    assert (again.code, again.err) == (0, "")

    process = folder.up()
    until(lambda: set(folder.states().values()) == {"succeeded"})
    assert schedule(folder, "tick")["paused"] is True
    assert folder.stop(process)[0] == 143
    assert folder.begun() == ["tick"], "what was run by hand, and no due time of the pause"


def test_no_command_makes_a_store_that_a_flag_names(folder: Folder) -> None:
    """A pause of a slip's making would hold for nobody."""
    folder.configure(TICK)
    for words in (("list",), ("run", "tick"), ("pause", "tick", "--because", "x"), ("resume", "tick")):
        done = folder("schedule", *words, "--engine", "sqlite:slip.db")
        assert (done.code, done.out) == (69, ""), words
        assert "there is no store at " in done.err
    assert not (folder.path / "slip.db").exists()


def test_a_run_of_a_file_follows_no_schedule(folder: Folder) -> None:
    folder.configure(TICK)
    folder.write("one.jsonl", '{"job": {"type": "own.nap", "payload": {"seconds": 1.2, "name": "one"}}}')
    assert folder.ends(folder.start("run", "one.jsonl", "--module", "naps"))[0] == 0
    assert folder.begun() == ["one"]
