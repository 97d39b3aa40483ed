"""
Idempotency keys: the states of a key, and who may run the effect under it.

    absent ──claim──▶ in progress ──▶ done | failed            a result for every later caller
                        │   ▲  └────▶ released                 nothing happened: the next caller may run it
                        │   └──takeover, with a higher fence   the lease expired
                        └──────────▶ unknown                   guarded, outcome not known: an operator resolves it

Every function takes the current record and returns a value; a store applies it in one atomic step. Leases are measured
in steady time, retention in wall time. Pure: no clock is read, no number is drawn.
"""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256

from msgspec import Struct, structs

from reefknot.core import checks
from reefknot.core.canonical import fingerprint
from reefknot.core.time import Moment
from reefknot.errors import KeyTooLongError, ParameterError, ResultTooLargeError

LONGEST_KEY = 512
"""The longest key, in bytes of UTF-8."""
KEY_RETENTION_S = 7 * 86_400.0
"""How long a key is remembered after its work has ended, unless a store is opened with another retention."""


class KeyState(StrEnum):
    IN_PROGRESS = "in_progress"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"
    UNKNOWN = "unknown"


class KeyRecord(Struct, frozen=True, gc=False, array_like=True):
    """The stored record of one key. `result`, `failure` and `metadata` are JSON text."""

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


class Claim(Struct, frozen=True, gc=False):
    """The proof of ownership that every write of an owner carries."""

    key: str
    owner: str
    fence: int


class ClaimRequest(Struct, frozen=True, gc=False):
    """A caller's request for a key. `owner` is unique to this call; an empty fingerprint is not compared."""

    key: str
    owner: str
    fingerprint: str
    lease_ms: int
    guard: bool = False


class Claimed(Struct, frozen=True, gc=False):
    """The caller owns the key. `taken_over`: an earlier owner's lease expired, and it may have run the effect."""

    record: KeyRecord
    taken_over: bool = False

    @property
    def claim(self) -> Claim:
        return Claim(self.record.key, self.record.owner, self.record.fence)


class Hit(Struct, frozen=True, gc=False):
    """The key is done or failed: the record holds the result."""

    record: KeyRecord


class Busy(Struct, frozen=True):
    """Another owner holds the key, for at most `remaining_ms` unless it renews its lease."""

    record: KeyRecord
    remaining_ms: int


class Conflict(Struct, frozen=True):
    """The key was used with another payload, whose fingerprint differs."""

    record: KeyRecord
    given: str


class Uncertain(Struct, frozen=True):
    """The effect may have happened and must not happen twice."""

    record: KeyRecord


ClaimResult = Claimed | Hit | Busy | Conflict | Uncertain


class Lost(Struct, frozen=True):
    """The claim is not the current one: the owner's write is refused."""

    record: KeyRecord | None


class Done(Struct, frozen=True, gc=False):
    """The effect happened, with this result (JSON text)."""

    result: str
    metadata: str | None = None


class Failed(Struct, frozen=True, gc=False):
    """The effect failed permanently, with this failure (JSON text)."""

    failure: str
    metadata: str | None = None


class Released(Struct, frozen=True):
    """Nothing happened: the next caller may run the effect."""


class Unknown(Struct, frozen=True):
    """The owner cannot tell whether the effect happened."""

    failure: str | None = None


Ending = Done | Failed | Released | Unknown

# Looked up once: on Python 3.11 the lookup of an enumeration's member costs as much as making a small record.
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
    """The key of an operation: the same for the same arguments, whatever the order inside the parameters."""
    return fingerprint(
        {
            "operation": operation,
            "tenant_id": tenant_id,
            "correlation_id": correlation_id,
            "additional_params": {} if additional_params is None else dict(additional_params),
        }
    )


def header_key(key: str) -> str:
    """The idempotency key as the header of a request carries it: as it is, or as its SHA-256 if it is not ASCII."""
    if key.isascii() and key.replace("\t", " ").isprintable():
        return key
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def checked_key(key: str) -> str:
    """The key, if it is valid; an error otherwise."""
    accepted = f"a text of 1 to {LONGEST_KEY} bytes"
    if not checks.text("key", key, accepted):
        raise ParameterError("key", key, accepted)
    try:
        length = len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError as error:
        raise ParameterError("key", key, "text without half surrogate pairs") from error
    if length > LONGEST_KEY:
        raise KeyTooLongError(length=length, limit=LONGEST_KEY)
    return key


def claim(
    record: KeyRecord | None, request: ClaimRequest, *, fence: int, now: Moment, retention_ms: int
) -> ClaimResult:
    """
    The answer to a request for a key.

    `fence` is higher than every fence the store gave out before. The result's record is the one to store; when it is
    the very record that was passed in, nothing has changed.
    """
    if record is None or is_spent(record, now):
        return Claimed(_held(request, fence, now, retention_ms))
    if record.fingerprint and request.fingerprint and record.fingerprint != request.fingerprint:
        return Conflict(record, request.fingerprint)
    match record.state:
        case KeyState.DONE | KeyState.FAILED:
            return Hit(record)
        case KeyState.UNKNOWN:
            return Uncertain(record)
        case KeyState.RELEASED:
            return Claimed(_held(request, fence, now, retention_ms, since=record.created_at))
        case _:
            return _claim_held(record, request, fence, now, retention_ms)


def _claim_held(record: KeyRecord, request: ClaimRequest, fence: int, now: Moment, retention_ms: int) -> ClaimResult:
    if record.owner == request.owner:  # the same call once more, after its first answer was lost
        return Claimed(record)
    if now.steady < record.lease_until:
        return Busy(record, record.lease_until - now.steady)
    if record.guard:
        return Uncertain(structs.replace(record, state=KeyState.UNKNOWN, updated_at=now.wall))
    return Claimed(_held(request, fence, now, retention_ms, since=record.created_at), taken_over=True)


def _held(request: ClaimRequest, fence: int, now: Moment, retention_ms: int, since: int | None = None) -> KeyRecord:
    return KeyRecord(
        key=request.key,
        state=_IN_PROGRESS,
        owner=request.owner,
        fence=fence,
        lease_until=now.steady + request.lease_ms,
        lease_ms=request.lease_ms,
        fingerprint=request.fingerprint,
        guard=request.guard,
        result=None,
        failure=None,
        metadata=None,
        created_at=now.wall if since is None else since,
        updated_at=now.wall,
        expires_at=now.wall + request.lease_ms + retention_ms,
    )


def is_spent(record: KeyRecord, now: Moment) -> bool:
    """Whether retention is over. Never for a live lease, an unknown outcome, or a guarded key whose owner vanished."""
    if record.expires_at > now.wall or record.state not in _MAY_BE_CLAIMED_ANEW:
        return False
    return record.state is not KeyState.IN_PROGRESS or (not record.guard and record.lease_until <= now.steady)


def renew(record: KeyRecord | None, claim: Claim, *, now: Moment, lease_ms: int, retention_ms: int) -> KeyRecord | Lost:
    """Extend the lease. An expired lease that was not taken over is still the owner's."""
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
    Record the ending. The same ending once more changes nothing; a different one is refused.

    An outcome that is unknown only because its owner was slow may still be recorded by that owner.
    """
    if record is None or not _owns(record, claim):
        return Lost(record)
    ended = _ended(record, ending, now, retention_ms)
    if record.state in _OPEN:
        return ended
    same = (record.state, record.result, record.failure) == (ended.state, ended.result, ended.failure)
    return record if same else Lost(record)


def resolve(record: KeyRecord | None, ending: Ending, *, now: Moment, retention_ms: int) -> KeyRecord | Lost:
    """Record the ending of an unknown outcome, as an operator found it out."""
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
    return KeyRecord(  # all fields by position: a third of the time that `replace` takes
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


def checked_ending(ending: Ending, limit: int) -> None:
    """Raise `ResultTooLargeError` for an ending that is larger than a record may be."""
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
