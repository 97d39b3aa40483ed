"""`reefknot audit` over a store on NATS, in processes of their own; one of the writers is killed after a batch."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any
from uuid import uuid4

import pytest

from reefknot.audit.model.event import OperatorAction, encode, timestamp
from reefknot.audit.port import AuditEntry
from reefknot.console.nats_servers import NatsServer
from reefknot.console.operations.audit import EventQuery, audit_head, replay_events, search_events, verify_events
from reefknot.console.operations.operator import Operator
from reefknot.core.redaction import Redactor
from reefknot.policy.settings import load_settings
from reefknot.runtime.seeds import new_id
from reefknot.stores.opening import open_store
from tests.warm_commands import run_cold, run_warm

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verify_chain.py"
LONG_S = 60.0
MISMATCH = 65

DYING = """
import asyncio, os, signal, sys
from tests.integration.test_jetstream_audit_commands import written

asyncio.run(written(sys.argv[1], int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL)))
"""


async def written(url: str, number: int, then: Callable[[], object] = lambda: None) -> None:
    """A chain of so many events."""
    async with open_store(url, tidy=False) as store:
        for each in range(number):
            at, work_id = 1_700_000_000_000 + each, f"w{each}"
            event = OperatorAction(timestamp=timestamp(at / 1000), actor="me", action="pause", work_id=work_id)
            await store.audit.append([AuditEntry(encode(event), "operator_action", at, work_id=work_id)])
        then()


async def trimmed(url: str, before: int) -> int:
    async with open_store(url, tidy=False) as store:
        return await store.audit.trim(before)


class Shell:
    """Runs processes in a folder, over one store on NATS."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    @property
    def _environ(self) -> dict[str, str]:
        return {**os.environ, "XDG_CONFIG_HOME": str(self.folder), "COLUMNS": "160"}

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return run_cold(sys.executable, *words, cwd=cwd or self.folder, env=self._environ, timeout=LONG_S)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            asyncio.run(written(self.url, number))

    def write_and_die(self, number: int) -> None:
        ended = self.run("-c", DYING, self.url, str(number), cwd=ROOT)
        assert ended.returncode == -SIGKILL, ended.stderr

    def audit(self, *words: str, is_file: bool = False, code: int = 0) -> str:
        words = ("audit", *words, *([] if is_file else ["--engine", self.url]))
        ended = run_warm(*words, cwd=self.folder, env=self._environ, timeout=LONG_S)
        assert ended.returncode == code, ended.stderr + ended.stdout
        return ended.stdout

    def json(self, *words: str, **options: Any) -> Any:
        return json.loads(self.audit(*words, "--json", **options))


@pytest.fixture
def shell(tmp_path: Path, nats_server: NatsServer) -> Shell:
    return Shell(tmp_path, f"{nats_server.url}/{new_id()}")


def test_events_of_a_process_that_was_killed_right_after_them_are_shown_and_verified(shell: Shell) -> None:
    shell.write(2)
    shell.write_and_die(3)
    lines = shell.audit("tail", "--json").splitlines()
    assert len(lines) == 5
    verified = shell.json("verify")
    assert verified["ok"]
    assert [one["sequence"] for one in verified["chains"]] == [2, 3]


def test_a_log_of_several_chains_has_a_head_for_each_and_is_exported_chain_by_chain(shell: Shell) -> None:
    shell.write(2, 1, 3)
    heads = [json.loads(line) for line in shell.audit("head").splitlines()]
    assert [one["sequence"] for one in heads] == [2, 1, 3]
    kept = shell.folder / "kept.heads"
    kept.write_text(shell.audit("head"))
    assert "3 chains" in shell.audit("verify")
    verified = shell.json("verify", "--head", str(kept))
    assert [one["proven_up_to"] for one in verified["chains"]] == [2, 1, 3]

    exported = shell.json("export", "log.jsonl")
    assert (exported["events"], exported["heads"]) == (6, heads)
    lines = [json.loads(line) for line in (shell.folder / "log.jsonl").read_text().splitlines()]
    assert [line["chain"] for line in lines if "chain" in line] == [one["chain"] for one in heads]
    assert [line["seq"] for line in lines if "event" in line] == [1, 2, 1, 1, 2, 3]
    assert [json.loads(line) for line in shell.audit("head", "log.jsonl", is_file=True).splitlines()] == heads
    verified = shell.json("verify", "log.jsonl", is_file=True)
    assert verified["compared_with"] == "log.jsonl.head.json"
    assert [one["proven_up_to"] for one in verified["chains"]] == [2, 1, 3]
    assert shell.json("replay", "log.jsonl", is_file=True)["events"] == 6
    assert shell.json("replay")["events"] == 6
    assert len(shell.audit("tail", "--json", "--work", "w0").splitlines()) == 3


def test_an_export_of_several_chains_that_was_changed_does_not_verify(shell: Shell) -> None:
    """An edit, a lost line at the end of a chain, and a chain that is missing as a whole."""
    shell.write(2, 2)
    shell.audit("export", "log.jsonl")
    log = shell.folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    for changed in (
        [*lines[:4], lines[4].replace("operator_action", "operator_actioN"), lines[5]],
        [*lines[:2], *lines[3:]],
        lines[:3],
        lines[3:],
    ):
        log.write_text("".join(changed))
        assert not shell.json("verify", "log.jsonl", is_file=True, code=MISMATCH)["ok"]
    log.write_text("".join(lines))
    assert shell.json("verify", "log.jsonl", is_file=True)["ok"], "the control"


def test_a_log_of_several_chains_verifies_after_retention_in_the_store_and_in_its_export(shell: Shell) -> None:
    """The process that removed events has written the anchors of all chains into its own."""
    shell.write(3, 3)
    assert asyncio.run(trimmed(shell.url, 1_700_000_000_002)) == 2
    assert shell.json("verify")["ok"]
    exported = shell.json("export", "log.jsonl")
    assert (exported["events"], len(exported["heads"])) == (5, 3)
    log = shell.folder / "log.jsonl"
    assert shell.json("verify", "log.jsonl", is_file=True)["ok"]
    assert shell.run("-I", str(EXAMPLE), "log.jsonl", "log.jsonl.head.json").returncode == 0
    lines = log.read_text().splitlines(keepends=True)
    assert [line.count('"event_type":"anchor"') for line in lines] == [0, 0, 0, 0, 0, 0, 0, 1]
    log.write_text("".join(lines[:-2]))
    found = shell.json("verify", "log.jsonl", is_file=True, code=MISMATCH)
    assert "no anchor event says so" in str(found["mismatches"]), "the control: an export without the anchors"
    assert "no anchor event says why" in shell.run("-I", str(EXAMPLE), "log.jsonl").stdout


def test_a_log_of_one_chain_is_shown_as_everywhere(shell: Shell) -> None:
    shell.write(2)
    (head,) = (json.loads(line) for line in shell.audit("head").splitlines())
    verified = shell.json("verify")
    assert (verified["ok"], verified["chain"], verified["sequence"]) == (True, head["chain"], 2)
    assert shell.json("export", "log.jsonl")["head"] == head
    assert shell.json("verify", "log.jsonl", is_file=True)["proven_up_to"] == 2


def test_an_empty_log_has_a_head_of_nothing(shell: Shell) -> None:
    shell.write(0)
    assert json.loads(shell.audit("head"))["sequence"] == 0
    assert shell.json("verify")["ok"]
    assert shell.json("export", "log.jsonl")["events"] == 0
    assert shell.audit("tail") == ""


def test_of_several_chains_the_newest_events_of_each_are_verified_searched_and_replayed(shell: Shell) -> None:
    """The control is a head that was kept with another hash: only it shows that a chain was written anew."""
    shell.write(9, 4)
    configuration = shell.folder / "reefknot.yaml"
    configuration.write_text("audit: {heads: {path: kept.heads}}\n")
    settings = load_settings(str(configuration), environ={}, cwd=shell.folder)

    async def answers() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        async with open_store(shell.url, tidy=False) as store:
            operator = Operator(store, Redactor(()), "ann", settings, shell.url)
            found = await search_events(operator, EventQuery(type="operator_action", limit=50))
            heads = (await audit_head(operator))["heads"]
            return found, await verify_events(operator, most=6), await replay_events(operator, most=6), heads

    found, verified, again, heads = asyncio.run(answers())
    places = [one["sequence"] for one in found["events"]]
    assert (len(places), places) == (13, sorted(places, reverse=True))
    assert (verified["ok"], [one["sequence"] for one in verified["chains"]]) == (True, [9, 4])
    assert verified["covered"] == {"events": 6, "first": None, "last": places[0], "whole": False}
    assert (again["ok"], again["events"], again["covered"]["first"]) == (True, 6, places[5])

    (shell.folder / "kept.heads").write_text("".join(json.dumps(one) + "\n" for one in heads))
    assert [one["proven_up_to"] for one in asyncio.run(answers())[1]["chains"]] == [9, 4]
    (shell.folder / "kept.heads").write_text(json.dumps(heads[0] | {"hash": "0" * 64}) + "\n")
    assert [one["mismatches_total"] for one in asyncio.run(answers())[1]["chains"]] == [1, 0]


STEPS = """
import reefknot as rk

@rk.block("own.empty")
async def empty(inputs, context):
    return {}
"""


def test_every_event_of_an_assignment_is_found_by_its_tenant_its_correlation_and_its_trace(shell: Shell) -> None:
    """In the store, and in an export that does not repeat the ids of a submission."""
    ids = [{name: str(uuid4()) for name in ("assignment_id", "request_id", "tenant_id", "trace")} for _ in range(3)]
    work = [
        {name: text for name, text in one.items() if name != "trace"}
        | {"correlation": {"trace_id": one["trace"]}, "job": {"type": "own.empty"}}
        for one in ids
    ]
    (shell.folder / "steps.py").write_text(STEPS)
    (shell.folder / "work.jsonl").write_text("".join(json.dumps(one) + "\n" for one in work))
    words = ("run", "work.jsonl", "--module", "steps.py", "--in-flight", "1", "--engine", shell.url)
    ended = shell.run("-m", "reefknot", *words)
    assert ended.returncode == 0, ended.stderr
    shell.audit("export", "log.jsonl")
    exported = (shell.folder / "log.jsonl").read_text()
    assert '"filed"' not in exported
    for flag, name in (("--tenant", "tenant_id"), ("--correlation", "request_id"), ("--trace", "trace")):
        assert len(shell.audit("tail", "--json", flag, ids[1][name]).splitlines()) == 4, flag
        assert shell.json("analyse", "log.jsonl", flag, ids[1][name], is_file=True)["events"] == 4, flag
    bodies = [json.loads(line)["event"] for line in exported.splitlines()[1:]]
    own = [event for event in bodies if event.get("work_id") == ids[0]["assignment_id"]]
    assert sum(len(json.dumps(event, separators=(",", ":"))) for event in own) <= 1000
    assert shell.json("verify")["ok"]
    assert shell.json("verify", "log.jsonl", is_file=True)["ok"]
    assert shell.json("replay", "log.jsonl", is_file=True)["differences"] == shell.json("replay")["differences"] == []
    assert shell.run(str(EXAMPLE), "log.jsonl", "log.jsonl.head.json").returncode == 0
