"""
The streams of a model of JetStream: messages by sequence and subject, compare-and-set, atomic batches, consumers.

Nothing here waits or sends: `tests.simulation.broker` has the connections, the clock and the faults. Numbers and texts
of refusals are the server's; `tests/simulation/test_broker.py` compares the model with a real one.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

LAST = "Nats-Expected-Last-Sequence"
EXPECTED, OVER = "Nats-Expected-Last-Subject-Sequence", "Nats-Expected-Last-Subject-Sequence-Subject"
BATCH, PLACE, COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
BATCH_S, DUPLICATE_S = 10.0, 120.0
ROUNDING_S = 2e-6
"""The time of a message is shown in microseconds."""
Headers = Mapping[str, str]


class Refusal(Exception):
    """JetStream's refusal of a request, by its number."""

    def __init__(self, number: int, text: str, code: int = 400) -> None:
        super().__init__(text)
        self.error = {"code": code, "err_code": number, "description": text}


@dataclass(slots=True)
class Stored:
    subject: str
    seq: int
    body: bytes
    headers: Headers
    at: float


@lru_cache(maxsize=65536)
def matches(wanted: str, subject: str) -> bool:
    """Whether a subject is one of those that a filter with wildcards means."""
    if wanted == subject:
        return True
    parts, tokens = wanted.split("."), subject.split(".")
    if parts[-1] == ">":
        parts = parts[:-1]
        if len(tokens) <= len(parts):
            return False
        tokens = tokens[: len(parts)]
    return len(parts) == len(tokens) and all(part in ("*", token) for part, token in zip(parts, tokens, strict=True))


def overlap(one: str, other: str) -> bool:
    return matches(one, other.replace("*", "x").replace(">", "x")) or matches(
        other, one.replace("*", "x").replace(">", "x")
    )


class Stream:
    """One stream. `now` is given to whatever depends on time."""

    def __init__(self, config: dict[str, Any], now: float, stored: Callable[[Stored], None]) -> None:
        self.config = config
        self._stored = stored
        self.created = now
        self.last = 0
        self.purged = 0
        self.messages: dict[int, Stored] = {}
        self.consumers: dict[str, Consumer] = {}
        self._by_subject: dict[str, dict[int, None]] = {}
        self._ends: dict[str, dict[str, None]] = {}
        """Subjects by their last token."""
        self._expiring: list[tuple[float, int]] = []
        self._batches: dict[str, tuple[float, list[tuple[str, bytes, Headers]]]] = {}
        self._ids: dict[str, tuple[float, int]] = {}

    def takes(self, subject: str) -> bool:
        return any(matches(one, subject) for one in self.config["subjects"])

    @property
    def first(self) -> int:
        return next(iter(self.messages), max(self.purged, self.last) + 1 if self.last else 0)

    def state(self) -> dict[str, int]:
        return {"messages": len(self.messages), "first_seq": self.first, "last_seq": self.last}

    # ---- reading ----------------------------------------------------------------------------------------------------

    def subjects(self, wanted: str) -> Iterator[str]:
        """The subjects of a filter that have a message."""
        end = wanted.rpartition(".")[2]
        some = self._by_subject if end in ("*", ">") else self._ends.get(end, {})
        return (one for one in some if matches(wanted, one))

    def last_of(self, subject: str) -> int:
        return next(reversed(self._by_subject[subject]))

    def last_on(self, wanted: str) -> int:
        """The sequence of the last message of a filter; 0 when there is none."""
        return max((self.last_of(one) for one in self.subjects(wanted)), default=0)

    def next_on(self, wanted: str, first: int) -> int:
        """The sequence of the first message of a filter from this one on; 0 when there is none."""
        return next((seq for seq, one in self.messages.items() if seq >= first and matches(wanted, one.subject)), 0)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def publish(self, subject: str, body: bytes, headers: Headers, now: float) -> dict[str, Any] | None:
        """The answer to a message; None for one of a batch that goes on."""
        self.expire(now)
        if BATCH in headers:
            return self._publish_batch(subject, body, headers, now)
        known = self._ids.get(headers.get("Nats-Msg-Id", ""))
        if known is not None and now - known[0] < self.duplicate_window:
            return {"stream": self.config["name"], "seq": known[1], "duplicate": True}
        self._check([(subject, body, headers)])
        sequence = self._store(subject, body, headers, now)
        if "Nats-Msg-Id" in headers:
            self._ids[headers["Nats-Msg-Id"]] = now, sequence
        return {"stream": self.config["name"], "seq": sequence}

    @property
    def duplicate_window(self) -> float:
        return float(self.config.get("duplicate_window", 0) / 1e9 or DUPLICATE_S)

    def _publish_batch(self, subject: str, body: bytes, headers: Headers, now: float) -> dict[str, Any] | None:
        if not self.config.get("allow_atomic"):
            raise Refusal(10174, "atomic publish is disabled")
        name, place = headers[BATCH], int(headers[PLACE])
        if place == 1:
            self._batches[name] = now, []
        began, found = self._batches.get(name, (now, []))
        if now - began > BATCH_S or len(found) != place - 1:
            self._batches.pop(name, None)
            if COMMIT in headers:
                raise Refusal(10176, "atomic publish batch is incomplete")
            return None
        found.append((subject, body, headers))
        if COMMIT not in headers:
            return None
        del self._batches[name]
        self._check(found)
        last = [self._store(*one, now) for one in found][-1]
        return {"stream": self.config["name"], "seq": last, "batch": name, "count": len(found)}

    def _check(self, messages: list[tuple[str, bytes, Headers]]) -> None:
        """Refuse all of them if one of them may not be stored. Expectations are those of before the batch."""
        written: set[str] = set()
        for subject, _, headers in messages:
            if "Nats-TTL" in headers and not self.config.get("allow_msg_ttl"):
                raise Refusal(10166, "per-message TTL is disabled")
            if LAST in headers and self.last != int(headers[LAST]):
                raise Refusal(10071, f"wrong last sequence: {self.last}")
            if EXPECTED in headers:
                over = headers.get(OVER, subject)
                if over in written:
                    raise Refusal(10164, "wrong last sequence")
                found = self.last_on(over)
                if found != int(headers[EXPECTED]):
                    raise Refusal(10071, f"wrong last sequence: {found}")
            written.add(subject)
        most = self.config.get("max_msgs", -1)
        if self.config.get("discard") == "new" and 0 <= most < len(self.messages) + len(messages):
            raise Refusal(10077, "maximum messages exceeded", 503)

    def _store(self, subject: str, body: bytes, headers: Headers, now: float) -> int:
        self.last += 1
        self.messages[self.last] = Stored(subject, self.last, body, headers, now)
        self._stored(self.messages[self.last])
        of_subject = self._by_subject.setdefault(subject, {})
        of_subject[self.last] = None
        self._ends.setdefault(subject.rpartition(".")[2], {})[subject] = None
        most = self.config.get("max_msgs_per_subject", -1)
        while 0 < most < len(of_subject):
            self.remove(next(iter(of_subject)))
        if "Nats-TTL" in headers:
            heapq.heappush(self._expiring, (now + int(headers["Nats-TTL"].rstrip("s")), self.last))
        return self.last

    def remove(self, seq: int) -> bool:
        message = self.messages.pop(seq, None)
        if message is None:
            return False
        of_subject = self._by_subject[message.subject]
        del of_subject[seq]
        if not of_subject:
            del self._by_subject[message.subject]
            end = self._ends[message.subject.rpartition(".")[2]]
            del end[message.subject]
        return True

    def purge(self, before: int | None, wanted: str) -> int:
        gone = [seq for seq in self.messages if before is None or seq < before]
        gone = [seq for seq in gone if matches(wanted, self.messages[seq].subject)]
        self.purged = max([self.purged, *gone[-1:]])
        return sum(map(self.remove, gone))

    def expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            self.remove(heapq.heappop(self._expiring)[1])
        self._batches = {name: one for name, one in self._batches.items() if now - one[0] <= BATCH_S}

    def restart(self) -> None:
        """Forget what a server has in memory alone."""
        self._batches = {}
        self.consumers = {name: one for name, one in self.consumers.items() if one.is_durable}
        for one in self.consumers.values():
            one.requests = []


@dataclass(eq=False, slots=True)
class Request:
    """A request for messages of a consumer that is not served in full yet."""

    reply: str
    left: int
    expires: float
    heartbeat: float
    bytes_left: int


@dataclass(eq=False)
class Consumer:
    """How far one reader of a stream has come."""

    stream: Stream
    config: dict[str, Any]
    now: float
    delivered: int = 0
    requests: list[Request] = field(default_factory=list)
    unacked: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By sequence: when it is delivered again, and how often it was delivered."""

    def __post_init__(self) -> None:
        config = self.config
        self.name = config.get("durable_name") or config["name"]
        self.filters = config.get("filter_subjects") or [config.get("filter_subject", ">")]
        self.is_durable = "durable_name" in config
        self.deliver_to = config.get("deliver_subject", "")
        self.heartbeat = config.get("idle_heartbeat", 0) / 1e9
        self.inactive_after = config.get("inactive_threshold", 0) / 1e9
        self.has_acks = config.get("ack_policy", "explicit") != "none"
        self.ack_wait = config.get("ack_wait", 30_000_000_000) / 1e9
        self.active_at = self.sent_at = self.now
        self._next = config.get("opt_start_seq", 1)
        if config["deliver_policy"] == "by_start_time":
            began = datetime.fromisoformat(config["opt_start_time"]).timestamp() - ROUNDING_S
            later = (seq for seq, one in self.stream.messages.items() if one.at >= began)
            self._next = next(later, self.stream.last + 1)
        self._chosen: list[int] = []
        if config["deliver_policy"] == "last_per_subject":
            subjects = {one for wanted in self.filters for one in self.stream.subjects(wanted)}
            self._chosen = sorted(map(self.stream.last_of, subjects), reverse=True)
            self._next = self.stream.last + 1

    def _means(self, seq: int) -> bool:
        message = self.stream.messages.get(seq)
        return message is not None and any(matches(one, message.subject) for one in self.filters)

    def pending(self) -> int:
        """How many messages there are to deliver for the first time."""
        chosen = sum(map(self._means, self._chosen))
        if self._next > self.stream.last:
            return chosen
        return chosen + len([seq for seq in self.stream.messages if seq >= self._next and self._means(seq)])

    def take(self, now: float) -> tuple[Stored, int] | None:
        """The next message to deliver, and how often it was: first those whose time for an acknowledgement is over."""
        for seq, (due, times) in self.unacked.items():
            if due <= now:
                if seq not in self.stream.messages:
                    del self.unacked[seq]
                    return self.take(now)
                return self._delivers(seq, times + 1, now)
        while self._chosen:
            seq = self._chosen.pop()
            if self._means(seq):
                return self._delivers(seq, 1, now)
        while self._next <= self.stream.last:
            seq, self._next = self._next, self._next + 1
            if self._means(seq):
                return self._delivers(seq, 1, now)
        return None

    def _delivers(self, seq: int, times: int, now: float) -> tuple[Stored, int]:
        self.delivered += 1
        if self.has_acks:
            self.unacked[seq] = now + self.ack_wait, times
        return self.stream.messages[seq], times

    def acknowledge(self, seq: int, answer: bytes, now: float) -> None:
        """Take an acknowledgement, however late it is."""
        known = self.unacked.get(seq)
        if answer in (b"", b"+ACK", b"+TERM"):
            self.unacked.pop(seq, None)
            if self.stream.config.get("retention") == "workqueue":
                self.stream.remove(seq)
        elif known is not None:
            self.unacked[seq] = now + (self.ack_wait if answer == b"+WPI" else _delay(answer)), known[1]


def _delay(answer: bytes) -> float:
    """The seconds that a refusal names: `-NAK {"delay": NANOSECONDS}`."""
    options = answer.removeprefix(b"-NAK").strip()
    return float(json.loads(options)["delay"] / 1e9) if options else 0.0
