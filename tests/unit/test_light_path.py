"""What `from reefknot import retry` loads, seen from a fresh interpreter."""

import subprocess
import sys
from collections.abc import Sequence

HEAVY = ("typing", "re", "msgspec", "asyncio", "logging", "inspect", "dataclasses", "pydantic", "yaml", "apsw")


def loaded_by(code: str, heavy: Sequence[str] = HEAVY) -> set[str]:
    """Those of the heavy modules that are there after the code ran. `-S`: what a site brings along is not ours."""
    paths = [path for path in sys.path if path]
    program = f"import sys; sys.path[:] = {paths!r}\n{code}\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=30, check=True)
    return set(done.stdout.strip("[]\n").replace("'", "").split(", ")) - {""}


def test_importing_decorating_and_succeeding_load_nothing_heavy() -> None:
    code = """
from reefknot import retry

@retry(on=ConnectionError, attempts=5, deadline=10)
def work():
    return 1

assert work() == 1
"""
    assert loaded_by(code) == set()


def test_the_first_failure_loads_the_rest() -> None:
    """The control: the look at the modules does see them when they are there."""
    code = """
from reefknot import retry

@retry(on=KeyError, attempts=5)
def work():
    raise ValueError

try:
    work()
except ValueError:
    pass
"""
    assert {"typing", "re", "msgspec"} <= loaded_by(code)


CONNECTING = "import asyncio\nfrom reefknot import connect\n"
SYSTEM = (
    "pydantic",
    "yaml",
    "cyclopts",
    "reefknot.queue.worker.service",
    "reefknot.policy.schema",
    "reefknot.app.managers",
)


def test_a_client_loads_neither_the_configuration_nor_the_system_it_is_a_client_of() -> None:
    code = """
async def main():
    async with connect("memory:") as client:
        await client.submit("demo.step")

asyncio.run(main())
"""
    assert loaded_by(CONNECTING + code, SYSTEM) == set()


def test_a_system_does_load_them() -> None:
    """The control."""
    assert set(SYSTEM) - {"cyclopts", "pydantic", "yaml"} <= loaded_by(
        CONNECTING + "import reefknot.app.managers, reefknot.app.system\n", SYSTEM
    )
