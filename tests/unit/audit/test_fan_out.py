"""`FanOut`: several sinks as one, none of which holds back the others."""

import asyncio
from collections.abc import Sequence

import pytest

from reefknot.audit.journal import FanOut
from reefknot.audit.model.chain import Head
from reefknot.audit.port import AuditEntry
from reefknot.errors import ParameterError


class Sink:
    """Keeps bodies; fails so many times, or never answers."""

    def __init__(self, name: str = "sink", *, failing: int = 0, silent: bool = False) -> None:
        self.name = name
        self.failing = failing
        self.silent = silent
        self.kept: list[bytes] = []

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        if self.failing:
            self.failing -= 1
            raise OSError(f"{self.name} is down")
        self.kept += [entry.body for entry in entries]
        return Head(self.name, len(self.kept))


def entries(*numbers: int) -> list[AuditEntry]:
    return [AuditEntry(b"%d" % number, "x", number) for number in numbers]


async def test_every_sink_gets_every_event_and_the_first_head_is_the_answer() -> None:
    first, second = Sink("first"), Sink("second")
    assert await FanOut(first, second).append(entries(1, 2)) == Head("first", 2)
    assert first.kept == second.kept == [b"1", b"2"]
    with pytest.raises(ParameterError, match="one sink or more"):
        FanOut()


async def test_one_that_fails_does_not_lose_the_others_and_catches_up_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, fine = Sink("bad", failing=2), Sink("good")
    fan = FanOut(failing, fine)
    heads = [await fan.append(entries(number)) for number in (1, 2, 3)]
    assert [head.chain for head in heads] == ["good", "good", "bad"]
    assert fine.kept == failing.kept == [b"1", b"2", b"3"]
    assert (fan.lost, fan.buffered) == (0, 0)
    assert "bad is down" in caplog.text


async def test_one_that_never_answers_holds_up_the_others_for_a_bounded_time() -> None:
    silent, fine = Sink(silent=True), Sink()
    began = asyncio.get_running_loop().time()
    await FanOut(silent, fine).append(entries(1))

    assert (asyncio.get_running_loop().time() - began) == 5.0
    assert fine.kept == [b"1"]


async def test_the_buffer_of_a_sink_is_bounded_and_the_rest_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Sink("bad", failing=4)
    fan = FanOut(failing, Sink(), most_buffered=2)
    for number in (1, 2, 3, 4):
        await fan.append(entries(number))
    assert (fan.buffered, fan.lost) == (2, 2)
    assert "2 events are buffered for it, 2 are lost in all" in caplog.text


async def test_when_every_sink_fails_the_append_fails_and_nothing_is_buffered() -> None:
    first, second = Sink("first", failing=1), Sink("second", failing=1)
    fan = FanOut(first, second)
    with pytest.raises(OSError, match="first is down"):
        await fan.append(entries(1))
    await fan.append(entries(1))
    assert (first.kept, second.kept, fan.buffered) == ([b"1"], [b"1"], 0)
