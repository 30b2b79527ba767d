"""The promises of single components, checked inside a built model."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.builder import assemble, evaluating
from tfkit.component import Component
from tfkit.graph.expand import Graph
from tfkit.initialize import initialize
from tfkit.spec.messages import kind_of
from tfkit.testing.inputs import TOLERANCE, Inputs, call, distance, example_inputs

ALONE = ("activation", "ffn", "norm")
"""The slots of components that act on each position by itself."""
WHOLE = frozenset(("__dict__", "__iter__", "model_dump", "model_copy", "__pydantic_fields_set__"))
"""Functions that read all fields of a config at once."""


def check_alone(model: fx.GraphModule, inputs: Inputs) -> None:
    """Check that activations, norms and FFNs act on each position by itself, and do not depend on their number."""
    given: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        return lambda module, args: given.setdefault(path, args[0])

    components: dict[str, Component] = model.meta["components"]
    paths = [path for path, component in components.items() if component.slot in ALONE]
    handles = [model.get_submodule(path).register_forward_pre_hook(keep(path)) for path in paths]
    with evaluating(model), torch.no_grad():
        try:
            call(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
        found = {path: _mixing(model.get_submodule(path), x) for path, x in given.items() if x.dim() == 3}
    wrong = [f"{named(components[path])}, `{path}`, {what}" for path, what in found.items() if what]
    assert not wrong, "; ".join(wrong)


def _mixing(module: nn.Module, x: Tensor) -> str | None:
    """A description of how a module mixes the positions or the rows of x [b, t, d]; None if it does not."""
    y, cut = module(x), x.size(1) // 2
    other = x.roll(1, dims=0)
    ahead = distance(module(torch.cat((x[:, :cut], other[:, cut:]), dim=1))[:, :cut], y[:, :cut])
    back = distance(module(torch.cat((other[:, :cut], x[:, cut:]), dim=1))[:, cut:], y[:, cut:])
    if ahead > TOLERANCE:
        return f"looks ahead: positions change by {ahead:.1e} with those after them"
    if back > TOLERANCE:
        return f"looks back: positions change by {back:.1e} with those before them"
    fewer = distance(module(x[:, :cut]), y[:, :cut])
    if fewer > TOLERANCE:
        return f"depends on the number of positions: among fewer, they change by {fewer:.1e}"
    single = distance(module(x[:1]), y[:1])
    return f"mixes the rows of a batch: alone, one changes by {single:.1e}" if single > TOLERANCE else None


def check_repeatable(model: fx.GraphModule, inputs: Inputs) -> None:
    """Check that nothing is random in eval mode: two forwards over the same inputs return the same."""
    with evaluating(model), torch.no_grad():
        for first, second in zip(call(model, inputs), call(model, inputs), strict=True):
            error = distance(second, first)
            assert error <= TOLERANCE, f"something is random in eval mode: two forwards differ by {error:.1e}"


def check_fields(graph: Graph, config: type[Component]) -> None:
    """Check that every field that a component's class declares itself is read when its model is built or runs.

    A field that the component's file names as an attribute may be read elsewhere, and passes.
    """
    own = inspect.get_annotations(config).keys() & config.model_fields.keys() - {str(config.word_key)}
    with _reading(config) as read:
        model = assemble(graph)
        initialize(model, graph)
        call(model.train(), example_inputs(graph))
    source = inspect.getsource(sys.modules[config.__module__])
    idle = [name for name in config.model_fields if name in own - read and not re.search(rf"\.{name}\b", source)]
    names = " and ".join(f"`{name}`" for name in idle)
    assert not idle, f"{kind_of(config)} `{config.kind_name()}` never reads its field{'s' * (len(idle) > 1)} {names}"


@contextmanager
def _reading(config: type[Component]) -> Iterator[set[str]]:
    """The names of the fields of that class's objects that are read within."""
    read: set[str] = set()

    def get(self: Component, name: str) -> Any:
        read.update(config.model_fields if name in WHOLE else (name,))
        return object.__getattribute__(self, name)

    config.__getattribute__ = get  # type: ignore[method-assign,assignment]
    try:
        yield read
    finally:
        del config.__getattribute__


def named(component: Component) -> str:
    """`ffn kind `gelu``: the name of a component in messages."""
    return f"{kind_of(type(component))} `{component.kind_name()}`"
