"""The text, the page and the exit code say what was measured, and nothing about whose machine it was."""

import json
import socket
from pathlib import Path

import pytest

from bench import report
from bench.__main__ import main
from bench.machine import Machine, cpu_model, this_machine, versions
from bench.measure import Effort, Timing
from bench.table import MICROSECONDS, Run, Table, chosen, filled, registered
from bench.verdict import AheadOf, AtMostSeconds, AtMostTimes, Target

MACHINE = Machine(2, "Some CPU", "CPython 3.11.7", 0.25)


def a_table(name: str = "demo", *, ours: float = 2e-6, remarks: tuple[str, ...] = ()) -> Table:
    """The hand loop takes 2 µs, the peer 40; the target is 1.3 × the hand loop."""

    def run(effort: Effort) -> Run:
        seconds = {"hand loop": 2e-6, "reefknot": ours, "peer": 40e-6}
        return Run({who: Timing(taken, taken * 1.5) for who, taken in seconds.items()}, remarks)

    return Table(
        name=name,
        title=f"The {name} table",
        about="What it is about.",
        unit=MICROSECONDS,
        reference="hand loop",
        targets={"reefknot": (AtMostTimes(1.3, "hand loop"), AheadOf(("peer",)))},
        packages=("reefknot",),
        run=run,
    )


def result_of(table: Table) -> str:
    return report.text(filled(table, table.run(Effort(1, 0.0, 1))))


def test_a_row_shows_figure_ratio_target_and_verdict_which_a_contestant_without_a_target_has_not() -> None:
    rows = [line.split() for line in result_of(a_table()).splitlines()]
    target = ("≤", "1.3", "×", "hand", "loop;", "ahead", "of", "every", "peer")
    assert ["reefknot", "2.00", "1.00", *target, "met"] in rows
    assert ["peer", "40.0", "20.00"] in rows


def test_the_spread_and_the_remarks_stand_under_the_table() -> None:
    spread = "The middle batch lay 50% to 50% above the fastest, by contestant."
    assert result_of(a_table(remarks=("One remark.",))).splitlines()[-2:] == ["One remark.", spread]


def test_a_target_for_one_that_did_not_run_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="did not run"):
        filled(a_table(), Run({"hand loop": Timing(1.0, 1.0)}))


def test_figures_have_the_digits_that_mean_something() -> None:
    said = {0.0000001234: "0.123", 0.00000123: "1.23", 0.0000123: "12.3", 0.000123: "123", 0.0123: "12300"}
    assert {seconds: report.shown(seconds, 1e6) for seconds in said} == said


def test_the_exit_code_tells_a_missed_target_and_a_table_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three times the hand loop where 1.3 is allowed is the control of the report."""
    page = tmp_path / "page.md"
    assert main([], tables=[a_table()], page=page) == 0
    assert "all targets met" in capsys.readouterr().out
    assert main([], tables=[a_table(), a_table("slow", ours=6e-6)], page=page) == 1
    assert "MISSED slow: reefknot: ≤ 1.3 × hand loop: 3.00 × hand loop" in capsys.readouterr().out
    assert main(["nothing"], tables=[a_table()], page=page) == 2
    assert capsys.readouterr().err == "bench: no table 'nothing'; there are demo\n"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [([], True), (["--quick"], False), (["demo"], False), (["demo", "--write"], True), (["--quick", "--write"], True)],
)
def test_the_page_is_written_by_a_full_run_or_when_asked_for(
    arguments: list[str], written: bool, tmp_path: Path
) -> None:
    page = tmp_path / "docs" / "page.md"
    main(arguments, tables=[a_table()], page=page)

    assert page.exists() is written


def test_the_page_names_date_processor_versions_and_limits_but_no_host_and_no_path(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    main([], tables=[a_table()], page=page)
    text = " ".join(page.read_text(encoding="utf-8").split())  # lines break where the processor's name lets them
    machine = this_machine()

    assert machine.cpu in text
    assert machine.python in text
    assert f"reefknot {versions(['reefknot'])['reefknot']}" in text
    assert "under 1.3 × mean nothing" in text
    assert socket.gethostname() not in text.split()
    assert str(Path.cwd()) not in text
    assert str(tmp_path) not in text


def test_a_run_of_one_table_leaves_the_others_as_they_were_measured_and_one_that_is_no_more_goes(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    main([], tables=[a_table("one"), a_table("two")], page=page)
    before = report.sections_of(page.read_text(encoding="utf-8"))
    main(["two", "--write"], tables=[a_table("one"), a_table("two", ours=6e-6)], page=page)
    after = report.sections_of(page.read_text(encoding="utf-8"))
    assert after["one"] == before["one"]
    assert ["MISSED" in one["two"] for one in (before, after)] == [False, True]

    first = report.page("", {"old": "old figures\n", "kept": "kept figures\n"}, ["old", "kept"])
    second = report.page(first, {}, ["kept"])
    assert ["old figures" in one for one in (first, second)] == [True, False]
    assert "kept figures" in second


def test_the_json_holds_every_figure_in_seconds(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    main(["--json", str(out), "--quick"], tables=[a_table(ours=6e-6)], page=tmp_path / "page.md")
    content = json.loads(out.read_text(encoding="utf-8"))

    rows = {row["name"]: row for row in content["tables"][0]["rows"]}
    assert rows["reefknot"]["seconds"] == 6e-6
    assert rows["reefknot"]["ratio"] == pytest.approx(3.0)
    assert [target["met"] for target in rows["reefknot"]["targets"]] == [False, True]
    assert content["missed"] == ["demo: reefknot: ≤ 1.3 × hand loop: 3.00 × hand loop"]


def test_a_name_chooses_the_tables_that_begin_with_it_as_words() -> None:
    tables = [a_table("retry-success"), a_table("retry-success-async"), a_table("retrying")]
    for word in ("retry-success", "retry"):
        assert [table.name for table in chosen(tables, [word])] == ["retry-success", "retry-success-async"]
    assert len(chosen(tables, [])) == 3


def test_every_module_of_tables_is_found_and_no_two_tables_share_a_name() -> None:
    names = [table.name for table in registered()]

    assert len(set(names)) == len(names)
    assert {"import", "retry-failing", "retry-success", "retry-success-async"} <= set(names)


def test_a_processor_is_known_by_its_model_or_else_by_its_architecture(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Some   CPU @ 3 GHz\n", encoding="utf-8")
    assert cpu_model(listing) == "Some CPU @ 3 GHz"
    assert cpu_model(tmp_path / "missing") == cpu_model(Path("/dev/null")) != ""
    assert versions(["no-such-package-anywhere"]) == {"no-such-package-anywhere": "not installed"}


def test_a_table_with_columns_has_one_line_for_contestants_that_differ_in_the_column_only() -> None:
    def run(effort: Effort) -> Run:
        seconds = {"get, few": 2e-6, "get, many": 3e-6, "find, few": 5e-6, "find, many": 5e-6, "put, few": 9e-6}
        seconds["put, many"] = 2e-6
        targets: dict[str, tuple[Target, ...]] = {
            f"{who}, many": (AtMostTimes(1.3, f"{who}, few"),) for who in ("get", "find")
        }
        targets |= {"put, few": (AtMostTimes(4.0, "find, few"),), "put, many": (AtMostSeconds(5e-6),)}
        timings = {who: Timing(taken, taken) for who, taken in seconds.items()}
        return Run(timings, targets=targets, columns=("few", "many"))

    table = Table("grown", "Grown", "About.", MICROSECONDS, "", {}, (), run)
    result = filled(table, run(Effort(1, 0.0, 1)))
    page = report.section(result, date="2026-01-25", machine=MACHINE)

    assert "|  | few, µs per call | many, µs per call | target | verdict |\n| --- | ---: | ---: | --- | --- |" in page
    assert "| get | 2.00 | 3.00 | ≤ 1.3 × few | MISSED: 1.50 × few |" in page
    assert "| find | 5.00 | 5.00 | ≤ 1.3 × few | met |" in page
    assert "| put | 9.00 | 2.00 | ≤ 4 × find, few; ≤ 5 µs | met |" in page
    assert result.missed == ("grown: get, many: ≤ 1.3 × get, few: 1.50 × get, few",)
