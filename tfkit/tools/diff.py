"""Show the differences between two specs or published models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option
from tfkit.console.output import print_json, print_tables, table, with_titles

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.show.differences import Difference


@command(
    "diff",
    section="Specs",
    order=540,
    notes="""
    A value that several components inherit is one line, and `name`, `source` and
    `description` are left out. Below the line are consequences: values that both
    write as the same arithmetic, and the parameters. The exit status is 0 whether
    they differ or not.

    A and B are specs or published models: a config.json, or a folder with one and
    without a spec, is read as `tfkit import` reads it; --set does not change it.
    """,
    examples="""
    tfkit diff gpt2 gpt2_medium
    tfkit diff llama2_70b llama3_70b --json
    tfkit diff my_llama.yaml downloads/Llama-3.2-1B
    """,
)
@click.argument("before", metavar="A", shell_complete=complete_spec)
@click.argument("after", metavar="B", shell_complete=complete_spec)
@click.option(
    "--family",
    metavar="SPEC",
    shell_complete=complete_spec,
    help="The spec that defines the fields of a config.json.  [default: by model_type]",
)
@json_option
def diff(reader: Reader, before: str, after: str, family: str | None, json: bool) -> None:
    published = [_is_published(reader, name) for name in (before, after)]
    if family is not None and not any(published):
        raise click.UsageError("--family has no effect: neither A nor B has a config.json")
    if reader.sets and all(published):
        raise click.UsageError("--set has no effect: A and B are published models")
    graphs = [
        _imported_graph(reader, name, family) if theirs else reader.load(name)
        for name, theirs in zip((before, after), published, strict=True)
    ]
    a, b = with_titles(graphs, (before, after))
    from tfkit.tools.params.count import count_params
    from tfkit.tools.show.differences import spec_differences

    changes, counts = spec_differences(a, b), [count_params(graph).total for graph in (a, b)]
    if json:
        print_json({"a": a.name, "b": b.name, "differences": changes, "parameters": counts})
    else:
        _show_differences(changes, (a.name, b.name), counts)


def _is_published(reader: Reader, name: str) -> bool:
    """Return True for a config.json, or a folder that contains one but no spec."""
    from tfkit.spec.extending import is_folder
    from tfkit.spec.folder import CONFIG, SPEC

    folder = Path(name)
    has_config, has_spec = (os.path.exists(folder / file) for file in (CONFIG, SPEC))
    alone = is_folder(name, reader.plugins.specs) and has_config and not has_spec
    return alone or name.endswith(".json")


def _imported_graph(reader: Reader, config: str, family: str | None) -> Graph:
    from tfkit.tools.import_.importing import import_config

    return import_config(config, family=family, plugins=reader.plugins).graph


def _show_differences(changes: Sequence[Difference], names: Sequence[str], counts: Sequence[int]) -> None:
    if not changes:
        print_tables("no value differs", "")
    causes, consequences = ([change for change in changes if change.follows is follows] for follows in (False, True))
    rows = [
        [_path_text(change), _or_dash(change.before), _or_dash(change.after)] for change in (*causes, *consequences)
    ]
    rows.append(["parameters", *(f"{count:,}" for count in counts)])
    print_tables(table(["value", *names], rows, footer=len(consequences) + 1))


def _path_text(change: Difference) -> str:
    return change.path if len(change.paths) == 1 else f"{change.path} ({len(change.paths)} paths)"


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text
