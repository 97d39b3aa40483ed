"""The page of the HTTP API has every route of the table, with its summary, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.security import KINDS
from reefknot.console.dashboard.site import STATUS_OF_KIND

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "http-api.md"


def rows() -> list[tuple[str, str]]:
    return re.findall(r"^\| `((?:GET|POST) /\S*)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_lists_every_route_with_its_summary() -> None:
    assert rows() == [(f"{route.method} {route.path}", route.summary) for route in ROUTES]


def test_the_page_has_every_kind_of_error_with_its_status() -> None:
    listed = {
        (int(status), kind)
        for status, kinds in re.findall(r"^\| (\d{3}) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        for kind in re.findall(r"`(\w+)`", kinds)
    }

    assert {(status, kind) for kind, status in STATUS_OF_KIND.items()} <= listed
    assert set(KINDS.items()) <= listed
