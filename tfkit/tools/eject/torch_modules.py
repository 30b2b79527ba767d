"""Modules of torch, and the arguments that they are made with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tfkit.nn
from tfkit.tools.eject.code import refuse
from tfkit.tools.eject.same_modules import MADE_WITH, is_torch, plain

STANDS_FOR: dict[type[nn.Module], type[nn.Module]] = {tfkit.nn.Linear: nn.Linear, tfkit.nn.Table: nn.Embedding}
"""Modules that differ from torch's only in their initial values."""
CONTAINERS = {"nn.ModuleList": nn.ModuleList, "nn.ModuleDict": nn.ModuleDict, "nn.Sequential": nn.Sequential}
OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_LEFT_OUT = ("self", "device", "_weight", "_freeze")


def is_container(module: nn.Module) -> bool:
    """Return True for a plain list, mapping or sequence of modules."""
    return type(module) in CONTAINERS.values()


def has_torch_class(module: nn.Module) -> bool:
    """Return True if the file makes a module with a class of torch."""
    return is_torch(module) or type(module) in STANDS_FOR


def torch_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of torch with which the file makes a module."""
    return STANDS_FOR.get(type(module), type(module))


def base_of(module: nn.Module) -> str:
    """Return the base class, in the file, of the class of a module."""
    return next((name for name, kind in CONTAINERS.items() if isinstance(module, kind)), "nn.Module")


def arguments_of(module: nn.Module) -> dict[str, Any]:
    """Return the arguments that make this module of torch, without arguments that have their default values.

    Those without a name are `arg_0`, `arg_1`, ...
    """
    args, kwargs = module.__dict__.get(MADE_WITH, ((), {}))
    signature = inspect.signature(torch_class(module))
    parameters = signature.parameters
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {f"arg_{index}": item for index, item in enumerate(value)}
        else:
            arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    default = {name: parameter.default for name, parameter in parameters.items()}
    return {
        name: value for name, value in arguments.items() if name not in _LEFT_OUT and not _is(value, default.get(name))
    }


def _is(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, bool | int | float | str | tuple) and bool(value == default))


def made_by_torch(module: nn.Module, texts: Mapping[str, str]) -> str:
    """Return the call that makes a module of torch; arguments without a default have no names."""
    kind = torch_class(module)
    signature = inspect.signature(kind).parameters
    parts = [text if _is_positional(name, signature) else f"{name}={text}" for name, text in texts.items()]
    return f"nn.{kind.__name__}({', '.join(parts)})"


def _is_positional(name: str, signature: Mapping[str, inspect.Parameter]) -> bool:
    if name not in signature:
        return name.startswith("arg_")
    return signature[name].default is inspect.Parameter.empty


def check_as_made(module: nn.Module) -> None:
    """Raise SpecError unless a module of torch is as its public class makes it from its arguments."""
    kind = type(module)
    if kind in STANDS_FOR or kind in OF_PARAMETERS:
        return
    if getattr(nn, kind.__name__, None) is not kind:
        raise refuse(module, "torch.nn has it under no name of its own")
    if any(not is_torch(child) for child in module.modules()):
        raise refuse(module, "it calls modules that are not torch's own")
    args, kwargs = module.__dict__.get(MADE_WITH, ((), {}))
    with torch.device("meta"):
        again = kind(*args, **kwargs)
    if _seen(again) != _seen(module):
        raise refuse(module, "it was changed after it was made; make it with these arguments, or in a class of yours")


def _seen(module: nn.Module) -> object:
    """Return the state of a module, in which any change of the module shows."""
    inner = [
        (path, type(child), {n: repr(v) for n, v in plain(child).items() if not n.startswith("_")})
        for path, child in module.named_modules(remove_duplicate=False)
    ]
    return inner, [(name, tensor.shape) for name, tensor in module.state_dict().items()]


def name_of(value: Any) -> str | None:
    """Return the public name of a function or class of torch."""
    for prefix, owner in (("nn.functional", F), ("torch", torch), ("nn", nn)):
        if (name := getattr(value, "__name__", "")) and getattr(owner, name, None) is value:
            return f"{prefix}.{name}"
    return None
