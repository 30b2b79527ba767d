"""The specs that a name refers to, also of missing plugins, listed without building models or running plugins.

In addition, the runs and the sweeps that come with tfkit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tfkit.errors import SpecError
from tfkit.plugin import missing
from tfkit.plugin.discover import BUILT_IN, canonical
from tfkit.plugin.known_specs import own_specs
from tfkit.plugin.manager import Available, available
from tfkit.run.read_run import shipped_runs
from tfkit.run.read_sweep import shipped_sweeps
from tfkit.spec.extending import Read
from tfkit.spec.load import read_tree
from tfkit.spec.source import plain, read

EXPERIMENTS: tuple[Literal["run", "sweep"], ...] = ("run", "sweep")
SORTS = {f"{sort}s": sort for sort in EXPERIMENTS}
"""The sorts by plural, which users may also write."""


@dataclass(frozen=True)
class Shipped:
    """A spec that a name refers to.

    Attributes:
        plugin: the label of the plugin that contains it, or `built in`; only the plugin's name if it is not available.
        kind: `decoder`, `encoder`, or `encoder-decoder`; empty if the spec cannot be read.
        parameters: the number of parameters, if the spec states it.
        model_type: the family of its published checkpoint, if any.
        requires: the plugins that contain its components.
        missing: the required plugins that are not available.
    """

    name: str
    plugin: str
    kind: str
    parameters: int | None
    description: str | None
    model_type: str | None
    source: str | None
    requires: tuple[str, ...]
    missing: tuple[str, ...]
    error: str | None = None
    """The reason why the spec cannot be read, such as a missing plugin with a spec that it extends."""
    sort: Literal["model"] = "model"


@dataclass(frozen=True)
class Experiment:
    """A run or a sweep that comes with tfkit."""

    name: str
    sort: Literal["run", "sweep"]
    description: str | None
    source: str | None


def shipped(words: Collection[str] = (), plugins: Available | None = None) -> list[Shipped]:
    """Return every known spec that has all of these words in its name, kind, family, plugins or description.

    `plugins` are the available plugins; by default the plugins that would be loaded.
    """
    installed = plugins or available()
    cached_read = cache(read)  # many specs extend the same files
    specs = [_shipped(name, installed, cached_read) for name in installed.specs.files]
    specs = sorted([*specs, *_absent(installed)], key=lambda spec: spec.name)
    return [spec for spec in specs if all(word.casefold() in _text(spec) for word in words)]


def experiments(words: Collection[str] = ()) -> list[Experiment]:
    """Return each run and sweep that comes with tfkit and has all of these words in its name, sort or description."""
    names = {"run": shipped_runs(), "sweep": shipped_sweeps()}
    entries = [_experiment(name, sort) for sort in EXPERIMENTS for name in names[sort]]
    words = [SORTS.get(word.casefold(), word) for word in words]
    texts = [" ".join(filter(None, (entry.name, entry.sort, entry.description))).casefold() for entry in entries]
    return [entry for entry, text in zip(entries, texts, strict=True) if all(word.casefold() in text for word in words)]


def _experiment(name: str, sort: Literal["run", "sweep"]) -> Experiment:
    root = plain(read(own_specs() / f"{sort}s" / f"{name}.yaml"))
    return Experiment(name, sort, root.get("description"), root.get("source"))


def _shipped(name: str, installed: Available, read: Read) -> Shipped:
    plugin = installed.specs.files[name].plugin
    try:
        spec = plain(read_tree(name, installed.specs, read=read))
    except SpecError as error:
        return Shipped(name, plugin, "", None, None, None, None, (), (), error.diagnostics[0].message)
    blocks = {node.get("block") for node in spec["graph"].values() if isinstance(node, dict)}
    kind = "encoder-decoder" if {"encoder", "decoder"} <= blocks else "encoder" if "encoder" in blocks else "decoder"
    family, requires = spec.get("checkpoint"), tuple(spec.get("requires") or ())
    return Shipped(
        name=name,
        plugin=plugin,
        kind=kind,
        parameters=spec.get("parameters"),
        description=spec.get("description"),
        model_type=family.get("model_type", family.get("extends")) if isinstance(family, dict) else family,
        source=spec.get("source"),
        requires=requires,
        missing=tuple(text for text in requires if not _is_there(text, installed)),
    )


def _is_there(text: str, installed: Available) -> bool:
    from tfkit.plugin import required  # packaging takes a while to import

    try:
        requirement = required.parsed(text)
    except ValueError:
        return False
    version = installed.versions.get(canonical(requirement.name))
    return version is not None and required.fits(requirement, version)


def _absent(installed: Available) -> Iterator[Shipped]:
    """Yield the specs of tfkit's plugins that are not available."""
    for plugin, specs in missing.specs_elsewhere().items():
        if plugin not in installed.versions:
            for name in specs.keys() - installed.specs.files.keys():
                yield Shipped(name, plugin, "", None, None, specs[name] or None, None, (plugin,), (plugin,))


def _text(spec: Shipped) -> str:
    plugin = None if spec.plugin == BUILT_IN else spec.plugin
    texts = (spec.name, spec.kind, spec.model_type, spec.description, plugin, *spec.requires)
    return " ".join(filter(None, texts)).casefold()
