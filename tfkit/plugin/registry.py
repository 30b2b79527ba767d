"""The available components: config classes by slot and kind, each with the plugin that registered it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import PydanticUserError

from tfkit.component import Component, Config, SharedMarker, marker
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.plugin.import_code import MODULE_PREFIX

WORD = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Registered:
    """A component, and the label of its plugin: `built in`, `tfkit-additive 0.1.0` or a path."""

    config: type[Component]
    plugin: str

    @property
    def file(self) -> str:
        """The file of the class, or the name of its module if it was not read from a file."""
        return _class_file(self.config) or self.config.__module__

    def __str__(self) -> str:
        return f"{self.plugin}: `{self.config.__qualname__}`, {class_location(self.config)}"


class Registry:
    """The components that specs can use. `load_plugins` fills a registry; a test may also fill a registry by hand."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[str, Registered]] = {}
        self._shared: frozenset[str] | None = None

    def add(self, config: type[Component], plugin: str) -> None:
        """Add a component of `plugin`.

        Raise `TypeError` if the class is not a valid config (see `check_config`), and `SpecError` if its kind is taken
        or if another plugin declares a slot of the same name.
        """
        check_config(config)
        new = Registered(config, plugin)
        slot, kind = config.slot, config.kind_name()
        registered = self._slots.setdefault(slot, {})
        other = next(iter(registered.values()), None)  # all kinds of a slot have the same base class
        if other is not None and slot_base(other.config) is not slot_base(config):
            raise _clash_error(f"slot `{slot}` has two base classes", other, new)
        if kind in registered:
            raise _clash_error(f"kind `{kind}` of slot `{slot}` is registered twice", registered[kind], new)
        registered[kind] = new
        self._shared = None

    def slots(self) -> list[str]:
        """Return the sorted names of all slots that have a component."""
        return sorted(self._slots)

    def kinds(self, slot: str, base: type[Component] | None = None) -> dict[str, Registered]:
        """Return the components of a slot, sorted by kind; with `base`, only subclasses of `base`."""
        entries = sorted(self._slots.get(slot, {}).items())
        return {kind: entry for kind, entry in entries if base is None or issubclass(entry.config, base)}

    def find(self, slot: str, kind: str) -> Registered | None:
        """Return the component of a kind for a slot; None if it does not exist."""
        return self._slots.get(slot, {}).get(kind)

    def slots_of(self, kind: str) -> list[str]:
        """Return the sorted names of the slots that have a kind, as help for a kind in the wrong slot."""
        return [slot for slot in self.slots() if kind in self._slots[slot]]

    def shared_names(self) -> frozenset[str]:
        """Return the names of all fields that are inherited from the enclosing mappings of a spec."""
        if self._shared is None:
            self._shared = self._find_shared()
        return self._shared

    def _find_shared(self) -> frozenset[str]:
        configs: set[type[Config]] = set()
        for kinds in self._slots.values():
            for entry in kinds.values():
                _collect_configs(entry.config, configs)
        fields = [item for config in configs for item in config.model_fields.items()]
        return frozenset(name for name, field in fields if marker(field, SharedMarker))


def check_config(config: object) -> type[Component]:
    """Return the config class if it can fill a slot; raise `TypeError` naming the fault otherwise."""
    if not (isinstance(config, type) and issubclass(config, Component)):
        hint = ": pass the class instead of an object" if isinstance(config, Component) else ""
        type_name = config.__name__ if isinstance(config, type) else type(config).__name__
        raise TypeError(f"register() must be called with a subclass of tfkit.Component; got `{type_name}`{hint}")
    try:
        config.model_rebuild()
    except (NameError, PydanticUserError) as error:
        cause = str(error).partition("\n")[0]
        raise TypeError(f"the annotations of `{config.__name__}` do not resolve: {cause}") from error
    slot_base(config)
    _check_kind(config)
    _check_complete(config)
    return config


def slot_base(config: type[Component]) -> type[Component]:
    """Return the base class that declares the slot of `config`; raise `TypeError` unless there is exactly one slot."""
    bases = [base for base in config.__mro__[1:] if issubclass(base, Component) and "slot" in vars(base)]
    if not bases:
        raise TypeError(f"`{config.__name__}` needs the base class of a slot, such as tfkit.FFNConfig")
    slots = sorted({base.slot for base in [config, *bases]})
    if len(slots) > 1:
        raise TypeError(f"`{config.__name__}` must have a single slot; got {listing(slots)}")
    return bases[-1]


def _check_kind(config: type[Component]) -> None:
    key = str(config.word_key)
    field = config.model_fields.get(key)
    example = f'write `{key}: Literal["name"] = "name"`'
    if field is None:
        raise TypeError(f"`{config.__name__}` has no field `{key}`: {example}")
    words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if len(words) != 1 or not isinstance(words[0], str):
        raise TypeError(f"`{config.__name__}.{key}` must be a Literal of one name: {example}")
    if field.default != words[0]:
        default = "nothing" if field.is_required() else repr(field.default)
        raise TypeError(f"`{config.__name__}.{key}`: its Literal {words[0]!r} must equal its default; got {default}")
    if not WORD.fullmatch(words[0]):
        raise TypeError(f"`{config.__name__}.{key}`: {words[0]!r} is not a lower-case word such as `double_gelu`")


def _check_complete(config: type[Component]) -> None:
    """Raise `TypeError` unless every abstract method is defined, and `build` even if no base class declares it."""
    missing = sorted(getattr(config, "__abstractmethods__", ()))
    asked = any(getattr(base, "__abstractmethods__", ()) for base in config.__mro__)
    if not missing and not asked and not hasattr(config, "build"):
        missing = ["build"]
    if missing:
        raise TypeError(f"`{config.__name__}` does not define {listing(f'`{name}`' for name in missing)}")


def written_in(cls: type) -> str:
    """Return the module of a class, or its file if the module cannot be imported by name."""
    return (_class_file(cls) if cls.__module__.startswith(MODULE_PREFIX) else None) or cls.__module__


def class_location(cls: type) -> str:
    """Return the file and line of a class; the name of its module if it was not read from a file."""
    try:
        return f"{inspect.getfile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__


def last_line(cls: type, error: BaseException) -> tuple[str, ...]:
    """Return the last line, `file:number`, that ran in a class's folder before an error; empty if there is none."""
    file = _class_file(cls)
    frames = [] if file is None else traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if Path(frame.filename).parent == Path(file or "").parent]
    return tuple(f"{frame.filename}:{frame.lineno}" for frame in lines[-1:])


def _class_file(cls: type) -> str | None:
    try:
        return inspect.getfile(cls)
    except (OSError, TypeError):
        return None


def _collect_configs(annotation: Any, into: set[type[Config]]) -> None:
    """Add the configs that an annotation names, and those that their fields name, to a set."""
    for part in get_args(annotation):
        _collect_configs(part, into)
    if not isinstance(annotation, type) or not issubclass(annotation, Config) or annotation in into:
        return
    into.add(annotation)
    for field in annotation.model_fields.values():
        _collect_configs(field.annotation, into)


def _clash_error(message: str, *both: Registered) -> SpecError:
    help = "rename one of the two, or switch one plugin off by its name: TFKIT_DISABLE=<name>"
    return SpecError(Diagnostic(message, notes=tuple(map(str, both)), help=help))


# ---- the documentation of a config's fields: the text below each field in the source ----
#
# The source is read on demand: pydantic's `use_attribute_docstrings` would read the source of every class during the
# import, which takes longer than the rest of the import.


def first_paragraph(docs: str) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(inspect.cleandoc(docs).partition("\n\n")[0].split())


@cache
def field_docs(config: type[Config]) -> Mapping[str, str]:
    """Return the texts of a config's fields by name, inherited fields included; fields without a text are omitted."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        docs |= _class_docs(base.__module__).get(base.__qualname__, {})
    described = {name: info.description for name, info in config.model_fields.items() if info.description}
    return {name: text for name, text in {**docs, **described}.items() if name in config.model_fields}


@cache
def _class_docs(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the texts in each class of a module, by its qualified name; empty if there is no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return {}
    return {name: dict(_attribute_docs(node)) for name, node in _qualified_classes(tree, "")}


def _qualified_classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from _qualified_classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _qualified_classes(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from _qualified_classes(node, prefix)


def _attribute_docs(tree: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield field.target.id, inspect.cleandoc(below.value.value)
