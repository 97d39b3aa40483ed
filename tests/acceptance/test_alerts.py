"""Alerts where operators meet them: failing work raises one, its end resolves it, and a webhook is told of both."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.acceptance.folder import Folder, until, without

QUICK = without("slow-looks")


class Hook(BaseHTTPRequestHandler):
    """A receiver of webhooks that keeps what it is told."""

    told: list[dict[str, Any]]
    status = 204

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.told.append(json.loads(body))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def hook(folder: Folder) -> Iterator[list[dict[str, Any]]]:
    """What a server on this host is told, which the configuration names as the webhook."""
    handler = type("OwnHook", (Hook,), {"told": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        off = "quarantine_growth: {enabled: false}, success_rate: {enabled: false}"
        folder.configure(
            "  http: {allow: [127.0.0.1]}\nalerts:\n"
            f"  rules: {{retry_rate: {{threshold: 2, clear: 1, for_seconds: 0}}, {off}}}\n"
            f"  webhook: http://127.0.0.1:{server.server_port}/alerts\n"
        )
        yield handler.told  # type: ignore[attr-defined] # it is there
        server.shutdown()


def events(folder: Folder, code: str) -> list[dict[str, Any]]:
    """The events of alerts with this code."""
    kind = {"RK-801": "alert_raised", "RK-802": "alert_resolved"}[code]
    return folder.events(kind)


def retry(folder: Folder) -> None:
    """Two jobs at once with two retries each: enough to raise the alert once, and too few to raise it again."""
    job = {"type": "own.flaky", "payload": {"failures": 9}}
    names = ("job-0", "job-1")
    folder.write_lines("flaky.jsonl", *({"assignment_id": one, "request_id": one, "job": job} for one in names))
    assert folder("submit", "flaky.jsonl").code == 0


def test_two_systems_tell_an_alert_and_its_end_once_and_by_webhook(folder: Folder, hook: list[dict[str, Any]]) -> None:
    for _ in range(2):
        folder.up(program=QUICK)
    retry(folder)

    until(lambda: [one["state"] for one in hook] == ["raised", "resolved"])
    found = folder.json("alert", "list")
    assert (found["alerts"], [one["alert"] for one in found["resolved"]]) == ([], ["retry_rate"])
    assert found["watched"]
    (raised,), (resolved,) = events(folder, "RK-801"), events(folder, "RK-802")
    assert (raised["alert"], raised["threshold"], raised["value"] > 2) == ("retry_rate", 2, True)
    assert resolved["since"] == raised["since"] == hook[0]["since"]
    same = {name: raised[name] for name in ("alert", "value", "threshold", "since", "text")}
    assert hook[0] == {"state": "raised", **same}
    steps = [one["id"] for one in folder.json("job", "list", "--type", "http.request")["jobs"]]
    assert [one.rpartition("-")[0].startswith("alert-retry_rate") for one in steps] == [True, True], steps


def test_an_alert_that_was_raised_is_there_after_its_system_ended(folder: Folder, hook: list[dict[str, Any]]) -> None:
    """Nobody looks then: the list says so, and how old it is."""
    process = folder.up(program=QUICK)
    retry(folder)
    until(lambda: bool(hook))
    folder.kill(process)

    done = folder("alert", "list")
    assert done.code == 0
    assert done.out.splitlines()[0].split() == ["alert", "since", "now", "what"]
    assert "retry_rate" in done.out
    assert "the last look was" in done.err
    (job,) = [one for one in folder.json("job", "list")["jobs"] if one["id"].startswith("alert-")]
    shown = folder("job", "show", job["id"], "--json").out
    assert "/alerts" not in shown, "who reads may not post"
    assert '"url": "config:alerts.webhook"' in shown
    assert "no system is running now; start one with: reefknot up" in done.err


@pytest.mark.parametrize("reference", ["env:HOOK", "file:hook"])
def test_the_address_of_a_webhook_is_in_no_payload_that_another_shell_is_shown(
    folder: Folder, hook: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    """That shell has neither the variable nor the file, so it could not redact what it does not know."""
    path = folder.path / "reefknot.yaml"
    written = path.read_text().partition("  webhook: ")
    address = written[2].strip()
    path.write_text(f"{written[0]}  webhook: {reference}\n")
    folder.set_variable("HOOK", address)
    folder.write("hook", f"{address}\n")
    monkeypatch.setattr(Hook, "status", 410)
    process = folder.up(program=QUICK)
    retry(folder)
    until(lambda: any(one["id"].startswith("alert-") for one in folder.json("quarantine", "list")["items"]))
    folder.kill(process)
    monkeypatch.delenv("HOOK")
    (folder.path / "hook").unlink()

    assert hook[0]["alert"] == "retry_rate", "the step found its way"
    (job,) = {one["id"] for one in folder.json("quarantine", "list")["items"] if one["id"].startswith("alert-")}
    for noun in ("job", "quarantine"):
        for form in ((), ("--json",)):
            shown = folder(noun, "show", job, *form)
            assert shown.code == 0, shown.err
            assert reference in shown.out
            assert "/alerts" not in shown.out


def test_the_list_shows_the_limits_that_are_configured(folder: Folder) -> None:
    folder.configure("alerts: {rules: {retry_rate: {threshold: 7, clear: 3}, success_rate: {threshold: 0.99}}}\n")
    folder.nap("one", 0)
    rules = {one["alert"]: one for one in folder.json("alert", "list")["rules"]}
    assert (rules["retry_rate"]["threshold"], rules["retry_rate"]["clear"]) == (7, 3)
    assert (rules["success_rate"]["clear"], rules["success_rate"]["resolved_when"]) == (1, "at 1")
    assert rules["critical_workers"]["resolved_when"] == "at 0"


def test_limits_that_make_no_sense_and_a_webhook_that_is_no_url_are_mistakes_with_their_place(folder: Folder) -> None:
    before = folder.config.read_text()
    clear, threshold = "alerts.rules.success_rate.clear", "alerts.rules.success_rate.threshold"
    for section, message in (
        ("rules: {retry_rate: {threshold: 5, clear: 6}}", "retry_rate.clear: 6 is not accepted; accepted: at most the"),
        ("rules: {success_rate: {clear: 0.5}}", f"{clear}: 0.5 is not accepted; accepted: at least the"),
        ("rules: {success_rate: {threshold: 95}}", f"{threshold}: 95 is not accepted; accepted: at most 1"),
        ("rules: {success_rate: {clear: 1.045}}", f"{clear}: 1.045 is not accepted; accepted: at most 1"),
        ("rules: {retry_speed: {threshold: 5}}", "did you mean 'retry_rate'"),
        ("rules: {retry_rate: {threshold: -1}}", "-1 is out of bounds"),
        ("webhook: 'ftp://user:hunter2@example.org'", "alerts.webhook"),
    ):
        folder.config.write_text(f"{before}alerts:\n  {section}\n")
        done = folder("config", "check")
        told = (done.code, message in done.err, "reefknot.yaml:" in done.err, "hunter2" in done.err)
        assert told == (78, True, True, False), done.err
