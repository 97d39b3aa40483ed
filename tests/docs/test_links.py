"""Links between the pages lead somewhere, and every page can be found from the README."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "README.md"
PAGES = [START, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = re.compile(r"[a-z]+:")


@cache
def parsed(page: Path) -> Sequence[Token]:
    return MarkdownIt().parse(page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    for token in parsed(page):
        for inline in token.children or ():
            if inline.type == "link_open" and not ELSEWHERE.match(str(inline.attrs["href"])):
                yield str(inline.attrs["href"])


def anchors(page: Path) -> set[str]:
    """The headings of a page, as they are linked to."""
    titles = [after.content for token, after in pairwise(parsed(page)) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead(page: Path) -> list[str]:
    found = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


def reached() -> set[Path]:
    seen: set[Path] = set()
    waiting = [START]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            waiting += sorted(target.glob("*.md")) if target.is_dir() else [target] * (target.suffix == ".md")
    return seen


def test_every_link_leads_somewhere_and_every_page_is_found_from_the_readme() -> None:
    assert {page.relative_to(ROOT).as_posix(): found for page in PAGES if (found := dead(page))} == {}
    lost = set(PAGES) - reached()
    assert [page.relative_to(ROOT).as_posix() for page in lost] == []


def test_a_dead_link_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One two\n\n[a](gone.md) [b](page.md#one-two) [c](page.md#three) [d](#one-two) [e](https://x.org)\n"
    )

    assert dead(page) == ["gone.md", "page.md#three"]
