"""The page of events says what the events are."""

from pathlib import Path

import pytest

from reefknot.audit.model.event import EVENT_TYPES, Event
from tools import events_page


def test_the_page_is_what_the_events_say_with_the_code_and_each_of_the_fields_of_all() -> None:
    assert events_page.main(["--check"]) == 0
    page = events_page.page()
    for kind in EVENT_TYPES:
        section = page.split(f"\n## {kind.__struct_config__.tag}\n")[1].split("\n## ")[0]
        own = set(kind.__struct_fields__) - set(Event.__struct_fields__)
        assert all(f"| `{field}` |" in section for field in own)
        assert "RK-" in section


def test_a_page_that_says_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "events.md"
    monkeypatch.setattr(events_page, "PAGE", page)
    monkeypatch.setattr(events_page, "ROOT", tmp_path)

    assert events_page.main(["--force"]) == 2
    assert events_page.main(["--check"]) == 1
    assert events_page.main([]) == 0
    assert events_page.main(["--check"]) == 0
    page.write_text(page.read_text().replace("RK-101", "RK-999"))
    assert events_page.main(["--check"]) == 1
    assert "events.md is not what the events say" in capsys.readouterr().err
