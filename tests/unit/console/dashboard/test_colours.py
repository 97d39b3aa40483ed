"""Colours of the sheet: every text can be read on its ground, in the light and in the dark scheme (WCAG AA)."""

import re
from pathlib import Path

import pytest

from reefknot.console.dashboard import pages

SHEET = (Path(pages.__file__).parent / "static" / "reefknot.css").read_text()
SCHEMES = [one for one in re.findall(r":root\S* \{(.*?)\}", SHEET, re.DOTALL) if "--ground" in one]
"""The light one, the dark one of the system, and the dark one that was chosen."""
TEXTS = [
    *((text, ground) for text in ("text", "muted") for ground in ("ground", "surface", "raised")),
    *((text, "surface") for text in ("accent", "bad", "good")),
    *((kind, f"{kind}-soft") for kind in ("good", "warn", "bad", "calm", "accent")),
    *(("text", f"{kind}-soft") for kind in ("warn", "bad")),
    *(("muted", f"{kind}-soft") for kind in ("warn", "bad")),
    ("on-accent", "accent"),
]
SHAPES = [(f"k{number}", "surface") for number in range(1, 7)]


def colours(scheme: int) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", SCHEMES[scheme]))


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    dark, bright = sorted((luminance(first), luminance(second)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_texts_and_shapes_stand_out(scheme: int) -> None:
    found = colours(scheme)
    for text, ground in TEXTS:
        assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for shape, ground in SHAPES:
        assert contrast(found[shape], found[ground]) >= 3, (shape, ground)


def test_both_schemes_set_the_same_colours() -> None:
    assert len(SCHEMES) == 3
    assert colours(0).keys() == colours(1).keys()
    assert colours(1) == colours(2)


def test_a_pale_text_would_be_seen() -> None:
    """The control: grey on white, as it is often done."""
    assert contrast("#999999", "#ffffff") < 4.5
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
