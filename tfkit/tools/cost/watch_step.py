"""One step of a model on the meta device, watched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from tfkit.building.builder import graph_of
from tfkit.component import AttentionConfig, Layer, MaskConfig
from tfkit.tools.common.ownership import owners_of
from tfkit.tools.cost.kernels import Kernels, OwnKernels
from tfkit.tools.cost.layers import Layers
from tfkit.tools.cost.observe import Place, Tally, Watch
from tfkit.tools.cost.steps import Step
from tfkit.torch_private.tensors import tensors_in

EVERYTHING = MaskConfig()


@dataclass
class Seen:
    """The observations about each component, by path: a tally of each of its runs, and further bytes that it keeps."""

    layers: Layers
    tallies: dict[str, list[Tally]] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)


def watch_step(model: fx.GraphModule, step: Step, *, kernels: Kernels, train: bool, merge: bool) -> Seen:
    """Run a step of a model on the meta device, and watch it; the model gets hooks, and is of no other use afterwards.

    There is a backward if `train`, and equal layers run once if `merge`.
    """
    watch = Watch(model.parameters())
    layers = Layers(watch, merge=merge)
    _watch_modules(model, watch, layers)
    with ExitStack() as around:
        around.enter_context(torch.set_grad_enabled(train))
        around.enter_context(saved_tensors_hooks(watch.keep, lambda tensor: tensor))
        around.enter_context(watch)
        around.enter_context(OwnKernels(watch, kernels))
        watch.read_all(tensors_in(step(watch)))
        layers.finish()
    return _gathered(watch, layers)


def layers_of(model: fx.GraphModule) -> dict[str, Layer]:
    """Return all layers of stacks, by their paths."""
    stacks = [(node.name, node.stack.layers) for node in graph_of(model).nodes if node.stack is not None]
    return {f"{name}.layers.{i}": layer for name, layers in stacks for i, layer in enumerate(layers)}


def frames_of(model: fx.GraphModule) -> list[str]:
    """Return the paths of the modules that are counted separately: components, and the layers of stacks."""
    layers = layers_of(model)
    return [path for path, part in owners_of(model).items() if part.owner == path or path in layers]


def _watch_modules(model: fx.GraphModule, watch: Watch, layers: Layers) -> None:
    """Tell a watch from now on which component is running, and how much the mask of an attention hides."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    stacked = layers_of(model)
    steps = {f"{path}.{step.name}": step for path, layer in stacked.items() for step in layer.steps}

    def of_component(path: str, args: Any) -> Place:
        return Place(watch.place.record, path)

    def of_core(mask: MaskConfig, args: Any) -> Place:
        return watch.place._replace(hidden=hidden_share(mask, args[0].size(-2), args[1].size(-2)))

    for path in frames_of(model):
        if path in stacked:
            layers.take_over(path, modules[path], tuple(step.mask for step in stacked[path].steps))
            continue
        _place(modules[path], watch, partial(of_component, path))
        core, step = modules.get(f"{path}.core"), steps.get(path)
        if core is not None and step is not None and isinstance(step.config, AttentionConfig):
            _place(core, watch, partial(of_core, step.mask or EVERYTHING))


def _place(module: nn.Module, watch: Watch, place_of: Callable[[Any], Place]) -> None:
    """Let a watch know the place of a module, which may depend on its arguments, while it runs."""
    module.register_forward_pre_hook(lambda _, args: watch.enter(place_of(args)))
    module.register_forward_hook(lambda *_: watch.leave())


def _gathered(watch: Watch, layers: Layers) -> Seen:
    seen = Seen(layers)
    for path, tally in watch.root.tallies.items():
        seen.tallies.setdefault(path, []).append(tally)
    for layer, run in layers.calls:
        for path, tally in run.tallies.items():
            seen.tallies.setdefault(layer + path.removeprefix(run.layer), []).append(tally)
    for path, n in layers.extra:
        seen.extra[path] = seen.extra.get(path, 0) + n
    return seen


def hidden_share(mask: MaskConfig, n_queries: int, n_keys: int) -> float:
    """Return the fraction of hidden pairs if the queries are at the last key positions. Ignore a prefix."""
    if mask == EVERYTHING:
        return 0.0
    first = n_keys - n_queries
    seen = sum(_seen(mask, position, n_keys) for position in range(first, n_keys))
    return 1 - seen / (n_queries * n_keys)


def _seen(mask: MaskConfig, position: int, n_keys: int) -> int:
    start = 0 if mask.left is None else max(0, position - mask.left)
    end = n_keys if mask.right is None else min(n_keys, position + mask.right + 1)
    return max(0, end - start)
