"""Work of a client ends within its time, whatever the client does with a cancellation."""

import asyncio

import pytest

from reefknot.runtime.timeouts import within


async def deaf(times: int) -> None:
    """A client that is refused again and again, and takes so many cancellations for the end of a socket."""
    while True:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            if not times:
                raise
            times -= 1


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_client_that_swallows_cancellations_is_given_up_all_the_same(times: int) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await within(deaf(times), 5.0)
    assert asyncio.get_running_loop().time() - began < 7.0
    assert [one for one in asyncio.all_tasks() if one is not asyncio.current_task()] == []


async def test_one_cancellation_would_not_end_it() -> None:
    """The control: what a plain time limit does."""
    task = asyncio.ensure_future(deaf(1))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait([task], timeout=60)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def test_an_error_of_the_client_is_the_callers() -> None:
    async def refused() -> None:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await within(refused(), 5.0)
