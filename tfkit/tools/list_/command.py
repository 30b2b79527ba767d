"""List the specs of tfkit and of plugins, and the runs and sweeps of tfkit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.options import json_option
from tfkit.console.output import print_json, print_tables, table
from tfkit.tools.common.units import count_text

if TYPE_CHECKING:
    from tfkit.plugin.manager import Available
    from tfkit.tools.list_.gallery import PublishedFolder, Shipped, ShippedDocument

NAME = re.compile(r"[^\w.-]")
"""Matches the first character after the name of a plugin in `requires`."""


@command(
    "list",
    section="Specs",
    order=510,
    sets=False,
    notes="""
    Only specs with all WORDs in their name, kind, model family, plugins, or
    description are listed. Missing plugins of a spec are named; none is loaded.
    Runs and sweeps, which follow the specs, have `run` or `sweep` as their kind.
    With --published, `compared` is `tensors` if the names of all tensors of the
    folder, or of a copy or fine-tune of it, were compared with the spec. Other
    folders are named from memory.
    """,
    examples="""
    tfkit list
    tfkit list encoder bert
    tfkit list sweep
    tfkit list --published granite
    """,
)
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--published", is_flag=True, help="List the published folder that each spec loads.")
@json_option
def list_(reader: Reader, words: tuple[str, ...], published: bool, json: bool) -> None:
    from tfkit.tools.list_.gallery import published_folders, shipped_documents, shipped_specs

    if published:
        folders = published_folders(shipped_specs(words, reader.available))
        if json:
            print_json(folders)
        else:
            _show_folders(folders)
        return
    specs, entries = shipped_specs(words, reader.available), shipped_documents(words, reader.available)
    documents = reader.available.specs.documents
    if json:
        print_json([*specs, *entries])
        return
    if specs or not entries:
        _show_specs(specs)
    for sort, named in documents.items():
        rows = [(entry.name, _entry_text(entry)) for entry in entries if entry.sort == sort]
        if rows:
            print_tables(table([f"tfkit {named.command}" if named.command else sort, "description"], rows), "")
    counts = [(len(specs), "spec"), *((sum(entry.sort == sort for entry in entries), sort) for sort in documents)]
    texts = [f"{count} {sort}{'s' if count != 1 else ''}" for count, sort in counts if count]
    print_tables(", ".join(texts) or "0 specs", *_install_hints(specs, reader.available))


def _show_specs(specs: Sequence[Shipped]) -> None:
    columns = ["name", "kind", "size", "description"]
    kinds = {"encoder-decoder": "enc-dec"}
    rows = [
        (
            spec.name,
            kinds.get(spec.kind, spec.kind),
            count_text(spec.parameters) if spec.parameters else "",
            _entry_text(spec, spec.missing),
        )
        for spec in specs
    ]
    print_tables(table(columns, rows, right=["size"]), "")


def _show_folders(folders: Sequence[PublishedFolder]) -> None:
    rows = [(entry.spec, entry.folder or "", "tensors" if entry.compared else "") for entry in folders]
    n_folders = sum(entry.folder is not None for entry in folders)
    print_tables(table(["spec", "folder", "compared"], rows), f"{n_folders} of {len(rows)} folders are known")


def _entry_text(entry: Shipped | ShippedDocument, missing: Sequence[str] = ()) -> str:
    from tfkit.plugin.discover import BUILT_IN

    needs = f"needs {', '.join(missing)}" if missing else ""
    origin = f"from {entry.plugin}" if entry.plugin not in (BUILT_IN, *missing) else ""
    return "; ".join(filter(None, (entry.description, entry.error, origin, needs)))


def _install_hints(specs: Sequence[Shipped], installed: Available) -> Iterator[str]:
    """Yield how to install the plugins that some of the specs need."""
    from tfkit.plugin.discover import normalized_name
    from tfkit.plugin.missing import where_it_is
    from tfkit.spec.extending import plugin_folders

    for text in sorted({text for spec in specs for text in spec.missing}):
        count, name = sum(text in spec.missing for spec in specs), NAME.split(text)[0]
        if normalized_name(name) in installed.versions:
            version = installed.versions[normalized_name(name)] or "none"
            yield f"\n{text}, needed by {count}, is another version than {version}"
        else:
            help = where_it_is(name, plugin_folders())
            yield f"\n{text}, needed by {count}, is not loaded: {help}"
