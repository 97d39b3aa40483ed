"""The picture of the README is what its script draws, and one that is out of date is found."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tools import draw_overview
from tools.draw_overview import HEIGHT, PICTURE, ROOT, WIDTH, main, picture


def test_the_picture_in_the_documents_is_what_the_script_draws_and_the_readme_shows_it_with_a_text() -> None:
    assert main(["--check"]) == 0, "docs/overview.svg is out of date: run tools/draw_overview.py"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"]({PICTURE.relative_to(ROOT).as_posix()})" in readme
    assert "![](" not in readme


def test_the_picture_names_all_parts_stays_inside_its_frame_has_both_schemes_and_fetches_nothing() -> None:
    text = picture()
    root = ET.fromstring(text)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    boxes = [element.attrib for element in root.iter("{http://www.w3.org/2000/svg}rect")]

    assert {"client", "router", "worker", "store: one SQLite file"} <= texts
    assert all(int(one["x"]) + int(one["width"]) < WIDTH for one in boxes)
    assert all(int(one["y"]) + int(one["height"]) < HEIGHT for one in boxes)
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1, "the name space, and no address to load from"
    assert "<script" not in text


def test_a_picture_that_is_out_of_date_is_found_and_drawn_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draw_overview, "ROOT", tmp_path)
    monkeypatch.setattr(draw_overview, "PICTURE", tmp_path / "overview.svg")
    assert main(["--check"]) == 1
    (tmp_path / "overview.svg").write_text(picture().replace("client", "customer"), encoding="utf-8")
    assert main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err

    assert main([]) == 0
    assert main(["--check"]) == 0
    assert main(["--nonsense"]) == 2
