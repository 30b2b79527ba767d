"""The promises that components make about their results, checked while a model runs.

A tensor of a wrong shape often broadcasts, at the next addition at the latest: no error, but another model. One of a
wrong type is as silent: everything that follows takes that type. And a component that changes its input in place
changes what others read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from tfkit.component import (
    AttentionConfig,
    BlockConfig,
    Component,
    InputPositionConfig,
    RopeScalingConfig,
    RotaryConfig,
    ScoreBiasConfig,
    Signal,
)
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.expand import Graph
from tfkit.graph.inputs import input_shapes
from tfkit.graph.places import place_of
from tfkit.graph.sequence_limits import max_len
from tfkit.placement import forked_generator, name_of
from tfkit.spec.messages import fault_of, kind_of
from tfkit.torch_private.tensors import tensors_in, version_of

Size: TypeAlias = int | tuple[int, ...] | None
"""A size, or a choice of sizes; None if any size is allowed."""
Shape: TypeAlias = tuple[Size, ...]
BATCH, LENGTH = 2, 3
"""Batch and length of the inputs that a model is checked with when it is built."""
KEEPING = ("activation", "attention", "ffn", "norm")
"""The slots of components whose result has the shape and type of their first argument."""


def check_promises(model: fx.GraphModule, graph: Graph) -> None:
    """Raise SpecError if a component of a model in eval mode silently breaks a promise.

    Runs one forward over a few tokens, and only for models with components from plugins: tfkit's own tests prove the
    built-in ones. A forward that fails is ignored here: its first use will raise the error.
    """
    if all(type(one).__module__.partition(".")[0] == "tfkit" for one in model.meta["components"].values()):
        return
    watch, like = Watch(model), next(model.parameters(), torch.empty(0))
    made: dict[str, Tensor] = {}
    for name, shape in input_shapes(graph, batch=BATCH, length=min(LENGTH, max_len(graph) or LENGTH)).items():
        real = graph.spec.model.inputs[name].type == "features"
        made[name] = torch.ones(shape, dtype=like.dtype if real else torch.long, device=like.device)
    with suppress(Exception), torch.no_grad(), forked_generator(), watch.watching():
        model(**made)
    if watch.broken:
        raise SpecError(*(one.diagnostic(graph) for one in watch.broken))


def check_layers(model: fx.GraphModule, graph: Graph) -> None:
    """Raise SpecError if a stack describes layers or modules other than those that it has."""
    for node in graph.nodes:
        if node.stack is not None:
            names = {name for name, _ in model.get_submodule(node.name).named_modules()}
            missing, further = sorted(node.stack.modules() - names), f"layers.{len(node.stack.layers)}"
            wrong = f"describes layers with modules that it does not have: {listing(missing)}" if missing else None
            if further in names:
                wrong = f"has a module `{further}`, but its `stack` leaves it out"
            if wrong is not None:
                raise SpecError(Broken(node.name, node.config, wrong).diagnostic(graph))


@dataclass(frozen=True)
class Broken:
    """A broken promise of a component: the path of its module, its config, and the fault, as the end of a sentence."""

    path: str
    component: Component
    wrong: str

    def diagnostic(self, graph: Graph) -> Diagnostic:
        """The error, with the place of the component in the spec."""
        place = place_of(graph, self.path.partition(".")[0], self.component)
        name = f"{kind_of(type(self.component))} `{self.component.kind_name()}`"
        provenance = graph.spec.provenance
        message, help = f"{name} {self.wrong}", fault_of(type(self.component))
        return Diagnostic(message, provenance.span(place), ".".join(provenance.written(place)), help=help)


class Watch:
    """Checks the arguments and results of every component of a built model.

    Attributes:
        broken: the promises found broken, at most one for each component.
        shapes: the shapes of the nodes' results, by name.
        running: the paths of the components that are running, the innermost one last.
    """

    def __init__(self, model: fx.GraphModule) -> None:
        self._model = model
        self._components: Mapping[str, Component] = model.meta["components"]
        self._seen: set[tuple[int, str]] = set()
        self.broken: list[Broken] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.running: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check everything that runs within; after an error, `running` tells where it was."""
        handles = []
        for path, component in self._components.items():
            handles += self._hooks(path, component, self._model.get_submodule(path), partial(_wrong, component))
            for name, position, module in _rotations(component, self._model.get_submodule(path)):
                handles += self._hooks(f"{path}.{name}", position, module, _not_kept)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, path: str, component: Component, module: nn.Module, wrong: Callable[..., str | None]) -> list[Any]:
        versions: list[list[tuple[Tensor, int]]] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(path)
            versions.append([(one, version_of(one)) for one in tensors_in((args, kwargs)) if not one.is_inference()])

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.running.pop()
            changed = any(version_of(one) != version for one, version in versions.pop())
            given = self._model.meta["given"].get(path, ())
            self._note(path, component, "changes its input in place" if changed else None)
            self._note(path, component, None if self._misled(args) else wrong(given, args, output))
            if "." not in path:
                self.shapes[path] = tuple((output[0] if isinstance(output, tuple) else output).shape)

        hooks = [module.register_forward_pre_hook(before, with_kwargs=True)]
        return [*hooks, module.register_forward_hook(after, with_kwargs=True)]

    def _misled(self, args: Any) -> bool:
        """True after a component that returned another type: what it was given is not the model's."""
        given = {one.dtype for one in tensors_in(args) if one.is_floating_point()}
        return bool(self.broken and given - {one.dtype for one in self._model.parameters()})

    def _note(self, path: str, component: Component, wrong: str | None) -> None:
        if wrong is not None and (id(component), wrong) not in self._seen:
            self._seen.add((id(component), wrong))
            self.broken.append(Broken(path, component, wrong))


def _rotations(component: Component, module: nn.Module) -> Iterator[tuple[str, Component, nn.Module]]:
    """The modules of an attention that rotate queries and keys, with their config: they are built without `make`."""
    position = component.position if isinstance(component, AttentionConfig) else None
    if isinstance(component, AttentionConfig) and isinstance(position, RotaryConfig):
        with torch.device("meta"):
            kind = _name(position.build_rotation(component))
        yield from ((name, position, one) for name, one in module.named_modules() if _name(one) == kind and name)


def _name(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


# ---- the fault in a component's result, or None ----


def _wrong(component: Component, given: tuple[Any, ...], args: tuple[Any, ...], output: Any) -> str | None:
    """The fault in the result of a component of any slot; `given` are the arguments that it was built with."""
    if component.slot in KEEPING:
        return _not_kept(given, args, output)
    if not given:
        return None
    if isinstance(component, BlockConfig):
        return _wrong_block(component, given[0], args, output)
    if isinstance(component, InputPositionConfig):
        batch, length = args[0].shape
        return _other(output, ((batch, 1), length, given[0]), "positions [batch or 1, length, width]")
    if isinstance(component, ScoreBiasConfig):
        queries, keys = args[:2]
        batch = max(queries.size(0), keys.size(0))
        shape: Shape = ((batch, 1), given[0].n_heads, queries.size(1), keys.size(1))
        return _other(output, shape, "scores [batch or 1, heads, queries, keys]")
    if isinstance(component, RopeScalingConfig):
        return _other(output, (given[0] // 2,), "frequencies [width / 2]")
    return None


def _not_kept(given: tuple[Any, ...], args: tuple[Any, ...], output: Any) -> str | None:
    """The fault in a result that must have the shape and type of the first argument."""
    x: Tensor = args[0]
    if (wrong := _other(output, tuple(x.shape), "the shape of its input")) is not None:
        return wrong
    if output.dtype != x.dtype:
        return f"returns {name_of(output.dtype)} for {name_of(x.dtype)}: it must keep the type of its input"
    return None


def _wrong_block(block: BlockConfig, signals: Mapping[str, Any], args: tuple[Any, ...], output: Any) -> str | None:
    """The fault in a block's output or inputs, compared with what the block declares."""
    sizes = {tuple(one.shape) for one in tensors_in(args[0])} if block.alike and args else set()
    if len(sizes) > 1:
        return f"takes tensors of one shape, but got {' and '.join(str(list(one)) for one in sorted(sizes))}"
    said = block.output(signals)
    value = output[0] if isinstance(output, tuple) and output else output
    x = next(tensors_in(args), None)
    batch = None if x is None else x.size(0)
    if said.type == "logits" and isinstance(value, Tensor):
        axes = [None] * (value.dim() - 1)
        return _other(value, (batch, *axes) if said.width is None else (batch, *axes[:-1], said.width), said.in_words())
    read: Signal | None = signals.get("input")
    goes_on = x is not None and read is not None and said.mask is not None and said.mask == read.mask
    length = x.size(1) if x is not None and goes_on else said.length
    return _other(value, (batch, said.width) if said.type == "vector" else (batch, length, said.width), said.in_words())


def _other(found: Any, wanted: Shape, what: str) -> str | None:
    """The fault in a result that does not have the wanted shape."""
    if not isinstance(found, Tensor):
        return f"returns {type(found).__name__}, not a tensor"
    sizes = tuple(found.shape)
    if len(sizes) == len(wanted) and all(_fits(*pair) for pair in zip(sizes, wanted, strict=True)):
        return None
    shape = ", ".join("any" if one is None else _in_words(one) for one in wanted)
    return f"returns {list(sizes)} instead of [{shape}]: {what}"


def _fits(size: int, wanted: Size) -> bool:
    return wanted is None or size == wanted or (isinstance(wanted, tuple) and size in wanted)


def _in_words(wanted: int | tuple[int, ...]) -> str:
    return str(wanted) if isinstance(wanted, int) else " or ".join(map(str, dict.fromkeys(wanted)))
