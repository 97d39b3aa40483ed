"""
Follow-ups: further work that a step leads to, and the work that waits for other work.

    then(…)                     one job, stored with the result of the step that asks for it
    gather(…, then=…)           many jobs, and one that runs when they have ended
    submit(…, after=[…])        one job that runs when those of these ids have ended

A follow-up's id is its parent's with a number (`order-7:2`), so the same parent never stores it twice. A gather is one
item, however many children it has: their assignments are in its payload, and its router stores them as there is room
(`child_items`). Work that waits is scheduled work of the class `ROUTER`, which is looked at again and again until all
that it waits for is over (`awaited`).
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, TypedDict, Unpack
from zlib import compress, decompress

from msgspec import Struct, json, structs

from reefknot.core.time import Moment
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.queue.model.admission import UNKNOWN_WAIT_MS, Reject, RejectReason
from reefknot.queue.model.arguments import NamedJob, check_names, due_time, written
from reefknot.queue.model.messages import LONGEST_ID, Correlation, ExecAssignment, encode, resource_class
from reefknot.queue.model.results import item_of
from reefknot.queue.model.submission import FULL_MESSAGE, BatchAdmission, Displace, SubmissionRules
from reefknot.queue.model.work import (
    ROUTER,
    Extra,
    WorkItem,
    accepted,
    arrival_of,
    assignment_and_tenant,
    record_id,
    stage_of,
)

DEEPEST = 32
"""Follow-ups of follow-ups, at most."""
MOST_CHILDREN = 10_000
"""Children of one parent, those of its gathers among them."""
MOST_STORED = 256
"""Follow-ups that are stored with their parent; of more, a gather without a job of its own takes all."""
MOST_AFTER = 100
"""Jobs that one of `submit(after=…)` waits for."""
LARGEST_CHILDREN = 8 << 20
"""Bytes of the compressed children of one gather."""
GROUP = "rk.gather"
"""The type of a gather without `then`: its router ends it when its children have ended."""


class ThenOptions(TypedDict, total=False):
    """The options of `then`, as `submit` has them. `delay` and `deadline` count from the end of the parent."""

    deadline: float | timedelta | None
    timeout: float | timedelta | None
    attempt_timeout: float | timedelta | None
    retries: int | None
    priority: int | str
    resource_class: str | None
    delay: float | timedelta | None
    at: datetime | None


_OPTIONS = tuple(ThenOptions.__annotations__)


class FollowUp(Struct, frozen=True):
    """A job that follows a step, made by `then`. Its ids are those that its parent gives it."""

    assignment: ExecAssignment
    delay_ms: int = 0
    at: int = 0
    """When it is due (ms UTC); 0 without a time of its own."""

    def due_at(self, wall: float) -> int:
        """The due time (ms UTC), given the time at which its parent ends."""
        return self.at or int(wall * 1000) + self.delay_ms


class Gather(Struct, frozen=True):
    """Jobs that follow a step, and the one that follows them, made by `gather`."""

    children: tuple[FollowUp, ...]
    then: FollowUp
    return_failures: bool = False


def then(job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[ThenOptions]) -> FollowUp:
    """
    A job that follows the step which returns it: `return rk.then("invoice.mail", {"invoice": 7}, delay=60)`.

    It is stored in the transaction that stores the step's result: both are, or neither.
    """
    check_names(options, _OPTIONS)
    delay, at = options.get("delay"), options.get("at")
    due = due_time(delay, at, at.timestamp() if isinstance(at, datetime) else 0.0)
    assignment = written(job_type, inputs, options, "follow-up")
    return FollowUp(assignment, at=due) if at is not None else FollowUp(assignment, delay_ms=due)


def gather(*children: FollowUp, then: FollowUp | None = None, return_failures: bool = False) -> Gather:
    """
    Jobs that follow the step which returns them, and `then` one that runs when all of them have ended.

    Its step gets their results by `context.children()`. If one of them has failed it does not run, and fails as well,
    unless `return_failures` asks for the failures among the results.
    """
    if not children or not all(isinstance(one, FollowUp) for one in children):
        wrong = next((one for one in children if not isinstance(one, FollowUp)), None)
        raise ParameterTypeError("children", wrong, "one or more follow-ups: rk.gather(rk.then(…), rk.then(…), then=…)")
    if then is not None and not isinstance(then, FollowUp):
        raise ParameterTypeError("then", then, "a follow-up: rk.then(…)")
    if then is not None and (then.delay_ms or then.at):
        accepted = "a follow-up without delay and at: it runs when the children have ended"
        raise ParameterError("then", then.assignment.job.type, accepted)
    if len(children) > MOST_CHILDREN:
        raise ParameterError("children", len(children), f"at most {MOST_CHILDREN} children")
    job = written(GROUP, {}, {}, "follow-up") if then is None else then.assignment
    return Gather(children, FollowUp(job), bool(return_failures))


def follow_ups_in(answer: object) -> list[FollowUp | Gather] | None:
    """The follow-ups that a step returned: one of them, or a list of several. None for any other answer."""
    if isinstance(answer, FollowUp | Gather):
        return [answer]
    if isinstance(answer, list | tuple) and answer and all(isinstance(one, FollowUp | Gather) for one in answer):
        return list(answer)
    return None


# ---- ids -------------------------------------------------------------------------------------------------------------


def child_id(parent: str, number: int) -> str:
    """The record of a parent's child: its id with the number, or a digest of it where that would be too long."""
    name, tenant = assignment_and_tenant(parent)
    if len(name) + 6 > LONGEST_ID:
        name = sha256(name.encode()).hexdigest()[:32]
    return record_id(f"{name}:{number}", tenant)


def children_ids(item: WorkItem) -> list[str]:
    """The records of all children that an item has stored."""
    return [child_id(item.family_id, number) for number in range(1, item.extra.children + 1)]


def awaited(item: WorkItem) -> list[str]:
    """The records that an item waits for, or has waited for, in the order of their results."""
    return [*(child_id(item.family_id, number) for number in range(1, item.extra.gathers + 1)), *item.extra.after]


# ---- from a step's answer to items -----------------------------------------------------------------------------------


class Origin(Struct, frozen=True):
    """The item that follow-ups come from, the wall time, and the span and the classes that they get."""

    parent: WorkItem
    wall: float
    traceparent: str | None = None
    class_of: Callable[[ExecAssignment], str] = resource_class


def items_of(origin: Origin, given: Sequence[FollowUp | Gather]) -> tuple[WorkItem, ...]:
    """The items of a step's follow-ups, or a `ParameterError` that names the bound which they exceed."""
    parent = origin.parent
    number = sum(len(one.children) if isinstance(one, Gather) else 1 for one in given)
    if number > MOST_CHILDREN:
        raise ParameterError("follow-ups", number, f"at most {MOST_CHILDREN} children of one job, {parent.id}")
    if parent.extra.depth >= DEEPEST:
        raise ParameterError("follow-ups", f"{DEEPEST + 1} deep", f"at most {DEEPEST} follow-ups in a row")
    if len(given) > MOST_STORED:
        plain = tuple(one for one in given if isinstance(one, FollowUp))
        given = [one for one in given if isinstance(one, Gather)]
        given += [gather(*plain, return_failures=True)] if plain else []
        if len(given) > MOST_STORED:
            raise ParameterError("follow-ups", len(given), f"at most {MOST_STORED} gathers of one job, {parent.id}")
    first = parent.extra.children + 1
    return tuple(_item(origin, child_id(parent.family_id, first + at), one) for at, one in enumerate(given))


def _item(origin: Origin, record: str, one: FollowUp | Gather) -> WorkItem:
    job = one.then if isinstance(one, Gather) else one
    parent = origin.parent
    assignment = _named(origin, record, job.assignment)
    due_at = job.due_at(origin.wall)
    body, extra = encode(assignment), Extra(parent=parent.family_id, depth=parent.extra.depth + 1)
    if isinstance(one, Gather):
        body = _with_children(body, one.children)
        failures = one.return_failures
        extra = Extra(parent=extra.parent, depth=extra.depth, gathers=len(one.children), return_failures=failures)
    item = item_of(assignment, body, ROUTER, begins_at=due_at, due_at=due_at)
    return structs.replace(item, pool=origin.class_of(assignment), extra=extra)


def _named(origin: Origin, record: str, assignment: ExecAssignment) -> ExecAssignment:
    """The assignment with the ids that its parent gives it."""
    parent = origin.parent
    traces = parent.trace_id is not None or origin.traceparent is not None
    return structs.replace(
        assignment,
        assignment_id=assignment_and_tenant(record)[0],
        request_id=parent.correlation_id or parent.assignment_id,
        tenant_id=parent.tenant_id,
        correlation=Correlation(parent.trace_id, origin.traceparent) if traces else None,
    )


class _Payload(Struct):
    """The part of a gather's payload that no worker reads."""

    children: str = ""


_payload = json.Decoder(_Payload)
_children = json.Decoder(list[FollowUp])


def _with_children(body: bytes, children: Sequence[FollowUp]) -> bytes:
    packed = compress(json.encode(children), 1)
    if len(packed) > LARGEST_CHILDREN:
        accepted = f"at most {LARGEST_CHILDREN} bytes of inputs in all, compressed; keep large inputs elsewhere"
        raise ParameterError("children", f"{len(packed)} bytes", accepted)
    return body[:-1] + b',"children":"' + b64encode(packed) + b'"}'


def unpacked_children(item: WorkItem) -> list[FollowUp]:
    """The children of a gather, from its payload."""
    return _children.decode(decompress(b64decode(_payload.decode(item.payload).children)))


def child_items(origin: Origin, children: Sequence[FollowUp], most: int) -> tuple[WorkItem, ...]:
    """The items of the next children of a gather, up to `most`, that are not stored yet."""
    item = origin.parent
    first, extra = item.extra.children, Extra(parent=item.family_id, depth=item.extra.depth)
    made = [
        _item(origin, child_id(item.family_id, first + at + 1), one) for at, one in enumerate(children[first:][:most])
    ]
    return tuple(structs.replace(one, extra=extra) for one in made)


# ---- at the door -----------------------------------------------------------------------------------------------------


class RefusedFollowUp(Struct, frozen=True):
    """A follow-up that is not stored: because of admission, or because other work has its id."""

    item: WorkItem
    verdict: Reject | None = None


def admitted(
    parent: WorkItem,
    items: Sequence[WorkItem],
    known: Mapping[str, WorkItem],
    arrivals: BatchAdmission,
    rules: SubmissionRules,
    now: Moment,
) -> list[WorkItem] | RefusedFollowUp:
    """
    The follow-ups to store with their parent, all of them or none.

    `known` is what the store has under their ids: what the same parent has stored before is passed by. A follow-up
    takes no other work's place, whatever its priority.
    """
    new: list[WorkItem] = []
    for item in items:
        there = known.get(item.id)
        if there is not None:
            if there.extra.parent != parent.family_id or there.created_at < parent.created_at:
                return RefusedFollowUp(item)
            continue
        one = accepted(item, now)
        verdict = arrivals.admit(one.pool, stage_of(one), arrival_of(one, now), rules)
        if isinstance(verdict, Displace):
            verdict = Reject(RejectReason.QUEUE_FULL, FULL_MESSAGE, UNKNOWN_WAIT_MS)
        if isinstance(verdict, Reject):
            return RefusedFollowUp(item, verdict)
        new.append(one)
    return new


def with_children(item: WorkItem, number: int) -> WorkItem:
    """The item with this many more children."""
    return structs.replace(item, extra=structs.replace(item.extra, children=item.extra.children + number))


# ---- after other jobs ------------------------------------------------------------------------------------------------


def after_ids(given: Sequence[str | NamedJob] | None, own: ExecAssignment) -> tuple[str, ...]:
    """The records of the jobs that a submission waits for; ids alone are of its own tenant."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ParameterTypeError("after", given, "a list of ids or handles of jobs")
    found = dict.fromkeys(_after(given, own.tenant_id))
    if len(found) > MOST_AFTER:
        raise ParameterError("after", len(found), f"at most {MOST_AFTER} jobs; for more, use rk.gather in a step")
    if own.record_id in found:
        raise ParameterError("after", own.assignment_id, "other jobs: a job that waits for itself is a cycle")
    return tuple(found)


def _after(given: Sequence[str | NamedJob], tenant: str | None) -> Iterator[str]:
    for at, one in enumerate(given):
        if isinstance(one, str) and one:
            yield record_id(one, tenant)
        elif isinstance(getattr(one, "assignment_id", None), str):
            yield record_id(one.assignment_id, one.tenant_id)  # type: ignore[union-attr]
        else:
            raise ParameterTypeError(f"after[{at}]", one, "the id of a job, or its handle")
