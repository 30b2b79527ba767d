"""The class of built models, and the unwrapping of models that other tools have wrapped.

A forward does not check its inputs, because that takes time. They are checked only after a forward has failed. If the
inputs are invalid, the error describes them. Otherwise the original error is raised, with a note that names the layer
in which it occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import unknown_argument, value_text
from tfkit.component import Signal
from tfkit.errors import listing
from tfkit.graph.expand import Graph, as_list
from tfkit.graph.input_shapes import max_len, max_len_text, rows_of
from tfkit.nn import Linear, WrittenGraph
from tfkit.torch_private.sharding import computes_in

BuiltModel: TypeAlias = Annotated[nn.Module | Callable[..., Any], nn.Module, "a model that `tfkit.build` returned"]
"""The type of arguments that are built models, or wrappers of built models: see `unwrapped_model`. torch types
a compiled model as a function."""
_SHAPES = {
    "tokens": "token ids [b, t] of 64 or 32 bits",
    "positions": "integers [b, t]",
    "sequence": "vectors [b, t, width]",
    "image": "images [b, channels, height, width]",
    "images": "images [b, n, channels, height, width]",
    "vector": "vectors [b, width]",
    "lengths": "integers [b]",
}
_DIMS = {"tokens": 2, "positions": 2, "sequence": 3, "image": 4, "images": 5, "vector": 2, "lengths": 1}


class Model(WrittenGraph):
    """A built model."""

    if TYPE_CHECKING:  # the spec decides which modules exist, and which attributes they have

        def __getattr__(self, name: str) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, and its hooks."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            raise explained_error(error, self, args, kwargs)  # noqa: B904  it has its cause


def explained_error(
    error: Exception, model: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception:
    """Return the error to raise for a failed call: an error in its inputs, else `error` with a note on its module."""
    input_error = call_error(model, args, kwargs)
    if input_error is None:
        name_layer(error, model)
        return error
    input_error.__cause__ = error
    return input_error


def name_layer(error: BaseException, model: nn.Module) -> None:
    """Add a note to an error with the module in which it occurred: `in decoder.layers.7.ffn`."""
    if path := layer_of(error, model):
        error.add_note(f"in {path}")


def layer_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module that was running when an error was raised; None outside of modules."""
    paths = {id(module): path for path, module in model.named_modules()}
    owners = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
    return next((paths[owner] for owner in reversed(owners) if paths.get(owner)), None)


def call_error(model: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """Return the error in the inputs of a call; None if they are valid."""
    graph = model.meta.get("graph")
    if not isinstance(graph, Graph) or "forward" in vars(model):  # a replaced forward may have different inputs
        return None
    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    if len(args) > len(names):
        return TypeError(f"`{graph.name}` must be called with {listing(names)}; got {len(args)} inputs")
    inputs = dict(zip(names, args, strict=False))
    for name in kwargs:
        if name not in names:
            return TypeError(unknown_argument(graph.name, name, names))
        if name in inputs:
            return TypeError(f"`{name}` of `{graph.name}` must be passed once; got two values")
    inputs |= kwargs
    missing = [name for name, signal in graph.inputs.items() if not signal.optional and inputs.get(name) is None]
    if missing:
        return TypeError(f"`{graph.name}` needs {' and '.join(f'`{name}`' for name in missing)}")
    passed = {name: value for name, value in inputs.items() if value is not None}
    return next(input_errors(graph, passed, next(model.parameters(), None)), None)


def input_errors(graph: Graph, inputs: Mapping[str, Any], weight: Tensor | None = None) -> Iterator[Exception]:
    """Yield errors in inputs and masks; `weight` is a parameter of the model."""
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            yield TypeError(f"`{name}` must be a tensor; got {value_text(value)}")
            return
    for name, value in inputs.items():
        signal = graph.inputs.get(name)
        yield from _mask_errors(name, value, inputs) if signal is None else _tensor_errors(graph, name, signal, value)
        if weight is not None and value.device != weight.device:
            yield ValueError(f"`{name}` is on {value.device}, but the model is on {weight.device}")
    yield from _size_errors(graph, inputs)
    real = [name for name in inputs if name in graph.inputs and graph.spec.model.inputs[name].is_real]
    for name in real if weight is not None else ():
        assert weight is not None
        if inputs[name].dtype != weight.dtype:
            yield ValueError(f"`{name}` is {inputs[name].dtype}, but the model is {weight.dtype}")


def _tensor_errors(graph: Graph, name: str, signal: Signal, value: Tensor) -> Iterator[Exception]:
    expected, dtype, is_real = _SHAPES[signal.type], value.dtype, graph.spec.model.inputs[name].is_real
    dims = _DIMS[signal.type]
    if signal.type == "positions" and signal.width is not None:
        expected, dims = f"integers [b, t, {signal.width}]", 3
    if value.is_nested or value.layout != torch.strided:
        yield ValueError(f"`{name}` must be a dense tensor, {expected}")
    elif value.dim() != dims or (dtype in (torch.int64, torch.int32)) == is_real:
        yield ValueError(f"`{name}` must be {expected}; got {dtype} {list(value.shape)}")
    elif signal.type in ("image", "images"):
        if [*value.shape[-3:]] != [signal.channels, signal.rows, signal.width]:
            yield ValueError(f"`{name}` must be {signal.in_words()}; got {list(value.shape)}")
    elif signal.width is not None and value.size(-1) != signal.width:
        yield ValueError(f"`{name}` must be of width {signal.width}; got {list(value.shape)}")
    elif signal.type not in ("lengths", "vector") and value.size(1) == 0:
        yield ValueError(f"`{name}` must have at least one position; got {list(value.shape)}")
    elif signal.length is not None and value.size(1) != signal.length:
        yield ValueError(f"`{name}` must have {signal.length} positions; got {list(value.shape)}")
    elif signal.type in ("tokens", "positions"):
        error = token_error(graph, name, value)
        yield from [] if error is None else [error]


def token_error(graph: Graph, name: str, tokens: Tensor) -> ValueError | None:
    """Return the error for a sequence [b, t] that exceeds `max_len` or has ids outside the table, or None."""
    limit, rows = max_len(graph), rows_of(graph, name)
    if name in graph.inputs and limit is not None and tokens.dim() > 1 and tokens.size(1) > limit:
        return ValueError(f"the {tokens.size(1)} tokens of `{name}` are more than {max_len_text(limit)}")
    if rows is None or not tokens.numel() or tokens.is_meta:
        return None
    lowest, highest = (int(bound) for bound in tokens.aminmax())
    if lowest >= 0 and highest < rows:
        return None
    token = lowest if lowest < 0 else highest
    noun = "position" if name in graph.inputs and graph.inputs[name].type == "positions" else "token id"
    return ValueError(f"{token} is not a {noun} of this model: `{name}` may be 0 to {rows - 1}")


def _mask_errors(name: str, mask: Tensor, inputs: Mapping[str, Tensor]) -> Iterator[Exception]:
    hidden = inputs.get(name.removesuffix("_mask"))
    if hidden is not None:
        expected = [*hidden.shape[:2]] + [hidden.size(1)] * (mask.dim() == 3)
        if expected != [*mask.shape]:
            yield ValueError(f"`{name}` must be bool {expected}; got {mask.dtype} {list(mask.shape)}")


def _size_errors(graph: Graph, arguments: Mapping[str, Tensor]) -> Iterator[Exception]:
    """Yield errors for inputs with different batch sizes, or with different lengths if a node takes both."""
    inputs = {name: value for name, value in arguments.items() if name in graph.inputs}
    counts = {name: value.size(0) for name, value in inputs.items() if value.dim()}
    if len(set(counts.values())) > 1:
        yield ValueError(f"the inputs must have the same batch size; got {_size_listing(counts)}")
    for node in graph.nodes:
        together = [name for source in node.wires.values() for name in as_list(source) if name in inputs]
        lengths = {name: inputs[name].size(1) for name in together if inputs[name].dim() > 1}
        if isinstance(node.wires.get("input"), list) and len(set(lengths.values())) > 1:
            yield ValueError(f"the inputs of `{node.name}` must have the same length; got {_size_listing(lengths)}")
    yield from _placeholder_errors(graph, inputs)


def _placeholder_errors(graph: Graph, inputs: Mapping[str, Tensor]) -> Iterator[Exception]:
    """Yield errors for tokens with more placeholders than their images have vectors."""
    images = next((value for name, value in inputs.items() if graph.inputs[name].type == "images"), None)
    for node in (node for node in graph.nodes if "images" in node.signals):
        for field, token in node.config.placeholders().items():
            name, length = str(node.wires[field]), node.signals["images"].image_length
            if name in inputs and images is not None and length is not None and not inputs[name].is_meta:
                count, vectors = int((inputs[name] == token).sum(dim=1).max()), images.size(1) * length
                if count > vectors:
                    message = f"`{name}` has a row with {count} placeholders of images, the token {token}"
                    yield ValueError(f"{message}; its {images.size(1)} images have {vectors} vectors")


def _size_listing(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` {size}" for name, size in sizes.items())


T = TypeVar("T")

WRAPPED_ATTRIBUTE = {
    "torch.OptimizedModule": "_orig_mod",  # torch.compile
    "torch.DistributedDataParallel": "module",
    "torch.DataParallel": "module",
    "torch.AveragedModel": "module",
    "peft.PeftModel": "base_model",
    "peft.BaseTuner": "model",
    "lightning._FabricModule": "module",
    "lightning_fabric._FabricModule": "module",
    "tfkit.Loss": "model",
}
"""Attribute that holds the wrapped module, by the package and class of the wrapper."""


def unwrapped_model(model: object) -> fx.GraphModule:
    """Return the model inside wrappers that keep its computation: `torch.compile`, DDP, averages, PEFT, `Loss`.

    Adapters that PEFT inserts belong to the model. Raises `ValueError` for modules that `tfkit.build` did not build,
    and for wrappers that change what the model computes.
    """
    module = model
    while not _is_built(module):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "the prompts that PEFT has learned are not in the model: call the result of `get_peft_model`"
            )
        attribute = next((WRAPPED_ATTRIBUTE[name] for name in _class_names(module) if name in WRAPPED_ATTRIBUTE), None)
        if attribute is None:
            raise ValueError(_not_built_message(module))
        module = getattr(module, attribute)
    assert isinstance(module, fx.GraphModule)
    return module


def replaced_forward(model: fx.GraphModule) -> str | None:
    """Return how the forward of a model was replaced; None if its code is the code that `build` wrote.

    Tools that call the modules of a model in a different way, as decoding does, would ignore it.
    """
    if "forward" in vars(model):
        return "its `forward` was replaced"
    return None if model.code == model.meta["code"] else "the code of its forward was changed"


def is_sharded(module: nn.Module) -> bool:
    """Return True if `torch.distributed.fsdp.fully_shard` has been applied to this module."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def complete_model(model: object) -> fx.GraphModule:
    """Unwrap a model whose parameters are complete; raise ValueError if they are sharded or have no values."""
    built = unwrapped_model(model)
    check_values(built)
    check_unsharded(built)
    return built


def check_unsharded(model: nn.Module) -> None:
    """Raise ValueError if the parameters of a model are sharded."""
    if any(is_sharded(module) for module in model.modules()):
        raise ValueError(
            "the parameters of this model are sharded: gather them with "
            "`torch.distributed.checkpoint.state_dict.get_model_state_dict`, and load them into a model that is not"
        )


def check_values(model: nn.Module) -> None:
    """Raise ValueError if the parameters of a model have no values, as on the meta device."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device, where weights have no values: build it on another device")


def sharded_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the compute dtype of sharded layers, if their policy differs from the parameters' dtype.

    Only linear layers are considered, because norms may keep the dtype of their parameters.
    """
    policies = {path: computes_in(module) for path, module in model.named_modules() if is_sharded(module)}
    linear = [path for path, module in model.named_modules() if isinstance(module, Linear) and ".layers." in path]
    dtypes = {policies[max(groups, key=len)] for path in linear if (groups := _groups_of(path, policies))}
    if len(dtypes) > 1:
        raise ValueError(
            "all calls of `fully_shard` must use the same `MixedPrecisionPolicy`: a cache has a single dtype"
        )
    return dtypes.pop() if dtypes else None


def _groups_of(path: str, policies: Collection[str]) -> list[str]:
    """Return the sharded modules that contain a module."""
    return [group for group in policies if group in ("", path) or path.startswith(f"{group}.")]


def call_in_forward(model: nn.Module, run: Callable[[], T]) -> T:
    """Call `run`, which calls submodules of the model, inside the model's forward.

    `fully_shard` works with hooks of a call: it gathers parameters before the forward and scatters gradients later.
    """
    if not is_sharded(model):
        return run()
    model.__dict__["forward"] = run
    try:
        value: T = model()
        return value
    finally:
        del model.__dict__["forward"]


def _is_built(model: object) -> bool:
    return isinstance(model, fx.GraphModule) and isinstance(model.meta.get("graph"), Graph)


def _class_names(module: object) -> Iterator[str]:
    """Yield the package and the name of each class of a module, to recognize it without importing the package."""
    return (f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(module).__mro__)


def _not_built_message(module: object) -> str:
    name = type(module).__name__
    if "torch.FullyShardedDataParallel" in _class_names(module):
        return f"{name} flattens the parameters of a model: use `torch.distributed.fsdp.fully_shard`"
    text = f"this module was not built by `tfkit.build`, or it has been wrapped: it is {name}"
    parts = module.named_modules() if isinstance(module, nn.Module) else ()
    path = next((path for path, part in parts if _is_built(part)), None)
    return f"{text}; pass the model itself" + ("" if path is None else f", which it has as `{path}`")
