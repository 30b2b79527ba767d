"""Encoder and decoder: layers that repeat, differ by a pattern, or share their weights.

What all layers of the same attention share (mask, rotary table, position bias) is computed once per forward.

Layers shared across depth: https://arxiv.org/abs/1909.11942. Patterns of layers: https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tfkit.component import (
    BlockConfig,
    Config,
    Count,
    Make,
    MaskConfig,
    MaskedWire,
    NormConfig,
    PatchMarker,
    Signal,
    Signals,
    Wire,
    divisors,
    expect,
)
from tfkit.components.context import SharedContext, View, additive
from tfkit.components.layer import LayerConfig, build_layer
from tfkit.errors import Invalid, closest, listing, quoted
from tfkit.nn import Context

BASE = "base"


class LayersConfig(Config):
    """Layers that differ, or that are one and the same."""

    variants: Annotated[dict[str, LayerConfig], PatchMarker()] = Field(default_factory=dict)
    """Named changes to the stack's layer; `base` is the layer unchanged."""
    pattern: tuple[str, ...] | dict[str, str] | None = None
    """Which variant stands where: a list that repeats (`[local*5, global]`), or a mapping of layers and ranges
    (`{0-2: dense, rest: experts}`)."""
    groups: Count | None = None
    """Number of layers with weights of their own; each is used n_layers / groups times in a row."""

    def check(self) -> None:
        """Refuse patterns of unknown variants, and variants that no pattern uses."""
        super().check()
        if BASE in self.variants:
            raise Invalid(f"variants.{BASE}", "`base` is the name of the layer without changes: choose another")
        for name in self.variants:
            if not name.isidentifier() or hasattr(nn.ModuleDict, name) or name == "training":
                help = "use letters, digits and `_`, and no name of a module's own attributes"
                raise Invalid(f"variants.{name}", f"{quoted(name)} cannot be the name of a variant", help=help)
        used = self._used()
        for place, name in used.items():
            if name not in self.variants and name != BASE:
                near = closest(name, [*self.variants, BASE])
                raise Invalid(
                    f"pattern.{place}",
                    f"unknown variant `{name}`",
                    notes=[f"variants: {listing([*self.variants, BASE])}"],
                    help=f"a variant with a similar name exists: `{near}`" if near else None,
                )
        for name in self.variants:
            if name not in used.values():
                why = "there is no `pattern`" if self.pattern is None else "the pattern does not use it"
                raise Invalid(f"variants.{name}", f"variant `{name}` has no effect: {why}")

    def _used(self) -> dict[str, str]:
        """The variants that the pattern names, by the key or number of the entry."""
        if isinstance(self.pattern, dict):
            return self.pattern
        return {str(i): _repeated(i, word)[0] for i, word in enumerate(self.pattern or ())}

    def arrange(self, n: int) -> list[str]:
        """The variant of each of `n` layers; raises `Invalid` when the pattern does not fit them."""
        if self.pattern is None:
            return [BASE] * n
        if isinstance(self.pattern, dict):
            return _placed(self.pattern, n)
        runs = [_repeated(i, word) for i, word in enumerate(self.pattern)]
        length = sum(times for _, times in runs)
        if length > n:
            raise Invalid("layers.pattern", f"the pattern has {length} layers, and the stack only {n}")
        if not runs:
            raise Invalid("layers.pattern", "the pattern is empty", help="write `[local*5, base]`, or leave it out")
        cycle = [name for name, times in runs for _ in range(times)]
        return [cycle[i % length] for i in range(n)]


def _repeated(index: int, word: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\w+)(?:\*([1-9]\d{0,3}))?", word)
    if match is None:
        raise Invalid(
            f"pattern.{index}",
            f"{quoted(word)} is neither a variant nor a variant with a count",
            help="write `local`, or `local*5` for five layers in a row",
        )
    return match[1], int(match[2] or 1)


def _placed(pattern: dict[str, str], n: int) -> list[str]:
    names: list[str | None] = [None] * n
    for key, name in pattern.items():
        if key == "rest":
            continue
        place = f"layers.pattern.{key}"
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", key)
        if match is None:
            raise Invalid(place, f"{quoted(key)} is not a layer", help='write `"3"`, `0-2` or `rest`')
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise Invalid(place, f"the first layer of `{key}` comes after its last")
        if last >= n:
            raise Invalid(place, f"there is no layer {last}: the stack has {n}", help=f"they count from 0 to {n - 1}")
        for i in range(first, last + 1):
            if names[i] is not None:
                raise Invalid(place, f"layer {i} stands in the pattern twice")
            names[i] = name
    if None in names and "rest" not in pattern:
        help = "add `rest: base`, or another variant, for all that are left"
        raise Invalid("layers.pattern", f"layer {names.index(None)} has no variant", help=help)
    if None not in names and "rest" in pattern:
        raise Invalid("layers.pattern.rest", "`rest` has no effect: no layer is left", help="remove it")
    return [pattern["rest"] if name is None else name for name in names]


class StackConfig(LayerConfig, BlockConfig):
    """What encoder and decoder have in common."""

    input: MaskedWire | None = None
    """The sequence to read."""
    n_layers: Count
    """Number of layers."""
    layers: LayersConfig | None = None
    """How layers differ or share."""
    final_norm: NormConfig | bool | None = None
    """After the last layer; there unless `placement` is post."""

    def default_mask(self) -> MaskConfig:
        """The extent of attention that says nothing about it."""
        return MaskConfig()

    def check(self) -> None:
        """Refuse groups that do not divide the layers, patterns that do not fit them, and variants of another width."""
        super().check()
        groups = self.layers.groups if self.layers else None
        if groups and self.n_layers % groups:
            raise Invalid(
                "layers.groups",
                f"n_layers ({self.n_layers}) must be a multiple of groups ({groups})",
                notes=[f"divisors of {self.n_layers}: {divisors(self.n_layers)}"],
            )
        for path, layer in self.distinct():
            if layer.d_model != self.d_model:
                raise Invalid(f"{path}d_model", f"a variant keeps the width of its stack, {self.d_model}")

    def plan(self) -> list[tuple[str, LayerConfig]]:
        """Name and config of each layer that has weights of its own, in order."""
        if self.layers is None:
            return [(BASE, self)] * self.n_layers
        names = self.layers.arrange(self.layers.groups or self.n_layers)
        return [(name, self.layers.variants.get(name, self)) for name in names]

    def distinct(self) -> list[tuple[str, LayerConfig]]:
        """Each config of `plan` once, with the path of the place where it is written."""
        if self.layers is None:
            return [("", self)]
        names = dict.fromkeys(self.layers.arrange(self.layers.groups or self.n_layers))
        paths = {name: "" if name == BASE else f"layers.variants.{name}." for name in names}
        return [(path, self.layers.variants.get(name, self)) for name, path in paths.items()]

    def closing_norm(self) -> NormConfig | None:
        """The norm after the last layer."""
        given = self.placement != "post" if self.final_norm is None else self.final_norm
        if isinstance(given, bool):
            return self.norm if given else None
        return given

    def output(self, inputs: Signals) -> Signal:
        signal = expect(inputs, "input", "sequence", width=self.d_model)
        return Signal("sequence", width=self.d_model, mask=signal.mask)

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        memory: Signal | None = inputs.get("memory")
        d_memory = None if memory is None else memory.width
        shared: dict[str, SharedContext] = {}
        names: dict[View, str] = {}
        layers, views = [], []
        for name, layer in self.plan():
            given = layer.attention.mask if layer.attention else None
            mask = given or self.default_mask()
            view = View.of(layer.attention, mask, prefix="prefix" in inputs)
            if view not in names:
                names[view] = name
                shared[name] = view.build(make)
            views.append(names[view])
            layers.append(build_layer(layer, make, d_memory=d_memory, causal=view.flag))
        norm = self.closing_norm()
        stack = Stack if memory is None else MemoryStack
        order = sorted(shared)  # TorchScript shares code between ModuleDicts of equal keys, whatever their order
        return stack(
            shared={name: shared[name] for name in order},
            layers=layers,
            views=[order.index(name) for name in views],
            repeats=self.n_layers // len(layers),
            final_norm=None if norm is None else make(norm, self.d_model),
        )


class EncoderConfig(StackConfig):
    """Layers that read the whole sequence."""

    block: Literal["encoder"] = "encoder"

    def check(self) -> None:
        """Refuse cross-attention: an encoder has no memory."""
        super().check()
        for path, layer in self.distinct():
            if (place := layer.place_of_cross_attention()) is not None:
                raise Invalid(
                    f"{path}{place}",
                    "an encoder has no cross-attention: it has no memory to read",
                    help="use `block: decoder` and `memory: NODE`",
                )


class DecoderConfig(StackConfig):
    """Layers that read only what came before; with a memory, they have cross-attention too."""

    block: Literal["decoder"] = "decoder"
    memory: MaskedWire | None = None
    """The sequence that cross-attention reads."""
    prefix: Wire | None = None
    """An input of lengths: so many first tokens are read by every query."""

    def default_mask(self) -> MaskConfig:
        return MaskConfig(right=0)

    def check(self) -> None:
        """Refuse a decoder that looks ahead, and cross-attention without a memory."""
        super().check()
        for path, layer in self.distinct():
            mask = layer.attention.mask if layer.attention else None
            if mask is not None and not mask.causal:
                raise Invalid(
                    f"{path}attention.mask{'' if mask.right is None else '.right'}",
                    "a decoder's self-attention must not read later keys",
                    help="write `right: 0`, or use `block: encoder` for attention in both directions",
                )
            place = layer.place_of_cross_attention()
            if self.memory is None and place is not None:
                raise Invalid(
                    f"{path}{place}",
                    "cross-attention needs a memory to read",
                    help="add `memory: NODE` to the decoder",
                )
            steps = layer.steps(memory=self.memory is not None)
            if self.memory is not None and not any(step.sublayer == "cross_attention" for step in steps):
                raise Invalid(
                    "memory",
                    "`memory` has no effect: no sublayer reads it",
                    help="add `cross_attention` to `sublayers`",
                )
            if self.memory is not None and layer.cross() is None:
                raise Invalid("cross_attention", "a decoder with a memory needs `attention` or `cross_attention`")
        if self.memory is not None and self.prefix is not None:
            raise Invalid("prefix", "a decoder has either a memory or a prefix")

    def output(self, inputs: Signals) -> Signal:
        if "memory" in inputs:
            expect(inputs, "memory", "sequence")
        if "prefix" in inputs:
            expect(inputs, "prefix", "lengths")
        return super().output(inputs)


class Stack(nn.Module):
    """Layers one after the other; [b, t, d_model] -> the same."""

    def __init__(
        self,
        *,
        shared: dict[str, SharedContext],
        layers: Sequence[nn.Module],
        views: list[int],
        repeats: int,
        final_norm: nn.Module | None,
    ) -> None:
        super().__init__()
        self.shared = nn.ModuleDict(shared)
        self.layers = nn.ModuleList(layers)
        self.views = views
        self.repeats = repeats
        self.final_norm = final_norm

    def forward(self, x: Tensor, mask: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        contexts: list[Context] = []
        for shared in self.shared.values():
            contexts.append(shared(x, mask, prefix))
        for i, layer in enumerate(self.layers):
            for _ in range(self.repeats):
                x = layer(x, contexts[self.views[i]])
        return x if self.final_norm is None else self.final_norm(x)


class MemoryStack(Stack):
    """Layers that also read a memory."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        contexts: list[Context] = []
        for shared in self.shared.values():
            contexts.append(shared(x, mask, None))
        tokens = None if memory_mask is None else additive(memory_mask.to(torch.bool)[:, None, None, :], x)
        cross = Context(tokens, None, memory)
        for i, layer in enumerate(self.layers):
            for _ in range(self.repeats):
                x = layer(x, contexts[self.views[i]], cross)
        return x if self.final_norm is None else self.final_norm(x)
