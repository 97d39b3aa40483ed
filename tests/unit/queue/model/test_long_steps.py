"""Room for steps that take longer than the mean, when a submission with a deadline has to wait."""

from reefknot.queue.model.admission import Accept, Arrival, Reject, RejectReason
from reefknot.queue.model.submission import OpenWork, ServiceTime, Stage, SubmissionRules, admit_submission

RULES = SubmissionRules(max_wait_fraction=1.0)


def behind(number: int) -> OpenWork:
    """Two slots, steps of a second, and so many ahead."""
    return OpenWork([(Stage.RUNNING.value, 0, "", number)], slots=2, service=ServiceTime(100, 1000.0))


def test_a_submission_that_waits_needs_twice_the_mean_service_time_after_its_turn_comes() -> None:
    """Its turn comes after 500 ms."""
    refused = admit_submission(behind(2), Arrival(0, 2499), RULES)

    assert admit_submission(behind(2), Arrival(0, 2500), RULES) == Accept()
    assert isinstance(refused, Reject)
    assert refused.reason is RejectReason.WOULD_MISS_DEADLINE


def test_a_submission_that_a_free_slot_takes_at_once_may_have_as_little_time_as_it_likes() -> None:
    assert admit_submission(behind(1), Arrival(0, 1), RULES) == Accept()
