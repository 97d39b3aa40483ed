"""Async code with limits: a hanging attempt is cut, and the deadline over all attempts holds."""

import asyncio
import time

import reefknot as rk

hanging = {"first": True}


@rk.retry(attempts=3, attempt_timeout=0.05, base_delay=0.01)
async def ask() -> str:
    if hanging.pop("first", False):
        await asyncio.sleep(60)
    return "an answer"


@rk.retry(attempts=50, deadline=0.2, base_delay=0.05, strategy="fixed")
async def never() -> str:
    await asyncio.sleep(0.02)
    raise ConnectionError("nobody there")


async def main() -> None:
    print(f"the first attempt hangs, the second gives {await ask()!r}")

    started = time.monotonic()
    try:
        await never()
    except (ConnectionError, rk.DeadlineExceededError) as error:
        took = time.monotonic() - started
        print(f"a deadline of 0.2 s ended it after {took:.2f} s: {type(error).__name__}: {error}")
        assert took < 1.0

    task = asyncio.create_task(never())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    print(f"cancelled while it waited: {task.cancelled()}; a cancellation is never retried")


asyncio.run(main())
