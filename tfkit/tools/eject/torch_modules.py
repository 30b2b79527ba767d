"""Modules that torch has: what they are made with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

import tfkit.nn

STANDS_FOR: dict[type, type] = {tfkit.nn.Linear: nn.Linear, tfkit.nn.Table: nn.Embedding}
"""Modules that are torch's but for how they are filled."""


def is_container(module: nn.Module) -> bool:
    """Whether it is a plain list or mapping of modules."""
    return type(module) in (nn.ModuleList, nn.ModuleDict)


def arguments_of(module: nn.Module) -> dict[str, Any]:
    """What torch's module of that kind is made with, as far as it is not the default."""
    kind: Callable[..., Any] = STANDS_FOR.get(type(module), type(module))
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in ("self", "device", "dtype", "_weight", "_freeze") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        value = value is not None if name == "bias" and not isinstance(value, bool) else value
        if value != parameter.default:
            found[name] = value
    return found


def made_by_torch(module: nn.Module, values: Mapping[str, str]) -> str:
    """The call that makes one of torch's modules; what has no default comes without its name."""
    kind = STANDS_FOR.get(type(module), type(module))
    signature = inspect.signature(kind).parameters
    values = {name: re.sub(r"^\((.*),\)$", r"\1", text) for name, text in values.items()}  # a width of one axis
    parts = [
        text if signature[name].default is inspect.Parameter.empty else f"{name}={text}"
        for name, text in values.items()
    ]
    return f"nn.{kind.__name__}({', '.join(parts)})"
