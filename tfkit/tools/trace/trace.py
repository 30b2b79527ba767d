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

from tfkit.arguments import checked, shown
from tfkit.building.builder import graph_of
from tfkit.building.model import BuiltModel, unwrapped, whole
from tfkit.errors import quoted, similar
from tfkit.nn import order_tokens, restore_order
from tfkit.tools.show.points import Point, points_of
from tfkit.tools.trace.attention_weights import written_out
from tfkit.torch_private.hooks import borrowed_hooks

Edit: TypeAlias = Callable[..., Any] | Tensor


@checked
def trace(
    model: BuiltModel,
    *,
    read: str | Collection[str] = (),
    write: Mapping[str, Callable[..., Any] | Tensor] | None = None,
) -> AbstractContextManager[dict[str, Any]]:
    """Return a context in which calls of the model read and write values inside it.

        with tfkit.trace(model, read="decoder.layers.*.stream.out", write={"decoder.layers.1.ffn.out": f}) as values:
            model(tokens)
        values["decoder.layers.1.stream.out"]

    A name is `NODE` for the output of a node, or begins with `NODE.layers.I.`, the layer: `stream.in` and `stream.out`
    for the residual stream, `NAME.in` and `NAME.out` for the module of a sublayer, such as `attention.out`, and for
    values inside the sublayer `attention.q`, `k`, `v`, `scores`, `weights` and `heads`, before the output projection,
    and `ffn.hidden`. `tfkit show SPEC --points` lists the names of a spec with their shapes. A layer whose residual
    replaces the stream by several streams has no `stream.in` and no `stream.out`.

    If `scores` or `weights` are named, the stack of their layers runs with its attention written out, whatever the
    backend of the model, so other values may differ by rounding.

    Gradients flow through both reads and writes. Values that need no gradient are copies. The hooks are removed when
    the context ends, and a model without a context has none. They also run in `generate`, in `CachedModel` and in
    wrappers that call the model's modules, but not in code that torch has compiled.

    Args:
        model: a model that `tfkit.build` returned, or a wrapper of it.
        read: names of values. `*` is any one part of a name, such as the number of a layer.
        write: by name, a function of the value that returns its replacement, or the replacement. Names that are also
            read are read after they are written.

    Returns:
        A context of the values by name, in the order in which they are computed. A value that is computed several
        times, as in layers that share weights, or at each step of `generate`, is a list of tensors.

    Raises:
        ValueError: a name does not exist, a replacement has a different shape or dtype, a value was not computed before
            the context ended, or the model was built with `recompute`, which runs layers a second time.
    """
    built, edits = unwrapped(model), write or {}
    reads = [read] if isinstance(read, str) else read
    modules = {path for path, _ in built.named_modules()}
    points = [point for point in points_of(graph_of(built)) if point.written_out or point.module in modules]
    matches = {name: _matching(built, points, name) for name in (*reads, *edits)}
    read_points = {point for name in reads for point in matches[name]}
    hooks = []
    for point in dict.fromkeys(point for matched in matches.values() for point in matched):
        hooks.append(Hook(point, point in read_points, [edits[name] for name in edits if point in matches[name]]))
    return _traced(built, hooks, matches)


@contextmanager
def _traced(
    model: fx.GraphModule, hooks: Sequence[Hook], matches: Mapping[str, Collection[Point]]
) -> Iterator[dict[str, Any]]:
    with hooked(model, hooks) as values:
        yield values
    ran = {hook.point for hook in hooks if hook.ran}
    for name, points in matches.items():
        if ran.isdisjoint(points):
            raise ValueError(f"{quoted(name)} was not computed: call the model, not compiled, before the trace ends")


@contextmanager
def hooked(model: fx.GraphModule, hooks: Sequence[Hook]) -> Iterator[dict[str, Any]]:
    """Register hooks, and remove them at the end; the value is a mapping that the hooks fill."""
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
            if hook.point.argument is None:
                handle = module.register_forward_hook(hook.on_output)
            else:
                handle = module.register_forward_pre_hook(hook.on_input)
            stack.callback(handle.remove)
        yield values


@contextmanager
def _written_out(model: fx.GraphModule, names: Collection[str]) -> Iterator[fx.GraphModule]:
    """Run some nodes of a model with their attention written out; the value is the model whose nodes run instead."""
    twin, _ = written_out(whole(model))
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            attributes, previous = module.__dict__, {"forward": module.forward} if "forward" in vars(module) else {}
            stack.callback(attributes.update, previous)
            attributes["forward"] = partial(_run, module, twin.get_submodule(name))
            stack.callback(attributes.pop, "forward")
        yield twin


def _run(module: nn.Module, twin: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call `twin` in place of `module`, with the parameters, the modes and the hooks of `module`."""
    training = {path: inner.training for path, inner in module.named_modules()}
    for path, inner in twin.named_modules():
        inner.training = training.get(path, module.training)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    with borrowed_hooks(twin, module):
        return torch.func.functional_call(twin, dict(tensors), args, kwargs)


def _matching(model: fx.GraphModule, points: Sequence[Point], name: str) -> list[Point]:
    """Return the values that a name with `*` stands for; raise ValueError if there is none."""
    pattern = re.compile(re.escape(name).replace(r"\*", "[^.]+"))
    matched = [point for point in points if pattern.fullmatch(point.name)]
    if matched:
        return matched
    word = re.sub(r"\.\d+\.", ".*.", name)
    help = similar("a value", word, dict.fromkeys(point.pattern for point in points))
    raise ValueError(
        f"`{graph_of(model).name}` has no value {quoted(name)}: {help or '`tfkit show SPEC --points` lists its values'}"
    )


@dataclass
class Hook:
    """The hook of one value, which edits the value and then keeps it if `reads`."""

    point: Point
    reads: bool = True
    edits: Sequence[Edit] = ()
    values: dict[str, Any] = field(default_factory=dict)
    ran: bool = False

    def on_input(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Edit and keep an argument."""
        index = self.point.argument
        assert index is not None
        return (*args[:index], self._visit(args[index], args), *args[index + 1 :])

    def on_output(self, _module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Edit and keep the output, or an item of it: some nodes return their padding mask as well."""
        if not isinstance(output, tuple):
            return self._visit(output, args)
        item = self.point.item
        return (*output[:item], self._visit(output[item], args), *output[item + 1 :])

    def _visit(self, value: Tensor, args: tuple[Any, ...]) -> Tensor:
        """Edit and keep a value; return the value that the model goes on with."""
        context = args[1] if self.point.mixed else None
        value = value if context is None else restore_order(value, context)
        for edit in self.edits:
            value = self._edited(edit, value)
        self.ran = True
        if self.reads:
            self._keep(value)
        return value if context is None else order_tokens(value, context)

    def _edited(self, edit: Edit, value: Tensor) -> Tensor:
        # A function may write in place, and the value may be the residual stream.
        result = edit if isinstance(edit, Tensor) else edit(value.clone())
        if isinstance(result, Tensor) and (result.shape, result.dtype) == (value.shape, value.dtype):
            return result
        got = f"{result.dtype} {[*result.shape]}" if isinstance(result, Tensor) else shown(result)
        expected = f"{value.dtype} {[*value.shape]}"
        raise ValueError(f"the replacement of `{self.point.name}` must be a tensor, {expected}; got {got}")

    def _keep(self, value: Tensor) -> None:
        # A cache, for instance, is a tensor that later steps write to.
        value = value if value.requires_grad else value.clone()
        name = self.point.name
        if name not in self.values:
            self.values[name] = value
        elif isinstance(self.values[name], list):
            self.values[name].append(value)
        else:
            self.values[name] = [self.values[name], value]
