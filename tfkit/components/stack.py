"""A stack: layers that repeat, differ by a pattern, or share their weights. `encoder` and `decoder` are the two kinds.

Values that layers with equal attention share (mask, rotary table, position bias) are computed once per forward.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tfkit.component import (
    AttentionBackend,
    BlockConfig,
    Cached,
    Count,
    Decoding,
    Layer,
    Layers,
    Make,
    MaskConfig,
    MaskedWire,
    MemoryWire,
    MixerConfig,
    NormConfig,
    Signal,
    Signals,
    State,
    SublayerConfig,
    VectorWire,
    Wire,
    divisors,
    expect,
    parts,
    same_length,
)
from tfkit.components.cached_keys import place
from tfkit.components.context import AttentionContext, ContextKey, cross_context
from tfkit.components.layer import LayerConfig, build_layer
from tfkit.components.layer_pattern import BASE, LayersConfig
from tfkit.errors import Invalid, listing, number_ranges
from tfkit.nn import (
    Context,
    Past,
    cache_of_layer,
    check_positions,
    count_positions,
    is_scripting,
    named,
    recomputed,
    token_order,
    with_values,
)


class StackConfig(LayerConfig, BlockConfig):
    """Fields and checks of encoder and decoder."""

    pairs = True
    input: MaskedWire | None = None
    """The sequence to read."""
    memory: MemoryWire | None = None
    """The sequence that cross-attention attends to."""
    positions: Wire | None = None
    """Input with the positions of the tokens, for rotary positions, score biases and temperatures; by default, they are
    counted. Masks, windows and states always count the tokens."""
    condition: VectorWire | None = None
    """The vector for the components that depend on a condition, such as a time step, a class or a speaker."""
    layer_features: Wire | None = None
    """A sequence of n_layers * d_features channels, for components that depend on it: layer i gets the i-th
    d_features."""
    n_layers: Count
    """Number of layers."""
    layers: LayersConfig | None = None
    """Layers that differ, or that share weights."""
    final_norm: NormConfig | bool | None = None
    """Norm after the last layer; by default the stack's `norm`, or none if `placement` is post."""

    def default_mask(self) -> MaskConfig:
        """Return the extent of attention that does not set `mask`."""
        return MaskConfig()

    @property
    def prefix_input(self) -> str | None:
        """The input with the number of first tokens to which every query attends."""
        return None

    @property
    def blocks_input(self) -> str | None:
        """The input with the block of each token."""
        return None

    def check(self) -> None:
        """Raise `Invalid` if groups or the pattern do not fit the number of layers, or if variants change the width."""
        super().check()
        groups = self.layers.groups if self.layers else None
        if groups and self.n_layers % groups:
            raise Invalid(
                "layers.groups",
                f"n_layers ({self.n_layers}) must be a multiple of groups ({groups})",
                notes=[f"divisors of {self.n_layers}: {divisors(self.n_layers)}"],
            )
        if self.layers is not None and isinstance(order := self.layers.order, tuple) and len(order) != self.n_layers:
            message = f"`order` must list n_layers ({self.n_layers}) layers; got {len(order)}"
            raise Invalid("layers.order", message, help=f"write `n_layers: {len(order)}`")
        for path, layer in self.distinct():
            if layer.d_model != self.d_model:
                raise Invalid(f"{path}d_model", f"a variant must have the width of its stack, {self.d_model}")
            for name, sublayer in layer.sublayer_configs().items():
                if getattr(sublayer, "d_model", self.d_model) != self.d_model:
                    message = f"`{name}` must have the width of its stack, {self.d_model}"
                    raise Invalid(f"{path}{name}.d_model", message)
        self._check_memory()
        self._check_streams()
        self._check_wires()

    def _check_streams(self) -> None:
        """Raise `Invalid` if sublayers have different residuals, and the stream of one is not [b, t, d_model]."""
        layers, streams = {layer.name: layer for layer in self.stack().layers}, None
        for path, name in zip([path for path, _ in self.distinct()], dict(self.plan()), strict=True):
            for residual in layers[name].residuals:
                streams = streams or residual
                if residual != streams and (residual.enters or streams.enters):
                    kind = (streams if streams.enters else residual).kind_name()
                    raise Invalid(f"{path}residual", f"all sublayers of a stack must share its residual `{kind}`")

    def _check_wires(self) -> None:
        """Raise `Invalid` for a wire that no earlier layer gives, that its taker rejects, or that nothing takes."""
        stack = self.stack()
        paths = dict(zip(dict(self.plan()), [path for path, _ in self.distinct()], strict=True))
        for connection in stack.connections:
            wire, step, giver = connection.wire, connection.step, connection.giver
            path = f"{paths[stack.layers[connection.layer].name]}{step.role}"
            if giver is None:
                gives = listing(wire for layer in stack.layers for step in layer.steps for wire in step.gives)
                message = f"`{step.role}` of layer {connection.layer} takes `{wire}`, but no earlier layer gives it"
                raise Invalid(path, message, notes=[f"layers give: {gives or 'nothing'}"])
            try:
                if isinstance(step.config, SublayerConfig) and isinstance(giver.config, SublayerConfig):
                    step.config.check_giver(wire, giver.config)
            except Invalid as error:
                raise Invalid(f"{path}.{error.field}".rstrip("."), error.message, help=error.help) from None
        taken = {connection.wire for connection in stack.connections}
        for layer in stack.layers:
            for step in layer.steps:
                for wire in [wire for wire in step.gives if wire not in taken]:
                    message = f"`{step.role}` gives `{wire}`, which has no effect: no later layer takes it"
                    raise Invalid(f"{paths[layer.name]}{step.role}", message)

    def _check_memory(self) -> None:
        """Raise `Invalid` for cross-attention without a memory, and for a memory without cross-attention."""
        reads = False
        for path, layer in self.distinct():
            location = layer.cross_attention_location()
            if self.memory is None and location is not None:
                raise Invalid(
                    f"{path}{location}",
                    "cross-attention needs a memory",
                    help=f"add `memory: NODE` to the {self.kind_name()}",
                )
            if self.memory is not None and any(s.sublayer == "cross_attention" for s in layer.order(memory=True)):
                reads, cross = True, layer.cross()
                if cross is None:
                    raise Invalid(f"{path}cross_attention", "a layer of a stack with a memory must have an attention")
                if not cross.takes_memory:
                    message = f"attention `{cross.kind_name()}` cannot attend to a memory: it is self-attention only"
                    help = "write `cross_attention` with another kind"
                    raise Invalid(
                        f"{path}{'cross_attention' if layer.cross_attention else 'attention'}", message, help=help
                    )
        if self.memory is not None and not reads:
            message = "`memory` has no effect: no sublayer attends to it"
            raise Invalid("memory", message, help="add `cross_attention` to `sublayers`")

    def plan(self) -> list[tuple[str, LayerConfig]]:
        """Variant and config of each layer that has separate weights, in order."""
        if self.layers is None:
            return [(BASE, self)] * self.n_layers
        runs = self.layers.runs(self.n_layers)
        names = self.layers.arrange(self.n_layers if runs is None else max(runs) + 1)
        return [(name, self.layers.variants.get(name, self)) for name in names]

    def distinct(self) -> list[tuple[str, LayerConfig]]:
        """Return each distinct config of `plan`, with its path in the spec."""
        layers = dict(self.plan()).items()
        return [("" if name == BASE else f"layers.variants.{name}.", layer) for name, layer in layers]

    def material(self) -> Mapping[str, Any]:
        """Return the values of each layer by its index, however base, variants and pattern express them."""
        fields, layers = LayerConfig.model_fields, self.layers
        values = {name: value for name, value in super().material().items() if name not in fields}
        base = LayerConfig.model_construct(**{name: getattr(self, name) for name in fields})
        numbers: dict[str, list[int]] = {}
        for number, (name, _) in enumerate(self.plan()):
            numbers.setdefault(name, []).append(number)
        distinct = {number_ranges(numbers[name]).replace(" ", ""): dict(self.plan())[name] for name in numbers}
        return {
            **values,
            "final_norm": self.closing_norm(),
            "layers": {key: base if layer is self else layer for key, layer in distinct.items()},
            "groups": None if layers is None else layers.groups,
            **({"order": layers.order} if layers is not None and layers.order != "in_a_row" else {}),
        }

    def closing_norm(self) -> NormConfig | None:
        """Return the norm after the last layer."""
        norm = self.placement != "post" if self.final_norm is None else self.final_norm
        if isinstance(norm, bool):
            return self.norm if norm else None
        return norm

    def output(self, inputs: Signals) -> Signal:
        signal = expect(inputs, "input", "sequence", width=self.d_model)
        for path, layer in self.distinct():
            position = layer.attention and layer.attention.position
            if position and position.only_length not in (None, signal.length):
                message = f"these positions need sequences of length {position.only_length}; got {signal.in_words()}"
                raise Invalid(f"{path}attention.position", message)
        self._check_positions(inputs, signal)
        if "memory" in inputs:
            expect(inputs, "memory", "sequence")
        if "condition" in inputs:
            width = expect(inputs, "condition", "vector").width
            for other in {getattr(part, "d_condition", width) for _, part in parts((), self)} - {width}:
                raise Invalid("condition", f"`condition` must be a vector of width {other}; got width {width}")
        if "layer_features" in inputs:
            width = expect(inputs, "layer_features", "sequence").width
            widths = {getattr(part, "d_features", 0) for _, part in parts((), self)} - {0}
            for d in sorted(widths - {(width or 0) / self.n_layers}):
                message = f"`layer_features` must have the width {self.n_layers} * {d}, one part for each layer"
                raise Invalid("layer_features", f"{message}; got width {width}")
        return signal

    def _check_positions(self, inputs: Signals, sequence: Signal) -> None:
        """Raise `Invalid` if the input with positions has no effect, or not the axes that the attentions take."""
        positions = expect(inputs, "positions", "positions") if "positions" in inputs else None
        if positions is not None:
            same_length({"input": sequence, "positions": positions})
        takers = 0
        for path, layer in self.distinct():
            attention = layer.attention
            position = None if attention is None else attention.position
            axes = None if position is None else position.axes
            if positions is None and axes is not None:
                message = f"positions of {axes} axes cannot be counted"
                help = f"add an input `{{type: positions, width: {axes}}}`, and name it in `positions` of the stack"
                raise Invalid(f"{path}attention.position", message, help=help)
            if attention is None or (position is None and attention.query_temperature is None):
                continue
            takers += 1
            if positions is not None and (positions.width != axes or (axes and attention.query_temperature)):
                takes = "a single axis" if axes is None or attention.query_temperature else f"{axes} axes"
                message = f"this attention takes positions of {takes}; got {positions.in_words()}"
                raise Invalid(f"{path}attention", message)
        if not takers and positions is not None:
            raise Invalid("positions", "`positions` has no effect: no attention has positions", help="remove it")

    def module(self, inputs: Signals) -> type[Stack]:
        """Return the class of the module that runs the layers."""
        return MemoryStack if "memory" in inputs else Stack

    def context_key(self, layer: LayerConfig, backend: AttentionBackend = "sdpa") -> ContextKey:
        """Return the key of the context of a layer's self-attention. Layers with equal keys share a context."""
        explicit = layer.attention.mask if layer.attention else None
        mask = explicit or self.default_mask()
        prefix, blocks = self.prefix_input is not None, self.blocks_input is not None
        return ContextKey.of(layer.attention, mask, prefix=prefix, blocks=blocks, backend=backend)

    def _contexts(self, backend: AttentionBackend = "sdpa") -> list[tuple[str, ContextKey]]:
        """Return the name and the key of the context of each layer. Layers with equal keys share a context."""
        names: dict[ContextKey, str] = {}
        contexts = []
        for number, (name, layer) in enumerate(self.plan()):
            key = self.context_key(layer, backend)
            alone = key.position is not None and not key.position.is_shared
            if alone or key not in names:
                # TorchScript cannot read an attribute again if its name is a keyword: `global`.
                names[key] = str(number) if alone else f"{name}_" if keyword.iskeyword(name) else name
            contexts.append((names[key], key))
        return contexts

    def decoding(self, inputs: Signals) -> Decoding:
        for path, layer in self.distinct():
            mask = self.context_key(layer).mask
            if layer.attention is not None and not mask.causal:
                subject = (
                    "attention" if mask.rule is None else f"attention with the mask rule `{mask.rule.kind_name()}`"
                )
                raise Invalid(f"{path}attention", f"{subject} that attends to later tokens needs the full sequence")
            scores = layer.attention is not None and (layer.attention.score_bias or layer.attention.content_scores)
            if self.positions and scores:
                message = "positions in scores need the full sequence if they are an input: caches have no positions"
                raise Invalid(f"{path}attention.position", message)
        caches: list[tuple[Cached | State, ...]] = []
        memory_caches: list[tuple[Cached | State, ...]] = []
        for (_, layer), described in zip(self.plan(), self.stack().layers, strict=True):
            layer_caches = _cached(described, memory=False, window=self.context_key(layer).window)
            caches.append(layer_caches)
            memory_caches += [_cached(described, memory=True)] if self.memory else []
        runs = self.stack().runs
        caches = [caches[layer] for layer in runs]
        memory_caches = [memory_caches[layer] for layer in runs if self.memory]
        return Decoding(past=True, caches=tuple(caches), memory_caches=tuple(memory_caches))

    def stack(self) -> Layers:
        memory, mask = self.memory is not None, self.default_mask()
        variants = {name: layer.described(name, memory=memory, mask=mask) for name, layer in dict(self.plan()).items()}
        pairs = zip(self.plan(), self._contexts(), strict=True)
        period, minimum = (1, 1) if self.layers is None else self.layers.period()
        return Layers(
            layers=tuple(replace(variants[name], context=f"shared.{context}") for (name, _), (context, _) in pairs),
            order=None if self.layers is None else self.layers.runs(self.n_layers),
            final_norm=self.closing_norm(),
            pattern=self.layers.pattern if self.layers else None,
            period=period,
            minimum=minimum,
            prefix=self.prefix_input,
            blocks=self.blocks_input,
        )

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        memory: Signal | None = inputs.get("memory")
        d_memory = None if memory is None else memory.width
        shared: dict[str, AttentionContext] = {}
        contexts, layers = self._contexts(make.attention_backend), []
        stack, signal = self.stack(), inputs["input"]
        wired = stack.wired
        make.n_layers = self.n_layers
        for make.layer, (layer, (name, key)) in enumerate(zip(stack.layers, contexts, strict=True)):
            if name not in shared:
                shared[name] = key.build(make, gaps=signal.gaps, counted="positions" not in inputs)
            layers.append(
                build_layer(layer, make, d_model=self.d_model, d_memory=d_memory, causal=key.flag, wired=wired)
            )
        make.layer = make.n_layers = None
        streams = stack.streams
        order = sorted(shared)  # TorchScript shares code between ModuleDicts of equal keys, whatever their order
        return self.module(inputs)(
            shared={name: shared[name] for name in order},
            layers=layers,
            contexts=[order.index(name) for name, _ in contexts],
            slots=_slots(stack),
            orders_tokens=stack.keeps_state,
            runs=stack.runs,
            recompute=make.recompute,
            enter=None if streams is None else make(streams, "enter", self.d_model),
            leave=None if streams is None else make(streams, "leave", self.d_model),
            final_norm=None if stack.final_norm is None else make(stack.final_norm, self.d_model),
            conditioned=stack.final_norm is not None and stack.final_norm.takes_condition,
            wired=wired,
            n_parts=self.n_layers,
            n_axes=inputs["positions"].width or 0 if "positions" in inputs else 0,
        )


def _cached(layer: Layer, *, memory: bool, window: int | None = None) -> tuple[Cached | State, ...]:
    """Return the tensors that a layer's sublayers cache: of its input or, with `memory`, of its memory."""
    cached: list[Cached | State] = []
    for step in layer.steps:
        if step.reads_memory == memory:
            if step.cached is None:
                message = f"{step.config.slot} `{step.config.kind_name()}` does not cache its tokens"
                raise Invalid(step.role, message)
            if isinstance(step.config, MixerConfig) and any(isinstance(entry, Cached) for entry in step.cached):
                raise Invalid(step.role, f"mixer `{step.config.kind_name()}` must keep states, not slots of tokens")
            cached += [replace(entry, window=window) if isinstance(entry, Cached) else entry for entry in step.cached]
    return tuple(cached)


def _slots(stack: Layers) -> list[tuple[int, int] | None]:
    """Return for each layer the layer and the index of the cached tensor that determine its token slots, or None.

    A layer without a cache that takes a wire has the slots of the layer that gives it.
    """
    slots: list[tuple[int, int] | None] = []
    for number, layer in enumerate(stack.layers):
        cached = [entry for step in layer.steps if not step.reads_memory for entry in step.cached or ()]
        slots.append(next(((number, i) for i, entry in enumerate(cached) if isinstance(entry, Cached)), None))
    for connection in stack.connections:
        if slots[connection.layer] is None and connection.giving_layer is not None:
            slots[connection.layer] = slots[connection.giving_layer]
    return slots


def _times(runs: Sequence[int], n: int) -> list[int]:
    """Return how often each of `n` layers runs in each loop over all layers: 0 1 0 2 gives 1 1 0, 1 0 1.

    TorchScript cannot select a module by a number, so an order is written as loops over the layers.
    """
    times: list[int] = []
    latest = n
    for number in runs:
        if number < latest:
            times += [0] * n
        times[len(times) - n + number] += 1
        latest = number
    return times


class Stack(nn.Module):
    """Layers one after the other: [b, t, d_model] -> [b, t, d_model].

    If the sequence is read step by step, `caches` has the tensors that each layer cached, in the order in which the
    layers run, and `past` says how much was read before.
    """

    # TorchScript compiles only the branch that is taken.
    __constants__ = ("reads_memory", "wired", "conditioned")
    reads_memory = False

    def __init__(
        self,
        *,
        shared: dict[str, AttentionContext],
        layers: Sequence[nn.Module],
        contexts: list[int],
        slots: list[tuple[int, int] | None],
        orders_tokens: bool,
        runs: Sequence[int],
        recompute: bool,
        enter: nn.Module | None,
        leave: nn.Module | None,
        final_norm: nn.Module | None,
        conditioned: bool,
        wired: bool,
        n_parts: int,
        n_axes: int,
    ) -> None:
        super().__init__()
        self.shared = nn.ModuleDict(shared)
        self.layers = nn.ModuleList(layers)
        self.context_of = contexts
        slots = [
            next((slots[layer] for layer, used in enumerate(contexts) if used == number and slots[layer]), None)
            for number in range(len(shared))
        ]
        self.first_run = [-1 if slot is None else runs.index(slot[0]) for slot in slots]
        self.first_slots = [-1 if slot is None else slot[1] for slot in slots]
        self.orders_tokens = orders_tokens
        times = _times(runs, len(layers))
        self.loops = len(times) // len(layers)
        self.times = times
        self.recompute = recompute
        self.enter = enter
        self.leave = leave
        self.final_norm = final_norm
        self.conditioned = conditioned
        self.wired = wired
        self.n_parts = n_parts
        self.n_axes = n_axes

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        prefix: Tensor | None = None,
        caches: list[list[Tensor]] | None = None,
        past: Past | None = None,
        condition: Tensor | None = None,
        layer_features: Tensor | None = None,
        positions: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> Tensor:
        if blocks is not None:
            prefix = check_positions(blocks, x, 0)
        return self.run(x, mask, prefix, None, caches, None, past, condition, layer_features, positions)

    def contexts(
        self,
        x: Tensor,
        mask: Tensor | None,
        prefix: Tensor | None,
        caches: list[list[Tensor]] | None,
        past: Past | None,
        condition: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> list[Context]:
        """Return the contexts that layers share."""
        if past is not None:
            assert past.start + x.size(1) <= past.length, "the cache is full"
        if positions is not None:
            positions = check_positions(positions, x, self.n_axes)
        real: Tensor | None = None
        order: Tensor | None = None
        documents: Tensor | None = None
        if self.orders_tokens and mask is not None:
            real, order, documents = token_order(mask.to(torch.bool))
        contexts: list[Context] = []
        for i, shared in enumerate(self.shared.values()):
            n_slots: int | None = None
            if caches is not None and self.first_slots[i] >= 0:
                n_slots = caches[self.first_run[i]][self.first_slots[i]].size(2) - 1
            cached = None if past is None else place(count_positions(x, mask, past), mask, past, n_slots)
            contexts.append(shared(x, mask, prefix, cached, positions))
        if real is None and condition is None:
            return contexts
        return [with_values(context, None, real, order, documents, condition) for context in contexts]

    def run(  # noqa: C901  TorchScript compiles it
        self,
        x: Tensor,
        mask: Tensor | None,
        prefix: Tensor | None,
        cross: Context | None,
        caches: list[list[Tensor]] | None,
        memory_caches: list[list[Tensor]] | None,
        past: Past | None,
        condition: Tensor | None,
        layer_features: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """Run the layers in order; `cross` is the context of all cross-attentions."""
        if len(self.layers) != len(self.context_of):  # layers were added or removed
            if len(self.shared) > 1 or self.wired or layer_features is not None or min(self.times) < max(self.times):
                raise TypeError(
                    "the layers of this stack have an order, different contexts or tensors of other layers, so none "
                    "can be added or removed: change the layers in the spec"
                )
            self.context_of = [0] * len(self.layers)
            self.times = [self.times[0]] * (self.loops * len(self.layers))
        contexts = self.contexts(x, mask, prefix, caches, past, condition, positions)
        x = x if self.enter is None else self.enter(x)
        features = None if layer_features is None else layer_features.chunk(self.n_parts, dim=2)
        wires: dict[str, Tensor] = {}
        run = 0
        for loop in range(self.loops):
            for i, layer in enumerate(self.layers):
                for _ in range(self.times[loop * len(self.context_of) + i]):
                    context = cache_of_layer(contexts[self.context_of[i]], caches, run)
                    if self.wired:
                        context = with_values(context, wires=wires)
                    if features is not None:
                        context = with_values(context, features=features[run])
                    if self.reads_memory:
                        assert cross is not None
                        cross_layer = cache_of_layer(cross, memory_caches, run)
                        result = (
                            layer(x, context, cross_layer)
                            if is_scripting() or not self.recompute
                            else recomputed(layer, x, context, cross_layer)
                        )
                    else:
                        result = (
                            layer(x, context) if is_scripting() or not self.recompute else recomputed(layer, x, context)
                        )
                    if self.wired:
                        x, wires = result
                    else:
                        x = result
                    run += 1
        x = x if self.leave is None else self.leave(x)
        if self.final_norm is None:
            return x
        return self.final_norm(x, contexts[0]) if self.conditioned else self.final_norm(x)

    def extra_repr(self) -> str:
        names = [*self.shared]
        contexts = [names[i] for i in self.context_of]
        by_name = {name: number_ranges([i for i, context in enumerate(contexts) if context == name]) for name in names}
        names_text = by_name if len(names) > 1 else None
        times = self.times if len({*self.times}) > 1 else self.times[0] if self.times[0] > 1 else None
        loops = self.loops if self.loops > 1 else None
        return named(contexts=names_text, times=times, loops=loops, recompute=self.recompute)


class MemoryStack(Stack):
    """Layers that also read a memory. If the sequence is read step by step, it is given with the first step."""

    reads_memory = True

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        caches: list[list[Tensor]] | None = None,
        memory_caches: list[list[Tensor]] | None = None,
        past: Past | None = None,
        condition: Tensor | None = None,
        layer_features: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        cross = cross_context(x, memory, memory_mask, memory_caches)
        return self.run(x, mask, None, cross, caches, memory_caches, past, condition, layer_features, positions)
