"""Options of `@rk.block`: checked when the step is decorated, and a layer of the policy book."""

import json
import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.core.policy import Jitter
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.policy.model.defaults import builtin_book
from reefknot.steps.port import own_classes, own_policies
from reefknot.steps.python import BlockRegistry, PythonBlock, block, registry
from tests.rows import for_each_row
from tests.warm_commands import run_warm


def decorated(**options: Any) -> PythonBlock:
    """A step with these options."""
    own = BlockRegistry()

    @block("order.send", into=own, **options)
    def send(inputs: dict[str, Any], context: object) -> None: ...

    (made,) = own.blocks().values()
    assert isinstance(made, PythonBlock)
    return made


# ---- what is accepted ------------------------------------------------------------------------------------------------


def test_options_are_fields_of_the_policy_with_the_line_of_the_decorator() -> None:
    step = decorated(
        attempts=3, base_delay=2, max_delay=60, multiplier=3, jitter="none", timeout=120, attempt_timeout=30
    )

    policy = builtin_book().with_blocks(own_policies([step])).resolve("block:order.send")

    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.multiplier) == (3, 2.0, 60.0, 3.0)
    assert (policy.jitter, policy.time_budget, policy.attempt_timeout) == (Jitter.NONE, 120.0, 30.0)
    file, _, line = policy.provenance["max_attempts"].source.rpartition(":")
    assert file == __file__
    assert Path(file).read_text().splitlines()[int(line) - 1].strip() == '@block("order.send", into=own, **options)'


def test_an_option_that_is_not_given_is_left_to_the_book_and_seconds_may_be_a_timedelta() -> None:
    assert own_policies([decorated()]) == {}
    assert own_policies([decorated(timeout=None, attempt_timeout=None)]) == {}
    assert list(own_policies([decorated(attempts=2)])["block:order.send"]) == ["max_attempts"]
    durations = {"base_delay": timedelta(seconds=3), "timeout": timedelta(minutes=2)}
    step = decorated(attempt_timeout=timedelta(seconds=5), **durations)
    assert step.policy == {"base_delay": 3.0, "time_budget": 120.0, "attempt_timeout": 5.0}


def test_a_delay_that_no_wait_uses_may_be_longer_than_the_time() -> None:
    assert decorated(base_delay=60, timeout=30, attempts=1).policy["base_delay"] == 60.0
    assert decorated(base_delay=60, timeout=30, strategy="immediate").policy["base_delay"] == 60.0
    assert decorated(base_delay=20, timeout=30, jitter="decorrelated").policy["base_delay"] == 20.0


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("step order.send: ")]


@pytest.mark.parametrize(
    ("options", "v2", "words"),
    [
        ({"base_delay": 60}, {}, ("up to 60 s (base_delay, ", "often not retried", "timeout=210)")),
        ({"base_delay": 60, "jitter": "none", "attempts": 2}, {}, ("have 30 s", "never retried", "timeout=90)")),
        ({"base_delay": 60}, {"block_policies": {"order.send": {"timeout_ms": 20000}}}, ("timeout_ms to 200000",)),
        ({"base_delay": 60}, {"default_policy": {"timeout_ms": 600000}}, ()),
        ({"base_delay": 60}, {"enabled": False}, ()),
        ({"base_delay": 60, "attempts": 1}, {}, ()),
        ({"base_delay": 2}, {}, ()),
    ],
)
def test_a_worker_says_once_when_a_steps_wait_does_not_fit_into_its_time(
    options: dict[str, Any], v2: dict[str, Any], words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "_blocks", dict(registry._blocks))

        @rk.block("order.send", **options)
        async def send(inputs: Any, context: Any) -> None: ...

        config = {"worker": {"retries": {"v2": {"enabled": True, **v2}}}}
        with rk.testing.system_sync(send, config, workers=2):
            pass

    found = lines(caplog)
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


def test_a_class_and_a_destination_belong_to_the_step() -> None:
    step = decorated(resource_class="emails", destination="mail.example.com")

    assert (own_classes([step]), own_classes([decorated()])) == ({"order.send": "emails"}, {})
    assert step.destination({}) == "mail.example.com"


# ---- bad input -------------------------------------------------------------------------------------------------------


@for_each_row(
    ("options", "kind", "words"),
    [
        ({"attempts": 0}, ParameterError, ("attempts=0", "a whole number from 1")),
        ({"attempts": "3"}, ParameterTypeError, ("attempts='3'", "a whole number")),
        ({"attempts": True}, ParameterTypeError, ("attempts=True",)),
        ({"base_delay": -1}, ParameterError, ("base_delay=-1", "a number of seconds from 0")),
        ({"base_delay": "1s"}, ParameterTypeError, ("base_delay='1s'", "a number of seconds")),
        ({"base_delay": 9, "max_delay": 3}, ParameterError, ("base_delay=9", "at most max_delay, which is 3 s")),
        ({"base_delay": 60, "timeout": 30}, ParameterError, ("base_delay=60", "less than timeout, which is 30 s")),
        ({"base_delay": 30, "timeout": 30, "attempts": 2}, ParameterError, ("base_delay=30", "attempts=1 for no")),
        ({"multiplier": 0.5}, ParameterError, ("multiplier=0.5", "from 1 to 1000")),
        ({"jitter": "ful"}, ParameterError, ("jitter='ful'", "one of none, full, equal")),
        ({"strategy": "slow"}, ParameterError, ("strategy='slow'", "exponential_backoff")),
        ({"timeout": 0}, ParameterError, ("timeout=0", "a number of seconds above 0")),
        ({"timeout": "20"}, ParameterTypeError, ("timeout='20'",)),
        ({"attempt_timeout": timedelta(0)}, ParameterError, ("attempt_timeout=",)),
        ({"resource_class": ""}, ParameterError, ("resource_class=''", "the name of a class of work")),
        ({"resource_class": "a b"}, ParameterError, ("resource_class='a b'", "without blanks")),
        ({"resource_class": 7}, ParameterTypeError, ("resource_class=7", "the name of a class of work")),
        ({"destination": 7}, ParameterTypeError, ("destination=7", "the name of what the step talks to")),
        ({"atempts": 3}, ParameterTypeError, ("atempts=3", "no such option; did you mean 'attempts'?", "base_delay")),
        ({"max_retries": 3}, ParameterTypeError, ("max_retries=3", "did you mean 'attempts'?")),
        ({"queue": "emails"}, ParameterTypeError, ("queue='emails'", "did you mean 'resource_class'?")),
        ({"time_limit": 3}, ParameterTypeError, ("time_limit=3", "did you mean 'attempt_timeout'?")),
        ({"on": 5}, ParameterTypeError, ("on=5", "an exception class, a tuple of them, or a function")),
        ({"on": ()}, ParameterTypeError, ("on=()", "an exception class")),
        ({"on": "ValueError"}, ParameterTypeError, ("on='ValueError'", "an exception class")),
        ({"on": KeyboardInterrupt}, ParameterTypeError, ("KeyboardInterrupt is control flow",)),
        ({"on": lambda: True}, ParameterTypeError, ("on=lambda error: …", "takes no argument")),
        ({"autoretry_for": OSError}, ParameterTypeError, ("did you mean 'on'?",)),
    ],
)
def test_a_wrong_option_is_refused_by_its_name_when_the_step_is_decorated(
    options: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        decorated(**options)

    assert type(caught.value) is kind
    for one in words:
        assert one in str(caught.value)


# ---- from outside ----------------------------------------------------------------------------------------------------

STEPS = """\
import reefknot as rk


@rk.block("order.send", attempts=3, base_delay=0.01, jitter="none")
async def send(inputs, context):
    raise ConnectionResetError("reset by peer")
"""
GATES = "worker: {retries: {v2: {enabled: true%s}}, queue: {v2: {enabled: true}}}\n"
GENERAL = ", default_policy: {max_attempts: 8, base_delay_ms: 500}"
OF_THE_STEP = ", block_policies: {order.send: {max_attempts: 1}}"


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_warm(*words, cwd=folder, env={**os.environ, "HOME": str(folder), "COLUMNS": "200"})


@pytest.mark.parametrize(
    ("written", "attempts", "layer"),
    [("", 3, "step"), (GENERAL, 3, "step"), (OF_THE_STEP, 2, "target")],
    ids=["no policies", "defaults of all steps", "a policy of the step"],
)
def test_a_steps_own_policy_is_explained_obeyed_shown_and_replayed(
    tmp_path: Path, written: str, attempts: int, layer: str
) -> None:
    (tmp_path / "reefknot.yaml").write_text(GATES % written)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "work.json").write_text(json.dumps([{"assignment_id": "o-1", "job": {"type": "order.send"}}]))
    place = "steps.py:4"

    words = ("policy", "explain", "block:order.send", "--exception", "ConnectionResetError", "--module", "steps")
    explained = json.loads(command(tmp_path, *words, "--json").stdout)["policy"]["max_attempts"]
    assert (explained["value"], explained["layer"]) == (attempts, layer)
    assert place in command(tmp_path, *words).stdout
    if layer == "target":
        assert (explained["overrode"][0]["value"], explained["overrode"][0]["layer"]) == (3, "step")

    assert command(tmp_path, "run", "work.json", "--module", "steps").returncode == 1
    shown = command(tmp_path, "job", "show", "o-1")
    assert f"after {attempts} attempts" in shown.stdout
    assert (f"max_attempts is set at {place}" in shown.stdout) is (layer == "step")
    assert command(tmp_path, "audit", "replay").returncode == 0
    assert command(tmp_path, "audit", "verify").returncode == 0


def test_explain_and_run_tell_of_retries_that_are_lost_for_want_of_time(tmp_path: Path) -> None:
    (tmp_path / "reefknot.yaml").write_text(GATES % "")
    (tmp_path / "steps.py").write_text(STEPS.replace("base_delay=0.01", "base_delay=60"))
    (tmp_path / "work.json").write_text(json.dumps([{"assignment_id": "o-1", "job": {"type": "order.send"}}]))
    words = ("policy", "explain", "block:order.send", "--exception", "ConnectionResetError", "--module", "steps")
    advice = "the first wait is 60 s (base_delay, steps.py:4)"

    assert advice in command(tmp_path, *words).stdout
    assert advice in json.loads(command(tmp_path, *words, "--json").stdout)["warning"]
    assert command(tmp_path, "run", "work.json", "--module", "steps").stderr.count("write @rk.block(…, timeout=") == 1
