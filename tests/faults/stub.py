"""
A service of fixed capacity: so many requests at once, so long for each; whoever comes more waits in line.

    python -m tests.faults.stub AT_ONCE SERVICE_MS

It runs in a process of its own, prints its port, and ends when its input does; then it prints what a request really
took, which on a busy machine is more than was asked for. It does what it was asked even when nobody waits any more, as
real services do. A request for `/pace/MS` changes its service time.
"""

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Type: text/plain\r\n\r\nfine"


@dataclass
class Stub:
    """Where it listens, and what it can do."""

    port: int
    at_once: int
    service_s: float
    took_s: float = 0.0
    """What a request really took, on average; known when it has ended."""

    @property
    def capacity(self) -> float:
        """Requests a second, as it was meant."""
        return self.at_once / self.service_s

    def set_pace(self, service_ms: int) -> None:
        """Change the time that each request takes."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/pace/{service_ms}", timeout=5) as answer:
            assert answer.status == 200

    @property
    def real_capacity(self) -> float:
        """Requests a second that it could do on this machine, in this run."""
        return self.at_once / max(self.service_s, self.took_s)


@contextmanager
def stub(at_once: int, service_ms: int) -> Iterator[Stub]:
    """A running one."""
    command = [sys.executable, "-m", "tests.faults.stub", str(at_once), str(service_ms)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    made = Stub(int(process.stdout.readline()), at_once, service_ms / 1000)
    try:
        yield made
    finally:
        process.stdin.close()
        made.took_s = float(process.stdout.readline() or 0)
        process.wait(10)
        process.stdout.close()


async def _serve(at_once: int, service_s: float) -> None:
    free = asyncio.Semaphore(at_once)
    loop = asyncio.get_running_loop()
    clients: set[asyncio.Task[None]] = set()
    served, took, pace = 0, 0.0, service_s

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served, took, pace
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                path = request.split(b" ", 2)[1]
                if path.startswith(b"/pace/"):
                    pace = int(path.removeprefix(b"/pace/")) / 1000
                    writer.write(_ANSWER)
                    continue
                async with free:
                    began = loop.time()
                    await asyncio.sleep(pace)
                    served, took = served + 1, took + loop.time() - began
                writer.write(_ANSWER)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(talk(reader, writer))
        clients.add(task)
        task.add_done_callback(clients.discard)

    server = await asyncio.start_server(came, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    print(took / max(1, served), flush=True)
    server.close()
    for task in clients:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]) / 1000))
