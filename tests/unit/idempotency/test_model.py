"""Who may do it, and what came of it."""

from hashlib import sha256
from typing import Any

import pytest
from msgspec import structs

from reefknot.core.time import Moment
from reefknot.errors import KeyTooLongError, ParameterError, ParameterTypeError, ResultTooLargeError
from reefknot.idempotency import model
from tests.rows import for_each_row

NOW = Moment(1_000, 50_000)
RETENTION = 10_000
ASKING = model.ClaimRequest("k", "me", "print", 500)


def held(*, guard: bool = False) -> model.KeyRecord:
    answer = model.claim(None, structs.replace(ASKING, guard=guard), fence=3, now=NOW, retention_ms=RETENTION)
    assert isinstance(answer, model.Claimed)
    return answer.record


def ended(ending: model.Ending, record: model.KeyRecord | None = None) -> model.KeyRecord:
    answer = model.finish(record or held(), model.Claim("k", "me", 3), ending, now=NOW, retention_ms=RETENTION)
    assert isinstance(answer, model.KeyRecord)
    return answer


def ask(record: model.KeyRecord | None, *, owner: str = "you", fingerprint: str = "print", now: Moment = NOW) -> object:
    asking = model.ClaimRequest("k", owner, fingerprint, 500)
    return model.claim(record, asking, fence=9, now=now, retention_ms=RETENTION)


def test_the_key_is_sha256_of_canonical_json_of_the_four_names_in_any_order_of_parameters() -> None:
    text = b'{"additional_params":{},"correlation_id":null,"operation":"op","tenant_id":null}'
    assert model.compute_key("op") == sha256(text).hexdigest()
    one = model.compute_key("op", "t", "c", {"a": {"x": 1, "y": [1, 2]}, "b": 2})
    assert one == model.compute_key("op", "t", "c", {"b": 2, "a": {"y": [1, 2], "x": 1}})
    assert len(one) == 64
    keys = {model.compute_key("op", *two) for two in ((None, None), ("", None), (None, ""), ("", ""))}
    assert len(keys) == 4, "no tenant differs from an empty one"
    assert model.compute_key("op", additional_params=None) == model.compute_key("op", additional_params={})


@for_each_row(
    ("key", "error"),
    [
        *((key, None) for key in ("k", "k" * model.LONGEST_KEY, "ä" * (model.LONGEST_KEY // 2))),
        ("", ParameterError),
        (None, ParameterTypeError),
        ("\ud800", ParameterError),
        ("k" * (model.LONGEST_KEY + 1), KeyTooLongError),
        ("ä" * (model.LONGEST_KEY // 2 + 1), KeyTooLongError),
    ],
)
def test_a_key_is_a_text_within_its_bounds(key: str, error: type[Exception] | None) -> None:
    if error is None:
        assert model.checked_key(key) == key
        return
    with pytest.raises(error) as caught:
        model.checked_key(key)
    if isinstance(caught.value, KeyTooLongError):
        assert (caught.value.length, caught.value.limit) == (len(key.encode()), model.LONGEST_KEY)


def test_an_absent_key_is_claimed_held_until_its_lease_ends_and_then_taken_over() -> None:
    whose = {"key": "k", "state": model.KeyState.IN_PROGRESS, "owner": "me", "fence": 3, "fingerprint": "print"}
    lease = {"lease_until": 1_500, "lease_ms": 500, "guard": False}
    times = {"created_at": 50_000, "updated_at": 50_000, "expires_at": 60_500}
    assert structs.asdict(held()) == whose | lease | times | dict.fromkeys(("result", "failure", "metadata"))
    assert ask(held(), now=Moment(1_499, 50_499)) == model.Busy(held(), 1)
    answer = ask(held(), now=Moment(1_500, 50_500))
    assert isinstance(answer, model.Claimed)
    assert answer.taken_over
    assert answer.claim == model.Claim("k", "you", 9)
    assert answer.record.created_at == 50_000


def test_a_guarded_key_is_not_taken_over_and_its_slow_owner_may_still_tell_the_outcome() -> None:
    answer = ask(held(guard=True), now=Moment(1_500, 50_500))
    assert isinstance(answer, model.Uncertain)
    assert (answer.record.state, answer.record.updated_at) == (model.KeyState.UNKNOWN, 50_500)
    assert ask(answer.record) == model.Uncertain(answer.record)
    assert ended(model.Done("1"), answer.record).state is model.KeyState.DONE


def test_the_owner_asking_again_gets_the_same_record_an_ended_key_is_a_hit_and_a_released_one_claimed() -> None:
    assert ask(held(), owner="me") == model.Claimed(held())
    for record in (ended(model.Done("1")), ended(model.Failed("2"))):
        assert ask(record) == model.Hit(record)
    answer = ask(ended(model.Released()), now=Moment(2_000, 51_000))
    assert isinstance(answer, model.Claimed)
    assert not answer.taken_over
    assert (answer.record.created_at, answer.record.updated_at) == (50_000, 51_000)


@for_each_row("record", [held(), ended(model.Done("1")), ended(model.Released()), ended(model.Unknown())])
def test_another_payload_is_a_conflict_in_every_state_unless_a_fingerprint_is_empty(record: model.KeyRecord) -> None:
    assert ask(record, fingerprint="other") == model.Conflict(record, "other")
    done = ended(model.Done("1"))
    assert ask(done, fingerprint="") == model.Hit(done)
    blank = structs.replace(done, fingerprint="")
    assert ask(blank, fingerprint="other") == model.Hit(blank)


@pytest.mark.parametrize("ending", [model.Done("1"), model.Failed("1"), model.Released()])
def test_past_its_retention_an_ended_key_is_spent_and_claimed_anew(ending: model.Ending) -> None:
    record = ended(ending)
    assert not model.is_spent(record, Moment(0, 59_999))
    assert model.is_spent(record, Moment(0, 60_000))
    answer = ask(record, fingerprint="other", now=Moment(0, 60_000))
    assert isinstance(answer, model.Claimed)
    assert answer.record.created_at == 60_000


def test_renewing_moves_the_lease_and_a_live_lease_a_guard_or_an_unknown_outcome_is_never_spent() -> None:
    later = Moment(1_400, 50_400)
    record = model.renew(held(), model.Claim("k", "me", 3), now=later, lease_ms=700, retention_ms=RETENTION)
    assert isinstance(record, model.KeyRecord)
    assert (record.lease_until, record.lease_ms, record.expires_at, record.updated_at) == (2_100, 700, 61_100, 50_400)
    late = Moment(10**9, 10**9)
    assert not model.is_spent(ended(model.Unknown()), late)
    assert not model.is_spent(held(guard=True), late)
    assert not model.is_spent(held(), Moment(1_499, 10**9))
    assert model.is_spent(held(), Moment(1_500, 10**9))


@pytest.mark.parametrize("stale", [model.Claim("k", "you", 3), model.Claim("k", "me", 2)])
def test_a_stale_claim_is_refused_by_every_write_and_an_ended_key_by_a_renewal(stale: model.Claim) -> None:
    for record in (held(), None):
        assert model.renew(record, stale, now=NOW, lease_ms=1, retention_ms=1) == model.Lost(record)
        assert model.finish(record, stale, model.Done("1"), now=NOW, retention_ms=1) == model.Lost(record)
    done = ended(model.Done("1"))
    assert model.renew(done, model.Claim("k", "me", 3), now=NOW, lease_ms=1, retention_ms=1) == model.Lost(done)


@for_each_row(
    ("ending", "state", "texts"),
    [
        (model.Done("1", "2"), model.KeyState.DONE, ("1", None, "2")),
        (model.Failed("1", "2"), model.KeyState.FAILED, (None, "1", "2")),
        (model.Released(), model.KeyState.RELEASED, (None, None, None)),
        (model.Unknown("1"), model.KeyState.UNKNOWN, (None, "1", None)),
    ],
)
def test_an_ending_is_written_down_with_its_retention(ending: model.Ending, state: model.KeyState, texts: Any) -> None:
    record = ended(ending)
    assert record.state is state
    assert (record.result, record.failure, record.metadata) == texts
    assert (record.updated_at, record.expires_at) == (50_000, 60_000)


def test_the_same_ending_twice_changes_nothing_and_only_an_unknown_outcome_can_be_resolved() -> None:
    mine, record = model.Claim("k", "me", 3), ended(model.Done("1"))
    assert model.finish(record, mine, model.Done("1"), now=Moment(9, 99_999), retention_ms=RETENTION) is record
    for other in (model.Done("2"), model.Failed("1"), model.Released()):
        assert model.finish(record, mine, other, now=NOW, retention_ms=RETENTION) == model.Lost(record)
    told = model.resolve(ended(model.Unknown()), model.Done("1"), now=NOW, retention_ms=RETENTION)
    assert isinstance(told, model.KeyRecord)
    assert told.state is model.KeyState.DONE
    assert model.resolve(told, model.Failed("1"), now=NOW, retention_ms=RETENTION) == model.Lost(told)
    assert model.resolve(None, model.Done("1"), now=NOW, retention_ms=RETENTION) == model.Lost(None)


@for_each_row(
    ("ending", "size"),
    [
        *(
            (ending, 0)
            for ending in (
                model.Done("x" * 6, "y" * 4),
                model.Done("ä" * 5),
                model.Failed("x" * 10),
                model.Released(),
                model.Unknown(),
            )
        ),
        *((ending, 11) for ending in (model.Done("x" * 7, "y" * 4), model.Failed("x" * 11), model.Unknown("x" * 11))),
        (model.Done("ä" * 6), 12),
    ],
)
def test_an_ending_beyond_its_bound_is_refused_with_both_sizes(ending: model.Ending, size: int) -> None:
    if size == 0:
        model.checked_ending(ending, 10)
        return
    with pytest.raises(ResultTooLargeError) as caught:
        model.checked_ending(ending, 10)
    assert (caught.value.size, caught.value.limit) == (size, 10)


def test_a_key_that_is_not_ascii_travels_as_its_hash() -> None:
    """A tab is a sign that headers may have; a line break ends one."""
    for key in ("", "order-7/0", "order 7\t/0"):
        assert model.header_key(key) == key
    for key in ("märz/0", "a\nb/0", "\x7f/0", "\ud800/0"):
        assert model.header_key(key) == sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
