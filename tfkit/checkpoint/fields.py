"""From a config.json to a spec: each field changes what the family's `checkpoint.config` says that it means."""

from __future__ import annotations

from typing import Any

from tfkit.checkpoint import layer_types, rope
from tfkit.checkpoint.layer_types import case_of
from tfkit.errors import Diagnostic, Invalid, SpecError, closest, listing, quoted
from tfkit.spec.arithmetic import ExpressionError, Number, evaluate
from tfkit.spec.checkpoint import CheckpointConfig, FieldConfig
from tfkit.spec.merge import merge, nested
from tfkit.spec.source import plain
from tfkit.spec.tree import Mapping, Node, Scalar, node_of

SILENT = frozenset(
    """
    architectures model_type _name_or_path name_or_path transformers_version torch_dtype dtype auto_map use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id is_encoder_decoder output_attentions
    output_hidden_states return_dict attn_implementation _attn_implementation _commit_hash gradient_checkpointing
    pretraining_tp task_specific_params id2label label2id num_labels problem_type chunk_size_feed_forward
    tokenizer_class prefix finetuning_task summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj classifier_dropout max_length min_length num_beams length_penalty early_stopping
    no_repeat_ngram_size do_sample bad_words_ids static_position_embeddings use_bfloat16 torchscript
    cache_implementation cross_attention_hidden_size
    """.split()  # noqa: SIM905
)
"""Fields of every family that say nothing about what the model computes."""
USUAL = {"position_embedding_type": "absolute", "is_decoder": False, "tie_encoder_decoder": False, "pruned_heads": {}}
"""Fields of many families that say nothing as long as they have these values."""


def read_fields(config: Mapping, family: Mapping, section: CheckpointConfig) -> Mapping:
    """The tree of a family's spec, changed to what a config.json says.

    Raises:
        SpecError: everything that is wrong with it: fields that the family does not know, lacks, or cannot say.
    """
    reading = Reading(config, family, section)
    for name, rule in section.fields.items():
        reading.apply(name, rule)
    for name, value in (section.only or {}).items():
        reading.require(name, value)
    reading.check_all_known()
    if reading.errors:
        raise SpecError(*reading.errors)
    return reading.tree


class Reading:
    """The fields of a config.json, and the spec as they have changed it so far."""

    def __init__(self, config: Mapping, family: Mapping, section: CheckpointConfig) -> None:
        self.tree = family
        self.section = section
        self.rules = section.fields
        self.errors: list[Diagnostic] = []
        self.read: set[str] = set()
        self.values: dict[str, Node] = {}
        self.further = {key for rule in self.rules.values() for key in rule.variants or {}}
        self.stacks: dict[str, tuple[list[str], dict[str, Any]]] = {}  # variants of the layers, and all there are
        self.span = config.span
        self._flatten(config, "")

    def _flatten(self, node: Mapping, start: str) -> None:
        """Fields by name; those of a mapping by `mapping.field` where the family knows some of them so."""
        for key, value in node.items.items():
            name = f"{start}{key}"
            parts = any(rule.startswith(f"{name}.") for rule in self.rules)
            if isinstance(value, Mapping) and parts:
                self._flatten(value, f"{name}.")
            if not isinstance(value, Mapping) or not parts or name in self.rules:
                self.values[name] = value

    def apply(self, name: str, rule: FieldConfig) -> None:
        """Change the spec as one field says."""
        if any(plain(self.node(other)) != wanted for other, wanted in (rule.when or {}).items()):
            self.read.add(name)
            return
        try:
            if rule.rope is not None:
                rope.read(self, name, rule)
            elif rule.cases is not None and (rule.set is None or case_of(plain(self.node(name))) in rule.cases):
                self._case(name, rule.cases)
            elif rule.layers or rule.first or rule.every:
                layer_types.read(self, name, rule)
            else:
                self._set(name, rule)
        except Invalid as wrong:
            self.error(str(wrong), self.values.get(name), name, *wrong.notes, help=wrong.help)

    def require(self, name: str, wanted: Any) -> None:
        """Note a field that has another value than the only one that the family can say."""
        self.read.add(name)
        wanted = list(wanted) if isinstance(wanted, tuple) else wanted
        if name in self.values and plain(self.values[name]) not in (wanted, None):
            message = (
                f"{quoted(name)} must be {quoted(case_of(wanted))}: {self.section.model_type} cannot say more here"
            )
            self.error(message, self.values[name], name)

    def node(self, name: str) -> Node:
        """The value of a field, or its default; raises `Invalid` if it must be there and is not."""
        self.read.add(name)
        if name in self.values:
            return self.values[name]
        rule = self.rules.get(name)
        if rule is None or "default" not in rule.model_fields_set:
            near = closest(name, self.values.keys() - self.rules.keys())
            help = f"a field of a similar name is there: {quoted(near)}" if near else None
            raise Invalid("", f"{quoted(name)} is missing", help=help)
        return node_of(rule.default, self.span)

    def put(self, path: str, value: Node) -> None:
        """Change one place of the spec; mappings of one kind are merged, everything else is replaced."""
        self.tree = merge(self.tree, nested(self._keys(path), value))

    def _keys(self, path: str) -> list[str]:
        keys, graph = path.split("."), self.tree.items.get("graph")
        return ["graph", *keys] if isinstance(graph, Mapping) and keys[0] in graph.items else keys

    def _is_null_before(self, path: str) -> bool:
        """Whether there is nothing to change: a path leads into what is null in the spec, or into no variant."""
        node: Node | None = self.tree
        before = ""
        for key in self._keys(path)[:-1]:
            node = node.items.get(key) if isinstance(node, Mapping) else None
            unknown = node is None and before == "variants" and key not in self.further
            if unknown or (isinstance(node, Scalar) and node.value is None):
                return True
            before = key
        return False

    def _set(self, name: str, rule: FieldConfig) -> None:
        value = self.node(name)
        if isinstance(value, Scalar) and value.value is None and rule.if_null is not None:
            value = Scalar(self.computed(rule.if_null), value.span)
        elif rule.read is not None and not (isinstance(value, Scalar) and value.value is None):
            value = Scalar(self.computed(rule.read, value), value.span)
        elif rule.null_if is not None and plain(value) == self.computed(rule.null_if):
            value = Scalar(None, value.span)
        changes: dict[str, Node] = {}
        if plain(value) is not None:  # these first: they may make the part that the value belongs to
            changes = {path: node_of(one, value.span) for path, one in (rule.also or {}).items()}
        changes |= dict.fromkeys([rule.set] if isinstance(rule.set, str) else rule.set or (), value)
        for path, node in changes.items():
            if not self._is_null_before(path):
                self.put(path, node)

    def _case(self, name: str, cases: dict[str, dict[str, Any]]) -> None:
        value = self.node(name)
        word = case_of(plain(value))
        if word not in cases:
            raise Invalid(
                "",
                f"{quoted(name)} is {quoted(word)}, which {self.section.model_type} cannot say here",
                notes=[f"it can be {listing(cases)}"],
            )
        for path, changed in cases[word].items():
            self.put(path, node_of(changed, value.span))

    def computed(self, text: str, value: Node | None = None) -> Number:
        """Arithmetic over the fields, and over `value`; raises `Invalid`."""
        found = evaluate(text, lambda name: self.number(name) if name != "value" or value is None else _number(value))
        near = round(found)
        return near if abs(found - near) <= 1e-12 * abs(found) else found

    def number(self, name: str) -> Number:
        """A field that is a number; raises `Invalid`."""
        node, rule = self.node(name), self.rules.get(name)
        if isinstance(node, Scalar) and node.value is None and rule is not None and rule.if_null is not None:
            return self.computed(rule.if_null)
        return _number(node)

    def error(self, message: str, node: Node | None, path: str, *notes: str, help: str | None = None) -> None:
        """Note what is wrong with a field."""
        self.errors.append(Diagnostic(message, node.span if node else self.span, path, notes, help))

    def check_all_known(self) -> None:
        """Note every field that says something that the family does not know."""
        silent = SILENT | set(self.section.unused or ())
        for name, node in self.values.items():
            empty = node.value is None if isinstance(node, Scalar) else not node.items
            around, _, leaf = name.rpartition(".")
            if not self.read.isdisjoint((name, around)) or name in silent or leaf in SILENT or empty:
                continue
            if leaf in USUAL and plain(node) == USUAL[leaf]:
                continue
            near = closest(name, self.rules)
            help = f"the family knows {quoted(near)}" if near else "if it says nothing, list it under `unused`"
            message = f"{self.section.model_type} does not know the field {quoted(name)}"
            self.error(message, node, name, help=help)


def _number(node: Node) -> Number:
    value = node.value if isinstance(node, Scalar) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(f"{quoted(str(plain(node)))} is not a number")
    return value
