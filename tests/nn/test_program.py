"""`nn.Program`: straight-line modules that share a class, and can be copied and pickled."""

import copy
import gc
import inspect
import io
import linecache
import operator
import pdb
import pickle
import textwrap
import traceback

import pytest
import torch
from torch import Tensor, nn
from torch.fx.graph_module import _loader

import tfkit
from tfkit.nn import Program

SPEC = """
tfkit: 1
name: tiny
d_model: 8
vocab_size: 16
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 16}}
  logits: {block: lm_head, tie: embedding}
"""


def scaled(factor: float, name: str = "Scaled") -> nn.Module:
    program = Program()
    x = program.input("x")
    y = program.call("linear", nn.Linear(3, 3), x)
    return program.build(program.apply("scaled", operator.mul, y, factor), name)


def joined() -> nn.Module:
    program = Program()
    x, other = program.input("x"), program.input("other", optional=True)
    return program.build(program.apply("joined", torch.cat, [x, x], dim=1), "Joined") if other else nn.Module()


def test_equal_programs_are_of_one_class():
    assert type(scaled(2.0)) is type(scaled(2.0))
    x = torch.randn(2, 3)
    for factor in (2.0, 3.0):
        module = scaled(factor)
        torch.testing.assert_close(module(x), module.linear(x) * factor, rtol=0, atol=0)


@pytest.mark.parametrize("other", [scaled(3.0), scaled(2), scaled(2.0, "Other"), joined()])
def test_different_programs_are_not(other):
    assert type(other) is not type(scaled(2.0))


def test_lists_and_optional_arguments():
    x = torch.randn(2, 3)
    for module in (joined(), torch.jit.script(joined())):
        assert torch.equal(module(x), torch.cat([x, x], dim=1))


def test_the_source_can_be_read():
    module = scaled(2.0)
    linecache.checkcache()
    assert module.code == "def forward(self, x: Tensor) -> Tensor:\n    return self.linear(x) * 2.0\n"
    assert textwrap.dedent(inspect.getsource(type(module).forward)) == module.code
    assert inspect.getsource(type(module)) == "class Scaled(Written):\n" + textwrap.indent(module.code, "    ")


def test_tracebacks_show_the_line():
    module = scaled(2.0)
    with pytest.raises(RuntimeError) as caught:
        module(torch.randn(2, 4))
    assert "return self.linear(x) * 2.0" in "".join(traceback.format_exception(caught.value))


def test_a_debugger_steps_through_it():
    model, tokens = tfkit.build(tfkit.loads(SPEC)).eval(), torch.arange(6)[None]
    output = io.StringIO()
    commands = [
        "b model.decoder.layers[1].forward",
        "b model.forward",
        "c",
        "c",
        "n",
        "p x.shape",
        "disable 1",
        "c",
        "",
    ]
    debugger = pdb.Pdb(stdin=io.StringIO("\n".join(commands)), stdout=output, nosigint=True, readrc=False)
    debugger.run("model(tokens)", {"model": model, "tokens": tokens})
    text = output.getvalue()
    assert "-> x = x + self.attention(self.attention_norm_in(x), context)" in text
    assert "-> return x + self.ffn(self.ffn_norm_in(x))" in text
    assert "torch.Size([1, 6, 8])" in text
    assert '-> tokens_mask = as_attention_mask(tokens_mask, "tokens_mask")' in text


def test_names_that_mean_something_else_in_the_text():
    def torch_(x: Tensor) -> Tensor:
        return x + 1

    torch_.__name__ = "torch"
    program = Program()
    x, tensor = program.input("x"), program.input("Tensor", optional=True)
    y = program.apply("F", torch_, program.apply("Written", torch.abs, x))
    y = program.apply("torch", torch.add, program.call("linear", nn.Linear(3, 3), y), y)
    module = program.build((y, tensor), "Tensor", returns=(Tensor, Tensor | None))
    x = torch.randn(2, 3)
    y, (sum, none) = x.abs() + 1, module(x)
    assert torch.equal(sum, module.linear(y) + y)
    assert none is None
    assert torch.equal(torch.jit.script(module)(x, None)[0], sum)


def test_names_that_python_does_not_take():
    program = Program()
    with pytest.raises(ValueError, match="`a b` cannot be the name of an argument"):
        program.input("a b")
    with pytest.raises(ValueError, match="`class` cannot be the name of a class"):
        program.build(program.input("x"), "class")


def test_what_is_returned_has_its_type():
    program = Program()
    x, mask = program.input("x"), program.input("mask", optional=True)
    module = program.build((x, mask), "Pair", returns=(Tensor, Tensor | None))
    assert module.code.startswith("def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor |")
    assert torch.jit.script(module)(torch.ones(2))[1] is None


def test_layers_of_a_model_share_their_class():
    first, second = tfkit.build(tfkit.loads(SPEC)).decoder.layers
    assert type(first) is type(second)
    assert type(torch.jit.script(first)) is type(torch.jit.script(second))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_weights_of_its_own(copied):
    module, x = scaled(2.0), torch.randn(2, 3)
    twin, before = copied(module), module(x)
    assert type(twin) is type(module)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.linear.weight.zero_()
    assert torch.equal(module(x), before)


def top() -> torch.fx.GraphModule:
    program = Program()
    x = program.input("x")
    program.input("mask", optional=True)
    y = program.call("linear", nn.Linear(3, 3), program.apply("mask", torch.add, x, 1))
    return program.build_graph_module(program.apply("joined", torch.cat, [y, program.weight("linear.weight")]), "Top")


def test_a_graph_module_is_written_too():
    module = top()
    assert isinstance(module, torch.fx.GraphModule)
    assert module.code == (
        "def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:\n"
        "    linear = self.linear(torch.add(x, 1))\n"
        "    return torch.cat([linear, self.linear.weight])\n"
    )
    assert inspect.getsource(type(module).forward) == module.code


def test_a_graph_module_is_written_again_once_it_was_edited():
    module, x = top(), torch.randn(2, 3)
    before = module(x)
    (node,) = module.graph.find_nodes(op="call_module", target="linear")
    with module.graph.inserting_after(node):
        built = module.graph.call_method("relu", (node,))
    node.replace_all_uses_with(built, delete_user_cb=lambda user: user is not built)
    module.graph.lint()
    module.recompile()
    assert "return torch.cat([linear.relu(), self.linear.weight])" in module.code
    assert torch.equal(module(x)[:2], before[:2].relu())
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.code == module.code
        assert torch.equal(copied(x), module(x))
        assert copied.linear.weight is not module.linear.weight
        copied.linear.weight.data.zero_()
        assert not copied(x)[2:].any()


def test_a_pickled_model_is_one_that_can_be_edited():
    model, tokens = tfkit.build(tfkit.loads(SPEC)).eval(), torch.arange(6)[None]
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin).__name__ == "Tiny"
    assert isinstance(twin, type(model).__mro__[1])
    assert twin.code == model.code
    assert [node.name for node in twin.graph.nodes] == [node.name for node in model.graph.nodes]
    (head,) = twin.graph.find_nodes(op="call_module", target="logits")
    head.replace_all_uses_with(head.args[0])
    twin.graph.eliminate_dead_code()
    twin.recompile()
    assert torch.equal(twin(tokens), model.decoder(model.embedding(tokens)))


def test_garbage_is_collected_again_after_a_build():
    assert gc.isenabled()
    tfkit.build(tfkit.loads(SPEC), device="meta")
    assert gc.isenabled()
    gc.disable()
    try:
        tfkit.build(tfkit.loads(SPEC), device="meta")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_sources_of_models_do_not_accumulate():
    def sources() -> set[str]:
        gc.collect()
        return {*linecache.cache, *_loader.eval_cache}

    gc.collect()
    gc.freeze()  # the collections below pass over what other tests have left
    first = tfkit.build(tfkit.loads(SPEC))
    before = sources()
    for _ in range(3):
        tfkit.build(tfkit.loads(SPEC))
    assert sources() <= before
    tfkit.build(tfkit.loads(SPEC.replace("name: tiny", "name: other")))
    assert sources() <= before
    assert inspect.getsource(type(first).forward) == first.code
    del first
    assert [file for file in before - sources() if "Tiny" in file]
