"""
The text of PDF, Word and HTML files, and of text in other charsets than UTF-8, by the libraries of the extra `text`.

Such files are written by strangers, and their readers are large: so each is read in a helper process, within a limit of
time, memory and output. A file that exceeds one costs itself, not the sync: it is kept without text, and its problem
says why. A helper is started on demand, reused, killed when it does not answer, and ends itself when it is idle. It
gets neither the environment nor the folder of this process, and may write no file. Without the extra nothing is read.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import PurePath
from typing import IO, Any

import msgspec
from msgspec import Struct

EXTRACTION_S = 20.0
"""Longest time for one file."""
MOST_MEMORY = 1 << 30
"""Bytes of address space of a helper, its libraries included."""
MOST_CHARACTERS = 4 << 20
"""Characters of text that are kept of one file."""
MOST_UNPACKED = 256 << 20
"""Bytes of all parts of a Word file, unpacked."""
MOST_PARTS = 10_000
MOST_HELPERS = 2
IDLE_S = 60.0
PACKAGES = ("pypdf", "docx", "selectolax", "charset_normalizer")
KINDS = {".pdf": "PDF", ".docx": "Word", ".html": "HTML", ".htm": "HTML", ".xhtml": "HTML"}
_SAMPLE = 64 << 10
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from reefknot.ingest.connectors.text_extraction import serve; serve()"
)
_KEPT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
_SILENT = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_INLINE = frozenset(
    re.split(r"\s", "a abbr b bdi bdo big cite code em font i kbd mark q s samp small span strong sub sup u var")
)
_UNMARKED = ("utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "utf_7")
"""Charsets that are known by a mark or not at all: any few bytes may be one of them."""
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)


class ExtractionRequest(Struct, array_like=True):
    """A file for a helper. The kind is one of `KINDS`, or "charset" for text that is not UTF-8."""

    kind: str
    content: bytes


class ExtractedText(Struct, array_like=True, frozen=True):
    """The text of a file; None when there is none, and then `problem` says why. `charset` is the one that was found."""

    text: str | None = None
    problem: str = ""
    charset: str = ""


def is_installed() -> bool:
    """Whether the extra `text` is installed."""
    return _are_found(PACKAGES)


@cache
def _are_found(packages: tuple[str, ...]) -> bool:
    return all(find_spec(name) is not None for name in packages)


def installation_note() -> str:
    """The end of a sentence that says whether texts are extracted."""
    if is_installed():
        return "; the text of PDF, Word and HTML files is read, and charsets are detected"
    way_out = "pip install '.[text]' in a checkout"
    return f"; PDF and Word files are kept without their text, which needs the extra: {way_out}"


def kind_of(name: str, content: bytes) -> str:
    """The kind of a file whose text can be extracted, by its ending and its first bytes; else empty."""
    kind = KINDS.get(PurePath(name).suffix.lower(), "")
    marks = {"PDF": b"%PDF-" in content[:1024], "Word": content.startswith(b"PK\x03\x04")}
    return kind if marks.get(kind, True) and is_installed() else ""


def extract(kind: str, content: bytes) -> ExtractedText:
    """The text of a file, by a helper process. Blocks for `EXTRACTION_S`, and never raises for what is in it."""
    return _helpers.reply(ExtractionRequest(kind, content))


# ---- helper processes ------------------------------------------------------------------------------------------------


class _Helpers:
    """At most `MOST_HELPERS` processes at once; an idle one is used again."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MOST_HELPERS)
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []

    def reply(self, request: ExtractionRequest) -> ExtractedText:
        with self._places:
            while (helper := self._take()) is not None:
                if (reply := helper.ask(request)) is not None:
                    return self._given_back(helper, reply)
                helper.end()  # it has ended while it was idle
                if helper.is_late:
                    return _refusal(request.kind, f"it took more than {EXTRACTION_S:g} s")
            try:
                helper = _Helper()
            except OSError as error:
                return _refusal(request.kind, f"no process could be started for it ({error})")
            if (reply := helper.ask(request)) is not None:
                return self._given_back(helper, reply)
            helper.end()
            limit = f"it took more than {EXTRACTION_S:g} s" if helper.is_late else "the process that read it broke down"
            return _refusal(request.kind, limit)

    def _take(self) -> _Helper | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _given_back(self, helper: _Helper, reply: ExtractedText) -> ExtractedText:
        with self._lock:
            self._idle.append(helper)
        return reply

    def end(self) -> None:
        """End the idle processes."""
        while (helper := self._take()) is not None:
            helper.end()

    def forget(self) -> None:
        """In a forked process: the helpers are those of its parent."""
        self.__init__()  # type: ignore[misc]


class _Helper:
    """A process that reads one file at a time."""

    def __init__(self) -> None:
        paths = [os.path.abspath(path) for path in sys.path]
        self._process = subprocess.Popen(  # noqa: S603 - this Python, with a program of ours
            [sys.executable, "-I", "-c", _PROGRAM, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            cwd=os.sep,
            start_new_session=True,
        )
        self.is_late = False

    def ask(self, request: ExtractionRequest) -> ExtractedText | None:
        """The answer; None when the process has ended, or had to be."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(EXTRACTION_S, self._stop)
        limit.daemon = True
        limit.start()
        try:
            _write_frame(self._process.stdin, request)
            body = _read_frame(self._process.stdout, 4 * MOST_CHARACTERS + (1 << 20))
            return None if body is None else msgspec.msgpack.decode(body, type=ExtractedText)
        except (OSError, ValueError):
            return None
        finally:
            limit.cancel()

    def _stop(self) -> None:
        self.is_late = True
        self._process.kill()

    def end(self) -> None:
        """Kill the process, and leave nothing of it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # a request that it did not read any more
                pipe.close()


_helpers = _Helpers()
atexit.register(_helpers.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.forget)


def _refusal(kind: str, why: str) -> ExtractedText:
    what = "its charset was not detected" if kind == "charset" else f"its text was not read as {kind}"
    return ExtractedText(problem=f"{what}: {why}")


def _write_frame(pipe: IO[bytes], message: object) -> None:
    body = msgspec.msgpack.encode(message)
    pipe.write(len(body).to_bytes(4, "big") + body)
    pipe.flush()


def _read_frame(pipe: IO[bytes], most: int) -> bytes | None:
    """The next message; None at the end, or when it is too long."""
    size = int.from_bytes(pipe.read(4), "big")
    body = pipe.read(size) if 0 < size <= most else b""
    return body if size and len(body) == size else None


# ---- inside a helper -------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests on stdin until it ends. What a library prints goes nowhere."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    requests = sys.stdin.buffer
    while select.select([requests], [], [], IDLE_S)[0]:
        body = _read_frame(requests, 1 << 31)
        if body is None:
            return
        used = sum(os.times()[:2])  # if this process is orphaned, the system ends it
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + 2 * EXTRACTION_S), resource.RLIM_INFINITY))
        request = msgspec.msgpack.decode(body, type=ExtractionRequest)
        reply, is_worn = _answer(request)
        _write_frame(answers, reply)
        if is_worn:
            return


def _answer(request: ExtractionRequest) -> tuple[ExtractedText, bool]:
    """The answer, and whether this process should not be used again."""
    read = {"PDF": _pdf, "Word": _word, "HTML": _html, "charset": _charset}[request.kind]
    try:
        found = read(request.content)
    except MemoryError:
        return _refusal(request.kind, f"it needs more than {MOST_MEMORY >> 20} MiB of memory"), True
    except RecursionError:
        return _refusal(request.kind, "its parts are nested too deep"), True
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return _refusal(request.kind, f"it is damaged or of another kind ({words})"), False
    text = found.text or ""
    if len(text) > MOST_CHARACTERS:
        cut = f"only the first {MOST_CHARACTERS} characters of its text are kept"
        found = ExtractedText(text[:MOST_CHARACTERS], cut, found.charset)
    if found.text is not None:
        clean = found.text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
        found = ExtractedText(clean, found.problem, found.charset)
    return found, False


def _joined(pieces: Iterable[str], between: str) -> str:
    """The pieces up to a little more than may be kept."""
    found: list[str] = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > MOST_CHARACTERS:
            break
    return between.join(found)


def _pdf(content: bytes) -> ExtractedText:
    from pypdf import PdfReader

    reader = PdfReader(BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        return _refusal("PDF", "it is protected by a password")
    text = _joined((page.extract_text().strip() for page in reader.pages), "\n\n").strip()
    return ExtractedText(text, "" if text else "it has no text: its pages may be images")


def _word(content: bytes) -> ExtractedText:
    from zipfile import ZipFile

    import docx

    with ZipFile(BytesIO(content)) as packed:
        parts = packed.infolist()
    if len(parts) > MOST_PARTS or sum(part.file_size for part in parts) > MOST_UNPACKED:
        return _refusal("Word", f"unpacked it has more than {MOST_UNPACKED >> 20} MiB or {MOST_PARTS} parts")
    return ExtractedText(_joined(_blocks(docx.Document(BytesIO(content))), "\n").strip())


def _blocks(holder: Any) -> Iterator[str]:
    """The paragraphs of a document or a cell in their order; a row of a table is a line."""
    for block in holder.iter_inner_content():
        if hasattr(block, "rows"):
            for row in block.rows:
                yield "\t".join(" ".join(_blocks(cell)) for cell in dict.fromkeys(row.cells))
        else:
            yield block.text


def _html(content: bytes) -> ExtractedText:
    from selectolax.lexbor import LexborHTMLParser

    text, charset = _decoded_html(content)
    tree = LexborHTMLParser(text)
    tree.strip_tags(list(_SILENT), recursive=True)
    found: list[str] = []
    for node in tree.root.traverse(include_text=True) if tree.root is not None else ():
        if node.tag == "-text":
            found.append(node.text_content or "")
        elif node.tag not in _INLINE:
            found.append("\n")
    lines = (" ".join(line.split()) for line in "".join(found).split("\n"))
    return ExtractedText("\n".join(line for line in lines if line), charset=charset)


def _decoded_html(content: bytes) -> tuple[str, str]:
    try:
        return content.decode("utf-8-sig"), ""
    except UnicodeDecodeError:
        named = _META_CHARSET.search(content[:4096])
        charset = named[1].decode().lower() if named else _charset(content).charset or "cp1252"
        try:
            return content.decode(charset, "replace"), charset
        except (LookupError, ValueError):
            return content.decode("cp1252", "replace"), "cp1252"


def _charset(content: bytes) -> ExtractedText:
    from charset_normalizer import from_bytes

    matches = from_bytes(content[:_SAMPLE], cp_exclusion=list(_UNMARKED))
    best = matches.best()
    if best is None:
        return _refusal("charset", "it is like none that is known")
    alike = [one for one in matches if (one.chaos, one.coherence) == (best.chaos, best.coherence)]
    is_western = any("cp1252" in one.could_be_from_charset for one in alike)
    charset = "cp1252" if is_western else best.encoding  # of charsets that fit as well, the most frequent one
    return ExtractedText(content.decode(charset, "replace"), charset=charset)
