"""One document over another that it extends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError
from tfkit.spec import source
from tfkit.spec.document import Document, check_sort
from tfkit.spec.merge import without
from tfkit.spec.tree import Mapping, Scalar

Read = Callable[..., Mapping]
MAX_EXTENDS = 16


@dataclass(frozen=True)
class Language:
    """The search and the merging of documents of a type.

    Attributes:
        document: their type.
        find: the file of a name, relative to a folder; the place of the name is for errors.
        merge: a base, or None, changed by a document without `extends`, whose paths start at a folder.
        read: the tree of one file.
    """

    document: type[Document]
    find: Callable[[str, Path, Span], Path]
    merge: Callable[[Mapping | None, Mapping, Path], Mapping]
    read: Read = source.read


def read_based(path: Path, language: Language, chain: Sequence[Path] = ()) -> Mapping:
    """Read a file and merge it over the file that it extends; `chain` lists the files that led to it."""
    root = language.read(path, name=str(shortest(path)))
    return based(root, path.parent, language, (*chain, _real(path)))


def based(root: Mapping, folder: Path, language: Language, chain: Sequence[Path] = ()) -> Mapping:
    """Merge `root` over the document that it extends, if any."""
    check_sort(root, language.document)
    word = root.items.get("extends")
    if word is None:
        return language.merge(None, root, folder)
    if not isinstance(word, Scalar) or not isinstance(word.value, str):
        help = "write `extends: gpt2`, or a path: `extends: ./my_model.yaml`"
        raise SpecError(Diagnostic("`extends` takes the name or path of one spec", word.span, "extends", help=help))
    base = read_named(word, "extends", folder, language, chain)
    return language.merge(base, without(root, {"extends"}), folder)


def read_named(word: Scalar, key: str, folder: Path, language: Language, chain: Sequence[Path] = ()) -> Mapping:
    """Read the document that the value of a key names. A file that cannot be read is an error at that value."""
    path = language.find(str(word.value), folder, word.span)
    if _real(path) in chain:
        names = [str(shortest(ancestor)) for ancestor in (*chain[chain.index(_real(path)) :], _real(path))]
        notes = (f"by way of {' -> '.join(names)}",) if len(names) > 2 else ()
        raise SpecError(Diagnostic("a spec cannot extend itself", word.span, key, notes))
    if len(chain) >= MAX_EXTENDS:
        raise SpecError(Diagnostic(f"a chain of more than {MAX_EXTENDS} specs", word.span, key))
    with named_at(word.span, key):
        return read_based(path, language, chain)


@contextmanager
def named_at(span: Span, key: str) -> Iterator[None]:
    """Give errors without a place, such as the error of a file that cannot be read, the place of the file's name."""
    try:
        yield
    except SpecError as error:
        placed = (
            diagnostic if diagnostic.span else replace(diagnostic, span=span, path=key)
            for diagnostic in error.diagnostics
        )
        raise SpecError(*placed) from error


def shortest(path: Path) -> Path:
    """Return a path as errors show it: relative if it is below the current folder."""
    try:
        return _real(path).relative_to(Path.cwd())
    except ValueError:
        return path


def _real(path: Path) -> Path:
    """Return the target of a path. Unlike `Path.resolve`, this accepts loops of links and names that are too long."""
    return Path(os.path.realpath(path))
