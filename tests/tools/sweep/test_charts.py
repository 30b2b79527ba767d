"""The lines of charts, read from the drawing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from tfkit.run.sweep_spec import CompareConfig
from tfkit.tools.common import pages
from tfkit.tools.common.pages import (
    CHART_HEIGHT,
    CHART_WIDTH,
    MARGIN_BOTTOM,
    MARGIN_LEFT,
    MARGIN_RIGHT,
    ChartLine,
    curves,
)
from tfkit.tools.sweep.comparison import _add_differences
from tfkit.tools.sweep.page import GAPS, ROW, draw_difference_curves, draw_forest_plot
from tfkit.tools.sweep.result import ArmResult, Curve

LOSS = CompareConfig(on="val.loss")
STEPS = (0, 50, 100)
RELU = [(4.0, 2.0, 1.5), (4.1, 2.2, 1.6)]
GELU = [(4.0, 1.9, 1.3), (4.3, 1.9, 1.4)]


def lines(chart: Element, kind: str) -> list[list[tuple[float, float]]]:
    """The points of all lines of a chart, or of all bands: none is drawn outside of the part that is shown."""
    (area,) = chart.findall("svg")
    assert chart.findall(kind) == []
    points = [match.attrib["points"].split() for match in area.findall(kind)]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in match)] for match in points]


def test_the_first_steps_do_not_decide_the_axis() -> None:
    chart = curves([ChartLine(0, list(zip(STEPS, ([9.0], [3.0], [1.0]), strict=True)))])
    assert [match.text for match in chart.findall("text") if match.text != "0"][:5] == ["1", "1.5", "2", "2.5", "3"]
    ((first, second, third),) = lines(chart, "polyline")
    assert first == (MARGIN_LEFT, pytest.approx(8 - 3 * (CHART_HEIGHT - MARGIN_BOTTOM - 8)))
    assert second == ((MARGIN_LEFT + CHART_WIDTH - MARGIN_RIGHT) / 2, 8)
    assert third == (CHART_WIDTH - MARGIN_RIGHT, CHART_HEIGHT - MARGIN_BOTTOM)


def test_the_first_tenth_of_the_steps_does_not_decide_the_axis() -> None:
    chart = curves([ChartLine(0, [(0, [9.0]), (9, [8.0]), (10, [3.0]), (100, [1.0])])])
    heights = [height for _, height in lines(chart, "polyline")[0]]
    assert heights[0] < heights[1] < 8 == heights[2] < heights[3] == CHART_HEIGHT - MARGIN_BOTTOM


def test_the_script_of_a_page_has_the_sizes_of_the_page() -> None:
    script = Path(pages.__file__).with_name("curves.js").read_text(encoding="utf-8")
    numbers = json.loads(re.findall(r"^const \[WIDTH, .*\] = (\[.*\]);$", script, re.MULTILINE)[0])
    sizes = [CHART_WIDTH, MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM, 8.0, pages.TICKS, pages.EARLY_FRACTION]
    assert numbers == sizes


def test_two_evaluations_stay_inside_the_chart() -> None:
    chart = curves([ChartLine(0, [(0, [4.0]), (100, [1.0])])])
    assert lines(chart, "polyline") == [[(MARGIN_LEFT, 8), (CHART_WIDTH - MARGIN_RIGHT, CHART_HEIGHT - MARGIN_BOTTOM)]]


def test_the_pointer_shows_the_values_of_a_step() -> None:
    chart = curves([ChartLine(0, [(0, [4.0]), (100, [1.0, 2.0])], "relu"), ChartLine(1, [(100, [3.25])], "gelu")])
    tips = chart.findall("svg/rect[@class='tip']")
    assert [tip.findtext("title") for tip in tips] == ["step 0\nrelu 4", "step 100\nrelu 1.5\ngelu 3.25"]
    assert float(tips[0].attrib["x"]) + float(tips[0].attrib["width"]) == float(tips[1].attrib["x"])
    many = curves([ChartLine(0, [(step, [1.0]) for step in range(1000)])])
    assert len(many.findall("svg/rect[@class='tip']")) == 200


def test_gaps_are_those_of_pairs() -> None:
    """A seed without a pair, and a step that one side was not evaluated at, are left out."""
    relu = [Curve(seed, "", STEPS, values, None) for seed, values in enumerate(RELU)]
    gelu = [Curve(seed, "", STEPS, values, None) for seed, values in enumerate(GELU)]
    gelu[1] = Curve(1, "", (*STEPS[:2], 75, 100), (*GELU[1][:2], 9.0, GELU[1][2]), None)
    gelu.append(Curve(2, "", STEPS, (9.0, 9.0, 9.0), None))
    sides = {"relu": tuple(relu), "gelu": tuple(gelu)}
    arms = {name: ArmResult(name, name, "relu", 1, 1, 1, 0.0, None, None, None, item) for name, item in sides.items()}
    chart = draw_difference_curves(_add_differences(arms, LOSS))
    assert chart is not None
    level, mean = lines(chart, "polyline")
    unit = (GAPS - MARGIN_BOTTOM - 8) / 0.3  # between 0 and -0.3, the lowest late difference
    assert [y for _, y in level] == [8, 8, 8]
    assert [y for _, y in mean] == [pytest.approx(8 - value * unit, abs=0.06) for value in (0.1, -0.2, -0.2)]
    (band,) = lines(chart, "polygon")
    highest, lowest = (0.2, -0.1, -0.2), (-0.2, -0.3, 0.0)
    assert [y for _, y in band] == [pytest.approx(8 - value * unit, abs=0.06) for value in (*highest, *lowest)]


def test_runs_of_other_lengths_have_no_gaps() -> None:
    """Their last values differ all the same."""
    sides = {"relu": (0, 50, 100), "gelu": (0, 40, 80)}
    curve = {name: Curve(0, "", steps, (4.0, 2.0, 1.5), None) for name, steps in sides.items()}
    arms = {name: ArmResult(name, name, "relu", 1, 1, 1, 0.0, None, None, None, (curve[name],)) for name in sides}
    compared = _add_differences(arms, LOSS)
    assert compared[1].difference is not None
    assert draw_difference_curves(compared) is None


def test_the_margin_is_a_band_around_nothing() -> None:
    sides = {"relu": (2.0, 2.1), "gelu": (1.9, 1.9)}
    curve = {name: [Curve(seed, "", (0,), (value,), None) for seed, value in enumerate(sides[name])] for name in sides}
    arms = {name: ArmResult(name, name, "relu", 1, 1, 1, 0.0, None, None, None, tuple(curve[name])) for name in sides}
    compared = _add_differences(arms, LOSS)
    chart = draw_forest_plot(compared, 3.0)
    (name,) = chart.findall("text[@class='arm']")
    (points,) = {float(circle.attrib["cy"]) for circle in chart.findall("circle")}
    assert 20 <= float(name.attrib["y"]) <= points - 11  # on a phone: 20 of 26 units are above the baseline
    (band,) = draw_forest_plot(compared, 3.0).findall("rect")
    low, wide = float(band.attrib["x"]), float(band.attrib["width"])
    assert (low, wide) == (
        MARGIN_LEFT,
        pytest.approx(CHART_WIDTH - 2 * MARGIN_LEFT),
    )  # wider than the interval, 0.15 +- 0.64
    (zero,) = draw_forest_plot(compared, 3.0).findall("line[@class='ridge']")
    assert float(zero.attrib["x1"]) == pytest.approx(low + wide / 2)
    assert float(band.attrib["height"]) > ROW
    assert draw_forest_plot(compared, None).findall("rect") == []
