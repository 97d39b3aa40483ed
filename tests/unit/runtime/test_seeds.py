"""Seeds: one per process, another after a fork."""

import json
import subprocess
import sys

from reefknot.runtime import seeds

SCRIPT = """
import json, os, sys
import reefknot as rk
from reefknot.runtime import seeds

if sys.argv[1] == "control":
    seed = seeds.process_seed
    os.register_at_fork(after_in_child=lambda: setattr(seeds, "process_seed", seed))

def waits():
    def fails():
        raise ConnectionError
    with rk.testing.no_wait() as clock:
        rk.Retrier(attempts=6).run(fails)
    return clock.waits

read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, json.dumps(waits()).encode())
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps([waits(), json.loads(os.read(read, 65536))]))
"""


def drawn(variant: str) -> list[list[float]]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, variant], capture_output=True, check=True, timeout=60)
    lists: list[list[float]] = json.loads(done.stdout)
    return lists


def test_a_forked_child_draws_differently_and_keys_are_never_given_twice() -> None:
    parent, child = drawn("as it is")
    assert len(parent) == len(child) == 5
    assert not set(parent) & set(child)
    assert len({seeds.next_key() for _ in range(1000)}) == 1000


def test_control_a_child_that_keeps_the_seed_draws_alike() -> None:
    parent, child = drawn("control")
    assert parent == child
