"""The reference of the kinds: a page for each slot, and for each kind its fields, formula, papers and specs."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from tfkit import reference
from tfkit.plugin.registry import Registered, first_paragraph
from tfkit.tools.components.component_docs import ComponentDoc, FieldDoc, component_doc, slot_doc
from tfkit.tools.show.prose import papers_of
from tools.docs import models
from tools.docs.guide import code_path, source_page
from tools.docs.page import (
    ORPHAN,
    ROOT,
    Page,
    code,
    docstring,
    hidden_index,
    joined,
    link,
    plugins,
    prose,
    search_entries,
    stacked,
    table,
)

MAX_SPECS = 40
"""Maximum number of specs on the page of a kind."""


def path_of(slot: str, kind: str = "index") -> str:
    """Return the path of the page of a slot or a kind."""
    return f"kinds/{slot}/{kind}"


def pages() -> Iterator[Page]:
    """Yield the page of all slots, the page of each slot, of each kind, and of each file that defines kinds."""
    registry = plugins().registry
    yield Page("kinds/index", _index)
    files = set()
    for slot in registry.slots():
        yield Page(path_of(slot), partial(_slot, slot))
        for kind, registered in registry.kinds(slot).items():
            yield Page(path_of(slot, kind), partial(_kind, registered))
            files.add(Path(registered.file))
    for file in sorted(files):
        yield Page(code_path(file), partial(source_page, file))


def _index() -> str:
    registry = plugins().registry
    rows = [
        (
            link(slot, path_of(slot)),
            prose(slot_doc(registry, slot)),
            ", ".join(link(kind, path_of(slot, kind)) for kind in registry.kinds(slot)),
        )
        for slot in registry.slots()
    ]
    text = "Every kind of every slot, with the kinds of tfkit's plugins. `tfkit components` prints the same."
    return joined(
        [
            "# Kinds",
            text,
            stacked(table(["slot", "purpose", "kinds"], rows)),
            hidden_index(map(path_of, registry.slots())),
        ]
    )


def _slot(slot: str) -> str:
    kinds = plugins().registry.kinds(slot)
    rows = [
        (link(kind, path_of(slot, kind)), entry.plugin, prose(first_paragraph(entry.config.__doc__ or "")))
        for kind, entry in kinds.items()
    ]
    return joined(
        [
            f"# Slot `{slot}`",
            prose(slot_doc(plugins().registry, slot)),
            stacked(table(["kind", "from", "description"], rows)),
        ]
    )


def _kind(registered: Registered) -> str:
    doc = component_doc(registered)
    papers = papers_of(registered.config)
    users = models.users().get((doc.slot, doc.kind), [])
    return joined(
        [
            f"{ORPHAN}# {doc.kind} ({doc.slot})",
            search_entries([doc.kind]) if doc.slot in models.MECHANISMS else "",
            f"A kind of the slot {link(doc.slot, path_of(doc.slot))}, {_origin(doc)}.",
            docstring(doc.doc),
            "## Fields" if doc.fields else "",
            stacked(table(["field", "type", "default", "meaning"], map(_field, sorted(doc.fields, key=_order)))),
            *_formula(doc),
            "## Papers and source",
            "\n".join(f"- <{paper}>" for paper in papers),
            f"- {link(_relative(doc.file), code_path(Path(doc.file)))}",
            "## Specs with this kind" if users else "",
            ", ".join(link(name, models.path_of(name)) for name in users[:MAX_SPECS])
            + (f", and {len(users) - MAX_SPECS} more" if len(users) > MAX_SPECS else ""),
        ]
    )


def _origin(doc: ComponentDoc) -> str:
    return "built in" if doc.plugin == "built in" else f"from the plugin {doc.plugin}"


def _relative(file: str) -> str:
    return Path(file).relative_to(ROOT).as_posix()


def _order(field: FieldDoc) -> int:
    """Return the rank of a field in the table: required fields first, and inherited fields last."""
    return 2 if field.inherited else 1 if field.default is not None else 0


def _field(field: FieldDoc) -> tuple[str, ...]:
    default = "required" if field.default is None else f"`{field.default}`"
    return f"`{field.name}`", field.type, f"inherited, or {default}" if field.inherited else default, prose(field.doc)


def _formula(doc: ComponentDoc) -> Iterator[str]:
    """Yield the formula of a kind: its function of the reference."""
    function = formulas().get(doc.slot, {}).get(doc.kind)
    if function is None:
        return
    yield "## Formula"
    bound = function.keywords if isinstance(function, partial) else {}
    plain = function.func if isinstance(function, partial) else function
    yield f"What it computes, in NumPy, for one sequence: {link('the meaning of a spec', 'docs/reference')}."
    values = [f"`{name}` is `{_name_of(value)}`" for name, value in bound.items()]
    yield f"Here {' and '.join(values)}." if values else ""
    functions = [plain, *filter(inspect.isfunction, bound.values())]
    yield code("\n\n".join(textwrap.dedent(inspect.getsource(part)) for part in _with_helpers(functions)), "python")


def _with_helpers(functions: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return functions, followed by the functions of the same module that they call."""
    pending, result = list(functions), []
    while pending:
        function = pending.pop(0)
        if function not in result:
            result.append(function)
            values = (function.__globals__.get(name) for name in _names_in(function.__code__))
            pending += [
                value for value in values if inspect.isfunction(value) and value.__module__ == function.__module__
            ]
    return result


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function uses, also inside comprehensions, which are functions in Python 3.11."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _name_of(value: Any) -> str:
    """Return the name of a bound value: for a function of the reference, its kind."""
    kinds = (kind for by_kind in formulas().values() for kind, function in by_kind.items() if function is value)
    return next(kinds, getattr(value, "__name__", str(value)))


def formulas() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the functions of the reference by slot and kind, with the functions of the plugins."""
    functions = {slot: dict(kinds) for slot, kinds in reference.BUILT_IN.items()}
    answers = plugins().hooks.call("tfkit_reference", dict)
    for _, by_slot in answers.values:
        for slot, kinds in by_slot.items():
            functions.setdefault(slot, {}).update(kinds)
    return functions
