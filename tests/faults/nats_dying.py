"""
Kills a worker over a store on NATS at a network call, lets a second one carry on, and prints what both left behind.

    python -m tests.faults.nats_dying FOLDER < plans.jsonl > evidence.jsonl

Plans are those of `dying`, with the server's address as their scenario. A network call is a write to the connection
(before it, or in the middle of it, or just after it) or a piece that was read from it. Each life is a fork.
"""

import asyncio
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from nats.aio.transport import TcpTransport

from reefknot.idempotency.model import KeyRecord
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.jetstream import JetStreamStore
from tests.faults.dying import hook_of, in_a_process_of_its_own, way_of
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


async def first_life(folder: Path, plan: dict[str, Any], name: str, say: Callable[[Any], None]) -> None:
    hook = hook_of(plan)
    hook_network(hook)
    store = await JetStreamStore.open(plan["scenario"], SystemClock(), name=name, has_server_time=False)
    await live(store, folder, way_of(plan), hook, lambda *said: say(said))
    await store.close()
    if isinstance(hook, Counter):
        say(["calls", [call.kind for call in hook.calls], len(hook.calls)])


async def second_life(folder: Path, plan: dict[str, Any], name: str) -> dict[str, Any]:
    clock = AheadClock()
    store = await JetStreamStore.open(plan["scenario"], clock, name=name, has_server_time=False)

    async def keys() -> dict[str, KeyRecord]:
        names = [f"charge:{order}{owner}" for order in ORDERS for owner in ("", "/first", "/second")]
        found = {key: await store.idempotency.get(key) for key in names}
        return {key: record for key, record in found.items() if record is not None}

    evidence = await carry_on(store, clock, folder, way_of(plan), keys)
    whole = not await store.audit.verify()
    for stream in (store.names.state, store.names.audit):
        await store.connection.api(f"STREAM.DELETE.{stream}")
    await store.close()
    return evidence | {"whole": whole}


def one(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """One death, and the life after it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    name = f"dying-{uuid4().hex[:12]}"
    child, heard = in_a_process_of_its_own(lambda say: asyncio.run(first_life(folder, plan, name, say)))
    said = heard()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    child, heard = in_a_process_of_its_own(lambda say: say(asyncio.run(second_life(folder, plan, name))))
    evidence = heard()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"plan": plan, "ended": ended, "said": said, "second": code, "evidence": evidence[-1] if evidence else None}


def main(folder: Path) -> None:
    gc.freeze()  # or every fork copies every page of what was imported, only to count references
    for line in sys.stdin:
        print(json.dumps(one(folder / "life", json.loads(line))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
