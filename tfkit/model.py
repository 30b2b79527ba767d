"""The class of a built model: a call with inputs that it cannot read fails with a clear error.

A forward does not check its inputs, which would cost time. They are checked only after it has failed: if they are at
fault, the error says so; otherwise the original error is raised, with a note that names the layer it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import shown, unknown_argument
from tfkit.component import Signal
from tfkit.errors import listing
from tfkit.graph.expand import Graph, as_list
from tfkit.graph.input_shapes import beyond, max_len, rows_of
from tfkit.nn import WrittenGraph

BuiltModel: TypeAlias = Annotated[fx.GraphModule, nn.Module, "a model that `tfkit.build` returned"]
"""The type of arguments; `graph_of` tells if a module is one."""
_SHAPES = {
    "tokens": "token ids [b, t] of 64 or 32 bits",
    "sequence": "vectors [b, t, width]",
    "lengths": "whole numbers [b]",
}
_DIMS = {"tokens": 2, "sequence": 3, "lengths": 1}


class Model(WrittenGraph):
    """A built model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, and its hooks."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            raise explained(error, self, args, kwargs)  # noqa: B904  it has its cause


def explained(error: Exception, model: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception:
    """Return the error to raise for a failed call: an error in its inputs, else `error` with a note of its module."""
    input_error = wrong_call(model, args, kwargs)
    if input_error is None:
        name_layer(error, model)
        return error
    input_error.__cause__ = error
    return input_error


def name_layer(error: BaseException, model: nn.Module) -> None:
    """Note on an error which module of the model it comes from: `in decoder.layers.7.ffn`."""
    paths = {id(module): path for path, module in model.named_modules()}
    owners = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
    if path := next((paths[owner] for owner in reversed(owners) if paths.get(owner)), None):
        error.add_note(f"in {path}")


def wrong_call(model: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """Return the error in the inputs of a call; None if they are valid."""
    graph = model.meta.get("graph")
    if not isinstance(graph, Graph) or "forward" in vars(model):  # another forward has other inputs
        return None
    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    if len(args) > len(names):
        return TypeError(f"`{graph.name}` reads {listing(names)}, but was given {len(args)} inputs")
    inputs = dict(zip(names, args, strict=False))
    for name in kwargs:
        if name not in names:
            return TypeError(unknown_argument(graph.name, name, names))
        if name in inputs:
            return TypeError(f"`{name}` of `{graph.name}` was given twice")
    inputs |= kwargs
    missing = [name for name, signal in graph.inputs.items() if not signal.optional and inputs.get(name) is None]
    if missing:
        return TypeError(f"`{graph.name}` needs {' and '.join(f'`{name}`' for name in missing)}")
    there = {name: value for name, value in inputs.items() if value is not None}
    return next(wrong_inputs(graph, there, next(model.parameters(), None)), None)


def wrong_inputs(graph: Graph, inputs: Mapping[str, Any], weight: Tensor | None = None) -> Iterator[Exception]:
    """Yield errors in inputs and masks; `weight` is a parameter of the model."""
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            yield TypeError(f"`{name}` must be a tensor, not {shown(value)}")
            return
    for name, value in inputs.items():
        signal = graph.inputs.get(name)
        yield from _wrong_mask(name, value, inputs) if signal is None else _wrong_input(graph, name, signal, value)
        if weight is not None and value.device != weight.device:
            yield ValueError(f"`{name}` is on {value.device}, but the model is on {weight.device}")
    yield from _wrong_rows(graph, inputs)
    features = [name for name in inputs if name in graph.inputs and graph.inputs[name].type == "sequence"]
    for name in features if weight is not None else ():
        assert weight is not None
        if inputs[name].dtype != weight.dtype:
            yield ValueError(f"`{name}` is {inputs[name].dtype}, but the model is {weight.dtype}")


def _wrong_input(graph: Graph, name: str, signal: Signal, value: Tensor) -> Iterator[Exception]:
    expected, dtype = _SHAPES[signal.type], value.dtype
    if value.is_nested or value.layout != torch.strided:
        yield ValueError(f"`{name}` must be a dense tensor, {expected}")
    elif value.dim() != _DIMS[signal.type] or (dtype in (torch.int64, torch.int32)) == (signal.type == "sequence"):
        yield ValueError(f"`{name}` must be {expected}, not {dtype} {list(value.shape)}")
    elif signal.type == "sequence" and signal.width is not None and value.size(-1) != signal.width:
        yield ValueError(f"`{name}` must be of width {signal.width}, not {list(value.shape)}")
    elif signal.type != "lengths" and value.size(1) == 0:
        yield ValueError(f"`{name}` must have at least one position, not {list(value.shape)}")
    elif signal.length is not None and value.size(1) != signal.length:
        yield ValueError(f"`{name}` must have {signal.length} positions, not {list(value.shape)}")
    elif signal.type == "tokens":
        error = wrong_tokens(graph, name, value)
        yield from [] if error is None else [error]


def wrong_tokens(graph: Graph, name: str, tokens: Tensor) -> ValueError | None:
    """Return the error in a sequence [b, t] longer than the model's `max_len`, or with token ids outside its table."""
    limit, rows = max_len(graph), rows_of(graph, name)
    if name in graph.inputs and limit is not None and tokens.dim() > 1 and tokens.size(1) > limit:
        return ValueError(f"the {tokens.size(1)} tokens of `{name}` are more than {beyond(limit)}")
    if rows is None or not tokens.numel() or tokens.is_meta:
        return None
    least, most = (int(bound) for bound in tokens.aminmax())
    if least >= 0 and most < rows:
        return None
    token = least if least < 0 else most
    return ValueError(f"{token} is not a token id of this model: `{name}` may be 0 to {rows - 1}")


def _wrong_mask(name: str, mask: Tensor, inputs: Mapping[str, Tensor]) -> Iterator[Exception]:
    hidden = inputs.get(name.removesuffix("_mask"))
    if hidden is not None:
        expected = [*hidden.shape[:2]] + [hidden.size(1)] * (mask.dim() == 3)
        if expected != [*mask.shape]:
            yield ValueError(f"`{name}` must be bool {expected}, not {mask.dtype} {list(mask.shape)}")


def _wrong_rows(graph: Graph, arguments: Mapping[str, Tensor]) -> Iterator[Exception]:
    """Yield errors for inputs with different batch sizes, or with different lengths if one node takes both."""
    inputs = {name: value for name, value in arguments.items() if name in graph.inputs}
    counts = {name: value.size(0) for name, value in inputs.items() if value.dim()}
    if len(set(counts.values())) > 1:
        yield ValueError(f"the inputs have different batch sizes: {_listed(counts)}")
    for node in graph.nodes:
        together = [name for source in node.wires.values() for name in as_list(source) if name in inputs]
        lengths = {name: inputs[name].size(1) for name in together if inputs[name].dim() > 1}
        if isinstance(node.wires.get("input"), list) and len(set(lengths.values())) > 1:
            yield ValueError(f"`{node.name}` reads inputs of different lengths: {_listed(lengths)}")


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` {size}" for name, size in sizes.items())
