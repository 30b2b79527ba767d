"""Two models side by side: what is marked is what differs."""

from __future__ import annotations

import pytest

import tfkit
from tfkit.tools.draw.canvas import Rect, ShapeGroup, Words
from tfkit.tools.draw.layout import MISSING
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.scene import differences

from .geometry import faults


def test_nothing_is_marked_where_nothing_differs() -> None:
    scene = scene_of(tfkit.load("gpt2"))
    assert differences(scene, scene) == ({}, {})


def test_only_what_differs() -> None:
    left, right = (scene_of(tfkit.load("gpt2", sets=sets)) for sets in ([], ["decoder.attention.n_heads=6"]))
    marked = {"decoder1/base/attention": frozenset({"n_heads", "d_head"})}
    assert differences(left, right) == (marked, marked)


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("decoder.placement=sandwich", {"decoder1/base/attention_norm_out", "decoder1/base/ffn_norm_out"}),
        ("decoder.final_norm=false", set()),
    ],
)
def test_boxes_that_one_of_them_does_not_have(change: str, keys: set[str]) -> None:
    left, right = scene_of(tfkit.load("gpt2")), scene_of(tfkit.load("gpt2", sets=[change]))
    before, after = differences(left, right)
    assert {key for key, what in after.items() if MISSING in what} == keys
    assert ("decoder1/final_norm" in before) == (change == "decoder.final_norm=false")


def test_marks_are_seen() -> None:
    picture = draw(tfkit.load("gpt2"), tfkit.load("gpt2", sets=["decoder.ffn.d_ff=4096"]))
    assert list(faults(picture)) == []
    outlined = set()
    for group in (shape for shape in picture.shapes if isinstance(shape, ShapeGroup)):
        if any(isinstance(one, Rect) and "differs" in one.look for one in group.shapes):
            outlined.add(group.key)
            bold = [run.text for one in group.shapes if isinstance(one, Words) for run in one.line if run.bold]
            assert "gelu" not in bold
            assert {"d_ff 3,072", "d_ff 4,096"} & set(bold)
    assert outlined == {"decoder1/base/ffn"}
    totals = [shape for shape in picture.flat() if isinstance(shape, Words) and "parameters" in shape.line[0].text]
    assert [words.look for words in totals] == ["", ""]  # the accent


@pytest.mark.parametrize(
    "pair",
    [
        ("gpt2", "llama3_8b"),
        ("t5_small", "bert_base"),
        ("gpt_j_6b", "vaswani_base"),
        pytest.param(("deepseek_v3", "trinity_mini"), marks=pytest.mark.slow),
    ],
)
def test_any_two_have_their_place(pair: tuple[str, str]) -> None:
    assert list(faults(draw(*map(tfkit.load, pair)))) == []
