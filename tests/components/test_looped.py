"""Stacks that run layers several times: the formula, the caches, and the reports of tools."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor, fx

import tfkit
from tfkit.graph.semantics import semantics_of, value_changes
from tfkit.run.training.layers import layers_of
from tfkit.testing import check_model
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.eject.proof import check
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


def test_each_repetition_reads_its_cache_of_the_memory() -> None:
    text = TEXT.replace("embedding: embedding", "embedding: {block: embedding, input: target}")
    text = text.replace("graph:\n", "inputs: [source, target]\ngraph:\n  memory: {block: embedding, input: source}\n")
    model = tfkit.build(tfkit.loads(text, sets=["decoder.memory=memory"]), seed=1).eval()
    source, target = torch.arange(10).view(2, 5), torch.arange(14).view(2, 7)
    cached = tfkit.CachedModel(model, length=7)
    with torch.no_grad():
        cached.start(2, source=source)
        outputs = [cached(target[:, start:end]) for start, end in ((0, 4), (4, 5), (5, 7))]
        torch.testing.assert_close(torch.cat(outputs, dim=1), model(source, target), atol=1e-5, rtol=0)


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


ORDER = [0, 1, 0, 0, 2, 1, 3, 1]
ORDERED = TEXT.replace("n_layers: 6", f"n_layers: {len(ORDER)}").replace(
    "{groups: 2, order: looped, ", f"{{order: {ORDER}, "
)
"""Layers 1 and 3 are wide, and layers 0 and 2 are not."""


def ordered_outputs(model: fx.GraphModule, tokens: Tensor) -> Tensor:
    x, stack = model.embedding(tokens), model.decoder
    context = stack.contexts(x, None, None, None, None)[0]
    for number in ORDER:
        x = stack.layers[number](x, context)
    return model.logits(stack.final_norm(x))


def test_layers_run_in_a_listed_order_and_have_one_entry_each() -> None:
    model = tfkit.build(tfkit.loads(ORDERED), seed=2).eval()
    tokens = torch.arange(14).view(2, 7)
    expected = ordered_outputs(model, tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=0)
    assert [len(module.ffn.down.weight[0]) for module in model.decoder.layers] == [48, 64, 48, 64]
    names = {name.split(".")[2] for name in model.state_dict() if name.startswith("decoder.layers.")}
    assert names == {"0", "1", "2", "3"}
    model(tokens).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    ordered_outputs(model, tokens).square().sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()], rtol=0, atol=0)


def test_an_order_is_scripted_and_decoded() -> None:
    model = tfkit.build(tfkit.loads(ORDERED), seed=2).eval()
    tokens = torch.arange(14).view(2, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(tokens), model(tokens), rtol=0, atol=0)
    cached = tfkit.CachedModel(model, length=8)
    steps = torch.cat([cached(tokens[:, :4]), cached(tokens[:, 4:5]), cached(tokens[:, 5:])], dim=1)
    torch.testing.assert_close(steps, model(tokens), rtol=1e-5, atol=1e-5)
    tensors = [(path, tensor.data_ptr()) for path, _, tensor in cached.tensors()]
    assert Counter(path for path, _ in tensors) == {f"decoder.layers.{i}": 2 * ORDER.count(i) for i in range(4)}
    assert len({pointer for _, pointer in tensors}) == len(tensors)


def test_a_ring_has_the_slots_of_the_first_run_of_its_layer() -> None:
    """The last layer alone has a window, so its cache is shorter than the caches of the other layers."""
    local = "{order: [1, 0, 1], variants: {wide: {attention: {mask: {left: 2, right: 0}}}}, pattern: [wide, base]}"
    text = TEXT.replace("n_layers: 6", "n_layers: 3")
    text = text.replace(text[text.index("{groups") : text.index("\n  logits")], local)
    model = tfkit.build(tfkit.loads(text), seed=3).eval()
    tokens = torch.arange(20).view(2, 10)
    cached = tfkit.CachedModel(model, length=12)
    steps = torch.cat([cached(tokens[:, i : i + 1]) for i in range(10)], dim=1)
    torch.testing.assert_close(steps, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("decoder.layers.order=[0, 1, 0, 3, 1, 3, 1, 1]", "from 0 to 3; layer 2 is missing"),
        ("decoder.layers.order=[0, 1, 0, 2, 3]", "`order` must list n_layers .8. layers; got 5"),
        ("decoder.layers.order=[0, 1, 2, 3, 4, 5, 6, 7]", "`order` has no effect: no layer runs several times"),
        ("decoder.layers.groups=4", "`groups` has no effect: `order` lists the layers"),
    ],
)
def test_orders_that_do_not_fit(change: str, message: str) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.loads(ORDERED, sets=[change])


def test_tools_name_the_order() -> None:
    graph = tfkit.loads(ORDERED)
    assert graph.node("decoder").stack.depth == 8
    assert "layers 1, 3, wide, in the order 0 1 0 0 2 1 3 1" in [program.title for program in programs_of(graph)]
    assert "4 sets of weights, in the order 0 1 0 0 2 1 3 1" in str(tfkit.draw(graph)._repr_svg_())
    assert [layer.times for layer in scene_of(graph).nodes["decoder"].layers] == [4, 4]
    assert "shared: decoder runs 8 layers with the weights of 4, counted once" in tfkit.count_params(graph).notes


def test_no_layer_is_added_to_an_order() -> None:
    model = tfkit.build(tfkit.loads(ORDERED.replace("variants: {wide: {ffn: {d_ff: 64}}}, pattern: [base, wide]", "")))
    model.decoder.layers.append(model.decoder.layers[0])
    with pytest.raises(TypeError, match="the layers of this stack have an order"):
        model(torch.arange(14).view(2, 7))


def test_a_run_prepares_each_layer_once() -> None:
    model = tfkit.build(tfkit.loads(ORDERED))
    assert [number for number, _ in layers_of(model)] == [0, 1, 2, 3]
    assert not [*layers_of(model, once=True)]


@pytest.mark.slow
def test_an_ordered_stack_keeps_all_guarantees() -> None:
    check_model(tfkit.loads(ORDERED))


@pytest.mark.slow
def test_an_ordered_stack_is_ejected() -> None:
    graph = tfkit.loads(ORDERED)
    assert check(graph, tfkit.eject(graph)).ran


@pytest.mark.slow
def test_a_looped_stack_keeps_all_guarantees() -> None:
    check_model(tfkit.loads(TEXT))
