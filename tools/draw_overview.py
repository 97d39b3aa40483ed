"""
The picture of the README, `docs/overview.svg`: client, router, store and worker, and the way of one assignment.

    draw_overview.py [--check]

`--check` only compares, and exits with 1 when the picture is out of date. Colours follow the reader's light or dark
scheme; the picture brings its own background, so that it is readable on any page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "overview.svg"
WIDTH, HEIGHT = 860, 400
TITLE = "How an assignment travels in reefknot"
DESCRIPTION = (
    "A client submits an assignment to the store and waits there for its result. A router claims it from the store and "
    "assigns it to a worker. The worker accepts it in the store, runs the step, retries it by the policy book, and "
    "settles it in the store, which holds one record per assignment, the idempotency keys and the audit log."
)

STYLE = """\
  .page { fill: #ffffff; stroke: #d0d7de }
  .box { fill: #f6f8fa; stroke: #57606a }
  .store { fill: #ddf4ff; stroke: #0969da }
  .cell { fill: #ffffff; stroke: #0969da }
  .arrow { stroke: #57606a; stroke-width: 2; fill: none }
  .message { stroke-dasharray: 5 4 }
  .head { fill: #57606a }
  text { font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #57606a }
  .name { font-size: 17px; font-weight: 600; fill: #1f2328 }
  .label { fill: #1f2328 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d }
    .box { fill: #161b22; stroke: #8b949e }
    .store { fill: #0c2d4d; stroke: #58a6ff }
    .cell { fill: #0d1117; stroke: #58a6ff }
    .arrow { stroke: #9ea7b3 }
    .head { fill: #9ea7b3 }
    text { fill: #9ea7b3 }
    .name, .label { fill: #f0f6fc }
  }"""


HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"
  role="img" aria-labelledby="title description">
<!-- Drawn by tools/draw_overview.py. Change that, not this file. -->
<title id="title">{TITLE}</title>
<desc id="description">{DESCRIPTION}</desc>
<style>
{STYLE}
</style>
<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" orient="auto">
  <path class="head" d="M0 0 L10 5 L0 10 z"/>
</marker></defs>"""


def rectangle(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def words(x: int, y: int, text: str, *, kind: str = "", anchor: str = "middle") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: int, y: int, name: str, *lines: str) -> list[str]:
    """One part of the system: its name, and what it does."""
    middle = x + 110
    return [
        rectangle(x, y, 220, 92, "box"),
        words(middle, y + 28, name, kind="name"),
        *(words(middle, y + 52 + 20 * number, line) for number, line in enumerate(lines)),
    ]


def cell(x: int, name: str, line: str) -> list[str]:
    """One thing that the store holds."""
    return [
        rectangle(x, 304, 240, 56, "cell"),
        words(x + 120, 328, name, kind="label"),
        words(x + 120, 347, line),
    ]


def arrow(x1: int, y1: int, x2: int, y2: int, *, kind: str = "arrow") -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#head)"/>'


def picture() -> str:
    """The whole picture as SVG."""
    parts = [
        rectangle(1, 1, WIDTH - 2, HEIGHT - 2, "page"),
        *box(20, 24, "client", "your program, or", "reefknot submit"),
        *box(300, 24, "router", "chooses a worker;", "its queue is bounded"),
        rectangle(628, 32, 220, 92, "box"),
        *box(620, 24, "worker", "runs the step, retries", "by the policy book"),
        rectangle(20, 252, 820, 124, "store"),
        words(430, 282, "store: one SQLite file", kind="name"),
        *cell(40, "work", "one record per assignment"),
        *cell(310, "idempotency keys", "one result per key"),
        *cell(580, "audit log", "every decision, hash-chained"),
        arrow(80, 118, 80, 246),
        words(90, 188, "1 submit", kind="label", anchor="start"),
        arrow(180, 250, 180, 122),
        words(190, 188, "5 result", kind="label", anchor="start"),
        arrow(410, 250, 410, 122),
        words(420, 188, "2 claim", kind="label", anchor="start"),
        arrow(524, 58, 612, 58, kind="arrow message"),
        words(570, 48, "3 assign", kind="label"),
        arrow(616, 88, 528, 88, kind="arrow message"),
        words(570, 108, "ack, result", kind="label"),
        arrow(730, 126, 730, 246),
        words(720, 180, "4 accept,", kind="label", anchor="end"),
        words(720, 198, "then settle", kind="label", anchor="end"),
    ]
    return "\n".join([HEAD, *parts, "</svg>", ""])


def main(arguments: Sequence[str]) -> int:
    made = picture()
    if list(arguments) == ["--check"]:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != made:
            print(f"{PICTURE.relative_to(ROOT)} is out of date; run tools/draw_overview.py", file=sys.stderr)
            return 1
        return 0
    if arguments:
        print("usage: draw_overview.py [--check]", file=sys.stderr)
        return 2
    PICTURE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
