"""Finding the file of a name, and merging a document over the documents that it extends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError, closest_name, quoted, similar_name_help
from tfkit.plugin import missing
from tfkit.plugin.known_specs import NamedSpecs, built_in_specs_folder
from tfkit.plugin.missing import where_it_is, where_spec_is
from tfkit.plugin.registry import Registry
from tfkit.spec import source
from tfkit.spec.document import Document, check_sort
from tfkit.spec.folder import has_weights, model_folder, spec_of
from tfkit.spec.merge import without_keys
from tfkit.spec.tree import Mapping, Scalar

Read = Callable[..., Mapping]
MAX_EXTENDS = 16
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Language:
    """The functions that find, read and merge documents of one type.

    Attributes:
        document: type of the documents.
        find: returns the file of a name, relative to a folder; errors point to the given span.
        merge: applies a document to its base, which may be None; paths in the document are relative to the folder.
        read: returns the tree of one file.
    """

    document: type[Document]
    find: Callable[[str, Path, Span], Path]
    merge: Callable[[Mapping | None, Mapping, Path], Mapping]
    read: Read = source.read


def read_based(path: Path, language: Language, chain: Sequence[Path] = ()) -> Mapping:
    """Read a file and merge it over the file that it extends. `chain` lists the files that extend it."""
    root = language.read(path, name=str(short_path(path)))
    return merge_over_base(root, path.parent, language, (*chain, _real_path(path)))


def merge_over_base(root: Mapping, folder: Path, language: Language, chain: Sequence[Path] = ()) -> Mapping:
    """Merge `root` over the document that it extends, if it extends any."""
    check_sort(root, language.document)
    word = root.items.get("extends")
    if word is None:
        return language.merge(None, root, folder)
    if not isinstance(word, Scalar) or not isinstance(word.value, str):
        help = "write `extends: gpt2`, or a path: `extends: ./my_model.yaml`"
        raise SpecError(
            Diagnostic("`extends` must be the name or path of a single spec", word.span, "extends", help=help)
        )
    base = read_named(word, "extends", folder, language, chain)
    return language.merge(base, without_keys(root, {"extends"}), folder)


def read_named(word: Scalar, key: str, folder: Path, language: Language, chain: Sequence[Path] = ()) -> Mapping:
    """Read the document that the value of a key names. If the file cannot be read, the error points to that value."""
    path = language.find(str(word.value), folder, word.span)
    if _real_path(path) in chain:
        names = [str(short_path(ancestor)) for ancestor in (*chain[chain.index(_real_path(path)) :], _real_path(path))]
        notes = (f"by way of {' -> '.join(names)}",) if len(names) > 2 else ()
        raise SpecError(Diagnostic("a spec cannot extend itself", word.span, key, notes))
    if len(chain) >= MAX_EXTENDS:
        raise SpecError(Diagnostic(f"a chain of `extends` must have at most {MAX_EXTENDS} specs", word.span, key))
    with named_at(word.span, key):
        return read_based(path, language, chain)


@contextmanager
def named_at(span: Span, key: str) -> Iterator[None]:
    """Add the location of a file's name to errors without a location, such as the error of an unreadable file."""
    try:
        yield
    except SpecError as error:
        located = (
            diagnostic if diagnostic.span else replace(diagnostic, span=span, path=key)
            for diagnostic in error.diagnostics
        )
        raise SpecError(*located) from error


def short_path(path: Path) -> Path:
    """Return a path relative to the current folder if it lies below that folder, else unchanged."""
    try:
        return _real_path(path).relative_to(Path.cwd())
    except ValueError:
        return path


def _real_path(path: Path) -> Path:
    """Resolve the links in a path. Unlike `Path.resolve`, this accepts loops of links and names that are too long."""
    return Path(os.path.realpath(path))


# ---- files by name ----


def plugin_folders(folder: Path = Path()) -> list[Path]:
    """Return the folders to search for a spec's plugin: the spec's folder, the current folder, and a tfkit checkout."""
    tfkit_plugins = short_path(built_in_specs_folder().parent / "plugins")
    return [folder, folder / "plugins", Path(), Path("plugins"), tfkit_plugins]


def find_spec(
    name: str | os.PathLike[str],
    specs: NamedSpecs,
    *,
    folder: Path | None = None,
    span: Span | None = None,
    registry: Registry | None = None,
) -> Path:
    """Find the file of a spec by its path, by the folder of a model, or by a name.

    Relative paths start from `folder`. The name of a known spec takes precedence over a path. Raises SpecError if there
    is no such file. Its help says if the name is a slot or a kind of `registry`.
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
        near = closest_name(path.stem, [file.stem for file in yaml_files(path.parent)])
        help = (
            f"a spec with a similar name exists: `{near}`"
            if near
            else "write the path relative to the folder of the spec"
        )
        raise SpecError(Diagnostic(f"there is no file {quoted(text)}", span, "extends", help=help))
    if text in specs.files:
        return specs.files[text].path
    unknown = _unknown_spec(text, specs, span, registry)
    if os.path.isfile(path):
        unknown = replace(unknown, help=f"write the path with its folder, `./{text}`, if the file is a spec")
    raise SpecError(unknown)


def yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files in a folder; an empty list if the folder cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    except (OSError, ValueError):
        return []


def _unknown_spec(name: str, specs: NamedSpecs, span: Span | None, registry: Registry | None) -> Diagnostic:
    path, plugin = "extends" if span else "", missing.plugin_of(name)
    if plugin is not None:
        help = where_it_is(plugin, plugin_folders())
        return Diagnostic(f"{quoted(name)} comes with the plugin {plugin}, which is not loaded", span, path, help=help)
    names = [*specs.files, *(elsewhere for models in missing.specs_elsewhere().values() for elsewhere in models)]
    near = _component_help(name, registry) or where_spec_is(name, plugin_folders())
    near = near or similar_name_help("a spec", name, names, "give the path of a file: ./my_model.yaml")
    return Diagnostic(f"there is no spec named {quoted(name)}", span, path, help=near)


def _component_help(name: str, registry: Registry | None) -> str | None:
    """Return the help for the name of a slot or a kind in the place of a spec; None for any other name."""
    if registry is None:
        return None
    if name in registry.slots():
        return f"`{name}` is a slot: list its kinds with `tfkit components {name}`"
    slots = registry.slots_of(name)
    if not slots:
        return None
    kind = name if len(slots) == 1 else f"{slots[0]}.{name}"
    return f"`{name}` is a kind: try `tfkit components {slots[0]} {name}`, or `tfkit check --kind {kind}`"


def is_folder(name: str | os.PathLike[str], specs: NamedSpecs, *, folder: Path | None = None) -> bool:
    """Return True if `name` is the path of a folder and not the name of a known spec."""
    text = os.fspath(name)
    return bool(text) and text not in specs.files and os.path.isdir((folder or Path()) / text)


def weights_beside(name: str | os.PathLike[str], specs: NamedSpecs) -> Path | None:
    """Return the model folder at the path `name` if it contains weights; None for a file or the name of a spec."""
    return model_folder(Path(name)) if is_folder(name, specs) and has_weights(Path(name)) else None


def find_family(name: str, specs: NamedSpecs, span: Span) -> Path:
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
    near = similar_name_help("a family", name, specs.families, "give the path of a file: ./my_family.yaml")
    raise SpecError(Diagnostic(f"there is no family named {quoted(name)}", span, "checkpoint", help=near))
