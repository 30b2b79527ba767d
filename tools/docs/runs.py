"""The runs and sweeps that come with tfkit: a page for each, with its plan."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tfkit.cli import main
from tfkit.plugin.known_specs import built_in_specs_folder
from tfkit.spec.source import plain_data, read
from tfkit.tools.list_.gallery import ShippedDocument, shipped_documents
from tools.docs.page import Page, code, hidden_index, joined, link, plugins, prose, table

ACTIONS = {"run": "train", "sweep": "sweep"}


def path_of(sort: str, name: str) -> str:
    """Return the path of the page of a run or a sweep."""
    return f"{sort}s/{name}"


def file_of(entry: ShippedDocument) -> Path:
    """Return the file of a run or a sweep."""
    return built_in_specs_folder() / f"{entry.sort}s" / f"{entry.name}.yaml"


def pages() -> Iterator[Page]:
    """Yield the page of all runs and sweeps, and the page of each."""
    yield Page("runs/index", _index)
    for entry in shipped_documents():
        yield Page(path_of(entry.sort, entry.name), partial(_page, entry))


def _index() -> str:
    parts = [
        "# Runs and sweeps",
        "A run trains a model; a sweep compares variants of a run. Commands take them by name, from any folder.",
    ]
    for sort, title in ("run", "Runs"), ("sweep", "Sweeps"):
        rows = [
            (link(e.name, path_of(sort, e.name)), prose(e.description or ""))
            for e in shipped_documents()
            if e.sort == sort
        ]
        parts += [f"## {title}", table([sort, "description"], rows)]
    parts.append(hidden_index(path_of(entry.sort, entry.name) for entry in shipped_documents()))
    return joined(parts)


def _page(entry: ShippedDocument) -> str:
    command = plan_of(entry)
    return joined(
        [
            f"# {entry.sort.capitalize()} {entry.name}",
            prose(entry.description or ""),
            f"Source: <{entry.source}>" if entry.source else "",
            code(f"tfkit {ACTIONS[entry.sort]} {entry.name} -o out", "sh"),
            "## Plan",
            f"`tfkit {' '.join(command)}` prints the sizes and the costs, and trains nothing:",
            code(printed(command)),
            "## The file",
            code(file_of(entry).read_text(encoding="utf-8"), "yaml"),
        ]
    )


def plan_of(entry: ShippedDocument) -> list[str]:
    """Return the command that prints the plan; for a run that begins with trained weights, the plan without them."""
    weights = plain_data(read(file_of(entry))).get("weights")
    return [ACTIONS[entry.sort], entry.name, "--plan", *(["--set", "weights=null"] if weights is not None else [])]


def printed(command: list[str]) -> str:
    """Return the output of a tfkit command. Raise RuntimeError if it fails."""
    output = io.StringIO()
    with (
        redirect_stdout(output),
        patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"),
        patch("tfkit.plugin.manager.load_plugins", lambda **options: plugins()),  # each command would load them again
    ):
        status = main(command)
    if status != 0:
        raise RuntimeError(f"`tfkit {' '.join(command)}` must end with status 0; got {status}")
    return output.getvalue()
