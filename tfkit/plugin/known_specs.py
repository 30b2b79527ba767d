"""The specs, families and documents of further types that a name refers to, from tfkit and from plugins.

A plugin declares a folder of its package as an entry point in the group `tfkit.specs` or `tfkit.documents`, which tfkit
reads without running code. A plugin that cannot declare its folder of specs returns it from the hook `tfkit_specs`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.discover import BUILT_IN, DISABLE, DOCUMENTS, SPECS, Candidate
from tfkit.plugin.import_code import folder_of

FAMILIES = "families"
"""Name of the folder of families, inside a folder of specs."""
_TEXT_TYPES = re.compile(r"^text_types:\n((?:  .*\n)+)", re.MULTILINE)
_TEXT_TYPE = re.compile(r"^  ([\w.-]+):", re.MULTILINE)
_CHECKPOINT = re.compile(r"^checkpoint: *([\w.-]+)", re.MULTILINE)
_MODEL = re.compile(r"^(model|extends):", re.MULTILINE)
"""Matches in a document that contains a model, or extends a document that does."""
BUILT_IN_DOCUMENTS = (("run", "train"), ("sweep", "sweep"))
"""The types of the documents in the folder of tfkit's specs, each with the command that takes them."""


@dataclass(frozen=True)
class SpecPath:
    """A folder of specs or of documents of a type, or a file in such a folder, and the label of its plugin."""

    path: Path
    plugin: str
    sort: str = ""
    """The type of the documents in the folder; empty for specs."""
    command: str = ""
    """The command that takes the documents."""


@dataclass(frozen=True)
class NamedDocuments:
    """The files of a type's documents by name, and the command that takes them; empty if unknown."""

    command: str
    files: Mapping[str, SpecPath]

    def with_model(self, start: str) -> list[str]:
        """Return the names that begin with `start` and whose document contains a model."""
        names = [name for name in self.files if name.startswith(start)]
        return [name for name in names if _MODEL.search(self.files[name].path.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class NamedSpecs:
    """The files of specs and of families by name, and the documents of further types by their type."""

    files: Mapping[str, SpecPath]
    families: Mapping[str, SpecPath]
    documents: Mapping[str, NamedDocuments]

    def files_of(self, sort: str) -> Mapping[str, SpecPath]:
        """Return the files of the documents of a type, by name."""
        return self.documents[sort].files if sort in self.documents else {}

    @cached_property
    def by_model_type(self) -> Mapping[str, str]:
        """The first spec of each family, by model type. The first access reads all files."""
        names: dict[str, str] = {}
        for name, spec in self.files.items():
            match = _CHECKPOINT.search(spec.path.read_text(encoding="utf-8"))
            if match and match[1] in self.families:
                names.setdefault(match[1], name)
        return names

    @cached_property
    def by_text_type(self) -> Mapping[str, str]:
        """The first spec of each family, by the `text_types` of the family. The first access reads all files."""
        names: dict[str, str] = {}
        for family, path in self.families.items():
            match = _TEXT_TYPES.search(path.path.read_text(encoding="utf-8"))
            if match and family in self.by_model_type:
                names |= dict.fromkeys(_TEXT_TYPE.findall(match[1]), self.by_model_type[family])
        return names


def built_in_specs_folder() -> Path:
    """Return the folder of tfkit's specs: inside the package, or next to it in a checkout."""
    package = Path(__file__).parent.parent
    packed = package / "_specs"
    return packed if packed.is_dir() else package.parent / "specs"


def named_specs(folders: Iterable[SpecPath] = ()) -> NamedSpecs:
    """Return what these folders and tfkit's contain; raise SpecError for two specs, or documents, of the same name."""
    built_in = [
        SpecPath(built_in_specs_folder() / f"{sort}s", BUILT_IN, sort, command) for sort, command in BUILT_IN_DOCUMENTS
    ]
    by_sort: dict[str, list[SpecPath]] = {"": []}
    for folder in dict.fromkeys([SpecPath(built_in_specs_folder(), BUILT_IN), *built_in, *folders]):
        by_sort.setdefault(folder.sort, []).append(folder)
    spec_folders = by_sort.pop("")
    files, clashes = _by_name(spec_folders, "specs")
    families, family_clashes = _by_name(
        [replace(folder, path=folder.path / FAMILIES) for folder in spec_folders], FAMILIES
    )
    clashes += family_clashes
    documents = {}
    for sort, of_sort in by_sort.items():
        named, document_clashes = _by_name(of_sort, f"{sort}s")
        clashes += document_clashes
        documents[sort] = NamedDocuments(next((folder.command for folder in of_sort if folder.command), ""), named)
    if clashes:
        raise SpecError(*clashes)
    return NamedSpecs(files, families, documents)


def _by_name(folders: Iterable[SpecPath], plural: str) -> tuple[dict[str, SpecPath], list[Diagnostic]]:
    """Return the files in folders by name, and an error for each name that occurs twice."""
    files: dict[str, SpecPath] = {}
    clashes = []
    for folder in folders:
        for path in _specs_in(folder.path):
            new = SpecPath(path, folder.plugin)
            if path.stem in files:
                clashes.append(_clash_error(plural, path.stem, files[path.stem], new))
            files.setdefault(path.stem, new)
    return dict(sorted(files.items())), clashes


def declared_folders(candidate: Candidate) -> list[SpecPath]:
    """Return the folders in a plugin's entry points; raise ImportError if a folder is missing or holds no YAML file.

    An entry point in `tfkit.documents` has the name of a type. After the colon, it names the command that takes the
    documents: `run = "mine.runs:train"`.
    """
    folders = []
    for point in (*candidate.named(SPECS), *candidate.named(DOCUMENTS)):
        is_type = point.group == DOCUMENTS
        path = folder_of(point.module if is_type else point.value, candidate.folders)
        if not _specs_in(path):
            raise ImportError(f"the folder {path}, which it declares for `{point.group}`, holds no *.yaml")
        folders.append(SpecPath(path, candidate.label, *([point.name, point.attr or ""] if is_type else [])))
    return folders


def spec_folders(plugin: str, returned: object) -> list[SpecPath]:
    """Return the folders that a hook `tfkit_specs` returned; raise TypeError for anything else."""
    paths = [returned] if isinstance(returned, Path) else returned
    if not isinstance(paths, Iterable) or isinstance(paths, str):
        raise TypeError(f"must return the path of a folder; got {type(returned).__name__}")
    folders = list(paths)
    for path in folders:
        if not isinstance(path, Path):
            raise TypeError(f"must return paths; got {type(path).__name__} among them")
        if not _specs_in(path):
            raise TypeError(f"must return a folder that holds *.yaml; got {path}")
    return [SpecPath(path, plugin) for path in folders]


def _specs_in(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:  # returns the types of entries, unlike `glob`
        return [folder / entry.name for entry in entries if entry.name.endswith(".yaml") and entry.is_file()]
    return []


def _clash_error(plural: str, name: str, *paths: SpecPath) -> Diagnostic:
    help = f"rename one of the two, or switch one plugin off by its name: {DISABLE}=<name>"
    notes = tuple(f"{folder.plugin}: {folder.path}" for folder in paths)
    return Diagnostic(f"there are two {plural} named `{name}`", notes=notes, help=help)
