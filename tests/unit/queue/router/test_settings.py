"""What the `router` section says, and what stands in where it says nothing."""

from pathlib import Path
from typing import Any

import pytest

from reefknot.app.system import worker_settings
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.model.admission import Rules
from reefknot.queue.router.settings import LEASE_S, PATIENCE_S, RouterSettings, settings_from


def read(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "reefknot.yaml"
    file.write_text(text)
    return load_settings(str(file), environ={}, cwd=tmp_path)


def routing(tmp_path: Path, text: str) -> RouterSettings:
    settings = read(tmp_path, text)
    return settings_from(settings.configuration, worker_settings(settings).rules)


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


@pytest.mark.parametrize(("word", "sends"), [("cp1", True), ("ours", False), ("null", False)])
def test_the_shared_subject_is_sent_to_only_when_it_belongs_to_others(tmp_path: Path, word: str, sends: bool) -> None:
    assert routing(tmp_path, f"router: {{shared_subject: {word}}}\n").shared_subject is sends


@pytest.mark.parametrize(
    "text", ["patience: 5", "patience_seconds: 0", "lease_seconds: 0.5", "max_queue_size: 0", "shared_subject: both"]
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"reefknot\.yaml:1:"):
        read(tmp_path, f"router: {{{text}}}\n")


def test_the_section_is_no_longer_accepted_unread(tmp_path: Path) -> None:
    assert not [line for line in read(tmp_path, "router: {max_queue_size: 9}\n").warnings if "router" in line]


@pytest.mark.parametrize("wrong", [{"lease": 0.0}, {"patience": -1.0}, {"patience": float("inf")}])
def test_settings_that_no_router_could_hold_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="a number of seconds above 0"):
        RouterSettings(**wrong)
    assert RouterSettings().rules == Rules()
