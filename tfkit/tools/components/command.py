"""Show the kinds of each slot of a spec, and their fields."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_slot
from tfkit.console.options import json_option
from tfkit.console.output import print_json, print_tables, table
from tfkit.errors import Diagnostic, SpecError, listing, quoted, similar_name_help

if TYPE_CHECKING:
    from tfkit.plugin.manager import Plugins
    from tfkit.tools.components.component_docs import ComponentDoc, FieldDoc


@command(
    "components",
    section="The language",
    order=620,
    sets=False,
    examples="""
    tfkit components
    tfkit components attention
    tfkit components attention gqa
    """,
)
@click.argument("slot", required=False, shell_complete=complete_slot)
@click.argument("kind", required=False, shell_complete=complete_slot)
@json_option
def components(reader: Reader, slot: str | None, kind: str | None, json: bool) -> None:
    from tfkit.tools.components.component_docs import component_doc

    registry = reader.plugins.registry
    slots = registry.slots()
    if slot is not None and slot not in slots:
        raise _unknown_word("slot", slot, slots, [doc for doc in slots if registry.find(doc, slot) is not None])
    if slot is not None and kind is not None and registry.find(slot, kind) is None:
        raise _unknown_word(f"{slot} kind", kind, list(registry.kinds(slot)))
    docs = [component_doc(doc) for name in slots if slot in (None, name) for doc in registry.kinds(name).values()]
    docs = [doc for doc in docs if kind in (None, doc.kind)]
    if json:
        print_json(docs)
    elif slot is None:
        _show_slots(reader.plugins, docs)
    elif kind is None:
        _show_kinds(docs)
    else:
        _show_component(docs[0])


def _unknown_word(what: str, word: str, names: Sequence[str], slots: Sequence[str] = ()) -> SpecError:
    """Return the error for an unknown word; `slots` have a kind of this name."""
    from tfkit.plugin.missing import where_kind_is
    from tfkit.spec.extending import plugin_folders

    kinds = " or ".join(f"`{shlex.join(['tfkit', 'components', slot, word])}`" for slot in slots)
    help = f"name the slot of the kind: {kinds}" if kinds else where_kind_is(word, plugin_folders())
    help = help or similar_name_help(f"a {what.split()[-1]}", word, names)
    return SpecError(Diagnostic(f"unknown {what} {quoted(word)}", notes=(f"known: {listing(names, 40)}",), help=help))


def _show_slots(plugins: Plugins, docs: Sequence[ComponentDoc]) -> None:
    from tfkit.tools.components.component_docs import slot_doc

    kinds: dict[str, list[str]] = {}
    for doc in docs:
        kinds.setdefault(doc.slot, []).append(doc.kind)
    rows = [(slot, ", ".join(names), slot_doc(plugins.registry, slot)) for slot, names in kinds.items()]
    print_tables(table(["slot", "kinds", "purpose"], rows))


def _show_kinds(docs: Sequence[ComponentDoc]) -> None:
    from tfkit.plugin.registry import first_paragraph

    print_tables(
        table(["kind", "from", "description"], [(doc.kind, doc.plugin, first_paragraph(doc.doc)) for doc in docs])
    )


def _show_component(component: ComponentDoc) -> None:
    from rich.padding import Padding

    doc = "\n\n".join(" ".join(paragraph.split()) for paragraph in component.doc.split("\n\n"))
    parts: list[Padding | str] = [f"{component.slot} `{component.kind}`, {component.plugin}", doc]
    for field in component.fields:
        parts += ["", f"{field.name}: {field.type}, {_default_text(field)}"]
        parts += [Padding(" ".join(field.doc.split()), (0, 0, 0, 4))] if field.doc else []
    print_tables(*parts)


def _default_text(field: FieldDoc) -> str:
    if field.default is None:
        return "inherited or required" if field.inherited else "required"
    return f"inherited or {field.default}" if field.inherited else f"default {field.default}"
