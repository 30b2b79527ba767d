"""Random inputs, calls of a model, recorded arguments, and the repetition of chosen experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tfkit.building.builder import evaluation_mode, inputs_of
from tfkit.graph.expand import Graph
from tfkit.tools.common.model_inputs import IMAGES, as_tensors, random_inputs

Padding = Literal["none", "left", "right", "rows"]
Inputs = Mapping[str, Tensor]


def example_inputs(
    graph: Graph, *, batch: int = 3, length: int = 6, padding: Padding = "none", seed: int = 0, images: int = IMAGES
) -> dict[str, Tensor]:
    """Return random inputs for a model of `graph`, with padding masks unless `padding` is none.

    With `left` and `right`, the first row has no padding; with `rows`, the last row is all padding.
    """
    inputs = random_inputs(graph, batch=batch, length=length, seed=seed, images=images)
    if padding == "none":
        return inputs
    masks = {
        signal.mask: padding_mask(batch, signal.length or length, padding)
        for signal in graph.inputs.values()
        if signal.mask
    }
    return {**inputs, **masks}


def padding_mask(batch: int, length: int, padding: Padding) -> Tensor:
    """Return a mask in which each row has one token fewer than the row above; with `rows`, the last row has none."""
    row = torch.arange(batch)[:, None]
    if padding == "rows":
        return (row < batch - 1).expand(batch, length).clone()
    mask = torch.arange(length) < (length - row).clamp(min=1)
    return mask.flip(1) if padding == "left" else mask


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert the floating-point inputs to a dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def call(model: nn.Module, inputs: Inputs, names: Sequence[str] | None = None) -> list[Tensor]:
    """Call a model with the inputs that it accepts, and return all results."""
    names = inputs_of(model) if names is None else names
    return as_tensors(model(**{name: value for name, value in inputs.items() if name in names}))


def eval_outputs(model: fx.GraphModule, inputs: Inputs) -> list[Tensor]:
    """Return the outputs in eval mode, without gradients."""
    with evaluation_mode(model), torch.no_grad():
        return call(model, inputs)


def arguments_of(model: fx.GraphModule, paths: Iterable[str], inputs: Inputs) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of the first call of each module, by path."""
    calls: dict[str, tuple[Any, ...]] = {}

    def keep(path: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.setdefault(path, (args[0].detach().clone(), *args[1:]))

    with temporary_hooks(model.get_submodule(path).register_forward_pre_hook(partial(keep, path)) for path in paths):
        eval_outputs(model, inputs)
    return calls


@contextmanager
def temporary_hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the context."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


class Choices(TorchFunctionMode):
    """Records the choices of `torch.topk`, such as experts, in the first `with` block, and repeats them in later ones.

    With equal choices, outputs are smooth functions of the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.left: Iterator[Tensor] | None = None

    def __enter__(self) -> Any:
        self.left = iter(self.made) if self.made else None
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return result
        if self.left is None:
            self.made.append(result.indices)
            return result
        chosen = next(self.left)
        return torch.return_types.topk((args[0].gather((kwargs or {}).get("dim", -1), chosen), chosen))
