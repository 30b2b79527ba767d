"""Show the differences between two specs or published models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.options import json_option
from tfkit.console.output import merged, print_json, retitled, show, table

if TYPE_CHECKING:
    from tfkit.graph.expand import Graph
    from tfkit.tools.show.resolved_values import ResolvedValue


@command(
    "diff",
    notes="""
    A value that several components inherit is one line, and `name`, `source` and
    `description` are left out. The exit status is 0 whether they differ or not.

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
        _imported(reader, name, family) if theirs else reader.load(name)
        for name, theirs in zip((before, after), published, strict=True)
    ]
    a, b = retitled(graphs, (before, after))
    from tfkit.tools.params.count import count_params

    changes, counts = differences(a, b), [count_params(graph).total for graph in (a, b)]
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


def _imported(reader: Reader, config: str, family: str | None) -> Graph:
    from tfkit.tools.import_.importing import import_config

    return import_config(config, family=family, plugins=reader.plugins).graph


def _show_differences(changes: Sequence[Any], names: Sequence[str], counts: Sequence[int]) -> None:
    rows = [[_places(change), _or_dash(change.before), _or_dash(change.after)] for change in changes]
    if not rows:
        show("no value differs", "")
    rows.append(["parameters", *(f"{count:,}" for count in counts)])
    show(table(["value", *names], rows, footer=1))


def _places(change: Any) -> str:
    return change.path if len(change.places) == 1 else f"{change.path} ({len(change.places)} places)"


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text


# ---- the differences between two specs, value by value ----


WORDS = frozenset({"name", "source", "description", "parameters", "checkpoint"})
"""Values at the top of a spec that do not affect the model."""


@dataclass(frozen=True)
class Difference:
    """A value that differs; None if a spec has no such value. `places` are the paths where it does."""

    path: str
    before: str | None
    after: str | None
    places: tuple[str, ...]


def differences(before: Graph, after: Graph) -> list[Difference]:
    """Compare the resolved values of two specs.

    A value that both inherit in several places, such as `d_model`, is one difference. For a component that only one of
    them has, the written values count, but not the defaults.
    """
    old, new = _values(before), _values(after)
    paths: dict[tuple[str, str | None, str | None], list[str]] = {}
    for path in merged([list(old), list(new)]):
        texts = _text(old.get(path)), _text(new.get(path))
        if texts[0] != texts[1] and not (_follows(path, old, new) or _follows(path, new, old)):
            paths.setdefault((_name(old.get(path), new.get(path)), *texts), []).append(path)
    return [Difference(name, old_text, new_text, tuple(places)) for (name, old_text, new_text), places in paths.items()]


def _follows(path: str, there: Mapping[str, ResolvedValue], missing: Mapping[str, ResolvedValue]) -> bool:
    """Return True if only one spec has a value and does not write it: the value comes with its component."""
    value = there.get(path)
    if value is None or path in missing or value.how == "given":
        return False
    part = path.rpartition(".")[0]
    return part not in missing or value.value == "null"


def _values(graph: Graph) -> Mapping[str, ResolvedValue]:
    from tfkit.tools.show.resolved_values import values_of

    return {value.dotted: value for value in values_of(graph) if value.path[0] not in WORDS}


def _text(value: ResolvedValue | None) -> str | None:
    return None if value is None else value.value or "..."


def _name(*values: ResolvedValue | None) -> str:
    """Return the path of a value, or only its key if both specs inherit it."""
    there = [value for value in values if value is not None]
    inherited = len(there) == 2 and all(value.how == "inherited" for value in there)
    return there[0].name if inherited else there[0].dotted
