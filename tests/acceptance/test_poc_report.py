"""`docs/poc-report.md` says what the tests of the proof of concept measured, and would say so if they failed."""

import json
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

from tools import poc_report


@pytest.fixture(scope="module")
def results() -> str:
    """One real run of the tests."""
    return poc_report.run_tests()


def case(poc: str, *, inside: str = "", waits: list[int] | None = None) -> str:
    """A test case as pytest writes it."""
    run = {"flag": "on", "error": "network_error", "fails": 1, "waits_ms": waits or [], "executions": 1, "ok": True}
    fields = {"poc": poc, "name": "Name", "flag": "Enabled", "error": "network_error", "expected": "Retry"}
    measured = {} if waits is None else {"run": json.dumps(run)}
    properties = "".join(
        f"<property name={quoteattr(name)} value={quoteattr(value)} />" for name, value in (fields | measured).items()
    )
    return f"<testcase><properties>{properties}</properties>{inside}</testcase>"


def suite(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_the_page_is_what_the_tests_measure_now(results: str) -> None:
    assert poc_report.PAGE.read_text(encoding="utf-8") == poc_report.page(poc_report.rows(results))


def test_every_row_of_the_matrix_holds(results: str) -> None:
    rows = poc_report.rows(results)
    assert [row.poc for row in rows] == [f"POC-00{number}" for number in range(1, 9)]
    assert all(row.holds for row in rows)
    assert [run.waits_ms for run in rows[4].runs] == [(100, 200, 300), (100, 200, 400), (100, 200, 300)]


@pytest.mark.parametrize("inside", ["<failure />", "<error />", "<skipped />"])
def test_a_row_whose_test_did_not_pass_does_not_hold_and_shows_what_was_measured(inside: str) -> None:
    cases = [case(poc, waits=[100]) for poc in poc_report.IDS]
    cases[2] = case("POC-003", inside=inside, waits=[100, 999])
    rows = poc_report.rows(suite(*cases))
    assert [row.poc for row in rows if not row.holds] == ["POC-003"]
    text = poc_report.page(rows)
    assert "| POC-003 | Name | Enabled | `network_error` | Retry | **does not hold** |" in text
    assert "100 ms, 999 ms" in text
    assert "7 of 8 rows hold." in text


def test_a_row_without_a_measurement_does_not_hold_and_one_without_its_own_test_is_an_error() -> None:
    cases = [case(poc, waits=[100] if poc != "POC-008" else None) for poc in poc_report.IDS]
    assert not poc_report.rows(suite(*cases))[-1].holds
    for found, message in (
        ([case(poc, waits=[]) for poc in poc_report.IDS if poc != "POC-005"], "no test speaks for POC-005"),
        ([case("POC-001", waits=[]), case("POC-001", waits=[])], "two tests speak for POC-001"),
    ):
        with pytest.raises(poc_report.ReportError, match=message):
            poc_report.rows(suite(*found))


@pytest.fixture
def elsewhere(results: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page in a folder of the test's own, and the run that was made already."""
    page = tmp_path / "docs" / "poc-report.md"
    monkeypatch.setattr(poc_report, "ROOT", tmp_path)
    monkeypatch.setattr(poc_report, "PAGE", page)
    monkeypatch.setattr(poc_report, "run_tests", lambda: results)
    return page


def test_a_page_that_is_missing_or_says_something_else_is_found_and_left_alone(elsewhere: Path) -> None:
    assert (elsewhere.exists(), poc_report.main(["--check"])) == (False, 1)
    assert (poc_report.main([]), poc_report.main(["--check"])) == (0, 0)
    edited = elsewhere.read_text(encoding="utf-8").replace("400 ms", "300 ms")
    elsewhere.write_text(edited, encoding="utf-8")
    assert poc_report.main(["--check"]) == 1
    assert elsewhere.read_text(encoding="utf-8") == edited
    assert poc_report.main(["--chekc"]) == 2, "an unknown argument"


def test_a_row_that_does_not_hold_is_written_down_and_fails_the_run(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [case(poc, inside="<failure />" if poc == "POC-004" else "", waits=[100]) for poc in poc_report.IDS]
    monkeypatch.setattr(poc_report, "run_tests", lambda: suite(*cases))
    assert poc_report.main([]) == 1
    assert "does not hold: POC-004" in capsys.readouterr().out
    assert "**does not hold**" in elsewhere.read_text(encoding="utf-8")
