"""One class of an ejected file."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from tfkit.tools.eject.cleanup import reads
from tfkit.tools.eject.config import CONFIG, Config
from tfkit.tools.eject.functions import INDENT, docs_text


class Statement(NamedTuple):
    """A statement of an `__init__`: its text with a blank `{}` for each value, and the texts of the values by slot."""

    text: str
    values: Mapping[str, str]


@dataclass(eq=False)
class Class:
    """A class of the file.

    Attributes:
        methods: their texts.
        filling: the statements that fill its tensors, at the end of its `__init__`.
        children: the classes of its children, including children in lists.
        statements: the statements of its `__init__` that make attributes, tensors and children.
        values: of each module the text of the value of each slot: of each place in them that takes a value.
        arguments: the name of the argument for each slot that differs between its modules.
    """

    name: str
    base: str
    docs: str
    methods: list[str]
    filling: list[str]
    children: list[Class]
    statements: list[Statement] = field(default_factory=list)
    values: dict[nn.Module, dict[str, str]] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)

    def given(self, module: nn.Module) -> dict[str, str]:
        """Return the texts of the arguments that make a module of this class."""
        return {name: self.values[module][slot] for slot, name in self.arguments.items()}

    def call(self, arguments: Mapping[str, str]) -> str:
        """Return the call with these argument texts."""
        parts = [CONFIG] * self.takes_config + [f"{name}={text}" for name, text in arguments.items()]
        return f"{self.name}({', '.join(parts)})"

    @property
    def takes_config(self) -> bool:
        """True if its `__init__` reads the config."""
        first = next(iter(self.values.values()))
        fixed = [text for slot, text in first.items() if slot not in self.arguments]
        return any(child.takes_config for child in self.children) or any(
            CONFIG in reads(ast.parse(text)) for text in fixed
        )

    def source(self, config: Config) -> str:
        """Return the class as text."""
        parts = [f"{docs_text(self.docs)}\n"] if self.docs else []
        body = "\n\n".join([*self._init(config), *self.methods])
        return f"class {self.name}({self.base}):\n" + textwrap.indent("\n".join([*parts, body]), INDENT)

    def _init(self, config: Config) -> list[str]:
        """Return the `__init__`; empty if the `__init__` of the base class is enough."""
        lines = [
            statement.text.format(*(self.arguments.get(slot, text) for slot, text in statement.values.items()))
            for statement in self.statements
        ]
        lines += self.filling
        if not lines:
            return []
        arguments = list(map(self.given, self.values))
        typed = [f"{name}: {_type_text([texts[name] for texts in arguments], config)}" for name in arguments[0]]
        head = ", ".join(["self", *([f"{CONFIG}: Config"] if self.takes_config else []), *typed])
        steps = textwrap.indent("\n".join(["super().__init__()", *lines]), INDENT)
        return [f"def __init__({head}) -> None:\n{steps}"]


def _type_text(texts: list[str], config: Config) -> str:
    """Return the type of an argument that has these values."""
    if texts[0].startswith("nn."):
        return texts[0].partition("(")[0]
    values = [config.value(text) for text in texts]
    if isinstance(first := values[0], list | tuple):
        return f"list[{type(first[0]).__name__}]"
    return " | ".join(sorted({"None" if value is None else type(value).__name__ for value in values}))
