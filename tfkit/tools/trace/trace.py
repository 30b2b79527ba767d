"""Values inside a model, read and written by the names that `tfkit show SPEC --points` lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import checked, value_text
from tfkit.building.builder import graph_of
from tfkit.building.model import BuiltModel, complete_model, unwrapped_model
from tfkit.errors import quoted, similar_name_help
from tfkit.nn import Context, Past, order_tokens, restore_order
from tfkit.tools.show.points import TracePoint, points_of
from tfkit.tools.trace.attention_weights import written_out
from tfkit.torch_private.hooks import borrowed_hooks

Edit: TypeAlias = Callable[..., Any] | Tensor


@checked
def trace(
    model: BuiltModel,
    *,
    read: str | Collection[str] = (),
    write: Mapping[str, Callable[..., Any] | Tensor] | None = None,
    positions: int | Collection[int] | None = None,
) -> AbstractContextManager[dict[str, Any]]:
    """Return a context in which calls of the model read and write values inside it.

        with tfkit.trace(model, read="decoder.layers.*.stream.out", write={"decoder.layers.1.ffn.out": f}) as values:
            model(tokens)
        values["decoder.layers.1.stream.out"]

    A name is `NODE` for the output of a node, or begins with `NODE.layers.I.`, the layer: `stream.in` and `stream.out`
    for the residual stream, `NAME.in` and `NAME.out` for the module of a sublayer, such as `attention.out`, and for
    values inside the sublayer `attention.q`, `k`, `v`, `scores`, `weights` and `heads`, before the output projection,
    and `ffn.hidden`. `tfkit show SPEC --points` lists the names of a spec with their shapes. `stream.mid` is the stream
    between sublayers. If a residual replaces the stream by several streams, their names are `streams.in`, `streams.mid`
    and `streams.out`. A number after a name selects a head, or a channel of a value without heads:
    `attention.heads.2`, `ffn.hidden.17`.

    If `scores` or `weights` are named, their stack runs with its attention written out, independently of the backend of
    the model. Other values may then differ by rounding.

    Gradients flow through both reads and writes. Values that need no gradient are copies. The model has hooks only
    inside the context. They also run in `generate`, in `CachedModel` and in wrappers that call the model's modules, but
    not in code that torch has compiled. In nested contexts, the inner context reads and writes after the outer context.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it.
        read: names of values. `*` matches any component of a name, such as the number of a layer.
        write: by name, a function of the value that returns its replacement, or the replacement. A value that is also
            read is read after it is written. In incremental decoding, as in `generate`, each step uses the positions of
            a replacement that it reads; positions after the replacement are unchanged.
        positions: positions of the sequence, padding included, at which values of layers are written; by default all.
            Negative numbers count from the end of what a call reads: -1 is the newest token in each step of `generate`.

    Returns:
        A context whose value is a mapping from names to values, in the order of computation. A value that is computed
        several times, as in layers that share weights, or at each step of `generate`, is a list of tensors.

    Raises:
        ValueError: a name does not exist, a replacement has a different shape or dtype, a value or one of `positions`
            was not computed before the context ended, or the model was built with `recompute`, which runs layers a
            second time.
    """
    built = unwrapped_model(model)
    chosen = None if positions is None else (positions,) if isinstance(positions, int) else tuple(positions)
    if chosen is not None and not (write and chosen):
        missing = "`positions` must contain a position" if write else "`positions` has no effect without `write`"
        raise ValueError(missing)
    edits, hooks = write or {}, list[tuple[str, list[Hook]]]()
    for name, points in named_points(built, edits).items():
        hooks.append((name, [Hook(point, edits[name], chosen) for point in points]))
    readers: dict[TracePoint, Hook] = {}
    for name, points in named_points(built, read).items():
        hooks.append((name, [readers.setdefault(point, Hook(point)) for point in points]))
    return _complete_trace(built, hooks)


@contextmanager
def _complete_trace(model: fx.GraphModule, hooks: Sequence[tuple[str, Sequence[Hook]]]) -> Iterator[dict[str, Any]]:
    with registered_hooks(model, list(dict.fromkeys(hook for _, matched in hooks for hook in matched))) as values:
        yield values
    for name, matched in hooks:
        if not any(hook.ran for hook in matched):
            states = all(hook.point.state is not None for hook in matched)
            call = "read the sequence with `generate` or `CachedModel`" if states else "call the model, not compiled,"
            raise ValueError(f"{quoted(name)} was not computed: {call} before the trace ends")
        if all(hook.pending for hook in matched):
            raise ValueError(f"{quoted(name)} has no positions {sorted(matched[0].pending)} in the sequences that ran")


@contextmanager
def registered_hooks(model: fx.GraphModule, hooks: Sequence[Hook]) -> Iterator[dict[str, Any]]:
    """Register hooks until the context ends. The value of the context is a mapping that the hooks fill."""
    if model.meta.get("recompute"):
        # The second run, in the backward pass, would be read as well, and after the context it would lack the edits.
        raise ValueError("a model that was built with `recompute` cannot be traced: build it without")
    values: dict[str, Any] = {}
    modules = dict(model.named_modules())
    nodes = {hook.point.module.partition(".")[0] for hook in hooks if hook.point.written_out}
    with ExitStack() as stack:
        twin = stack.enter_context(_written_out(model, nodes)) if nodes else model
        for hook in hooks:
            hook.values = values
            path = hook.point.module
            module = modules[path] if path in modules else twin.get_submodule(path)
            if hook.point.mixer is not None:
                stack.callback(modules[hook.point.mixer].register_forward_pre_hook(hook.on_mixer).remove)
            if hook.point.state is not None:
                handle = module.register_forward_hook(hook.on_state)
            elif hook.point.argument is None:
                handle = module.register_forward_hook(hook.on_output)
            else:
                handle = module.register_forward_pre_hook(hook.on_input)
            stack.callback(handle.remove)
            if hook.edit is not None and hook.point.layer is not None:
                node = modules[path.partition(".")[0]]
                stack.callback(node.register_forward_pre_hook(hook.on_node, with_kwargs=True).remove)
        yield values


@contextmanager
def _written_out(model: fx.GraphModule, names: Collection[str]) -> Iterator[fx.GraphModule]:
    """Run the nodes of these names with attention written out. The value of the context is the model that runs them."""
    twin, _ = written_out(complete_model(model))
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            attributes, previous = module.__dict__, {"forward": module.forward} if "forward" in vars(module) else {}
            stack.callback(attributes.update, previous)
            attributes["forward"] = partial(_run_twin, module, twin.get_submodule(name))
            stack.callback(attributes.pop, "forward")
        yield twin


def _run_twin(module: nn.Module, twin: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call `twin` in place of `module`, with the parameters, the modes and the hooks of `module`."""
    training = {path: inner.training for path, inner in module.named_modules()}
    for path, inner in twin.named_modules():
        inner.training = training.get(path, module.training)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    with borrowed_hooks(twin, module):
        return torch.func.functional_call(twin, dict(tensors), args, kwargs)


def named_points(model: fx.GraphModule, names: str | Collection[str]) -> dict[str, list[TracePoint]]:
    """Return the points that each name matches. Raise ValueError for a name without matches."""
    modules = {path for path, _ in model.named_modules()}
    points = [point for point in points_of(graph_of(model)) if point.written_out or point.module in modules]
    return {name: _matching_points(model, points, name) for name in ([names] if isinstance(names, str) else names)}


def _matching_points(model: fx.GraphModule, points: Sequence[TracePoint], name: str) -> list[TracePoint]:
    matched = [point for point in points if _is_match(name, point.name)]
    value, _, unit = name.rpartition(".")
    if not matched and (unit == "*" or unit.isdecimal()):
        matched = [part for point in points if _is_match(value, point.name) for part in point.units(unit)]
    if matched:
        return matched
    word = re.sub(r"\.\d+\.", ".*.", name)
    help = similar_name_help("a value", word, dict.fromkeys(point.pattern for point in points))
    raise ValueError(
        f"`{graph_of(model).name}` has no value {quoted(name)}: {help or '`tfkit show SPEC --points` lists its values'}"
    )


def _is_match(name: str, point: str) -> bool:
    return re.fullmatch(re.escape(name).replace(r"\*", "[^.]+"), point) is not None


@dataclass(eq=False)
class Hook:
    """The hook of a value, which stores the value, or replaces it if `edit` is set."""

    point: TracePoint
    edit: Edit | None = None
    positions: tuple[int, ...] | None = None
    """The positions that are replaced; None for all."""
    values: dict[str, Any] = field(default_factory=dict)
    ran: bool = False
    past: Past | None = None
    """The state before this call in incremental decoding; None if the model reads entire sequences."""
    context: Context | None = None
    """The context of the enclosing mixer."""

    def __post_init__(self) -> None:
        self.pending = set(self.positions or ())
        if self.point.read_only and self.edit is not None:
            raise ValueError(f"`{self.point.name}` can only be read: write the values that are added to the stream")
        if self.positions is not None and (self.point.layer is None or self.point.position_axis is None):
            raise ValueError(f"`{self.point.name}` cannot be written at positions: choose a value of a layer, with a t")

    def on_node(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the state of earlier tokens that the stack of the layer takes."""
        self.past = kwargs.get("past")

    def on_mixer(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Store the context of the mixer, which determines the order of its tokens."""
        self.context = args[1]

    def on_state(self, _module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        """Visit a state after the mixer has updated it."""
        cache = args[1].cache
        if cache is not None:
            state = cache.tensors[self.point.state]
            state.copy_(self._visit(state))

    def on_input(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Visit an argument."""
        index = self.point.argument
        assert index is not None
        return (*args[:index], self._visit(args[index]), *args[index + 1 :])

    def on_output(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Visit the output, or one of its items, as some nodes also return a padding mask."""
        if not isinstance(output, tuple):
            return self._visit(output)
        item = self.point.item
        return (*output[:item], self._visit(output[item]), *output[item + 1 :])

    def _visit(self, value: Tensor) -> Tensor:
        """Store or replace a value. Return the value with which the model continues."""
        self.ran = True
        unit = self.point.unit
        ordered = self._moved(restore_order, value)
        selected = ordered if unit is None else ordered.select(*unit)
        result = selected
        if self.edit is None:
            self._keep(selected)
        else:
            result = self._edited(selected, self.edit)
        # The model continues with the tensor that was read, in its original order, so that gradients reach it.
        result = result if unit is None else ordered.select_scatter(result, *unit)
        return self._moved(order_tokens, result)

    def _moved(self, function: Callable[[Tensor, Context], Tensor], value: Tensor) -> Tensor:
        """Move the positions of a value in a mixer."""
        axis, unit = self.point.position_axis, self.point.unit
        if self.context is None or axis is None:
            return value
        axis += unit is not None and unit[0] <= axis
        x = value.movedim(axis, 1)
        return function(x.flatten(2), self.context).reshape(x.shape).movedim(1, axis)

    def _edited(self, value: Tensor, edit: Edit) -> Tensor:
        """Return the value with an edit at the chosen positions."""
        axis = self.point.position_axis
        if axis is None or (self.positions is None and not isinstance(edit, Tensor)):
            return self._replacement(value, edit)
        start = self._start(axis)
        if isinstance(edit, Tensor) and self.past is not None:
            edit = _aligned_replacement(edit, value, axis, start)
        result = self._replacement(value, edit)
        if self.positions is None:
            return result
        size = value.size(axis)
        indices = {position: position - start if position >= 0 else size + position for position in self.positions}
        indices = {position: index for position, index in indices.items() if 0 <= index < size}
        self.pending -= indices.keys()
        index = torch.tensor([*indices.values()], dtype=torch.long, device=value.device)
        return value.index_copy(axis, index, result.index_select(axis, index))

    def _start(self, axis: int) -> int:
        """Return the position of the first item of an axis."""
        start = 0 if self.past is None else self.past.start
        if start and self.point.sizes[axis] == "k":
            # Cache slots may be in a different order than the tokens.
            raise ValueError(f"`{self.point.name}` must be written by a function when a model reads step by step")
        return start

    def _replacement(self, value: Tensor, edit: Edit) -> Tensor:
        # A function may write in place, and the value may be the residual stream.
        result = edit if isinstance(edit, Tensor) else edit(value.clone())
        if isinstance(result, Tensor) and (result.shape, result.dtype) == (value.shape, value.dtype):
            return result
        got = f"{result.dtype} {[*result.shape]}" if isinstance(result, Tensor) else value_text(result)
        expected = f"{value.dtype} {[*value.shape]}"
        raise ValueError(f"the replacement of `{self.point.name}` must be a tensor, {expected}; got {got}")

    def _keep(self, value: Tensor) -> None:
        # Copy the value: it may be a cache, for instance, which later steps overwrite.
        value = value if value.requires_grad else value.clone()
        name = self.point.name
        if name not in self.values:
            self.values[name] = value
        elif isinstance(self.values[name], list):
            self.values[name].append(value)
        else:
            self.values[name] = [self.values[name], value]


def _aligned_replacement(new: Tensor, value: Tensor, axis: int, start: int) -> Tensor:
    """Return the positions of `new` that this step reads, followed by the positions that only `value` has."""
    if new.dim() != value.dim():
        return new
    size = value.size(axis)
    count = min(max(new.size(axis) - start, 0), size)
    piece = new.narrow(axis, min(start, new.size(axis)), count)
    if count and piece.shape != value.narrow(axis, 0, count).shape:
        return new
    return torch.cat([piece, value.narrow(axis, count, size - count)], axis) if count else value
