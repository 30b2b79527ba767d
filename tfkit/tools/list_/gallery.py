"""The specs that a name refers to, also of missing plugins, listed without building models or running plugins.

In addition, the named documents of further types, such as runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tfkit.errors import SpecError
from tfkit.plugin import missing
from tfkit.plugin.discover import BUILT_IN, normalized_name
from tfkit.plugin.known_specs import SpecPath
from tfkit.plugin.manager import Available, available_plugins
from tfkit.spec.extending import Read
from tfkit.spec.load import read_tree
from tfkit.spec.source import plain_data, read


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
class PublishedFolder:
    """The folder with weights that a spec loads.

    Attributes:
        spec: the name of the spec.
        folder: the folder's name on the Hugging Face Hub; None if it is not known.
        compared: true if the names of all tensors of the folder were compared with the spec.
    """

    spec: str
    folder: str | None
    compared: bool


@dataclass(frozen=True)
class ShippedDocument:
    """A document of a further type, such as a run, that a name refers to.

    Attributes:
        sort: the name of its type.
        plugin: the label of the plugin that contains it, or `built in`.
    """

    name: str
    sort: str
    plugin: str
    description: str | None
    source: str | None
    error: str | None = None
    """The reason why the document cannot be read."""


def shipped_specs(words: Collection[str] = (), plugins: Available | None = None) -> list[Shipped]:
    """Return every known spec that has all of these words in its name, kind, family, plugins or description.

    `plugins` are the available plugins; by default the plugins that would be loaded.
    """
    installed = plugins or available_plugins()
    cached_read = cache(read)  # many specs extend the same files
    specs = [_shipped_spec(name, installed, cached_read) for name in installed.specs.files]
    specs = sorted([*specs, *_absent_specs(installed)], key=lambda spec: spec.name)
    return [spec for spec in specs if all(word.casefold() in _search_text(spec) for word in words)]


def published_folders(specs: Iterable[Shipped]) -> list[PublishedFolder]:
    """Return the folder of each spec whose family has published checkpoints."""
    tables = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    folders = {**tables["from_memory"], **tables["compared"]}
    names = [spec.name for spec in specs if spec.model_type]
    return [PublishedFolder(name, folders.get(name), name in tables["compared"]) for name in names]


def shipped_documents(words: Collection[str] = (), plugins: Available | None = None) -> list[ShippedDocument]:
    """Return the named documents of all further types that have all of these words in their name, type or description.

    Words may also be the plural of a type. `plugins` are as for `shipped_specs`.
    """
    documents = (plugins or available_plugins()).specs.documents
    entries = [
        _shipped_document(name, sort, file) for sort, named in documents.items() for name, file in named.files.items()
    ]
    singular = {f"{sort}s": sort for sort in documents}
    words = [singular.get(word.casefold(), word.casefold()) for word in words]
    texts = [" ".join(filter(None, (entry.name, entry.sort, entry.description))).casefold() for entry in entries]
    return [entry for entry, text in zip(entries, texts, strict=True) if all(word in text for word in words)]


def _shipped_document(name: str, sort: str, file: SpecPath) -> ShippedDocument:
    try:
        root: dict[str, Any] = plain_data(read(file.path))
    except SpecError as error:
        return ShippedDocument(name, sort, file.plugin, None, None, error.diagnostics[0].message)
    return ShippedDocument(name, sort, file.plugin, root.get("description"), root.get("source"))


def _shipped_spec(name: str, installed: Available, read: Read) -> Shipped:
    plugin = installed.specs.files[name].plugin
    try:
        spec = plain_data(read_tree(name, installed.specs, read=read))
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
        requirement = required.parse_requirement(text)
    except ValueError:
        return False
    version = installed.versions.get(normalized_name(requirement.name))
    return version is not None and required.is_satisfied(requirement, version)


def _absent_specs(installed: Available) -> Iterator[Shipped]:
    """Yield the specs of tfkit's plugins that are not available."""
    for plugin, specs in missing.specs_elsewhere().items():
        if plugin not in installed.versions:
            for name in specs.keys() - installed.specs.files.keys():
                yield Shipped(name, plugin, "", None, None, specs[name] or None, None, (plugin,), (plugin,))


def _search_text(spec: Shipped) -> str:
    plugin = None if spec.plugin == BUILT_IN else spec.plugin
    texts = (spec.name, spec.kind, spec.model_type, spec.description, plugin, *spec.requires)
    return " ".join(filter(None, texts)).casefold()
