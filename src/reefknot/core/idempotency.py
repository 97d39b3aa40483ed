"""
Who may do it, and what came of it.

One key goes

    absent ──claim──▶ in progress ──▶ done | failed            a result for every later caller
                        │   ▲  └────▶ released                 nothing happened: the next caller may
                        │   └──takeover, with a higher fence   the lease ran out
                        └──────────▶ unknown                   guarded, and nobody can tell: a person resolves it

Every function takes the record as it stands and answers with a value; a store applies it in one atomic step. Leases are
measured in steady time, retention in wall time. Nothing here reads a clock or invents a number.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, structs

from reefknot.core.canonical import fingerprint
from reefknot.core.time import Moment
from reefknot.errors import KeyTooLongError, ParameterError, ParameterTypeError, ResultTooLargeError

LONGEST_KEY = 512
"""Bytes of a key in UTF-8."""


class KeyState(StrEnum):
    IN_PROGRESS = "in_progress"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"
    UNKNOWN = "unknown"


class KeyRecord(Struct, frozen=True, array_like=True):
    """Everything a store keeps of one key. `result`, `failure` and `metadata` are JSON text."""

    key: str
    state: KeyState
    owner: str
    fence: int
    lease_until: int
    lease_ms: int
    fingerprint: str
    guard: bool
    result: str | None
    failure: str | None
    metadata: str | None
    created_at: int
    updated_at: int
    expires_at: int


class Claim(Struct, frozen=True):
    """What an owner shows to prove that it still is the owner."""

    key: str
    owner: str
    fence: int


class ClaimRequest(Struct, frozen=True):
    """A caller asks for a key. `owner` is unique to this call; an empty fingerprint is not compared."""

    key: str
    owner: str
    fingerprint: str
    lease_ms: int
    guard: bool = False


class Claimed(Struct, frozen=True):
    """The key is the caller's. `taken_over`: an earlier owner let its lease run out and may have done the work."""

    record: KeyRecord
    taken_over: bool = False

    @property
    def claim(self) -> Claim:
        return Claim(self.record.key, self.record.owner, self.record.fence)


class Hit(Struct, frozen=True):
    """It is finished: this is what came of it."""

    record: KeyRecord


class Busy(Struct, frozen=True):
    """Somebody holds the key, for `remaining_ms` at most unless it renews."""

    record: KeyRecord
    remaining_ms: int


class Conflict(Struct, frozen=True):
    """The key belongs to another payload."""

    record: KeyRecord
    given: str


class Uncertain(Struct, frozen=True):
    """It may have happened and must not happen twice."""

    record: KeyRecord


Answer = Claimed | Hit | Busy | Conflict | Uncertain


class Lost(Struct, frozen=True):
    """The claim is not the current one: what its owner wanted to write is refused."""

    record: KeyRecord | None


class Done(Struct, frozen=True):
    """It happened, with this result (JSON text)."""

    result: str
    metadata: str | None = None


class Failed(Struct, frozen=True):
    """It failed for good, with this failure (JSON text)."""

    failure: str
    metadata: str | None = None


class Released(Struct, frozen=True):
    """Nothing happened: whoever comes next may try."""


class Unknown(Struct, frozen=True):
    """Nobody knows whether it happened."""

    failure: str | None = None


Ending = Done | Failed | Released | Unknown

# Looked up once: on Python 3.11 finding a member of an enumeration costs as much as making a small record.
_IN_PROGRESS = KeyState.IN_PROGRESS
_DONE = KeyState.DONE
_OPEN = (KeyState.IN_PROGRESS, KeyState.UNKNOWN)
_MAY_BE_CLAIMED_ANEW = frozenset({KeyState.DONE, KeyState.FAILED, KeyState.RELEASED, KeyState.IN_PROGRESS})


def compute_key(
    operation: str,
    tenant_id: str | None = None,
    correlation_id: str | None = None,
    additional_params: Mapping[str, object] | None = None,
) -> str:
    """The key of an operation: the same for the same four, whatever the order inside the parameters."""
    return fingerprint(
        {
            "operation": operation,
            "tenant_id": tenant_id,
            "correlation_id": correlation_id,
            "additional_params": {} if additional_params is None else dict(additional_params),
        }
    )


def checked_key(key: str) -> str:
    """The key, if it can be one."""
    if not isinstance(key, str):
        raise ParameterTypeError("key", key, f"a text of 1 to {LONGEST_KEY} bytes")
    if not key:
        raise ParameterError("key", key, f"a text of 1 to {LONGEST_KEY} bytes")
    try:
        length = len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError as error:
        raise ParameterError("key", key, "text without half surrogate pairs") from error
    if length > LONGEST_KEY:
        raise KeyTooLongError(length=length, limit=LONGEST_KEY)
    return key


def claim(record: KeyRecord | None, asking: ClaimRequest, *, fence: int, now: Moment, retention_ms: int) -> Answer:
    """
    May this caller do it?

    `fence` is higher than every fence the store gave out before. The answer's record is the one to keep; when it is the
    very record that was passed in, nothing has changed.
    """
    if record is None or is_spent(record, now):
        return Claimed(_held(asking, fence, now, retention_ms))
    if record.fingerprint and asking.fingerprint and record.fingerprint != asking.fingerprint:
        return Conflict(record, asking.fingerprint)
    match record.state:
        case KeyState.DONE | KeyState.FAILED:
            return Hit(record)
        case KeyState.UNKNOWN:
            return Uncertain(record)
        case KeyState.RELEASED:
            return Claimed(_held(asking, fence, now, retention_ms, since=record.created_at))
        case _:
            return _claim_held(record, asking, fence, now, retention_ms)


def _claim_held(record: KeyRecord, asking: ClaimRequest, fence: int, now: Moment, retention_ms: int) -> Answer:
    if record.owner == asking.owner:  # the same call once more, its first answer having been lost
        return Claimed(record)
    if now.steady < record.lease_until:
        return Busy(record, record.lease_until - now.steady)
    if record.guard:
        return Uncertain(structs.replace(record, state=KeyState.UNKNOWN, updated_at=now.wall))
    return Claimed(_held(asking, fence, now, retention_ms, since=record.created_at), taken_over=True)


def _held(asking: ClaimRequest, fence: int, now: Moment, retention_ms: int, since: int | None = None) -> KeyRecord:
    return KeyRecord(
        key=asking.key,
        state=_IN_PROGRESS,
        owner=asking.owner,
        fence=fence,
        lease_until=now.steady + asking.lease_ms,
        lease_ms=asking.lease_ms,
        fingerprint=asking.fingerprint,
        guard=asking.guard,
        result=None,
        failure=None,
        metadata=None,
        created_at=now.wall if since is None else since,
        updated_at=now.wall,
        expires_at=now.wall + asking.lease_ms + retention_ms,
    )


def is_spent(record: KeyRecord, now: Moment) -> bool:
    """Past its retention. A live lease and an unknown outcome never are, nor is a guarded key whose owner vanished."""
    if record.expires_at > now.wall or record.state not in _MAY_BE_CLAIMED_ANEW:
        return False
    return record.state is not KeyState.IN_PROGRESS or (not record.guard and record.lease_until <= now.steady)


def renew(record: KeyRecord | None, claim: Claim, *, now: Moment, lease_ms: int, retention_ms: int) -> KeyRecord | Lost:
    """Hold the key for longer. A lease that ran out but that nobody took is still the owner's."""
    if record is None or not _owns(record, claim) or record.state is not KeyState.IN_PROGRESS:
        return Lost(record)
    return structs.replace(
        record,
        lease_until=now.steady + lease_ms,
        lease_ms=lease_ms,
        updated_at=now.wall,
        expires_at=now.wall + lease_ms + retention_ms,
    )


def finish(
    record: KeyRecord | None, claim: Claim, ending: Ending, *, now: Moment, retention_ms: int
) -> KeyRecord | Lost:
    """
    Write down what came of it. The same ending once more changes nothing; another one is refused.

    An outcome that was unknown only because its owner was slow may still be told by that owner.
    """
    if record is None or not _owns(record, claim):
        return Lost(record)
    ended = _ended(record, ending, now, retention_ms)
    if record.state in _OPEN:
        return ended
    return record if _same_ending(record, ended) else Lost(record)


def resolve(record: KeyRecord | None, ending: Ending, *, now: Moment, retention_ms: int) -> KeyRecord | Lost:
    """A person found out what happened to an unknown outcome."""
    if record is None or record.state is not KeyState.UNKNOWN:
        return Lost(record)
    return _ended(record, ending, now, retention_ms)


def _owns(record: KeyRecord, claim: Claim) -> bool:
    return record.owner == claim.owner and record.fence == claim.fence


def _ended(record: KeyRecord, ending: Ending, now: Moment, retention_ms: int) -> KeyRecord:
    result = failure = metadata = None
    match ending:
        case Done():
            state, result, metadata = _DONE, ending.result, ending.metadata
        case Failed():
            state, failure, metadata = KeyState.FAILED, ending.failure, ending.metadata
        case Unknown():
            state, failure = KeyState.UNKNOWN, ending.failure
        case _:
            state = KeyState.RELEASED
    return KeyRecord(  # all fields by their places: a third of the time that `replace` takes
        record.key,
        state,
        record.owner,
        record.fence,
        record.lease_until,
        record.lease_ms,
        record.fingerprint,
        record.guard,
        result,
        failure,
        metadata,
        record.created_at,
        now.wall,
        now.wall + retention_ms,
    )


def _same_ending(record: KeyRecord, ended: KeyRecord) -> bool:
    return (record.state, record.result, record.failure) == (ended.state, ended.result, ended.failure)


def checked_ending(ending: Ending, limit: int) -> None:
    """Refuse an ending that is larger than a record may be."""
    texts: tuple[str | None, ...]
    match ending:
        case Done():
            texts = (ending.result, ending.metadata)
        case Failed():
            texts = (ending.failure, ending.metadata)
        case Unknown():
            texts = (ending.failure,)
        case _:
            texts = ()
    size = sum([len(text) if text.isascii() else len(text.encode()) for text in texts if text])
    if size > limit:
        raise ResultTooLargeError(size=size, limit=limit)
