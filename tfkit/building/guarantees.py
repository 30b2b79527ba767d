"""Checks, during a forward pass, that components keep the guarantees about their results.

Three faults cause no error, but a different model. A tensor of the wrong shape broadcasts at the next addition. A
tensor of the wrong dtype changes the dtype of everything that follows. A component that modifies its input in place
changes the input of other components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import name_of
from tfkit.building.placement import forked_generator
from tfkit.component import (
    AttentionConfig,
    BlockConfig,
    Component,
    InputPositionConfig,
    RopeScalingConfig,
    RotaryConfig,
    ScoreBiasConfig,
    Signal,
    StreamConfig,
    SublayerConfig,
)
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.expand import Graph, component_path
from tfkit.graph.input_shapes import input_shapes, max_len
from tfkit.spec.messages import fault_of, kind_of
from tfkit.torch_private.tensors import tensors_in, version_of

Size: TypeAlias = int | tuple[int, ...] | None
"""A size, or a choice of sizes; None if any size is allowed."""
Shape: TypeAlias = tuple[Size, ...]
BATCH, LENGTH = 2, 3
"""Batch size and length of the inputs for the check at build time."""
KEEPING = ("activation", "attention", "ffn", "norm")
"""Slots whose components return a tensor with the shape and dtype of their first argument."""


def check_guarantees(model: fx.GraphModule, graph: Graph) -> None:
    """Raise SpecError if a component of a model in eval mode violates a guarantee silently.

    This runs a forward pass over a few tokens, only for models with components from plugins, because tfkit's tests
    cover the built-in components. A forward that raises an error is ignored: the first use of the model raises it
    again.
    """
    if all(type(component).__module__.partition(".")[0] == "tfkit" for component in model.meta["components"].values()):
        return
    watch, like = Watch(model), next(model.parameters(), torch.empty(0))
    inputs: dict[str, Tensor] = {}
    for name, shape in input_shapes(graph, batch=BATCH, length=min(LENGTH, max_len(graph) or LENGTH)).items():
        real = graph.spec.model.inputs[name].is_real
        inputs[name] = torch.ones(shape, dtype=like.dtype if real else torch.long, device=like.device)
    with suppress(Exception), torch.no_grad(), forked_generator(), watch.watching():
        model(**inputs)
    if watch.broken:
        raise SpecError(*(component.diagnostic(graph) for component in watch.broken))


def check_layers(model: fx.GraphModule, graph: Graph) -> None:
    """Raise SpecError if the layers and modules of a stack differ from its description."""
    for node in graph.built_nodes:
        if node.stack is not None:
            names = {name for name, _ in model.get_submodule(node.name).named_modules()}
            missing, further = sorted(node.stack.modules() - names), f"layers.{len(node.stack.layers)}"
            fault = f"describes layers with modules that it does not have: {listing(missing)}" if missing else None
            if further in names:
                fault = f"has a module `{further}`, but its `stack` omits it"
            if fault is not None:
                raise SpecError(Broken(node.name, node.config, fault).diagnostic(graph))


@dataclass(frozen=True)
class Broken:
    """A violated guarantee of a component: its module, its config, and the fault, as the end of a sentence."""

    path: str
    component: Component
    fault: str

    def diagnostic(self, graph: Graph) -> Diagnostic:
        """Return the error, with the location of the component in the spec."""
        location = component_path(graph, self.path.partition(".")[0], self.component)
        name = f"{kind_of(type(self.component))} `{self.component.kind_name()}`"
        provenance = graph.spec.provenance
        message, help = f"{name} {self.fault}", fault_of(type(self.component))
        return Diagnostic(message, provenance.span(location), ".".join(provenance.written(location)), help=help)


class Watch:
    """Hooks that check the arguments and results of every component of a built model.

    Attributes:
        broken: the violated guarantees, at most one for each component.
        shapes: the shapes of the nodes' results, by name.
        running: the paths of the components that are running, innermost last.
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
        """Check the forward passes inside the context. After an exception, `running` ends with its component."""
        handles = []
        for path, component in self._components.items():
            handles += self._hooks(path, component, self._model.get_submodule(path), partial(_result_fault, component))
            for name, position, module in _rotation_modules(component, self._model.get_submodule(path)):
                handles += self._hooks(f"{path}.{name}", position, module, _shape_or_dtype_fault)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, path: str, component: Component, module: nn.Module, check: Callable[..., str | None]) -> list[Any]:
        versions: list[list[tuple[Tensor, int]]] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(path)
            versions.append(
                [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]
            )

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.running.pop()
            changed = any(version_of(tensor) != version for tensor, version in versions.pop())
            arguments = self._model.meta["given"].get(path, ())
            self._note(path, component, "changes its input in place" if changed else None)
            self._note(path, component, None if self._misled(args) else check(arguments, args, output))
            if "." not in path:
                self.shapes[path] = tuple((output[0] if isinstance(output, tuple) else output).shape)

        hooks = [module.register_forward_pre_hook(before, with_kwargs=True)]
        return [*hooks, module.register_forward_hook(after, with_kwargs=True)]

    def _misled(self, args: Any) -> bool:
        """Return True if an argument has the wrong dtype because an earlier component returned it."""
        dtypes = {tensor.dtype for tensor in tensors_in(args) if tensor.is_floating_point()}
        return bool(self.broken and dtypes - {tensor.dtype for tensor in self._model.parameters()})

    def _note(self, path: str, component: Component, fault: str | None) -> None:
        if fault is not None and (id(component), fault) not in self._seen:
            self._seen.add((id(component), fault))
            self.broken.append(Broken(path, component, fault))


def _rotation_modules(component: Component, module: nn.Module) -> Iterator[tuple[str, Component, nn.Module]]:
    """Yield the modules that rotate queries and keys, which are built without `make`, with their configs."""
    position = component.position if isinstance(component, AttentionConfig) else None
    if isinstance(component, AttentionConfig) and isinstance(position, RotaryConfig):
        with torch.device("meta"):
            kind = _class_name(position.build_rotation(component))
        yield from (
            (name, position, rotation)
            for name, rotation in module.named_modules()
            if _class_name(rotation) == kind and name
        )


def _class_name(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


# ---- the fault in a component's result, or None ----


def _result_fault(component: Component, arguments: tuple[Any, ...], args: tuple[Any, ...], output: Any) -> str | None:
    """Describe the fault in a component's result. `arguments` are the arguments of its `build`."""
    if isinstance(component, SublayerConfig) and component.gives:
        if not (isinstance(output, tuple) and len(output) == 2 and set(output[1]) == set(component.gives)):
            return f"must return y, and a mapping with the tensors that it gives: {listing(component.gives)}"
        output = output[0]
    if component.slot in KEEPING:
        return _shape_or_dtype_fault(arguments, args, output)
    if not arguments:
        return None
    if isinstance(component, BlockConfig):
        return _block_fault(component, arguments[0], args, output)
    if isinstance(component, InputPositionConfig):
        batch, length = args[0].shape
        return _shape_fault(output, ((batch, 1), length, arguments[0]), "positions [batch or 1, length, width]")
    if isinstance(component, ScoreBiasConfig):
        queries, keys = args[:2]
        batch = max(queries.size(0), keys.size(0))
        shape: Shape = ((batch, 1), arguments[0].n_heads, queries.size(1), keys.size(1))
        return _shape_fault(output, shape, "scores [batch or 1, heads, queries, keys]")
    if isinstance(component, StreamConfig):
        return _stream_fault(component, arguments, args[0], output)
    if isinstance(component, RopeScalingConfig):
        return _shape_fault(output, (arguments[0] // 2,), "frequencies [width / 2]")
    return None


def _shape_or_dtype_fault(arguments: tuple[Any, ...], args: tuple[Any, ...], output: Any) -> str | None:
    """Describe the fault in a result that must have the shape and dtype of the first argument."""
    x: Tensor = args[0]
    if (fault := _shape_fault(output, tuple(x.shape), "the shape of its input")) is not None:
        return fault
    if output.dtype != x.dtype:
        return f"returns {name_of(output.dtype)} for {name_of(x.dtype)}: it must keep the type of its input"
    return None


def _stream_fault(component: StreamConfig, arguments: tuple[Any, ...], stream: Tensor, output: Any) -> str | None:
    """Describe the fault in the result of a module of a residual."""
    part, width = arguments
    if part == "read" and not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], list)):
        return "must return a tuple from `read`: x, and a list of tensors for `write`"
    result = output[0] if part == "read" else output
    if isinstance(result, Tensor) and result.dtype != stream.dtype:
        return f"returns {name_of(result.dtype)} from `{part}` for {name_of(stream.dtype)}: it must keep the type"
    if part in ("read", "leave") or not component.enters:
        return _shape_fault(result, (*stream.shape[:2], width), f"the result of `{part}`, [b, t, d_model]")
    return None


def _block_fault(block: BlockConfig, signals: Mapping[str, Any], args: tuple[Any, ...], output: Any) -> str | None:
    """Describe the difference between a block's output or inputs and its declaration."""
    sizes = {tuple(shape.shape) for shape in tensors_in(args[0])} if block.alike and args else set()
    if len(sizes) > 1:
        return f"takes tensors of one shape, but got {' and '.join(str(list(shape)) for shape in sorted(sizes))}"
    signal = block.output(signals)
    value = output[0] if isinstance(output, tuple) and output else output
    x = next(tensors_in(args), None)
    batch = None if x is None or block.joins_images else x.size(0)
    read: Signal | None = signals.get("input")
    if batch is not None and x is not None and read is not None and read.type == "images":
        batch *= x.size(1)
    if signal.type == "logits" and isinstance(value, Tensor):
        axes = [None] * (value.dim() - 1)
        shape = (batch, *axes) if signal.width is None else (batch, *axes[:-1], signal.width)
        return _shape_fault(value, shape, signal.in_words())
    if signal.type == "positions":
        return _shape_fault(value, (batch, None, *([signal.width] if signal.width else [])), signal.in_words())
    goes_on = x is not None and read is not None and signal.mask is not None and signal.mask == read.mask
    length = x.size(1) if x is not None and goes_on else signal.length
    return _shape_fault(
        value, (batch, signal.width) if signal.type == "vector" else (batch, length, signal.width), signal.in_words()
    )


def _shape_fault(result: Any, expected: Shape, meaning: str) -> str | None:
    """Describe the difference between the shape of a result and the expected shape."""
    if not isinstance(result, Tensor):
        return f"must return a tensor; got {type(result).__name__}"
    sizes = tuple(result.shape)
    if len(sizes) == len(expected) and all(_is_allowed(*pair) for pair in zip(sizes, expected, strict=True)):
        return None
    shape = ", ".join("any" if size is None else _in_words(size) for size in expected)
    return f"returns {list(sizes)} instead of [{shape}]: {meaning}"


def _is_allowed(size: int, allowed: Size) -> bool:
    return allowed is None or size == allowed or (isinstance(allowed, tuple) and size in allowed)


def _in_words(size: int | tuple[int, ...]) -> str:
    return str(size) if isinstance(size, int) else " or ".join(map(str, dict.fromkeys(size)))
