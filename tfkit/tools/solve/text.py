"""A size as a separate spec, which extends the spec that it is a size of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfkit.plugin.known_specs import KnownSpecs
from tfkit.plugin.manager import Plugins
from tfkit.spec.extending import SUFFIXES, find_spec, is_folder
from tfkit.spec.load import read_tree
from tfkit.spec.merge import assign, word_key
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.render import render_tree, schema_line
from tfkit.spec.tree import Mapping, Node, Scalar, node_of

_ODD = re.compile(r"[^A-Za-z0-9_.-]+")


def extending(spec: str, sets: Iterable[str], path: Path, plugins: Plugins, **values: Any) -> str:
    """Write the YAML of a spec that extends `spec` with changes, as `--set` takes them; `path` gives it its name.

    `values` are further values at the top of the spec.
    """
    base = read_tree(spec, plugins.specs)
    fields = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
    changed = base
    for change in sets:
        changed = assign(changed, change, fields)
    tree = _difference(base, changed, ())
    name = _ODD.sub("_", path.stem).strip("_.-") or "solved"
    head = node_of(
        {"tfkit": 1, "extends": _reference(spec, path.parent, plugins.specs), "name": name, **values}, base.span
    )
    assert isinstance(head, Mapping)
    return schema_line(path.parent) + render_tree(
        Mapping({**head.items, **tree.items}, {**head.keys, **tree.keys}, base.span)
    )


def _reference(spec: str, folder: Path, specs: KnownSpecs) -> str:
    """Return how a spec in `folder` refers to another spec."""
    if not spec.endswith(SUFFIXES) and os.sep not in spec and not is_folder(spec, specs):
        return spec
    relative = os.path.relpath(find_spec(spec, specs).resolve(), folder.resolve())
    return relative if os.sep in relative else f".{os.sep}{relative}"


def _difference(old: Mapping, new: Mapping, path: tuple[str, ...]) -> Mapping:
    """Return the patch that turns `old` into `new` by `extends`. A component whose kind changes is replaced."""
    items: dict[str, Node] = {}
    for name, node in new.items.items():
        before = old.items.get(name)
        if before == node:
            continue
        here = (*path, name)
        if isinstance(before, Mapping) and isinstance(node, Mapping) and _kind(before, here) == _kind(node, here):
            items[name] = _difference(before, node, here)
        else:
            items[name] = node
    gone = {name: Scalar(None, new.span) for name in old.items if name not in new.items}
    keys = {name: new.keys.get(name, new.span) for name in (*items, *gone)}
    return Mapping({**items, **gone}, keys, new.span)


def _kind(node: Mapping, path: tuple[str, ...]) -> object:
    word = node.items.get(word_key(path))
    return word.value if isinstance(word, Scalar) else None
