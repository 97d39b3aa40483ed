"""
Kills a worker over a store on NATS at a network call, lets a second one carry on, and prints what both left behind.

Plans are those of `dying`, with the server's address as their scenario. A network call is a write to the connection
(before it, or in the middle of it, or just after it) or a piece that was read from it.
"""

from pathlib import Path
from typing import Any
from uuid import uuid4

from nats.aio.transport import TcpTransport

from reefknot.idempotency.model import KeyRecord
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.jetstream import JetStreamStore
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans, two_lives
from tests.faults.dying import hook_of, way_of
from tests.faults.story import ORDERS, AheadClock, carry_on, live
from tests.faults.vfs import Call, Counter, Hook


def hook_network(hook: Hook) -> None:
    """Put the hook around every write and read of this process's connections."""
    transport: Any = TcpTransport
    read = transport.read

    def writelines(self: Any, payload: Any) -> None:
        hook.tear(Call("write", "nats", data=b"".join(payload)), self._io_writer.write)
        hook.around(Call("written", "nats"), lambda: None)

    async def heard(self: Any, size: int) -> bytes:
        data: bytes = await read(self, size)
        hook.around(Call("read", "nats"), lambda: None)
        return data

    transport.writelines, transport.read = writelines, heard


async def first_life(folder: Path, plan: Plan, name: str, say: Say) -> None:
    hook = hook_of(plan)
    hook_network(hook)
    store = await JetStreamStore.open(plan["scenario"], SystemClock(), name=name, has_server_time=False)
    await live(store, folder, way_of(plan), hook, lambda *said: say(said))
    await store.close()
    if isinstance(hook, Counter):
        say(["calls", [call.kind for call in hook.calls], len(hook.calls)])


async def second_life(folder: Path, plan: Plan, name: str) -> dict[str, Any]:
    clock = AheadClock()
    store = await JetStreamStore.open(plan["scenario"], clock, name=name, has_server_time=False)

    async def keys() -> dict[str, KeyRecord]:
        names = [f"charge:{order}{owner}" for order in ORDERS for owner in ("", "/first", "/second")]
        found = {key: await store.idempotency.get(key) for key in names}
        return {key: record for key, record in found.items() if record is not None}

    evidence = await carry_on(store, clock, folder, way_of(plan), keys)
    whole = not await store.audit.verify()
    await store.connection.api(f"STREAM.DELETE.{store.names.state}")
    await store.close()
    return evidence | {"whole": whole}


def one(folder: Path, plan: Plan) -> Life:
    """One death, and the life after it."""
    name = f"dying-{uuid4().hex[:12]}"
    worker = Fork(lambda say: first_life(folder, plan, name, say))
    return two_lives(plan, worker, lambda _: second_life(folder, plan, name))


if __name__ == "__main__":
    carry_out_plans(one)
