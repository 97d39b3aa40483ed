"""A folder to run systems in: a configuration, files, and steps that behave as their inputs demand."""

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from reefknot.app.system import System
from reefknot.console.cli.serve import UpSession, startup
from reefknot.queue.model.work import WorkState
from tests.unit.console.cli.running import Commands, Ended

V2 = """\
worker:
  quarantine_failed: {quarantine}
  retries:
    v2:
      enabled: true
      default_policy: {{max_attempts: 2, base_delay_ms: 10, max_delay_ms: 20, jitter_type: none}}
      error_classification:
        execution_errors: {{retryable: {{resource_unavailable: true}}, max_attempts: 2}}
  queue:
    v2: {{enabled: true, max_queue_size: {size}}}
blocks:
  fs: {{roots: [files]}}
"""
MODULE = """\
import asyncio
import reefknot as rk
from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult, StepStatus

asked = {{}}

@rk.block("{prefix}.flaky")
async def flaky(inputs, context):
    asked[inputs["name"]] = asked.get(inputs["name"], 0) + 1
    if asked[inputs["name"]] <= inputs["failures"]:
        return StepResult(StepStatus.ERROR, ErrorCode.resource_unavailable, error_message="not now")
    return {{"attempt": asked[inputs["name"]]}}

@rk.block("{prefix}.nap")
async def nap(inputs, context):
    await asyncio.sleep(inputs["seconds"])
    return {{}}
"""
_numbers = count(1)


class Folder(NamedTuple):
    """The module's name, and the prefix of its steps' types."""

    module: str
    prefix: str

    def flaky(self, name: str, failures: int, **more: Any) -> dict[str, Any]:
        payload = {"name": name, "failures": failures}
        job = {"type": f"{self.prefix}.flaky", "payload": payload}
        return {"assignment_id": name, "request_id": "r", "job": job} | more

    def nap(self, name: str, seconds: float, **more: Any) -> dict[str, Any]:
        job = {"type": f"{self.prefix}.nap", "payload": {"seconds": seconds}}
        return {"assignment_id": name, "request_id": "r", "job": job} | more


def prepared(rk: Commands, *, quarantine: bool = False, size: int = 1000) -> Folder:
    """A process has one registry of steps, so every folder gets names of its own."""
    number = next(_numbers)
    folder = Folder(f"own_steps_{number}", f"own{number}")
    rk.write(V2.format(quarantine=str(quarantine).lower(), size=size))
    rk.write(MODULE.format(prefix=folder.prefix), f"{folder.module}.py")
    (rk.folder / "files").mkdir(exist_ok=True)
    (rk.folder / "files" / "a.txt").write_text("ahoy")
    rk.environment.syspath_prepend(str(rk.folder))
    return folder


def get(path: str, name: str | None = None, **more: Any) -> dict[str, Any]:
    ids = {} if name is None else {"assignment_id": name, "request_id": "r"}
    return {**ids, "job": {"type": "fs.blob_get", "payload": {"path": path}}, **more}


def lines(rk: Commands, *wanted: dict[str, Any] | str, name: str = "work.jsonl") -> str:
    rk.write("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in wanted), name)
    return name


def results(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["assignment_id"]: one for one in found}


def up_until_ended(rk: Commands, *names: str, module: str, as_json: bool = False) -> Ended:
    """`reefknot up`, ended as soon as these jobs have ended."""

    async def waits(system: System, name: str) -> bool:
        item = await system.store.work.get(name) or await system.store.work.get(name)
        return item is None or item.state in (WorkState.PENDING, WorkState.RUNNING)

    async def until_ended(system: System) -> None:
        for name in names:
            while await waits(system, name):  # noqa: ASYNC110 - the store does not announce the end of a job
                await asyncio.sleep(0.02)

    rk.taken()
    session = UpSession(startup(None, None), modules=(module,), as_json=as_json)
    return Ended(asyncio.run(session.serve(30, drain=1, beside=until_ended)), *rk.taken())
