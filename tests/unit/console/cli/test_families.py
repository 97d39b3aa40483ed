"""`job show` of parents, children and jobs that wait for others, and `job cancel --tree`."""

from pathlib import Path

import reefknot as rk_library
from reefknot.queue.client import Client
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.port import Store
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.running import Commands
from tests.unit.queue.test_follow_ups import STEPS


def family(store: Path) -> None:
    """A crawl that has ended, and three jobs that wait: `first`, `second` after it, `third` after that."""
    with rk_library.system_sync(f"sqlite:{store}", modules=STEPS) as client:
        client.submit("flow.start", {"pages": 2}, assignment_id="site")
        assert client.job("site").wait(20) == "succeeded"
        assert client.job("site:2").wait(20) == "succeeded"

    async def more(opened: Store) -> None:
        client = Client(opened, SystemClock())
        first = await client.submit("flow.page", {"n": 1}, assignment_id="first", delay=3600)
        second = await client.submit("flow.page", {"n": 1}, assignment_id="second", after=[first])
        await client.submit("flow.page", {"n": 1}, assignment_id="third", after=[second])

    in_store(store, more)


def test_a_job_is_shown_with_its_parent_its_children_and_what_it_waits_for(rk: Commands, store: Path) -> None:
    family(store)
    top = rk("job", "show", "site", "--json").json
    assert [one["id"] for one in top["children"]] == ["site:1", "site:2"]
    assert top["children_by_state"] == {"succeeded": 1, "pending": 1}, "the mail is due later"
    gathered = rk("job", "show", "site:2", "--json").json
    assert (gathered["parent"], gathered["children_by_state"]) == ("site", {"succeeded": 2})
    assert "children" not in gathered["assignment"], "the jobs of its children are no part of its own"
    assert "children  " in rk("job", "show", "site").out
    assert "children  " not in rk("job", "show", "site:2:1").out
    second = rk("job", "show", "second", "--json").json
    assert (second["after"], second["waiting"]["code"]) == (
        [{"id": "first", "type": "flow.page", "state": "pending"}],
        "other_work",
    )
    assert "it waits for another job, first" in rk("job", "show", "second").out


def test_a_tree_is_cancelled_with_all_that_waits_for_it_and_a_dry_run_names_it(rk: Commands, store: Path) -> None:
    family(store)
    tried = rk("job", "cancel", "first", "--tree", "--dry-run", "--json").json
    assert (tried["cancelled"], tried["dry_run"]) == (["third", "second", "first"], True)
    done = rk("job", "cancel", "first", "--tree", "--because", "withdrawn")
    assert (done.code, "third cancelled" in done.out) == (0, True)
    states = {name: rk("job", "show", name, "--json").json["state"] for name in ("first", "second", "third", "site:1")}
    assert states == {"first": "cancelled", "second": "cancelled", "third": "cancelled", "site:1": "pending"}
    assert rk("job", "cancel", "--tree", "--tenant", "acme").code == 2


def test_a_tree_without_ids_is_refused(rk: Commands, store: Path) -> None:
    family(store)
    refused = rk("job", "cancel", "--tree", "--all")
    assert (refused.code, "tree" in refused.err) == (2, True)
