"""Widths of texts, compared with the font from which they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfkit.tools.draw.canvas import (
    DEFAULT_WIDTH,
    FIRST_CODE_POINT,
    MIDDLE_DOT,
    TextRun,
    joined_lines,
    line_width,
    shortened_text,
    width_of,
    wrapped_lines,
)

matplotlib = pytest.importorskip("matplotlib")


def advance(character: str, *, bold: bool) -> float:
    """The advance of a character in thousandths of the size, from the font itself."""
    from matplotlib import ft2font

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ft2font.FT2Font(str(fonts / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf")))
    font.set_size(1000, 72)
    glyph = font.load_char(ord(character), flags=ft2font.LoadFlags.NO_HINTING)
    return float(glyph.linearHoriAdvance) / 65536


@pytest.mark.parametrize("bold", [False, True])
def test_widths_are_the_fonts(bold: bool) -> None:
    for code in range(FIRST_CODE_POINT, 127):
        assert width_of(chr(code), 1000, bold=bold) == pytest.approx(advance(chr(code), bold=bold), abs=1)
    assert MIDDLE_DOT[bold] == pytest.approx(advance("·", bold=bold), abs=1)
    assert all(advance(character, bold=bold) <= DEFAULT_WIDTH for character in "×√→…λäß")


def test_wrap_breaks_between_words_and_cuts_what_is_too_long() -> None:
    width = width_of("two words", 12)
    assert wrapped_lines("two words here", width, 12) == ["two words", "here"]
    assert wrapped_lines("", width, 12) == []
    long = wrapped_lines("x" * 500, width, 12)
    assert len(long) == 1
    assert long[0].endswith("...")
    assert width_of(long[0], 12) <= width
    assert shortened_text("short", width, 12) == "short"


def test_flow_keeps_lines_within_their_width() -> None:
    names = ["alpha", "beta", "gamma"] * 9
    items = [TextRun(f"{name} {number}", ("cause", "")[number % 2]) for number, name in enumerate(names)]
    lines = joined_lines(items, 120, 11)
    assert all(line_width(line, 11) <= 120 for line in lines)
    joined = " ".join(run.text for line in lines for run in line)
    assert all(item.text in joined for item in items)
