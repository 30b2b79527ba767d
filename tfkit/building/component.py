"""A component alone, outside of a model.

A sublayer is the only sublayer of a stack of one layer, without norms and residual. Masks, positions, a memory, and the
order in which a mixer gets its tokens therefore follow the rules of stacks, and no rule is written twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tfkit.arguments import Positive, Seed, checked
from tfkit.building.builder import Builder, FailedError, allocate, mask_inputs
from tfkit.building.initialize import initialize
from tfkit.building.placement import AnyDevice, AnyDtype, device_of, dtype_of
from tfkit.component import (
    ActivationConfig,
    AttentionConfig,
    Component,
    Config,
    FFNConfig,
    InitConfig,
    MixerConfig,
    NormConfig,
    Signal,
    Step,
    SublayerConfig,
    optional_slot,
    parts,
    slot,
)
from tfkit.errors import Diagnostic, Invalid, SpecError, listing, quoted, similar
from tfkit.graph.expand import Graph
from tfkit.nn import Context, Program, order_tokens, restore_order
from tfkit.plugin.manager import AnyPlugins, Plugins, load_plugins
from tfkit.spec.data import NAME, read_data
from tfkit.spec.load import Spec
from tfkit.spec.messages import crashed, from_pydantic, refused
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.provenance import Provenance
from tfkit.spec.resolve import Resolver


class LoneConfig(Config):
    """The slots whose components can be called alone, of which a single slot is filled, and the initialization."""

    attention: AttentionConfig | None = optional_slot("mha")
    cross_attention: AttentionConfig | None = optional_slot("mha")
    ffn: FFNConfig | None = None
    mixer: MixerConfig | None = None
    norm: NormConfig | None = optional_slot("layernorm")
    activation: ActivationConfig | None = None
    init: InitConfig = slot("fan_in")


SLOTS = tuple(name for name in LoneConfig.model_fields if name != "init")
TAKEN_BY = {"causal": "attention", "width": "norm", "d_memory": "cross_attention"}
"""The slot for which an argument is meant, by argument."""
ARGUMENTS = (*TAKEN_BY, "slot", "init", "device", "dtype", "seed", "plugins")


@checked
def component(
    slot: str,
    *,
    causal: bool = False,
    width: Positive | None = None,
    d_memory: Positive | None = None,
    init: str | Mapping[str, Any] | None = None,
    device: AnyDevice = "cpu",
    dtype: AnyDtype | None = None,
    seed: Seed = 0,
    plugins: AnyPlugins | None = None,
    **keys: Any,
) -> nn.Module:
    """Build a component alone, outside of a model, for instance to try a kind of a plugin.

        attention = tfkit.component("attention", kind="gqa", d_model=64, n_heads=8, n_kv_heads=2, position="rope")
        y = attention(torch.randn(2, 10, 64))

    Args:
        slot: `attention`, `cross_attention`, `ffn`, `mixer`, `norm` or `activation`.
        causal: for an attention: no query attends to a later key, as in a decoder. An extent can be set as `mask`.
        width: for a norm: the size of the last axis.
        d_memory: for a cross-attention: the width of the memory; by default d_model.
        init: the initialization, a kind or a mapping, as in a spec.
        device: as `build` takes it.
        dtype: as `build` takes it.
        seed: as `build` takes it.
        plugins: the result of `load_plugins`; by default, all installed plugins.
        keys: the kind and the other keys of the component, as in a spec: a mapping, or a word, for a component inside.

    Returns:
        A module. A norm and an activation take a tensor. A sublayer takes x [b, t, d_model] and `mask`, bool [b, t],
        True where there is a token, or [b, t, t], True where a token may attend to a token; a cross-attention also
        `memory` [b, k, d_memory] and `memory_mask`. A component that depends on a condition or on layer features takes
        `condition` or `layer_features` after x. A sublayer is in a `stack` of one layer: `module.stack.layers[0]` has
        the module of the kind under the name that it has in the layer of a model.

    Raises:
        SpecError: the keys are wrong, or the component cannot be alone, or its `build` failed.
        ValueError: an argument has no effect on the slot, or is missing; or there is no such device or type.
    """
    target, number_type = device_of(device), None if dtype is None else dtype_of(dtype)
    plugins = plugins or load_plugins()
    _check_slot(slot, plugins)
    for name, value in (("causal", causal or None), ("width", width), ("d_memory", d_memory)):
        if value is not None and slot != TAKEN_BY[name]:
            raise ValueError(f"`{name}` of `component` has no effect on the slot {quoted(slot)}")
    if slot == "norm" and width is None:
        raise ValueError("`width` of `component` is missing: a norm needs the size of the last axis")
    resolver = Resolver(plugins)
    root = read_data({slot: keys} if init is None else {slot: keys, "init": init})
    config = resolver.config(LoneConfig, root, (), {})
    if resolver.diagnostics:
        raise SpecError(*resolver.diagnostics)
    if causal and config.attention is not None and config.attention.mask is not None:
        raise ValueError("`causal` of `component` cannot be combined with a `mask`: write `right: 0` in the mask")
    module = _on_meta(slot, config, resolver.provenance, plugins, causal=causal, width=width, d_memory=d_memory)
    module.to(number_type)
    if target.type != "meta":
        allocate(module, target)
        model = ModelSpec.model_construct(tfkit=1, name=slot, graph={}, init=config.init)
        initialize(cast(Any, module), Graph(Spec(model, resolver.provenance, NAME), {}, (), ()), seed)
    return module


def _check_slot(slot: str, plugins: Plugins) -> None:
    if slot in SLOTS:
        return
    notes = (f"slots: {listing(SLOTS)}",)
    if slot in plugins.registry.slots():
        message = f"a component of the slot {quoted(slot)} cannot be called alone"
        help = "build a model with it" if slot == "block" else "set it in a component that has this slot, or in a model"
    else:
        message, help = f"unknown slot {quoted(slot)}", similar("a slot", slot, SLOTS)
    raise SpecError(Diagnostic(message, path="slot", notes=notes, help=help))


def _on_meta(
    slot: str,
    config: LoneConfig,
    provenance: Provenance,
    plugins: Plugins,
    *,
    causal: bool,
    width: int | None,
    d_memory: int | None,
) -> nn.Module:
    part: Component = getattr(config, slot)
    try:
        if clash := [name for name in type(part).model_fields if name in ARGUMENTS]:
            raise _not_alone(part, f"`component` has an argument with the name of its key `{clash[0]}`")
        with torch.device("meta"):
            if not isinstance(part, SublayerConfig):
                module = Builder()(part, *(() if width is None else (width,)))
                return _conditioned(module) if part.takes_condition else module
            return _alone(slot, part, "decoder" if causal else "encoder", d_memory, plugins)
    except ValidationError as error:
        raise SpecError(*from_pydantic(error, type(config), (), provenance, relations=True)) from None
    except Invalid as error:
        raise SpecError(refused(error, (slot,), provenance)) from None
    except FailedError as error:
        raise SpecError(crashed(type(error.config), "`build`", error.cause, (slot,), provenance)) from error.cause


def _not_alone(config: Component, reason: str) -> Invalid:
    message = f"{config.slot} `{config.kind_name()}` cannot be alone: {reason}"
    return Invalid("", message, help="build a model with it")


def _alone(slot: str, config: Any, block: str, d_memory: int | None, plugins: Plugins) -> nn.Module:
    """Build a sublayer as the only sublayer of a stack, without norms and residual."""
    for names, reason in ((config.takes, "takes {} from another layer"), (config.gives, "gives {} to other layers")):
        if names:
            raise _not_alone(config, f"it {reason.format(listing(f'`{name}`' for name in names))}")
    signals = {"input": Signal("sequence", config.d_model, mask="mask")}
    takers = [part for _, part in parts((), config) if isinstance(part, Component)]
    wires = ["condition"] * any(part.takes_condition for part in takers)
    wires += ["layer_features"] * any(part.takes_features for part in takers)
    if slot == "cross_attention":
        signals["memory"] = Signal("sequence", d_memory or config.d_model, mask="memory_mask")
        wires = ["memory", *wires]
    values = {
        slot: config,
        "d_model": config.d_model,
        "n_layers": 1,
        "placement": "post",
        **{wire: wire for wire in wires},
    }
    values["norm"] = plugins.registry.kinds("norm")["layernorm"].config()
    stack_config: Any = plugins.registry.kinds("block")[block].config.model_validate(values)
    stack: Any = Builder()(stack_config, signals)
    (step,) = stack_config.stack().layers[0].steps
    stack.layers[0] = _layer(step, stack.layers[0].get_submodule(step.name), len(signals))
    program = Program()
    x, inputs = program.input("x"), {name: program.input(name) for name in wires}
    masks = mask_inputs(program, [signal.mask for signal in signals.values() if signal.mask], pairs=["mask"])
    return program.build(program.call("stack", stack, x, **inputs, **masks), "Component")


def _layer(step: Step, module: nn.Module, n_contexts: int) -> nn.Module:
    """Build a layer that only calls a sublayer: forward(x, context) or, with a memory, (x, context, cross_context)."""
    program = Program()
    x = program.input("x")
    contexts = [program.input(name, Context) for name in ("context", "cross_context")[:n_contexts]]
    takes_context = isinstance(step.config, SublayerConfig) and step.config.takes_context
    if step.ordered:
        x = program.apply("ordered", order_tokens, x, contexts[0])
    y = program.call(step.name, module, x, *(contexts[-1:] if takes_context else []))
    return program.build(program.apply("y", restore_order, y, contexts[0]) if step.ordered else y, "Layer")


def _context_of(condition: Tensor) -> Context:
    return Context(None, None, None, condition=condition)


def _conditioned(norm: nn.Module) -> nn.Module:
    """Build the module that calls a norm with a condition [b, width]."""
    program = Program()
    x, condition = program.input("x"), program.input("condition")
    context = program.apply("context", _context_of, condition)
    return program.build(program.call("norm", norm, x, context), "Component")
