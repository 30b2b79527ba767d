"""Properties of a batch: the model reads each row and each token independently of the others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import evaluating, graph_of, inputs_of
from tfkit.component import Component
from tfkit.nn import StackedLinear
from tfkit.spec.messages import kind_of
from tfkit.tools.check.inputs import Inputs, call, hooked
from tfkit.tools.check.measure import TOLERANCE, DoesNotApplyError, Measured, distance, property_of
from tfkit.tools.check.places import compared, of_row
from tfkit.tools.check.subject import Subject

ALONE = ("activation", "ffn", "norm")
"""The slots of components that act on each position independently."""


@property_of("alone", "mixes positions in attention only")
def alone(subject: Subject) -> Iterator[Measured]:
    """Activations, norms and FFNs act on each position independently, and do not depend on the number of positions."""
    yield from positions_alone(subject.model, subject.inputs())


def positions_alone(model: fx.GraphModule, inputs: Inputs) -> Iterator[Measured]:
    """Find activations, norms and FFNs that mix positions or rows, or depend on their number."""
    received: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        return lambda module, args: received.setdefault(path, args[0].clone())

    components: dict[str, Component] = model.meta["components"]
    paths = [path for path, component in components.items() if component.slot in ALONE]
    handles = [model.get_submodule(path).register_forward_pre_hook(keep(path)) for path in paths]
    with evaluating(model), torch.no_grad():
        with hooked(handles):
            call(model, inputs)
        for path, x in received.items():
            if x.dim() == 3:
                for error, what in _mixing(model.get_submodule(path), x):
                    detail = f"{named(components[path])}, `{path}`, {what.format(error)}"
                    yield Measured(error, detail, where=path)


def _mixing(module: nn.Module, x: Tensor) -> Iterator[tuple[float, str]]:
    """Yield the ways in which a module could mix positions or rows of x [b, t, d], and how much it does."""
    y, cut = module(x), x.size(1) // 2
    other = x.roll(1, dims=0)
    ahead = module(torch.cat((x[:, :cut], other[:, cut:]), dim=1))[:, :cut]
    back = module(torch.cat((other[:, :cut], x[:, cut:]), dim=1))[:, cut:]
    yield distance(ahead, y[:, :cut]), "looks ahead: positions change by {:.1e} with those after them"
    yield distance(back, y[:, cut:]), "looks back: positions change by {:.1e} with those before them"
    fewer = distance(module(x[:, :cut]), y[:, :cut])
    yield fewer, "depends on the number of positions: among fewer, they change by {:.1e}"
    yield distance(module(x[:1]), y[:1]), "mixes the rows of a batch: alone, one changes by {:.1e}"


def named(component: Component) -> str:
    """Name a component in messages: `ffn kind `gelu``."""
    return f"{kind_of(type(component))} `{component.kind_name()}`"


@property_of("padding", "is not changed by padding", follows=("alone", "look-ahead"))
def padding(subject: Subject) -> Iterator[Measured]:
    """Outputs of tokens do not depend on the amount or the contents of padding next to them."""
    if not subject.padded:
        raise DoesNotApplyError("no input may be padded")
    if between := next((node.name for node in subject.graph.nodes if node.output.gaps), None):
        raise DoesNotApplyError(f"`{between}` puts padding between tokens; `meaning` compares these")
    yield from padded_rows(subject.model, subject.inputs())


def padded_rows(model: fx.GraphModule, inputs: Inputs) -> Iterator[Measured]:
    """Compare the outputs of tokens next to different amounts of padding with the outputs of each row alone."""
    sequences = [name for name, signal in graph_of(model).inputs.items() if name in inputs and signal.mask]
    for side in ("right", "left") if any(f"{name}_mask" in inputs_of(model) for name in sequences) else ():
        padded = dict(inputs)
        for name in sequences:
            padded[name], padded[f"{name}_mask"] = _padded(inputs[name], side)
        detail = f"padding on the {side} changes the outputs of tokens by {{}}"
        with evaluating(model), torch.no_grad():
            for row in range(padded[sequences[0]].size(0)):
                alone = {name: x[row : row + 1] for name, x in inputs.items()}
                alone |= {name: alone[name][:, : max(1, inputs[name].size(1) - row)] for name in sequences}
                runs = partial(call, model, alone), partial(call, model, padded)
                yield from compared(model, *runs, detail, of_row(row, side))


def _padded(x: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Append two positions to x; each row has one token fewer than the row above, then arbitrary values."""
    length = x.size(1) + 2
    rubbish = torch.cat((x, x), dim=1).roll(1, dims=0)[:, :length]
    rows, mask = rubbish.clone(), torch.zeros(x.size(0), length, dtype=torch.bool)
    for row in range(x.size(0)):
        real = max(1, x.size(1) - row)
        place = slice(0, real) if side == "right" else slice(length - real, length)
        rows[row, place], mask[row, place] = x[row, :real], True
    return rows, mask


@property_of("neighbours", "reads each row by itself", follows=("alone",))
def neighbours(subject: Subject) -> Iterator[Measured]:
    """Other rows of a batch change no bit of a row; experts, which take tokens of all rows together, may round."""
    experts = any(isinstance(module, StackedLinear) for module in subject.model.modules())
    limit = TOLERANCE if experts else 0.0
    inputs, different = subject.inputs(), subject.inputs(seed=1)
    mixed = {name: torch.cat((x[:1], different[name][1:])) for name, x in inputs.items()}
    single = {name: x[:1] for name, x in inputs.items()}
    order = {name: x.roll(1, dims=0) for name, x in inputs.items()}
    for changed, detail, align, allowed in (
        (mixed, "beside other rows, the first one of a batch changes by {}", _first, limit),
        (order, "in another order, rows change by {}", _back, TOLERANCE),
        (single, "alone, the first row of a batch changes by {}", _first, TOLERANCE),
    ):
        runs = partial(subject.run, inputs), partial(subject.run, changed)
        yield from compared(subject.model, *runs, detail, align, limit=allowed)


def _first(rows: Tensor, changed: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first row of two batches."""
    batches = rows.dim() > 1 and rows.dim() == changed.dim() and rows.size(0) > 1
    return (rows[:1], changed[:1]) if batches and changed.size(0) in (1, rows.size(0)) else None


def _back(rows: Tensor, rolled: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the rows of two batches, the second in the order of the first."""
    return (rows, rolled.roll(-1, dims=0)) if rows.dim() > 1 and rows.size(0) > 1 else None
