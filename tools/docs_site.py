"""
Hooks of `mkdocs build`: what a page on the site has that its file in the repository has not.

The README is the first page, the changelog and the examples are pages too, and a folder of pages has a list of them.
Links between them are rewritten, so that one text works in both places. The words that the tests read after a fence's
language, and what they run without showing it, are left out. A heading is linked to as everywhere else in the
repository. Every broken link is a warning, which `--strict` makes an error.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped] # it carries no types

HIDDEN = re.compile(r"^<!-- (?:run\n.*?^-->|no-run: [^\n]*-->)[ ]*\n", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^(```\w+)[ ][^\n]*$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
MOVED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository that are not in docs/, and their places on the site."""
STYLE = """\
.wy-nav-content { max-width: 1000px; }
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
"""
"""Tables of sentences are wider than the theme's page, and have to wrap."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to headings as the repository's host does."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(title: str, separator: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the colours of code."""
    root = Path(config.config_file_path).parent
    added = {place: (root / name).read_text(encoding="utf-8") for name, place in MOVED.items()}
    added["decisions/index.md"] = _decisions(root / "docs" / "decisions")
    added["examples/index.md"] = _examples(root / "examples")
    added["assets/site.css"] = f"{STYLE}{HtmlFormatter(style='tango').get_style_defs('.codehilite')}\n"
    for place, content in added.items():
        files.append(File.generated(config, place, content=content))
    for file in sorted((root / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{file.name}", abs_src_path=str(file)))
    return files


def _decisions(folder: Path) -> str:
    """A list of the decision records."""
    lines = ["# Decisions", "", "One record per question that was hard: what was asked, what was decided, and why.", ""]
    for file in sorted(folder.glob("0*.md")):
        title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({file.name})")
    return "\n".join(lines) + "\n"


def _examples(folder: Path) -> str:
    """The example programs, whole: each runs by itself."""
    lines = ["# Examples", "", "Programs that run by themselves.", ""]
    for file in sorted(folder.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        lines += [f"## {file.stem.replace('_', ' ').capitalize()}", "", f"[{file.name}]({file.name}): {about}", ""]
        lines += ["```python", text.rstrip(), "```", ""]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page for readers: without what only the tests need, and with the links of the site."""
    text = FENCE.sub(r"\1", HIDDEN.sub("", markdown))
    place = page.file.src_uri
    original = next((name for name, moved in MOVED.items() if moved == place), f"docs/{place}")
    root = Path(config.config_file_path).parent
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [_relinked(text[end : code.start()], original, place, root), code[0]]
        end = code.end()
    return "".join([*parts, _relinked(text[end:], original, place, root)])


def _relinked(text: str, original: str, place: str, root: Path) -> str:
    """The text with links from the page's place in the repository as links from its place on the site."""
    if place.startswith("examples/"):
        return text
    return LINK.sub(lambda link: f"]({site_link(link[1], original, place, root)}{link[2] or ''})", text)


def site_link(link: str, original: str, place: str, root: Path) -> str:
    """One link of a page. What is not on the site stays as it is, for the check to find."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(original), link))
    if (root / target).is_dir():
        target += "/index.md"
    found = MOVED.get(target) or target.removeprefix("docs/")
    if not target.startswith(("docs/", "examples/")) and target not in MOVED:
        return link
    return posixpath.relpath(found, posixpath.dirname(place) or ".")
