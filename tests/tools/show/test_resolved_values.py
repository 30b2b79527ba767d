from __future__ import annotations

import pytest

import tfkit
from tfkit.errors import number_ranges
from tfkit.tools.show.differences import spec_differences
from tfkit.tools.show.layer_programs import programs_of
from tfkit.tools.show.resolved_values import values_of

STACK = """\
tfkit: 1
name: layouts
d_model: 16
inputs: {x: {type: features, width: 16}}
graph:
  encoder: {block: encoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 32}}
"""


@pytest.mark.parametrize(
    ("sets", "lines"),
    [
        (["placement=pre"], ["x = x + attention(layernorm(x))", "x = x + ffn(layernorm(x))"]),
        (["placement=post"], ["x = layernorm(x + attention(x))", "x = layernorm(x + ffn(x))"]),
        (["placement=output"], ["x = x + layernorm(attention(x))", "x = x + layernorm(ffn(x))"]),
        (
            ["placement=sandwich", "norm=rmsnorm"],
            ["x = x + rmsnorm(attention(rmsnorm(x)))", "x = x + rmsnorm(ffn(rmsnorm(x)))"],
        ),
        (["placement=parallel"], ["input = layernorm(x)", "x = x + attention(input)", "x = x + ffn(input)"]),
        (
            ["placement=parallel_two_norms"],
            ["input = x", "x = x + attention(layernorm(input))", "x = x + ffn(layernorm(input))"],
        ),
        (
            ["dropout=0.1", "residual={scale: 0.5, learned: vector}"],
            [
                "x = x + 0.5 * learned_vector * dropout(attention(layernorm(x)))",
                "x = x + 0.5 * learned_vector * dropout(ffn(layernorm(x)))",
            ],
        ),
        (
            ["residual={onto: normed, learned_onto: scalar, scale_onto: 1.5}"],
            [
                "x = 1.5 * learned_scalar * layernorm(x) + attention(layernorm(x))",
                "x = 1.5 * learned_scalar * layernorm(x) + ffn(layernorm(x))",
            ],
        ),
    ],
)
def test_programs(sets: list[str], lines: list[str]) -> None:
    graph = tfkit.loads(STACK, sets=[f"encoder.{value}" for value in sets])
    program = programs_of(graph)[0]
    assert (program.node, program.title, list(program.lines)) == ("encoder", "layers 0-1", lines)


def test_programs_of_variants() -> None:
    sets = ["encoder.layers={variants: {bare: {attention: null}}, pattern: [base, bare]}", "encoder.n_layers=5"]
    actual = programs_of(tfkit.loads(STACK, sets=sets))
    assert [program.title for program in actual] == ["layers 0, 2, 4", "layers 1, 3, bare", "after the last layer"]
    assert actual[1].lines == ("x = x + ffn(layernorm(x))",)


def test_origins(small: tfkit.Graph) -> None:
    text = STACK + "init: {kind: normal, std: 0.1}\n"
    actual = {value.dotted: (value.value, value.how, value.line) for value in values_of(tfkit.loads(text))}
    assert actual["graph.encoder"] == ("encoder", "given", 6)
    assert actual["graph.encoder.d_model"] == ("16", "inherited", 3)
    assert actual["graph.encoder.attention.n_heads"] == ("2", "given", 6)
    assert actual["graph.encoder.attention"] == ("mha", "given", 6)  # the kind that the slot implies
    assert actual["graph.encoder.norm"] == ("layernorm", "default", None)
    assert actual["graph.encoder.norm.eps"] == ("1e-05", "default", None)
    assert actual["init.std"] == ("0.1", "given", 7)
    assert actual["outputs"] == ("null", "default", None)


def test_what_an_inherited_part_holds_is_inherited() -> None:
    text = STACK.replace("d_model: 16\n", "d_model: 16\nnorm: {kind: rmsnorm, eps: 0.1}\n")
    actual = {value.dotted: (value.value, value.how, value.line) for value in values_of(tfkit.loads(text))}
    assert actual["graph.encoder.norm"] == ("rmsnorm", "inherited", 4)
    assert actual["graph.encoder.norm.eps"] == ("0.1", "inherited", 4)
    assert actual["graph.encoder.norm.offset"] == ("0", "default", None)


def test_of_a_variant_only_what_it_changes() -> None:
    sets = ["encoder.layers={variants: {wide: {ffn: {d_ff: 48}}}, pattern: [base, wide]}"]
    actual = [value.dotted for value in values_of(tfkit.loads(STACK, sets=sets)) if ".wide" in value.dotted]
    wide = "graph.encoder.layers.variants.wide"
    assert actual == [wide, f"{wide}.ffn", f"{wide}.ffn.d_ff"]


def test_differences() -> None:
    before = tfkit.loads(STACK)
    assert spec_differences(before, tfkit.loads(STACK.replace("layouts", "other"))) == []
    after = tfkit.loads(STACK, sets=["d_model=32", "inputs.x.width=32", "encoder.attention.position=rope"])
    actual = {difference.path: (difference.before, difference.after) for difference in spec_differences(before, after)}
    assert actual["d_model"] == ("16", "32")
    assert actual["graph.encoder.attention.position"] == ("null", "rope")
    assert actual["graph.encoder.attention.position.theta"] == (None, "10000.0")
    (width,) = [difference for difference in spec_differences(before, after) if difference.path == "d_model"]
    assert width.paths == ("graph.encoder.d_model", "graph.encoder.attention.d_model", "graph.encoder.ffn.d_model")


def test_of_a_part_that_is_new_only_what_is_written_in_it() -> None:
    text = STACK + "  second: {block: encoder, n_layers: 1, attention: {n_heads: 2}}\n"
    actual = [difference.path for difference in spec_differences(tfkit.loads(STACK), tfkit.loads(text))]
    assert actual == [
        "graph.second",
        "graph.second.attention",
        "graph.second.attention.n_heads",
        "graph.second.n_layers",
    ]


def test_ranges() -> None:
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


@pytest.mark.parametrize(
    ("placement", "steps"),
    [
        ("pre", ("x = x + attention(layernorm(x))", "x = x + ffn(layernorm(x))")),
        ("post", ("x = layernorm(x + attention(x))", "x = layernorm(x + ffn(x))")),
        ("sandwich", ("x = x + layernorm(attention(layernorm(x)))", "x = x + layernorm(ffn(layernorm(x)))")),
        ("output", ("x = x + layernorm(attention(x))", "x = x + layernorm(ffn(x))")),
        ("parallel", ("input = layernorm(x)", "x = x + attention(input)", "x = x + ffn(input)")),
    ],
)
def test_programs_of_placements(placement: str, steps: tuple[str, ...]) -> None:
    layers, *after = programs_of(tfkit.load("gpt2", sets=[f"decoder.placement={placement}", "dropout=0"]))
    assert layers.lines == steps
    assert [program.lines for program in after] == ([] if placement == "post" else [("x = layernorm(x)",)])
