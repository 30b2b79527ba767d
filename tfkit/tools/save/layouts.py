"""Layouts of `tfkit save`: their base class, and the layouts of all plugins by name."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from torch import fx

from tfkit.checkpoint.weight_map import SHARD
from tfkit.errors import Diagnostic, SpecError, listing, quoted, similar_name_help
from tfkit.plugin.discover import DISABLE
from tfkit.plugin.manager import Plugins
from tfkit.spec.folder import CONFIG, EXPORT_CONFIG, GENERATION, INDEX, SPEC, WEIGHTS
from tfkit.tools.common.atomic_files import names_in
from tfkit.tools.common.companions import NO_COMPANIONS, Companions, is_companion


@dataclass(frozen=True)
class ModelOrigin:
    """The origin of a model that is saved.

    Attributes:
        spec: the text of its resolved spec.
        companions: the files next to its weights, such as the tokenizer, and the fields of their config.json.
        weights: the folder or file of its weights; None for a model without saved weights.
        plugins: the plugins that the spec was read with.
        names: the chosen names, one of the layout's `names`; None for the layout's own.
    """

    spec: str
    companions: Companions
    weights: Path | None
    plugins: Plugins
    names: str | None = None

    def write(self, folder: Path) -> None:
        """Write the spec, and unchanged copies of the files next to the weights."""
        self.companions.write_files(folder)
        (folder / SPEC).write_text(self.spec, encoding="utf-8")


class Layout(ABC):
    """A layout of `tfkit save`: its way to write a model to a folder.

    A plugin returns its layouts from the hook `tfkit_save_layouts`.

    Attributes:
        name: as in `--layout`.
        description: its files in a few words, for completion.
        files: names and patterns, such as `*.npy`, of the files that the layouts `tfkit` and `huggingface` do not have.
            `--force` replaces only a folder whose files all belong to a layout.
        names: the values of `--names`, sets of names for the model's tensors, that it supports.
        drops: true if the folder has only the tensors that the family of the spec publishes. Saving then requires
            `allow_drop` if the weights had further tensors.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[tuple[str, ...]] = ()
    drops: ClassVar[bool] = False

    @abstractmethod
    def write(self, model: fx.GraphModule, folder: Path, origin: ModelOrigin) -> None:
        """Write a model to an existing, empty folder, which is moved to its final name if this method succeeds.

        `origin.write(folder)` writes the spec and the files next to the weights. This method may raise any error:
        `save` converts it to a SpecError, and nothing is written.
        """


@dataclass(frozen=True)
class Layouts:
    """The layouts by name, the labels of their plugins, and a warning for each plugin whose hook failed."""

    named: Mapping[str, type[Layout]]
    plugins: Mapping[str, str]
    faults: tuple[Diagnostic, ...]

    def choose(self, name: str, names: str | None = None) -> Layout:
        """Return the layout with a name; raise SpecError if there is none, or if it does not support `names`."""
        if name in self.named:
            layout = self.named[name]()
            if names is not None and names not in layout.names:
                layouts = self.named.values()
                options = [f"--layout {other.name} --names {key}" for other in layouts for key in other.names]
                message = f"`--names {names}` has no effect in the layout `{name}`"
                if layout.names:
                    message = f"`--names` must be {listing(layout.names)} in the layout `{name}`; got {quoted(names)}"
                raise SpecError(Diagnostic(message, help=f"write {' or '.join(options)}"))
            return layout
        notes = (f"known: {listing(self.named)}", *(f"skipped: {fault.message}" for fault in self.faults))
        help = similar_name_help("a layout", name, self.named)
        raise SpecError(Diagnostic(f"unknown layout {quoted(name)}", notes=notes, help=help))

    def check_folder(self, folder: Path, *, force: bool, companions: Companions = NO_COMPANIONS) -> None:
        """Raise SpecError if `folder` exists and `force` is false, or if it contains files that belong to no layout.

        A tokenizer, or a file next to it, counts as an additional file, unless the new model has `companions` as well.
        """
        names = names_in(folder) or []
        extras = [name for name in names if not self._is_replaceable(name, companions.files)]
        if extras:
            message = f"{quoted(str(folder))} must hold only the files of a model; got {listing(extras, 4)}"
            raise SpecError(Diagnostic(message, help="name a new folder"))
        if names and not force:
            raise SpecError(Diagnostic(f"{quoted(str(folder))} already exists", help="replace it with --force"))

    def _is_replaceable(self, name: str, companions: Collection[str]) -> bool:
        if name in (SPEC, WEIGHTS, INDEX, CONFIG, EXPORT_CONFIG, GENERATION) or SHARD.fullmatch(name):
            return True
        patterns = [pattern for layout in self.named.values() for pattern in layout.files]
        return any(fnmatchcase(name, pattern) for pattern in patterns) or bool(companions and is_companion(name))


def layouts_of(plugins: Plugins) -> Layouts:
    """Collect the layouts of plugins; raise SpecError if two share a name."""
    answers = plugins.hooks.call("tfkit_save_layouts", _layout_classes)
    named: dict[str, type[Layout]] = {}
    owners: dict[str, str] = {}
    for plugin, layouts in reversed(answers.values):  # the built-in layouts first
        for layout in layouts:
            if layout.name in named:
                help = f"switch one plugin off by its name: {DISABLE}=<name>"
                message, notes = f"two layouts have the name `{layout.name}`", (owners[layout.name], plugin)
                raise SpecError(Diagnostic(message, notes=notes, help=help))
            named[layout.name], owners[layout.name] = layout, plugin
    return Layouts(named, owners, answers.faults)


def _layout_classes(returned: object) -> list[type[Layout]]:
    """Check the result of the hook."""
    if not isinstance(returned, Iterable) or isinstance(returned, str):
        raise TypeError(f"must return a list of subclasses of tfkit.Layout; got {type(returned).__name__}")
    return [_layout_class(item) for item in returned]


def _layout_class(item: object) -> type[Layout]:
    if not (isinstance(item, type) and issubclass(item, Layout)):
        hint = ": return the class instead of an object" if isinstance(item, Layout) else ""
        raise TypeError(f"must return subclasses of tfkit.Layout; got `{item!r}`{hint}")
    if item.__abstractmethods__:
        raise TypeError(f"returned `{item.__name__}`, which does not define `write`")
    texts = [vars(item).get(name) for name in ("name", "description")]
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError(f"returned `{item.__name__}`, which needs a `name` and a `description`")
    files: object = item.files
    # A pattern of only wildcards would let --force replace any folder.
    if not isinstance(files, tuple) or not all(re.sub(r"[*?.]", "", str(pattern)) for pattern in files):
        raise TypeError(f"returned `{item.__name__}`, whose `files` are not like ('*.npy',)")
    return item
