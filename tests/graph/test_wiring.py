"""Wires and arrangements of a spec, compared with the same model written by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.checkpoint.remote_code import head_of
from tfkit.nn import Context
from tfkit.testing import (
    check_capture,
    check_causal,
    check_gradients,
    check_padding,
    check_script,
    example_inputs,
)

from ..sampling import some

HEAD = "tfkit: 1\nname: test\nd_model: 16\n"
STACK = "n_layers: 2, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}"


def build(text: str, *sets: str) -> Any:
    return tfkit.build(tfkit.loads(HEAD + text, sets=sets)).eval()


def tokens(rows: int = 11, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(rows, (3, length), generator=torch.Generator().manual_seed(seed))


def features(width: int, length: int = 6) -> Tensor:
    return torch.randn(3, length, width, generator=torch.Generator().manual_seed(0))


RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]).bool()
LEFT = RIGHT.flip(1)

# ---- wiring ----

TWO = "inputs: {a: tokens, b: {type: features, width: 5}}\n"
TWO += "graph:\n  one: {block: embedding, vocab_size: 11, input: a}\n  two: {block: linear, input: b}\n"


def test_add() -> None:
    model = build(TWO + f"  sum: {{block: add, inputs: [one, two]}}\n  encoder: {{block: encoder, {STACK}}}\n")
    a, b = tokens(), features(5)
    assert torch.equal(model(a, b), model.encoder(model.one(a) + model.two(b)))
    assert torch.equal(model(a, b, a_mask=RIGHT), model.encoder(model.one(a) + model.two(b), mask=RIGHT))


VECTORS = """\
inputs: {a: {type: vector, width: 3}, b: {type: vector, width: 5}}
graph:
  one: {block: linear, input: a}
  two: {block: linear, input: b}
"""


def test_vectors_are_added() -> None:
    model = build(VECTORS + "  sum: {block: add, inputs: [one, two]}\n")
    a, b = features(3)[:, 0], features(5)[:, 0]
    assert torch.equal(model(a, b), model.one(a) + model.two(b))
    with pytest.raises(tfkit.SpecError, match="`a` is a vector, and cannot be read step by step"):
        tfkit.CachedModel(model, length=4)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("add, inputs: [one, two, three]", "must be a vector, as the first; got a sequence of width 16"),
        ("add, inputs: [c, three]", "must be a sequence or a vector; got tokens"),
        ("concat, inputs: [three, two]", "must be a sequence; got a vector of width 16"),
    ],
)
def test_only_signals_of_one_type_are_joined(block: str, message: str) -> None:
    text = VECTORS.replace("inputs: {", "inputs: {c: tokens, ")
    with pytest.raises(tfkit.SpecError, match=message):
        build(f"{text}  three: {{block: embedding, vocab_size: 11, input: c}}\n  sum: {{block: {block}}}\n")


@pytest.mark.parametrize("width", [15, 17])
def test_only_sequences_of_one_width_are_added(width: int) -> None:
    text = f"{TWO}  wide: {{block: linear, input: two, d_model: {width}}}\n  sum: {{block: add, inputs: [one, wide]}}\n"
    with pytest.raises(tfkit.SpecError, match=f"a sequence of width 16; got a sequence of width {width}"):
        build(text)


@pytest.mark.parametrize("a_mask", [None, RIGHT, LEFT])
@pytest.mark.parametrize("b_mask", [None, RIGHT[:, :4], LEFT[:, 2:]])
def test_concat_along_the_length_joins_the_masks(a_mask: Tensor | None, b_mask: Tensor | None) -> None:
    model = build(TWO + f"  joined: {{block: concat, inputs: [one, two]}}\n  encoder: {{block: encoder, {STACK}}}\n")
    a, b = tokens(), features(5, 4)
    actual = model(a, b, a_mask=a_mask, b_mask=b_mask)
    joined = torch.cat((model.one(a, mask=a_mask), model.two(b)), dim=1)
    masks = [torch.ones(3, n).bool() if m is None else m for n, m in ((6, a_mask), (4, b_mask))]
    assert actual.shape == (3, 10, 16)
    torch.testing.assert_close(actual, model.encoder(joined, mask=torch.cat(masks, dim=1)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "null"])
@pytest.mark.parametrize("stack", ["encoder", "decoder", "prefixed"])
def test_padding_between_joined_sequences_takes_no_place(position: str, stack: str) -> None:
    """Each row has what it has by itself, where one that is padded stands before another."""
    prefixed = stack == "prefixed"
    mask = f"{{left: 3, right: {int(stack == 'encoder')}}}"
    text = (
        TWO.replace("{a:", "{n: lengths, a:") if prefixed else TWO
    ) + "  joined: {block: concat, inputs: [one, two]}\n"
    text += f"  stack: {{block: {'decoder' if prefixed else stack}, {STACK}{', prefix: n' if prefixed else ''}}}\n"
    model = build(text, f"stack.attention.position={position}", f"stack.attention.mask={mask}")
    a, b, lengths = tokens(), features(5), {"n": torch.tensor([3, 5, 4])} if prefixed else {}
    actual = model(a=a, b=b, a_mask=RIGHT, b_mask=LEFT, **lengths)
    for row in range(3):
        real = torch.cat((RIGHT[row], LEFT[row]))
        parts = {"a": a[row][RIGHT[row]][None], "b": b[row][LEFT[row]][None]}
        alone = model(**parts, **{name: n[row : row + 1] for name, n in lengths.items()})
        torch.testing.assert_close(actual[row][real], alone[0], atol=1e-5, rtol=1e-5)


def test_concat_along_the_width() -> None:
    model = build(TWO + "  joined: {block: concat, inputs: [one, two], along: width}\n")
    a, b = tokens(), features(5)
    assert torch.equal(model(a, b), torch.cat((model.one(a), model.two(b)), dim=-1))


def test_linear_and_norm_nodes() -> None:
    model = build(
        "inputs: {x: {type: features, width: 5}}\ngraph: {wide: {block: linear}, norm_: {block: norm, norm: rmsnorm}}\n"
    )
    x = features(5)
    wide = x @ model.wide.weight.T + model.wide.bias
    torch.testing.assert_close(model(x), wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_several_outputs_come_in_the_order_of_the_spec() -> None:
    text = "vocab_size: 11\noutputs: [logits, encoder, embedding]\ngraph: {embedding: {block: embedding}, "
    model = build(text + f"encoder: {{block: encoder, {STACK}}}, logits: {{block: lm_head}}}}\n")
    logits, states, vectors = model(tokens())
    assert [logits.shape[-1], states.shape[-1], vectors.shape[-1]] == [11, 16, 16]
    assert torch.equal(vectors, model.embedding(tokens()))
    assert torch.equal(states, model.encoder(vectors))
    assert torch.equal(logits, model.logits(states))
    check_script(model, {"tokens": tokens()})


def test_token_types_may_be_left_out_and_are_then_the_first() -> None:
    text = "inputs: {tokens: tokens, types: {type: tokens, optional: true}}\n"
    model = build(text + "graph: {embedding: {block: embedding, vocab_size: 11, input: tokens, tables: {types: 3}}}\n")
    types = tokens(3, seed=1)
    rows = model.embedding.tables.types.weight
    assert torch.equal(model(tokens(), types), model.embedding.tokens.weight[tokens()] + rows[types])
    assert torch.equal(model(tokens()), model(tokens(), torch.zeros_like(types)))
    check_script(model, {"tokens": tokens()}, {"tokens": tokens(), "types": types})


MEMORY = f"""
inputs: {{x: {{type: features, width: 5}}, tokens: tokens}}
graph:
  embedding: {{block: embedding, vocab_size: 11, input: tokens}}
  decoder: {{block: decoder, memory: x, {STACK}}}
"""


def test_a_memory_of_another_width() -> None:
    model = build(MEMORY)
    attention = model.decoder.layers[0].cross_attention
    assert attention.project.k.weight.shape == (16, 5)
    assert model(features(5, 4), tokens()).shape == (3, 6, 16)
    inputs = {"x": features(5, 4), "tokens": tokens()}
    check_causal(model, inputs, along="tokens")
    check_padding(model, inputs)
    check_gradients(model, inputs)


@pytest.mark.slow
def test_one_capture_serves_all_lengths_of_both_sequences() -> None:
    lengths = ((5, 5), (8, 4), (3, 9))
    check_capture(build(MEMORY), *({"x": features(5, n), "tokens": tokens(length=t)} for n, t in lengths))


def test_the_memory_mask_hides_memory_and_nothing_else() -> None:
    model, x = build(MEMORY), features(5)
    actual = model(x, tokens(), x_mask=RIGHT)
    for row, mask in enumerate(RIGHT):
        alone = model(x[row : row + 1, mask], tokens()[row : row + 1])
        torch.testing.assert_close(actual[row : row + 1], alone)


PREFIX = f"""
inputs: {{tokens: tokens, n: lengths}}
graph:
  embedding: {{block: embedding, vocab_size: 11, input: tokens}}
  decoder: {{block: decoder, prefix: n, {STACK}}}
"""


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT])
def test_a_prefix_is_read_by_all_and_the_rest_is_causal(mask: Tensor | None) -> None:
    model = build(PREFIX)
    lengths = torch.tensor([0, 3, 1])
    before = model(tokens(), lengths, tokens_mask=mask)
    for row in range(3):
        real = torch.ones(6).bool() if mask is None else mask[row]
        positions = real.nonzero().flatten().tolist()
        for index, position in enumerate(positions):
            changed = tokens()
            changed[row, position] = (changed[row, position] + 1) % 11
            moved = (model(changed, lengths, tokens_mask=mask) - before)[row].abs().amax(dim=-1) > 1e-6
            first = 0 if index < lengths[row] else index
            assert [bool(moved[p]) for p in positions] == [i >= first for i in range(len(positions))]


def test_a_prefix_model_keeps_the_promises() -> None:
    graph = tfkit.loads(HEAD + PREFIX)
    check_padding(tfkit.build(graph), example_inputs(graph))
    check_gradients(tfkit.build(graph), example_inputs(graph, padding="rows"))


# ---- layers that differ or share ----


def test_groups_share_their_weights() -> None:
    encoder = f"encoder: {{block: encoder, {STACK}, layers: {{groups: 2}}}}"
    model = build(f"graph: {{embedding: {{block: embedding, vocab_size: 11}}, {encoder}}}", "graph.encoder.n_layers=6")
    assert len(model.encoder.layers) == 2
    x, context = model.embedding(tokens()), Context(None, None, None)
    for layer in model.encoder.layers:
        for _ in range(3):
            x = layer(x, context)
    torch.testing.assert_close(model(tokens()), model.encoder.final_norm(x))
    check_gradients(model, {"tokens": tokens()})


VARIANTS = """
graph:
  embedding: {block: embedding, vocab_size: 11}
  decoder:
    block: decoder
    n_layers: 7
    attention: {kind: mha, n_heads: 2}
    ffn: {kind: relu, d_ff: 24}
    layers:
      variants:
        local: {attention: {mask: {left: 1, right: 0}, position: rope}}
        wide: {ffn: {kind: swiglu, d_ff: 40}, norm: rmsnorm}
      pattern: %s
"""
ARRANGED = {
    "[local*2, wide]": "local local wide local local wide local",
    "[wide, base, local]": "wide base local wide base local wide",
    '{0-1: wide, "4": local, rest: base}': "wide wide base base local base base",
    '{"0": local, 1-6: wide}': "local wide wide wide wide wide wide",
}


@pytest.mark.parametrize("pattern", ARRANGED)
def test_variants_stand_where_the_pattern_says(pattern: str) -> None:
    model = tfkit.build(tfkit.loads(HEAD + VARIANTS % pattern), device="meta")

    def variant(layer: Any) -> str:
        if hasattr(layer.ffn, "gate_up"):
            assert layer.ffn.gate_up.out_features == 80
            assert not hasattr(layer.attention_norm_in, "bias")
            return "wide"
        return "base" if layer.attention.rotate is None else "local"

    assert " ".join(map(variant, model.decoder.layers)) == ARRANGED[pattern]


@pytest.mark.parametrize("pattern", some(ARRANGED, 1))
def test_variants_read_no_later_token_and_are_scripted(pattern: str) -> None:
    model = build(VARIANTS % pattern)
    check_causal(model, {"tokens": tokens()}, along="tokens")
    check_script(model, {"tokens": tokens()})


@pytest.mark.slow
def test_scripted_models_do_not_mix_up_variants_or_tables_of_the_same_names() -> None:
    """TorchScript takes two ModuleDicts of equal keys for one type, and their order from the one that came first."""
    sets = ["graph.decoder.layers.variants={local: {attention: {mask: {left: 1, right: 0}}}}"]
    for pattern in ("[base, local]", "[local, base]"):
        check_script(build(VARIANTS % pattern, *sets), {"tokens": tokens()})
    for tables in ("{types: 2, places: 3}", "{places: 3, types: 2}"):
        inputs = "inputs: {tokens: tokens, types: tokens, places: tokens}\n"
        embedding = f"embedding: {{block: embedding, vocab_size: 11, input: tokens, tables: {tables}}}"
        model = build(f"{inputs}graph: {{{embedding}}}\n")
        check_script(model, {"tokens": tokens(), "types": tokens(2), "places": tokens(3)})


def test_a_local_layer_reads_its_window_alone() -> None:
    """Two layers that each read one token back: the third last token is the first that the last one knows of."""
    model = build(
        VARIANTS % "[local]",
        "graph.decoder.n_layers=2",
        "graph.decoder.layers.variants={local: {attention: {mask: {left: 1, right: 0}}}}",
    )
    x = model.embedding(tokens()).detach().requires_grad_()
    (grad,) = torch.autograd.grad(model.decoder(x)[:, -1, 0].sum(), x)
    assert grad.abs().amax(dim=(0, 2)).ne(0).tolist() == [False, False, False, True, True, True]


def test_variants_that_differ_elsewhere_share_their_positions():
    spec = """
    tfkit: 1
    name: t
    inputs: {x: {type: features, width: 16}}
    d_model: 16
    graph:
      encoder:
        block: encoder
        n_layers: 2
        attention: {kind: mha, n_heads: 2, position: t5}
        layers: {variants: {calm: {attention: {dropout: 0.1, qk_norm: rmsnorm}}}, pattern: [base, calm]}
    """
    names = [name for name, _ in tfkit.build(tfkit.loads(spec)).named_parameters() if "buckets" in name]
    assert names == ["encoder.shared.base.position.buckets.weight"]


DECODER = f"graph:\n  embedding: {{block: embedding, vocab_size: 11}}\n  decoder: {{block: decoder, {STACK}}}\n"


@pytest.mark.parametrize(("end", "nodes"), [("", []), ("  logits: {block: lm_head, vocab_size: 11}\n", ["logits"])])
def test_the_head_is_the_only_output(end: str, nodes: list[str]) -> None:
    text = HEAD + DECODER + end
    assert [node.name for node in head_of(tfkit.loads(text))] == nodes
    if nodes:
        assert head_of(tfkit.loads(text + "outputs: [decoder, logits]\n")) == ()


def test_a_graph_describes_its_layers_and_its_head() -> None:
    graph = tfkit.loads(HEAD + "vocab_size: 11\n" + DECODER + "  logits: lm_head\n")
    decoder, head = (cast(Any, graph.node(name).config) for name in ("decoder", "logits"))
    assert decoder.stack().layers[0].placement == "pre"
    assert list(decoder.attention.inner_values) == ["q", "k", "v", "scores", "weights", "heads"]
    assert head.in_words() == "Vectors to logits over the vocabulary: multiply by the output matrix."
