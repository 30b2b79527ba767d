"""Relative positions with a table for each layer, as in UMT5."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

import tfkit
from tfkit.components.score_bias import T5Bias, T5BiasConfig
from tfkit.testing import check_cached, check_model, example_inputs
from tfkit.tools.common.loading_weights import load_weights

from ..families.case import Trial
from ..families.seq2seq import SEQ2SEQ


@pytest.mark.slow
def test_gradients_of_the_tables_are_those_of_umt5(tmp_path: Path) -> None:
    """Their gradients under our names are what a model holds that is filled with them in the place of weights."""
    trial = Trial.of(SEQ2SEQ["umt5"], tmp_path)
    source, target = torch.randint(3, 61, (3, 19)), torch.randint(3, 61, (3, 17))
    trial.ours(source, target).square().sum().backward()
    trial.theirs(source, decoder_input_ids=target).logits.square().sum().backward()
    gradients = {name: p.grad for name, p in trial.theirs.named_parameters()}
    save_file(gradients, tmp_path / "gradients.safetensors")
    expected = deepcopy(trial.ours).requires_grad_(False)
    load_weights(expected, tmp_path / "gradients.safetensors")
    actual = {name: p.grad for name, p in trial.ours.named_parameters()}
    tables = [name for name in actual if "buckets" in name]
    assert len(tables) == 2 + 3
    for name, grad in expected.named_parameters():
        largest = float(grad.abs().max())
        assert largest > 1
        torch.testing.assert_close(actual[name], grad, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 9), (8, 36), (16, 64), (64, 256), (32, 1024)])
def test_each_distance_is_in_the_bucket_of_t5(n_buckets: int, max_distance: int, causal: bool) -> None:
    """At powers of two the last bit of a logarithm decides, and processors differ in it."""
    bias = T5Bias(T5BiasConfig(n_buckets=n_buckets, max_distance=max_distance), n_heads=1, causal=causal)
    offsets = torch.arange(-2000, 2001)[None, None]
    expected = T5Attention._relative_position_bucket(offsets, not causal, n_buckets, max_distance)
    assert torch.equal(bias.bucket(offsets), expected)


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
    calls: list[Tensor] = []
    for layer in model.decoder.layers:
        layer.attention.register_forward_hook(lambda module, args, output: calls.append(args[1].mask))
    with torch.no_grad():
        for i in range(12):
            model.decoder.shared[str(i)].position.buckets.weight.fill_(i)
        model(torch.randint(61, (3, 9)))
    assert [bias.max().item() for bias in calls] == list(range(12))


@pytest.mark.slow
def test_it_keeps_the_promises_of_every_position() -> None:
    graph = tfkit.loads(SPEC, sets=["decoder.n_layers=4"])
    check_model(graph, only=["state-dict", "gradients", "script", "cached"])


@pytest.mark.slow
def test_layers_that_share_their_weights_share_their_table() -> None:
    graph = tfkit.loads(SPEC, sets=["decoder.n_layers=4", "decoder.layers={groups: 2}"])
    assert set(tfkit.build(graph).decoder.shared) == {"0", "1"}
    check_cached(tfkit.build(graph), example_inputs(graph, length=12))
