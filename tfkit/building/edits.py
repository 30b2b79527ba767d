"""Edits of a built model: the places where its modules differ from the modules that its spec builds.

Names and shapes of weights do not show another activation, another epsilon or a replaced forward. A tool that writes a
spec next to the weights therefore compares the model with a new build of the spec. A tool that measures a model runs
its modules, and warns of the differences.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.prune import is_pruned

from tfkit.building.builder import assemble_model, graph_of
from tfkit.building.model import Model, check_unsharded, check_values, unwrapped_model
from tfkit.building.placement import AnyDevice
from tfkit.errors import Diagnostic, EditedModelWarning, SpecError, listing, quoted
from tfkit.graph.expand import AnySource, Graph, as_graph
from tfkit.torch_private.tensors import has_forward_hook, has_forward_pre_hook


@dataclass(frozen=True)
class MeasuredModel:
    """The model that a tool measures: the graph of a spec; or the graph, the module and the edits of a built model."""

    graph: Graph
    module: fx.GraphModule | None = None
    edits: tuple[str, ...] = ()


AnyModel: TypeAlias = Annotated[
    Graph | AnySource | nn.Module | MeasuredModel,
    "a spec: its name, its path, a mapping, or what `tfkit.load` returned; or a model that `tfkit.build` returned",
]
"""A spec, or a built model, as users pass them; or a `MeasuredModel`, as tools pass it on."""
SCALAR_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, set, frozenset, Enum)
FUNCTIONS = FunctionType | BuiltinFunctionType | MethodType | type
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, children, hooks and mode, which are compared apart from the others."""
MAX_DIFFERENCES = 6
"""The maximum number of differences in an error."""


def as_model(model: AnyModel, measured: str) -> MeasuredModel:
    """Return the graph of a spec or of a built model, and the module of a built model with its edits.

    If there are edits, issue an `EditedModelWarning`; `measured` states what the caller takes from the modules.
    """
    if not isinstance(model, nn.Module):
        return model if isinstance(model, MeasuredModel) else MeasuredModel(as_graph(model))
    built = unwrapped_model(model)
    check_unsharded(built)
    if texts := [text for text, _ in model_edits(built)]:
        message = f"the modules of {quoted(graph_of(built).name)} differ from its spec: {measured}"
        text = Diagnostic(message, notes=_difference_notes(texts)).warning()
        warnings.warn(text, EditedModelWarning, stacklevel=4)
    return MeasuredModel(replace(graph_of(built), weights=None), built, _difference_notes(texts))


def copied_model(model: fx.GraphModule, *, device: AnyDevice | None = None, dtype: torch.dtype | None = None) -> Model:
    """Return a copy of a model with all of its edits. A copy on the meta device takes no memory.

    Raises:
        SpecError: a hook or a replaced module cannot be copied.
        ValueError: the model is on the meta device, and the copy is not.
    """
    # `deepcopy` rejects tensors that were computed, as pruned weights are.
    plain = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in plain}
    if device is not None and torch.device(device).type == "meta":
        memo = {id(value): value.detach().to(device) for value in (*plain, *model.buffers())}
        for weight in model.parameters():
            memo[id(weight)] = nn.Parameter(weight.to(device), requires_grad=weight.requires_grad)
    else:
        check_values(model)
    memo[id(model)] = copy = Model.__new__(Model)  # `fx` copies only what its graph calls
    type(copy).__name__, type(copy).forward = type(model).__name__, type(model).forward
    try:
        vars(copy).update(deepcopy(nn.Module.__getstate__(model), memo))
    except Exception as error:  # a hook or a replaced module may hold any object
        message = f"the model {quoted(graph_of(model).name)} cannot be copied: {type(error).__name__}: {error}"
        raise SpecError(Diagnostic(message, help="remove its hooks first")) from error
    return copy.to(device=device, dtype=dtype)


def check_unedited(model: fx.GraphModule, *, allow_change: bool = False, writer: str = "save") -> None:
    """Raise SpecError if the modules of a model differ from its spec. `allow_change` accepts all but its tensors.

    A change of the names or the shapes of tensors is always an error: the spec could not read the weights. `writer` is
    the public function that writes the spec unchanged.
    """
    differences = model_edits(model)
    tensors = [text for text, is_tensor in differences if is_tensor]
    if not differences or (allow_change and not tensors):
        return
    name = quoted(graph_of(model).name)
    if tensors:
        message, help = f"the model must have the tensors of {name}", _undo_help(model)
    else:
        message = f"the model must compute what its spec {name} describes"
        help = f"change the spec instead, or write the spec unchanged with `tfkit.{writer}(..., allow_change=True)`"
    notes = _difference_notes(tensors or [text for text, _ in differences])
    raise SpecError(Diagnostic(f"{message}; its modules were changed", notes=notes, help=help))


def _difference_notes(texts: Sequence[str]) -> tuple[str, ...]:
    more = [f"{len(texts) - MAX_DIFFERENCES} more differences"] if len(texts) > MAX_DIFFERENCES else []
    return (*texts[:MAX_DIFFERENCES], *more)


def model_edits(model: fx.GraphModule, *, hooks: bool = True) -> list[tuple[str, bool]]:
    """Return the differences between a built model and a new build of its spec, as text that begins with a path.

    The second value is True for differences in the names and shapes of tensors. Values of weights and buffers, the
    device, the dtype and the mode (train or eval) are not compared. Without `hooks`, hooks are ignored as well.
    """
    return module_differences(model, _expected_model(model), hooks=hooks)


def module_differences(
    model: fx.GraphModule, expected: fx.GraphModule, *, hooks: bool = True
) -> list[tuple[str, bool]]:
    """Return the differences between two models; see `model_edits`."""
    actual_modules = dict(model.named_modules(remove_duplicate=False))
    expected_modules = dict(expected.named_modules(remove_duplicate=False))
    differences = list(_different_tensors(model, expected))
    if model.code != expected.code:
        differences.append(("`model.code`: the code of the forward was changed", False))
    for path, module in actual_modules.items():
        if path in expected_modules:
            texts = _different_module(module, expected_modules[path], root=not path, hooks=hooks)
            differences += [((path + text).removeprefix("."), False) for text in texts]
        elif path.rpartition(".")[0] in expected_modules:
            differences.append((f"{path}: a module that the spec does not build, {type(module).__name__}", False))
    for path in expected_modules:
        if path not in actual_modules and path.rpartition(".")[0] in actual_modules:
            differences.append((f"{path}: the module is missing", False))
    return differences


def tensor_origins(model: fx.GraphModule) -> dict[str, str | None]:
    """Return the name that each tensor of the state dict has in the spec; None if the spec does not have the tensor.

    A wrapper moves or renames a parameter: `q.base_layer.weight` of an adapter is `q.weight` of the spec, and so is
    `q.weight_orig` of a pruned matrix.
    """
    shapes = {name: tensor.shape for name, tensor in _expected_model(model).state_dict().items()}
    actual = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    moved = [name for name in shapes if name not in actual]
    names: dict[str, str | None] = {}
    for name, tensor in actual.items():
        names[name] = name if name in shapes else None
        for origin in moved if name not in shapes else ():
            if tensor.shape == shapes[origin] and _has_parts_in_order(name.split("."), origin.split(".")):
                names[name] = origin
                moved.remove(origin)
                break
    return names


def copy_weights(model: fx.GraphModule, source: fx.GraphModule) -> None:
    """Copy to the model of a spec the weights that a built model has for it. Raise SpecError if any is missing."""
    tensors, state = source.state_dict(), model.state_dict()
    weights = {origin: tensors[name] for name, origin in tensor_origins(source).items() if origin is not None}
    if lost := [name for name in state if name not in weights or weights[name].shape != state[name].shape]:
        message = (
            f"the built model must have all weights of {quoted(graph_of(model).name)}; it lacks {listing(lost, 4)}"
        )
        raise SpecError(Diagnostic(message, help="compare two built models"))
    for name, tensor in state.items():
        tensor.copy_(weights[name])


def _has_parts_in_order(words: Sequence[str], parts: Sequence[str]) -> bool:
    """Return True if the words contain the parts in order, with words or endings of words in between."""
    rest = iter(words)
    return all(any(word == part or word.startswith(f"{part}_") for word in rest) for part in parts)


def _expected_model(model: fx.GraphModule) -> Model:
    with torch.device("meta"):
        return assemble_model(graph_of(model), attention_backend=model.meta["attention_backend"])


def _different_tensors(model: nn.Module, expected: nn.Module) -> Iterator[tuple[str, bool]]:
    actual_tensors, expected_tensors = model.state_dict(keep_vars=True), expected.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in actual_tensors.items():
        if name not in expected_tensors:
            yield f"{name}: a tensor that the spec does not have", True
        elif not isinstance(tensor, Tensor):
            yield f"{name}: {type(tensor).__name__}, and a tensor by the spec", True
        elif tensor.shape != expected_tensors[name].shape:
            yield f"{name}: {list(tensor.shape)}, and {list(expected_tensors[name].shape)} by the spec", True
        elif expected_tensors[owner := first.setdefault(id(tensor), name)] is not expected_tensors[name]:
            yield f"{name}: the tensor is {owner}, and a different tensor by the spec", True
    for name in expected_tensors:
        if name not in actual_tensors:
            yield f"{name}: the tensor is missing", True


def _different_module(module: nn.Module, expected: nn.Module, *, root: bool, hooks: bool) -> Iterator[str]:
    """Yield the differences of a module without its children, as text that follows its path."""
    if type(module) is not type(expected) and not isinstance(expected, fx.GraphModule):
        names = [cls.__name__ for cls in (type(module), type(expected))]
        if names[0] == names[1]:
            names[0] = f"{type(module).__module__}.{names[0]}"
        yield f": {names[0]}, and {names[1]} by the spec"
        return
    if isinstance(expected, fx.GraphModule) and not root and getattr(module, "code", None) != expected.code:
        yield ": the code of its forward was changed"
    path = "the model" if root else ""
    if "forward" in vars(module):
        yield ".forward: replaced on the module"
    if hooks and has_forward_hook(module):
        yield f"{path}: a forward hook, which can change its output"
    if hooks and has_forward_pre_hook(module):
        yield f"{path}: a forward pre-hook, which can change its inputs"
    yield from _different_attributes(vars(module), expected, root)


def _different_attributes(attributes: Mapping[str, Any], expected: nn.Module, root: bool) -> Iterator[str]:
    for name, value in vars(expected).items():
        if name in OF_TORCH or name.startswith("_") or (root and name == "meta") or name == "recompute":
            continue
        if name not in attributes:
            yield f".{name}: the attribute is missing"
        elif not _is_equal(attributes[name], value):
            yield f".{name}: {_value_text(attributes[name])}, and {_value_text(value)} by the spec"


def _is_equal(actual: Any, expected: Any) -> bool:
    """Return whether two attributes are equal. Objects that are no plain values, such as contexts, are not compared."""
    if isinstance(expected, SCALAR_TYPES):
        return isinstance(actual, SCALAR_TYPES) and (actual == expected or (actual != actual and expected != expected))
    if isinstance(expected, Mapping):
        return (
            isinstance(actual, Mapping)
            and actual.keys() == expected.keys()
            and all(_is_equal(actual[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, Sequence)
            and len(actual) == len(expected)
            and all(_is_equal(*pair) for pair in zip(actual, expected, strict=True))
        )
    if isinstance(expected, partial):
        parts = [(value.func, value.args, value.keywords) for value in (actual, expected) if isinstance(value, partial)]
        return len(parts) == 2 and _is_equal(*parts)
    if isinstance(expected, MethodType):
        return isinstance(actual, MethodType) and actual.__func__ is expected.__func__
    return actual is expected if isinstance(expected, FUNCTIONS) else type(actual) is type(expected)


def _value_text(value: object) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _undo_help(model: nn.Module) -> str:
    """Return the help for changed tensors: how to undo the change that renamed them."""
    names = {word for name in model.state_dict() for word in name.split(".")}
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        return "merge the adapters first: `merge_and_unload()` of PEFT"
    if "parametrizations" in names:
        return "remove the parametrizations first: `torch.nn.utils.parametrize.remove_parametrizations`"
    if is_pruned(model):
        return "make the pruning permanent first: `torch.nn.utils.prune.remove`"
    if "_orig_mod" in names:
        return "compile the module in place instead: `module.compile()`"
    return "describe the change in the spec, and load the weights into its model"
