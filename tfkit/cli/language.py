"""Commands about the spec language: schema, components, plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.cli.options import Reader, command, json_option
from tfkit.errors import Diagnostic, SpecError, closest, listing, quoted

if TYPE_CHECKING:
    from tfkit.plugin.manager import Plugins
    from tfkit.tools.component_docs import ComponentDoc, FieldDoc


@command(
    "schema",
    sets=False,
    notes="""
    Editors complete and check a spec that begins with the line
    # yaml-language-server: $schema=schema.json
    """,
    examples="""
    tfkit schema -o schema.json
    tfkit schema --plugin-dir plugins/ -o schema.json
    """,
)
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write to a file.")
def schema(reader: Reader, output: Path | None) -> None:
    """Print the JSON Schema of specs, all plugins included."""
    import json

    from tfkit.spec.schema import json_schema

    text = json.dumps(json_schema(reader.plugins), indent=2)
    if output is None:
        click.echo(text)
        return
    from tfkit.tools.atomic_files import write_file

    write_file(output, f"{text}\n")


@command(
    "components",
    sets=False,
    examples="""
    tfkit components
    tfkit components attention
    tfkit components attention gqa
    """,
)
@click.argument("slot", required=False)
@click.argument("kind", required=False)
@json_option
def components(reader: Reader, slot: str | None, kind: str | None, json: bool) -> None:
    """Show the kinds of each slot of a spec, and their fields."""
    from tfkit.cli.output import print_json
    from tfkit.tools.component_docs import describe

    registry = reader.plugins.registry
    slots = registry.slots()
    if slot is not None and slot not in slots:
        raise _unknown("slot", slot, slots)
    if slot is not None and kind is not None and registry.find(slot, kind) is None:
        raise _unknown(f"{slot} kind", kind, list(registry.kinds(slot)))
    found = [describe(one) for name in slots if slot in (None, name) for one in registry.kinds(name).values()]
    found = [one for one in found if kind in (None, one.kind)]
    if json:
        print_json(found)
    elif slot is None:
        _show_slots(reader.plugins, found)
    elif kind is None:
        _show_kinds(found)
    else:
        _show_component(found[0])


def _unknown(what: str, word: str, known: Sequence[str]) -> SpecError:
    near = closest(word, known)
    help = f"a {what.split()[-1]} with a similar name exists: `{near}`" if near else None
    return SpecError(Diagnostic(f"unknown {what} {quoted(word)}", notes=(f"known: {listing(known, 40)}",), help=help))


def _show_slots(plugins: Plugins, found: Sequence[ComponentDoc]) -> None:
    from tfkit.cli.output import show, table
    from tfkit.tools.component_docs import slot_doc

    kinds: dict[str, list[str]] = {}
    for one in found:
        kinds.setdefault(one.slot, []).append(one.kind)
    rows = [(slot, ", ".join(names), slot_doc(plugins.registry, slot)) for slot, names in kinds.items()]
    show(table(["slot", "kinds", "purpose"], rows))


def _show_kinds(found: Sequence[ComponentDoc]) -> None:
    from tfkit.cli.output import show, table
    from tfkit.plugin.docs import first_paragraph

    show(table(["kind", "from", "description"], [(one.kind, one.plugin, first_paragraph(one.doc)) for one in found]))


def _show_component(one: ComponentDoc) -> None:
    from rich.padding import Padding

    from tfkit.cli.output import show

    parts: list[Padding | str] = [f"{one.slot} `{one.kind}`, {one.plugin}", one.doc]
    for field in one.fields:
        parts += ["", f"{field.name}: {field.type}, {_default(field)}"]
        parts += [Padding(" ".join(field.doc.split()), (0, 0, 0, 4))] if field.doc else []
    show(*parts)


def _default(field: FieldDoc) -> str:
    if field.default is None:
        return "inherited or required" if field.inherited else "required"
    return f"inherited or {field.default}" if field.inherited else f"default {field.default}"


@command(
    "plugins",
    sets=False,
    notes="""
    Loading a plugin runs its code. Plugins are loaded if they are installed, or in
    the folders of TFKIT_PLUGIN_DIR (absolute paths, separated as in PATH) or of
    --plugin-dir. A spec lists the plugins that it needs in `requires`; it never
    loads one.
    """,
    examples="""
    tfkit plugins
    tfkit plugins --plugin-dir plugins/
    export TFKIT_PLUGIN_DIR=$PWD/plugins
    TFKIT_DISABLE=tfkit-additive tfkit plugins
    """,
)
@json_option
def plugins(reader: Reader, json: bool) -> None:
    """Show the plugins: loaded, broken and why, switched off."""
    from tfkit.cli.output import print_json, show, table

    found = reader.found
    if json:
        print_json(
            {
                "loaded": [{**vars(one), "components": len(one.components)} for one in found.loaded],
                "broken": found.broken,
                "disabled": found.disabled,
            }
        )
        return
    rows = [(one.name, one.version, one.origin, str(len(one.components))) for one in found.loaded]
    show(table(["plugin", "version", "from", "components"], rows, right=["components"]), *_left_out(found))


def _left_out(found: Plugins) -> Iterator[str]:
    for broken in found.broken:
        yield f"\nbroken: {broken.name}, from {broken.origin}\n  {broken.cause}"
        yield from (f"  {text}" for text in (broken.where, broken.help) if text)
    if found.disabled:
        yield f"\nswitched off: {', '.join(found.disabled)}"
