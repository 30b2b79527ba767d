"""The specs and families that a name refers to, from tfkit and from plugins.

A plugin declares a folder of its package as an entry point in the group `tfkit.specs`, which tfkit reads without
running code. A plugin that cannot declare its folder returns it from the hook `tfkit_specs`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.discover import BUILT_IN, DISABLE, SPECS, Candidate
from tfkit.plugin.import_code import folder_of

FAMILIES = "families"
"""Name of the folder of families, inside a folder of specs."""
_CHECKPOINT = re.compile(r"^checkpoint: *([\w.-]+)", re.MULTILINE)


@dataclass(frozen=True)
class SpecPath:
    """A folder of specs, or the file of a spec, and the label of its plugin."""

    path: Path
    plugin: str


@dataclass(frozen=True)
class KnownSpecs:
    """The files of specs and of families, by name."""

    files: Mapping[str, SpecPath]
    families: Mapping[str, SpecPath]

    @cached_property
    def by_model_type(self) -> Mapping[str, str]:
        """The first spec of each family, by model type. The first access reads all files."""
        names: dict[str, str] = {}
        for name, spec in self.files.items():
            match = _CHECKPOINT.search(spec.path.read_text(encoding="utf-8"))
            if match and match[1] in self.families:
                names.setdefault(match[1], name)
        return names


def own_specs() -> Path:
    """Return the folder of tfkit's specs: inside the package, or next to it in a checkout."""
    package = Path(__file__).parent.parent
    packed = package / "_specs"
    return packed if packed.is_dir() else package.parent / "specs"


def known_specs(folders: Iterable[SpecPath] = ()) -> KnownSpecs:
    """Return the specs and families in these folders and in tfkit; raise SpecError for two specs of the same name."""
    all_folders = list(dict.fromkeys([SpecPath(own_specs(), BUILT_IN), *folders]))
    family_folders = [SpecPath(folder.path / FAMILIES, folder.plugin) for folder in all_folders]
    files, spec_clashes = _by_name(all_folders, "specs")
    families, family_clashes = _by_name(family_folders, "families")
    if spec_clashes or family_clashes:
        raise SpecError(*spec_clashes, *family_clashes)
    return KnownSpecs(files, families)


def _by_name(folders: Iterable[SpecPath], plural: str) -> tuple[dict[str, SpecPath], list[Diagnostic]]:
    """Return the files in folders by name, and an error for each name that occurs twice."""
    files: dict[str, SpecPath] = {}
    clashes = []
    for folder in folders:
        for path in _specs_in(folder.path):
            new = SpecPath(path, folder.plugin)
            if path.stem in files:
                clashes.append(_clash(plural, path.stem, files[path.stem], new))
            files.setdefault(path.stem, new)
    return dict(sorted(files.items())), clashes


def declared(candidate: Candidate) -> list[SpecPath]:
    """Return the folders in a plugin's entry points; raise ImportError if a folder is missing or holds no spec."""
    folders = []
    for point in candidate.named(SPECS):
        path = folder_of(point.value, candidate.folders)
        if not _specs_in(path):
            raise ImportError(f"the folder {path}, which it declares for `{SPECS}`, holds no *.yaml")
        folders.append(SpecPath(path, candidate.label))
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


def _clash(plural: str, name: str, *paths: SpecPath) -> Diagnostic:
    help = f"rename one of the two, or switch one plugin off by its name: {DISABLE}=<name>"
    notes = tuple(f"{folder.plugin}: {folder.path}" for folder in paths)
    return Diagnostic(f"there are two {plural} named `{name}`", notes=notes, help=help)
