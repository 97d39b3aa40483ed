"""The comparison's table and its probes: what the table says is what comes out."""

import pytest

from tools.check_comparison import LIBRARIES, NONE, PAGE, ROWS, differences, table


def test_reefknot_has_an_answer_in_every_row() -> None:
    cells = table(PAGE.read_text(encoding="utf-8"))
    assert len(cells) == len(ROWS)
    assert all(len(row) == len(LIBRARIES) for row in cells.values())
    assert [label for label, row in cells.items() if row[-1] == NONE] == []


@pytest.mark.parametrize("row", [row for row in ROWS if "0.3 s" not in row])
def test_a_claim_of_the_table_holds(row: str) -> None:
    """Rows that measure real time are left to the script."""
    assert list(differences(PAGE.read_text(encoding="utf-8"), [row])) == []


def test_a_claim_that_does_not_hold_is_found() -> None:
    page = "## Compared\n\n| | a | b | c | d |\n| --- | --- | --- | --- | --- |\n| Trio | yes | yes | yes | yes |\n"
    assert list(differences(page, ["Trio"])) == ["Trio, backoff: the table says 'yes', it is '–'"]
    assert list(differences(page, ["gives up"])) == ["gives up by default: not in the table"]
