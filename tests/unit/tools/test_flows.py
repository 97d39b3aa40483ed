"""The figures of flows: what is counted, and how they stand next to the kept ones."""

from pathlib import Path

import pytest

from reefknot.core.canonical import canonical
from reefknot.core.checks import suggest
from tools import flows
from tools.flows import FLOWS, FlowSize, FlowTrace, kept, library_retry, main, measured, table

SMALL = FlowSize(modules=1, functions=2, calls=30, changes=4)


def test_calls_of_the_product_are_counted_and_those_of_others_are_not() -> None:
    with FlowTrace().installed() as trace:
        suggest("a", ["b"])
        with trace.counting():
            suggest("a", ["b"])
            canonical({})
            Path("a").with_name("b")
        canonical({})
    size = trace.size()

    assert size.modules == 2
    assert size.changes == 1
    assert size.calls >= size.functions >= 2


def test_a_flow_gives_the_same_figures_twice() -> None:
    assert measured(library_retry) == measured(library_retry)


def test_a_figure_that_changed_stands_next_to_the_kept_one() -> None:
    lines = list(table({"retry": SMALL}, {"retry": FlowSize(modules=1, functions=2, calls=1_300, changes=4)}))

    assert lines[1].split() == ["retry", "1", "2", "30", "(1,300)", "4"]


def test_every_flow_has_kept_figures_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert kept().keys() == FLOWS.keys(), "run `make flows ARGS=--write`"
    assert main(["flight"]) == 2
    assert "unknown: flight" in capsys.readouterr().err


def test_written_figures_are_the_kept_ones_of_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "KEPT", tmp_path / "flows.json")
    monkeypatch.setattr(flows, "measured", lambda _: SMALL)

    assert main(["--write", "library retry"]) == 0
    assert kept() == {"library retry": SMALL}
