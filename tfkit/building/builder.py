"""From graph to `nn.Module`: one call per node, built on the meta device, then filled with memory and weights."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tfkit.arguments import AnyPath, Seed, Sets, checked
from tfkit.building.first_loss import warn_of_first_losses
from tfkit.building.guarantees import check_guarantees, check_layers
from tfkit.building.initialize import initialize
from tfkit.building.model import Model, unwrapped_model
from tfkit.building.placement import AnyDevice, AnyDtype, device_of, dtype_of
from tfkit.component import AttentionBackend, Component
from tfkit.errors import Diagnostic, Invalid, SpecError
from tfkit.graph.decode_split import wire_of
from tfkit.graph.expand import AnySpec, Graph, Node, component_path, load
from tfkit.graph.input_shapes import fixed_lengths
from tfkit.graph.wiring import masks_in_use, pairwise_masks, table_owner
from tfkit.nn import Program, Value, as_attention_mask, as_padding_mask, check_length, check_optional_length
from tfkit.spec.messages import crash_error, diagnostic_of


class FailedError(Exception):
    """Raised when a component's `build` fails; the cause is its error."""

    def __init__(self, config: Component, cause: BaseException) -> None:
        super().__init__(config, cause)
        self.config = config
        self.cause = cause


class Builder:
    """Implementation of `Make`: builds children, and records the config of each module."""

    def __init__(self, *, attention_backend: AttentionBackend = "sdpa", recompute: bool = False) -> None:
        self.attention_backend = attention_backend
        self.recompute = recompute
        self.layer: int | None = None
        self.n_layers: int | None = None
        self.configs: dict[nn.Module, Component] = {}
        self.arguments: dict[nn.Module, tuple[Any, ...]] = {}

    def __call__(self, config: Component, /, *args: Any, **kwargs: Any) -> nn.Module:
        """Build `config`; see `tfkit.component.Make`."""
        try:
            module = _built_module(config, self, *args, **kwargs)
            if not isinstance(module, nn.Module):
                raise TypeError(f"it must return an nn.Module; got {type(module).__name__}")
        except (Invalid, SpecError, FailedError, KeyboardInterrupt):
            raise
        except BaseException as cause:
            raise FailedError(config, cause) from cause
        self.configs[module], self.arguments[module] = config, args
        return module


def _built_module(config: Component, make: Builder, /, *args: Any, **options: Any) -> Any:
    """Return the result of a component's `build`. Raise RuntimeError if it changes torch's default dtype."""
    dtype = torch.get_default_dtype()
    try:
        return config.build(make, *args, **options)  # type: ignore[attr-defined]
    finally:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
            raise RuntimeError("it must not change torch's default dtype")


@checked
def build(
    spec: AnySpec,
    *,
    sets: Sets = (),
    device: AnyDevice = "cpu",
    dtype: AnyDtype | None = None,
    seed: Seed = 0,
    attention_backend: AttentionBackend = "sdpa",
    recompute: bool = False,
    weights: AnyPath | None = None,
    missing: Sequence[str] = (),
    unused: Sequence[str] = (),
    allow_change: bool = False,
) -> Model:
    """Build the model of a spec.

    Args:
        spec: a graph that `load` returned, or the argument of `load`. The folder of a model also provides its weights,
            and so does the graph that `load` returns for that folder.
        sets: changes as `load` takes them; only for a spec that is not loaded yet.
        device: the device of its parameters; on `meta` they have shapes but no values.
        dtype: type of its parameters, such as `torch.bfloat16` or "bfloat16"; by default the type of the
            weights, or torch's default if they are random.
        seed: every parameter is filled from this seed and its name, so a change of a component leaves the weights of
            all other components bit-identical.
        attention_backend: the implementation of attention. Results do not change.
            `sdpa`: torch's fused kernels, if they can express it (they have no soft-cap).
            `eager`: every step written out; `tfkit.attention_weights` does it for any model.
            `flex`: FlexAttention on CUDA for windows, prefixes, padding, soft-caps and ALiBi, without a mask of
            [queries, keys]; `sdpa` for everything else, including heads narrower than 16 and dropout of the weights.
            A plugin's kind that does not support a backend uses its only implementation.
        recompute: run every layer again in the backward instead of keeping its activations (activation checkpointing):
            less memory, about a third more time. Results do not change.
        weights: safetensors to fill it from: a file, the index of several, their folder, or the folder of a run, whose
            latest checkpoint is read. The names are the names in the model's state dict, as `tfkit save` writes
            them, or in the `checkpoint` section of its spec.
        missing: patterns of weights that are not read and stay initialized, such as `logits.*`.
        unused: patterns of tensors of the file that the model does not read.
        allow_change: accept weights whose file states that they belong to a model with other values, such as another
            epsilon or other positions. Files that tfkit did not write state nothing.

    Returns:
        A module whose `forward` takes the spec's inputs by name, and for each sequence `NAME_mask`, bool [b, t], True
        where there is a token, or [b, t, t], True where a token may attend to another. 0 and 1 are accepted, anything
        else is an error, but on an accelerator integers are not checked, which would wait for it. Sequences longer than
        `max_len` are an error. `model.code` is its forward; `model.meta` has `graph`, the loaded spec, and
        `components`, the slot and kind of each submodule by path.

    Raises:
        SpecError: the spec is wrong, or a component's `build` failed; or the weights cannot be read, or do not fit this
            model exactly.
        ValueError: there is no such device, type or attention backend; or `sets`, `missing`, `unused` or
            `allow_change` have no effect.
    """
    if isinstance(spec, Graph) and sets:
        raise ValueError("`sets` have no effect on a loaded graph: pass them to `tfkit.load`")
    device = device_of(device)
    graph = spec if isinstance(spec, Graph) else load(spec, sets=sets)
    weights = graph.weights if weights is None else weights
    choices = {"missing": missing, "unused": unused, "allow_change": allow_change}
    if weights is None and (idle := next((name for name, value in choices.items() if value), None)):
        raise ValueError(f"`{idle}` has no effect without weights")
    kind = None if dtype is None else dtype_of(dtype)
    options: dict[str, Any] = {"attention_backend": attention_backend, "recompute": recompute}
    if weights is not None and (missing or unused) and device.type != "meta":
        return _build_selected(
            graph, Path(weights), missing, unused, allow_change, device=device, dtype=kind, seed=seed, **options
        )
    if weights is not None and device.type != "meta":
        return build_filled(graph, Path(weights), device=device, dtype=kind, allow_change=allow_change, **options)
    model = _on_meta(graph, kind, **options)
    if device.type != "meta":
        allocate_tensors(model, device)
        initialize(model, graph, seed)
        warn_of_first_losses(model, graph)
        _check_guarantees(model, graph, attention_backend)
    return model


def _build_selected(
    graph: Graph,
    path: Path,
    missing: Sequence[str],
    unused: Sequence[str],
    allow_change: bool,
    *,
    dtype: torch.dtype | None,
    **options: Any,
) -> Model:
    """Build a model, and fill it from a file without the weights and tensors that the patterns name."""
    from tfkit.checkpoint.files import TensorFiles
    from tfkit.checkpoint.fitting import floating_type
    from tfkit.checkpoint.selection import Selection

    with TensorFiles.open(path) as checkpoint:
        dtype = dtype or floating_type(checkpoint)
    model = build(replace(graph, weights=None), dtype=dtype, **options)
    Selection(missing, unused, allow_change).filled(model, path)
    return model


def build_filled(
    graph: Graph,
    path: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    allow_change: bool,
    before: Callable[[nn.Module], None] = lambda model: None,
    **options: Any,
) -> Model:
    """Build a model and fill it from a file tensor by tensor, so the weights are in memory only once; see `build`.

    `before` is called with the model on the meta device, before memory is allocated.
    """
    from tfkit.checkpoint.files import TensorFiles
    from tfkit.checkpoint.fitting import fitting_map, floating_type, warn_of
    from tfkit.spec.header import quoted_path

    with TensorFiles.open(path) as checkpoint:
        model = _on_meta(graph, dtype or floating_type(checkpoint), **options)
        weights = fitting_map(model, graph, checkpoint, path, allow_change=allow_change)
        before(model)
        allocate_tensors(model, device)
        if len(list(model.buffers())):  # buffers are not in the file
            initialize(model, graph)
        weights.load(checkpoint, model.state_dict())
        model.meta |= {"left_out": weights.left_out(checkpoint.names), "filled_from": path.absolute()}
    warn_of(model.meta["left_out"], quoted_path(path))
    _check_guarantees(model, graph, options.get("attention_backend", "sdpa"))
    return model


def filled_by_layer(
    model: torch.fx.GraphModule,
    layers: Iterable[nn.Module],
    *,
    device: torch.device,
    seed: int,
    attention_backend: AttentionBackend,
) -> Iterator[nn.Module]:
    """Fill a model on the meta device with initial weights. Yield each layer after it is filled, then the model.

    The parameters are bit-identical to the result of `build`. If the caller shards each layer, a device needs memory
    for the full weights of only one layer at a time, and finally for all weights outside of layers.
    """
    graph, filled = graph_of(model), set[nn.Module]()
    _check_guarantees(model, graph, attention_backend)
    for layer in (*layers, model):
        allocate_tensors(layer, device)
        initialize(model, graph, seed, only=(modules := set(layer.modules()) - filled))
        filled |= modules
        yield layer


def _check_guarantees(model: torch.fx.GraphModule, graph: Graph, attention_backend: AttentionBackend) -> None:
    """Raise SpecError if a component breaks a guarantee. `flex` is not checked: its forward would compile."""
    if attention_backend != "flex":
        with evaluation_mode(model):
            check_guarantees(model, graph)


def _on_meta(graph: Graph, dtype: torch.dtype | None, **options: Any) -> Model:
    with torch.device("meta"), _collection_paused():
        model = assemble_model(graph, **options)
        if dtype is not None:
            model.to(dtype)
    check_layers(model, graph)
    check_parameters(sum(parameter.numel() for parameter in model.parameters()), graph)
    return model


def allocate_tensors(model: nn.Module, device: torch.device | str) -> None:
    """Allocate memory for the tensors of a model that are on the meta device; their values are undefined.

    `to_empty` does the same through a decomposition for the meta device, whose import of sympy takes half a second.
    """
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.is_meta:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                learned = isinstance(tensor, nn.Parameter)
                setattr(module, name, nn.Parameter(memory, tensor.requires_grad) if learned else memory)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def check_parameters(count: int, graph: Graph) -> None:
    """Raise SpecError unless the number of a model's parameters is the number stated in its spec."""
    stated = graph.spec.model.parameters
    if stated is not None and stated != count:
        message = f"the spec states {stated:,} parameters, but the model has {count:,}"
        span = graph.spec.provenance.span(("parameters",))
        raise SpecError(Diagnostic(message, span, "parameters", help="update `parameters` in the spec"))


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause garbage collection. Building allocates many objects, and scanning them would take 10% of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def assemble_model(graph: Graph, *, attention_backend: AttentionBackend = "sdpa", recompute: bool = False) -> Model:
    """Build the module of a graph on the current device, without filling its parameters; see `build`."""
    builder, program = Builder(attention_backend=attention_backend, recompute=recompute), Program()
    values = {name: program.input(name) for name, signal in graph.inputs.items() if not signal.optional}
    values |= {name: program.input(name, optional=True) for name, s in graph.inputs.items() if s.optional}
    for name, length in fixed_lengths(graph).items():
        check = check_optional_length if graph.inputs[name].optional else check_length
        values[name] = program.apply(name, check, values[name], length, name)
    used = masks_in_use(graph.nodes)
    masks = [s.mask for s in graph.inputs.values() if s.mask in used and s.mask]
    values |= mask_inputs(program, masks, pairs=pairwise_masks(graph.nodes))
    modules: dict[str, nn.Module] = {}
    for node in graph.nodes:
        if node.module not in modules:
            modules[node.module] = _build_node(builder, graph, node)
        values |= write_call(program, graph, node, modules[node.module], values)
    outputs = [values[name] for name in graph.outputs]
    output = outputs[0] if len(outputs) == 1 else tuple(outputs)
    model = program.build_graph_module(output, _class_name(graph.name), Model)
    assert isinstance(model, Model)
    paths = {module: path for path, module in model.named_modules()}
    model.meta["components"] = {paths[module]: config for module, config in builder.configs.items() if module in paths}
    model.meta["given"] = {
        paths[module]: arguments for module, arguments in builder.arguments.items() if module in paths
    }
    model.meta["graph"] = graph
    model.meta["code"] = model.code
    model.meta["recompute"] = recompute
    model.meta["attention_backend"] = attention_backend
    return model


def graph_of(model: nn.Module) -> Graph:
    """Return the graph of a built model, which may be wrapped. Raise `ValueError` if tfkit did not build the model."""
    graph: Graph = unwrapped_model(model).meta["graph"]
    return graph


def inputs_of(model: nn.Module) -> list[str]:
    """Return the names of a built model's inputs."""
    assert isinstance(model, torch.fx.GraphModule), "a module that runs steps of a model, or the result of `unwrapped`"
    return [str(node.target) for node in model.graph.find_nodes(op="placeholder")]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set the model to eval mode, and restore the mode of every module on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def write_call(
    program: Program, graph: Graph, node: Node, module: nn.Module, values: Mapping[str, Any], **further: Any
) -> dict[str, Any]:
    """Write the call of a node's module; return its value and, if the node returns a mask, the mask.

    `values` holds all previous values and masks by name; `further` are arguments in addition to the wires.
    """
    args, kwargs = _module_arguments(graph, node, program, values)
    program.hold(node.module, module)
    value = program.call_child(node.name, node.module, *args, **kwargs, **further)
    if not node.makes_mask:
        return {node.name: value}
    first = program.apply(node.name, operator.getitem, value, 0)
    return {node.name: first, f"{node.name}_mask": program.apply(f"{node.name}_mask", operator.getitem, value, 1)}


def _build_node(builder: Builder, graph: Graph, node: Node) -> nn.Module:
    path = ("graph", node.name)
    try:
        return builder(node.config, node.signals)
    except Invalid as error:
        raise SpecError(diagnostic_of(error, path, graph.spec.provenance)) from None
    except FailedError as failed:
        what, location = type(failed.config), component_path(graph, node.name, failed.config)
        raise SpecError(crash_error(what, "`build`", failed.cause, location, graph.spec.provenance)) from failed.cause


def mask_inputs(program: Program, names: Iterable[str], *, pairs: Collection[str | None] = ()) -> dict[str, Value]:
    """Add masks as optional inputs, with checks before their first use. Masks in `pairs` may be pairwise."""
    masks = {name: program.input(name, optional=True) for name in names}
    checks = {name: as_attention_mask if name in pairs else as_padding_mask for name in masks}
    return {name: program.apply(name, checks[name], value, name) for name, value in masks.items()}


def _module_arguments(
    graph: Graph, node: Node, program: Program, values: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a node's module: its input as first argument, masks and the other wires as keywords."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for field, source in node.wires.items():
        wire = wire_of(node, field)
        if wire.value == "module":
            continue
        signal = node.signals[field]
        if wire.value == "table":
            assert isinstance(source, str)
            kwargs[field] = program.weight(f"{table_owner(graph, source)}.tokens.weight")
            continue
        value = values[source] if isinstance(source, str) else [values[name] for name in source]
        signals = signal if isinstance(signal, list) else [signal]
        masks = [values.get(item.mask or "") for item in signals]
        mask = masks if isinstance(signal, list) and any(item is not None for item in masks) else masks[0]
        if field in ("input", "inputs"):
            args.append(value)
        else:
            kwargs[field] = value
        if wire.mask and mask is not None:
            kwargs["mask" if field == "input" else f"{field}_mask"] = mask
    return args, kwargs


def _class_name(name: str) -> str:
    """Convert `llama3_8b` to Llama3_8b. The underscore stays: adjacent digits would look like a single number."""
    title = ""
    for word in "".join(c if c.isalnum() else " " for c in name).split():
        title += "_" * (title[-1:].isdigit() and word[:1].isdigit()) + word[:1].upper() + word[1:]
    return title if title[:1].isalpha() else f"Model{title}"
