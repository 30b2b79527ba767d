"""Reading a sweep: from its file to checked values, and variants as runs that are not resolved yet.

A key of a variant that contains a point is a path, and its value is set as by `--set`. Every other key changes the run
as in a run that extends it: mappings merge, and a different kind discards the fields of the previous kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, Span, SpecError, quoted
from tfkit.plugin.manager import Plugins
from tfkit.run.read_run import RunText
from tfkit.run.run_spec import ENDS, RunSpec
from tfkit.run.sweep_spec import ONLY_VARIANT, PARAMS, Range, SweepSpec
from tfkit.spec import source
from tfkit.spec.document import check_sort
from tfkit.spec.extending import named_at, short_path
from tfkit.spec.merge import Change
from tfkit.spec.provenance import Provenance
from tfkit.spec.read_document import find_document
from tfkit.spec.resolve import Resolver
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Node, Scalar
from tfkit.spec.tree import Sequence as ListNode


@dataclass(frozen=True)
class Setting:
    """The path of a setting, and its values in the grid or in tuning, or their range with its location in the file."""

    path: str
    values: tuple[Change, ...]
    range: Range | None
    key: Span

    def change(self, value: Any) -> Change:
        """Return the change that sets a value of the range."""
        return _setting_change(self.path, self.key, Scalar(value, self.key))


@dataclass(frozen=True)
class SweepFile:
    """A sweep that has been read. `variants` are unresolved runs by name, and `sizes` the paths of its sizes."""

    name: str
    config: SweepSpec
    variants: Mapping[str, RunText]
    sizes: tuple[Setting, ...]
    grid: tuple[Setting, ...]
    tuned: tuple[Setting, ...]
    tokens: Scalar | None
    provenance: Provenance
    file: str

    def error(self, message: str, *path: str, notes: tuple[str, ...] = (), help: str | None = None) -> SpecError:
        """Build an error about a value of the sweep."""
        return SpecError(Diagnostic(message, self.provenance.span(path), ".".join(path), notes, help))


def read_sweep(name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> SweepFile:
    """Read a sweep and the run that it varies, changed by `sets` (`path=value`).

    Raises SpecError with every error in the sweep, or in the run.
    """
    path = find_document(name, SweepSpec, plugins.specs)
    root = source.read(path, name=str(short_path(path)))
    check_sort(root, SweepSpec)
    resolver = Resolver(plugins)
    config = resolver.config(SweepSpec, root, (), {})
    if resolver.diagnostics:
        raise SpecError(*resolver.diagnostics)
    span = root.items["base"].span
    with named_at(span, "base"):
        base_path = find_document(config.base, RunSpec, plugins.specs, folder=path.parent, span=span, key="base")
        base = RunText.read(base_path, plugins, sets=sets)
    tune, tokens = root.items.get("tune"), root.items.get("tokens")
    file = SweepFile(
        path.stem,
        config,
        _variant_runs(root, base, path.parent, plugins),
        () if PARAMS in config.sizes else _read_settings(root.items.get("sizes"), {}),
        _read_settings(root.items.get("grid"), {}),
        _read_settings(
            tune.items["over"] if isinstance(tune, Tree) else None, config.tune.ranges if config.tune else {}
        ),
        tokens if isinstance(tokens, Scalar) and tokens.value is not None else None,
        resolver.provenance,
        str(short_path(path)),
    )
    _check_lengths(file, sets)
    return file


def _check_lengths(file: SweepFile, sets: Iterable[str]) -> None:
    """Raise SpecError if a run's length is set in addition to the `tokens` of the sweep."""
    if file.tokens is None:
        return
    locations = [("variants", name, key) for name, changes in file.config.variants.items() for key in changes]
    settings = [
        *(("sizes", setting.path) for setting in file.sizes),
        *(("grid", setting.path) for setting in file.grid),
        *(("tune", "over", setting.path) for setting in file.tuned),
    ]
    assigned = [("tokens", setting.partition("=")[0].strip()) for setting in sets]
    for *location, key in (*locations, *settings, *assigned):
        if key in ENDS:
            raise file.error(
                f"`{key}` has no effect with the sweep's `tokens`", *location, key, help="remove one of the two"
            )


def _variant_runs(root: Tree, base: RunText, folder: Path, plugins: Plugins) -> dict[str, RunText]:
    variants = root.items.get("variants")
    if not isinstance(variants, Tree):
        return {ONLY_VARIANT: base}
    runs, errors = {}, []
    for name, changes in variants.items.items():
        assert isinstance(changes, Tree)
        try:
            runs[name] = _changed_run(base, changes, folder, plugins)
        except SpecError as error:
            errors += [_prefixed_diagnostic(diagnostic, "variants", name) for diagnostic in error.diagnostics]
    if errors:
        raise SpecError(*errors)
    return runs


def _changed_run(run: RunText, changes: Tree, folder: Path, plugins: Plugins) -> RunText:
    for name, value in changes.items.items():
        key = changes.keys[name]
        if name in ("seed", "tfkit", "extends"):
            help = "set the `seeds` of the sweep, which apply to all variants" if name == "seed" else None
            raise SpecError(Diagnostic(f"a variant cannot change `{name}`", key, name, help=help))
        if "." in name:
            run = run.assigned(_setting_change(name, key, value), plugins)
        else:
            run = run.merged(Tree({name: value}, {name: key}, changes.span), folder, plugins)
    return run


def _read_settings(node: Node | None, ranges: Mapping[str, Range]) -> tuple[Setting, ...]:
    if not isinstance(node, Tree):
        return ()
    settings = []
    for path, values in node.items.items():
        key = node.keys[path]
        listed = values.items if isinstance(values, ListNode) else ()
        changes = tuple(_setting_change(path, key, value) for value in listed)
        settings.append(Setting(path, changes, ranges.get(path), key))
    return tuple(settings)


def _setting_change(path: str, key: Span, value: Node) -> Change:
    if not all(path.split(".")):
        help = "write a path such as `model.decoder.n_layers: 2`"
        raise SpecError(Diagnostic(f"{quoted(path)} is not a path of keys and points", key, path, help=help))
    return Change(tuple((part, key) for part in path.split(".")), value)


def _prefixed_diagnostic(diagnostic: Diagnostic, *path: str) -> Diagnostic:
    return replace(diagnostic, path=".".join((*path, diagnostic.path)).rstrip("."))
