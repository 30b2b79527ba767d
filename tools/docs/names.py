"""The reference of the public names: a page for each group of docs/names.md."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import tfkit
from tfkit.plugin.registry import _class_docs
from tools.docs.page import ROOT, Page, code, docstring, hidden_index, joined, link, prose, table

NAMES = ROOT / "docs" / "names.md"


def groups() -> dict[str, list[tuple[str, str]]]:
    """Return the groups of public names, each with its names and their purposes from docs/names.md."""
    titles = {}
    for part in re.split(r"^## ", NAMES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| (`.*?) \| (.*) \|$", part, re.MULTILINE)
        names = [(name, purpose) for cell, purpose in rows for name in re.findall(r"`(\w+)`", cell)]
        titles[part.partition("\n")[0]] = names
    return titles


def path_of(title: str) -> str:
    """Return the path of a group's page."""
    return f"api/{re.sub(r'[^a-z]+', '-', title.lower()).strip('-')}"


def pages() -> Iterator[Page]:
    """Yield the page of all names, and the page of each group."""
    yield Page("api/index", _index)
    for title in groups():
        yield Page(path_of(title), partial(_group, title))


def _index() -> str:
    parts = ["# Python", "All public names of `tfkit`; [their purposes in one line each](/docs/names.md)."]
    for title, names in groups().items():
        parts.append(f"## {link(title, path_of(title))}")
        parts.append(", ".join(f"[`{name}`](#tfkit.{name})" for name, _ in names))
    return joined([*parts, hidden_index(map(path_of, groups()))])


def _group(title: str) -> str:
    return joined([f"# {title}", *(entry(name) for name, _ in groups()[title])])


def entry(name: str) -> str:
    """Return the entry of a name: its signature, its description, and the pages that use it."""
    value = getattr(tfkit, name)
    sort = "class" if inspect.isclass(value) else "function" if isinstance(value, FunctionType) else "data"
    signature = "" if sort == "data" else _signature(value)
    lines = joined([description(name), _uses(name), f"Defined in `{_home(name)}`."])
    return f"## {name}\n\n```````{{py:{sort}}} tfkit.{name}{signature}\n\n{lines}```````\n"


def description(name: str) -> str:
    """Return the docstring of a name; for a class also its fields and methods."""
    value = getattr(tfkit, name)
    if inspect.isclass(value):
        return _class(value)
    has_docstring = isinstance(value, FunctionType | ModuleType)
    return docstring(value.__doc__ or "" if has_docstring else _alias_doc(_home(name), name))


def _home(name: str) -> str:
    return str(tfkit._homes(tfkit._STUB)[name])  # type: ignore[attr-defined]


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (ValueError, TypeError):
        return ""
    if inspect.isclass(value) and not is_dataclass(value):
        return ""  # configs are written in specs, and the fields follow
    text = re.sub(r"<function .*? at 0x[0-9a-f]+>", "...", text)  # an address differs from build to build
    return re.sub(r"'([^']*)'", r"\1", text).removesuffix(" -> None" if inspect.isclass(value) else "\0")


def _class(cls: type) -> str:
    docs = _class_docs(cls.__module__).get(cls.__qualname__, {})
    rows = [(f"`{name}`", prose(docs[name]), f"`{default}`") for name, default in _fields(cls) if docs.get(name)]
    methods = [f"- `{name}{_signature(method)}`: {_first(method)}" for name, method in _methods(cls)]
    return joined(
        [
            docstring(cls.__doc__ or ""),
            table(["field", "meaning", "default"], rows),
            "**Methods and properties**" if methods else "",
            "\n".join(methods),
        ]
    )


def _fields(cls: type) -> Iterator[tuple[str, str]]:
    if is_dataclass(cls):
        for field in fields(cls):
            yield field.name, "required" if field.default is MISSING else repr(field.default)
    for name, info in getattr(cls, "model_fields", {}).items():
        yield name, "required" if info.is_required() else str(info.get_default(call_default_factory=False))


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and isinstance(function, FunctionType) and function.__doc__:
            yield name, function


def _first(function: Any) -> str:
    return prose(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0])


def _alias_doc(home: str, name: str) -> str:
    """Return the text below the assignment of a name, in its module or in a module that it is imported from."""
    tree = ast.parse(inspect.getsource(import_module(home)))
    for node, below in zip(tree.body, tree.body[1:], strict=False):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return str(below.value.value)
    sources = [
        f"{home}.{node.module}" if node.level else node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names)
    ]
    return _alias_doc(sources[0], name) if sources else ""


@cache
def _blocks() -> tuple[tuple[str, str], ...]:
    """Return the Python blocks of all pages, each with the path of its page."""
    fence = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return tuple(
        (page.relative_to(ROOT).with_suffix("").as_posix(), block)
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for block in fence.findall(page.read_text(encoding="utf-8"))
    )


def _uses(name: str) -> str:
    """Return an example line that uses a name, and the pages that use the name."""
    uses = re.compile(rf"\btfkit\.{name}\b")
    matches = [(page, block) for page, block in _blocks() if uses.search(block)]
    if not matches:
        return ""
    statements = [text for _, block in matches for text in _statements(block) if uses.search(text)]
    statement = min(statements, key=len)
    links = ", ".join(link(page.rpartition("/")[2], page) for page in dict.fromkeys(page for page, _ in matches))
    return f"**Example**, from the pages {links}:\n\n{code(statement, 'python')}"


def _statements(block: str) -> Iterator[str]:
    """Yield the statements of a block, with their decorators."""
    lines = block.splitlines()
    for node in ast.parse(block).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        yield "\n".join(lines[first - 1 : node.end_lineno])
