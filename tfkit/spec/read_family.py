"""From the `checkpoint` of a spec to the text of its family, merged over the families that it extends."""

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
"""The folder, among the specs, of the heads that many families share."""


def in_place(root: Mapping, specs: KnownSpecs) -> Mapping:
    """Replace the path of a family in a spec by the family's text. The names of known families stay."""
    node = root.items.get("checkpoint")
    word = node.items.get("extends") if isinstance(node, Mapping) else node
    if node is None or word is None or is_null(word) or (isinstance(word, Scalar) and word.value in specs.families):
        return root
    return Mapping({**root.items, "checkpoint": family_of(node, specs)}, root.keys, root.span)


def family_of(node: Node, specs: KnownSpecs, read: Read = source.read) -> Mapping:
    """Read a family, given by name or inline, and everything that it extends; `read` reads a file.

    Raises SpecError if there is no such family.
    """
    if not isinstance(node, Mapping):
        node = Mapping({"extends": node}, {"extends": node.span}, node.span)
    texts, chain = [node], list[Path]()
    while (word := texts[-1].items.get("extends")) is not None:
        if not isinstance(word, Scalar) or not isinstance(word.value, str):
            help = "write `checkpoint: llama`, or a path: `checkpoint: ./my_family.yaml`"
            raise SpecError(Diagnostic("a family is named by one word or path", word.span, "checkpoint", help=help))
        path = find_family(word.value, specs, word.span)
        if path in chain:
            message = f"a family cannot extend itself: {quoted(str(shortest(path)))}"
            raise SpecError(Diagnostic(message, word.span, "checkpoint.extends"))
        chain.append(path)
        texts.append(with_type(read(path, name=str(shortest(path))), path.stem))
    # Almost all types have a class without a head; null in `heads` removes it.
    body = Mapping({"Model": Scalar("body", node.span)}, {"Model": node.span}, node.span)
    base = Mapping({"heads": body}, {"heads": node.span}, node.span)
    return without_nulls(reduce(merged, (without(text, {"extends"}) for text in reversed(texts)), base))


def with_head(root: Mapping) -> Mapping:
    """Apply the head that a family names. Raise SpecError if the family has no such head."""
    name, heads, architecture = (root.items.get(key) for key in ("head", "heads", "architecture"))
    if not isinstance(name, Scalar) or not isinstance(architecture, Scalar):
        return root
    available = heads if isinstance(heads, Mapping) else Mapping({}, {}, root.span)
    if name.value not in available.items:
        near = closest(str(name.value), available.items)
        message = f"the family has no head {quoted(str(name.value))}"
        notes = (f"heads: {listing(available.items, 20) or 'none'}",)
        help = f"a similar one is {quoted(near)}" if near else "without `head`, the family has its own"
        raise SpecError(Diagnostic(message, name.span, "checkpoint.head", notes, help))
    cls = Scalar(class_of(str(name.value), str(architecture.value)), name.span, quoted=True)
    class_patch = Mapping({"architecture": cls}, {"architecture": name.span}, name.span)
    texts = _head_texts(str(name.value), available, name.span)
    return without_nulls(reduce(merged, (*texts, class_patch), root))


def _head_texts(name: str, available: Mapping, span: Span, chain: tuple[str, ...] = ()) -> list[Mapping]:
    """Return the changes that define a head, after the changes of the heads that it extends."""
    shared = {file.stem: file for file in sorted((own_specs() / HEADS).glob("*.yaml"))}
    if name in chain:
        raise SpecError(Diagnostic(f"a head cannot extend itself: {quoted(name)}", span, "checkpoint.heads"))
    if name not in available.items and name not in shared:
        notes = (f"shared: {listing(shared, 20)}", f"of the family: {listing(available.items, 20)}")
        message = f"there is no head {quoted(name)} to extend"
        raise SpecError(Diagnostic(message, span, "checkpoint.heads", notes))
    node = available.items[name] if name in available.items else source.read(shared[name])
    changes = [without(node, {"extends"})] if isinstance(node, Mapping) else []
    word = node.items.get("extends") if isinstance(node, Mapping) else node
    return changes if word is None else [*_head_texts(str(plain(word)), available, word.span, (*chain, name)), *changes]
