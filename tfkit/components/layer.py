"""A layer: a small program of sublayers, each with its norms and its residual.

Every layout of published models is a choice of three places for a norm and of the input of a sublayer:

    y = sublayer(norm_in(x))                 pre
    x = norm_after(x + y)                    post
    x = x + norm_out(y)                      output; with norm_in too: sandwich
    y = sublayer(input_norm(layer input))    parallel

Post: https://arxiv.org/abs/1706.03762. Pre: https://arxiv.org/abs/2002.04745.
Sandwich: https://arxiv.org/abs/2105.13290. Output: https://arxiv.org/abs/2501.00656.
Parallel: https://arxiv.org/abs/2204.02311.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from tfkit.component import (
    AttentionConfig,
    Call,
    Changeable,
    Config,
    Dim,
    Dropout,
    FFNConfig,
    Immaterial,
    Layer,
    LearnedFactor,
    Make,
    MaskConfig,
    MixerConfig,
    NormConfig,
    Probability,
    ResidualConfig,
    Scale,
    Shared,
    Step,
    StreamConfig,
    SublayerConfig,
    optional_slot,
    slot,
)
from tfkit.components.residual import ResidualScale
from tfkit.errors import Invalid, listing, quoted, similar_name_help
from tfkit.nn import Context, Program, Value, cache_of_next, order_tokens, restore_order, wires_of, with_wires

Placement = Literal["pre", "post", "sandwich", "output", "parallel", "parallel_two_norms"]


def _list_sublayers(schema: dict[str, Any]) -> None:
    """List the sublayers of all layer classes, plugins included, in the JSON Schema of a field."""
    layers: list[type[LayerConfig]] = [LayerConfig]
    for layer in layers:
        layers += layer.__subclasses__()
    schema["enum"] = [*dict.fromkeys(name for layer in layers for name in layer.sublayer_names())]


class StepConfig(Config):
    """A sublayer of the layer. Fields that are not set follow from the stack's `placement`."""

    word_key = "sublayer"

    sublayer: str = Field(json_schema_extra=_list_sublayers)
    """Sublayer to run: a field of the layer, such as `mixer`, `attention`, `cross_attention` or `ffn`."""
    norm_in: NormConfig | bool | None = None
    """Norm before the sublayer; true: the stack's norm."""
    norm_out: NormConfig | bool | None = None
    """Norm after the sublayer, before the addition."""
    norm_after: NormConfig | bool | None = None
    """Norm after the addition."""
    residual: StreamConfig | None = optional_slot("add")
    """Addition to the residual stream; by default the stack's."""
    reads: Literal["previous", "input"] | None = None
    """Input of the sublayer: the sum so far, or the layer's input, after `input_norm`."""


class LayerConfig(Config):
    """The fields of a stack's layer. A variant may change any of them."""

    d_model: Shared[Dim]
    """Width of the residual stream."""
    placement: Placement = "pre"
    """Positions of the norms: a preset for the settings of `sublayers`."""
    norm: Shared[NormConfig] = slot("layernorm")
    """Norm in all places that do not set a norm."""
    mixer: MixerConfig | None = None
    """Recurrence or convolution over the earlier positions."""
    attention: AttentionConfig | None = optional_slot("mha")
    """Self-attention."""
    cross_attention: AttentionConfig | None = optional_slot("mha")
    """Attention to the memory; by default like `attention`, but without positions."""
    ffn: FFNConfig | None = None
    """The feed-forward network."""
    dropout: Shared[Immaterial[Changeable[Probability]]] = 0.0
    """Dropout on the output of each sublayer, before it is added to the residual stream."""
    residual: StreamConfig | None = optional_slot("add")
    """Addition of the sublayers to the residual stream; a sublayer may override it."""
    around: StreamConfig | None = None
    """Residual around all sublayers together: it computes their input from the stream, and writes back their result."""
    input_norm: NormConfig | bool | None = None
    """Norm of the layer's input, for sublayers with `reads: input`; the only norm of `placement: parallel`."""
    sublayers: tuple[StepConfig, ...] | None = None
    """Sublayers in order; by default mixer, attention, cross_attention, ffn."""

    def check(self) -> None:
        """Raise `Invalid` for positions and masks of cross-attention, and for fields without effect."""
        super().check()
        self._check_cross_attention()
        self._check_parts()
        if self.cross_attention_location() is not None and self.cross() is None:
            return  # every stack rejects this layer
        steps = self.steps(memory=self.cross_attention is not None)
        self._check_residuals(steps)
        if any(step.reads_input for step in steps):
            return
        if self.input_norm:
            raise Invalid("input_norm", "`input_norm` has no effect: no sublayer takes the layer's input")
        if self.placement == "parallel":
            raise Invalid("placement", "`placement: parallel` has no effect: every sublayer has `reads: previous`")

    def _check_cross_attention(self) -> None:
        cross = self.cross_attention
        for name, why in cross.self_attention_only.items() if cross is not None else ():
            if getattr(cross, name) is not None:
                raise Invalid(f"cross_attention.{name}", why)
        if cross is not None and (cross.gives or cross.takes):
            raise Invalid("cross_attention", "cross-attention cannot give or take wires")

    @classmethod
    @cache
    def sublayer_names(cls) -> list[str]:
        """Return the fields that hold sublayers, in their default order."""
        fields = {name: (info.annotation, *get_args(info.annotation)) for name, info in cls.model_fields.items()}
        kinds = {name: [part for part in parts if isinstance(part, type)] for name, parts in fields.items()}
        return [name for name, parts in kinds.items() if any(issubclass(part, SublayerConfig) for part in parts)]

    def sublayer_configs(self) -> dict[str, SublayerConfig]:
        """Return the sublayers of the layer by field."""
        values = {name: getattr(self, name) for name in self.sublayer_names()}
        return {name: value for name, value in values.items() if value is not None}

    def _check_parts(self) -> None:
        configs = self.sublayer_configs()
        if not configs:
            raise Invalid("", "a layer must have a sublayer", help="add `attention`, `ffn` or both")
        named, names = [step.sublayer for step in self.sublayers or ()], self.sublayer_names()
        for index, name in enumerate(named):
            if name not in names:
                near, notes = similar_name_help("a sublayer", name, names), [f"sublayers: {listing(names)}"]
                raise Invalid(f"sublayers.{index}.sublayer", f"unknown sublayer {quoted(name)}", notes=notes, help=near)
        for name in configs:
            if self.sublayers is not None and name not in named:
                raise Invalid(name, f"`{name}` has no effect: `sublayers` omits it")
        for index, step in enumerate(self.sublayers or ()):
            if step.sublayer != "cross_attention" and step.sublayer not in configs:
                raise Invalid(
                    f"sublayers.{index}",
                    f"the layer has no `{step.sublayer}` to run",
                    help=f"add `{step.sublayer}: ...` next to `sublayers`",
                )

    def _check_residuals(self, steps: list[Step]) -> None:
        """Raise `Invalid` for a residual whose norm is missing, and for a residual that would drop the stream."""
        if isinstance(self.around, ResidualConfig):
            raise Invalid("around", "`around` must be a residual that reads and writes a stream; got `add`")
        bare: dict[str, bool] = {}
        for index, step in enumerate(steps):
            explicit = self.sublayers is not None and self.sublayers[index].residual is not None
            location = f"sublayers.{index}.residual" if explicit else "residual"
            if self.around is not None and step.residual.enters:
                message = f"residual `{step.residual.kind_name()}` of a sublayer cannot have streams inside of `around`"
                raise Invalid(location, message)
            if step.read is not None and step.reads_input:
                message = f"residual `{step.residual.kind_name()}` requires that `{step.role}` takes the sum so far"
                raise Invalid(location, message, help="write `reads: previous`, or `placement: pre`")
            if step.addition.onto == "previous":
                continue
            location = f"{location}.onto"
            if step.reads_input:
                message = f"`{step.role}` takes the layer's input: added to that, it would drop the previous sublayers"
                raise Invalid(location, message)
            if step.addition.onto == "nothing":
                continue
            bare[location] = bare.get(location, True) and step.norm_in is None
        for location in (location for location, without in bare.items() if without):
            message = "`onto: normed` has no effect: there is no norm before the sublayer"
            raise Invalid(location, message, help="write `norm_in: true` in the sublayer, or `placement: pre`")

    def cross_attention_location(self) -> str | None:
        """Return the key that sets cross-attention, or None."""
        if self.cross_attention is not None:
            return "cross_attention"
        names = [step.sublayer for step in self.sublayers or ()]
        return f"sublayers.{names.index('cross_attention')}" if "cross_attention" in names else None

    def cross(self) -> AttentionConfig | None:
        """Return the config of cross-attention, by default derived from self-attention."""
        if self.cross_attention is not None or self.attention is None:
            return self.cross_attention
        return self.attention.model_copy(update=dict.fromkeys(self.attention.self_attention_only))

    def order(self, *, memory: bool) -> tuple[StepConfig, ...]:
        """Return the sublayers in order, with cross-attention if there is a `memory`."""
        if self.sublayers is not None:
            return self.sublayers
        present = dict.fromkeys(self.sublayer_configs(), True) | {"cross_attention": memory}
        return tuple(StepConfig(sublayer=name) for name in self.sublayer_names() if present.get(name))

    def steps(self, *, memory: bool, mask: MaskConfig | None = None) -> list[Step]:
        """Return the sublayers with the placement expanded; `mask` applies to attention without a `mask`."""
        seen: dict[str, int] = {}
        return [self._step(sublayer, seen, mask) for sublayer in self.order(memory=memory)]

    def _step(self, sublayer: StepConfig, seen: dict[str, int], mask: MaskConfig | None) -> Step:
        name = sublayer.sublayer
        count = seen[name] = seen.get(name, 0) + 1
        preset = self.placement
        parallel = preset in ("parallel", "parallel_two_norms")
        config = self.cross() if name == "cross_attention" else self.sublayer_configs()[name]
        assert config is not None
        mask_of_attention = config.mask if isinstance(config, AttentionConfig) else None
        return Step(
            name=name if count == 1 else f"{name}_{count}",
            config=config,
            reads_memory=name == "cross_attention",
            reads_input=sublayer.reads == "input" if sublayer.reads else parallel,
            mask=mask_of_attention or mask if name == "attention" else None,
            norm_in=self._norm(sublayer.norm_in, preset in ("pre", "sandwich", "parallel_two_norms")),
            norm_out=self._norm(sublayer.norm_out, preset in ("sandwich", "output")),
            norm_after=self._norm(sublayer.norm_after, preset == "post"),
            dropout=self.dropout,
            residual=sublayer.residual or self.residual or ResidualConfig(),
        )

    def _norm(self, norm: NormConfig | bool | None, preset: bool) -> NormConfig | None:
        if norm is None:
            norm = preset
        if isinstance(norm, bool):
            return self.norm if norm else None
        return norm

    def described(self, name: str, *, memory: bool, mask: MaskConfig) -> Layer:
        """Describe the layer as data, as variant `name` of its stack."""
        steps = tuple(self.steps(memory=memory, mask=mask))
        norm = self._norm(self.input_norm, self.placement == "parallel")
        return Layer(
            config=self,
            steps=steps,
            name=name,
            input_norm=norm if any(step.reads_input for step in steps) else None,
            around=self.around,
            placement=None if self.sublayers else self.placement,
        )


def build_layer(
    layer: Layer, make: Make, *, d_model: int, d_memory: int | None, causal: bool, wired: bool
) -> nn.Module:
    """Build a layer: forward(x, context) or, with a memory, forward(x, context, cross_context).

    It returns x or, if `wired`, also all wires so far.
    """
    program = Program()
    x = layer_input = program.input("x")
    contexts = [program.input("context", Context)]
    if d_memory is not None:
        contexts.append(program.input("cross_context", Context))
    writer = _StepWriter(program, make, d_model, d_memory, causal, contexts)
    stream, state = x, None
    if layer.around is not None:
        read = program.call("residual_read", make(layer.around, "read", d_model), stream, contexts[0])
        x, state = program.unpack(read, "inner", "kept")
        layer_input = x
    if layer.input_norm is not None:
        layer_input = writer.norm(Call("input_norm", layer.input_norm), x)
    for step in layer.steps:
        x = writer.write(step, x, layer_input)
    if layer.around is not None:
        x = program.call("residual_write", make(layer.around, "write", d_model), stream, x, state)
    if not wired:
        return program.build(x, "Layer")
    wires = program.apply("wires", wires_of, writer.contexts[0])
    return program.build((x, wires), "Layer", (Tensor, dict[str, Tensor]))


@dataclass
class _StepWriter:
    """Writes the operations of a layer's sublayers into a program, in order."""

    program: Program
    make: Make
    d_model: int
    d_memory: int | None
    causal: bool
    contexts: list[Value]
    """The contexts of the layer's input and of the memory."""
    n_kept: list[int] = field(default_factory=lambda: [0, 0])
    """The number of tensors that previous sublayers cache: of the input, and of the memory."""

    def write(self, step: Step, x: Value, layer_input: Value) -> Value:
        """Write the operations of a sublayer; return the stream after it."""
        y, state = layer_input if step.reads_input else x, None
        if step.read is not None:
            y = self.program.call(step.read.name, self.make(step.residual, "read", self.d_model), x, self.contexts[0])
            y, state = self.program.unpack(y, "y", "kept")
        for part in step.branch():
            if step.addition.onto == "normed" and isinstance(part, Call) and part.name == step.name:
                x = y
            y = self._operation(step, part, y)
        if step.onto is not None:
            x = self._operation(step, step.onto, x)
        if step.addition.scale_onto != 1:
            x = self.program.apply(f"onto_{step.name}", operator.mul, x, step.addition.scale_onto)
        if step.write is not None:
            x = self.program.call(step.write.name, self.make(step.residual, "write", self.d_model), x, y, state)
        elif step.addition.onto == "nothing":
            scale = step.addition.scale
            x = y if scale == 1 else self.program.apply(f"after_{step.name}", operator.mul, y, scale)
        elif step.addition.scale == 1:
            x = self.program.apply(f"after_{step.name}", operator.add, x, y)
        else:
            x = self.program.apply(f"after_{step.name}", torch.add, x, y, alpha=step.addition.scale)
        return x if step.after is None else self._operation(step, step.after, x)

    def _operation(self, step: Step, part: Call | Dropout | LearnedFactor | Scale, y: Value) -> Value:
        if isinstance(part, Scale):
            return y  # the addition multiplies by it
        if isinstance(part, Dropout):
            return self.program.call(f"{step.name}_dropout", nn.Dropout(part.rate), y)
        if isinstance(part, LearnedFactor):
            return self.program.call(part.name, ResidualScale(self.d_model if part.shape == "vector" else 1), y)
        if part.name != step.name:
            return self.norm(part, y)
        return self._sublayer(step, y)

    def norm(self, norm: Call, x: Value) -> Value:
        """Write the call of a norm, with the context if it takes the condition."""
        context = self.contexts[:1] if norm.config.takes_condition else []
        return self.program.call(norm.name, self.make(norm.config, self.d_model), x, *context)

    def _sublayer(self, step: Step, y: Value) -> Value:
        """Write the call of a sublayer; for a mixer, after a reordering that moves padding to the end of each row."""
        module, context = self._build_sublayer(step), self._context(step)
        if step.ordered:
            y = self.program.apply(f"{step.name}_input", order_tokens, y, context)
        y = self.program.call(step.name, module, y, *([] if context is None else [context]))
        if step.gives:
            y, wires = self.program.unpack(y, "y", "wires")
            self.contexts[0] = self.program.apply("context", with_wires, self.contexts[0], wires)
        return self.program.apply(f"{step.name}_output", restore_order, y, context) if step.ordered else y

    def _build_sublayer(self, step: Step) -> nn.Module:
        if not isinstance(step.config, AttentionConfig):
            return self.make(step.config)
        if step.reads_memory:
            return self.make(step.config, d_memory=self.d_memory, causal=False)
        return self.make(step.config, d_memory=None, causal=self.causal)

    def _context(self, step: Step) -> Value | None:
        """Return the context of a sublayer, whose cached tensors follow the tensors of previous sublayers."""
        if not isinstance(step.config, SublayerConfig) or not step.config.takes_context:
            return None
        context, before = self.contexts[step.reads_memory], self.n_kept[step.reads_memory]
        self.n_kept[step.reads_memory] += len(step.cached or ())
        return self.program.apply(f"{step.name}_context", cache_of_next, context, before) if before else context
