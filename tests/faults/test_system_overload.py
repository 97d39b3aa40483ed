"""More work than can be done: it costs only the excess. A real system, a real service over HTTP, an open load."""

from pathlib import Path

import pytest

from tests.faults.outside_load import engine_at
from tests.faults.points import ALL, either
from tests.faults.stub import stub
from tests.faults.system_load import Findings, Load, loaded

pytestmark = pytest.mark.alone

SERVICE_MS = 40
FASTEST, SLOWEST = 200.0, 50.0
"""What the service can do a second, at most and at least."""
DEADLINE_MS = either(1000, 2000)
SECONDS = float(either(3, 12))
REFUSALS_FOR_A_RUN = 3
"""At least so many requests are refused for what it costs to run one."""
ENGINES = ["sqlite", "nats"] if ALL else ["sqlite"]
TRIES = 3
"""A machine that stands still is no fault of the system: a run in which it did is made again."""


@pytest.fixture(scope="module")
def engine() -> str:
    """The kind of store; a test that is parametrized replaces it."""
    return "sqlite"


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory, engine: str) -> float:
    """Assignments a second that this machine runs over HTTP now, when the service itself costs no time."""
    folder = tmp_path_factory.mktemp("speed")
    fixed = {"per_second": 0, "seconds": 2.0, "deadline_ms": 10_000, "side_by_side": 16, "slots": 16}
    with stub(64, 0) as service, engine_at(folder, engine) as url:
        return loaded(Load(str(folder), service.port, engine=url, **fixed)).goodput  # type: ignore[arg-type]


def at_once_for(speed: float, times: float) -> int:
    """A service that is the narrow place: with it, runs and refusals take half of what this machine can do."""
    most = 0.5 * speed / (1 + (times - 1) / REFUSALS_FOR_A_RUN)
    return max(1, round(min(FASTEST, max(SLOWEST, most)) * SERVICE_MS / 1000))


def under(folder: Path, times: float, at_once: int, on: str = "sqlite", **changes: object) -> tuple[Findings, float]:
    """A load of so many times the capacity, and what the service could really do meanwhile."""
    folder.mkdir()
    with stub(at_once, SERVICE_MS) as service, engine_at(folder, on) as url:
        fixed: dict[str, object] = {"slots": 4 * at_once, "deadline_ms": DEADLINE_MS, "seconds": SECONDS, "engine": url}
        fixed["rise_s"] = max(0.5, 30 / service.capacity)
        plan = {"folder": str(folder), "port": service.port, "per_second": times * service.capacity} | fixed | changes
        found = loaded(Load(**plan))  # type: ignore[arg-type]
    return found, service.real_capacity


def undisturbed(found: Findings) -> bool:
    return found.starved < 0.05 and found.stood_still_s < 0.1


def wrong_with(found: Findings, capacity: float) -> list[str]:
    """Which of the promises about overload a run broke. What the machine took away was nobody's to keep."""
    had = 1.0 if undisturbed(found) else max(0.1, 1 - found.starved)
    deadline = DEADLINE_MS / 1000 / had
    broken = []
    if found.goodput < 0.9 * capacity * had:
        broken.append(f"goodput {found.goodput / capacity:.2f} of the capacity")
    if found.p99_s > deadline:
        broken.append(f"p99 of what was accepted {found.p99_s:.2f} s")
    if found.slowest_s > deadline + 0.5:
        broken.append(f"an answer after {found.slowest_s:.2f} s")
    if found.rss_mb[-1] - found.rss_mb[0] > 10:
        broken.append(f"memory went from {found.rss_mb[0]:.0f} to {found.rss_mb[-1]:.0f} MB")
    return broken


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 5, 10] if ALL else [5])
@pytest.mark.parametrize("queue_size", [50, 500] if ALL else [500])
@pytest.mark.parametrize("engine", ENGINES, scope="module")
def test_overload_costs_only_the_excess(tmp_path: Path, speed: float, times: int, queue_size: int, engine: str) -> None:
    """Whether the queue's count is little work or much: the bound in time holds."""
    at_once, judged = at_once_for(speed, times), []
    for number in range(TRIES):
        found, capacity = under(tmp_path / str(number), times, at_once, engine, queue_size=queue_size)
        assert (found.unacked, found.unrecorded) == (0, 0), "a refusal is told and on record, whatever the machine does"
        assert found.ended.get("refused", 0) > found.offered * (1 - 1 / times) * 0.7
        assert found.retry_after[0] > 0, "who is refused hears when to come back"
        assert found.deepest <= queue_size
        assert "unanswered" not in found.ended
        judged.append(wrong_with(found, capacity))
        print(
            f"{engine}, {times}x of {capacity:.0f}/s, {queue_size} places: goodput {found.goodput / capacity:.2f}, "
            f"p99 {found.p99_s:.2f} s, {found.ended}, {found.rss_mb} MB, starved {found.starved:.2f}: {judged[-1]}"
        )
        if undisturbed(found) or not judged[-1]:
            break
    assert [] in judged, judged


@pytest.mark.slow
def test_the_baseline_misses_the_deadline_under_the_same_load(tmp_path: Path, speed: float) -> None:
    """Without the bounded queue everything is accepted, and nearly everything comes too late."""
    at_once = at_once_for(speed, 5)
    found, capacity = under(tmp_path / "baseline", 5, at_once, queue_v2=False, told=False, queue_size=10_000)
    assert found.goodput < 0.5 * capacity
    assert found.p99_s > 3 * DEADLINE_MS / 1000
    assert "refused" not in found.ended
    assert len(wrong_with(found, capacity)) >= 2
