"""A family: the tensors and the fields of config.json of all models of one `model_type`.

An example is `families/llama.yaml` among the specs. A spec names a family, `checkpoint: llama`, or contains one. A
family may extend another: an entry replaces the entry of the same name, and null removes it. Several names may be
written as one: `[q k v]_proj` stands for `q_proj`, `k_proj` and `v_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingABC
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field

from tfkit.component import Config, FieldConfig
from tfkit.errors import Diagnostic, Invalid, Span, SpecError, closest_name, listing, quoted
from tfkit.plugin.known_specs import NamedSpecs, built_in_specs_folder
from tfkit.plugin.registry import Registry
from tfkit.spec import source
from tfkit.spec.arithmetic import Expression
from tfkit.spec.extending import Read, find_family, short_path
from tfkit.spec.merge import is_null, merge, without_keys
from tfkit.spec.source import plain_data
from tfkit.spec.tree import Mapping, Node, Scalar, Sequence

ENTRIES = ("tensors", "extra", "fields", "when", "variants", "heads", "families")
"""Sections in which a null entry removes the inherited entry."""
ABOUT_FIELDS = ("defaults", "when")
"""Sections whose keys must be names of fields."""
EXPANDED = ("extra", "fields", "defaults", "when")
"""Sections in which brackets in names and values expand together."""
TENSORS, EXTRA, FAMILIES = "tensors", "extra", "families"
HEADS = "heads"
"""Folder, below the specs, of the heads that many families share."""
_WORDS = re.compile(r"\[([^\[\]]*)\]")
_END = re.compile(r"(For[A-Z]|WithLM|LMHead|MTModel|Model$).*")
"""The suffix of a class name that identifies its head."""
_HOLE = re.compile(r"\{\w+\}")
_ZERO = re.compile(r"0( without (?P<path>[\w.]+))?")


class FamilyConfig(Config):
    """The tensors and fields of the models of one type, as their published files have them."""

    model_type: str
    """The `model_type` of config.json; by default, the name of the family's file."""
    architecture: str
    """The class in transformers that implements the graph."""
    prefix: str = ""
    """Prefix of the names in the file; files of the model without its head omit it. Below, a name that begins with a
    dot continues the prefix."""
    tensors: dict[str, str | dict[str, str]]
    """Paths of the model's tensors, or of modules with tensors, and their names in the file; `{i}` stands for a
    number. If the file stores the values in a different order, the entry is `{name: pattern}`. Tensors that the model
    does not have are skipped. Of two entries for one tensor, the entry with more names applies if the model has all of
    them: `ffn.[gate up]` before `ffn.up`."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Tensors of the file that the model does not have; `*` matches any text. The value is one of: the reason to
    ignore the tensor; `= name`, a duplicate of that tensor; `= 0`, all zeros; `= 0 without logits.bias`, zeros
    unless that value of the spec is true, which no field sets; `= function(path)`, the value that the model
    computes there; a number, a constant, which is also written; `-> name`, an older name of that tensor."""
    fields: dict[str, FieldConfig] = Field(default_factory=dict)
    """The rule for each field of config.json: a kind of the slot `field`."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Values of fields that config.json omits, as in the config class of transformers. A field without a default is
    required. A list is repeated to the length that the field needs."""
    when: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Fields that have an effect only with certain values of other fields."""
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Changes of the layer variants that fields name but the family's first spec does not have."""
    heads: dict[str, Any] = Field(default_factory=dict)
    """Additional classes with the same body, by the suffixes of their names, such as `ForTokenClassification`: changes
    of this family, or the name of changes that many families share, a file of `specs/heads`. By default, every family
    has `Model`, the class without a head."""
    head: str | None = None
    """The entry of `heads` that applies."""
    spec: dict[str, Any] = Field(default_factory=dict)
    """Changes of the family's first spec, for a head."""
    text_types: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Types of text models of this family, in a `text_config` or, for older files, in a config.json that also has
    fields of images or sound; each with defaults that only a `text_config` needs, because it omits sizes."""
    families: dict[str, FamilyConfig] = Field(default_factory=dict)
    """Families of the configs inside config.json, by their fields: `{text_config: llama}`, or a mapping with changes.
    The tensors of these families are added to `tensors` and `extra`."""
    inside: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Types of models that contain this model and whose classes always compute with certain values of its fields,
    whatever their config.json states."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names in published files: of `architecture`, and of fields, each with the name in `fields`."""
    differences: tuple[str, ...] = ()
    """Differences between the computations of the transformers class and of the graph, printed by `tfkit import`."""

    def check(self) -> None:
        """Raise `Invalid` for malformed entries, unknown fields, and expressions without an inverse."""
        super().check()
        self._check_tensors()
        names = {f"defaults.{name}": name for name in self.defaults} | {f"when.{name}": name for name in self.when}
        # With a head, `architecture` is another class than that of the aliases.
        classes = [name for name in self.aliases.values() if self.head is not None and name != name.lower()]
        names |= {
            f"aliases.{alias}": name
            for alias, name in self.aliases.items()
            if name not in (self.architecture, *classes)
        }
        for path, name in names.items():
            if name not in self.fields:
                near = closest_name(name, self.fields)
                help = f"a field with a similar name exists: {quoted(near)}" if near else None
                raise Invalid(path, f"the family has no field {quoted(name)}", help=help)
        for name, rule in self.fields.items():
            for text in rule.expressions:
                try:
                    Expression.parse(text, self.fields)
                except Invalid as error:
                    raise Invalid(f"fields.{name}.at", str(error), notes=error.notes, help=error.help) from None

    def _check_tensors(self) -> None:
        for name, entry in self.tensors.items():
            if isinstance(entry, MappingABC) and len(entry) != 1:
                raise Invalid(
                    f"tensors.{name}", "the mapping must have one name in the file, with its pattern: `{name: pattern}`"
                )
        for name, meant in self.extra.items():
            if isinstance(meant, bool) or not isinstance(meant, str | int | float):
                help = "write a reason to ignore it, `= other`, `-> newer`, or a number"
                raise Invalid(
                    f"extra.{name}", f"the value must be text or a number; got {quoted(str(meant))}", help=help
                )

    def in_file(self, name: str) -> str:
        """Return a name as it appears in the file, with the prefix."""
        return self.prefix + name[1:] if name.startswith(".") else name

    @property
    def body(self) -> frozenset[str]:
        """Names in the file that begin with the prefix, without it, and with `{}` for numbers."""
        entries = (entry if isinstance(entry, str) else next(iter(entry)) for entry in self.tensors.values())
        names = (self.in_file(name) for entry in entries for name in expanded_names(entry))
        bodies = (name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix))
        return frozenset(_HOLE.sub("{}", name) for name in bodies)

    @property
    def classes(self) -> dict[str, str | None]:
        """Classes that the family supports, and the head of each; None for `architecture`."""
        names = [self.architecture, *(alias for alias, name in self.aliases.items() if name == self.architecture)]
        return dict.fromkeys(names) | {class_of(head, self.architecture): head for head in self.heads}

    def removes(self, path: str) -> bool:
        """Return True if the family's head removes the node that contains a path."""
        nodes = self.spec.get("graph")
        name = path.partition(".")[0]
        return isinstance(nodes, dict) and name in nodes and nodes[name] is None

    def listing(self, stack: str) -> str | None:
        """Return the field that lists the type of each layer of a stack; None without such a field."""
        return next((name for name, rule in self.fields.items() if rule.lists == stack), None)

    def field_of(self, path: str) -> str | None:
        """Return the field that sets the value at a path of the spec; None without such a field."""
        texts = [(name, text) for name, rule in self.fields.items() for text in rule.expressions]
        return next((name for name, text in texts if Expression.parse(text, self.fields).path == path), None)

    @property
    def copies(self) -> dict[str, str]:
        """Tensors of the file that duplicate another tensor, and the name of the original."""
        computed = [*self.zeros, *self.computed]
        texts = {self.in_file(name): self.in_file(text) for name, text in self._marked("=").items()}
        return {name: text for name, text in texts.items() if name not in computed}

    @property
    def zeros(self) -> dict[str, str | None]:
        """Tensors of the file that must be zero, each with the path of the boolean that adds it to the model."""
        texts = {self.in_file(name): _ZERO.fullmatch(text) for name, text in self._marked("=").items()}
        paths = {name: match["path"] for name, match in texts.items() if match is not None}
        return {name: None if path is None or self.removes(path) else path for name, path in paths.items()}

    @property
    def computed(self) -> dict[str, str]:
        """Tensors of the file that the model computes, each with its function."""
        return {self.in_file(name): text for name, text in self._marked("=").items() if text.endswith(")")}

    @property
    def older(self) -> dict[str, str]:
        """Names in older files, each with the current name. A suffix begins with `*`, and a prefix ends with it."""
        return {self.in_file(name): self.in_file(text) for name, text in self._marked("->").items()}

    @property
    def constants(self) -> dict[str, float]:
        """Single numbers in the file that are the same in all models of the family."""
        return {self.in_file(name): value for name, value in self.extra.items() if not isinstance(value, str)}

    @property
    def ignored(self) -> dict[str, str]:
        """Tensors of the file that the model does not use, each with the reason."""
        texts = {name: text for name, text in self.extra.items() if isinstance(text, str)}
        return {self.in_file(name): text for name, text in texts.items() if not text.startswith(("=", "->"))}

    def _marked(self, mark: str) -> dict[str, str]:
        """Return the entries of `extra` whose text begins with `mark`, with the mark removed."""
        texts = {name: text for name, text in self.extra.items() if isinstance(text, str) and text.startswith(mark)}
        return {name: text.removeprefix(mark).strip() for name, text in texts.items()}


def class_of(head: str, architecture: str) -> str:
    """Return the class name for an entry of `heads`: the stem of `architecture` with the entry as its suffix."""
    return _END.sub("", architecture) + head


# ---- the text of a family ----


def with_inline_family(root: Mapping, specs: NamedSpecs) -> Mapping:
    """Replace the path of a family in a spec by the contents of that file. Names of known families stay."""
    node = root.items.get("checkpoint")
    word = node.items.get("extends") if isinstance(node, Mapping) else node
    if node is None or word is None or is_null(word) or (isinstance(word, Scalar) and word.value in specs.families):
        return root
    return Mapping({**root.items, "checkpoint": family_of(node, specs)}, root.keys, root.span)


def full_family(node: Node, specs: NamedSpecs, registry: Registry) -> Mapping:
    """Expand the family of a spec, given by name or inline: merge what it extends, apply its head, add its kinds."""
    root = _with_kinds(_with_head(family_of(node, specs)), registry)
    parts = root.items.get(FAMILIES)
    if not isinstance(parts, Mapping):
        return root
    families = {name: _with_text_defaults(full_family(part, specs, registry)) for name, part in parts.items.items()}
    items = {**root.items, FAMILIES: Mapping(dict(families), parts.keys, parts.span)}
    for section in (TENSORS, EXTRA):
        sections = [*(_in_full(family, section) for family in families.values()), root.items.get(section)]
        items[section] = reduce(_joined, (node for node in sections if isinstance(node, Mapping)))
    return Mapping(items, {TENSORS: root.span, EXTRA: root.span, **root.keys}, root.span)


def _with_text_defaults(family: Mapping) -> Mapping:
    """Add the defaults of the class of a text model, of which a `text_config` omits many."""
    defaults, types = (family.items.get(name) for name in ("defaults", "text_types"))
    of_type = types.items.get(str(plain_data(family.items["model_type"]))) if isinstance(types, Mapping) else None
    if not isinstance(defaults, Mapping) or not isinstance(of_type, Mapping):
        return family
    return Mapping({**family.items, "defaults": _joined(defaults, of_type)}, family.keys, family.span)


def _in_full(family: Mapping, section: str) -> Node | None:
    """Return the tensors of a family, or what it states about further tensors, with their names in full."""
    prefix, node = str(plain_data(family.items.get("prefix", Scalar("", family.span)))), family.items.get(section)
    return None if node is None else _with_prefix(node, prefix, names=section == EXTRA)


def _with_prefix(node: Node, prefix: str, *, names: bool) -> Node:
    """Put a prefix before the names in a node that begin with a dot; with `names`, also before keys."""

    def full(text: str) -> str:
        mark = next((mark for mark in ("= ", "-> ") if text.startswith(f"{mark}.")), "")
        rest = text.removeprefix(mark)
        return mark + prefix + rest[1:] if rest.startswith(".") else text

    if isinstance(node, Mapping):
        keys = {name: full(name) if names else name for name in node.items}
        items = {keys[name]: _with_prefix(value, prefix, names=True) for name, value in node.items.items()}
        return Mapping(items, {keys[name]: span for name, span in node.keys.items()}, node.span)
    return replace(node, value=full(node.value)) if isinstance(node, Scalar) and isinstance(node.value, str) else node


def _joined(first: Mapping, second: Mapping) -> Mapping:
    return Mapping({**first.items, **second.items}, {**first.keys, **second.keys}, second.span)


def family_of(node: Node, specs: NamedSpecs, read: Read = source.read) -> Mapping:
    """Read a family, given by name or inline, and merge it with the families that it extends. `read` reads a file.

    Raises SpecError if there is no such family.
    """
    if not isinstance(node, Mapping):
        node = Mapping({"extends": node}, {"extends": node.span}, node.span)
    texts, chain = [node], list[Path]()
    while (word := texts[-1].items.get("extends")) is not None:
        if not isinstance(word, Scalar) or not isinstance(word.value, str):
            help = "write `checkpoint: llama`, or a path: `checkpoint: ./my_family.yaml`"
            raise SpecError(
                Diagnostic("the name of a family must be a single word or path", word.span, "checkpoint", help=help)
            )
        path = find_family(word.value, specs, word.span)
        if path in chain:
            message = f"a family cannot extend itself: {quoted(str(short_path(path)))}"
            raise SpecError(Diagnostic(message, word.span, "checkpoint.extends"))
        chain.append(path)
        texts.append(_with_type(read(path, name=str(short_path(path))), path.stem))
    # Almost all families have a class without a head; null in `heads` removes it.
    body = Mapping({"Model": Scalar("body", node.span)}, {"Model": node.span}, node.span)
    base = Mapping({"heads": body}, {"heads": node.span}, node.span)
    return _without_nulls(reduce(_merged_families, (without_keys(text, {"extends"}) for text in reversed(texts)), base))


def _with_head(root: Mapping) -> Mapping:
    """Apply the head that a family names. Raise SpecError if the family has no such head."""
    name, heads, architecture = (root.items.get(key) for key in ("head", "heads", "architecture"))
    if not isinstance(name, Scalar) or not isinstance(architecture, Scalar):
        return root
    available = heads if isinstance(heads, Mapping) else Mapping({}, {}, root.span)
    if name.value not in available.items:
        near = closest_name(str(name.value), available.items)
        message = f"the family has no head {quoted(str(name.value))}"
        notes = (f"heads: {listing(available.items, 20) or 'none'}",)
        help = (
            f"a head with a similar name exists: {quoted(near)}"
            if near
            else "remove `head` to use the head of the family"
        )
        raise SpecError(Diagnostic(message, name.span, "checkpoint.head", notes, help))
    cls = Scalar(class_of(str(name.value), str(architecture.value)), name.span, quoted=True)
    class_patch = Mapping({"architecture": cls}, {"architecture": name.span}, name.span)
    texts = _head_texts(str(name.value), available, name.span)
    return _without_nulls(reduce(_merged_families, (*texts, class_patch), root))


def _head_texts(name: str, available: Mapping, span: Span, chain: tuple[str, ...] = ()) -> list[Mapping]:
    """Return the changes that define a head, preceded by the changes of the heads that it extends."""
    shared = {file.stem: file for file in sorted((built_in_specs_folder() / HEADS).glob("*.yaml"))}
    if name in chain:
        raise SpecError(Diagnostic(f"a head cannot extend itself: {quoted(name)}", span, "checkpoint.heads"))
    if name not in available.items and name not in shared:
        notes = (f"shared: {listing(shared, 20)}", f"of the family: {listing(available.items, 20)}")
        message = f"there is no head {quoted(name)} to extend"
        raise SpecError(Diagnostic(message, span, "checkpoint.heads", notes))
    node = available.items[name] if name in available.items else source.read(shared[name])
    changes = [without_keys(node, {"extends"})] if isinstance(node, Mapping) else []
    word = node.items.get("extends") if isinstance(node, Mapping) else node
    return (
        changes
        if word is None
        else [*_head_texts(str(plain_data(word)), available, word.span, (*chain, name)), *changes]
    )


def _merged_families(base: Mapping, patch: Mapping) -> Mapping:
    """Apply to a family the changes of a family that extends it. Nulls stay until `_without_nulls` removes them."""
    patch = _with_names_expanded(patch)
    items, keys = dict(base.items), {**base.keys, **patch.keys}
    gone = _null_names(patch.items.get("fields"))
    for section in ABOUT_FIELDS:
        if isinstance(old := items.get(section), Mapping):
            items[section] = without_keys(old, gone)
    for name, node in patch.items.items():
        old = items.get(name)
        if isinstance(old, Mapping) and isinstance(node, Mapping) and name == "spec":
            items[name] = merge(old, node)
        elif isinstance(old, Mapping) and isinstance(node, Mapping):
            items[name] = Mapping({**old.items, **node.items}, {**old.keys, **node.keys}, node.span)
        else:
            items[name] = node
    return Mapping(items, keys, patch.span)


def _with_type(root: Mapping, name: str) -> Mapping:
    """Set `model_type` to the name of the file, unless the family sets it."""
    if "model_type" in root.items:
        return root
    type = Scalar(name, root.span, quoted=True)
    return Mapping({"model_type": type, **root.items}, {"model_type": root.span, **root.keys}, root.span)


def _without_nulls(root: Mapping) -> Mapping:
    """Remove the entries that are null from a family."""
    sections = [(name, node) for name in ENTRIES if isinstance(node := root.items.get(name), Mapping)]
    entries = {name: without_keys(node, _null_names(node)) for name, node in sections}
    return Mapping({**root.items, **entries}, root.keys, root.span)


def _with_kinds(root: Mapping, registry: Registry) -> Mapping:
    """Add the kind to the rule of each field."""
    fields = root.items.get("fields")
    if not isinstance(fields, Mapping):
        return root
    kinds = registry.kinds(FieldConfig.slot)
    rules = {name: _with_kind(name, rule, kinds) for name, rule in fields.items.items()}
    return Mapping({**root.items, "fields": Mapping(rules, fields.keys, fields.span)}, root.keys, root.span)


def _null_names(node: Node | None) -> set[str]:
    """Return the names of the entries that are null."""
    return {name for name, entry in node.items.items() if is_null(entry)} if isinstance(node, Mapping) else set()


def _with_kind(name: str, node: Node, kinds: MappingABC[str, Any]) -> Node:
    """Write a rule as a mapping with a kind: `unused`, `value` for a path, or the kind that one of its keys names."""
    if isinstance(node, Scalar) and node.value == "unused":
        return _rule_mapping("unused", {}, {}, node.span)
    if not isinstance(node, Mapping):
        return _rule_mapping("value", {"at": node}, {"at": node.span}, node.span)
    kinds_named = [key for key in node.items if key in kinds]
    if "at" in node.items and kinds_named in ([], ["cases"]):
        kinds_named = ["value"]
    if len(kinds_named) != 1:
        message = f"{quoted(name)} must name one kind; got {listing(kinds_named) or 'none'}"
        notes = (f"kinds: {listing(sorted(kinds), 20)}",)
        help = "write the path of a value of the spec, or a mapping with the name of one kind: `{only: false}`"
        raise SpecError(Diagnostic(message, node.span, f"checkpoint.fields.{name}", notes, help))
    return _rule_mapping(kinds_named[0], dict(node.items), dict(node.keys), node.span)


def _rule_mapping(kind: str, items: dict[str, Node], keys: dict[str, Span], span: Span) -> Mapping:
    return Mapping({"kind": Scalar(kind, span), **items}, {"kind": span, **keys}, span)


# ---- names in brackets ----


def expanded_names(name: str) -> list[str]:
    """Expand brackets such as `[q k v]` in a name, in order; raise `Invalid` for unmatched brackets."""
    segments = _WORDS.split(name)
    if any(bracket in segment for segment in segments[::2] for bracket in "[]") or any(
        not w.split() for w in segments[1::2]
    ):
        raise Invalid("", f"{quoted(name)} has brackets without words, or an unmatched bracket", help="write `[q k v]`")
    choices = [segment.split() if index % 2 else [segment] for index, segment in enumerate(segments)]
    return ["".join(chosen) for chosen in product(*choices)]


def _with_names_expanded(root: Mapping) -> Mapping:
    """Expand the brackets in the names of a family, such as `[encoder decoder]`."""
    items = dict(root.items)
    for section in EXPANDED:
        node = items.get(section)
        if isinstance(node, Mapping):
            entries = [_expanded_entry(node, key, section) for key in node.items]
            expanded_items = {name: value for entry in entries for name, value in entry.items.items()}
            keys = {name: span for entry in entries for name, span in entry.keys.items()}
            items[section] = Mapping(expanded_items, keys, node.span)
    return Mapping(items, root.keys, root.span)


def _expanded_entry(node: Mapping, key: str, section: str) -> Mapping:
    try:
        return _mapping_for_name(Mapping({key: node.items[key]}, {key: node.keys[key]}, node.span), 0, 1)
    except Invalid as error:
        path = f"checkpoint.{section}.{key}"
        raise SpecError(Diagnostic(str(error), node.keys[key], path, help=error.help)) from None


def _mapping_for_name(node: Mapping, index: int, n: int) -> Mapping:
    """Return the mapping for name `index` of `n`: brackets in its values are reduced to the word of that name.

    With a single name, all words stay.
    """
    items: dict[str, Node] = {}
    keys: dict[str, Span] = {}
    for key, value in node.items.items():
        names = expanded_names(key) if n == 1 else [_word_for_name(key, index, n)]
        for position, name in enumerate(names):
            items[name] = _value_of(value, position, len(names)) if n == 1 else _value_of(value, index, n)
            keys[name] = node.keys[key]
    return Mapping(items, keys, node.span)


def _value_of(node: Node, index: int, n: int) -> Node:
    if isinstance(node, Mapping):
        return _mapping_for_name(node, index, n)
    if isinstance(node, Sequence):
        return Sequence(tuple(_value_of(item, index, n) for item in node.items), node.span)
    if not isinstance(node.value, str) or "[" not in node.value:
        return node
    if n > 1:
        return Scalar(_word_for_name(node.value, index, n), node.span)
    return Sequence(tuple(Scalar(word, node.span) for word in expanded_names(node.value)), node.span)


def _word_for_name(text: str, index: int, n: int) -> str:
    words = expanded_names(text)
    if len(words) not in (1, n):
        raise Invalid("", f"the brackets of {quoted(text)} must have {n} words, one for each name; got {len(words)}")
    return words[index] if len(words) > 1 else words[0]
