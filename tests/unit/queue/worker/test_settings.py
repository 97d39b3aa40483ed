"""Settings of a worker from a configuration, and without one."""

from pathlib import Path

from reefknot.policy.model.defaults import builtin_book
from reefknot.policy.settings import load_settings
from reefknot.queue.model.admission import Rules
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
    assert settings.lease == 9.0
    assert dict(POOLS) == {"cpu": 4, "gpu": 1, "io": 8}


def test_the_default_settings_have_both_gates_open() -> None:
    settings = default_settings()

    assert (settings.retries_v2, settings.queue_v2, settings.rules) == (True, True, Rules())
    assert settings.slots_for("cpu") == 4
    assert settings.slots_for("unheard-of") == 4
    assert settings.book.hash == builtin_book().hash
