"""An engine of one's own: a package with a descriptor and one row in the table is all that the program asks for."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reefknot import connect, errors, open_store
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.memory import MemoryStore
from reefknot.stores.port import Store, engines
from tests.unit.console.cli.running import Commands

ANSWERS = [engines.Finding("server", "ok", "the stub answers")]
kept: dict[str, MemoryStore] = {}


class StubStore(MemoryStore):
    """A store that outlives its closing, as one on a server does."""

    async def close(self) -> None:
        return


class StubEngine:
    """The engine of `stub://NAME`, over a store in memory for each name."""

    magic = b""
    without_file = "is a stub and has no file"
    hears_peers = False
    extra = ""

    def path(self, url: str) -> None:
        if not url.removeprefix("stub://").rpartition("@")[2].isalpha():
            raise ValueError("a stub has a name")

    def files(self) -> engines.StoreFiles:
        raise LookupError

    async def open(self, url: str, options: engines.OpenOptions) -> Store:
        store = kept.setdefault(url, StubStore(options.clock, **options.limits))
        store.identity = url
        return store

    async def create(self, url: str, settings: Mapping[str, Any], *, keeps_shared: bool) -> list[str]:
        return []

    async def examine(self, url: str, options: engines.ExamineOptions) -> engines.Examination:
        return engines.Examination(ANSWERS, is_ready=url in kept)

    async def examine_open(self, store: Store, options: engines.ExamineOptions) -> list[engines.Finding]:
        return ANSWERS


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("stub_engine")
    engine: engines.Engine = StubEngine()
    monkeypatch.setattr(package, "ENGINE", engine, raising=False)
    monkeypatch.setitem(sys.modules, "stub_engine", package)
    monkeypatch.setitem(engines.ENGINES, "stub", engines.KnownEngine("stub_engine", "stub://NAME"))
    kept.clear()


@pytest.mark.real_time
async def test_a_new_engine_is_opened_by_its_address() -> None:
    async with open_store("stub://here") as store:
        assert store is kept["stub://here"]
    async with connect("stub://here") as client:
        await client.submit("python", {"function": "a"})
    async with open_store("stub://here") as store:
        assert len((await store.work.search(limit=10)).items) == 1


def test_commands_use_its_store_show_no_password_and_doctor_examines_what_is_in_it(rk: Commands) -> None:
    submitted = rk("submit", "--type", "python.call", "--inputs", "{}", "--engine", "stub://ann:hunter2@here")
    listed = rk("job", "list", "--engine", "stub://ann:hunter2@here", "--json")
    examined = rk("doctor", "--engine", "stub://ann:hunter2@here", "--json")
    assert submitted.code == listed.code == 0, (submitted.err, listed.err)
    assert len(listed.json["jobs"]) == 1
    assert "hunter2" not in "".join(one.out + one.err for one in (submitted, listed, examined))
    found = {one["check"]: one["text"] for one in examined.json["findings"]}
    assert (found["server"], "1 job waits" in found["systems"]) == ("the stub answers", True)


def test_the_configuration_accepts_its_addresses_and_refuses_others_with_its_reason(rk: Commands) -> None:
    rk.write("engine: stub://here\n")
    assert rk("config", "check").code == 0
    rk.write("engine: stub://12\n")
    ended = rk("config", "check")
    assert ended.code == 78
    assert "a stub has a name; accepted: sqlite:PATH, nats://HOST:PORT, memory: or stub://NAME" in ended.err


def test_a_command_on_files_refuses_it_in_its_own_words_and_without_a_row_in_the_table_all_do(rk: Commands) -> None:
    """The second is the control."""
    ended = rk("store", "compact", "--engine", "stub://here")
    assert (ended.code, "stub://here is a stub and has no file" in ended.err) == (2, True)
    rk.environment.delitem(engines.ENGINES, "stub")
    assert "accepted" in rk("doctor", "--engine", "stub://here").err
    with pytest.raises(errors.ParameterError, match="sqlite:PATH, nats://HOST:PORT or memory:"):
        engines.engine_of("stub://here")


def test_every_engine_says_what_its_addresses_mean(rk: Commands) -> None:
    assert rk("submit", "--type", "python.call", "--inputs", "{}").code == 0
    state_file = Path(".reefknot/state.db").absolute()
    assert engines.accepted_urls(shared_only=True) == "sqlite:PATH, nats://HOST:PORT or stub://NAME"
    files = [engines.file_of(url) for url in ("sqlite:a.db", "nats://h:4222/x", "tls://h", "memory:")]
    assert files == ["a.db", None, None, None]
    urls = ("sqlite:a.db", "nats://h", "memory", "sqlite", "a.db")
    assert [engines.has_file(url) for url in urls] == [True, *[False] * 4]
    assert all(map(engines.is_shared, ("sqlite:a.db", "nats://h", "stub://here")))
    assert not any(map(engines.is_shared, ("memory:", "memory", "memory:1f")))
    assert engines.url_of_file(state_file) == f"sqlite:{state_file}"
    assert engines.url_of_file(Path(__file__)) is None
    assert engines.engine_of(MemoryStore(SystemClock()).identity) is engines.engine_of("memory:"), "an open store's"
    assert engines.engine_of("nats:nats://here:4222") is engines.engine_of("tls://here")
