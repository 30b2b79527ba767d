"""Pictures of specs: their contents, read from the finished picture, without overlapping shapes."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfkit
from tfkit.tools.draw.canvas import Words
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.draw.picture import draw, picture_of
from tfkit.tools.draw.scene import Added, Box, Chain, Tower
from tfkit.tools.draw.svg import to_svg
from tfkit.tools.list_.gallery import shipped_specs
from tfkit.tools.params.count import count_params
from tfkit.tools.show.layer_programs import programs_of

from ...known import KNOWN, NAMES
from ...sampling import slow, some
from ...small_specs import covering
from .geometry import Reader, boxes, faults, ways

QUICK_SPECS = {"bart_base", "deepseek_v3", "gpt2"}
EVERY = covering(*QUICK_SPECS)
ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "pictures"
draw_all = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "draw_all.py")))
STACK = """\
tfkit: 1
name: layouts
d_model: 16
inputs: {x: {type: features, width: 16}}
graph:
  encoder: {block: encoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 32}, final_norm: false}
"""
ODD = """\
tfkit: 1
name: odd
d_model: 64
vocab_size: 100
max_len: 32
inputs: {left: tokens, right: tokens, image: {type: features, width: 48}}
graph:
  left_embedding: {block: embedding, input: left, position: learned, d_embed: 32}
  left_encoder:
    block: encoder
    n_layers: 6
    attention: {kind: mha, n_heads: 4}
    ffn: {kind: relu, d_ff: 128}
    residual: {learned: vector, learned_onto: scalar}
    layers: {groups: 2}
  right_embedding: {block: embedding, input: right, d_embed: 32, tie: left_embedding, scale: sqrt_d_model}
  pixels: {block: linear, input: image}
  mixed: {block: concat, inputs: [right_embedding, pixels]}
  right_encoder:
    block: encoder
    n_layers: 4
    attention: {kind: mha, n_heads: 4, position: t5}
    ffn: {kind: relu, d_ff: 128}
    residual: {onto: normed, scale: 0.5}
  both: {block: add, inputs: [left_encoder, left_embedding]}
  decoder:
    block: decoder
    input: both
    memory: right_encoder
    n_layers: 3
    placement: parallel_two_norms
    attention: {kind: mha, n_heads: 4, position: rope}
    ffn: {kind: mlp, d_ff: 128, activation: silu}
  normed: {block: norm}
  logits: {block: lm_head, tie: left_embedding, d_embed: 32, bias: true}
  pooler: {block: pooler, input: left_encoder, activation: tanh}
  classes: {block: classifier, n_classes: 3}
outputs: [logits, classes, right_encoder]
"""


@pytest.mark.parametrize("name", EVERY)
def test_every_spec(name: str) -> None:
    graph = tfkit.load(name)
    scene = scene_of(graph)
    assert scene.counted == scene.total == count_params(graph).total
    assert all(node.rest == 0 for node in scene.nodes.values())
    keys = [box.key for box in scene.boxes()]
    assert len(set(keys)) == len(keys)
    picture = picture_of([scene])
    assert list(faults(picture)) == []
    written = {run.text for words in picture.flat() if isinstance(words, Words) for run in words.line}
    assert {part.title for box in scene.boxes() for part in (box, *box.parts)} <= written


@pytest.mark.slow
def test_counts_are_those_of_the_layers_one_by_one() -> None:
    graph = tfkit.load("deepseek_v3")
    layers = {row.name: row.parameters for row in count_params(graph, by="layer").rows}
    tower = scene_of(graph).nodes["decoder"]
    assert isinstance(tower, Tower)
    dense, base = tower.layers
    assert dense.parameters == layers["decoder.layers.0"]
    assert base.parameters == layers["decoder.layers.3"]
    assert (dense.times, base.times, tower.order) == (3, 58, (0,) * 3 + (1,) * 58)
    inside = next(box for box in base.boxes() if box.role == "ffn")
    assert [part.title for part in inside.parts] == ["router", "experts", "shared"]
    assert sum(part.parameters for part in inside.parts) == inside.parameters


@pytest.mark.parametrize(
    "change",
    some(
        [
            *(f"placement={name}" for name in ("pre", "post", "sandwich", "output", "parallel", "parallel_two_norms")),
            "residual={learned: vector}",
            "sublayers=[ffn, attention, ffn]",
            "sublayers=[{sublayer: attention, norm_after: true}, {sublayer: ffn, reads: input}]",
            "sublayers=[attention, {sublayer: ffn, reads: input}]",
            "sublayers=[attention, ffn, {sublayer: ffn, reads: input}, {sublayer: attention, reads: input}]",
        ],
        5,
    ),
)
@pytest.mark.parametrize("more", ["norm=layernorm", "input_norm=true"])
def test_lines_lead_where_the_program_says(change: str, more: str) -> None:
    try:
        graph = tfkit.loads(STACK, sets=[f"encoder.{change}", f"encoder.{more}"])
    except tfkit.SpecError:
        pytest.skip("an input norm has no effect there")
    picture = draw(graph)
    highest = min((way.points[-1] for way in ways(picture)), key=lambda point: point[1])
    assert sorted_sums(Reader(picture).value(highest)) == sorted_sums(written(programs_of(graph)[0].lines))
    assert list(faults(picture)) == []


def written(lines: tuple[str, ...]) -> str:
    """The program of a layer as one expression of x."""
    names = {"x": "x"}
    lines = tuple(re.sub(r"_\d+\(", "(", line) for line in lines)
    for line in lines:
        name, value = line.split(" = ", 1)
        value = re.sub(r"learned_vector \* (.*)$", r"learned_vector(\1)", value)
        names[name] = re.sub(r"\b(x|input)\b", lambda match: names[match[1]], value)
    return names["x"]


def sorted_sums(text: str) -> str:
    """The same expression with the terms of every sum in order."""
    terms, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and text.startswith(" + ", index):
            terms.append(text[start:index])
            start = index + 3
    terms.append(text[start:])
    inside = re.compile(r"(\w+)\((.*)\)$")
    matches = ((term, inside.match(term)) for term in terms)
    return " + ".join(sorted(f"{match[1]}({sorted_sums(match[2])})" if match else term for term, match in matches))


def test_a_residual_of_what_was_normed_begins_behind_the_norm() -> None:
    picture = draw(tfkit.loads(STACK, sets=["encoder.residual={onto: normed, scale: 0.5, learned_onto: scalar}"]))
    actual = boxes(picture)
    lines = [way for way in ways(picture) if "residual" in way.look]
    assert [way.start.split()[0] for way in lines] == ["normed", "normed"]
    for way, sublayer in zip(lines, ("attention", "ffn"), strict=True):
        norm, box = actual[f"encoder1/base/{sublayer}_norm_in"], actual[f"encoder1/base/{sublayer}"]
        assert box[3] < way.points[0][1] < norm[1]
        assert actual[f"encoder1/base/{sublayer}_residual_scale_onto"][0] > box[2]
    assert sum(words.line[0].text == "× 0.5" for words in picture.flat() if isinstance(words, Words)) == 2


def test_cross_attention_is_reached_from_the_encoder() -> None:
    picture = draw(tfkit.load("vaswani_base"))
    actual = boxes(picture)
    (wire,) = [way for way in ways(picture) if "memory" in way.look]
    left, top, _, bottom = actual["decoder1/base/cross_attention"]
    assert wire.points[-1] == pytest.approx((left, (top + bottom) / 2))
    encoder = actual["encoder1/base/ffn_norm_after"]
    assert wire.points[0][0] == pytest.approx((encoder[0] + encoder[2]) / 2)
    assert wire.points[0][1] < encoder[1]


def test_a_tied_head_hangs_on_the_table() -> None:
    picture = draw(tfkit.load("gpt2"))
    (wire,) = [way for way in ways(picture) if "tie" in way.look]
    assert (wire.start, wire.end) == ("embedding1/tokens", "lm_head1/output")
    assert not [way for way in ways(draw(tfkit.load("llama3_8b"))) if "tie" in way.look]


def test_any_graph_has_its_picture() -> None:
    graph = tfkit.loads(ODD)
    scene = scene_of(graph)
    assert scene.counted == scene.total
    picture = picture_of([scene])
    assert list(faults(picture)) == []
    assert {way.look.split()[-1] for way in ways(picture)} == {"line", "residual", "memory", "tie", "side"}
    assert [key for key, box in boxes(picture).items() if box[1] == min(box[1] for box in boxes(picture).values())]


def test_a_node_with_inputs_of_every_type(captions: tfkit.Graph) -> None:
    assert list(faults(draw(captions))) == []


def test_an_input_that_is_read_in_front_and_beside_stands_once() -> None:
    layers = "n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}"
    graph = tfkit.loads(
        f"""
tfkit: 1
name: both
d_model: 16
inputs: {{a: {{type: features, width: 16}}, b: {{type: features, width: 16}}}}
graph:
  first: {{block: decoder, input: a, memory: b, {layers}}}
  second: {{block: encoder, input: b, {layers}}}
  third: {{block: decoder, input: first, memory: b, {layers}}}
  sum: {{block: add, inputs: [second, third]}}
"""
    )
    standing = [name for column in scene_of(graph).columns for name in column]
    assert sorted(standing) == ["b", "first", "second", "sum", "third"]
    assert list(faults(draw(graph))) == []


def test_columns_without_wires_are_closer_than_models() -> None:
    graph = tfkit.loads(
        """
tfkit: 1
name: apart
d_model: 16
inputs: {a: {type: features, width: 24}, b: {type: features, width: 40}}
graph:
  first: {block: linear, input: a}
  second: {block: linear, input: b}
outputs: [first, second]
"""
    )
    left, right = sorted(boxes(draw(graph)).values())
    assert right[0] - left[2] == 24
    first, second = (min(boxes(picture).values())[0] for picture in (draw(graph), draw(graph, graph)))
    assert second - (right[2] - first) == 56


def test_what_an_embedding_does_stands_in_its_order() -> None:
    for name in ("blenderbot_small_90m", "vaswani_base", "opt_350m", "ernie_3_0_base_zh"):
        graph = tfkit.load(name)
        config = next(node.config for node in graph.nodes if node.config.table())
        chain = next(node for node in scene_of(graph).nodes.values() if isinstance(node, Chain))
        keys = [(item.box if isinstance(item, Added) else item).key.split("/")[1] for item in chain.items]
        stages = [stage for stage in getattr(config, "stages") or [] if stage != "dropout"]  # noqa: B009
        order = stages or [stage for stage in ("scale", "position", "tables", "norm", "project") if stage in keys]
        assert list(dict.fromkeys(keys)) == ["tokens", *order]


def test_a_component_that_nobody_knows_is_a_box_of_its_slot(tmp_path: Path) -> None:
    plugin = '''
from typing import Literal
import tfkit
from torch import nn

class StrangeConfig(tfkit.FFNConfig):
    """Nobody has seen it."""
    kind: Literal["strange"] = "strange"
    n_things: int
    def build(self, make):
        return nn.Linear(self.d_model, self.d_model)

@tfkit.hookimpl
def tfkit_register(register):
    register(StrangeConfig)
'''
    (tmp_path / "strange.py").write_text(plugin)
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)
    text = STACK.replace("{kind: relu, d_ff: 32}", "{kind: strange, n_things: 7}")
    scene = scene_of(tfkit.loads(text, plugins=plugins))
    box: Box = next(box for box in scene.boxes() if box.key.endswith("/ffn"))
    assert (box.role, [note.text for note in box.notes], box.parameters) == ("ffn", ["strange", "7 things"], 272)
    assert ("", "Nobody has seen it.") in box.tip


NODES = """\
tfkit: 1
name: nodes
d_model: 16
vocab_size: 32
max_len: 32
graph:
  embedding: {block: embedding}
  attention: {block: attention, attention: {n_heads: 2}, causal: true}
  sum: {block: residual, inputs: [embedding, attention], residual: {scale: 0.5, learned: vector}}
  norm: norm
  ffn: {block: ffn, ffn: {kind: relu, d_ff: 32}}
  layer: {block: layer, attention: {n_heads: 2}}
  logits: {block: lm_head}
"""


def test_sublayers_as_nodes_look_like_sublayers() -> None:
    graph = tfkit.loads(NODES)
    scene = scene_of(graph)
    picture = {box.title: (box.role, [note.text for note in box.notes], box.parameters) for box in scene.boxes()}
    assert picture["ffn"] == ("ffn", ["relu", "16 wide", "d_ff 32"], 16 * 32 * 2 + 32 + 16)
    assert picture["norm"] == ("norm", ["layernorm", "16 wide"], 32)
    assert picture["sum"] == ("residual", ["add", "16 wide", "scale 0.5", "learned vector"], 16)
    assert picture["causal self-attention"][0] == "attention"
    svg = to_svg(draw(graph))
    assert ">layer<" in svg
    assert "× 1<" not in svg


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("mistral_7b", "decoder1/base/attention", {"gqa", "32 heads", "8 kv heads", "window 4,096", "rope"}),
        slow(("gpt_neo_125m", "decoder1/local/attention", {"mha", "window 256"})),
        slow(("modernbert_base", "encoder1/local/attention", {"window 64 + 64"})),
        ("deepseek_v3", "decoder1/base/attention", {"mla", "q rank 1,536", "kv rank 512", "d_rope 64"}),
        slow(("deepseek_v3", "decoder1/base/ffn", {"moe", "256 experts", "8 experts per token", "d_ff 2,048"})),
        slow(("gemma2_2b", "decoder1/base/attention", {"softcap 50"})),
        slow(("gemma2_2b", "lm_head1/output", {"softcap 30"})),
        slow(("bloom_560m", "decoder1/base/attention", {"alibi"})),
        slow(("qwen3_8b", "decoder1/base/attention", {"qk norm rmsnorm", "rope: theta 1,000,000"})),
        slow(("albert_base", "encoder1", {"1 set of weights"})),
    ],
)
def test_a_box_says_what_the_paper_says(name: str, key: str, text: set[str]) -> None:
    """The numbers of the models' own reports."""
    scene = scene_of(tfkit.load(name))
    notes = {node.key: {note.text for note in node.notes} for node in scene.nodes.values() if isinstance(node, Tower)}
    for box in scene.boxes():
        notes[box.key] = {note.text for note in box.notes} | {chip.text for chip in box.chips}
    assert text <= notes[key]


@pytest.mark.parametrize("path", some(sorted(PICTURES.glob("*.svg")), 2), ids=lambda path: path.stem)
def test_the_pictures_in_the_docs_are_these(path: Path) -> None:
    """A process with other hashes has drawn them, so the order of a set shows."""
    drawn = to_svg(draw(*(tfkit.load(name) for name in draw_all.specs_of(path))))
    assert path.read_text(encoding="utf-8") == drawn, "renew them: make pictures"


def test_the_docs_keep_a_dozen_pictures_and_show_them() -> None:
    page = (PICTURES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in PICTURES.glob("*.svg")}
    assert set(re.findall(r"\(([\w.-]+\.svg)\)", page)) == files
    assert len(files) == 12


@pytest.mark.slow
def test_the_page_of_all_pictures_shows_every_spec() -> None:
    page = draw_all.page(shipped_specs())
    assert {Path(name).stem for name in re.findall(r'[("]([\w.-]+\.svg)[)"]', page)} == set(NAMES)
    assert all(f"### {model_type}\n" in page for model_type in KNOWN.by_model_type)


def test_layers_that_differ_stand_in_their_order() -> None:
    tower = scene_of(tfkit.load("gemma3_1b")).nodes["decoder"]
    assert isinstance(tower, Tower)
    names = [tower.layers[number].name for number in tower.order]
    assert names == [name for name, _ in tfkit.load("gemma3_1b").node("decoder").config.plan()]  # type: ignore[attr-defined]
    assert all(a != b or a == "local" for a, b in pairwise(names))
