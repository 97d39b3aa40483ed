"""The HTTP API and the command line are two surfaces of the same operations: the same JSON, the same audit."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw
import pytest

from reefknot.console.dashboard import site
from reefknot.console.dashboard.api_types import PREFIX
from reefknot.policy.settings import load_settings
from tests.security.site_client import Answered, ask, bearer, build, opened_site, stored_work
from tests.security.test_dashboard_input import CONFIGURED
from tests.unit.console.cli import work_items
from tests.unit.console.cli.running import Commands

pytestmark = pytest.mark.real_time

V2 = "worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}"
MOVING = ("age_s", "due_in_s", "oldest_due_s", "at", "next_due", "looked_s", "heads_missing", "covered", "text")
"""Fields that tell the moment of the look, or that only one of the surfaces has."""
UNSERVED = 1
"""The exit code of `doctor` here: jobs are due, and no router runs."""


@pytest.fixture
def rk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    commands = Commands(tmp_path, monkeypatch, capsys)
    commands.write(V2 + CONFIGURED)
    stored_work(commands.folder / ".reefknot" / "state.db")
    return commands


def api(rk: Commands, method: str, path: str, body: Any = None) -> Answered:
    store = rk.folder / ".reefknot" / "state.db"
    settings = load_settings(str(rk.folder / "reefknot.yaml"), environ={}, cwd=rk.folder)
    headers = [bearer(), ("Content-Type", "application/json")]

    async def main() -> Answered:
        async with opened_site(store, settings) as site:
            data = b"" if body is None else json.dumps(body).encode()
            return await ask(build(site), method, f"{PREFIX}{path}", headers, data)

    return asyncio.run(main())


def without(value: Any, names: tuple[str, ...] = MOVING) -> Any:
    if isinstance(value, dict):
        return {key: without(one, names) for key, one in value.items() if key not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("words", "path"),
    [
        *(("job list", "/jobs"), ("job show held", "/jobs/held"), ("quarantine show held", "/quarantine/jobs/held")),
        ("job list --state quarantined --sort oldest --limit 1", "/jobs?state=quarantined&sort=oldest&limit=1"),
        *(("quarantine list", "/quarantine"), ("quarantine list --reason crash", "/quarantine?reason=crash")),
        *(("quarantine stats", "/quarantine/stats"), ("telemetry show", "/telemetry"), ("doctor", "/doctor")),
        ("policy list --kind block", "/policies?kind=block"),
        ("policy show block:http", "/policies/show?target=block:http"),
        ("policy explain --target block:http --status 429", "/policies/explain?target=block:http&status=429"),
        ("policy schedule block:http --seed 7", "/policies/waits?target=block:http&seed=7"),
        *(("schedule list", "/schedules"), ("source list", "/sources"), ("source show notes", "/sources/notes")),
        *(("idempotency stats", "/idempotency/stats"), ("audit verify", "/audit/verify"), ("alert list", "/alerts")),
    ],
)
def test_an_answer_is_the_json_of_its_command(rk: Commands, words: str, path: str) -> None:
    printed, answered = rk(*words.split(), "--json"), api(rk, "GET", path)
    code = UNSERVED if words == "doctor" else 0
    assert (printed.code, answered.status) == (code, 200), (printed.err, answered.body)
    if code == UNSERVED:
        assert [one["cause"] for one in answered.json["findings"] if one["level"] == "problem"] == ["unserved"]
    moving = (*MOVING, *(("value",) if words == "alert list" else ()))
    assert without(answered.json, moving) == without(printed.json, moving)


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        ("job cancel waiting --because x", "/jobs/waiting/cancel", {"because": "x"}),
        ("quarantine requeue held --because x", "/quarantine/requeue", {"ids": ["held"], "because": "x"}),
        ("quarantine discard --reason crash --because x", "/quarantine/discard", {"reason": "crash", "because": "x"}),
        ("quarantine purge --all", "/quarantine/purge", {"all": True}),
        ("source pause notes", "/sources/notes/pause", {}),
        ("schedule pause nightly --because x", "/schedules/nightly/pause", {"because": "x"}),
    ],
)
def test_an_action_answers_with_what_its_command_prints(rk: Commands, words: str, path: str, body: Any) -> None:
    printed = rk(*words.split(), "--dry-run", "--json")
    answered = api(rk, "POST", path, body)
    assert (answered.status, printed.code) == (200, 0), (answered.body, printed.err)
    assert set(printed.json) <= set(answered.json)


def test_a_job_is_submitted_once_and_conflicts_are_told(rk: Commands) -> None:
    assignment = {"assignment_id": "a/b", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}

    first, again = (api(rk, "POST", "/jobs", assignment) for _ in range(2))
    other = api(rk, "POST", "/jobs", {**assignment, "job": {"type": "fs.blob_get", "payload": {"path": "b.txt"}}})
    odd = api(rk, "POST", "/jobs", {"job": {"typ": "fs.blob_get"}})

    assert (first.status, first.json["created"]) == (200, True)
    assert (again.status, again.json["created"]) == (200, False)
    assert (other.status, other.json["error"]["kind"]) == (409, "conflict")
    assert (odd.status, odd.json["error"]["parameter"]) == (400, "job.typ")
    assert api(rk, "GET", f"/jobs/{quote('a/b', safe='')}").json["state"] == "pending"


def test_a_key_of_unique_work_answers_with_the_job_that_has_it(rk: Commands) -> None:
    assignment = {"job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
    first, again = (api(rk, "POST", "/jobs?unique=report&for=3600", assignment) for _ in range(2))
    assert (first.json["created"], again.json["created"]) == (True, False)
    assert again.json["id"] == first.json["id"]
    for query, name in (
        ("for=60", "for"),
        ("unique=", "unique"),
        ("unique=a&for=-1", "for"),
        ("unique=a&for=x", "for"),
    ):
        refused = api(rk, "POST", f"/jobs?{query}", assignment)
        assert (refused.status, refused.json["error"]["parameter"]) == (400, name)


def test_a_payload_is_edited_and_the_job_goes_on_as_its_next_version(rk: Commands) -> None:
    shown = api(rk, "GET", "/quarantine/jobs/held/payload")
    answered = api(rk, "POST", "/quarantine/jobs/held/edit", {"payload": {"path": "b.txt"}, "because": "wrong file"})
    assert shown.json["payload"]["path"] == "a.txt"
    assert (answered.status, answered.json["requeued"]) == (200, ["held~2"])
    assert api(rk, "GET", "/jobs/held~2").json["state"] == "pending"


NOT_THERE = (
    *("/jobs/unknown", "/jobs/held?tenant=other", "/quarantine/jobs/waiting", "/sources/unknown"),
    *("/idempotency/keys/unknown", "/jobs/", "//jobs", "/jobs/retry/all"),
)
INVALID = (
    *("/policies/show?target=connector:unknown", "/policies/explain?target=block:http&status=99", "/jobs?limit="),
    *("/jobs?limit=1&limit=2", "/jobs?%ff=1", "/audit?after=x", "/jobs/%ff"),
)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        *(("GET", path, 404, "not_found") for path in NOT_THERE),
        *(("GET", path, 400, "invalid") for path in INVALID),
        *(("POST", "/schedules/unknown/run", 404, "not_found"), ("PATCH", "/openapi.json", 404, "not_found")),
        *(("POST", "/jobs/held/cancel", 409, "conflict"), ("DELETE", "/jobs/held", 405, "wrong_method")),
        *(("POST", f"/workers/{path}", 503, "unreachable") for path in ("drain", "worker-1/pause")),
    ],
)
def test_a_refusal_has_its_status_and_remedy(rk: Commands, method: str, path: str, status: int, kind: str) -> None:
    answered = api(rk, method, path)
    assert (answered.status, answered.json["error"]["kind"]) == (status, kind), answered.body
    assert answered.json["error"]["message"]
    assert ("retry-after" in answered.headers) is (status == 503)
    assert ("allow" in answered.headers) is (status == 405)
    assert "--" not in answered.json["error"]["message"].replace("--engine", "")


async def test_an_action_on_a_locked_file_is_refused_soon(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store itself waits for much longer, and whether a write that nobody waits for was kept is not known."""
    monkeypatch.setattr(site, "LOCKED_S", 0.2)
    file = rk.folder / ".reefknot" / "state.db"
    cancel, headers = f"{PREFIX}/jobs/waiting/cancel", [bearer(), ("Content-Type", "application/json")]
    async with opened_site(file, None) as opened:
        app, holder = build(opened), apsw.Connection(str(file))
        try:
            holder.execute("BEGIN EXCLUSIVE").fetchall()
            refused = await ask(app, "POST", cancel, headers, b"{}")
            read = await ask(app, "GET", f"{PREFIX}/jobs/waiting", headers)
            holder.execute("ROLLBACK").fetchall()
            done = await ask(app, "POST", cancel, headers, b"{}")
        finally:
            holder.close()
    assert (refused.status, read.status, done.status) == (503, 200, 200)
    assert refused.headers["retry-after"] == "5"
    assert "another process kept it locked for too long" in refused.json["error"]["message"]
    assert read.json["state"] == "pending"
    assert done.json["cancelled"]


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/jobs/unknown", "for a job of a tenant, give tenant="),
        ("/quarantine/jobs/waiting", "for a job of a tenant, give tenant="),
        ("/jobs?after=gone", "start again without after="),
    ],
)
def test_advice_names_a_parameter_as_a_url_spells_it(rk: Commands, path: str, advice: str) -> None:
    message = api(rk, "GET", path).json["error"]["message"]
    assert message.endswith(f"; {advice}")
    assert "--" not in message


def test_a_worker_that_is_unknown_is_not_found(rk: Commands) -> None:
    work_items.reported_running(rk.folder / ".reefknot" / "state.db", "worker-1")
    answered = api(rk, "POST", "/workers/worker-9/pause", {"dry_run": True})
    assert (answered.status, answered.json["error"]["kind"]) == (404, "not_found")
    assert "'worker-9' is unknown; accepted: worker-1" in answered.json["error"]["message"]
    assert answered.json["error"]["accepted"] == "worker-1"
