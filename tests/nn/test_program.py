"""`nn.Program`: straight-line modules, one class for equal programs, that survive copying and travel."""

import copy
import gc
import inspect
import operator
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

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


def test_the_code_can_be_read_and_has_a_place_in_tracebacks():
    module = scaled(2.0)
    assert "linear = self.linear(x)" in module.code
    assert inspect.getsource(type(module).forward) == module.code


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


def test_a_pickle_is_read_by_another_process(tmp_path):
    model, tokens = tfkit.build(tfkit.loads(SPEC)).eval(), torch.arange(6)[None]
    torch.save({"model": model, "tokens": tokens, "logits": model(tokens)}, tmp_path / "model.pt")
    code = f"""import torch
saved = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert torch.equal(saved["model"](saved["tokens"]), saved["logits"])"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_graph_module_says_the_same():
    program = Program()
    x: Tensor | object = program.input("x")
    module = program.build_graph_module(program.call("linear", nn.Linear(3, 3), x), "Top")
    assert isinstance(module, torch.fx.GraphModule)
    assert "linear = self.linear(x)" in module.code


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
