"""Idempotency keys: the decorator in two modes, a `RetryManager`, and the audit events that both write."""

import asyncio
from dataclasses import dataclass

import reefknot as rk


@dataclass
class Order:
    id: str
    cents: int


charged: list[str] = []
answers = 0


@rk.idempotent(key=lambda order: order.id)
async def charge(order: Order) -> dict[str, int]:
    charged.append(order.id)
    await asyncio.sleep(0.05)
    return {"cents": order.cents}


@rk.idempotent(key=lambda order: order.id, mode="guard")
async def send_letter(order: Order) -> None:
    raise TimeoutError("the post office did not say whether it took the letter")


async def put() -> str:
    global answers
    answers += 1
    if answers == 1:
        raise ConnectionError("the switch does not answer")
    return "stored"


async def main() -> None:
    async with rk.open_store("sqlite:state.db") as store:
        # Five concurrent callers, one effect: the others wait for its result.
        receipts = await asyncio.gather(*(charge(Order("a-1", 500)) for _ in range(5)))
        print(f"charged {charged}, and five callers got {receipts[0]}")
        assert charged == ["a-1"]
        assert receipts == [{"cents": 500}] * 5

        # The same key with other arguments is refused.
        try:
            await charge(Order("a-1", 999))
        except rk.KeyConflictError as refused:
            print(f"refused: {refused}")

        # Mode guard never runs the effect twice; an unknown outcome is left to an operator.
        for _ in range(2):
            try:
                await send_letter(Order("a-1", 500))
            except TimeoutError as error:
                print(f"the first call: {error}")
            except rk.OutcomeUnknownError as unknown:
                print(f"the second call: {unknown}")

        # An operation with a category: its policy, its timeout, its key and its events.
        manager = rk.RetryManager(idempotency=store.idempotency, audit=store.audit)
        key = manager.idempotency_manager.compute_idempotency_key("kill_switch_update", "tenant-123", "corr-456")
        policy = manager.get_policy(rk.RetryCategory.KV_PUT).replace(base_delay=0.01)
        for _ in range(2):
            answer = await manager.execute_with_retry(
                rk.RetryCategory.KV_PUT, "store switch", put, policy, idempotency_key=key, correlation_id="corr-456"
            )
            assert answer == "stored"
        assert answers == 2

        for kept in await store.audit.read():
            print(kept.sequence, kept.entry.event_type, kept.entry.correlation_id or "")
        assert await store.audit.verify() == []


asyncio.run(main())
