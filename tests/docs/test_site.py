"""`make docs`: the site builds strictly, loads nothing from elsewhere, and a broken link or a lost page fails it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_commands import run_cold
from tools.docs_site import site_link, slug

ROOT = Path(__file__).resolve().parents[2]

LOADED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//""")


def built(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return run_cold(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", target, cwd=folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = built(ROOT, target)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "INFO" not in line)
    return target


def test_every_page_is_on_the_site_and_in_its_navigation(site: Path) -> None:
    pages = {one.relative_to(ROOT / "docs").with_suffix(".html") for one in (ROOT / "docs").rglob("*.md")}
    assert [str(one) for one in sorted(pages) if not (site / one).is_file()] == []
    start = (site / "index.html").read_text()
    listed = [one for one in pages if one.parts[0] != "decisions"]
    assert [str(one) for one in sorted(listed) if f'href="{one}"' not in start] == []
    assert (site / "changelog.html").is_file()
    assert (site / "examples" / "verify_chain.py").is_file()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    texts = {one: one.read_text(encoding="utf-8") for one in [*site.rglob("*.html"), *site.rglob("*.css")]}
    found = [
        one.name for one, text in texts.items() if LOADED.search(text) or re.search(r"url\(['\"]?(https?:)?//", text)
    ]

    assert found == []
    assert LOADED.search('<script async src="https://example.org/a.js">'), "the control"


def test_what_only_the_tests_need_is_not_shown(site: Path) -> None:
    text = (site / "index.html").read_text()

    assert "def offline" not in text
    assert "no-run" not in (site / "guides" / "running.html").read_text()
    assert "file=steps.py" not in text


def small_site(folder: Path, page: str) -> Path:
    """A repository with one page, and the settings of ours."""
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (folder / "docs").mkdir(parents=True)
    (folder / "mkdocs.yml").write_text(settings.replace("tools/docs_site.py", str(ROOT / "tools" / "docs_site.py")))
    (folder / "README.md").write_text("# Title\n\n[one](docs/one.md) [two](docs/one.md#a-heading-with-code)\n")
    (folder / "CHANGELOG.md").write_text("# Changelog\n")
    (folder / "docs" / "one.md").write_text(f"# One\n\n## A heading: with `code`\n\n{page}\n")
    return folder


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("[start](../README.md) [log](../CHANGELOG.md)", ""),
        ("[gone](gone.md)", "gone.md"),
        ("[gone](#no-such-heading)", "no-such-heading"),
        ("[source](../src/reefknot/errors.py)", "src/reefknot/errors.py"),
    ],
)
def test_a_broken_link_fails_the_build_and_a_link_to_the_readme_does_not(
    tmp_path: Path, page: str, complaint: str
) -> None:
    done = built(small_site(tmp_path / "small", page), tmp_path / "site")

    assert (done.returncode == 0) is (complaint == ""), done.stderr
    assert complaint in done.stderr


def test_links_of_the_repository_become_links_of_the_site() -> None:
    table = [
        ("docs/tutorial.md", "README.md", "index.md", "tutorial.md"),
        ("docs/decisions", "README.md", "index.md", "decisions/index.md"),
        ("examples", "README.md", "index.md", "examples/index.md"),
        ("../../examples/verify_chain.py", "docs/guides/a.md", "guides/a.md", "../examples/verify_chain.py"),
        ("../../README.md", "docs/guides/a.md", "guides/a.md", "../index.md"),
        ("b.md", "docs/guides/a.md", "guides/a.md", "b.md"),
        ("../../Makefile", "docs/guides/a.md", "guides/a.md", "../../Makefile"),
    ]
    wrong = [link for link, page, place, wanted in table if site_link(link, page, place, ROOT) != wanted]
    assert wrong == []
    assert slug("The `Retry-After` header, twice", "-") == "the-retry-after-header-twice"
