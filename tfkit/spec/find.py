"""The file of a name: of a spec, and of a family."""

from __future__ import annotations

import os
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError, closest, quoted, similar
from tfkit.plugin import missing
from tfkit.plugin.known_specs import KnownSpecs, own_specs
from tfkit.plugin.missing import where_it_is
from tfkit.spec.extending import shortest
from tfkit.spec.folder import has_weights, model_folder, spec_of

SUFFIXES = (".yaml", ".yml")


def plugin_folders(folder: Path = Path()) -> list[Path]:
    """Return the folders to search for a spec's plugin: its own, the current one, and a checkout of tfkit."""
    return [folder, folder / "plugins", Path("plugins"), shortest(own_specs().parent / "plugins")]


def find_spec(
    name: str | os.PathLike[str], specs: KnownSpecs, *, folder: Path | None = None, span: Span | None = None
) -> Path:
    """Find the file of a spec by its path, by the folder of a model, or by a name.

    Relative paths start from `folder`. A bare name that is known is not looked for there. Raises SpecError
    if there is no such file.
    """
    text = os.fspath(name)
    path = (folder or Path()) / text
    if "\n" in text and span is None:
        raise SpecError(Diagnostic("a text of several lines is not a path", help="`tfkit.loads` reads a text"))
    if is_folder(text, specs, folder=folder):
        return spec_of(path, span)
    if text.endswith(SUFFIXES) or os.sep in text:
        if os.path.exists(path) or span is None:
            return path
        near = closest(path.stem, [file.stem for file in yaml_files(path.parent)])
        help = f"a spec with a similar name is there: `{near}`" if near else "paths start from the spec's own folder"
        raise SpecError(Diagnostic(f"there is no file {quoted(text)}", span, "extends", help=help))
    if text in specs.files:
        return specs.files[text].path
    raise SpecError(_unknown_spec(text, specs, span))


def yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files in a folder; an empty list if the folder cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    except (OSError, ValueError):
        return []


def _unknown_spec(name: str, specs: KnownSpecs, span: Span | None) -> Diagnostic:
    path, plugin = "extends" if span else "", missing.plugin_of(name)
    if plugin is not None:
        help = where_it_is(plugin, plugin_folders())
        return Diagnostic(f"{quoted(name)} comes with the plugin {plugin}, which is not loaded", span, path, help=help)
    names = [*specs.files, *(elsewhere for models in missing.specs_elsewhere().values() for elsewhere in models)]
    near = similar("a spec", name, names, "give the path of a file: ./my_model.yaml")
    return Diagnostic(f"there is no spec named {quoted(name)}", span, path, help=near)


def is_folder(name: str | os.PathLike[str], specs: KnownSpecs, *, folder: Path | None = None) -> bool:
    """Return True if `name` refers to a folder, and not to a named spec."""
    text = os.fspath(name)
    return bool(text) and text not in specs.files and os.path.isdir((folder or Path()) / text)


def weights_beside(name: str | os.PathLike[str], specs: KnownSpecs) -> Path | None:
    """Return the folder that a spec's name refers to, if it has weights; None for a file or a name."""
    return model_folder(Path(name)) if is_folder(name, specs) and has_weights(Path(name)) else None


def find_family(name: str, specs: KnownSpecs, span: Span) -> Path:
    """Find the file of a family by its name, or by a path relative to the file that names it.

    Raises SpecError if there is no such file.
    """
    if name in specs.families:
        return specs.families[name].path
    path = Path(span.source.name).parent / name
    if (name.endswith(SUFFIXES) or os.sep in name) and os.path.exists(path):
        return path
    plugin = missing.plugin_of_family(name)
    if plugin is not None:
        message = f"the family {quoted(name)} comes with the plugin {plugin}, which is not loaded"
        help = where_it_is(plugin, plugin_folders())
        raise SpecError(Diagnostic(message, span, "checkpoint", help=help))
    near = similar("a family", name, specs.families, "give the path of a file: ./my_family.yaml")
    raise SpecError(Diagnostic(f"there is no family named {quoted(name)}", span, "checkpoint", help=near))
