"""
A model of a NATS server with JetStream, in one process and in virtual time, with seeded faults.

`Broker.clients()` puts its clients in the place of nats-py's, so the engine's own `Connection` talks to it and all of
the engine above runs as it is. A connection keeps the order of what is sent over it, as TCP does. Whatever may happen
between a client and a server happens by a seeded draw: requests that get lost, answers that get lost after the message
was stored, deliveries that get lost or come twice, connections that stall or break, with or without what was buffered;
and, when the simulation says so, servers that restart, streams without a leader, consumers that vanish.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any
from unittest.mock import patch

from msgspec import json

from reefknot.runtime.clocks import EPOCH
from tests.simulation.broker_client import Client, Subscription
from tests.simulation.broker_streams import BATCH, COMMIT, Consumer, Refusal, Request, Stored, Stream, matches, overlap

TICK_S = 0.25
API = "$JS.API."


@dataclass(frozen=True)
class Faults:
    """Chances for each message, and seconds."""

    latency: float = 0.003
    lost_request: float = 0.01
    lost_answer: float = 0.02
    lost_delivery: float = 0.005
    twice: float = 0.005
    stalled: float = 0.002
    longest_stall: float = 2.0


NO_FAULTS = Faults(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Broker:
    """The server: its streams, and everybody who is connected."""

    def __init__(self, rng: Random, *, faults: Faults = NO_FAULTS, wall: Callable[[], float] | None = None) -> None:
        self.rng = rng
        self.faults = faults
        self.streams: dict[str, Stream] = {}
        self.heard: Callable[[str, bytes], None] = lambda subject, body: None
        """Called with every message that is published."""
        self.stored: Callable[[Stored], None] = lambda message: None
        """Called with every message of a stream that is stored."""
        self.counts = dict.fromkeys(("lost_request", "lost_answer", "lost_delivery", "twice", "redelivered"), 0)
        self._wall = wall or (lambda: EPOCH + asyncio.get_running_loop().time())
        self._clients: list[Client] = []
        self._number = 0
        self._down_until = self._leaderless_until = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self._tick_loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def clients(self) -> Iterator[Broker]:
        """A scope in which new connections are to this model."""
        with patch("nats.aio.client.Client", lambda: Client(self)):
            yield self

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def spawn(self, loop: asyncio.AbstractEventLoop, work: Any) -> None:
        task = loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def joined(self, client: Client) -> None:
        self._clients.append(client)
        if self._tick_loop is None or self._tick_loop.is_closed() or self._ticking is None:
            self._tick_loop = client.loop
            self._ticking = client.loop.call_later(TICK_S, self._tick)

    def left(self, client: Client) -> None:
        if client in self._clients:
            self._clients.remove(client)

    # ---- what goes wrong --------------------------------------------------------------------------------------------

    @property
    def is_down(self) -> bool:
        return self._wall() < self._down_until

    def restart(self, seconds: float) -> None:
        """Stop the server, and start it on its files so long after."""
        self._down_until = self._wall() + seconds
        for stream in self.streams.values():
            stream.restart()
        for client in self._clients:
            client.lose(0.0)

    def lose_a_connection(self) -> None:
        living = [one for one in self._clients if one.is_open]
        if living:
            self.rng.choice(living).lose(self.rng.random() * 3)

    def lose_leader(self, seconds: float) -> None:
        self._leaderless_until = self._wall() + seconds

    def lose_consumers(self) -> None:
        for stream in self.streams.values():
            stream.consumers = {name: one for name, one in stream.consumers.items() if one.is_durable}

    def _happens(self, what: str) -> bool:
        chance: float = getattr(self.faults, what)
        happens = chance > 0 and self.rng.random() < chance
        self.counts[what] += happens
        return happens

    # ---- messages ---------------------------------------------------------------------------------------------------

    def receive(self, subject: str, body: bytes, headers: dict[str, str], reply: str) -> None:
        """Take a message from a client."""
        self.heard(subject, body)
        if subject.startswith("$JS.ACK."):
            self._acknowledge(subject, body)
            return
        stream = None if subject.startswith(API) else self._stream_of(subject)
        is_jetstream = stream is not None or subject.startswith(API)
        if is_jetstream and self._wall() < self._leaderless_until:
            if reply and self.rng.random() < 0.5:
                self._send(reply, b"", {"Status": "503"})
            return
        if is_jetstream and (BATCH not in headers or COMMIT in headers) and self._happens("lost_request"):
            return
        answer: dict[str, Any] | None = None
        try:
            if stream is not None:
                answer = stream.publish(subject, body, headers, self._wall())
            elif subject.startswith(API):
                answer = self._api(subject[len(API) :], body, reply)
        except Refusal as refusal:
            answer = {"error": refusal.error}
        taken = self._send(subject, body, headers, reply=reply)
        if reply and answer is not None and not self._happens("lost_answer"):
            self._send(reply, json.encode(answer))
        elif reply and not taken and not is_jetstream:
            self._send(reply, b"", {"Status": "503"})
        if stream is not None:
            self._pump(stream)

    def _stream_of(self, subject: str) -> Stream | None:
        return next((one for one in self.streams.values() if one.takes(subject)), None)

    def _send(self, subject: str, body: bytes, headers: Any = None, *, reply: str = "") -> int:
        """Send to everybody who listens, and to one of each queue group. Returns how many."""
        found = self._listeners(subject)
        groups = {one.queue for one in found if one.queue}
        chosen = [one for one in found if not one.queue]
        chosen += [self.rng.choice([one for one in found if one.queue == group]) for group in sorted(groups)]
        for one in chosen:
            one.client.deliver(one, subject, body, headers, reply)
        return len(chosen)

    def _listeners(self, subject: str) -> list[Subscription]:
        return [
            one
            for client in self._clients
            if client.is_open and not (client.process is not None and client.process.dead)
            for one in client.subscriptions
            if one.is_known and matches(one.subject, subject)
        ]

    # ---- JetStream --------------------------------------------------------------------------------------------------

    def _api(self, name: str, body: bytes, reply: str) -> dict[str, Any] | None:
        asked = json.decode(body) if body else {}
        match name.split("."):
            case ["INFO"]:
                return {"type": "io.nats.jetstream.api.v1.account_info_response"}
            case ["STREAM", "NAMES"]:
                wanted = asked.get("subject", ">")
                every = [one.config for one in self.streams.values()]
                found = [one["name"] for one in every if any(overlap(wanted, other) for other in one["subjects"])]
                return {"streams": found}
            case ["STREAM", "CREATE", stream]:
                return self._create(stream, asked)
            case ["STREAM", action, stream] | ["STREAM", "MSG", action, stream]:
                return self._on_stream(action, self._known(stream), asked)
            case ["CONSUMER", "CREATE", stream, consumer, *_]:
                return self._create_consumer(self._known(stream), consumer, asked["config"])
            case ["CONSUMER", "INFO", stream, consumer]:
                known = self._known(stream).consumers[consumer]
                return {"num_waiting": len([one for one in known.requests if self._listeners(one.reply)])}
            case ["CONSUMER", "DELETE", stream, consumer]:
                if self._known(stream).consumers.pop(consumer, None) is None:
                    raise Refusal(10014, "consumer not found", 404)
                return {"success": True}
            case ["DIRECT", "GET", stream]:
                self._get_directly(self._known(stream), asked["multi_last"], reply)
                return None
            case ["CONSUMER", "MSG", "NEXT", stream, consumer]:
                self._ask(self._known(stream), consumer, asked, reply)
                return None
            case _:
                raise AssertionError(f"the model does not know {name}")

    def _known(self, name: str) -> Stream:
        if name not in self.streams:
            raise Refusal(10059, "stream not found", 404)
        self.streams[name].expire(self._wall())
        return self.streams[name]

    def _create(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        known = self.streams.get(name)
        if known is not None and known.config != config:
            raise Refusal(10058, "stream name already in use with a different configuration")
        for other in self.streams.values():
            if other is not known and any(overlap(a, b) for a in other.config["subjects"] for b in config["subjects"]):
                raise Refusal(10065, "subjects overlap with an existing stream")
        if known is None:
            self.streams[name] = Stream(config, self._wall(), lambda message: self.stored(message))
        return self._info(self.streams[name])

    def _info(self, stream: Stream) -> dict[str, Any]:
        created, now = _time(stream.created), _time(self._wall())
        return {"config": stream.config, "state": stream.state(), "created": created, "ts": now}

    def _on_stream(self, action: str, stream: Stream, asked: dict[str, Any]) -> dict[str, Any]:
        if action == "INFO":
            return self._info(stream)
        if action == "UPDATE":
            stream.config = asked
            return self._info(stream)
        if action == "PURGE":
            return {"success": True, "purged": stream.purge(asked.get("seq"), asked.get("filter", ">"))}
        if action == "DELETE":
            if "seq" not in asked:
                del self.streams[stream.config["name"]]
            elif not stream.remove(asked["seq"]):
                raise Refusal(10043, f"sequence {asked['seq']} not found")
            return {"success": True}
        assert action == "GET", action
        if "next_by_subj" in asked:
            sequence = stream.next_on(asked["next_by_subj"], asked["seq"])
        else:
            sequence = asked["seq"] if "seq" in asked else stream.last_on(asked["last_by_subj"])
        found = stream.messages.get(sequence)
        if found is None:
            raise Refusal(10037, "no message found", 404)
        message = {"subject": found.subject, "seq": found.seq, "time": _time(found.at)}
        if found.headers:
            lines = "".join(f"{name}: {value}\r\n" for name, value in found.headers.items())
            message["hdrs"] = b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode()
        if found.body:
            message["data"] = b64encode(found.body).decode()
        return {"message": message}

    def _get_directly(self, stream: Stream, subjects: list[str], reply: str) -> None:
        """Send the last message on each of these subjects, and then the end of the answer."""
        if self._happens("lost_answer"):
            return
        last = {
            one.subject: seq for seq, one in stream.messages.items() if any(matches(a, one.subject) for a in subjects)
        }
        for seq in sorted(last.values()):
            found = stream.messages[seq]
            headers = {**found.headers, "Nats-Subject": found.subject, "Nats-Sequence": str(seq)}
            self._send(reply, found.body, headers)
        self._send(reply, b"", {"Status": "204" if last else "404"})

    def _create_consumer(self, stream: Stream, name: str, config: dict[str, Any]) -> dict[str, Any]:
        known = stream.consumers.get(name)
        if known is None or not known.is_durable:
            known = stream.consumers[name] = Consumer(stream, config, self._wall())
        answer = {"name": name, "num_pending": known.pending()}
        self._pump(stream)
        return answer

    def _ask(self, stream: Stream, name: str, asked: dict[str, Any], reply: str) -> None:
        consumer = stream.consumers.get(name)
        if consumer is None:
            self._send(reply, b"", {"Status": "503"})
            return
        now = self._wall()
        expires = now + asked["expires"] / 1e9 if "expires" in asked else float("inf")
        heartbeat = asked.get("idle_heartbeat", 0) / 1e9
        request = Request(reply, asked["batch"], expires, heartbeat, asked.get("max_bytes", 1 << 60))
        before = consumer.delivered
        consumer.active_at = now
        consumer.requests.append(request)
        self._pump(stream)
        if asked.get("no_wait") and request in consumer.requests:
            consumer.requests.remove(request)
            self._send(reply, b"", {"Status": "404" if consumer.delivered == before else "408"})

    def _acknowledge(self, subject: str, body: bytes) -> None:
        _, _, name, consumer, _, seq, *_ = subject.split(".")
        stream = self.streams.get(name)
        if stream is not None and consumer in stream.consumers:
            stream.consumers[consumer].acknowledge(int(seq), body, self._wall())
            self._pump(stream)

    def _pump(self, stream: Stream) -> None:
        """Deliver what there is for the consumers of a stream."""
        now = self._wall()
        if now < self._leaderless_until:
            return
        for consumer in list(stream.consumers.values()):
            if consumer.deliver_to:
                if self._listeners(consumer.deliver_to):
                    self._push(consumer, now)
                continue
            while consumer.requests:
                request = consumer.requests[0]
                if not self._listeners(request.reply):
                    consumer.requests.pop(0)
                    continue
                found = consumer.take(now)
                if found is None:
                    break
                request.left -= 1
                request.bytes_left -= len(found[0].body)
                if request.left <= 0 or request.bytes_left <= 0:
                    consumer.requests.pop(0)
                self._deliver(consumer, request.reply, found, 0)

    def _push(self, consumer: Consumer, now: float) -> None:
        consumer.active_at = now
        ready = list(iter(lambda: consumer.take(now), None))
        consumer.delivered -= len(ready)
        for number, found in enumerate(ready, 1):
            consumer.delivered += 1
            self._deliver(consumer, consumer.deliver_to, found, len(ready) - number)
            if number % 50 == 0:
                self._send(consumer.deliver_to, b"", {"Status": "100"}, reply=f"$JS.FC.{consumer.name}.{number}")

    def _deliver(self, consumer: Consumer, to: str, found: Any, pending: int) -> None:
        message, times = found
        name, at = consumer.stream.config["name"], int(message.at * 1e9)
        reply = f"$JS.ACK.{name}.{consumer.name}.{times}.{message.seq}.{consumer.delivered}.{at}.{pending}"
        headers, body = dict(message.headers), message.body
        if consumer.config.get("headers_only"):
            headers, body = {**headers, "Nats-Msg-Size": str(len(body))}, b""
        consumer.sent_at = self._wall()
        self.counts["redelivered"] += times > 1
        for _ in range(0 if self._happens("lost_delivery") else 2 if self._happens("twice") else 1):
            for one in self._listeners(to):
                one.client.deliver(one, message.subject, body, headers, reply)

    def _tick(self) -> None:
        """Heartbeats, what is over, and what was not acknowledged in time."""
        self._ticking = None
        if not self._clients or self._tick_loop is None:
            return
        self._ticking = self._tick_loop.call_later(TICK_S, self._tick)
        now = self._wall()
        if now < self._leaderless_until or self.is_down:
            return
        for stream in self.streams.values():
            stream.expire(now)
            for consumer in list(stream.consumers.values()):
                self._tend(stream, consumer, now)
            self._pump(stream)

    def _tend(self, stream: Stream, consumer: Consumer, now: float) -> None:
        if consumer.deliver_to and self._listeners(consumer.deliver_to):
            consumer.active_at = now
            if consumer.heartbeat and now - consumer.sent_at >= consumer.heartbeat:
                consumer.sent_at = now
                headers = {"Status": "100", "Nats-Last-Consumer": str(consumer.delivered)}
                self._send(consumer.deliver_to, b"", headers)
        elif consumer.inactive_after and now - consumer.active_at > consumer.inactive_after:
            del stream.consumers[consumer.name]
        is_beat = now - consumer.sent_at >= 1.0
        for request in list(consumer.requests):
            if now >= request.expires or not self._listeners(request.reply):
                consumer.requests.remove(request)
                self._send(request.reply, b"", {"Status": "408"})
            elif request.heartbeat and is_beat:
                consumer.sent_at = now
                self._send(request.reply, b"", {"Status": "100"})


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
