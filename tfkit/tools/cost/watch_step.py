"""Observes a step of a model on the meta device, in which equal layers run only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from tfkit.building.builder import graph_of
from tfkit.component import AttentionConfig, Layer, MaskConfig, Step
from tfkit.nn import Context
from tfkit.tools.common.ownership import owners_of
from tfkit.tools.cost.counter import DeviceKernels, Kernels, Observer, PairAxes, Position, Tallies, Tally, storage_bytes
from tfkit.tools.cost.model_step import StepFunction
from tfkit.torch_private.dispatch import unobserved
from tfkit.torch_private.tensors import tensors_in

NO_MASK = MaskConfig()
MAX_QUERIES = 1024
"""Maximum number of queries whose keys are counted to estimate the fraction of pairs that a rule hides."""


@dataclass
class Seen:
    """Observations of each component by path: a tally of each run, and additional bytes that the component saves."""

    layers: LayerRuns
    tallies: dict[str, list[Tally]] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)


def watch_step(model: fx.GraphModule, step: StepFunction, *, kernels: Kernels, train: bool, merge: bool) -> Seen:
    """Run a step of a model on the meta device and observe it. The hooks stay, so the model must not be used again.

    With `train`, the step has a backward pass. With `merge`, equal layers run only once.
    """
    watch = Observer(model.parameters())
    layers = LayerRuns(watch, merge=merge)
    _watch_modules(model, watch, layers)
    with ExitStack() as around:
        around.enter_context(torch.set_grad_enabled(train))
        around.enter_context(saved_tensors_hooks(watch.keep, watch.restore))
        around.enter_context(watch)
        around.enter_context(DeviceKernels(watch, kernels))
        watch.read_all(tensors_in(step(watch)))
        layers.finish()
    return _gathered_observations(watch, layers)


def layers_of(model: fx.GraphModule) -> dict[str, Layer]:
    """Return all layers of stacks that the spec describes and the model has, by their paths."""
    stacks, modules = [(node.name, node.stack) for node in graph_of(model).nodes], dict(model.named_modules())
    layers = {f"{name}.layers.{i}": layer for name, stack in stacks if stack for i, layer in enumerate(stack.layers)}
    return {path: layer for path, layer in layers.items() if path in modules}


def frames_of(model: fx.GraphModule) -> list[str]:
    """Return the paths of the modules that are counted separately: components, and the layers of stacks."""
    layers = layers_of(model)
    return [path for path, part in owners_of(model).items() if part.owner == path or path in layers]


def _watch_modules(model: fx.GraphModule, watch: Observer, layers: LayerRuns) -> None:
    """Add hooks that report the running component, and the fraction that an attention's mask hides, to the observer."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    stacked = layers_of(model)
    steps = {f"{path}.{step.name}": step for path, layer in stacked.items() for step in layer.steps}

    def of_component(path: str, args: Any) -> Position:
        return Position(watch.position.record, path)

    def of_core(mask: MaskConfig, rule: nn.Module | None, args: Any) -> Position:
        return watch.position._replace(hidden=hidden_share(mask, args[0].size(-2), args[1].size(-2), rule))

    def of_attention(path: str, step: Step, n_heads: int, rule: nn.Module | None, args: Any) -> Position:
        n_queries, n_keys = args[0].size(1), _key_count(step, *args)
        axes = PairAxes(frozenset(n * n_queries for n in range(1, n_heads + 1) if n_heads % n == 0), n_keys)
        hidden = hidden_share(step.mask or NO_MASK, n_queries, n_keys, rule)
        return Position(watch.position.record, path, hidden, axes)

    for path in frames_of(model):
        if path in stacked:
            layers.take_over(path, modules[path], tuple(step.mask for step in stacked[path].steps))
            continue
        core, step = modules.get(f"{path}.core"), steps.get(path)
        if step is None or not isinstance(step.config, AttentionConfig):
            _add_position_hooks(modules[path], watch, partial(of_component, path))
            continue
        path_of_layer = path.removesuffix(f".{step.name}")
        rule = modules.get(f"{path_of_layer.partition('.layers.')[0]}.{stacked[path_of_layer].context}.rule")
        if core is None:
            _add_position_hooks(modules[path], watch, partial(of_attention, path, step, step.config.n_heads, rule))
            continue
        _add_position_hooks(modules[path], watch, partial(of_component, path))
        _add_position_hooks(core, watch, partial(of_core, step.mask or NO_MASK, rule))


def _add_position_hooks(module: nn.Module, watch: Observer, position_of: Callable[[Any], Position]) -> None:
    """Add hooks that set the observer's position, which may depend on a module's arguments, while the module runs."""
    module.register_forward_pre_hook(lambda _, args: watch.enter(position_of(args)))
    module.register_forward_hook(lambda *_: watch.leave())


def _key_count(step: Step, x: Tensor, context: Context) -> int:
    """Return the number of keys that the new tokens x [b, t, d_model] attend to, as `update_cache` returns them."""
    memory, cache = context.memory, context.cache
    if memory is not None:
        return memory.size(1)
    if cache is None:
        return x.size(1)
    return cache.tensors[0].size(2) if step.reads_memory else cache.after or cache.before + x.size(1)


def _gathered_observations(watch: Observer, layers: LayerRuns) -> Seen:
    seen = Seen(layers)
    for path, tally in watch.root.tallies.items():
        seen.tallies.setdefault(path, []).append(tally)
    for layer, run in layers.calls:
        for path, tally in run.tallies.items():
            seen.tallies.setdefault(layer + path.removeprefix(run.layer), []).append(tally)
    for path, n in layers.extra:
        seen.extra[path] = seen.extra.get(path, 0) + n
    return seen


def hidden_share(mask: MaskConfig, n_queries: int, n_keys: int, rule: nn.Module | None = None) -> float:
    """Return the fraction of masked pairs for queries at the last key positions. A prefix is ignored.

    With a `rule` and more than `MAX_QUERIES` queries, it is estimated from `MAX_QUERIES` evenly spaced queries.
    """
    if mask == NO_MASK:
        return 0.0
    first = n_keys - n_queries
    if rule is not None:
        with unobserved():
            count = min(n_queries, MAX_QUERIES)
            queries = first + torch.linspace(0, n_queries - 1, count, device="cpu").long()
            rows = [_visible_keys_by_rule(mask, rule, query, n_keys) for query in queries]
        return 1 - sum(rows) / (count * n_keys)
    seen = sum(_visible_keys(mask, position, n_keys) for position in range(first, n_keys))
    return 1 - seen / (n_queries * n_keys)


def _visible_keys_by_rule(mask: MaskConfig, rule: nn.Module, query: Tensor, n_keys: int) -> int:
    start = 0 if mask.left is None else max(0, int(query) - mask.left)
    end = n_keys if mask.right is None else min(n_keys, int(query) + mask.right + 1)
    return int(rule(query, torch.arange(start, max(start, end), device="cpu")).sum())


def _visible_keys(mask: MaskConfig, position: int, n_keys: int) -> int:
    start = 0 if mask.left is None else max(0, position - mask.left)
    end = n_keys if mask.right is None else min(n_keys, position + mask.right + 1)
    return max(0, end - start)


# ---- equal layers run once: a repetition has only an output and a number of saved bytes ----


class Like(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Return the shape and dtype of a tensor."""
        return cls(tensor.shape, tensor.dtype)

    def make(self) -> Tensor:
        """Create a tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class LayerRun(Tallies):
    """Observations of a call of a layer, which stand for all equal calls.

    Attributes:
        keeps: bytes that its forward saves for the backward, in addition to its inputs and outputs.
        frees: bytes that are freed if the layer saves only its inputs.
        forward: peak memory of the forward, above the level at its beginning.
        backward: peak memory of the backward, above the level at its beginning.
        held: positions of the arguments that it saves for the backward.
        shared: the arguments in `held` that other layers also receive, with the component that saves them.
        like: shape and dtype of its output.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.keeps = self.frees = self.forward = self.backward = 0
        self.held: list[int] = []
        self.shared: list[tuple[str, int]] = []
        self.like: Like | None = None


class Moment(NamedTuple):
    """A time interval: its peak memory or, for a layer, the memory level at its beginning."""

    level: int
    held: int
    """The bytes of `level` that layers save in addition to their inputs."""
    run: LayerRun | None = None
    backward: bool = False

    def peak(self, *, recompute: bool) -> int:
        """Return the peak memory. With `recompute`, layers save only their inputs and run again in the backward."""
        level = self.level - self.held * recompute
        if self.run is None:
            return level
        if not self.backward:
            return level + self.run.forward
        again = max(self.run.forward, self.run.keeps + self.run.backward)
        return level + (again if recompute else self.run.backward)


class Gradients(NamedTuple):
    """Bytes of the gradients of a layer's weights.

    Attributes:
        all: bytes of all gradients.
        added: bytes that a second backward of the same weights does not need, because it adds to existing gradients.
    """

    all: int
    added: int

    @classmethod
    def of(cls, layer: nn.Module) -> Gradients:
        """Return the sizes of the gradients of a layer."""
        sizes = [parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad]
        return cls(sum(sizes), sum(sizes) - max(sizes, default=0))


class LayerRuns:
    """Runs the layers of a model. With `merge`, equal layers run only once.

    Attributes:
        calls: every call of a layer, and the call that was observed for it.
        moments: the memory over time.
        extra: additional saved bytes, by component.
    """

    def __init__(self, watch: Observer, *, merge: bool = True) -> None:
        self.watch = watch
        self.merge = merge
        self.calls: list[tuple[str, LayerRun]] = []
        self.moments: list[Moment] = []
        self.extra: list[tuple[str, int]] = []
        self._runs: dict[Any, LayerRun] = {}
        self._held = 0
        self._open: tuple[LayerRun, int] | None = None
        self._shared: set[int] = set()
        self._trained: dict[str, Gradients] = {}
        self._anchor = torch.empty(0, device="meta", requires_grad=True)

    def take_over(self, path: str, layer: nn.Module, further: Any) -> None:
        """Intercept the calls of a layer. `further` distinguishes layers of equal structure."""
        forward, kind = layer.forward, (module_signature(layer), further)
        layer.forward = lambda *args: self._call(path, layer, forward, kind, args)

    def finish(self) -> None:
        """Close the last time interval."""
        self._close()
        self._split()

    def peak(self, *, recompute: bool) -> int:
        """Return the peak memory."""
        return max(moment.peak(recompute=recompute) for moment in self.moments)

    def _call(self, path: str, layer: nn.Module, forward: Callable[..., Any], kind: Any, args: Any) -> Any:
        tensors, number = list(tensors_in(args)), self.watch.live.number
        # A layer with wires returns more than x.
        wired = any(isinstance(argument, Context) and argument.wires is not None for argument in args)
        merge = self.merge and not wired
        key = (kind, tuple(_call_properties(args)), torch.is_grad_enabled()) if merge else path
        run = self._runs.get(key) if merge else None
        if run is None:
            run, out = self._observe(path, forward, args, tensors)
            self._runs[key] = run
        else:
            out = self._repeat(path, layer, run, tensors)
        self.calls.append((path, run))
        for component, i in run.shared:
            if number(tensors[i]) not in self._shared:
                self._shared.add(number(tensors[i]))
                self.extra.append((path + component.removeprefix(run.layer), storage_bytes(tensors[i])))
        return out

    def _observe(
        self, path: str, forward: Callable[..., Any], args: Any, tensors: list[Tensor]
    ) -> tuple[LayerRun, Any]:
        """Run a layer, and record its observations."""
        watch, live, saved = self.watch, self.watch.live, set(self.watch.kept)
        number = live.number
        self._split()
        level, run = live.level, LayerRun(path)
        with watch.inside(Position(run, path)):
            result = forward(*args)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        run.like = Like.of(out)
        run.keeps, run.forward = live.level - level - storage_bytes(out), live.peak - level
        self.moments.append(Moment(level, self._held, run))
        live.peak = live.level
        run.held = [i for i, tensor in enumerate(tensors) if number(tensor) in watch.kept]
        run.frees = run.keeps - (0 if 0 in run.held else storage_bytes(tensors[0]))
        run.shared = list(self._shared_of(run, tensors, saved))
        if out.requires_grad:
            self._held += run.frees
            out.register_hook(lambda grad: self._begin(run))
            if tensors[0].requires_grad:
                tensors[0].register_hook(lambda grad: self._close(run))
        return run, result

    def _shared_of(self, run: LayerRun, tensors: list[Tensor], saved: set[int]) -> Iterator[tuple[str, int]]:
        """Yield the tensors that the layer saves in addition to its input, which other layers may also save."""
        first, *keys = [self.watch.live.number(tensor) for tensor in tensors]
        for i, (key, tensor) in enumerate(zip(keys, tensors[1:], strict=True), 1):
            path = next((path for path, tally in run.tallies.items() if tally is self.watch.kept.get(key)), None)
            if key not in saved and path is not None and key != first:
                run.tallies[path].saved -= storage_bytes(tensor)
                yield path, i

    def _repeat(self, path: str, layer: nn.Module, run: LayerRun, tensors: list[Tensor]) -> Tensor:
        """Return the output of a layer that equals a layer that already ran."""
        watch, live = self.watch, self.watch.live
        self._split()
        self.moments.append(Moment(live.level, self._held, run))
        for tensor in tensors:
            watch.read(tensor, Tally())
        watch.keeps = False
        with watch.inside(Position(Tallies(), path)):
            out: Tensor = Twin.apply(self, path, layer, run, self._anchor, *tensors)
        watch.keeps = True
        if out.requires_grad:
            for i in run.held:
                watch.kept.setdefault(live.number(tensors[i]), Tally())
            live.grow(run.keeps)
            self._held += run.frees
        live.peak = live.level
        return out

    def repeat_backward(self, path: str, layer: nn.Module, run: LayerRun) -> None:
        """Record the memory that the backward of such a layer frees, and the gradients that it creates."""
        live = self.watch.live
        self._close()
        self._split()
        gradients = self._trained.get(path)
        added = gradients.added if gradients else 0
        self.moments.append(Moment(live.level - added, self._held, run, backward=True))
        self._held -= run.frees
        live.grow(-run.keeps)
        if gradients is None:
            self._trained[path] = Gradients.of(layer)
            live.grow(self._trained[path].all)
        live.peak = live.level

    def _begin(self, run: LayerRun) -> None:
        """Begin the backward of a layer."""
        self._close()
        self._split()
        self._open = run, self.watch.live.level

    def _close(self, run: LayerRun | None = None) -> None:
        """End the backward of the layer of `run`, or of any layer."""
        if self._open is None or (run is not None and self._open[0] is not run):
            return
        (open_run, level), live = self._open, self.watch.live
        open_run.backward = live.peak - level
        gradients = self._trained.pop(open_run.layer, Gradients(0, 0))
        self.moments.append(Moment(level - gradients.added, self._held, open_run, backward=True))
        self._held -= open_run.frees
        live.grow(-gradients.all)  # the allocator now counts them
        self._open, live.peak = None, live.level

    def _split(self) -> None:
        """Close a time interval."""
        self.moments.append(Moment(self.watch.live.peak, self._held))
        self.watch.live.peak = self.watch.live.level


class Twin(torch.autograd.Function):
    """A layer equal to an observed one: a stand-in of the same shape, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, layers: LayerRuns, path: str, layer: nn.Module, run: LayerRun, anchor: Tensor, *tensors: Tensor
    ) -> Any:
        ctx.back = lambda: layers.repeat_backward(path, layer, run)
        ctx.like = [Like.of(tensor) for tensor in tensors]
        ctx.save_for_backward(*[tensors[i] for i in run.held])
        assert run.like is not None
        return run.like.make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.back()
        needed = ctx.needs_input_grad[5:]
        return *[None] * 5, *[like.make() if need else None for like, need in zip(ctx.like, needed, strict=True)]


def _call_properties(tree: Any) -> Iterator[Any]:
    """Yield the properties of a call that determine its cost: shapes, dtypes, and all arguments except tensors."""
    if isinstance(tree, Tensor):
        yield tree.shape, tree.dtype, tree.requires_grad
    elif isinstance(tree, list | tuple):
        yield len(tree)
        for item in tree:
            yield from _call_properties(item)
    else:
        yield tree


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Return a value that is equal for equal modules: classes, parameter shapes and plain attributes, by name."""
    return tuple(
        (path, type(child), tuple(_plain_attributes(vars(child).items())), tuple(_parameter_shapes(child._parameters)))
        for path, child in module.named_modules()
    )


def _plain_attributes(attributes: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in attributes:
        if not name.startswith("_"):
            yield name, value if isinstance(value, bool | int | float | str | None) else _attribute_identity(value)


def _attribute_identity(value: Any) -> Any:
    if isinstance(value, list | tuple | Mapping):
        return repr(value)
    return id(value)


def _parameter_shapes(parameters: Mapping[str, nn.Parameter | None]) -> Iterator[Any]:
    for name, parameter in parameters.items():
        yield name, None if parameter is None else (parameter.shape, parameter.dtype, parameter.requires_grad)
