"""Inputs of a model, its runs, and the component at which two runs begin to differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tfkit.building.builder import evaluating, inputs_of
from tfkit.graph.expand import Graph
from tfkit.tools.check.measure import TOLERANCE, Deviation, difference, distance
from tfkit.tools.common.model_inputs import as_tensors, random_inputs
from tfkit.tools.compare.comparison import Outputs, outputs

Padding = Literal["none", "left", "right", "rows"]
Inputs = Mapping[str, Tensor]
Pair = tuple[Tensor, Tensor]
Align = Callable[[Tensor, Tensor], Pair | None]
"""The parts of two outputs of one module that should be equal; None if they cannot be compared."""


def example_inputs(
    graph: Graph, *, batch: int = 3, length: int = 6, padding: Padding = "none", seed: int = 0
) -> dict[str, Tensor]:
    """Return random inputs for a model of `graph`, with padding masks unless `padding` is none.

    Left and right leave the first row without padding; `rows` hides the last row altogether.
    """
    inputs = random_inputs(graph, batch=batch, length=length, seed=seed)
    if padding == "none":
        return inputs
    row = torch.arange(batch)[:, None]
    if padding == "rows":
        mask = (row < batch - 1).expand(batch, length)
    else:
        mask = torch.arange(length) < (length - row).clamp(min=1)
        mask = mask.flip(1) if padding == "left" else mask
    return {**inputs, **{signal.mask: mask.clone() for signal in graph.inputs.values() if signal.mask}}


def cast(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert inputs that are real numbers to another dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def call(model: nn.Module, inputs: Inputs, names: Sequence[str] | None = None) -> list[Tensor]:
    """Call the model with the inputs that it takes, and return all results."""
    names = inputs_of(model) if names is None else names
    return as_tensors(model(**{name: value for name, value in inputs.items() if name in names}))


def run(model: fx.GraphModule, inputs: Inputs) -> list[Tensor]:
    """Return the outputs in eval mode, without gradients."""
    with evaluating(model), torch.no_grad():
        return call(model, inputs)


def arguments_of(model: fx.GraphModule, paths: Iterable[str], inputs: Inputs) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of the first call of each module that runs, by its path."""
    calls: dict[str, tuple[Any, ...]] = {}

    def keep(path: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.setdefault(path, (args[0].detach().clone(), *args[1:]))

    with hooked(model.get_submodule(path).register_forward_pre_hook(partial(keep, path)) for path in paths):
        run(model, inputs)
    return calls


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks for the duration of a block, and remove them at its end."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


class Choices(TorchFunctionMode):
    """The choices of `torch.topk`, such as experts, in the run within its first `with`; later runs repeat them.

    Outputs are smooth while the choices stay equal.
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


# ---- two runs ----


def compared(
    model: fx.GraphModule,
    inputs: Inputs,
    changed: Inputs,
    detail: str,
    align: Align = lambda a, b: (a, b),
    *,
    second: fx.GraphModule | None = None,
    limit: float = TOLERANCE,
    where: str = "",
) -> Iterator[Deviation]:
    """Compare the outputs of two runs in eval mode, bit by bit if the limit is 0.

    Args:
        model: the model of the first run.
        inputs: inputs of the first run.
        changed: inputs of the second run.
        detail: the deviation as text; `{}` is the size of the difference.
        align: the parts of both outputs that should be equal.
        second: the model of the second run; None if it is the model of the first run.
        limit: the largest difference.
        where: the component that causes a difference; by default, the first component whose outputs differ.
    """
    runs = partial(run, model, inputs), partial(run, second or model, changed)
    search = partial(first_difference, model, *runs, align, second=second, limit=limit)
    for pair in map(align, runs[0](), runs[1]()):
        if pair is not None:
            yield difference(pair[1], pair[0], detail, limit=limit, where=where or search)


def first_difference(
    model: fx.GraphModule,
    first_run: Callable[[], Any],
    second_run: Callable[[], Any],
    align: Align,
    *,
    second: fx.GraphModule | None = None,
    limit: float = TOLERANCE,
) -> str:
    """Return the path of the first component whose outputs differ by more than the limit; empty if none does."""
    ours, theirs = outputs_of(model, first_run), outputs_of(second or model, second_run)
    for path, output in ours.items():
        pair = align(output, theirs[path]) if path in theirs else None
        if pair is not None and pair[0].shape == pair[1].shape and not distance(*pair) <= limit:
            return path
    return ""


def outputs_of(model: fx.GraphModule, run: Callable[[], Any], names: Iterable[str] | None = None) -> Outputs:
    """Return the outputs of the named modules, or of all components, in eval mode, the innermost first."""
    with evaluating(model), torch.no_grad():
        return outputs(model, model.meta["components"] if names is None else names, run, "the model")[0]


def along(columns: slice) -> Align:
    """Select positions of [b, t, ...]."""
    return lambda a, b: (a[:, columns], b[:, columns]) if a.dim() > 2 and a.shape == b.shape else None
