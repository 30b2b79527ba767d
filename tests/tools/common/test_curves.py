"""The controls of curves, in a browser: by default, the script draws the curves of the page without scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tfkit.tools.common.pages import CHART_WIDTH, MARGIN_LEFT, MARGIN_RIGHT, ChartLine, curves, line_legend, report_page

BROWSER = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no chromium")]
RELU = [(0, [4.0, 4.2]), (50, [2.0, 2.2]), (100, [1.0, 1.5])]
LINES = [
    ChartLine(0, RELU, "relu", {"tokens": 10, "seconds": 2.0}),
    ChartLine(1, [(0, [4.1]), (50, [1.9]), (100, [1.2])], "gelu", {"tokens": 20}),
]
Points = list[list[tuple[float, float]]]


def drawn(folder: Path, script: str = "", lines: list[ChartLine] = LINES) -> tuple[Points, str]:
    """Return the means of the lines after a script, and the document."""
    content = [curves(lines), line_legend(line.name for line in lines)]
    text = report_page("curves", "run", [], [("numbers", "Numbers", content)], charts=True)
    if script:
        text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", f"<script>{script}</script></body>")
    (folder / "page.html").write_text(text, encoding="utf-8")
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        (folder / "page.html").as_uri(),
    ]
    document = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return [points_of(points) for points in re.findall(r'<polyline points="([^"]*)"', document)], document


def points_of(text: str) -> list[tuple[float, float]]:
    pairs = (point.split(",") for point in text.split())
    return [(float(x), float(y)) for x, y in pairs]


def choose(**values: object) -> str:
    """A script that fills the controls."""
    names = {"x": "select", "smooth": "[type=range]", "log_x": "label:nth-of-type(2) input"}
    names["log_y"] = "label:nth-of-type(3) input"
    setting = "".join(
        f"form.querySelector('{names[name]}').{'checked' if name.startswith('log') else 'value'} = {value!r};"
        for name, value in values.items()
    )
    return f"const form = document.querySelector('form');{setting}form.dispatchEvent(new Event('input'));".replace(
        "True", "true"
    )


def test_the_first_drawing_is_that_of_the_page(tmp_path: Path) -> None:
    means, document = drawn(tmp_path)
    chart = curves(LINES)
    assert means == [points_of(line.attrib["points"]) for line in chart.iter("polyline")]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", document)
    assert sorted(texts) == sorted(text.text or "" for text in chart.iter("text"))
    assert re.findall(r"<option>?[^>]*>(\w+)", document) == ["step", "tokens"]  # one line has no seconds


def test_tokens_logarithms_and_smoothing(tmp_path: Path) -> None:
    (relu, gelu), _ = drawn(tmp_path, choose(x="tokens"))
    right = CHART_WIDTH - MARGIN_RIGHT
    assert [x for x, _ in relu] == [
        MARGIN_LEFT,
        MARGIN_LEFT + (right - MARGIN_LEFT) / 4,
        MARGIN_LEFT + (right - MARGIN_LEFT) / 2,
    ]
    assert gelu[-1][0] == right
    (relu, _), _ = drawn(tmp_path, choose(log_x=True, log_y=True))
    assert [x for x, _ in relu] == [MARGIN_LEFT, right]  # step 0 has no place
    raw, _ = drawn(tmp_path)
    (smooth, _), _ = drawn(tmp_path, choose(smooth=0.5))
    assert smooth[0] == raw[0][0]
    assert smooth[2][1] < raw[0][2][1]  # nearer to the earlier values, which are higher


def test_a_click_hides_a_line(tmp_path: Path) -> None:
    means, document = drawn(tmp_path, "document.querySelector('.legend li').click()")
    assert len(means) == 1
    assert 'aria-pressed="false"' in document


def test_markup_in_a_name_stays_text(tmp_path: Path) -> None:
    hostile = [ChartLine(0, RELU, "</script><img src=x onerror=alert(1)>'\"")]
    means, document = drawn(tmp_path, lines=hostile)
    assert len(means) == 1
    assert "<img" not in document
    assert ET.tostring(curves(hostile)).count(b"<img") == 0
