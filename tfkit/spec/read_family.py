"""From the `checkpoint` of a spec to the text of its family, merged over those that it extends."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError, closest, listing, quoted
from tfkit.plugin.known_specs import KnownSpecs, own_specs
from tfkit.spec import source
from tfkit.spec.extending import Read, shortest
from tfkit.spec.family import class_of, merged, with_type, without_nulls
from tfkit.spec.find import find_family
from tfkit.spec.merge import is_null, without
from tfkit.spec.source import plain
from tfkit.spec.tree import Mapping, Node, Scalar

HEADS = "heads"
"""The folder of the heads that many families share, beside specs."""


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
        raise SpecError(_of_an_older_tfkit(node, older, known))
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
    # Almost all types have a class without a head; null in `heads` removes it.
    body = Mapping({"Model": Scalar("body", node.span)}, {"Model": node.span}, node.span)
    base = Mapping({"heads": body}, {"heads": node.span}, node.span)
    return without_nulls(reduce(merged, (without(text, {"extends"}) for text in reversed(texts)), base))


def _of_an_older_tfkit(node: Mapping, key: str, known: KnownSpecs) -> Diagnostic:
    """The error of a section with a key of an older tfkit, and the line that takes its place if its family is known."""
    word = node.items.get("model_type", node.items.get("extends"))
    if isinstance(word, Scalar) and word.value in known.families:
        help = f"name the family instead, `checkpoint: {word.value}`; or write its entries as {OLDER[key]}"
    else:
        help = f"write its entries as {OLDER[key]}: specs/README.md shows how"
    message = f"a section with {quoted(key)} is of an older tfkit"
    return Diagnostic(message, node.keys[key], f"checkpoint.{key}", help=help)


def with_head(root: Mapping) -> Mapping:
    """A family changed by the head that it names; raises SpecError if there is no such head."""
    name, heads, own = (root.items.get(key) for key in ("head", "heads", "architecture"))
    if not isinstance(name, Scalar) or not isinstance(own, Scalar):
        return root
    known = heads if isinstance(heads, Mapping) else Mapping({}, {}, root.span)
    if name.value not in known.items:
        near = closest(str(name.value), known.items)
        message = f"the family has no head {quoted(str(name.value))}"
        notes = (f"heads: {listing(known.items, 20) or 'none'}",)
        help = f"a similar one is {quoted(near)}" if near else "without `head`, the family has its own"
        raise SpecError(Diagnostic(message, name.span, "checkpoint.head", notes, help))
    cls = Scalar(class_of(str(name.value), str(own.value)), name.span, quoted=True)
    there = Mapping({"architecture": cls}, {"architecture": name.span}, name.span)
    texts = _head_texts(str(name.value), known, name.span)
    return without_nulls(reduce(merged, (*texts, there), root))


def _head_texts(name: str, known: Mapping, span: Span, chain: tuple[str, ...] = ()) -> list[Mapping]:
    """The changes that make a head, those that it extends first: another one of the family, or a shared one."""
    shared = {file.stem: file for file in sorted((own_specs() / HEADS).glob("*.yaml"))}
    if name in chain:
        raise SpecError(Diagnostic(f"a head cannot extend itself: {quoted(name)}", span, "checkpoint.heads"))
    if name not in known.items and name not in shared:
        notes = (f"shared: {listing(shared, 20)}", f"of the family: {listing(known.items, 20)}")
        message = f"there is no head {quoted(name)} to extend"
        raise SpecError(Diagnostic(message, span, "checkpoint.heads", notes))
    node = known.items[name] if name in known.items else source.read(shared[name])
    own = [without(node, {"extends"})] if isinstance(node, Mapping) else []
    word = node.items.get("extends") if isinstance(node, Mapping) else node
    return own if word is None else [*_head_texts(str(plain(word)), known, word.span, (*chain, name)), *own]
