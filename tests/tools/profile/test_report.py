import dataclasses
import re

import pytest

from tfkit.tools.profile.page import profile_report

from .report_page import SECTIONS, Page, having, made_up, part, words

UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds(text):
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


def test_every_section_is_there_and_none_is_empty():
    page = Page(profile_report([made_up()]))
    assert [section.get("id") for section in page.root.iter("section")] == list(SECTIONS)
    assert all(len(words(page.section(name))) > 40 for name in SECTIONS)


def test_the_summary_is_of_the_step_without_the_profiler():
    tiles = [words(tile) for tile in having(Page(profile_report([made_up()])).section("summary"), "tile")]
    assert [text for text in tiles if text.startswith("step50.0 ms")]
    assert [text for text in tiles if "5.12k tokens/s" in text]  # 256 tokens in 50 ms
    assert [text for text in tiles if "480 GFLOP/s" in text and "48.0% of 1.00 TFLOP/s" in text]  # 24 GFLOP in 50 ms
    assert [text for text in tiles if "50.0 kB" in text]
    assert [text for text in tiles if "1.40×" in text]
    assert [text for text in tiles if "92.9%" in text]


def test_the_table_adds_up_the_modules_of_each_component():
    profile = made_up()
    lines = {line[0]: line for line in Page(profile_report([profile])).rows("components")}
    for name in ("attention", "FFN", "LayerNorm", "head"):
        local = [part for part in profile.parts if part.label == name]
        assert seconds(lines[name][1]) == pytest.approx(sum(part.time for part in local), rel=0.005)
        assert seconds(lines[name][3]) == pytest.approx(sum(part.forward for part in local), rel=0.005)
        assert seconds(lines[name][4]) == pytest.approx(sum(part.backward for part in local), rel=0.005)
        assert float(lines[name][2].rstrip("%")) == pytest.approx(
            100 * sum(part.time for part in local) / 70e-3, abs=0.05
        )
    assert lines["FFN"][5:] == ["16.0G", "552G", "1.38 GB", "2.0 kB"]
    assert lines["step"][1] == "70.0 ms"
    assert lines["step"][3:5] == ["19.3 ms", "38.7 ms"]  # of 58 ms without the optimizer
    assert lines["optimizer"][3:5] == ["", ""]  # neither forward nor backward


def test_a_row_opens_to_layers_and_modules():
    page = Page(profile_report([made_up()]))
    lines = [line[0] for line in page.rows("components")]
    for name in ("decoder.layers.0.attention", "decoder.layers.1.attention", "decoder.layers.0.ffn"):
        assert lines.count(name) == 1
    opened = next(
        details for details in page.section("components").iter("details") if words(details).startswith("attention")
    )
    assert [words(row[0]) for row in having(opened, "row")[1:]] == [
        "decoder.layers.0.attention",
        "decoder.layers.1.attention",
    ]


def test_several_modules_of_a_layer_stand_below_the_layer():
    again = part("decoder.layers.0.attention.inner", "attention", 1e-3)
    profile = made_up()
    lines = Page(profile_report([dataclasses.replace(profile, parts=(*profile.parts, again))])).rows("components")
    assert seconds({line[0]: line[1] for line in lines}["decoder.layers.0"]) == pytest.approx(6e-3, rel=0.005)


def test_the_bars_are_as_long_as_the_times():
    bars = having(Page(profile_report([made_up()])).section("time"), "labelled")
    lengths = {words(row[0]): sum(width(segment) for segment in having(row, "segment")) for row in bars}
    # attention, FFN, norm, embedding, head and loss have 58 ms: a third of it in the forward
    assert lengths["backward"] == pytest.approx(100, abs=0.1)
    assert lengths["forward"] == pytest.approx(50, abs=0.1)
    assert lengths["update"] == pytest.approx(100 * 7 / (58 * 2 / 3), abs=0.1)
    assert lengths["rest"] == pytest.approx(100 * 5 / (58 * 2 / 3), abs=0.1)


def width(element):
    return float(re.search(r"width:([\d.]+)%", element.get("style"))[1])


def test_the_layers_are_held_against_the_slowest():
    section = Page(profile_report([made_up()])).section("layers")
    heights = [
        sum(float(re.search(r"height:([\d.]+)", block.get("style"))[1]) for block in tower)
        for tower in having(section, "tower")
    ]
    assert heights == pytest.approx([100 * 18 / 26, 100], abs=0.1)
    styles = [cell.get("style") for cell in having(section, "cell") if cell.get("style")]
    heats = [float(style.removeprefix("--heat:")) for style in styles]
    assert heats == pytest.approx([5 / 18, 8 / 18, 11 / 18, 1, 2 / 18], abs=0.001)
    assert len(having(section, "none")) == 1  # the second layer has no norm


def test_the_points_lie_where_their_numbers_are():
    section = Page(profile_report([made_up()])).section("roofline")
    points = {words(point).split(":")[0].removeprefix("made_up, "): point for point in having(section, "point")}
    hints = {name: words(point) for name, point in points.items()}
    assert hints["FFN"] == "made_up, FFN: 552 GFLOP/s at 400 FLOP a byte, 55.2% of the device's limit"
    assert set(points) == {"embedding", "attention", "FFN", "LayerNorm", "head"}
    x, y = ({name: float(value.get(key)) for name, value in points.items()} for key in ("cx", "cy"))
    # on a logarithmic axis equal ratios are equal distances
    assert (x["FFN"] - x["attention"]) / (x["head"] - x["attention"]) == pytest.approx(0.6931 / -0.4055, rel=0.01)
    roof = next(line for line in having(section, "roof")).get("points").split()
    corners = [tuple(map(float, corner.split(","))) for corner in roof]
    assert len(corners) == 3
    assert corners[1][1] == corners[2][1] < min(y.values())  # nothing is above the roof
    for name, value in points.items():
        slope = (corners[1][1] - corners[0][1]) / (corners[1][0] - corners[0][0])
        limit = max(corners[1][1], corners[0][1] + slope * (x[name] - corners[0][0]))
        assert float(value.get("cy")) >= limit


def test_names_do_not_lie_on_each_other():
    crowd = [part(f"node{n}", f"component{n}", (1 + n / 50) * 1e-3, flops=1e8, moved=1e7) for n in range(6)]
    section = Page(profile_report([made_up(parts=tuple(crowd))])).section("roofline")
    labels = having(section, "label")
    assert len(labels) == 6
    assert having(section, "leader")  # those that found no place right beside their points
    positions = [(float(label.get("x")), float(label.get("y")), 7 * len(words(label))) for label in labels]
    for index, (x, y, wide) in enumerate(positions):
        for other_x, other_y, other_wide in positions[index + 1 :]:
            assert abs(y - other_y) >= 13 or x + wide <= other_x or other_x + other_wide <= x


def test_measured_and_floor_stand_beside_each_other():
    bars = having(Page(profile_report([made_up()])).section("floor"), "labelled")
    texts = {words(row[0]): words(row[2]) for row in bars}
    assert texts["FFN"] == "16.0 ms → 29.0 ms · 1.81×"
    assert "loss" not in texts  # nothing was counted
    widths = [width(segment) for segment in having(next(row for row in bars if words(row[0]) == "FFN"), "segment")]
    assert widths == pytest.approx([100 * 16 / 29, 100 * 13 / 29], abs=0.1)


def test_memory_at_the_peak():
    page = Page(profile_report([made_up()]))
    text = words(page.section("memory"))
    assert "The peak of 50.0 kB comes in the backward of decoder.layers.1.ffn. Before the step, 20.0 kB are" in text
    hints = [segment.get("title") for segment in having(page.section("memory"), "segment")]
    assert "weights: 10.0 kB" in hints
    assert "inputs and others: 23.0 kB" in hints  # 50 less 18 that stay from step to step and 9 of parts
    assert sum(width(segment) for segment in having(page.section("memory"), "segment")) == pytest.approx(100, abs=0.1)


def test_the_longest_kernels_and_what_the_others_take():
    page = Page(profile_report([made_up()]))
    lines = page.table("kernels")
    assert len(lines) == 21
    assert lines[1] == ["aten::op0", "FFN", "forward", "2", "3.00 ms", "4.3%"]
    assert "5 more take 4.00 ms together" in words(page.section("kernels"))


def test_how_it_was_measured():
    text = words(Page(profile_report([made_up()])).section("measured"))
    for name in ("2 under the profiler, 3 without it", "said to the reader", "torch2."):
        assert name in text


def test_two_models_stand_beside_each_other_with_ratios():
    twice = [
        dataclasses.replace(part, forward=2 * part.forward, backward=2 * part.backward) for part in made_up().parts
    ]
    slower = made_up("slower", parts=tuple(twice), steps=(135e-3,), plain_steps=(100e-3,))
    page = Page(profile_report([made_up(), slower]))
    lines = {line[0]: line[1:] for line in page.table("summary")}
    assert [line[-1] for line in lines.values()] == ["ratio", "2.00×", "0.50×", "0.50×", "1.00×", "1.04×", "0.96×"]
    lines = {line[0]: line[1:] for line in page.table("components")}
    assert lines["FFN"] == ["29.0 ms", "58.0 ms", "2.00×"]
    assert lines["step"] == ["70.0 ms", "135 ms", "1.93×"]
    assert len(having(page.section("roofline"), "hollow")) == 5
    assert len(having(page.section("roofline"), "roof")) == 1  # it is the same device


def test_what_is_not_known_is_said():
    parts = [
        dataclasses.replace(part, flops=None, bytes=None, floor=None)
        for part in made_up().parts
        if "layers" not in part.path
    ]
    page = Page(profile_report([made_up(parts=tuple(parts))]))
    for name, item in {
        "summary": "no limit to compare with",
        "layers": "no stack of layers",
        "roofline": "no roofline: the work of this model was not counted",
        "floor": "no prediction: the work of this model was not counted",
    }.items():
        assert item in words(page.section(name))
