"""One class of an ejected file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from tfkit.tools.eject.cleanup import reads

CONFIG = "config"
"""Name of the config in `__init__`."""


class Statement(NamedTuple):
    """A statement of an `__init__`: the texts of values in it by slot, and the function that writes it with others."""

    values: Mapping[str, str]
    write: Callable[..., str]


@dataclass
class Class:
    """A class of the file.

    Attributes:
        modules: the modules of this class; of modules that are alike only one.
        slots: the places in its `__init__` that take a value, each with the text of that value by module.
        arguments: the name of the argument for each slot that differs between its modules.
        children: the classes of its children, those in lists among them.
    """

    name: str
    base: str
    docs: str
    modules: list[nn.Module]
    methods: dict[str, str]
    slots: dict[str, dict[nn.Module, str]] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    children: list[Class] = field(default_factory=list)

    def value(self, slot: str, module: nn.Module) -> str:
        """The text for a slot: the argument that carries its value, or the value itself."""
        return self.arguments.get(slot) or self.slots[slot][module]

    def call(self, module: nn.Module) -> str:
        """The call that makes a module of this class."""
        return self.made({name: self.slots[slot][module] for slot, name in self.arguments.items()})

    def made(self, given: Mapping[str, str]) -> str:
        """The call with these texts of arguments."""
        parts = [CONFIG] * self.takes_config + [f"{name}={text}" for name, text in given.items()]
        return f"{self.name}({', '.join(parts)})"

    @property
    def takes_config(self) -> bool:
        """True if its `__init__` reads the config."""
        fixed = [texts[self.modules[0]] for slot, texts in self.slots.items() if slot not in self.arguments]
        return any(one.takes_config for one in self.children) or any(CONFIG in reads(ast.parse(text)) for text in fixed)
