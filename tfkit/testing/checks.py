"""The promises of a built model, one function each; a broken one raises AssertionError."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.builder import assemble, build, evaluating, inputs_of
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.initialize import initialize
from tfkit.testing.inputs import TOLERANCE, Inputs, call, distance, example_inputs
from tfkit.tools.build.first_run import run_watched
from tfkit.tools.export.torchscript import refusal, script
from tfkit.torch_private import compiler
from tfkit.torch_private.torchscript import quiet


def check_filled(graph: Graph) -> None:
    """Check that every parameter and buffer is filled from the seed: none is uninitialized, one seed gives one model.

    Buffers outside the state dict are included, and tensors that are neither are refused.
    """
    models = []
    for rubbish in (float("nan"), 0.0):
        with torch.device("meta"):
            model = assemble(graph)
        plain = [f"`{path}.{name}`" for path, module in model.named_modules() for name in _plain_tensors(module)]
        assert not plain, f"{_all(plain)} is neither parameter nor buffer: it has no values once the model has memory"
        model.to_empty(device="cpu")
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(rubbish if tensor.is_floating_point() else rubbish == 0)
        initialize(model, graph, seed=1)
        models.append(tensors)
    first, second = models
    empty = [f"`{name}`" for name, tensor in first.items() if not tensor.isfinite().all()]
    assert not empty, f"{_all(empty)} is not filled when the model is built"
    other = [f"`{name}`" for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert not other, f"{_all(other)} differs when a model is built again"


def _plain_tensors(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Tensor)]


def _all(names: Sequence[str]) -> str:
    """Names as the subject of a sentence about one of them."""
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"


def check_state_dict(graph: Graph) -> None:
    """Check that a state dict carries the model over, bit by bit, into one that was built from another seed."""
    first, second = build(graph, seed=0).eval(), build(graph, seed=1).eval()
    second.load_state_dict(first.state_dict(), strict=True)
    inputs = example_inputs(graph)
    with torch.no_grad():
        for mine, other in zip(call(first, inputs), call(second, inputs), strict=True):
            assert torch.equal(mine, other), "the state dict is incomplete: the model that loads it differs"


def check_dtype(graph: Graph, dtype: torch.dtype) -> None:
    """Check that a model of another type computes in that type, and stays finite."""
    inputs = {n: x.to(dtype) if x.is_floating_point() else x for n, x in example_inputs(graph).items()}
    try:
        model = build(graph, dtype=dtype).eval()
        run_watched(model, {name: x for name, x in inputs.items() if name in inputs_of(model)})
    except SpecError as wrong:
        raise AssertionError(f"a model of {dtype} fails: {in_words(wrong)}") from wrong
    with torch.no_grad():
        for output in call(model, inputs):
            assert output.dtype == dtype, f"a model of {dtype} returns {output.dtype}"
            assert output.isfinite().all(), f"a model of {dtype} returns values that are not finite"


def check_causal(model: nn.Module, inputs: Inputs, *, along: str) -> None:
    """Check that no value and no gradient of a later token of `along` reaches an earlier output [b, t, ...]."""
    x = inputs[along]
    with evaluating(model), torch.no_grad():
        outputs = call(model, inputs)
        for t in range(1, x.size(1)):
            changed = torch.cat((x[:, :t], x[:, t:].roll(1, dims=0)), dim=1)
            for before, after in zip(outputs, call(model, {**inputs, along: changed}), strict=True):
                error = distance(after[:, :t], before[:, :t])
                why = f"outputs before position {t} change by {error:.1e} with `{along}` from {t} on"
                assert error <= TOLERANCE, f"the model looks ahead: {why}"
    with evaluating(model), _leaves(model, along) as leaves:
        if x.is_floating_point():
            leaves.append(x.detach().requires_grad_())
            inputs = {**inputs, along: leaves[0]}
        outputs = call(model, inputs)
    for output in outputs:
        weights = torch.randn(output.shape[2:], generator=torch.Generator().manual_seed(0))  # norms hide plain sums
        for t in range(x.size(1)):
            total = (output[:, t] * weights).sum()
            grads: Sequence[Tensor | None] = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            found = [grad for grad in grads if grad is not None and grad.any()]
            assert found, f"output {t} has no gradient to any token of `{along}`"
            leak = max(distance(grad[:, t + 1 :], torch.zeros(1)) for grad in found)
            why = f"output {t} has a gradient of {leak:.1e} to later tokens of `{along}`"
            assert leak <= TOLERANCE, f"the model looks ahead: {why}"


@contextmanager
def _leaves(model: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """The results of the modules that read the tokens `name`, as leaves of the gradient."""
    assert isinstance(model, fx.GraphModule)
    found: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if args[0].is_floating_point():
            return output
        found.append(output.detach().requires_grad_())
        return found[-1]

    readers = [user for node in model.graph.find_nodes(op="placeholder", target=name) for user in node.users]
    modules = [model.get_submodule(str(user.target)) for user in readers if user.op == "call_module"]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def check_padding(model: nn.Module, inputs: Inputs) -> None:
    """Check that outputs of tokens do not depend on the amount or the contents of padding beside them."""
    sequences = [name for name in inputs if f"{name}_mask" in inputs_of(model)]
    for side in ("right", "left") if sequences else ():
        padded = dict(inputs)
        for name in sequences:
            padded[name], padded[f"{name}_mask"] = _padded(inputs[name], side)
        with evaluating(model), torch.no_grad():
            found = call(model, padded)
            for row in range(found[0].size(0)):
                alone = {name: x[row : row + 1] for name, x in inputs.items()}
                alone |= {name: alone[name][:, : max(1, inputs[name].size(1) - row)] for name in sequences}
                for output, want in zip(found, call(model, alone), strict=True):
                    error = distance(_tokens(output[row], want[0], side), want[0])
                    assert error <= TOLERANCE, f"padding on the {side} changes the outputs of tokens by {error:.1e}"


def _padded(x: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Two positions more than x, and one token less in each row than in the one above, then other values."""
    length = x.size(1) + 2
    rubbish = torch.cat((x, x), dim=1).roll(1, dims=0)[:, :length]
    rows, mask = rubbish.clone(), torch.zeros(x.size(0), length, dtype=torch.bool)
    for row in range(x.size(0)):
        real = max(1, x.size(1) - row)
        place = slice(0, real) if side == "right" else slice(length - real, length)
        rows[row, place], mask[row, place] = x[row, :real], True
    return rows, mask


def _tokens(output: Tensor, want: Tensor, side: str) -> Tensor:
    """The rows of a padded output that belong to tokens."""
    extra = output.size(0) - want.size(0)
    return output[: want.size(0)] if side == "right" else output[extra:]


def check_gradients(model: nn.Module, inputs: Inputs) -> None:
    """Check that in train mode every parameter gets a gradient, all are finite, and some are not zero."""
    model = copy.deepcopy(model).train()
    outputs = call(model, inputs)
    for output in outputs:
        assert output.isfinite().all(), "outputs are not finite in train mode"
    torch.stack([(output * torch.randn_like(output)).sum() for output in outputs]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    unused = [f"`{name}`" for name, gradient in gradients.items() if gradient is None]
    assert not unused, f"{_all(unused)} gets no gradient: nothing uses it"
    wild = [f"`{name}`" for name, one in gradients.items() if one is not None and not one.isfinite().all()]
    assert not wild, f"the gradient of {_all(wild)} is not finite"
    assert any(gradient.any() for gradient in gradients.values() if gradient is not None), "every gradient is zero"


def check_script(model: nn.Module, *calls: Inputs) -> None:
    """Check that `torch.jit.script` takes the model, and that the scripted model returns the same."""
    with quiet():
        try:
            scripted = script(model)
        except Exception as error:
            assert isinstance(model, fx.GraphModule)
            why = refusal(model, error)
            raise AssertionError(f"{why.message}: {why.notes[0]}") from error
        _agree("the scripted model", model, scripted, calls)


def check_capture(model: nn.Module, *calls: Inputs, backend: str | None = None) -> None:
    """Check that `torch.compile` captures the model whole, once for all lengths. `calls` differ only in length.

    `backend` compiles the captured graph, which runs as it is unless given.
    """
    graphs: list[fx.GraphModule] = []

    def count(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        ready = compiler.backend(backend or "eager")(graph, examples)
        graphs.append(graph)  # only now: a compiler may ask for the capture again
        return ready

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with compiler.sizes_apart():
        try:
            _agree("the compiled model", model, compiled, calls)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"torch.compile does not capture the model whole: {in_words(error)}") from error
    assert len(graphs) == 1, f"the model was captured {len(graphs)} times for {len(calls)} lengths"


def _agree(what: str, model: nn.Module, other: Any, calls: Sequence[Inputs]) -> None:
    names = inputs_of(model)
    with evaluating(model), torch.no_grad():
        other.eval()
        for inputs in calls:
            for want, found in zip(call(model, inputs), call(other, inputs, names), strict=True):
                error = distance(found, want)
                assert error <= TOLERANCE, f"{what} differs from the model by {error:.1e}"


def in_words(error: Exception) -> str:
    """The failure in one line: the message of tfkit's own error, or the first line of another's."""
    if isinstance(error, SpecError):
        return "; ".join(one.message for one in error.diagnostics)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (
        first if isinstance(error, AssertionError) and first else f"{type(error).__name__}: {first}".removesuffix(": ")
    )
