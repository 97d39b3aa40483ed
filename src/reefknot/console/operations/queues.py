"""
The queue for operators: job types and tenants paused and resumed, and the limits of the fleet with the work that waits
for them.

A pause holds for all processes over the store, from the moment it is kept until its time is over or it is resumed.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from reefknot.console.operations.values import ParameterUseError, duration_s, time_text
from reefknot.errors import OperationError, ParameterError
from reefknot.queue.pauses import MOST_PAUSES, Pause, change_pauses, read_pauses
from reefknot.queue.presence import living_systems

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator

LONGEST_NAME = 200
LONGEST_S = 10 * 365 * 86_400
_UNTIL = "a time in the future such as 2026-01-25T21:15:00Z, or a duration from now: 90s, 15m, 2h, 7d"
ONE_OF = "give one of them: a job type such as billing.charge (* stands for any text: billing.*), or a tenant"


async def list_queue(operator: Operator) -> dict[str, Any]:
    """The paused job types and tenants, and the limits of the running routers with the work that waits for them."""
    now = operator.store.moment().wall
    paused = [_fields(operator, one) for one in await read_pauses(operator.store) if one.is_on(now)]
    routers = [one["router"] for one in await living_systems(operator.store) if one["router"]]
    found: dict[str, dict[str, Any]] = {}
    for one in (limit for router in routers for limit in router.get("limits", ())):
        about = found.setdefault(one["name"], _limit_fields(one))
        about["held"] |= operator.redactor.tree(one["held"])
    return {"paused": paused, "limits": list(found.values())}


def _limit_fields(limit: dict[str, Any]) -> dict[str, Any]:
    kept = {name: limit[name] for name in ("name", "burst", "running", "per", "place")}
    rate = limit["rate"]
    return {**kept, "rate": rate and f"{rate['count']:g}/{rate['unit']}", "text": limit["text"], "held": {}}


async def pause_queue(
    operator: Operator,
    *,
    type: str | None = None,  # noqa: A002 - the name of the flag, and of the field
    tenant: str | None = None,
    until: str | None = None,
    reason: str = "",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Pause a job type or a tenant: nothing of it begins until it is resumed, or until its time is over."""
    what, name = checked_subject(type, tenant)
    now = operator.store.moment().wall
    ends, why = until_ms(until, now), operator.reason(reason.strip())
    pause = Pause(what, name, since=now, until=ends, who=operator.actor, why=why)

    def change(pauses: list[Pause]) -> list[Pause] | None:
        others = [one for one in pauses if (one.what, one.name) != (what, name) and one.is_on(now)]
        before = next((one for one in pauses if (one.what, one.name) == (what, name) and one.is_on(now)), None)
        if before is not None and (before.until, before.why) == (pause.until, pause.why):
            return None
        if len(others) >= MOST_PAUSES:
            raise OperationError(f"{MOST_PAUSES} pauses are in force, which is the most; resume one first", "conflict")
        return [*others, pause if before is None else replace(pause, since=before.since)]

    details = {"reason": why, "until": time_text(ends)}
    changed = await _changed(operator, change, "queue.pause", pause, dry_run=dry_run, **details)
    return {**_fields(operator, pause), "paused": True, "changed": changed, **await _end(operator, pause, dry_run)}


async def resume_queue(
    operator: Operator,
    *,
    type: str | None = None,  # noqa: A002 - the name of the flag, and of the field
    tenant: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Resume a paused job type or tenant, by the name under which it was paused."""
    what, name = checked_subject(type, tenant)
    now, pause = operator.store.moment().wall, Pause(what, name)

    def change(pauses: list[Pause]) -> list[Pause] | None:
        left = [one for one in pauses if (one.what, one.name) != (what, name) and one.is_on(now)]
        return left if any((one.what, one.name) == (what, name) and one.is_on(now) for one in pauses) else None

    changed = await _changed(operator, change, "queue.resume", pause, dry_run=dry_run)
    end = await _end(operator, None, dry_run)
    return {"what": what, "name": operator.redactor(name), "paused": False, "changed": changed, **end}


async def _changed(
    operator: Operator, change: Any, action: str, pause: Pause, *, dry_run: bool, **details: Any
) -> bool:
    """Whether the pauses were changed, or would be."""
    if dry_run:
        return change(await read_pauses(operator.store)) is not None
    event = operator.event(action, str(pause), **{name: one for name, one in details.items() if one})
    return await change_pauses(operator.store, change, events=[event])


async def _end(operator: Operator, pause: Pause | None, dry_run: bool) -> dict[str, Any]:
    """The last fields of an answer: a note about a type that no running system has, which may be misspelt."""
    note = None
    if pause is not None and pause.what == "type":
        systems = await living_systems(operator.store)
        known = {kind for one in systems for kind in one["blocks"]}
        if systems and not any(pause.holds(kind, "", pause.since) for kind in known):
            note = f"no running system has a step of this type; they have: {', '.join(sorted(known)[:20])}"
    return {"note": note, "actor": operator.actor, "dry_run": dry_run}


def checked_subject(kind: str | None, tenant: str | None) -> tuple[str, str]:
    """The job type or the tenant that is meant, exactly one of them."""
    if (kind is None) == (tenant is None):
        raise ParameterUseError("type", f"{'is missing' if kind is None else 'not together with a tenant'}; {ONE_OF}")
    what, name = ("tenant", tenant) if kind is None else ("type", kind)
    assert name is not None
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME or (what == "type" and " " in name):
        accepted = "a job type without blanks, in which * stands for any text" if what == "type" else "a tenant's name"
        raise ParameterError(what, name, f"{accepted}, of at most {LONGEST_NAME} characters")
    return what, name


def until_ms(until: str | None, now: int) -> int | None:
    """The end of a pause in milliseconds UTC; None for one without an end."""
    if until is None:
        return None
    seconds = duration_s(until)
    if seconds is None:
        try:
            ends = int(datetime.fromisoformat(until).timestamp() * 1000)
        except (ValueError, OverflowError, OSError):
            raise ParameterError("until", until[:60], _UNTIL) from None
    else:
        ends = now + int(seconds * 1000)
    if not now < ends <= now + LONGEST_S * 1000:
        raise ParameterError("until", until[:60], _UNTIL)
    return ends


def _fields(operator: Operator, pause: Pause) -> dict[str, Any]:
    return {
        "what": pause.what,
        "name": operator.redactor(pause.name),
        "since": time_text(pause.since),
        "until": time_text(pause.until),
        "by": operator.redactor(pause.who) or None,
        "reason": operator.redactor(pause.why) or None,
    }
