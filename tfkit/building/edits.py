"""Edits of a built model: the places where its modules differ from the modules that its spec builds.

Names and shapes of weights do not show another activation, another epsilon or a replaced forward. A tool that writes a
spec next to the weights therefore compares the model with a new build of the spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from tfkit.building.builder import assemble, graph_of
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.torch_private.tensors import has_forward_hook, has_forward_pre_hook

PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype
FUNCTIONS = FunctionType | BuiltinFunctionType | MethodType | type
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, children, hooks and mode, which are compared apart from the others."""
SHOWN = 6
"""The maximum number of differences in an error."""


def check_unedited(model: fx.GraphModule, *, allow_change: bool = False) -> None:
    """Raise SpecError if the modules of a model differ from its spec. `allow_change` accepts all but its tensors.

    A change of the names or the shapes of tensors is always an error: the spec could not read the weights.
    """
    differences = edits(model)
    tensors = [text for text, is_tensor in differences if is_tensor]
    if not differences or (allow_change and not tensors):
        return
    name = quoted(graph_of(model).name)
    texts = tensors or [text for text, _ in differences]
    more = [f"{len(texts) - SHOWN} more differences"] if len(texts) > SHOWN else []
    notes = (*texts[:SHOWN], *more)
    if tensors:
        message = f"the model must have the tensors of {name}; its modules were changed"
        raise SpecError(Diagnostic(message, notes=notes, help=_undo(model)))
    message = f"the model must compute what its spec {name} describes; its modules were changed"
    help = "change the spec instead, or write the spec unchanged with `allow_change=True`"
    raise SpecError(Diagnostic(message, notes=notes, help=help))


def edits(model: fx.GraphModule) -> list[tuple[str, bool]]:
    """Return the differences between a built model and a new build of its spec, as text that begins with a path.

    The second value is True for differences in the names and shapes of tensors. Values of weights and buffers, the
    device, the dtype and the mode (train or eval) are not compared.
    """
    with torch.device("meta"):
        expected = assemble(graph_of(model), attention_backend=model.meta["attention_backend"])
    actual_modules, expected_modules = dict(model.named_modules()), dict(expected.named_modules())
    differences = list(_different_tensors(model, expected))
    if model.code != expected.code:
        differences.append(("`model.code`: the code of the forward was changed", False))
    for path, module in actual_modules.items():
        if path in expected_modules:
            texts = _different_module(module, expected_modules[path], root=not path)
            differences += [(f"{path or 'the model'}{text}", False) for text in texts]
        elif path.rpartition(".")[0] in expected_modules:
            differences.append((f"{path}: a module that the spec does not build, {type(module).__name__}", False))
    for path in expected_modules:
        if path not in actual_modules and path.rpartition(".")[0] in actual_modules:
            differences.append((f"{path}: the module is missing", False))
    return differences


def _different_tensors(model: nn.Module, expected: nn.Module) -> Iterator[tuple[str, bool]]:
    actual_tensors, expected_tensors = model.state_dict(keep_vars=True), expected.state_dict(keep_vars=True)
    for name, tensor in actual_tensors.items():
        if name not in expected_tensors:
            yield f"{name}: a tensor that the spec does not have", True
        elif tensor.shape != expected_tensors[name].shape:
            yield f"{name}: {list(tensor.shape)}, and {list(expected_tensors[name].shape)} by the spec", True
    for name in expected_tensors:
        if name not in actual_tensors:
            yield f"{name}: the tensor is missing", True


def _different_module(module: nn.Module, expected: nn.Module, *, root: bool) -> Iterator[str]:
    """Yield the differences of a module without its children, as text that follows its path."""
    if type(module) is not type(expected) and not isinstance(expected, fx.GraphModule):
        yield f": {type(module).__name__}, and {type(expected).__name__} by the spec"
        return
    if isinstance(expected, fx.GraphModule) and not root and getattr(module, "code", None) != expected.code:
        yield ": the code of its forward was changed"
    if "forward" in vars(module):
        yield ".forward: replaced on the module"
    if has_forward_hook(module):
        yield ": a forward hook, which can change its output"
    if has_forward_pre_hook(module):
        yield ": a forward pre-hook, which can change its inputs"
    attributes = vars(module)
    for name, value in vars(expected).items():
        if name in OF_TORCH or name.startswith("_") or (root and name == "meta") or name == "recompute":
            continue
        if name not in attributes:
            yield f".{name}: the attribute is missing"
        elif not _equal(attributes[name], value):
            yield f".{name}: {_text(attributes[name])}, and {_text(value)} by the spec"


def _equal(actual: Any, expected: Any) -> bool:
    """Return whether two attributes are equal. Objects that are no plain values, such as contexts, are not compared."""
    if isinstance(expected, PLAIN):
        return isinstance(actual, PLAIN) and actual == expected
    if isinstance(expected, Mapping):
        return (
            isinstance(actual, Mapping)
            and actual.keys() == expected.keys()
            and all(_equal(actual[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, Sequence)
            and len(actual) == len(expected)
            and all(_equal(*pair) for pair in zip(actual, expected, strict=True))
        )
    if isinstance(expected, partial):
        parts = [(value.func, value.args, value.keywords) for value in (actual, expected) if isinstance(value, partial)]
        return len(parts) == 2 and _equal(*parts)
    if isinstance(expected, MethodType):
        return isinstance(actual, MethodType) and actual.__func__ is expected.__func__
    return actual is expected if isinstance(expected, FUNCTIONS) else type(actual) is type(expected)


def _text(value: object) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _undo(model: nn.Module) -> str:
    """Return the help for changed tensors: how to undo the change that renamed them."""
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        return "merge the adapters first: `merge_and_unload()` of PEFT"
    if any(hasattr(module, "parametrizations") for module in model.modules()):
        return "remove the parametrizations first: `torch.nn.utils.parametrize.remove_parametrizations`"
    return "describe the change in the spec, and load the weights into its model"
