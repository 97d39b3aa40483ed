"""
The audit log for operators: search, verification, replay and heads. Nothing here runs an effect or writes the log.

Answers come in bounded time. A search that no index serves looks at some events, and gives the cursor to go on from;
verification and replay can be limited to the newest events, and say which ones they covered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from reefknot.audit.model.analysis import canonical_category
from reefknot.audit.model.chain import EventIndex
from reefknot.audit.model.event import EVENT_TYPES, tenant_hash, timestamp_ms
from reefknot.audit.port import AuditQuery, ChainReport, KeptEntry, TimedLog, end_of, pages_of, start_of_newest
from reefknot.audit.verification import KeptHeads, StoreSource, configured_heads, store_source
from reefknot.console.operations.operator import in_slices
from reefknot.console.operations.values import (
    ParameterUseError,
    check_limit,
    check_texts,
    time_ms,
    time_text,
    unknown_word,
)
from reefknot.console.words.events import event_fields, in_words
from reefknot.errors import OperationError, ParameterError

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.core.redaction import Redactor

MOST_SHOWN = 1000
"""Mismatches and differences that are listed; all of them are counted."""
MOST_FOUND = 1000
"""Events on one page of a search."""
MOST_COVERED = 50_000
"""Events that a verification or a replay reads while a person waits for the answer, at most."""
MOST_STORED = 1000
"""Rules and policy books of earlier events that a replay of the newest ones is given."""
SCANNED = 1000
"""Events per read of a search that no index serves."""
SCAN_S = 0.12
"""How long such a search goes on reading for one page."""
READ_S = 10.0
REPLAYED_AT_ONCE = 100
"""Events that a replay decides before others have their turn."""
NumberedBody = tuple[int, bytes]
"""The sequence number of an event, and its body."""

# ---- choosing events -------------------------------------------------------------------------------------------------


class EventQuery(Struct, frozen=True, kw_only=True):
    """A page of events, as a person asks for it. An event must match every given field."""

    type: str | None = None
    category: str | None = None
    """Retry category, in any of its spellings."""
    work: str | None = None
    key: str | None = None
    """Idempotency key."""
    tenant: str | None = None
    actor: str | None = None
    correlation: str | None = None
    trace: str | None = None
    since: str | None = None
    """A time, or an age: 90s, 15m, 2h, 7d."""
    until: str | None = None
    text: str | None = None
    """Text that the event has anywhere, in either case."""
    limit: int = 50
    after: str = ""
    """The cursor that the page before gave as `next`."""


class EventFilter(Struct, frozen=True):
    """The events that are asked for: by what a store has an index for, and by fields of the event."""

    query: AuditQuery = AuditQuery()
    category: str | None = None
    key: str | None = None
    tenant: str | None = None
    actor: str | None = None
    text: str | None = None

    @classmethod
    def of(cls, asked: EventQuery) -> EventFilter:
        known = [str(kind.__struct_config__.tag) for kind in EVENT_TYPES]
        if asked.type is not None and asked.type not in known:
            raise ParameterUseError("type", unknown_word(asked.type, known))
        since, until = time_ms("since", asked.since), time_ms("until", asked.until)
        if since is not None and until is not None and since >= until:
            why = f"{asked.until} is not after {asked.since}, from which on events are asked for"
            raise ParameterUseError("until", f"{why}; accepted: a later time")
        query = AuditQuery(
            event_type=asked.type,
            correlation_id=asked.correlation,
            trace_id=asked.trace,
            work_id=asked.work,
            since=since,
            until=until,
        )
        category = None if asked.category is None else canonical_category(asked.category)
        text = None if asked.text is None else asked.text.casefold()
        return cls(query, category, asked.key, asked.tenant, asked.actor, text)

    @property
    def is_everything(self) -> bool:
        """True when no event is left out."""
        return self == EventFilter()

    @property
    def by_index(self) -> bool:
        """True when a store's own indexes find exactly these events."""
        return all(one is None for one in (self.category, self.key, self.tenant, self.actor, self.text))

    def matches(self, kept: KeptEntry) -> bool:
        """Whether an event that the store returned for the query is one of these."""
        body = kept.entry.body
        return self.by_index or (self._may_have_fields(body) and self._has_fields(body, event_fields(body)))

    def _may_have_fields(self, body: bytes) -> bool:
        """False when a text that is asked for is nowhere in an event: then its fields need not be decoded."""
        texts = all(one is None or msgspec.json.encode(one)[1:-1] in body for one in (self.key, self.actor))
        return texts and (
            self.tenant is None
            or msgspec.json.encode(self.tenant)[1:-1] in body
            or tenant_hash(self.tenant).encode() in body
        )

    def accepts(self, body: bytes, filed: EventIndex) -> bool:
        """Whether an event of a file is one of these, by its body and the fields that it is filed under."""
        if self.is_everything:
            return True
        ids = {"correlation_id": filed.correlation_id, "trace_id": filed.trace_id}
        fields, query = event_fields(body) | ids, self.query
        at = timestamp_ms(str(fields.get("timestamp")))
        return (
            all(
                getattr(query, name) in (None, fields.get(name))
                for name in ("event_type", "correlation_id", "trace_id", "work_id")
            )
            and (query.since is None or (at is not None and at >= query.since))
            and (query.until is None or (at is not None and at < query.until))
            and self._has_fields(body, fields)
        )

    def _has_fields(self, body: bytes, fields: dict[str, Any]) -> bool:
        return (
            (self.category is None or canonical_category(fields.get("retry_category")) == self.category)
            and self.key in (None, fields.get("idempotency_key"))
            and (self.tenant in (None, fields.get("tenant_id")) or self._is_hashed(fields.get("tenant_hash")))
            and self.actor in (None, fields.get("actor"), fields.get("os_user"))
            and (self.text is None or self.text in body.decode("utf-8", "replace").casefold())
        )

    def _is_hashed(self, hashed: object) -> bool:
        """Whether this is the hash of the tenant that is asked for."""
        return self.tenant is not None and hashed == tenant_hash(self.tenant)


# ---- search ----------------------------------------------------------------------------------------------------------


async def search_events(operator: Operator, query: EventQuery) -> dict[str, Any]:
    """
    The chosen events, newest first, each with its fields and in words; `next` is the cursor of the next page.

    A filter that no index serves (tenant, actor, key, category, text; until, on a server) looks at a bounded number of
    events for each page: a page may have few events or none, and is the last one only when `next` is None.
    """
    check_limit(query.limit, MOST_FOUND)
    check_texts(**{name: one for name in _TEXTS if isinstance(one := getattr(query, name), str)})
    wanted, before = EventFilter.of(query), _position(query.after)
    try:
        async with asyncio.timeout(READ_S):
            found, following, looked_at = await _search(operator, wanted, before, query.limit)
    except TimeoutError:
        text = f"the store did not find them within {READ_S:g} s; narrow the search, or try again"
        raise OperationError(text, "temporary") from None
    events = await in_slices(lambda kept: _safe_event(kept, operator.redactor), found)
    return {"events": events, "next": None if following is None else str(following), "looked_at": looked_at}


_TEXTS = ("type", "category", "work", "key", "tenant", "actor", "correlation", "trace", "text")


def _position(cursor: str) -> int | None:
    """The sequence before which a page begins; None for the end of the log."""
    if not cursor:
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 18):
        raise ParameterError("after", cursor, "the cursor that a page gave as `next`; leave it out for the first page")
    return int(cursor)


async def _search(
    operator: Operator, wanted: EventFilter, before: int | None, limit: int
) -> tuple[list[KeptEntry], int | None, int]:
    """The events of a page, the position to go on from, and how many events were looked at."""
    until, size = wanted.query.until, limit + 1 if wanted.by_index and wanted.query.until is None else SCANNED
    query = msgspec.structs.replace(wanted.query, until=None, limit=size, newest_first=True)
    log = operator.store.audit
    if until is not None and isinstance(log, TimedLog):
        bound = await log.end_before(until) + 1
        before = bound if before is None else min(before, bound)
    found: list[KeptEntry] = []
    looked_at, end = 0, monotonic() + SCAN_S
    while True:
        page = await log.read(msgspec.structs.replace(query, before=before))
        for kept in page:
            looked_at, before = looked_at + 1, kept.sequence
            if (until is None or kept.entry.at < until) and wanted.matches(kept):
                found.append(kept)
                if len(found) == limit:
                    break
        is_over = len(page) < size and (not page or before == page[-1].sequence)
        if is_over or len(found) == limit or monotonic() > end:
            return found, None if is_over else before, looked_at


def _event(kept: KeptEntry) -> dict[str, Any]:
    """An event for pages and programs; for a damaged one, the fields that the store has in columns."""
    fields, (kind, sentence) = event_fields(kept.entry.body), in_words(kept.entry.body)
    at = {"timestamp": time_text(kept.entry.at), "event_type": kept.entry.event_type}
    return {"sequence": kept.sequence, "hash": kept.hash, "kind": kind, "sentence": sentence, "event": at | fields}


def _safe_event(kept: KeptEntry, redactor: Redactor) -> dict[str, Any]:
    """An event without secrets. The id of its work is for use: only configured secrets are taken out of it."""
    event = _event(kept)
    hidden: Any = redactor.tree(event)
    if isinstance(work := event["event"].get("work_id"), str):
        hidden["event"]["work_id"] = redactor.values_out_of(work)
    return dict(hidden)


# ---- verification ----------------------------------------------------------------------------------------------------


async def verify_events(operator: Operator, *, most: int | None = MOST_COVERED) -> dict[str, Any]:
    """
    The verification of the store's hash chains, compared with the heads of the setting `audit.heads`.

    Of a log with more events than `most`, the newest are verified: each hash follows from the one before it, and each
    event is found by its own fields. `covered` says which; None is the whole log, with all that retention removed.
    """
    source, (kept, missing) = await _source(operator), configured_heads(operator.settings)
    end = source.head.sequence
    first = 0 if most is None else await start_of_newest(source.log, most)
    if most is None or not first:
        reports = await source.reports(kept)
        covered = _covered(1, end, sum(one.head.sequence for one in reports))
    else:
        reports = await source.newest_reports(kept, most)
        each = most // len(reports)
        lowest = {one.head.chain: one.head.sequence - each for one in reports}
        kept = kept._replace(heads=[one for one in kept.heads if one.sequence > lowest.get(one.chain, 0)])
        covered = _covered(first, end, most)
        if len(reports) > 1:  # of several chains, the newest of each: no range of the log
            covered |= {"first": None, "events": sum(min(each, one.head.sequence) for one in reports)}
    heads_missing = None if missing is None else str(missing)
    return {**verification(source.name, reports, kept), "heads_missing": heads_missing, "covered": covered}


def _covered(first: int, last: int, number: int) -> dict[str, Any]:
    """The events that an answer is about: the first and last sequence, and how many there are."""
    return {"events": number, "first": first, "last": last, "whole": first == 1}


def verification(name: str, reports: Sequence[ChainReport], kept: KeptHeads) -> dict[str, Any]:
    """The verification of a log, of one chain or of several, by the reports about its chains."""
    if len(reports) > 1:
        return _verified_chains(name, reports, kept)
    end, mismatches = reports[0].head, reports[0].mismatches
    heads = kept.of(end.chain if kept.configured else "")
    return {
        "ok": not mismatches,
        "source": name,
        **msgspec.structs.asdict(end),
        "compared_with": str(kept.file) if heads else None,
        "proven_up_to": None if mismatches or not heads else max(one.sequence for one in heads),
        "mismatches": msgspec.to_builtins(mismatches[:MOST_SHOWN]),
        "mismatches_total": len(mismatches),
    }


def _verified_chains(name: str, reports: Sequence[ChainReport], kept: KeptHeads) -> dict[str, Any]:
    heads = [kept.heads_of(one.head.chain) for one in reports]
    mismatches = [(one.head.chain, found) for one in reports for found in one.mismatches]
    return {
        "ok": not mismatches,
        "source": name,
        "chains": [
            {
                **msgspec.structs.asdict(one.head),
                "proven_up_to": None if one.mismatches or not ours else ours[0].sequence,
                "mismatches_total": len(one.mismatches),
            }
            for one, ours in zip(reports, heads, strict=True)
        ],
        "compared_with": str(kept.file) if any(heads) else None,
        "mismatches": [{"chain": chain, **msgspec.structs.asdict(found)} for chain, found in mismatches[:MOST_SHOWN]],
        "mismatches_total": len(mismatches),
    }


async def audit_head(operator: Operator) -> dict[str, Any]:
    """The heads of all chains. Kept elsewhere, they prove later what the log held now."""
    source = await _source(operator)
    return {"heads": msgspec.to_builtins(await source.heads())}


async def _source(operator: Operator) -> StoreSource:
    shown, settings = operator.shown, operator.settings
    file = Path(operator.store.path) if operator.store.path is not None else None
    audit = None if settings is None else settings.configuration.audit
    return await store_source(operator.store.audit, shown, audit, file)


# ---- replay ----------------------------------------------------------------------------------------------------------


async def replay_events(operator: Operator, *, most: int | None = MOST_COVERED) -> dict[str, Any]:
    """
    Every audited decision decided again, with each difference. Nothing is executed.

    Of a log with more events than `most`, the newest are replayed, with the rules and the policy books of earlier ones.
    `covered` says which; None is the whole log.
    """
    from reefknot.policy.dialects import load_all

    log, warnings = operator.store.audit, load_all()  # a registered strategy's decision can only be repeated with it
    end = (await end_of(log)).sequence
    first = (0 if most is None else await start_of_newest(log, most)) or 1
    earlier = [] if first == 1 else await _stored_before(operator, first)

    async def events() -> AsyncIterator[NumberedBody]:
        async for page in pages_of(log, AuditQuery(after=first - 1), until=end):
            for kept in page:
                yield kept.sequence, kept.entry.body

    found: Any = operator.redactor.tree(await replayed(operator.shown, events(), earlier=earlier))
    return {**found, "warnings": warnings, "covered": _covered(first, end, found["events"])}


async def _stored_before(operator: Operator, first: int) -> list[bytes]:
    """The rules and policy books in events before this one, oldest first."""
    found: list[KeptEntry] = []
    for kind in ("rules_stored", "book_stored"):
        query = AuditQuery(event_type=kind, before=first, limit=MOST_STORED, newest_first=True)
        found += await operator.store.audit.read(query)
    return [one.entry.body for one in sorted(found, key=lambda one: one.sequence)]


async def replayed(name: str, events: AsyncIterator[NumberedBody], *, earlier: Sequence[bytes] = ()) -> dict[str, Any]:
    """The replay of these events. Of `earlier` ones, the rules and books are used, and nothing is counted."""
    from reefknot.audit.model.replay import Replayer

    replayer, total, first = Replayer(), 0, []
    for body in earlier:
        replayer.add(body)
    number = 0
    async for sequence, body in events:
        number += 1
        if number % REPLAYED_AT_ONCE == 0:
            await asyncio.sleep(0)  # let other tasks of this loop run
        for one in replayer.add(body):
            total += 1
            if total <= MOST_SHOWN:
                decisions = {"recorded": one.recorded, "decided": one.decided}
                first.append({"sequence": sequence, "event_type": one.event_type, **decisions})
    again = replayer.result()
    return {
        "ok": not total,
        "source": name,
        "events": again.events - len(earlier),
        "decisions": again.decisions,
        "decisions_by_kind": again.kinds,
        "differences_total": total,
        "differences": first,
        "books": again.books,
        "books_missing": list(again.books_missing),
        "undecided": again.undecided,
        "undecided_by": again.undecided_by,
        "rules_missing": list(again.rules_missing),
    }
