"""The specs that have a bare name, listed without building any or running a plugin; those of missing plugins too.

In addition, the runs and the sweeps that come with tfkit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tfkit.errors import SpecError
from tfkit.plugin import elsewhere
from tfkit.plugin.discover import BUILT_IN, canonical
from tfkit.plugin.known_specs import own_specs
from tfkit.plugin.manager import Available, available
from tfkit.spec.extending import Read
from tfkit.spec.load import read_tree
from tfkit.spec.read_run import shipped_runs
from tfkit.spec.read_sweep import shipped_sweeps
from tfkit.spec.source import plain, read

EXPERIMENTS: tuple[Literal["run", "sweep"], ...] = ("run", "sweep")


@dataclass(frozen=True)
class Shipped:
    """A spec that has a bare name.

    Attributes:
        plugin: the label of the plugin that brings it, or `built in`; its name if it is not available.
        kind: `decoder`, `encoder`, or `encoder-decoder`; empty if the spec cannot be read.
        parameters: their number, if it is stated.
        model_type: the family of its published checkpoint, if it has one.
        requires: the plugins that its components come from.
        missing: those of them that are not available.
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
    """The reason why it cannot be read, such as a spec of another plugin that it extends."""
    sort: Literal["model"] = "model"


@dataclass(frozen=True)
class Experiment:
    """A run or a sweep that comes with tfkit."""

    name: str
    sort: Literal["run", "sweep"]
    description: str | None
    source: str | None


def shipped(words: Collection[str] = (), plugins: Available | None = None) -> list[Shipped]:
    """Every known spec that has all of these words in its name, kind, family, plugins or description.

    `plugins` are the available ones; those that would be loaded unless given.
    """
    there = plugins or available()
    remembering = cache(read)  # the files that many others extend
    found = [_shipped(name, there, remembering) for name in there.specs.files]
    found = sorted([*found, *_absent(there)], key=lambda one: one.name)
    return [one for one in found if all(word.casefold() in _text(one) for word in words)]


def experiments(words: Collection[str] = ()) -> list[Experiment]:
    """Return each run and sweep that comes with tfkit and has all of these words in its name, sort or description."""
    names = {"run": shipped_runs(), "sweep": shipped_sweeps()}
    every = [_experiment(name, sort) for sort in EXPERIMENTS for name in names[sort]]
    texts = [" ".join(filter(None, (one.name, one.sort, one.description))).casefold() for one in every]
    return [one for one, text in zip(every, texts, strict=True) if all(word.casefold() in text for word in words)]


def _experiment(name: str, sort: Literal["run", "sweep"]) -> Experiment:
    root = plain(read(own_specs() / f"{sort}s" / f"{name}.yaml"))
    return Experiment(name, sort, root.get("description"), root.get("source"))


def _shipped(name: str, there: Available, read: Read) -> Shipped:
    plugin = there.specs.files[name].plugin
    try:
        spec = plain(read_tree(name, there.specs, read=read))
    except SpecError as wrong:
        return Shipped(name, plugin, "", None, None, None, None, (), (), wrong.diagnostics[0].message)
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
        missing=tuple(text for text in requires if not _is_there(text, there)),
    )


def _is_there(text: str, there: Available) -> bool:
    from tfkit.plugin import required  # packaging takes a while to import

    try:
        wanted = required.parsed(text)
    except ValueError:
        return False
    version = there.versions.get(canonical(wanted.name))
    return version is not None and required.fits(wanted, version)


def _absent(there: Available) -> Iterator[Shipped]:
    """The specs of tfkit's own plugins that are not available."""
    for plugin, specs in elsewhere.specs().items():
        if plugin not in there.versions:
            for name in specs.keys() - there.specs.files.keys():
                yield Shipped(name, plugin, "", None, None, specs[name] or None, None, (plugin,), (plugin,))


def _text(one: Shipped) -> str:
    plugin = None if one.plugin == BUILT_IN else one.plugin
    texts = (one.name, one.kind, one.model_type, one.description, plugin, *one.requires)
    return " ".join(filter(None, texts)).casefold()
