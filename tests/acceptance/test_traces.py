"""Traces as a collector gets them: spans of real processes arrive, nested, at a receiver of OTLP."""

import json
import socket
import time
from collections.abc import Iterator
from signal import SIGINT

import pytest

from reefknot.console.traces import FLUSH_S
from tests.acceptance.folder import ROOT, Folder, until
from tests.otlp_receiver import Receiver, receiving

CANARY = "zander-Trockenfisch_9!"
STEPS = """\
import os
import reefknot as rk

@rk.retry(attempts=2, base_delay=0.0, log=False)
def fetch(attempt):
    if attempt == 1:
        raise ConnectionError("the shop refused " + os.environ["SHOP_SECRET"])

@rk.block("own.flaky")
def flaky(inputs, context):
    if context.attempt <= inputs.get("failures", 2):
        raise ConnectionError("the shop refused " + os.environ["SHOP_SECRET"] + " and token=" + "abc" * 5)
    fetch(2)
    return {"traceparent": context.traceparent}
"""
CONFIG = """\
secrets: {shop: "env:SHOP_SECRET"}
worker:
  retries: {v2: {enabled: true, default_policy: {max_attempts: 3, base_delay_ms: 10, jitter_type: none}}}
  queue: {v2: {enabled: true}}
blocks:
  http: {allow: ["127.0.0.1"]}
"""
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def prepare(folder: Folder, *assignments: dict[str, object]) -> None:
    folder.write("reefknot.yaml", CONFIG)
    folder.write("shop.py", STEPS)
    folder.write_lines("work.jsonl", *assignments)
    folder.set_variable("SHOP_SECRET", CANARY)


def flaky(name: str, failures: int = 2, **more: object) -> dict[str, object]:
    return {"assignment_id": name, "job": {"type": "own.flaky", "payload": {"failures": failures}}, **more}


def run(folder: Folder) -> tuple[int, str, str]:
    return folder.ends(folder.start("run", "work.jsonl", "--module", "shop", "--results", "results.jsonl"))


def test_the_spans_of_a_job_arrive_nested_below_the_span_of_its_caller(folder: Folder, receiver: Receiver) -> None:
    """A step that fails twice: one job, three attempts, and the retry inside the step below the last of them."""
    prepare(folder, flaky("a", correlation={"traceparent": TRACEPARENT}))
    folder.set_variable("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)

    code, _, err = run(folder)

    assert code == 0, err
    (submitted,), (job,) = receiver.named("reefknot.submit own.flaky"), receiver.named("reefknot.job own.flaky")
    attempts = receiver.children(job)
    assert {one.trace_id for one in receiver.spans} == {TRACE}
    assert (submitted.parent_id, job.parent_id) == (SPAN, submitted.span_id)
    assert {one.name for one in attempts} == {"reefknot.attempt"}
    of_each = [
        (*(one.attributes[f"reefknot.{name}"] for name in ("attempt", "outcome")), one.is_error) for one in attempts
    ]
    assert of_each == [(1, "retried", True), (2, "retried", True), (3, "succeeded", False)]
    first = attempts[0].attributes
    assert (first["reefknot.error_code"], first["reefknot.wait_s"]) == ("NETWORK_ERROR", pytest.approx(0.01))
    end = (job.attributes["reefknot.outcome"], job.attributes["reefknot.attempts"], job.is_error)
    assert end == ("recovered", 3, False)
    assert job.began <= attempts[0].began
    assert job.ended >= attempts[-1].ended
    (retry,) = receiver.children(attempts[-1])
    assert retry.name == "reefknot.retry fetch"
    assert [one.name for one in receiver.children(retry)] == ["reefknot.attempt"]
    assert receiver.services == {"reefknot"}
    result = json.loads((folder.path / "results.jsonl").read_text())
    assert result["trace_id"] == TRACE
    assert result["output"]["traceparent"] == f"00-{TRACE}-{attempts[-1].span_id}-01"


@pytest.mark.parametrize("is_secret", [True, False], ids=["secret", "control"])
def test_no_span_holds_a_configured_secret_or_a_token(folder: Folder, receiver: Receiver, is_secret: bool) -> None:
    """The control: the canary would be seen."""
    prepare(folder, flaky("a", failures=9), flaky(f"id-{CANARY}", failures=9))
    if not is_secret:
        folder.config.write_text(CONFIG.partition("\n")[2])
    folder.set_variable("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    code, _, err = run(folder)
    assert code == 1, err
    jobs = receiver.named("reefknot.job own.flaky")
    assert [one.attributes["reefknot.outcome"] for one in jobs] == ["error", "error"]
    assert all(one.is_error and len(receiver.children(one)) == 4 for one in jobs)
    sent = b"".join(receiver.bodies)
    assert b"the shop refused" in sent  # else this would show nothing
    assert (CANARY.encode() in sent) is not is_secret
    assert (b"abcabc" in sent, b"Traceback" in sent) == (False, False)


def test_a_job_goes_through_all_processes_and_its_server_in_one_trace(folder: Folder, receiver: Receiver) -> None:
    """Submitted by one process, routed and worked on by others; `http.request` sends the span of its attempt."""
    prepare(folder)
    folder.set_variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/v1/traces")
    folder.set_variable("OTEL_SERVICE_NAME", "shop")
    router = folder.part("router")
    worker = folder.part("worker", "--module", "shop")
    inputs = json.dumps({"url": f"{receiver.url}/price"})

    client = folder.start("submit", "--type", "http.request", "--inputs", inputs, "--wait", "--timeout", "20")
    code, _, err = folder.ends(client)
    for part in (worker, router):
        folder.stop(part, SIGINT)

    assert code == 0, err
    (submitted,) = receiver.named("reefknot.submit http.request")
    (job,) = receiver.children(submitted)
    (attempt,) = receiver.children(job)
    assert submitted.parent_id == ""
    assert job.attributes["reefknot.outcome"] == attempt.attributes["reefknot.outcome"] == "succeeded"
    assert [one["traceparent"] for one in receiver.headers] == [f"00-{attempt.trace_id}-{attempt.span_id}-01"]
    assert receiver.services == {"shop"}


def test_the_attempts_of_two_workers_are_children_of_one_job(folder: Folder, receiver: Receiver) -> None:
    """The first worker makes the first attempt and goes away; the second one makes the second, and ends the job."""
    prepare(folder)
    folder.write("reefknot.yaml", CONFIG.replace("base_delay_ms: 10", "base_delay_ms: 2000"))
    folder.set_variable("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    router, first = folder.part("router"), folder.part("worker", "--module", "shop", "--worker-id", "first")
    assert folder("submit", "--type", "own.flaky", "--inputs", '{"failures": 1}', "--id", "a").code == 0
    until(lambda: bool(folder.job("a")["attempts"]))
    folder.stop(first, SIGINT)
    second = folder.part("worker", "--module", "shop", "--worker-id", "second")
    until(lambda: folder.state("a") == "succeeded")
    for part in (second, router):
        folder.stop(part, SIGINT)

    (job,) = receiver.named("reefknot.job own.flaky")
    attempts = receiver.children(job)
    assert [one.attributes["reefknot.outcome"] for one in attempts] == ["retried", "succeeded"]
    assert attempts[0].pid != attempts[1].pid == job.pid
    assert job.began <= attempts[0].began
    assert job.attributes["reefknot.outcome"] == "recovered"


def test_up_sends_its_spans_at_its_end_and_commands_of_one_process_in_turn(folder: Folder, receiver: Receiver) -> None:
    prepare(folder)
    folder.set_variable("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    system = folder.start("up", "--module", "shop")
    for name in ("a", "b"):
        folder.submit("own.flaky", name, "--wait", "--timeout", "30")
    folder.stop(system, SIGINT)
    sent = receiver.named("reefknot.submit own.flaky")
    assert [one.attributes["reefknot.job_id"] for one in sent] == ["a", "b"]
    for job in receiver.named("reefknot.job own.flaky"):
        assert [one.name for one in receiver.children(job)] == ["reefknot.attempt"] * 3


def test_without_the_variables_nothing_is_sent_but_a_callers_traceparent(folder: Folder, receiver: Receiver) -> None:
    request = {"type": "http.request", "payload": {"url": f"{receiver.url}/price"}}
    other: dict[str, object] = {"assignment_id": "bad", "job": request, "correlation": {"traceparent": "00-zz-1-01"}}
    prepare(folder, {"assignment_id": "b", "job": request, "correlation": {"traceparent": TRACEPARENT}}, other)
    code, _, err = run(folder)
    assert code == 0, err
    assert sorted(one.get("traceparent", "") for one in receiver.headers) == ["", TRACEPARENT]
    assert receiver.bodies == []


def test_without_the_extra_a_warning_names_it_and_the_work_is_done(folder: Folder, receiver: Receiver) -> None:
    prepare(folder, flaky("a", failures=0))
    hidden = folder.path / "without_otel" / "opentelemetry"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not installed')\n")
    folder.set_variable("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    folder.set_variable("PYTHONPATH", f"{hidden.parent}:{ROOT / 'src'}")

    program = ("-c", "from reefknot.console.cli import main; main()")
    code, out, err = folder.ends(folder.start("run", "work.jsonl", "--module", "shop", program=program))

    assert (code, "1 succeeded" in out) == (0, True), err
    assert "the environment asks for traces, which need the extra 'otel': pip install '.[otel]' in a checkout" in err
    assert receiver.bodies == []


def test_a_collector_that_never_answers_delays_no_work_and_the_end_by_a_few_seconds_at_most(folder: Folder) -> None:
    prepare(folder, *(flaky(f"a{number}", failures=0) for number in range(20)))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        folder.set_variable("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        code, out, err = run(folder)
        took = time.monotonic() - began

    assert code == 0, err
    words = out.split()
    assert words[:2] == ["20", "assignments"]
    assert f"the last spans were not sent within {FLUSH_S:g} s" in err
    assert FLUSH_S < took < FLUSH_S + float(words[3]) + 20
