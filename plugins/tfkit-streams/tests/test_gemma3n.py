"""The layer of Gemma 3n: AltUp around it, LAuReL around its attention, and gates that are mostly 0."""

from __future__ import annotations

import pytest
import torch

import tfkit
from tfkit.testing import check_model

SPEC = """
tfkit: 1
name: altup
d_model: 16
vocab_size: 31
max_len: 16
d_features: 4
norm: rmsnorm
graph:
  embedding: {block: embedding, input: tokens}
  features: {block: embedding, input: tokens, d_model: 8}
  decoder:
    block: decoder
    input: embedding
    layer_features: features
    n_layers: 2
    around: altup
    residual: {kind: laurel, rank: 3}
    sublayers: [{sublayer: attention, norm_in: false}, {sublayer: ffn, residual: add}]
    attention: {kind: mha, n_heads: 2}
    ffn: {kind: sparse_glu, d_ff: 24, sparsity: [0.8]}
  logits: lm_head
"""


def test_the_layers_are_their_formulas() -> None:
    check_model(tfkit.loads(SPEC), only=["meaning"])


def test_the_residual_is_around_the_sublayers() -> None:
    graph = tfkit.loads(SPEC)
    code = tfkit.build(graph).decoder.layers[0].code
    assert "inner, kept = self.residual_read(x, context)" in code
    assert "return self.residual_write(x, " in code
    with pytest.raises(
        ValueError, match=r"`decoder\.layers\.0` must add to the residual stream; got the residual `altup`"
    ):
        tfkit.contributions(tfkit.build(graph), torch.zeros(1, 3, dtype=torch.long))


@torch.no_grad()
def test_weights_are_bounded_in_training() -> None:
    """Weights beyond the bound compute what weights at the bound compute."""
    model = tfkit.build(tfkit.loads(SPEC.replace("around: altup", "around: {kind: altup, clip: 0.25}")))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    layers = model.decoder.layers
    weights = [weight for i in (0, 1) for weight in (layers[i].residual_read.predict, layers[i].residual_write.correct)]
    ids = torch.arange(6)[None]
    trained, evaluated = model.train()(ids), model.eval()(ids)
    for linear in weights:
        linear.weight.clamp_(-0.25, 0.25)
    assert not torch.equal(trained, evaluated)
    torch.testing.assert_close(model.eval()(ids), trained)


def test_without_the_bound_training_computes_what_evaluation_does() -> None:
    bounded = tfkit.loads(SPEC.replace("around: altup", "around: {kind: altup, clip: 0.25}"))
    check_model(bounded, only=["train-mode"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "    layer_features: features\n    n_layers: 2\n    around: altup",
            "    n_layers: 2\n    around: add",
            "`around` must be a residual that reads and writes a stream; got `add`",
        ),
        ("around: altup", "around: {kind: altup, streams: 1}", "`streams` must be at least 2; got 1"),
        (
            "kind: laurel, rank: 3",
            "kind: manifold",
            "residual `manifold` of a sublayer cannot have streams inside of `around`",
        ),
        (
            "around: altup",
            "around: altup\n    layers: {variants: {bare: {around: null}}, pattern: [base, bare]}",
            "must share its residual `altup`",
        ),
        ("    layer_features: features\n", "", "residual `altup` needs layer features, but `decoder` has none"),
    ],
)
def test_a_residual_around_a_layer_that_does_not_fit(old: str, new: str, message: str) -> None:
    assert SPEC.count(old) == 1
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.build(tfkit.loads(SPEC.replace(old, new)), device="meta")
