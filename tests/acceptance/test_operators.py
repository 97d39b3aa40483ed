"""What an operator reads: summaries that are true, states that are true, log lines with dates, and exit codes."""

import asyncio
import json
import re
import signal
import subprocess
from collections import Counter
from typing import Any

import apsw
import pytest

import reefknot as rk
from reefknot.queue.model.work import ROUTER
from reefknot.stores.sqlite import SqliteStore
from tests.acceptance.folder import Folder, until

FLAKY = """\
import logging
import reefknot as rk

asked = 0

@rk.block("own.flaky")
async def flaky(inputs, context):
    global asked
    asked += 1
    if asked == 1:
        raise ConnectionError("not now")
    logging.getLogger("own").info("it came\\nthrough")
    return {}
"""
FAILING = """
@rk.block("own.failing")
async def failing(inputs, context):
    raise ConnectionError("never")
"""
FAILS_LATER = """\
import asyncio
import os
import reefknot as rk

@rk.block("own.fails_later")
async def fails_later(inputs, context):
    with open("begun.txt", "a") as file:
        file.write("failing\\n")
    while not os.path.exists("fail"):
        await asyncio.sleep(0.05)
    raise ConnectionError("not now")
"""
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?[+-]\d\d:\d\d"
"""Date, time and zone."""


def wait_for_shutdown(process: subprocess.Popen[str]) -> None:
    """Read stderr until it says that the shutdown has begun."""
    assert process.stderr is not None
    line = ""
    while "shutting down" not in line:
        line = process.stderr.readline()
        assert line, "it ended without a word"


def interrupted(folder: Folder, process: subprocess.Popen[str], name: str) -> None:
    """Ctrl-C while this step runs."""
    until(lambda: name in folder.begun())
    process.send_signal(signal.SIGINT)
    wait_for_shutdown(process)


def test_up_prints_a_retry_once(folder: Folder) -> None:
    folder.write("odd.py", FLAKY)
    folder.submit("own.flaky", "lucky")
    process = folder.start("up", "--module", "odd", "--log-level", "info")
    until(lambda: folder.state("lucky") == "succeeded")
    code, out, err = folder.stop(process)
    assert code == 143
    assert (out + err).count("not now") == 1, out + err
    assert re.search(rf"^{STAMP}  retry  +lucky ", out, re.MULTILINE), out


def test_the_feed_goes_on_during_the_drain_and_the_summary_has_what_ended_in_it(folder: Folder) -> None:
    """One step fails after Ctrl-C, while another one still keeps the system from ending."""
    folder.write("odd.py", FAILS_LATER)
    process = folder.start("up", "--module", "odd", "--module", "naps")
    folder.submit("own.fails_later", "failing")
    folder.wait("slow")
    until(lambda: "failing" in folder.begun())
    interrupted(folder, process, "slow")
    (folder.path / "fail").touch()
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.match(rf"{STAMP}  retry  +failing ", line), line
    assert process.poll() is None, "it is still draining"
    folder.go()
    code, out, _ = folder.ends(process)
    assert code == 130
    assert "failing (" not in out, "it is printed once"
    assert out.splitlines()[-1].endswith(": 1 succeeded, 1 retries, 1 unfinished"), out


@pytest.mark.parametrize("goes_on", [True, False], ids=["finishes", "does not finish"])
def test_an_interrupted_run_says_what_became_of_its_lines(folder: Folder, goes_on: bool) -> None:
    lines = [{"assignment_id": one, "job": {"type": "own.wait", "payload": {"name": one}}} for one in ("slow", "next")]
    folder.write_lines("work.jsonl", *lines)
    process = folder.start("run", "work.jsonl", "--module", "naps", "--in-flight", "1", "--results", "out.jsonl")
    interrupted(folder, process, "slow")
    if goes_on:
        folder.go()
    code, out, err = folder.ends(process)
    assert code == 130
    assert "nothing to do" not in out
    assert re.match(rf"1 assignment in .* s: 1 {'succeeded' if goes_on else 'unfinished'}; 0 retries$", out), out
    assert ("1 was submitted and has not finished" in err) is not goes_on
    assert "1 line not submitted" in err
    assert len((folder.path / "out.jsonl").read_text().splitlines()) == goes_on


def test_the_summary_of_a_worker_counts_what_finished_during_the_drain(folder: Folder) -> None:
    folder.part("router")
    worker = folder.part("worker", "--module", "naps")
    folder.wait("slow")
    interrupted(folder, worker, "slow")
    folder.go()
    code, out, _ = folder.ends(worker)
    assert code == 130
    assert out.splitlines()[-1].endswith(": 1 succeeded"), out


def shown_states(folder: Folder, name: str) -> set[str]:
    """The state of the only job wherever it is shown: list, show, filter, totals, router; as text and as JSON."""
    listed = folder.json("job", "list")
    (of_list,) = [one["state"] for one in listed["jobs"] if one["id"] == name]
    (of_totals,) = [state for state, number in listed["states"].items() if number]
    found = {of_list, of_totals, folder.state(name), *folder.json("router", "status")["handed_in"]}
    for state in ("pending", "running"):
        found |= {state for one in folder.json("job", "list", "--state", state)["jobs"] if one["id"] == name}
    (in_table,) = re.findall(rf"^{name} +own\.\w+ +(\w+)", folder("job", "list").out, re.MULTILINE)
    found.add(in_table)
    return found | set(re.findall(r"^state +(\w+)", folder("job", "show", name).out, re.MULTILINE))


def test_a_job_that_its_router_holds_and_one_of_a_killed_worker_are_not_running(folder: Folder) -> None:
    """At first no worker is there: the router has claimed the submission, and nothing runs."""
    folder.part("router")
    folder.wait("slow")
    until(lambda: _record(folder.engine, "slow") == ("running", ROUTER))
    assert shown_states(folder, "slow") == {"pending"}
    assert folder("job", "cancel", "slow", "--dry-run").out == "slow (pending) would be cancelled\n"

    worker = folder.part("worker", "--module", "naps")
    until(lambda: "slow" in folder.begun())
    assert shown_states(folder, "slow") == {"running"}
    folder.kill(worker)
    assert shown_states(folder, "slow") == {"pending"}


def _record(engine: str, name: str) -> tuple[str, str]:
    async def read() -> tuple[str, str]:
        async with rk.open_store(engine) as store:
            item = await store.work.get(name)
            assert item is not None
            return item.state.value, item.resource_class

    return asyncio.run(read())


def test_a_paused_worker_is_paused_and_a_drained_one_draining(folder: Folder) -> None:
    folder.up("--log-level", "info")

    def states(word: str) -> bool:
        workers = folder.json("worker", "list")["workers"]
        routers = folder.json("router", "status")["routers"]
        heard = {one["state"] for router in routers for by in router["workers"].values() for one in by.values()}
        return {one["state"] for one in workers} == heard == {word}

    until(lambda: states("running"))
    assert "healthy" in folder("worker", "list").out
    for verb, word in (("pause", "paused"), ("drain", "draining"), ("resume", "running")):
        assert folder("worker", verb, "worker-1").code == 0
        until(lambda word=word: states(word))  # type: ignore[misc]
        shown = folder("worker", "list").out + folder("router", "status").out
        wanted = set() if word == "running" else {word}
        assert {"paused", "draining"} & set(shown.split()) == wanted, shown


def test_work_that_waits_for_a_paused_worker_grows_old_for_every_operator(folder: Folder) -> None:
    """Also after the router has died with it: nobody is at the job, so it waits, and `doctor` says what to do."""
    process = folder.up()
    assert folder("worker", "pause", "worker-1").code == 0
    folder.nap("held", 0)
    until(lambda: folder.json("router", "status")["routers"][0]["waiting"] == 1)

    def ages() -> list[float]:
        view = folder.json("top", "--once")
        assert (view["states"]["pending"], view["states"]["running"]) == (1, 0)
        assert (view["waiting_for_router"], view["classes"]["router"]["queued"]) == (1, 1)
        return [view["oldest_due_s"], folder.json("job", "list")["oldest_due_s"]]

    until(lambda: min(ages()) > 0.3)
    assert "the oldest job has been due for" in folder("top", "--once").out
    (found,) = [one for one in folder.json("doctor")["findings"] if one["check"] == "systems"]
    assert (found["level"], found["way_out"]) == ("warning", "`reefknot worker resume worker-1`")

    folder.kill(process)
    assert min(ages()) > 0.3


LUCKY = {"assignment_id": "lucky", "job": {"type": "own.flaky"}}
LONG = {
    "up": ("up", "--for", "0.5", "--module", "odd"),
    "run": ("run", "work.jsonl", "--module", "odd"),
    "worker start": ("worker", "start", "--for", "0.5", "--module", "odd"),
    "router start": ("router", "start", "--for", "0.5"),
    "submit": ("submit", "work.jsonl", "--wait", "--timeout", "0.1"),
}


@pytest.mark.parametrize("words", LONG.values(), ids=LONG.keys())
def test_every_line_on_stderr_is_json_when_asked_for(folder: Folder, words: tuple[str, ...]) -> None:
    folder.write("odd.py", FLAKY)
    folder.write_lines("work.jsonl", LUCKY)
    _, _, err = folder.ends(folder.start(*words, "--log-format", "json", "--log-level", "debug"))
    lines = [json.loads(line) for line in err.splitlines()]
    assert lines, "it says something"
    for line in lines:
        assert re.fullmatch(STAMP, line["time"])
        assert set(line) >= {"level", "logger", "message"}


def test_every_decision_is_one_line_of_json_with_its_fields_where_stderr_is_no_terminal(folder: Folder) -> None:
    folder.write("odd.py", FLAKY + FAILING)
    lines = [
        one | {"tenant_id": "acme"} for one in (LUCKY, {"assignment_id": "unlucky", "job": {"type": "own.failing"}})
    ]
    folder.write_lines("work.jsonl", *lines)
    words = ("run", "work.jsonl", "--module", "odd", "--log-level", "info", "--log-format", "auto")
    _, _, err = folder.ends(folder.start(*words))
    told = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    decided = [one for one in told if "decision" in one]

    def of(name: str) -> list[tuple[object, ...]]:
        return [(one["level"], one["decision"], one["attempt"]) for one in decided if one["work_id"] == name]

    assert of("lucky") == [("warning", "retry", 1), ("info", "recovered", 2)], err
    retries = [("warning", "retry", number) for number in (1, 2)]
    assert of("unlucky") == [*retries, ("error", "give_up", 3)], err
    assert {one["tenant_id"] for one in decided} == {"acme"}
    assert decided[0].keys() >= {"error_code", "failure_type", "wait_s", "reason", "target", "layer", "trace_id"}
    (end,) = [one for one in decided if one["decision"] == "give_up"]
    assert (end["reason"], end["quarantined"], end["layer"]) == ("attempts_spent", True, "global")


def test_lines_of_ones_own_steps_obey_the_level_and_stay_on_a_line(folder: Folder) -> None:
    """Without a feed the log tells of a retry."""
    folder.write("odd.py", FLAKY)
    folder.write_lines("work.jsonl", {"job": {"type": "own.flaky"}})
    words = ("run", "work.jsonl", "--module", "odd", "--new", "--log-format", "text")
    _, _, info = folder.ends(folder.start(*words, "--log-level", "info"))
    _, _, usual = folder.ends(folder.start(*words))
    assert re.search(rf"^{STAMP} INFO own: it came\\nthrough$", info, re.MULTILINE), info
    assert re.search(rf"^{STAMP} WARNING reefknot: worker-1: own.flaky ", info, re.MULTILINE), info
    assert ("it came" in usual, usual.count("not now")) == (False, 1), usual


def test_audited_events_are_all_logged_when_the_configuration_says_so(folder: Folder) -> None:
    folder.configure("audit: {log: true}\n")
    folder.write("odd.py", FLAKY)
    folder.write_lines("work.jsonl", LUCKY)
    words = ("run", "work.jsonl", "--module", "odd", "--log-level", "error", "--log-format", "text")
    _, _, err = folder.ends(folder.start(*words))
    logged = Counter(re.findall(r'reefknot\.audit: .*?"event_type":"([^"]+)"', err))
    audited = [json.loads(line)["event"] for line in folder("audit", "tail", "--json").out.splitlines()]
    wanted = Counter(one["event_type"] for one in audited)
    at_start = Counter(event_type for event_type in wanted if event_type.endswith("_stored"))
    assert len(wanted - at_start) >= 3
    assert wanted - at_start <= logged <= wanted, (logged, wanted)


FORBIDDEN = [
    line.split()
    for line in (
        *("run secret.jsonl", "submit secret.jsonl", "audit verify secret.jsonl", "audit verify --head secret.jsonl"),
        *("audit export locked/log.jsonl", "store backup locked/copy.db", "run work.jsonl --results locked/out.jsonl"),
        *("job list --engine sqlite:secret.db", "job list --engine sqlite:closed/state.db"),
        *("submit --type a.b --engine sqlite:locked/new.db", "up --for 0 --engine sqlite:locked/new.db"),
    )
]


def test_what_this_user_may_not_do_is_77(folder: Folder) -> None:
    folder.submit("fs.blob_get", "a")
    for name in ("secret.jsonl", "secret.db", "work.jsonl"):
        folder.write(name, "{}\n")
    for name in ("locked", "closed"):
        (folder.path / name).mkdir()
    folder.write("closed/state.db", "")
    for name, mode in (("secret.jsonl", 0), ("secret.db", 0), ("locked", 0o555), ("closed", 0)):
        (folder.path / name).chmod(mode)
    try:
        ended = folder.as_user(*FORBIDDEN)
    finally:
        for name in ("locked", "closed"):
            (folder.path / name).chmod(0o755)
    for words, (code, _, err) in zip(FORBIDDEN, ended, strict=True):
        assert code == 77, (words, err)
        assert "permission denied" in err or "may not be" in err, (words, err)


def test_a_store_that_another_process_keeps_locked_is_75(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.submit("fs.blob_get", "a")
    defaults: dict[str, Any] = SqliteStore.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "patience", 0.2)
    looks = ("job", "list"), ("dashboard", "--for", "0", "--port", "0")
    commands = (("submit", "--type", "a.b"), ("job", "cancel", "a"), *looks)
    other = apsw.Connection(str(folder.store))
    try:
        other.execute("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE").fetchall()
        for words in commands:
            ended = folder(*words)
            assert (ended.code, "locked for too long" in ended.err) == (75, True), (words, ended.err)
    finally:
        other.close()
    assert [folder(*words).code for words in commands] == [0, 0, 0, 0], "the control: nobody locks it any more"


def test_the_old_spelling_of_because_works_and_says_so(folder: Folder) -> None:
    for name, flag, is_told in (("old", "--reason", True), ("new", "--because", False)):
        folder.submit("fs.blob_get", name)
        done = folder("job", "cancel", name, flag, "withdrawn")
        assert (done.code, "--reason is deprecated" in done.err, done.err != "") == (0, is_told, is_told)
        assert folder.job(name)["reason"] == "withdrawn"
