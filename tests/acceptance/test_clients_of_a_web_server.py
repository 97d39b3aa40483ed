"""The store of a client in a web server: without a URL it is that of the configuration, as for the commands."""

from pathlib import Path

import pytest

import reefknot as rk


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


def test_a_new_store_on_a_server_warns(nats_server: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{nats_server.url}/{tmp_path.name.replace('_', '-')[-24:]}"  # type: ignore[attr-defined]
    with pytest.raises(rk.StoreMissingError, match="there is no store named"):
        rk.connect_sync(url, create=False)
    for _ in range(2):
        with rk.connect_sync(url) as client:
            client.submit("a.b", assignment_id="x")
    assert len([one for one in caplog.records if f"there was no store at {url}" in one.message]) == 1
    with rk.connect_sync(url, create=False) as client:
        assert client.job("x").status() == "pending"


def test_a_relative_path_is_the_same_store_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon changes to / after its fork."""
    monkeypatch.chdir(tmp_path)
    with rk.connect_sync("sqlite:state.db") as client:
        client.submit("a.b", assignment_id="x")
        monkeypatch.chdir("/")
        client._generation -= 1  # as in a fork
        assert client.job("x").status() == "pending"
