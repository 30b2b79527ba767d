"""A model that is checked: its graph, its weights, and its inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import build
from tfkit.building.edits import MeasuredModel, copied_model
from tfkit.building.initialize import generator_of
from tfkit.component import (
    AttentionConfig,
    Component,
    FieldPath,
    Layer,
    Layers,
    Step,
    SublayerConfig,
    leaf_values,
    with_values,
)
from tfkit.errors import Invalid, SpecError
from tfkit.graph.decode_split import wire_of
from tfkit.graph.expand import Graph, Node, as_list, expand
from tfkit.graph.input_shapes import fixed_length, max_len
from tfkit.plugin.manager import Plugins
from tfkit.reference import Kinds
from tfkit.tools.check.measure import EDITED, ILL_CONDITIONED, Deviation, require
from tfkit.tools.check.runs import Choices, Inputs, Padding, cast_inputs, eval_outputs, example_inputs
from tfkit.tools.common.model_inputs import IMAGES

M = TypeVar("M", bound=nn.Module)
LENGTH = 12
"""Tokens of a sequence, more than the windows of a reduced model."""
PADDING = 2
"""Additional positions of padding."""
CHUNK = 5
"""Largest number of positions of a chunk: a sequence has three chunks, and documents begin at and within chunks."""

DRAWS = 5
"""Number of random roundings of the weights that estimate the effect of rounding on a model."""


@dataclass(frozen=True)
class Attends:
    """An attention in a layer: the path of its module, and the description of the sublayer."""

    path: str
    step: Step

    @property
    def config(self) -> AttentionConfig:
        """Its config."""
        assert isinstance(self.step.config, AttentionConfig)
        return self.step.config


@dataclass(frozen=True)
class ModelUnderTest:
    """A model that is checked.

    Unless it has trained weights, all parameters are drawn at random, including biases and norms. Initial values hide
    faults, because they are zero, one, or so small that a sublayer has almost no effect.

    Attributes:
        graph: its graph.
        plugins: the plugins that its spec was read with.
        seed: of all random numbers.
        weights: the trained weights; None for random weights.
        component: the component that the model tests, if any.
        kinds: reference functions of kinds, in addition to the functions of `tfkit.reference`.
        module: the built model that is checked; None for a model that is built from the graph.
        edits: the differences of the built model from its spec.
        chunk: the largest number of positions of a chunk in components with chunks; None for their own numbers.
    """

    graph: Graph
    plugins: Plugins
    seed: int = 0
    weights: Path | None = None
    component: type[Component] | None = None
    kinds: Kinds | None = None
    module: fx.GraphModule | None = None
    edits: tuple[str, ...] = ()
    chunk: int | None = CHUNK
    of: ClassVar[Literal["model"]] = "model"

    @property
    def name(self) -> str:
        """The name of the spec."""
        return self.graph.name

    @cached_property
    def functions(self) -> Kinds:
        """The reference functions of plugins, and `kinds`, which replace them. Raises SpecError if a hook fails."""
        return reference_functions(self.plugins, self.kinds or {})

    @property
    def measured(self) -> MeasuredModel:
        """The model as an argument of tools."""
        return MeasuredModel(self.graph, self.module, self.edits)

    @property
    def has_weights(self) -> bool:
        """True if its weights come from a file or a built model, so that they are not drawn."""
        return self.weights is not None or self.module is not None

    def build(self, graph: Graph | None = None, **options: Any) -> fx.GraphModule:
        """Build the model of the graph, or of a second graph with the same weights where shapes fit, in eval mode."""
        if self.module is not None and graph is None and not options:
            return self._with_short_chunks(copied_model(self.module).eval())
        require(not self.edits, EDITED)
        model: fx.GraphModule
        if graph is None and self.weights is not None:
            model = build(self.graph, weights=self.weights, allow_change=True, **options)
        else:
            model = self.fill(build(graph or self.graph, seed=self.seed, **options))
        return self._with_short_chunks(model.eval())

    @cached_property
    def with_full_chunks(self) -> ModelUnderTest:
        """A copy of the model with chunks of full size, as files and costs need it; the model itself if it has none."""
        return replace(self, chunk=None) if chunk_sizes(self.model) else self

    def _with_short_chunks(self, model: fx.GraphModule) -> fx.GraphModule:
        """Reduce the chunks of a model to at most `chunk` positions, in place."""
        for path, size in chunk_sizes(model).items():
            if size is not None and self.chunk is not None:
                owner, _, name = path.rpartition(".")
                setattr(model.get_submodule(owner), name, min(self.chunk, size))
        return model

    def fill(self, model: fx.GraphModule) -> fx.GraphModule:
        """Copy the weights to a model, in place; weights without a counterpart of that name and shape become random."""
        redraw_parameters(model, self.seed)
        if self.has_weights:
            state, source = model.state_dict(), self.model.state_dict()
            for name in state.keys() & source.keys():
                if state[name].shape == source[name].shape:
                    state[name].copy_(source[name])
        return model

    @cached_property
    def model(self) -> fx.GraphModule:
        """The model, in eval mode; no property may change it."""
        return self.build()

    def changed(self, values: Mapping[FieldPath, Any]) -> Graph:
        """Replace the values at some paths and return the graph; raise ValueError or SpecError if they are invalid."""
        require(not self.edits, EDITED)
        spec = self.graph.spec
        return expand(replace(spec, model=with_values(spec.model.model_copy(update={"parameters": None}), values)))

    @cached_property
    def values(self) -> dict[FieldPath, Any]:
        """The values of the spec by path, except values that every layer variant, or `same`, replaces."""
        replaced = {
            ("graph", node.name, name)
            for node in self.graph.nodes
            if node.stack is not None and "base" not in node.stack.variants
            for name in type(node.stack.layers[0].config).model_fields
            if name != "norm"  # the final norm uses it
        }
        replaced |= {("graph", node.name, "norm") for node in self.stacks if node.stack and not _has_norms(node.stack)}
        shared = {("graph", node.name) for node in self.graph.nodes if node not in self.graph.built_nodes}
        values = leaf_values(self.graph.spec.model)
        return {path: value for path, value in values if path[:2] not in shared and path[:3] not in replaced}

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        limit = max_len(self.graph)
        return fixed_length(self.graph) or (LENGTH if limit is None else max(1, min(LENGTH, limit - PADDING)))

    @property
    def longest(self) -> int:
        """Tokens of a long sequence: the limit of the spec, or three times `length`."""
        return fixed_length(self.graph) or min(3 * LENGTH, max_len(self.graph) or 3 * LENGTH)

    def inputs(
        self,
        *,
        batch: int = 3,
        length: int | None = None,
        padding: Padding = "none",
        seed: int = 0,
        images: int = IMAGES,
    ) -> dict[str, Tensor]:
        """Return random inputs."""
        options: dict[str, Any] = {"batch": batch, "padding": padding, "seed": self.seed + seed, "images": images}
        return example_inputs(self.graph, length=length or self.length, **options)

    def run(self, inputs: Inputs, model: fx.GraphModule | None = None) -> list[Tensor]:
        """Return the outputs in eval mode, without gradients."""
        return eval_outputs(model or self.model, inputs)

    def effect_of_rounding(self, dtype: torch.dtype, error: Callable[[Tensor, Tensor], float]) -> float:
        """Return the error of the outputs, in float64, if each weight is rounded up or down at random.

        Weights are rounded to `dtype`, and the error is the largest of a few draws. If it is large, the model is
        ill-conditioned, and no implementation in this dtype is much more accurate.
        """
        exact, changed = (copy.deepcopy(self.model).double() for _ in range(2))
        inputs, choices = cast_inputs(self.inputs(), torch.float64), Choices()
        with choices:
            expected, errors = self.run(inputs, exact), []
        for draw in range(DRAWS):
            for (name, weight), source in zip(changed.named_parameters(), exact.parameters(), strict=True):
                generator = generator_of(self.seed + draw, f"{name}.rounded", weight.device)
                sign = torch.randint(2, weight.shape, generator=generator).to(weight) * 2 - 1
                weight.data = source * (1 + sign * torch.finfo(dtype).eps / 2)
            with choices:
                errors += [error(*pair) for pair in zip(self.run(inputs, changed), expected, strict=True)]
        return max(errors)

    @property
    def padded(self) -> list[str]:
        """The inputs that may be padded."""
        return [name for name, signal in self.graph.inputs.items() if signal.mask]

    @cached_property
    def causal(self) -> tuple[str, ...]:
        """The inputs on whose later positions no output depends, according to the spec."""
        return tuple(
            name
            for name, signal in self.graph.inputs.items()
            if signal.type in ("tokens", "sequence") and not signal.optional and _is_causal(self.graph, name)
        )

    @property
    def stacks(self) -> list[Node]:
        """The nodes that are stacks."""
        return [node for node in self.graph.built_nodes if node.stack is not None]

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """The layers of all stacks, by the paths of their modules."""
        return {
            f"{node.name}.layers.{number}": layer
            for node in self.graph.built_nodes
            for number, layer in enumerate(node.stack.layers if node.stack else ())
        }

    @cached_property
    def attentions(self) -> tuple[Attends, ...]:
        """The attentions of all stacks, in order."""
        return tuple(
            Attends(f"{path}.{step.name}", step)
            for path, layer in self.layers.items()
            for step in layer.steps
            if isinstance(step.config, AttentionConfig)
        )


def _has_norms(stack: Layers) -> bool:
    """Return True if the stack uses its `norm`: a norm of a layer or of the stack, or an addition as residual."""
    steps = [step for layer in stack.layers for step in layer.steps]
    normed = any(step.norm_in or step.norm_out or step.norm_after for step in steps)
    return normed or stack.final_norm is not None or any(step.read is None for step in steps)


def chunk_sizes(model: fx.GraphModule) -> dict[str, int | None]:
    """Return the number of positions of a chunk by the path of its attribute; None if it is not a positive integer."""
    sizes: dict[str, int | None] = {}
    for path, component in model.meta["components"].items():
        for name in component.chunk_attributes if isinstance(component, SublayerConfig) else ():
            try:
                size = attrgetter(name)(model.get_submodule(path))
            except AttributeError:
                size = None
            sizes[f"{path}.{name}"] = size if type(size) is int and size > 0 else None
    return sizes


def redraw_parameters(model: M, seed: int) -> M:
    """Draw all parameters of a model at random, each from the seed and its name, in place.

    A matrix preserves the size of its input. All other parameters move away from their initial values.
    """
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                generator = generator_of(seed, f"{path}.{name}.redrawn", parameter.device)
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
                if parameter.dim() < 2:
                    parameter.add_(drawn * 0.2)
                elif isinstance(module, nn.Embedding):
                    parameter.copy_(drawn * 0.5)
                else:
                    inputs = parameter[0].numel() if isinstance(module, nn.Conv1d) else parameter.size(-1)
                    parameter.copy_(drawn / math.sqrt(inputs))
    return model


def _is_causal(graph: Graph, name: str) -> bool:
    """Return True if no node between an input and the outputs lets a position depend on a later position."""
    reached = {name}
    for node in graph.nodes:
        fields = [field for field, source in node.wires.items() if reached & {*as_list(source)}]
        fields = [field for field in fields if wire_of(node, field).value == "output"]
        if not fields:
            continue
        if any(field not in ("input", "inputs", "layer_features") for field in fields) or not _keeps_order(node):
            return False
        reached.add(node.name)
    return any(output in reached for output in graph.outputs)


def _keeps_order(node: Node) -> bool:
    """Return True if no position of a node's output depends on a later position of its input."""
    if node.stack is not None:
        masks = [
            step.mask
            for layer in node.stack.layers
            for step in layer.steps
            if isinstance(step.config, AttentionConfig) and not step.reads_memory
        ]
        configs = [step.config for layer in node.stack.layers for step in layer.steps]
        ordered = all(config.causal for config in configs if isinstance(config, SublayerConfig))
        one_way = node.stack.prefix is None and node.stack.blocks is None
        return one_way and ordered and all(mask is not None and mask.causal for mask in masks)
    try:
        return node.output.type != "vector" and node.config.decoding(node.signals) is not None
    except Invalid:
        return False


# ---- values of a spec ----


def reference_functions(plugins: Plugins, kinds: Kinds) -> Kinds:
    """Return the reference functions of plugins, and `kinds`, which replace them. Raises SpecError if a hook fails."""
    answers = plugins.hooks.call("tfkit_reference", _returned_functions)
    if answers.faults:
        raise SpecError(*answers.faults)
    merged: dict[str, dict[str, Callable[..., Any]]] = {}
    for functions_by_slot in (*(functions for _, functions in reversed(answers.values)), kinds):
        for slot, functions in functions_by_slot.items():
            merged.setdefault(slot, {}).update(functions)
    return merged


def _returned_functions(returned: object) -> Kinds:
    """Return the functions that a hook returned; raise TypeError if it returned anything else."""
    if not isinstance(returned, Mapping) or not all(
        isinstance(kinds, Mapping) and all(map(callable, kinds.values())) for kinds in returned.values()
    ):
        raise TypeError(f"returned {type(returned).__name__}, not functions by slot and kind")
    return returned


def allow_rounding(
    subject: ModelUnderTest,
    deviations: Iterable[Deviation],
    dtype: torch.dtype,
    error: Callable[[Tensor, Tensor], float],
    *,
    runs: int = 2,
) -> Iterator[Deviation]:
    """Raise the limits of deviations between rounded runs to the error that the conditioning of the model explains.

    By backward error analysis, a run that rounds each result has about the same error as an exact run with rounded
    weights. A limit grows by at most the factor `ILL_CONDITIONED`; larger deviations remain failures.

    Args:
        subject: the model.
        deviations: yielded unchanged unless they are broken.
        dtype: the type of the rounded runs.
        error: the measure of the deviations.
        runs: the number of rounded runs among the two that are compared.
    """
    for deviation in deviations:
        largest = ILL_CONDITIONED * deviation.limit
        if deviation.broken and deviation.error <= largest:
            explained = 2 * runs * subject.effect_of_rounding(dtype, error)
            yield replace(deviation, limit=max(deviation.limit, min(explained, largest)))
        else:
            yield deviation
