"""A table of relative positions for each layer, as UMT5 has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.testing import check_cached, check_capture, check_gradients, check_script, check_state_dict, example_inputs

from ..parity.encoders import T5_CONFIG, T5_SETS, T5_V1_1, T5_WEIGHTS
from ..parity.family import both
from ..parity.mapping import renamed
from ..parity.test_huggingface import parameters, port, reference, run

BIAS = "block.{i}.layer.0.SelfAttention.relative_attention_bias"
UMT5 = replace(
    T5_V1_1,
    model="UMT5ForConditionalGeneration",
    config={**T5_CONFIG, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    weights={
        **T5_WEIGHTS,
        "encoder.shared.{i}.position.buckets": f"encoder.{BIAS}",
        "decoder.shared.{i}.position.buckets": f"decoder.{BIAS}",
    },
    sets={
        **T5_SETS,
        **both("ffn", "{kind: geglu, approximate: tanh, d_ff: 48}"),
        **both("attention.position", "{kind: t5, n_buckets: 8, max_distance: 10, shared: false}"),
        "logits": "{block: lm_head, scale: d_model ** -0.5}",
    },
)


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_logits_are_those_of_umt5(side: str) -> None:
    theirs = reference(UMT5)
    real, expected, found = run(UMT5, theirs, port(theirs, UMT5), side)
    assert expected[real].std() > 0.02
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)


def test_gradients_of_the_tables_are_those_of_umt5() -> None:
    theirs = reference(UMT5)
    ours = port(theirs, UMT5)
    source, target = torch.randint(2, 61, (3, 19)), torch.randint(2, 61, (3, 17))
    ours(source, target).square().sum().backward()
    theirs(source, decoder_input_ids=target).logits.square().sum().backward()
    wanted = {name: p.grad for name, p in parameters(theirs, UMT5).items()}
    found = {name: p.grad for name, p in ours.named_parameters()}
    tables = [name for name in found if "buckets" in name]
    assert len(tables) == 2 + 3
    for name, grad in renamed(found, wanted, UMT5.weights).items():
        assert name not in tables or grad.abs().max() > 1e-4
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-4)


SPEC = """
    tfkit: 1
    name: test
    d_model: 16
    vocab_size: 61
    max_len: 32
    graph:
      embedding: {block: embedding}
      decoder:
        block: decoder
        n_layers: 12
        attention: {kind: mha, n_heads: 2, position: {kind: t5, n_buckets: 8, max_distance: 10, shared: false}}
        ffn: {kind: relu, d_ff: 24}
        layers: {variants: {local: {attention: {mask: {left: 3, right: 0}}}}, pattern: [base, local]}
      logits: {block: lm_head}
"""


def test_each_layer_has_the_table_of_its_number() -> None:
    """Twelve layers: in the order of the names, those of two digits stand between 1 and 2."""
    model = tfkit.build(tfkit.loads(SPEC)).eval()
    assert set(model.decoder.shared) == {str(i) for i in range(12)}
    seen: list[Tensor] = []
    for layer in model.decoder.layers:
        layer.attention.register_forward_hook(lambda module, args, output: seen.append(args[1].mask))
    with torch.no_grad():
        for i in range(12):
            model.decoder.shared[str(i)].position.buckets.weight.fill_(i)
        model(torch.randint(61, (3, 9)))
    assert [bias.max().item() for bias in seen] == list(range(12))


def test_it_keeps_the_promises_of_every_position() -> None:
    graph = tfkit.loads(SPEC, sets=["decoder.n_layers=4"])
    model, inputs = tfkit.build(graph), example_inputs(graph, length=12)
    check_state_dict(graph)
    check_gradients(model, inputs)
    check_script(model, inputs)
    check_capture(model, *(example_inputs(graph, length=n, padding="left") for n in (5, 8)))
    check_cached(model, inputs)


def test_layers_that_share_their_weights_share_their_table() -> None:
    graph = tfkit.loads(SPEC, sets=["decoder.n_layers=4", "decoder.layers={groups: 2}"])
    assert set(tfkit.build(graph).decoder.shared) == {"0", "1"}
    check_cached(tfkit.build(graph), example_inputs(graph, length=12))
