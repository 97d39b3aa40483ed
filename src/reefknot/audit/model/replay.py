"""
Replay: every recorded decision is decided again, and each difference is listed.

`decide`, `admit` and the choice of a worker get the inputs that were recorded, and the answer must be the same, and so
must every field of the event that follows from it. No effect is ever run: a replay is arithmetic over the audit log. An
event without inputs is counted as undecided; it is a difference if such decisions are always recorded with inputs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from reefknot.audit.model.event import (
    EVENT_CODES,
    Admission,
    AnyEvent,
    BookStored,
    BreakerEvent,
    DecisionRecord,
    RetryAttempt,
    RetryExhausted,
    RetryRefused,
    Routing,
    RulesStored,
    answer_of,
    decode,
)
from reefknot.audit.model.trail import FieldPair, Trails
from reefknot.core.decide import DECIDER_VERSION, REFUSED, decide
from reefknot.core.redaction import HIDDEN
from reefknot.errors import ParameterError
from reefknot.policy.model.book import content_hash
from reefknot.queue.model.admission import (
    ADMISSION_VERSION,
    HASH_DIGITS,
    Accept,
    AcceptDropping,
    Arrival,
    OverloadStatus,
    QueueView,
    Reject,
    RejectReason,
    Rules,
    admit,
    reported,
)
from reefknot.queue.model.admission import Admission as Answer
from reefknot.queue.model.destination_health import BreakerInputs
from reefknot.queue.model.routing import Chosen, RoutingInputs

MOST_BOOKS = 10_000
BUILTIN_BOOKS = frozenset(
    {"builtin", content_hash({"worker": {}, "retry_policies": {}, "operations": {}, "sources": {}})}
)
"""The hashes of a book without any written policy."""

NO_INPUTS = "no inputs"
_REFUSED = frozenset(reason.value for reason in REFUSED)
_FACTS = frozenset({RejectReason.INVALID.value, RejectReason.UNKNOWN_JOB_TYPE.value, RejectReason.OVERLOADED.value})
"""Reasons for which work is refused before its queue is asked: it cannot run here, or the store has failed."""
_encoder = msgspec.json.Encoder(order="sorted")


class Difference(Struct, frozen=True):
    """A recorded event whose decision, or whose book, comes out differently now."""

    position: int
    event_type: str
    recorded: str
    decided: str

    def __str__(self) -> str:
        return f"event {self.position} ({self.event_type}): recorded {self.recorded}, decided again {self.decided}"


class Replayed(Struct, frozen=True):
    """
    The result of a replay.

    `books_missing` are hashes of books that decisions refer to and no event contains: the decisions have their own
    policy, and are decided without. `rules_missing` are those of rules, without which admissions could not be decided
    again. `undecided` counts these, and the admissions and routings that have no inputs; `undecided_by` names them.
    """

    events: int
    decisions: int
    differences: tuple[Difference, ...]
    books: int = 0
    books_missing: tuple[str, ...] = ()
    kinds: dict[str, int] = {}
    """The decisions by kind: `retry`, `admission`, `routing`, `breaker`."""
    undecided: int = 0
    rules_missing: tuple[str, ...] = ()
    undecided_by: dict[str, int] = {}
    """The undecided events by kind and cause, such as `routing refused by a worker`."""


def replay(bodies: Iterable[bytes]) -> Replayed:
    """Decide every recorded decision again, and list each difference."""
    replayer = Replayer()
    differences = tuple(difference for body in bodies for difference in replayer.add(body))
    return replayer.result(differences)


class Replayer:
    """Replays event by event, so that a log of any length needs the same memory."""

    def __init__(self) -> None:
        self._events = 0
        self._kinds: Counter[str] = Counter()
        self._stored: set[str] = set()
        self._referenced: set[str] = set()
        self._rules: dict[str, Rules] = {}
        self._exact: set[str] = set()
        """Hashes of rules whose admissions have everything that their load level follows from."""
        self._trails = Trails()
        self._rules_missing: set[str] = set()
        self._undecided: Counter[str] = Counter()

    def add(self, body: bytes) -> list[Difference]:
        """Replay one more event; returns its differences."""
        self._events += 1
        try:
            event = decode(body)
        except msgspec.DecodeError as error:
            shown = body[:60].decode("utf-8", "replace").strip()
            return [Difference(self._events, "unreadable", shown, str(error))]
        redacted = HIDDEN.encode() in body
        coded = self._compared(event, {"event_code": (event.event_code, EVENT_CODES[event.event_type])})
        return self._decided(event, redacted=redacted) + self._followed(event, redacted=redacted) + coded

    def _decided(self, event: AnyEvent, *, redacted: bool) -> list[Difference]:
        """The differences of an event by its own inputs."""
        match event:
            case BookStored():
                return self._book(event, redacted)
            case RulesStored():
                return self._keep_rules(event, redacted)
            case RetryAttempt() | RetryExhausted() | RetryRefused():
                return self._decision(event)
            case Admission(inputs={"view": _} | {"rules_hash": _}):
                return self._admission(event)
            case Routing(inputs={"best": _}):
                return self._routing(event)
            case Admission() | Routing():
                return self._without_inputs(event)
            case BreakerEvent(inputs={"at": _}):
                return [] if redacted else self._breaker(event)
            case _:
                return []

    def _followed(self, event: AnyEvent, *, redacted: bool) -> list[Difference]:
        """The differences from what the earlier events of the same assignment say."""
        fields, undecided = self._trails.follow(event)
        if undecided:
            self._undecided[undecided] += 1
        return [] if redacted else self._compared(event, fields)

    def result(self, differences: tuple[Difference, ...] = ()) -> Replayed:
        """The whole replay. The built-in book is never missing: it is not recorded."""
        missing = self._referenced - self._stored - BUILTIN_BOOKS
        return Replayed(
            self._events,
            self._kinds.total(),
            differences,
            len(self._stored),
            tuple(sorted(missing)),
            dict(sorted(self._kinds.items())),
            self._undecided.total(),
            tuple(sorted(self._rules_missing)),
            dict(sorted(self._undecided.items())),
        )

    # ---- retries -----------------------------------------------------------------------------------------------------

    def _book(self, event: BookStored, redacted: bool) -> list[Difference]:
        """Compare a book with its hash, unless a secret was redacted in it."""
        self._note(self._stored, event.book_hash)
        hashed = content_hash(event.content)
        if redacted or hashed == event.book_hash:
            return []
        return [Difference(self._events, event.event_type, f"book {event.book_hash[:12]}", f"book {hashed[:12]}")]

    def _decision(self, event: RetryAttempt | RetryExhausted | RetryRefused) -> list[Difference]:
        record = event.decision
        self._kinds["retry"] += 1
        if record.book_hash is not None:
            self._note(self._referenced, record.book_hash)
        again = decided_again(record)
        if _encoder.encode(record) != _encoder.encode(again):
            return [Difference(self._events, event.event_type, _answer(record), _answer(again))]
        return self._compared(event, dict(_fields_of_decision(event, again)))

    def _note(self, among: set[str], hashed: str) -> None:
        if len(among) < MOST_BOOKS:
            among.add(hashed)

    # ---- admission and routing ---------------------------------------------------------------------------------------

    def _keep_rules(self, event: RulesStored, redacted: bool) -> list[Difference]:
        hashed = content_hash(event.content)[: max(HASH_DIGITS, len(event.rules_hash))]
        if hashed != event.rules_hash and not redacted:
            return [Difference(self._events, event.event_type, f"rules {event.rules_hash}", f"rules {hashed}")]
        named = event.content.get("resource_class", event.resource_class)  # older rules have no class in them
        try:
            if len(self._rules) < MOST_BOOKS:
                self._rules[event.rules_hash] = msgspec.convert(event.content, Rules)
                if event.version >= ADMISSION_VERSION:
                    self._exact.add(event.rules_hash)
        except msgspec.ValidationError as error:
            return [Difference(self._events, event.event_type, f"rules {event.rules_hash}", str(error))]
        return self._compared(event, {"resource_class": (event.resource_class, named)})

    def _admission(self, event: Admission) -> list[Difference]:
        inputs = event.inputs or {}
        hashed = inputs.get("rules_hash")
        if hashed is None and "rules" not in inputs:
            return self._baseline(event)
        if hashed is not None and hashed not in self._rules:
            self._note(self._rules_missing, str(hashed))
            self._undecided["admission whose rules are missing"] += 1
            return []
        self._kinds["admission"] += 1
        try:
            rules = self._rules[hashed] if hashed is not None else msgspec.convert(inputs["rules"], Rules)
            arrival = msgspec.convert(inputs.get("newcomer", {}), Arrival)
            view = msgspec.convert(inputs.get("view", {}), QueueView)
            answer = admit(view, arrival, rules)
            level = _level_of(event, rules, exact=hashed in self._exact)
        except (msgspec.ValidationError, ZeroDivisionError) as error:
            return self._compared(event, {"inputs": ("", f"impossible inputs: {error}")})
        refused = answer.reason.value if isinstance(answer, Reject) else None
        return self._compared(
            event,
            {
                "status": (event.status, "rejected" if refused else "accepted"),
                "reason": (event.reason, refused),
                "message": (inputs.get("message", Accept().message), answer.message),
                "overload_status": level,
                "queue_depth": _depth_of(event, view, answer),
            },
        )

    def _baseline(self, event: Admission) -> list[Difference]:
        """The baseline has no rules: it admits everything until it drains."""
        inputs = event.inputs or {}
        view = inputs["view"]
        refused = RejectReason.DRAINING.value if isinstance(view, dict) and view.get("draining") else None
        status = "rejected" if refused else "accepted"
        level = OverloadStatus.OVERLOADED if inputs.get("isolated") else OverloadStatus.HEALTHY
        return self._compared(
            event,
            {
                "status": (event.status, status),
                "reason": (event.reason, refused),
                "overload_status": (event.overload_status, level.value),
            },
        )

    def _without_inputs(self, event: Admission | Routing) -> list[Difference]:
        """Count an event that cannot be decided again; a difference unless it records a fact, which has no inputs."""
        fact = _fact_of(event)
        self._undecided[f"{event.event_type} {fact or f'with {NO_INPUTS}'}"] += 1
        if fact:
            return []
        recorded = f"worker_id {event.worker_id!r}" if isinstance(event, Routing) else f"status {event.status!r}"
        shown = f"{recorded} with {NO_INPUTS}"
        return [Difference(self._events, event.event_type, shown, "nothing: its inputs are missing")]

    def _routing(self, event: Routing) -> list[Difference]:
        self._kinds["routing"] += 1
        try:
            choice = msgspec.convert(event.inputs, RoutingInputs).choose()
        except msgspec.ValidationError as error:
            return self._compared(event, {"inputs": ("", f"impossible inputs: {error}")})
        # Where no worker can be chosen, the assignment goes to the subject that workers share.
        worker_id, probe = (choice.worker_id, choice.probe) if isinstance(choice, Chosen) else ("", False)
        why = "probe" if probe else "chosen"
        return self._compared(event, {"worker_id": (event.worker_id, worker_id), "reason": (event.reason, why)})

    def _breaker(self, event: BreakerEvent) -> list[Difference]:
        """Decide again about a destination: the change of its breaker, or the wait of a job."""
        self._kinds["breaker"] += 1
        try:
            inputs = msgspec.convert(event.inputs, BreakerInputs)
        except msgspec.ValidationError as error:
            return self._compared(event, {"inputs": ("", f"impossible inputs: {error}")})
        state, probe_in, wait = inputs.decided()
        return self._compared(
            event,
            {
                "state": (event.state, state.value),
                "probe_seconds": (event.probe_seconds, probe_in),
                "wait_seconds": (event.wait_seconds, wait),
            },
        )

    def _compared(self, event: AnyEvent, fields: dict[str, FieldPair]) -> list[Difference]:
        """The differences of fields that follow from a decision, each by its name."""
        return [
            Difference(self._events, event.event_type, f"{name} {recorded!r}", f"{name} {decided!r}")
            for name, (recorded, decided) in fields.items()
            if recorded != decided
        ]


def _fact_of(event: Admission | Routing) -> str:
    """The fact that an event without inputs of a decision records; empty when such an event has inputs always."""
    inputs, reason = event.inputs or {}, event.reason or ""
    if isinstance(event, Routing):
        if event.worker_id is None and "classes" in inputs:
            return "of a class that no worker has"
        return "refused by a worker" if reason.startswith("refused: ") else ""
    if event.status == "accepted":
        return ""
    if "refused" in inputs:
        return "refused where it was submitted"
    return f"refused as {reason}" if reason in _FACTS else ""


def _level_of(event: Admission, rules: Rules, *, exact: bool) -> FieldPair:
    """
    The recorded load level of an admission, and the one that follows from its depth, isolation and hysteresis.

    An older admission, whose rules tell it by their version, has neither of the last two: its level is any that its
    depth may have with them.
    """
    depth, level, inputs = event.queue_depth, event.overload_status, event.inputs or {}
    if depth is None:
        return level, None
    held = msgspec.convert(inputs.get("held", OverloadStatus.HEALTHY), OverloadStatus)
    least = OverloadStatus.OVERLOADED if inputs.get("isolated") else OverloadStatus.HEALTHY
    follows = max(reported(held, depth, rules.size, rules.thresholds), least, key=lambda one: one.severity).value
    if exact:
        return level, follows
    possible = {reported(before, depth, rules.size, rules.thresholds).value for before in OverloadStatus}
    return level, level if level in possible | {OverloadStatus.OVERLOADED.value} else follows


def _depth_of(event: Admission, view: QueueView, answer: Answer) -> FieldPair:
    """
    The recorded depth behind an arrival, and the same if the queue before it allows it.

    A free slot may take the arrival at once, so that the queue does not grow. While a refusal, or room for the arrival,
    was seen to, the queue may have become another one.
    """
    depth = event.queue_depth
    if isinstance(answer, Reject | AcceptDropping) or depth in (view.depth, view.depth + 1):
        return depth, depth
    return depth, view.depth + 1


def _fields_of_decision(
    event: RetryAttempt | RetryExhausted | RetryRefused, record: DecisionRecord
) -> Iterator[tuple[str, FieldPair]]:
    """The fields that repeat a decision or its inputs for people. An end without an execution has no attempt."""
    failure, attempts = record.failure, record.history.attempts
    names = {failure.exception_type, failure.code}  # the code: in events of workers before they named the class
    if isinstance(event, RetryAttempt):
        kind, number = event.exception_type, event.attempt_number
        yield "event_type", (event.event_type, "retry_attempt" if record.answer == "again" else "retry_exhausted")
        yield "attempt_number", (number, attempts)
        yield "max_attempts", (event.max_attempts, record.policy.max_attempts)
        yield "delay_seconds", (event.delay_seconds, record.delay)
        yield "exception_type", (kind, kind if kind in names else failure.exception_type)
        yield "exception_message", (event.exception_message, failure.message)
        return
    kind, number = event.final_exception_type, event.total_attempts
    ended = "retry_refused" if record.answer in _REFUSED else "retry_exhausted"
    yield "event_type", (event.event_type, "retry_attempt" if record.answer == "again" else ended)
    yield "total_attempts", (number, 0 if number == 0 and attempts == 1 else attempts)
    yield "reason", (event.reason.value, record.answer)
    yield "final_exception_type", (kind, kind if kind in names else failure.exception_type)
    yield "final_exception_message", (event.final_exception_message, failure.message)


def decided_again(record: DecisionRecord) -> DecisionRecord:
    """The record with the same inputs, and the answer that `decide` gives now."""
    if record.decider_version != DECIDER_VERSION:
        return msgspec.structs.replace(record, answer=f"unknown decider version {record.decider_version}", delay=None)
    try:
        decision = decide(
            record.policy.policy(),
            record.history,
            record.failure.failure(),
            record.draw,
            verdict=record.verdict,
            throttle=record.throttle,
            breaker_open=record.breaker_open,
        )
    except (ParameterError, KeyError) as error:
        return msgspec.structs.replace(record, answer=f"impossible inputs: {error}", delay=None)
    answer, delay = answer_of(decision)
    return msgspec.structs.replace(record, answer=answer, delay=delay)


def _answer(record: DecisionRecord) -> str:
    return record.answer if record.delay is None else f"{record.answer} after {record.delay!r} s"
