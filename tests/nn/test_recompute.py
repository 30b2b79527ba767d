"""Recomputed layers: they save memory, and change no number."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import tfkit
from tfkit.testing import check_capture, check_script, example_inputs

SETS = ["d_model=32", "vocab_size=50", "decoder.n_layers=3", "decoder.attention.n_heads=4", "decoder.ffn.d_ff=64"]
SPECS = {"gpt2": SETS, "vaswani_base": [*SETS, "encoder.n_layers=3", "encoder.attention.n_heads=4"]}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], int]:
    """Output, gradients, and bytes kept for the backward of one training step with dropout."""
    bytes_of: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        bytes_of[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(0)
    with saved_tensors_hooks(keep, lambda x: x):
        output = model.train()(**inputs)
    weights = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    output.square().mean().backward()
    return (
        output.detach(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        sum(bytes_of.values()) - weights,
    )


@pytest.mark.parametrize("spec", SPECS)
def test_no_number_changes_and_less_is_kept(spec: str) -> None:
    graph = tfkit.load(spec, sets=SPECS[spec])
    inputs = example_inputs(graph, padding="left")
    want, expected, bytes_of = step(tfkit.build(graph), inputs)
    actual, grads, less = step(tfkit.build(graph, recompute=True), inputs)
    assert torch.equal(actual, want)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-6)
    assert less < bytes_of / 3


@pytest.mark.slow
def test_it_scripts_compiles_and_copies() -> None:
    graph = tfkit.load("gpt2", sets=[*SETS, "decoder.n_layers=1"])
    model = tfkit.build(graph, recompute=True)
    calls = [example_inputs(graph, length=n, padding="left") for n in (5, 8)]
    check_script(model, *calls)
    check_capture(model, *calls)
    assert copy.deepcopy(model).decoder.recompute
    assert model.state_dict().keys() == tfkit.build(graph, device="meta").state_dict().keys()
