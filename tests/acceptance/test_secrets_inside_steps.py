"""
Secrets of the configuration stay in when a step uses the library: `@retry` logs, `@idempotent` records and audits.

The step is written as a user would write it, without `secrets=`, and run by `reefknot run` in a process of its own. The
control is the same run without the secret in the configuration: there it is found in each of the places.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import apsw

from tests.warm_commands import run_cold

SECRET = "zander-Trockenfisch_9!"
STEPS = """\
import os
import reefknot as rk

SECRET = os.environ["SHOP_SECRET"]

@rk.idempotent(key=lambda order: f"{SECRET}/{order}", mode="guard", name="charge")
async def charge(order):
    raise ConnectionError(f"the bank refused {SECRET} today")

@rk.retry(attempts=3, base_delay=0.01)
def fetch():
    raise ConnectionError(f"the shop refused {SECRET} today")

@rk.block("shop.order")
def order(inputs, context):
    fetch()

@rk.block("shop.pay")
async def pay(inputs, context):
    await charge(inputs["order"])
"""


def run_steps(folder: Path, *, configured: bool) -> dict[str, str]:
    """Everything that the run leaves, by place."""
    (folder / "steps.py").write_text(STEPS)
    (folder / "reefknot.yaml").write_text("secrets: {shop: 'env:SHOP_SECRET'}\n" if configured else "{}\n")
    kinds = ("shop.order", "shop.pay")
    lines = [{"assignment_id": kind, "job": {"type": kind, "payload": {"order": "7"}}} for kind in kinds]
    (folder / "work.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    own = {"SHOP_SECRET": SECRET, "WORKER_RETRIES_V2_ENABLED": "true"}
    command = (sys.executable, "-m", "reefknot", "run", "work.jsonl", "--module", "steps")
    ended = run_cold(*command, cwd=folder, env=os.environ | own)
    assert ended.returncode == 1, ended.stderr
    assert "2 failed" in ended.stdout, ended.stderr
    database = apsw.Connection(str(folder / ".reefknot" / "state.db"))
    queries = {
        "events": "SELECT body FROM audit",
        "work": "SELECT reason, failure, result, history FROM work",
        "recorded failures": "SELECT failure FROM idempotency",
        "keys": "SELECT key FROM idempotency",
    }
    found = {name: repr(list(database.execute(query))) for name, query in queries.items()}
    database.close()
    return found | {"log": ended.stderr}


def test_no_secret_of_the_configuration_leaves_a_step_that_uses_the_library(tmp_path: Path) -> None:
    left = run_steps(tmp_path, configured=True)

    assert {place for place, text in left.items() if SECRET in text} == {"keys"}, "a key is stored as it was given"
    assert all("[redacted]" in left[place] for place in ("events", "work", "recorded failures", "log"))
    assert '"idempotency_key":"charge:[redacted]/7"' in left["events"]
    assert "fetch: attempt 1 of 3 failed with ConnectionError" in left["log"]


def test_without_the_configuration_the_same_search_finds_it_everywhere(tmp_path: Path) -> None:
    """The control."""
    left = run_steps(tmp_path, configured=False)

    assert {place for place, text in left.items() if SECRET in text} == set(left)
