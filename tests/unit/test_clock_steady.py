"""The wall of a steady clock moves only as the steady clock does."""

import asyncio

from reefknot.clock import SteadyClock
from reefknot.engines.clocks import EPOCH, VirtualClock


class Jumping(VirtualClock):
    offset = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset


def test_a_jump_of_the_machines_clock_moves_nothing() -> None:
    machine = Jumping()
    clock = SteadyClock(machine)
    machine.offset = 86_400.0
    clock.sleep(5)

    assert clock.wall() == EPOCH + 5
    assert clock.now() == 1005.0


def test_wrapping_it_again_changes_nothing_and_a_new_one_believes_the_machine() -> None:
    machine = Jumping()
    clock = SteadyClock(machine)
    machine.offset = 60.0

    assert SteadyClock(clock).wall() == clock.wall() == EPOCH
    assert SteadyClock(machine).wall() == EPOCH + 60
    asyncio.run(clock.asleep(2))
    assert clock.now() == 1002.0
