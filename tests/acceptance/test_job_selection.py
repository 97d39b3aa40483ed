"""Many jobs at once, by the filters of the list; and one job by its id alone, its correlation or its trace."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import apsw

from tests.acceptance.folder import Folder, until

MANY = 10_000 if os.environ.get("REEFKNOT_FAULT_POINTS") == "all" else 1500


def submit(folder: Folder, *lines: dict[str, Any]) -> None:
    folder.write_lines("many.jsonl", *lines)
    done = folder("submit", "many.jsonl")
    assert done.code == 0, done.err


def job(name: str, tenant: str | None = None, type_: str = "own.wait", **more: Any) -> dict[str, Any]:
    fields = {"assignment_id": name, "job": {"type": type_, "payload": {"name": name}}, **more}
    return fields if tenant is None else {**fields, "tenant_id": tenant}


def states(folder: Folder, *words: str) -> Counter[str]:
    return Counter(one["state"] for one in folder.json("job", "list", "--limit", "1000", *words)["jobs"])


def actions(folder: Folder) -> list[dict[str, Any]]:
    return [one for one in folder.events("operator_action") if one["action"] == "job.cancel"]


def test_a_filter_cancels_what_the_list_shows_for_it_and_nothing_else(folder: Folder) -> None:
    submit(folder, *(job(f"a-{n}", "acme") for n in range(8)), *(job(f"b-{n}", "bolt") for n in range(4)), job("mine"))
    words = ("--tenant", "acme", "--type", "own.wait", "--state", "pending", "--since", "1h")
    tried = folder.json("job", "cancel", *words, "--dry-run")
    assert (tried["count"], len(tried["cancelled"])) == (8, 8)
    assert states(folder) == {"pending": 13}
    assert actions(folder) == []

    done = folder("job", "cancel", *words, "--because", "withdrawn")
    assert done.code == 0, done.err
    assert "8 to be cancelled: 8 own.wait" in done.err
    assert states(folder, "--tenant", "acme") == {"cancelled": 8}
    assert states(folder, "--tenant", "bolt") == {"pending": 4}
    event, *each = actions(folder)
    assert {one["subject"] for one in each} == {f"a-{n}" for n in range(8)}, "one for all, and one for each"
    assert (event["details"]["count"], event["details"]["reason"]) == (8, "withdrawn")
    assert event["details"]["filter"] == {"tenant": "acme", "type": "own.wait", "state": "pending", "since": "1h"}
    assert "no job matches" in folder("job", "cancel", *words).err

    again = folder.json("job", "retry", "--tenant", "acme", "--error", "withdrawn")
    assert again["count"] == 8
    assert states(folder, "--tenant", "acme") == {"pending": 8}


def test_a_filter_cancels_what_waits_and_what_runs_below_a_router(folder: Folder) -> None:
    system = folder.up()
    submit(folder, *(job(f"a-{n}", "acme") for n in range(60)), *(job(f"b-{n}", "bolt") for n in range(3)))
    until(lambda: bool(folder.begun()))
    done = folder.json("job", "cancel", "--tenant", "acme")
    assert done["count"] == 60, done
    assert states(folder, "--tenant", "acme") == {"cancelled": 60}
    folder.go()
    until(lambda: states(folder, "--tenant", "bolt") == {"succeeded": 3})
    assert system.poll() is None


def test_no_selection_is_no_permission_to_cancel_everything(folder: Folder) -> None:
    submit(folder, job("one"), job("two"))
    assert folder("job", "cancel").code == 2
    assert folder("job", "cancel", "--state", "succeeded").code == 2
    assert states(folder) == {"pending": 2}
    tried = folder("job", "cancel", "one", "two", "three", "--dry-run", "--json")
    assert (tried.code, tried.json["cancelled"], tried.json["missing"]) == (1, ["one", "two"], ["three"])
    assert folder.json("job", "cancel", "--all")["count"] == 2


def test_an_id_alone_finds_the_job_of_the_only_tenant_that_has_it(folder: Folder) -> None:
    submit(folder, job("order-7", "acme"), job("order-8", "acme"), job("order-8", "bolt"), job("order-9"))
    assert folder.job("order-7")["tenant_id"] == "acme"
    assert folder.job("order-9")["tenant_id"] is None
    for words in (("show", "order-8"), ("cancel", "order-8"), ("retry", "order-8")):
        refused = folder("job", *words)
        assert refused.code == 1
        assert "jobs of 2 tenants: acme, bolt" in refused.err
        assert "--tenant" in refused.err
    cancelled = folder.json("job", "cancel", "order-7")
    assert (cancelled["tenant_id"], cancelled["state"]) == ("acme", "cancelled")
    assert folder.json("job", "retry", "order-7")["tenant_ids"] == ["acme"]
    cancelled = folder.json("job", "cancel", "order-8", "--tenant", "acme", "--because", "enough")
    assert (cancelled["id"], cancelled["tenant_id"], cancelled["state"]) == ("order-8", "acme", "cancelled")
    assert states(folder, "--tenant", "bolt") == {"pending": 1}
    named = ("--id", "order-8", "--tenant", "acme", "--inputs", '{"name": "order-8"}')
    waited = folder("submit", "--type", "own.wait", *named, "--wait", "--json")
    assert [(one["tenant_id"], one["status"]) for one in waited.json["results"]] == [("acme", "cancelled")]
    assert folder("job", "show", "order-77").code == 1


def test_jobs_are_found_by_correlation_and_trace(folder: Folder) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    submit(folder, job("one", "acme", correlation={"trace_id": trace}), job("two", correlation={"trace_id": trace}))
    submit(folder, job("three"))
    assert {one["id"] for one in folder.json("job", "list", "--trace", trace)["jobs"]} == {"one", "two"}
    correlation = folder.job("one")["correlation_id"]
    assert [one["id"] for one in folder.json("job", "list", "--correlation", correlation)["jobs"]] == ["one"]
    found = folder.json("job", "list", "--trace", trace, "--tenant", "acme", "--state", "pending")["jobs"]
    assert [one["id"] for one in found] == ["one"]


def test_many_jobs_are_cancelled_in_chunks_and_the_lookup_uses_its_index(folder: Folder) -> None:
    """The rows are made by hand: what is measured is the command."""
    submit(folder, job("first", "acme"))
    store = folder.path / ".reefknot" / "state.db"
    copied(store, MANY)
    done = folder("job", "cancel", "--tenant", "acme", "--json")
    assert done.code == 0, done.err
    assert done.json["count"] == MANY
    connection = apsw.Connection(str(store))
    audited = """SELECT count(*) FROM audit WHERE instr(body, '"filter":{"tenant":"acme"}') > 0"""
    assert connection.execute(audited).get == MANY // 500, "one event for each chunk"
    lookup = "SELECT seq FROM work WHERE tenant_id IS NOT NULL AND substr(id, instr(id, '|') + 1) = 'x'"
    plan: Any = connection.execute(f"EXPLAIN QUERY PLAN {lookup} ORDER BY seq DESC LIMIT 50").fetchall()
    connection.close()
    assert "work_of_tenant" in str(plan)


def copied(store: Path, number: int) -> None:
    """Make this many rows of the one that is there."""
    connection = apsw.Connection(str(store))
    names: Any = connection.execute("SELECT name FROM pragma_table_info('work') WHERE name NOT IN ('seq', 'id')")
    columns = ", ".join(name for (name,) in names)
    with connection:
        connection.execute(
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {number - 1}) "
            f"INSERT INTO work (id, {columns}) SELECT 'acme|job-' || i, {columns} FROM work, n"
        )
    connection.close()
