"""Conformance stories of lists and counts of work: by filter, in pages, since a time, by visible state."""

from typing import Any

from reefknot.errors import ParameterError
from reefknot.queue.model.failure_groups import fingerprint_of
from reefknot.queue.model.work import ROUTER, Settled, WorkFailed, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueue, Settlement, WorkClaim, WorkFilter
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.port import Store
from reefknot.testing.conformance.harness import required, story, wall_ms


async def listed(store: Store, *, after: str = "", limit: int = 100, oldest: bool = False, **fields: Any) -> list[str]:
    """The ids of a page of items, the newest or the `oldest` first."""
    page = await store.work.search(WorkFilter(**fields), after=after, limit=limit, oldest_first=oldest)
    return [item.id for item in page.items]


class ListingContract:
    """Part of the contract of a work queue."""

    @story()
    async def test_items_are_listed_by_filter_in_pages_without_their_payloads(
        self, store: Store, clock: VirtualClock
    ) -> None:
        later = WorkItem("d", "t1", "io", due_at=wall_ms(clock) + 10_000)
        first = WorkItem("b", "t1", payload=b"p")
        await store.work.enqueue([first, WorkItem("a", "t2"), WorkItem("c", "t1"), later])
        await store.work.claim(1, WorkClaim(owner="w", classes=["cpu"]))

        async def found(**filters: Any) -> str:
            return "".join(await listed(store, **filters))

        assert await found() == "dcab"
        assert await found(state=WorkState.PENDING) == "dca"
        assert await found(after="c") == "ab"
        assert await found(after="c", kind="t1") == "b"
        assert await found(after="gone") == ""
        assert await found(classes=("cpu",)) == "cab"
        assert await found(classes=("io", "cpu"), state=WorkState.PENDING, kind="t1") == "dc"
        assert await found(classes=("cpu",), state=WorkState.RUNNING) == "b"
        page = (await store.work.search(limit=2)).items
        assert [(item.id, item.payload) for item in page] == [("d", b""), ("c", b"")]
        assert await store.work.get("zz") is None

    @story()
    async def test_items_are_listed_since_a_time_and_the_oldest_first(self, store: Store, clock: VirtualClock) -> None:
        for name in "abcde":
            await store.work.enqueue([WorkItem(name, "t1" if name in "ace" else "t2")])
            clock.advance(1)

        async def found(**filters: Any) -> str:
            return "".join(await listed(store, **filters))

        at_c = wall_ms(clock) - 3000
        assert await found(since=at_c) == "edc"
        assert await found(since=at_c, kind="t1", limit=1) == "e"
        assert await found(since=at_c, kind="t1", after="e") == "c"
        assert await found(oldest=True) == "abcde"
        assert await found(oldest=True, since=at_c, limit=2) == "cd"
        assert await found(oldest=True, after="b", kind="t1") == "ce"
        assert await found(oldest=True, after="gone") == ""

    @story()
    async def test_a_claim_without_an_attempt_is_listed_as_pending(self, store: Store, clock: VirtualClock) -> None:
        """Held by a router, by an owner that is gone, and under a lease that ran out; only one is at work."""
        await store.work.enqueue([WorkItem("held", "t", ROUTER)], Enqueue(owner="router-1", lease=60))
        await store.work.enqueue([WorkItem(name, "t", f"cpu@{name}") for name in ("gone", "late", "runs", "waits")])
        for name, lease in (("gone", 60.0), ("late", 1.0), ("runs", 60.0)):
            await store.work.claim(1, WorkClaim(owner=f"owner of {name}", classes=[f"cpu@{name}"], lease=lease))
        clock.advance(2)

        async def found(**filters: Any) -> list[str]:
            return sorted(await listed(store, **filters))

        gone = ("owner of gone",)
        assert await found(state=WorkState.RUNNING) == ["gone", "held", "late", "runs"]
        assert await found(state=WorkState.RUNNING, gone=gone) == ["runs"]
        assert await found(state=WorkState.RUNNING, gone=()) == ["gone", "runs"]
        assert await found(state=WorkState.PENDING, gone=gone) == ["gone", "held", "late", "waits"]
        assert await found(state=WorkState.PENDING, gone=gone, kind="other") == []
        newest = (await store.work.search(WorkFilter(state=WorkState.PENDING, gone=gone), limit=2)).items
        assert [item.id for item in newest] == ["waits", "late"]
        rest = (await store.work.search(WorkFilter(state=WorkState.PENDING, gone=gone), after="late")).items
        assert [item.id for item in rest] == ["gone", "held"]

    @story()
    async def test_the_snapshot_counts_a_claim_without_an_attempt_as_waiting(
        self, store: Store, clock: VirtualClock
    ) -> None:
        """Held by a router, by an owner that is gone, and under a lease that ran out: due, and not being run."""
        started = wall_ms(clock)
        await store.work.enqueue([WorkItem("held", "t", ROUTER)], Enqueue(owner="router-1", lease=60))
        await store.work.enqueue(
            [WorkItem("soon", "t", ROUTER, due_at=started + 60_000)], Enqueue(owner="router-1", lease=60)
        )
        for name, lease in (("gone", 60.0), ("late", 1.0), ("runs", 60.0)):
            clock.advance(1)
            await store.work.enqueue([WorkItem(name, "t", f"cpu@{name}")])
            await store.work.claim(1, WorkClaim(owner=f"owner of {name}", classes=[f"cpu@{name}"], lease=lease))
        clock.advance(2)

        waits, runs = {WorkState.PENDING: 1}, {WorkState.RUNNING: 1}
        seen = await store.work.snapshot(["owner of gone"])
        of_router = {WorkState.PENDING: 2}
        assert seen.counts == {ROUTER: of_router, "cpu@gone": waits, "cpu@late": waits, "cpu@runs": runs}
        assert seen.oldest_ms == {ROUTER: 5000, "cpu@gone": 4000, "cpu@late": 3000}
        assert seen.oldest_due_ms == 5000
        without = await store.work.snapshot()
        assert without.counts["cpu@gone"] == runs
        assert without.oldest_ms == {ROUTER: 5000, "cpu@late": 3000}
        clock.advance(60)
        assert (await store.work.snapshot()).oldest_ms[ROUTER] == 65_000, "its lease was not renewed"

    @story()
    async def test_classes_and_visible_states_are_not_looked_for_together(
        self, store: Store, clock: VirtualClock
    ) -> None:
        await store.work.enqueue([WorkItem("a", "t")])
        assert [item.id for item in (await store.work.search(WorkFilter(classes=("cpu",)))).items] == ["a"]
        refused = ""
        try:
            await store.work.search(WorkFilter(state=WorkState.PENDING, classes=("cpu",), gone=()))
        except ParameterError as error:
            refused = error.parameter
        assert refused == "classes"

    @story()
    async def test_a_search_finds_what_matches_every_field_in_pages_of_any_size(
        self, store: Store, clock: VirtualClock
    ) -> None:
        started = wall_ms(clock)
        await _work_to_search(store, clock)

        async def found(limit: int, *, oldest_first: bool = False, **fields: Any) -> str:
            which, names, after = WorkFilter(**fields), "", ""
            while True:
                page = await store.work.search(which, after=after, limit=limit, oldest_first=oldest_first)
                assert all(not item.payload for item in page.items)
                assert len(page.items) <= limit
                names += "".join(item.assignment_id for item in page.items)
                if not (after := page.after):
                    return names

        fingerprint = fingerprint_of(required(await store.work.get("acme|d")))
        for names, fields in _searches(started, fingerprint):
            for limit in (1, 2, 100):
                assert await found(limit, **fields) == names, (fields, limit)
                assert await found(limit, oldest_first=True, **fields) == names[::-1], (fields, limit)
            if "gone" not in fields:
                which = WorkFilter(**fields)
                assert sorted(names) == sorted(one.assignment_id for one in await store.work.by_id(which)), fields
                assert sum((await store.work.count(which)).values()) == len(names), fields
                assert sum(one.count for one in (await store.work.groups(which)).groups()) == len(names), fields
        assert (await store.work.search(after="gone")).items == []


def _searches(started: int, fingerprint: str) -> list[tuple[str, dict[str, Any]]]:
    """Ids of `_work_to_search`, newest first, and the filter that finds them."""
    return [
        ("fedcba", {}),
        ("fda", {"tenant_id": "acme"}),
        ("da", {"tenant_id": "acme", "state": WorkState.FAILED}),
        ("", {"tenant_id": "unknown"}),
        ("cb", {"source": "notes"}),
        ("c", {"source": "notes", "kind": "imap_mailbox"}),
        ("ec", {"kind": "imap_mailbox"}),
        ("c", {"kind": "imap_mailbox", "only_ingestion": True}),
        ("cb", {"only_ingestion": True}),
        ("cba", {"before": started + 3000}),
        ("fe", {"since": started + 4000}),
        ("ed", {"since": started + 3000, "before": started + 5000}),
        ("a", {"error": "spent"}),
        ("ea", {"error": "HTTP_ERROR"}),
        ("ea", {"error": "http_Error"}),
        ("a", {"error": "perma"}),
        ("d", {"error": 'answered "503"\nnö'}),
        ("", {"error": "message"}),
        ("a", {"error": "refused", "tenant_id": "acme", "kind": "t1", "state": WorkState.FAILED}),
        ("cb", {"state": WorkState.PENDING, "gone": ()}),
        ("fcb", {"state": WorkState.PENDING, "gone": ("w",)}),
        ("f", {"state": WorkState.PENDING, "gone": ("w",), "tenant_id": "acme"}),
        ("f", {"state": WorkState.RUNNING, "gone": ()}),
        ("f", {"state": WorkState.RUNNING}),
        ("eb", {"ids": ("b", "e", "b", "none")}),
        ("f", {"classes": ("cpu",)}),
        ("e", {"ids": ("b", "e"), "kind": "imap_mailbox", "state": WorkState.FAILED}),
        ("a", {"ids": ("acme|a", "acme|d"), "before": started + 3000}),
        ("", {"ids": ()}),
        ("e", {"reason": "OR, they"}),
        ("", {"reason": "or, THEY"}),
        ("d", {"fingerprint": fingerprint}),
        ("fed", {"changed_since": started + 3000}),
        ("cba", {"changed_before": started + 3000}),
        ("a", {"assignment_id": "a"}),
        ("", {"assignment_id": "acme|a"}),
    ]


async def _work_to_search(store: Store, clock: VirtualClock) -> None:
    """Items a to f, each a second after the one before it."""
    refused = '{"code": "HTTP_ERROR", "failure_type": "permanent", "message": "the order was refused"}'
    answered = '{"code": "NETWORK_ERROR", "message": "it answered \\"503\\"\\nn\u00f6"}'
    ends: dict[str, tuple[WorkItem, Settled | None]] = {
        "a": (WorkItem("acme|a", "t1", tenant_id="acme"), WorkFailed(refused, None, "attempts_spent")),
        "b": (WorkItem("b", "local_files", "ingest.notes", "notes"), None),
        "c": (WorkItem("c", "imap_mailbox", "ingest.notes", "notes"), None),
        "d": (WorkItem("acme|d", "t1", tenant_id="acme"), WorkFailed(answered)),
        "e": (WorkItem("e", "imap_mailbox"), WorkFailed("no JSON", None, "HTTP_ERROR, they said")),
        "f": (WorkItem("acme|f", "t2", tenant_id="acme", payload=b"p"), None),
    }
    for item, settled in ends.values():
        await store.work.enqueue([item])
        for claimed in await store.work.claim(1, WorkClaim(owner="w", classes=["cpu"], lease=60)):
            if settled is not None:
                assert await store.work.settle([Settlement(claimed.id, "w", claimed.fence, settled)]) == [True]
        clock.advance(1)
