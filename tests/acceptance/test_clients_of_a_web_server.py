"""
A client that was made before a web server forked its workers: what one of them submits, every other one finds.

The store is that of the configuration, as for the commands. Router and workers are processes of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reefknot as rk
from tests.acceptance.engines import IS_ALL
from tests.acceptance.folder import Folder

WEB = """
import json, multiprocessing, signal, sys
import reefknot as rk

WORKERS, REQUESTS = 4, int(sys.argv[1])
client = rk.connect_sync(create=False)  # before the forks, as `gunicorn --preload` does
fork = multiprocessing.get_context("fork")
names = [fork.Queue() for _ in range(WORKERS)]
answers = fork.Queue()

def serve(number):
    signal.alarm(100)
    looked = []
    for request in range(REQUESTS):
        name = f"job-{number}-{request}"
        client.submit("own.nap", {"name": name, "seconds": 0}, assignment_id=name, tenant_id="acme")
        names[(number + 1) % WORKERS].put(name)
        other = names[number].get(timeout=60)  # a GET that reaches another process than the POST did
        looked.append((other, client.job(other, tenant_id="acme").status()))
    ends = [(name, client.job(name, tenant_id="acme").wait(60)) for name, _ in looked]
    answers.put([looked, ends, client.job(looked[-1][0], "acme").result().output])

processes = [fork.Process(target=serve, args=(number,)) for number in range(WORKERS)]
for one in processes:
    one.start()
found = [answers.get(timeout=90) for _ in processes]
for one in processes:
    one.join()
print(json.dumps([found, client.job("job-0-0", "acme").status()]))
"""


def test_every_job_ends_once_and_every_look_of_another_process_finds_it(folder: Folder) -> None:
    folder.write("web.py", WEB)
    folder.part("router")
    for name in ("one", "two"):
        folder.part("worker", "--worker-id", name, "--module", "naps")

    requests = 125 if folder.engine.startswith("sqlite:") or IS_ALL else 20
    web = folder.start(str(requests), program=("web.py",))
    out, err = web.communicate(timeout=150)

    assert web.returncode == 0, err
    answers, parent = json.loads(out.splitlines()[-1])
    looked = {name: state for one, _, _ in answers for name, state in one}
    ends = {name: state for _, one, _ in answers for name, state in one}
    assert len(looked) == 4 * requests
    assert set(looked.values()) <= {"pending", "running", "succeeded"}, "never unknown"
    assert ends == dict.fromkeys(looked, "succeeded")
    assert [output for _, _, output in answers] == [{"slept": 0}] * 4
    assert parent == "succeeded"
    assert sorted(folder.begun()) == sorted(looked), "each ran once"


def test_without_a_url_it_is_the_store_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "app" / "deep").mkdir(parents=True)
    (tmp_path / "app" / "reefknot.yaml").write_text("engine: sqlite:data/jobs.db\nrouter: {max_queue_size: 20}\n")
    monkeypatch.chdir(tmp_path / "app" / "deep")
    store = tmp_path / "app" / "data" / "jobs.db"

    with pytest.raises(rk.StoreMissingError, match=r"there is no store.*reefknot up --engine sqlite:.*jobs\.db"):
        rk.connect_sync(create=False)
    assert not store.parent.exists(), "an attempt makes nothing"
    with rk.connect_sync() as client:
        answers = client.submit_many([("a.b", {"n": n}) for n in range(30)])
        assert [isinstance(one, rk.SyncHandle) for one in answers] == [True] * 18 + [False] * 12, "its configured size"
    assert store.exists()
    (warning,) = [one for one in caplog.records if "no store" in one.message]
    assert f"there was no store at sqlite:{store}: a new one was made" in warning.message
    assert f"reefknot up --engine sqlite:{store}" in warning.message

    monkeypatch.chdir(tmp_path)
    with rk.connect_sync(config="app/reefknot.yaml", create=False) as client:
        assert client.submit("a.b", {"n": 0}, priority="high", assignment_id="x").status() == "pending"
    with rk.connect_sync(f"sqlite:{store}", create=False) as client:
        assert client.job("x").status() == "pending"
    monkeypatch.setenv("REEFKNOT__ENGINE", "sqlite:elsewhere.db")
    with rk.connect_sync() as client:
        assert client.job("x").status() == "unknown"
    assert (tmp_path / "elsewhere.db").exists()
    assert len([one for one in caplog.records if "no store" in one.message]) == 2, "once for each that was made"


def test_a_store_on_a_server_is_made_with_a_warning_or_refused(
    nats_server: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{nats_server.url}/{tmp_path.name.replace('_', '-')[-24:]}"  # type: ignore[attr-defined]
    with pytest.raises(rk.StoreMissingError, match="there is no store named"):
        rk.connect_sync(url, create=False)
    for _ in range(2):
        with rk.connect_sync(url) as client:
            client.submit("a.b", assignment_id="x")
    assert len([one for one in caplog.records if f"there was no store at {url}" in one.message]) == 1
    with rk.connect_sync(url, create=False) as client:
        assert client.job("x").status() == "pending"


def test_a_relative_path_means_the_same_store_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon changes to / after its fork."""
    monkeypatch.chdir(tmp_path)
    with rk.connect_sync("sqlite:state.db") as client:
        client.submit("a.b", assignment_id="x")
        monkeypatch.chdir("/")
        client._generation -= 1  # as in a fork
        assert client.job("x").status() == "pending"
