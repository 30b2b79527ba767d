"""Stacks that run all layers several times: the formula, the caches, and the reports of tools."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import tfkit
from tfkit.graph.semantics import semantics_of, value_changes
from tfkit.testing import check_model
from tfkit.tools.show.layer_programs import programs_of

TEXT = """
tfkit: 1
name: looped
d_model: 32
vocab_size: 40
norm: rmsnorm
graph:
  embedding: embedding
  decoder:
    block: decoder
    n_layers: 6
    attention: {kind: mha, n_heads: 4, position: rope}
    ffn: {kind: swiglu, d_ff: 48}
    layers: {groups: 2, order: looped, variants: {wide: {ffn: {d_ff: 64}}}, pattern: [base, wide]}
  logits: lm_head
"""


def test_all_layers_run_and_then_all_run_again() -> None:
    model = tfkit.build(tfkit.loads(TEXT)).eval()
    tokens = torch.arange(14).view(2, 7)
    x, stack = model.embedding(tokens), model.decoder
    context = stack.contexts(x, None, None, None, None)[0]
    for number in (0, 1, 0, 1, 0, 1):
        x = stack.layers[number](x, context)
    torch.testing.assert_close(model(tokens), model.logits(stack.final_norm(x)), rtol=0, atol=0)
    in_a_row = tfkit.build(tfkit.loads(TEXT, sets=["decoder.layers.order=in_a_row"])).eval()
    in_a_row.load_state_dict(model.state_dict())
    assert not torch.allclose(model(tokens), in_a_row(tokens))


def test_each_repetition_has_a_cache() -> None:
    model = tfkit.CachedModel(tfkit.build(tfkit.loads(TEXT)).eval(), length=8)
    model(torch.arange(5)[None])
    tensors = [(path, tensor.data_ptr()) for path, _, tensor in model.tensors()]
    assert Counter(path for path, _ in tensors) == {"decoder.layers.0": 6, "decoder.layers.1": 6}
    assert len({pointer for _, pointer in tensors}) == len(tensors)


def test_recomputation_has_the_same_gradients() -> None:
    gradients = []
    for recompute in (False, True):
        model = tfkit.build(tfkit.loads(TEXT), recompute=recompute, seed=1)
        tfkit.loss(model, torch.arange(14).view(2, 7)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_the_order_decides_the_values_and_nothing_else_does() -> None:
    looped, in_a_row = (tfkit.loads(TEXT, sets=[f"decoder.layers.order={order}"]) for order in ("looped", "in_a_row"))
    assert "decoder.order" not in semantics_of(in_a_row).flat  # files of earlier versions have no such value
    for there, here in ((looped, in_a_row), (in_a_row, looped)):
        assert [change.path for change in value_changes(semantics_of(there), semantics_of(here))] == ["decoder.order"]


def test_an_order_of_layers_that_run_once_is_refused() -> None:
    with pytest.raises(tfkit.SpecError, match="`order` has no effect: no layer runs several times"):
        tfkit.loads(TEXT, sets=["decoder.layers.groups=null"])


def test_tools_name_the_loop() -> None:
    graph = tfkit.loads(TEXT)
    assert graph.node("decoder").stack.runs == [0, 1, 0, 1, 0, 1]
    assert "layer 1, wide, each 3 times, in a loop over all layers" in [program.title for program in programs_of(graph)]
    assert "2 sets of weights, each 3 times, in a loop over all layers" in str(tfkit.draw(graph)._repr_svg_())


@pytest.mark.slow
def test_a_looped_stack_keeps_all_guarantees() -> None:
    check_model(tfkit.loads(TEXT))
