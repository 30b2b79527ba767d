"""The model of a run at its base sizes, and the factors of a parametrization as values of the model's spec.

Every factor of the forward pass is a value of the spec that is trained: `scale` of attention and of heads, and `scale`
of the addition of a residual. Saved models, exports and checks therefore contain it. Where the spec has no such value,
the run is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

from tfkit.component import (
    AttentionConfig,
    Config,
    FieldPath,
    Layer,
    MixerConfig,
    ResidualConfig,
    Scale,
    State,
    Step,
    parts,
    with_values,
)
from tfkit.errors import Invalid
from tfkit.graph.expand import Graph, Node, expand
from tfkit.run.contract import ParametrizationConfig
from tfkit.spec.document import MODEL
from tfkit.spec.load import Spec
from tfkit.spec.merge import Change
from tfkit.spec.provenance import Provenance
from tfkit.spec.tree import Mapping as TextMapping
from tfkit.spec.tree import Scalar

PARAMETRIZATION = "parametrization"
"""The key of a run."""


def base_changes(config: ParametrizationConfig, root: TextMapping, provenance: Provenance) -> Iterator[Change]:
    """Yield the changes of a run that give its model the base sizes."""
    for path, size in (config.base or {}).items():
        span = provenance.span((PARAMETRIZATION, "base", path)) or root.span
        yield Change(tuple((key, span) for key in path.split(".")), Scalar(size, span))


def base_numbers(spec: Spec, base: Spec) -> dict[str, float]:
    """Return every number that differs at the base sizes, by its path in a run.

    A run folder contains them instead of the sizes in the run's file, because in its model no value depends on others.
    Raises `Invalid` if the two models differ in more than numbers.
    """
    here, there = dict(parts((), spec.model)), dict(parts((), base.model))
    values = {path: value for path, value in there.items() if not isinstance(value, Config | tuple | Mapping)}
    changed: dict[Any, Any] = {path: value for path, value in values.items() if path not in here or here[path] != value}
    for path in here.keys() ^ there.keys() | {path for path, value in changed.items() if not _is_number(value)}:
        message = f"the base sizes must not change the components of the model; got a change of `{'.'.join(path)}`"
        raise Invalid("base", message)
    return {".".join((MODEL, *path)): value for path, value in changed.items() if _is_number(value)}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def with_factors(config: ParametrizationConfig, spec: Spec, base: Spec) -> Spec:
    """Return the spec with the factors of a parametrization; `base` is the spec at the base sizes.

    Raises `Invalid` if the two models differ in more than sizes, and for a factor that the spec cannot express.
    """
    if not config.rescales:
        return spec
    factors = _Factors(config, expand(base), expand(spec))
    values = factors.values()
    if not values:
        return spec
    scaled = replace(spec, model=with_values(spec.model, values))
    factors.check(expand(scaled))
    return scaled


def depth_ratio(node: Node, base: Node) -> float:
    """Return the ratio of the numbers of layers of a node; 1 without layers."""
    return node.stack.depth / base.stack.depth if node.stack is not None and base.stack is not None else 1.0


def width_ratio(node: Node, base: Node) -> float:
    """Return the ratio of the widths of the sequence or vector that a node computes or, as heads do, takes."""
    for signal, before in ((node.output, base.output), *zip(node.signals.values(), base.signals.values(), strict=True)):
        if not isinstance(signal, list | tuple) and signal.type in ("sequence", "vector"):
            return signal.width / before.width if signal.width and before.width else 1.0
    return 1.0


def head_width_ratio(node: Node, base: Node) -> float:
    """Return the ratio of the widths of the table that a head multiplies by; 1 for any other node."""
    ratios = [
        signal.width / base.signals[field].width
        for field, signal in node.signals.items()
        if node.output.type == "logits" and not isinstance(signal, list | tuple) and signal.type == "table"
    ]
    return ratios[0] if ratios else 1.0


@dataclass(frozen=True)
class _Factors:
    """The factors of a parametrization in a spec."""

    config: ParametrizationConfig
    base: Graph
    graph: Graph

    @cached_property
    def _base_parts(self) -> dict[FieldPath, Any]:
        return dict(parts((), self.base.spec.model))

    def values(self) -> dict[FieldPath, Any]:
        """Return the values to set, by their paths in the spec."""
        here, there = dict(parts((), self.graph.spec.model)), self._base_parts
        # Numbers that are computed from sizes, such as the root of a width, keep their values at the base sizes.
        values = {path: there[path] for path, value in here.items() if isinstance(value, float)}
        values = {path: value for path, value in values.items() if value != here[path]}
        for node in self.graph.nodes:
            base = self.base.node(node.name)
            path: FieldPath = ("graph", node.name)
            values |= self._of_embedding(node, base, path) | self._of_head(node, base, path)
            values |= self._of_stack(node, base, path)
        for path, part in here.items():
            if isinstance(part, AttentionConfig):
                values |= self._of_attention(part, there[path], path)
            elif isinstance(part, MixerConfig):
                self._check_state(part, there[path], path)
        return values

    def check(self, scaled: Graph) -> None:
        """Raise `Invalid` if a node of the model with factors does not have a factor."""
        for node in scaled.nodes:
            base = self.base.node(node.name)
            depth, factor = depth_ratio(node, base), self.config.head_factor(head_width_ratio(node, base))
            if factor != 1 and node.config.head().scale != base.config.head().scale * factor:
                raise self._missing("logits", node.name, "scale")
            if _scales(node) != _scales(base):
                raise self._missing("embedding", node.name, "scale")
            factor = self.config.branch_factor(depth)
            layers = {layer.name: layer for layer in base.stack.layers} if base.stack is not None else {}
            for layer in node.stack.layers if node.stack is not None else ():
                for step, before in zip(layer.steps, layers[layer.name].steps, strict=True):
                    if step.addition.scale != before.addition.scale * factor:
                        raise self._missing(step.name, node.name, "residual.scale")

    def _missing(self, of: str, node: str, key: str) -> Invalid:
        message = f"`{self.config.kind_name()}` needs a factor of `{of}` in `{node}`, which has no key `{key}`"
        return Invalid("", message, help="use components with this key, or `parametrization: standard`")

    def _of_embedding(self, node: Node, base: Node, path: FieldPath) -> dict[FieldPath, Any]:
        """Keep the factor of an embedding that is the root of its width."""
        scales = _scales(base)
        return {(*path, "scale"): scales[0]} if scales != _scales(node) and "scale" in _fields(node.config) else {}

    def _of_head(self, node: Node, base: Node, path: FieldPath) -> dict[FieldPath, Any]:
        width = head_width_ratio(node, base)
        if self.config.head_factor(width) == 1:
            return {}
        head = base.config.head()
        if head is None or "scale" not in _fields(node.config):
            raise self._missing("logits", node.name, "scale")
        return {(*path, "scale"): head.scale * self.config.head_factor(width)}

    def _of_stack(self, node: Node, base: Node, path: FieldPath) -> dict[FieldPath, Any]:
        """Return the factors of the sublayers of a stack with more layers."""
        depth = depth_ratio(node, base)
        if depth == 1 or node.stack is None or base.stack is None:
            return {}
        rule, name = self.config.kind_name(), node.name
        if not self.config.covers_depth:
            message = f"`{rule}` has no rule for depth: `{name}` must have {node.stack.depth} layers at the base sizes"
            help = "use `completep`, or remove the number of layers from `base`"
            raise Invalid("base", f"{message}, as in the run; got {base.stack.depth}", help=help)
        factor = self.config.branch_factor(depth)
        if factor == 1:
            return {}
        if node.stack.repeated:
            raise Invalid("", f"`{rule}` has no rule for layers that share weights, as in `{name}`")
        if not node.stack.variants.keys() <= base.stack.variants.keys():
            raise Invalid("base", f"`{name}` must have every layer variant at the base sizes")
        for layer in node.stack.layers:
            self._check_layer(layer, name)
        values: dict[FieldPath, Any] = {}
        layers = [layer.config for layer in node.stack.layers]
        for inside, part in parts(path, node.config):
            if isinstance(part, ResidualConfig):
                values[(*inside, "scale")] = self._base_parts[inside].scale * factor
            elif any(part is layer for layer in layers) and getattr(part, "residual", 0) is None:
                values[(*inside, "residual")] = ResidualConfig(scale=factor)
        return values

    def _check_layer(self, layer: Layer, node: str) -> None:
        """Raise `Invalid` for a layer whose sublayers are not added to the stream in the way of the rule."""
        if layer.around is not None:
            raise Invalid("", f"`{self.config.kind_name()}` has no rule for a residual around layers, as in `{node}`")
        for step in layer.steps:
            self._check_step(step, node, pre_norm=step.norm_in is not None or layer.input_norm is not None)

    def _check_step(self, step: Step, node: str, *, pre_norm: bool) -> None:
        """Raise `Invalid` unless a sublayer reads a norm of the stream, and is added to the stream."""
        rule, residual = self.config.kind_name(), step.residual
        if not isinstance(residual, ResidualConfig):
            raise Invalid("", f"`{rule}` has no rule for the residual `{residual.kind_name()}` of `{node}`")
        if not pre_norm or step.norm_out is not None or step.norm_after is not None or residual.onto != "previous":
            message = f"`{rule}` has a rule only for pre-norm layers: `{step.name}` in `{node}` has other norms"
            raise Invalid("", message, help="write `placement: pre`, or remove the number of layers from `base`")

    def _of_attention(self, config: AttentionConfig, base: AttentionConfig, path: FieldPath) -> dict[FieldPath, Any]:
        width = config.score_width / base.score_width
        if width == 1:
            return {}
        if base.score_scale is None or config.score_scale is None or "scale" not in _fields(config):
            raise self._missing(f"attention `{config.kind_name()}`", ".".join(path), "scale")
        scale = base.score_scale * self.config.score_factor(width)
        return {} if math.isclose(scale, config.score_scale) else {(*path, "scale"): scale}

    def _check_state(self, config: MixerConfig, base: MixerConfig, path: FieldPath) -> None:
        """Raise `Invalid` for a mixer whose state may contain sums over a width that grows.

        A state of several heads may have more heads, and the state of a single head one larger axis.
        """
        pairs = zip(config.cached or (), base.cached or (), strict=True)
        for state, before in ((state, before) for state, before in pairs if isinstance(state, State)):
            grown = [size != base_size for size, base_size in zip(state.shape(1), before.shape(1), strict=True)]
            if sum(grown) > 1 or (state.heads > 1 and any(grown[1:])):
                message = f"`{self.config.kind_name()}` has no rule for wider heads of the mixer `{config.kind_name()}`"
                help = "let the number of heads grow, and keep their width"
                raise Invalid("base", f"{message}, as in `{'.'.join(path)}`", help=help)


def _fields(config: Config) -> Mapping[str, Any]:
    return type(config).model_fields


def _scales(node: Node) -> list[float]:
    """Return the fixed factors of the stages of an embedding."""
    return [stage.number for stage in node.config.after_table() if isinstance(stage, Scale)]
