"""From the `checkpoint` of a spec to the text of its family, merged over those that it extends."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.plugin.known_specs import KnownSpecs
from tfkit.spec import source
from tfkit.spec.extending import Read, shortest
from tfkit.spec.family import merged, with_type, without_nulls
from tfkit.spec.find import find_family
from tfkit.spec.merge import is_null, without
from tfkit.spec.tree import Mapping, Node, Scalar

OLDER = {
    "config": "`fields`",
    "copies": "`extra: {name: = other}`",
    "ignore": "`extra: {name: reason}`",
    "unused": "`fields: {name: unused}`",
}
"""Keys of a family in an older tfkit, and the form of their entries today."""


def in_place(root: Mapping, known: KnownSpecs) -> Mapping:
    """The tree of a spec that needs no file of a family without a bare name: all of it takes the place of its path."""
    node = root.items.get("checkpoint")
    word = node.items.get("extends") if isinstance(node, Mapping) else node
    if node is None or word is None or is_null(word) or (isinstance(word, Scalar) and word.value in known.families):
        return root
    return Mapping({**root.items, "checkpoint": family_of(node, known)}, root.keys, root.span)


def family_of(node: Node, known: KnownSpecs, read: Read = source.read) -> Mapping:
    """The text of a family, given by a name or in place, with all that it extends; `read` reads one file.

    Raises SpecError if there is no such family.
    """
    if not isinstance(node, Mapping):
        node = Mapping({"extends": node}, {"extends": node.span}, node.span)
    if (older := next((key for key in OLDER if key in node.items), None)) is not None:
        type = node.items.get("model_type")
        name = type.value if isinstance(type, Scalar) and type.value in known.families else "llama"
        help = f"name the family instead, `checkpoint: {name}`; or write its entries as {OLDER[older]}"
        message, span = f"a section with {quoted(older)} is of an older tfkit", node.keys[older]
        raise SpecError(Diagnostic(message, span, f"checkpoint.{older}", help=help))
    texts, chain = [node], list[Path]()
    while (word := texts[-1].items.get("extends")) is not None:
        if not isinstance(word, Scalar) or not isinstance(word.value, str):
            help = "write `checkpoint: llama`, or a path: `checkpoint: ./my_family.yaml`"
            raise SpecError(Diagnostic("a family is named by one word or path", word.span, "checkpoint", help=help))
        path = find_family(word.value, known, word.span)
        if path in chain:
            message = f"a family cannot extend itself: {quoted(str(shortest(path)))}"
            raise SpecError(Diagnostic(message, word.span, "checkpoint.extends"))
        chain.append(path)
        texts.append(with_type(read(path, name=str(shortest(path))), path.stem))
    whole = reduce(merged, (without(text, {"extends"}) for text in reversed(texts)), None)
    assert whole is not None
    return without_nulls(whole)
