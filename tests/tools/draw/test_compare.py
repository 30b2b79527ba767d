"""Pictures of two models: exactly the differences are marked."""

from __future__ import annotations

import pytest

import tfkit
from tfkit.tools.draw.canvas import Differences, Differing, Rect, ShapeGroup, Words
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.scene import MISSING, scene_differences
from tfkit.tools.show.differences import fields_of_causes

from .geometry import faults


def test_nothing_is_marked_where_nothing_differs() -> None:
    scene = scene_of(tfkit.load("gpt2"))
    assert scene_differences(scene, scene, ()) == ({}, {})


def test_only_what_differs() -> None:
    marks = {"decoder1/base/attention": Differing(frozenset({"n_heads"}), frozenset({"d_head"}))}
    assert marked("gpt2", "decoder.attention.n_heads=6") == (marks, marks)


def test_a_width_is_the_only_cause_of_its_consequences() -> None:
    """BLOOM writes `d_ff: 4 * d_model`, so d_ff follows like the counts; GPT-2 writes numbers."""
    marks, _ = marked("bloom_560m", "d_model=1536")
    assert {key: set(mark.causes) for key, mark in marks.items() if mark.causes} == {"": {"d_model"}}
    assert marks["decoder1/base/ffn"].consequences == {"d_ff", "parameters"}
    assert marks["decoder1/base/attention"].consequences == {"d_head", "parameters"}
    assert marks["embedding1/tokens"].consequences == {"table", "parameters"}
    written, _ = marked("gpt2", "decoder.ffn.d_ff=4096")
    assert written["decoder1/base/ffn"] == Differing(frozenset({"d_ff"}), frozenset({"parameters"}))


def test_layers_of_a_pattern() -> None:
    marks, _ = marked("gemma2_2b", "decoder.layers.pattern=[local, local, base]")
    assert marks["decoder1"].causes == {"pattern"}
    assert marks["decoder1/local"].consequences == {"n_layers"}


def marked(name: str, change: str) -> tuple[Differences, Differences]:
    """The differences between a spec and a change of it."""
    graphs = [tfkit.load(name, sets=sets) for sets in ([], [change])]
    return scene_differences(*map(scene_of, graphs), fields_of_causes(*graphs))


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("decoder.placement=sandwich", {"decoder1/base/attention_norm_out", "decoder1/base/ffn_norm_out"}),
        ("decoder.final_norm=false", set()),
    ],
)
def test_boxes_that_one_of_them_does_not_have(change: str, keys: set[str]) -> None:
    before, after = marked("gpt2", change)
    assert {key for key, mark in after.items() if MISSING in mark.causes} == keys
    assert ("decoder1/final_norm" in before) == (change == "decoder.final_norm=false")


def test_marks_are_seen() -> None:
    picture = draw(tfkit.load("gpt2"), tfkit.load("gpt2", sets=["decoder.ffn.d_ff=4096"]))
    assert list(faults(picture)) == []
    outlined = set()
    for group in (shape for shape in picture.shapes if isinstance(shape, ShapeGroup)):
        if any(isinstance(value, Rect) and "cause" in value.look.split() for value in group.shapes):
            outlined.add(group.key)
            bold = [run.text for value in group.shapes if isinstance(value, Words) for run in value.line if run.bold]
            assert "gelu" not in bold
            assert {"d_ff 3,072", "d_ff 4,096"} & set(bold)
    assert outlined == {"decoder1/base/ffn"}
    totals = [shape for shape in picture.flat() if isinstance(shape, Words) and "parameters" in shape.line[0].text]
    assert [words.line[0].look for words in totals] == ["consequence", "consequence"]
    legend = {shape.line[0].text for shape in picture.flat() if isinstance(shape, Words) and shape.line[0].look}
    assert legend >= {"differs in the specs", "follows from it"}


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
