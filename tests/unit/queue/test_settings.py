"""Settings of a worker and of a router from a configuration, and what stands in where it says nothing."""

from pathlib import Path
from typing import Any

import pytest

from reefknot.app.system import worker_settings
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.policy.model.defaults import builtin_book
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.model.admission import Rules
from reefknot.queue.router import settings as router_settings
from reefknot.queue.router.settings import LEASE_S, PATIENCE_S, RouterSettings
from reefknot.queue.worker.settings import POOLS, ThrottleSettings, default_settings, settings_from


def test_pools_and_their_sizes_come_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "reefknot.yaml").write_text(
        "worker:\n"
        "  queue:\n"
        "    v2: {max_queue_size: 7, resource_pools: {gpu: {max_concurrency: 2}, tpu: {}, io: {max_queue_size: 3}}}\n"
        "  retries: {v2: {throttle: {tokens: 4.0}}}\n"
        "  quarantine_failed: true\n",
        encoding="utf-8",
    )
    loaded = load_settings(environ={}, cwd=tmp_path)
    settings = settings_from(loaded.configuration, loaded.book, retries_gate=False, queue_gate=True, lease=9.0)
    assert settings.concurrency == {"cpu": 4, "gpu": 2, "io": 8, "tpu": 4}
    assert [settings.rules_for(name).size for name in ("cpu", "gpu", "io", "tpu")] == [7, 7, 3, 7]
    assert (settings.retries_v2, settings.queue_v2, settings.quarantine_failed) == (False, True, True)
    assert settings.throttle == ThrottleSettings(tokens=4.0)
    assert (settings.lease, dict(POOLS)) == (9.0, {"cpu": 4, "gpu": 1, "io": 8})


def test_the_default_settings_have_both_gates_open() -> None:
    settings = default_settings()
    assert (settings.retries_v2, settings.queue_v2, settings.rules) == (True, True, Rules())
    assert settings.slots_for("cpu") == 4
    assert settings.slots_for("unheard-of") == 4
    assert settings.book.hash == builtin_book().hash


def read(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "reefknot.yaml"
    file.write_text(text)
    return load_settings(str(file), environ={}, cwd=tmp_path)


def routing(tmp_path: Path, text: str) -> RouterSettings:
    settings = read(tmp_path, text)
    return router_settings.settings_from(settings.configuration, worker_settings(settings).rules)


QUEUE = "worker: {queue: {v2: {max_queue_size: 77, max_wait_fraction: 0.4}}}\n"


def test_what_is_not_said_is_as_in_the_workers_queue(tmp_path: Path) -> None:
    found = routing(tmp_path, QUEUE)
    assert (found.rules.size, found.rules.max_wait_fraction) == (77, 0.4)
    assert (found.lease, found.patience, found.shared_subject) == (LEASE_S, PATIENCE_S, False)


def test_what_is_said_holds(tmp_path: Path) -> None:
    said = "router: {max_queue_size: 9, max_wait_fraction: null, patience_seconds: 5, lease_seconds: 60}\n"
    found = routing(tmp_path, QUEUE + said)
    assert (found.rules.size, found.rules.max_wait_fraction) == (9, None)
    assert (found.patience, found.lease, found.renew_every) == (5.0, 60.0, 20.0)
    assert not [line for line in read(tmp_path, said).warnings if "router" in line], "it is not left unread"


def test_the_shared_subject_is_sent_to_only_when_it_belongs_to_others(tmp_path: Path) -> None:
    for word, sends in (("cp1", True), ("ours", False), ("null", False)):
        assert routing(tmp_path, f"router: {{shared_subject: {word}}}\n").shared_subject is sends


def test_a_mistake_is_told_with_its_place(tmp_path: Path) -> None:
    times = "patience: 5", "patience_seconds: 0", "lease_seconds: 0.5"
    for text in (*times, "max_queue_size: 0", "shared_subject: both"):
        with pytest.raises(ConfigurationError, match=r"reefknot\.yaml:1:"):
            read(tmp_path, f"router: {{{text}}}\n")


def test_settings_that_no_router_could_hold_are_refused() -> None:
    given: tuple[dict[str, Any], ...] = ({"lease": 0.0}, {"patience": -1.0}, {"patience": float("inf")})
    for wrong in given:
        with pytest.raises(ParameterError, match="a number of seconds above 0"):
            RouterSettings(**wrong)
    assert RouterSettings().rules == Rules()
