"""A router and workers in an application's own process: `rk.system`, `rk.system_sync`."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from tests.pace import slowness
from tests.warm_commands import run_cold

pytestmark = pytest.mark.real_time

STEPS = """
import threading
import reefknot as rk

started = threading.Event()

@rk.block("app.double")
def double(inputs, context):
    with open("runs.txt", "a") as runs:
        runs.write(f"{inputs['n']}\\n")
    return {"twice": 2 * inputs["n"]}

@rk.block("app.hang")
async def hang(inputs, context):
    import asyncio
    started.set()
    await asyncio.Event().wait()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an application with its steps, which a child process imports from there."""
    (tmp_path / "app_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def application(folder: Path, code: str, *words: str) -> subprocess.Popen[str]:
    script = folder / "application.py"
    script.write_text("import os, sys, threading\nimport reefknot as rk\n" + textwrap.dedent(code))
    return subprocess.Popen([sys.executable, str(script), *words], cwd=folder, text=True, stdout=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=60 * slowness())
    assert process.returncode == 0
    return printed


def command(folder: Path, *words: str) -> Any:
    return json.loads(run_cold(sys.executable, "-m", "reefknot", *words, "--json", cwd=folder).stdout)


def runs(folder: Path) -> list[int]:
    return sorted(int(line) for line in (folder / "runs.txt").read_text().splitlines())


async def test_an_async_application_runs_its_own_steps_and_commands_see_the_system(folder: Path) -> None:

    @rk.block("app.here")
    async def here(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
        return {"pid": os.getpid()}

    async with rk.system(modules=["app_steps", here], workers=2) as client:
        assert (await client.run("app.double", {"n": 4})).output == {"twice": 8}
        assert (await client.run("app.here")).output == {"pid": os.getpid()}
        listed = await asyncio.to_thread(command, folder, "worker", "list")
    assert [one["worker_id"] for one in listed["workers"]] == ["worker-1", "worker-2"]
    assert command(folder, "job", "list", "--state", "succeeded")["jobs"] != []


async def test_options_that_the_baseline_ignores_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [one.getMessage() for one in caplog.records if "app.eager" in one.getMessage()]

    @rk.block("app.eager", attempts=9)
    async def eager(inputs: dict[str, Any], context: rk.BlockContext) -> None:
        return None

    async with rk.system("memory:", modules=eager):
        assert len(lines()) == 1
    (folder / "reefknot.yaml").write_text("worker: {retries: {v2: {enabled: true}}}\n")
    async with rk.system("memory:", modules=eager):
        assert len(lines()) == 1, "its options count"
    (folder / "reefknot.yaml").write_text("worker: {retries: {v2: {enabled: false}}}\n")
    async with rk.system("memory:", modules=eager):
        assert lines()[1].endswith(f"To switch it on: worker.retries.v2.enabled: true in {folder / 'reefknot.yaml'}")


def test_all_threads_of_a_plain_application_share_one_system(folder: Path) -> None:
    with rk.system_sync(modules="app_steps") as client, ThreadPoolExecutor(8) as threads:
        results = threads.map(lambda n: client.run("app.double", {"n": n}), range(200))
        assert [one.output for one in results] == [{"twice": 2 * n} for n in range(200)]
    assert runs(folder) == list(range(200))


def test_a_step_that_does_not_end_in_its_time_returns_to_the_queue(folder: Path) -> None:
    code = """
        with rk.system_sync(modules="app_steps", drain=0) as client:
            import app_steps
            client.submit("app.hang", assignment_id="long")
            assert app_steps.started.wait(60)
        with rk.connect_sync() as client:
            print(client.job("long").status())
    """
    assert ended(application(folder, code)) == "pending\n"


def test_a_killed_application_loses_nothing_that_it_has_accepted(folder: Path) -> None:
    code = """
        with rk.system_sync(modules="app_steps") as client:
            answers = client.submit_many([{"job_type": "app.double", "inputs": {"n": n}, "assignment_id": f"job-{n}"}
                                          for n in range(300)])
            assert len(answers) == 300
            print("accepted", flush=True)
            threading.Event().wait()
    """
    first = application(folder, code)
    assert first.stdout is not None
    assert first.stdout.readline() == "accepted\n"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    code = """
        with rk.system_sync(modules="app_steps") as client:
            print({client.job(f"job-{n}").wait(timeout=60) for n in range(300)})
    """
    assert ended(application(folder, code)) == "{'succeeded'}\n"
    assert set(runs(folder)) == set(range(300))


def test_forked_processes_are_clients_of_the_system_that_their_parent_runs(folder: Path) -> None:
    code = """
        with rk.system_sync(modules="app_steps") as client:
            children = []
            for n in range(4):
                if (child := os.fork()) == 0:
                    answer = client.run("app.double", {"n": n}, deadline=60)
                    os._exit(0 if answer.output == {"twice": 2 * n} else 1)
                children.append(child)
            print([os.waitpid(child, 0)[1] for child in children])
            print(client.run("app.double", {"n": 4}).output)
    """
    assert ended(application(folder, code)) == "[0, 0, 0, 0]\n{'twice': 8}\n"
    assert runs(folder) == [0, 1, 2, 3, 4]


async def test_parts_may_live_in_different_applications(folder: Path) -> None:
    one, other = rk.system(modules="app_steps", workers=0), rk.system(modules="app_steps", router=False)
    async with one, other, rk.connect() as client:
        assert (await client.run("app.double", {"n": 1}, deadline=30 * slowness())).output == {"twice": 2}


async def test_a_system_that_is_started_inside_another_one_is_one_of_its_own(folder: Path) -> None:
    def inner() -> rk.ExecResult:
        with rk.system_sync(modules="app_steps") as client:
            return client.run("app.double", {"n": 2}, deadline=30 * slowness())

    async with rk.system("memory:", workers=0):  # has no worker that could run it
        assert (await asyncio.to_thread(inner)).output == {"twice": 4}


async def test_a_named_configuration_is_followed(folder: Path) -> None:
    (folder / "mine.yaml").write_text("engine: sqlite:elsewhere.db\n")
    async with rk.system(config="mine.yaml", modules="app_steps") as client:
        await client.run("app.double", {"n": 1})
    assert (folder / "elsewhere.db").exists()
    assert not (folder / ".reefknot").exists()


class Heard(logging.Handler):
    """A handler that waits for a log line with these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.event.set()


def test_a_store_that_fails_is_logged_ends_every_call_and_is_raised_at_the_end(folder: Path) -> None:
    heard = Heard("the system in this process has stopped")

    async def story() -> None:
        async with rk.system(modules="app_steps") as client:
            os.remove(folder / ".reefknot" / "state.db")
            await heard.event.wait()
            with pytest.raises(rk.StoreReplacedError):
                await client.submit("app.double", {"n": 1})

    logging.getLogger("reefknot").addHandler(heard)
    try:
        with pytest.raises(rk.StoreReplacedError):
            asyncio.run(asyncio.wait_for(story(), 60 * slowness()))
    finally:
        logging.getLogger("reefknot").removeHandler(heard)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"url": 3}, rk.ParameterTypeError, "url=3 is not accepted: sqlite:PATH, nats://HOST:PORT or memory:"),
        ({"modules": 3}, rk.ParameterTypeError, "modules=3 is not accepted: names of modules such as 'app.steps'"),
        ({"modules": [3]}, rk.ParameterTypeError, "modules=3 is not accepted"),
        ({"modules": len}, rk.ParameterError, "a function under @rk.block"),
        ({"modules": "nowhere"}, rk.ConfigurationError, "modules: nowhere: there is no module nowhere here"),
        ({"config": 3}, rk.ParameterTypeError, "config=3 is not accepted: the path of a configuration file"),
        ({"config": "no.yaml"}, rk.ConfigurationMissingError, "no.yaml: there is no such file"),
        ({"workers": -1}, rk.ParameterError, "workers=-1 is not accepted: a whole number from 0 to 64"),
        ({"workers": "two"}, rk.ParameterTypeError, "workers='two'"),
        ({"router": 1}, rk.ParameterTypeError, "router=1 is not accepted: True or False"),
        ({"sources": "all"}, rk.ParameterTypeError, "sources='all' is not accepted: True or False"),
        ({"drain": -1}, rk.ParameterError, "drain=-1 is not accepted: a number of seconds"),
    ],
)
async def test_a_bad_parameter_is_refused_before_anything_is_made(
    folder: Path, given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as refused:
        await asyncio.to_thread(lambda: rk.system_sync(**given))
    assert says in str(refused.value)
    with pytest.raises(error):
        async with rk.system(**given):
            pass
    assert not (folder / ".reefknot").exists()


async def test_a_plain_application_is_refused_where_a_loop_runs(folder: Path) -> None:
    with pytest.raises(rk.EventLoopRunningError):
        rk.system_sync(modules="app_steps")


CHAIN = """
import asyncio
import reefknot as rk

@rk.block("chain.first", timeout=600)
async def first(inputs, context):
    async with rk.connect() as client:
        job = await client.submit("chain.second", {"n": 1}, assignment_id="second")
        return {"second": (await job.result()).output}

@rk.block("chain.plain", timeout=600)
def plain(inputs, context):
    with rk.connect_sync() as client:
        return {"second": client.run("chain.second", {"n": 2}).output}

@rk.block("chain.loop")
def loop(inputs, context):
    async def story():
        async with rk.connect() as client:
            await client.submit("chain.second", {"n": 3})
    asyncio.run(story())

@rk.block("chain.second", base_delay=60, jitter="none", attempts=3, timeout=600)
async def second(inputs, context):
    if context.attempt == 1:
        raise ConnectionError("not yet")
    return {"n": inputs["n"]}
"""


async def test_a_step_connects_to_the_system_that_runs_it_and_not_to_the_configured_store(folder: Path) -> None:
    (folder / "chain_steps.py").write_text(CHAIN.replace("base_delay=60", "base_delay=0.01"))
    (folder / "reefknot.yaml").write_text("worker: {retries: {v2: {enabled: true}}}\n")
    async with rk.system("sqlite:own.db", modules="chain_steps") as client, rk.connect() as same:
        assert same is client
        outputs = [(await client.run(f"chain.{name}", deadline=60)).output for name in ("first", "plain")]
        assert outputs == [{"second": {"n": 1}}, {"second": {"n": 2}}]
    assert not (folder / ".reefknot").exists(), "nothing was submitted elsewhere"


def test_a_step_under_test_connects_to_the_system_under_test_and_time_passes_while_it_waits(folder: Path) -> None:
    """The second step waits for a minute before its retry; the first one waits for it, a plain one in its thread."""
    (folder / "tested_steps.py").write_text(CHAIN.replace("chain.", "tested."))
    with rk.testing.system_sync(modules="tested_steps") as system:
        began = system.now
        assert system.run("tested.first", deadline=600).output == {"second": {"n": 1}}
        assert system.job("second").status() == "succeeded"
        assert system.run("tested.plain", deadline=600).output == {"second": {"n": 2}}
        assert 120 <= (system.now - began).total_seconds() < 300
        refused = system.run("tested.loop", retries=0)
        assert "call rk.connect() in an async step, rk.connect_sync() in a plain one" in (refused.error_message or "")
    assert not (folder / ".reefknot").exists(), "no store of the project was touched"


def test_a_policy_of_a_misspelt_step_is_told_with_the_right_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    policies = "{app.duoble: {max_attempts: 1}, app.hang: {max_attempts: 1}, mail.send: {max_attempts: 1}}"
    v2 = f"{{enabled: true, block_policies: {policies}}}"
    (folder / "reefknot.yaml").write_text(f"worker: {{retries: {{v2: {v2}}}}}\n")
    with rk.system_sync(modules="app_steps"):
        pass
    (told,) = [one.getMessage() for one in caplog.records if "block_policies" in one.getMessage()]
    assert told.endswith("block_policies.\"app.duoble\": no step here has this type; did you mean 'app.double'?")
