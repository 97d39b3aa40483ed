"""
A limit over four worker processes, by the count of the service that they call: a socket, and the kernel's time of each
datagram.
"""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.acceptance.folder import Folder, until
from tests.faults import points

RATE, BURST = 50, 25
SECONDS = 30 if points.ALL else 3
WORKERS = 4
LIMITS = f"""
router: {{max_queue_size: 20000}}
limits:
  "charge.*": {{rate: {RATE}/s, burst: {BURST}}}
"""
MODULE = f"""\
import os, socket
import reefknot as rk

service = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
service.connect(("127.0.0.1", int(os.environ["SERVICE_PORT"])))
own = rk.Limit("charges", rate="{RATE}/s", burst={BURST})

@rk.block("charge.card")
async def card(inputs, context):
    service.send(b"charge")
    if context.attempt <= inputs.get("failures", 0):
        raise ConnectionError("not now")
    return {{}}

@rk.block("alone.card")
async def alone(inputs, context):
    async with own:
        service.send(b"charge")
    return {{}}
"""
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@qq")


@contextmanager
def service() -> Iterator[tuple[int, list[float]]]:
    """The port of a service, and the time of every call that it got."""
    times: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        ours.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        ours.bind(("127.0.0.1", 0))
        ours.settimeout(0.2)
        ends = threading.Event()

        def serve() -> None:
            while not ends.is_set():
                try:
                    _, more, _, _ = ours.recvmsg(64, 256)
                except TimeoutError:
                    continue
                seconds, nanoseconds = TIMESPEC.unpack(more[0][2][: TIMESPEC.size])
                times.append(seconds + nanoseconds / 1e9)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield ours.getsockname()[1], times
        finally:
            ends.set()
            thread.join()


def most_in_a_second(times: list[float]) -> int:
    ordered, first, most = sorted(times), 0, 0
    for number, at in enumerate(ordered):
        while ordered[first] <= at - 1:
            first += 1
        most = max(most, number - first + 1)
    return most


def used(times: list[float]) -> float:
    """The share of the limit that was used, from the first call to the last."""
    return (len(times) - 1) / (BURST + RATE * (max(times) - min(times)))


def charge(folder: Folder, kind: str, number: int, port: int, **inputs: object) -> None:
    folder.write("charging.py", MODULE)
    folder.set_variable("SERVICE_PORT", str(port))
    for part in ("BREAKER", "THROTTLE"):  # every call of the second story fails once
        folder.set_variable(f"REEFKNOT__WORKER__RETRIES__V2__{part}__ENABLED", "false")
    folder.configure(LIMITS)
    job = {"type": kind, "payload": inputs}
    folder.write_lines(
        "jobs.jsonl", *({"assignment_id": f"a{n}", "request_id": f"a{n}", "job": job} for n in range(number))
    )
    folder.part("router")
    for n in range(WORKERS):
        folder.part("worker", "--worker-id", f"w{n}", "--module", "charging")
    assert folder("submit", "jobs.jsonl").code == 0


def test_four_processes_never_call_more_often_than_the_limit_and_use_it(folder: Folder) -> None:
    with service() as (port, times):
        charge(folder, "charge.card", RATE * SECONDS, port)
        until(lambda: len(times) >= RATE * SECONDS, patience=SECONDS + 30)
    assert len(times) == RATE * SECONDS
    assert most_in_a_second(times) <= RATE + BURST
    # A few seconds tell little, and so does a server that waits for its disk: for these there is the unit test.
    if points.ALL and folder.engine.startswith("sqlite:"):
        assert used(times) >= 0.95, used(times)


def test_a_retry_anywhere_is_a_call_like_any_other(folder: Folder) -> None:
    with service() as (port, times):
        charge(folder, "charge.card", RATE * SECONDS // 2, port, failures=1)
        until(lambda: len(times) >= RATE * SECONDS // 2 * 2, patience=SECONDS + 30)
    assert most_in_a_second(times) <= RATE + BURST


def test_control_limits_of_each_process_by_itself_are_exceeded(folder: Folder) -> None:
    with service() as (port, times):
        charge(folder, "alone.card", RATE * SECONDS * 2, port)
        until(lambda: len(times) >= RATE * SECONDS * 2, patience=SECONDS + 30)
    assert most_in_a_second(times) > RATE + BURST
