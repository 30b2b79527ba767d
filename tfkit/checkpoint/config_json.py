"""The config.json of published weights: from its fields to a spec, and back, by the rules of a family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from collections.abc import Mapping as MappingABC
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

from tfkit.component import ABSENT, BlockConfig, Component, Config, FieldConfig, SharedMarker, case_of, marker
from tfkit.errors import Diagnostic, Invalid, Span, SpecError, closest_name, quoted
from tfkit.spec.arithmetic import Expression, ExpressionError, Number, evaluate
from tfkit.spec.families import FamilyConfig
from tfkit.spec.load import Spec
from tfkit.spec.merge import is_null, merge, nested_patch, without_keys
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.source import plain_data
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
    cache_implementation cross_attention_hidden_size diversity_penalty encoder_no_repeat_ngram_size num_beam_groups
    exponential_decay_length_penalty num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens begin_suppress_tokens temperature tf_legacy_loss top_k top_p typical_p
    """.split()  # noqa: SIM905
)
"""Fields without effect on the model, in every family."""
FILE_FIELDS = frozenset({"architectures", "model_type", "auto_map", "torch_dtype", "dtype", "_commit_hash"})
"""Fields without effect on the model that describe a certain file, and are written anew or omitted."""
INERT_VALUES = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
"""Values with which these fields, which many families have, are without effect on the model."""
LABELS = ("id2label", "label2id")
TEXT = "text_config"
"""The field of config.json with the config of the text model that a model of images or sound contains."""
TIED = "tie_word_embeddings"
OF_MEDIA = re.compile(r"(vision|image|video|audio)_")
"""Matches the fields of images and sound in a config.json that also has the fields of the text model."""
OF_TEXT = SILENT - FILE_FIELDS | {*LABELS, TIED}
"""Fields next to `text_config` that apply to the text model."""
ROTARY = re.compile("rope|rotary|theta")
"""Matches the fields of rotary positions, which have older and newer forms."""
CODE = "auto_map"
"""The field that names code in the folder of a config.json."""
QUANTIZATION = "quantization_config"
"""The field that describes quantized weights."""
IGNORED = "its class in transformers ignores the field"
MAX_LAYERS = 4096
"""Maximum number of layers of a stack, see `Count`."""


def read_fields(config: Mapping, spec: Mapping, family: FamilyConfig, notes: list[Diagnostic] | None = None) -> Mapping:
    """Change the spec of a family to the model that a config.json describes, and return its tree.

    Args:
        config: the config.json.
        spec: the tree of the spec.
        family: the family of the spec.
        notes: the list to which warnings about fields that the class of transformers ignores are added. By default,
            such fields are errors.

    Raises:
        SpecError: with every error: unknown and missing fields, and values that the family cannot express.
    """
    tree, errors = spec, list[Diagnostic]()
    config = _with_text_config(config, family)
    for name, part in {**family.families, "": family}.items():
        reading = FieldReading(_config_of(config, name, part) if name else config, tree, part)
        for field in part.fields:
            reading.read(field)
        reading.drop_unused_variants()
        reading.check_all_known()
        for diagnostics, target in ((reading.errors, errors), (reading.ignored, errors if notes is None else notes)):
            target += [replace(error, path=f"{name}.{error.path}".lstrip(".")) for error in diagnostics]
        tree = reading.tree
    if errors:
        raise SpecError(*errors)
    return tree


def _with_text_config(config: Mapping, family: FamilyConfig) -> Mapping:
    """Move the fields of the text model into `text_config`, from an older file that has them next to other fields."""
    text = family.families.get(TEXT)
    if text is None or TEXT in config.items or family.model_type not in text.text_types:
        return config
    outer = {name for name in config.items if OF_MEDIA.match(name) or name in {*family.fields, *FILE_FIELDS}}
    inner = Mapping({name: node for name, node in config.items.items() if name not in outer}, config.keys, config.span)
    items = {name: node for name, node in config.items.items() if name in outer}
    return Mapping({**items, TEXT: inner}, {**config.keys, TEXT: config.span}, config.span)


def _config_of(config: Mapping, name: str, family: FamilyConfig) -> Mapping:
    """Return the config inside a config.json that a family describes; empty if it is missing."""
    inner = config.items.get(name)
    if inner is None or is_null(inner):
        return Mapping({}, {}, config.span)
    stated = inner.items.get("model_type") if isinstance(inner, Mapping) else inner
    if not isinstance(inner, Mapping) or (stated is not None and plain_data(stated) != family.model_type):
        message = f"{quoted(name)} must be a config of type {quoted(family.model_type)}"
        got = f"; got {quoted(str(plain_data(stated)))}" if stated is not None else ""
        raise SpecError(Diagnostic(message + got, (stated or inner).span, f"{name}.model_type"))
    return inner


class FieldReading:
    """Implementation of `Reading`: the fields of a config.json, and the spec with the changes so far.

    Attributes:
        tree: the spec.
        errors: the errors found.
        ignored: errors of fields that the class of transformers ignores.
    """

    def __init__(self, config: Mapping, spec: Mapping, family: FamilyConfig) -> None:
        self.tree = spec
        self.errors: list[Diagnostic] = []
        self.ignored: list[Diagnostic] = []
        self.model_type = family.model_type
        self._family = family
        self._name = ""
        self._used: set[str] = set()
        self._values: dict[str, Node] = {}
        self._solved: dict[str, tuple[str, Any]] = {}
        self._stacks: dict[str, tuple[list[str], Mapping]] = {}
        self._around: dict[str, Span] = {}
        self._top = self._span = config.span
        self._flatten(config, "")

    def _flatten(self, node: Mapping, start: str) -> None:
        """Yield fields by name; a field in a mapping as `mapping.field` if the family has rules of that form."""
        self._around[start] = node.span
        for key, value in node.items.items():
            name = self._family.aliases.get(f"{start}{key}", f"{start}{key}")
            if name in self._family.families:
                continue
            if name in self._values and plain_data(self._values[name]) != plain_data(value):
                alias = next(other for other in node.items if self._family.aliases.get(f"{start}{other}") == name)
                message = f"{quoted(alias)} and {quoted(name)} name the same field, and must be equal"
                self.errors.append(Diagnostic(message, value.span, name, help="remove one of the two"))
            parts = any(rule.startswith(f"{name}.") for rule in self._family.fields)
            if isinstance(value, Mapping) and parts:
                self._flatten(value, f"{name}.")
            if not isinstance(value, Mapping) or not parts or self.knows(name):
                self._values[name] = value

    def read(self, name: str) -> None:
        """Apply a field to the spec unless other fields disable it; record its errors."""
        self._name, around = name, name[: name.rfind(".") + 1]
        self._span = self._values[name].span if name in self._values else self._around.get(around, self._top)
        self._used.add(name)
        try:
            field, conditions = self._family.fields[name], self._family.when.get(name, {})
            means = all(self.value(other) == expected for other, expected in conditions.items())
            (field.read if means else field.pass_over)(name, self)
        except Invalid as error:
            self._error(str(error), name, *error.notes, help=error.help)

    def value(self, name: str) -> Any:
        self._used.add(name)
        if name in self._values:
            return plain_data(self._values[name])
        if name not in self._family.defaults:
            older = not self.knows(name) and self._name not in self._values  # the file may use an older name
            missing = self._name if older else name
            unread = [
                field for field in self._values if not self.knows(field) and field.rpartition(".")[2] not in SILENT
            ]
            near = closest_name(missing, unread)
            help = f"a field with a similar name exists: {quoted(near)}" if near else None
            raise Invalid("", f"{quoted(missing)} is missing", help=help)
        return plain_data(self._node(self.default(name)))

    def default(self, name: str) -> Any:
        return self._family.defaults.get(name)

    def present(self, around: str) -> dict[str, Any]:
        values = {name: plain_data(node) for name, node in self._values.items() if name.startswith(around)}
        return {name.removeprefix(around): value for name, value in values.items() if value is not None}

    def knows(self, name: str) -> bool:
        return name in self._family.fields

    def used(self, names: Iterable[str]) -> None:
        present = [name for name in names if name in self._values]
        self._used |= set(names)
        if self._name not in self._values and present:  # a field in its older form
            self._span = self._values[present[0]].span

    def compute(self, text: str) -> Number:
        return _rounded_number(evaluate(text, self._number))

    def _number(self, name: str) -> Number:
        value, rule = self.value(name), self._family.fields.get(name)
        if value is None and rule is not None and rule.null is not None:
            return self.compute(rule.null)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ExpressionError(f"{quoted(name)} must be a number; got {quoted(str(value))}")
        return value

    def at(self, path: str) -> Any:
        node = self._node_at(path)
        return None if node is None else plain_data(node)

    def _node_at(self, path: str) -> Node | None:
        node: Node | None = self.tree
        for key in self._keys(path):
            node = node.items.get(key) if isinstance(node, Mapping) else None
        return node

    def reaches(self, path: str) -> bool:
        if self._family.removes(path):
            return False
        node: Node | None = self.tree
        before = ""
        for key in self._keys(path)[:-1]:
            node = node.items.get(key) if isinstance(node, Mapping) else None
            unknown = node is None and before == "variants" and key not in self._family.variants
            if unknown or (isinstance(node, Scalar) and node.value is None):
                return False
            before = key
        return True

    def put(self, path: str, value: Any) -> None:
        if not self._family.removes(path):
            self._merge(path, self._node(value))

    def _merge(self, path: str, node: Node) -> None:
        self.tree = merge(self.tree, nested_patch(self._keys(path), node))

    def _keys(self, path: str) -> list[str]:
        keys, graph = path.split("."), self.tree.items.get("graph")
        return ["graph", *keys] if isinstance(graph, Mapping) and keys[0] in graph.items else keys

    def _node(self, value: Any) -> Node:
        return node_of(value, self._span)

    def solve(self, expression: str, value: Any) -> None:
        solved = Expression.parse(expression, self._family.fields)
        if not self.reaches(solved.path):
            return
        if isinstance(value, dict):
            raise Invalid("", f"{quoted(self._name)} cannot be a mapping")
        if not solved.is_path and value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ExpressionError(f"the value must be a number; got {quoted(str(value))}")
            value = _rounded_number(solved.inverse(value, self._number))
        self._check_agreement(solved.path, value)
        node = Scalar(value, self._span, quoted=True) if isinstance(value, str) else self._node(value)
        self._merge(solved.path, node)

    def _check_agreement(self, path: str, value: Any) -> None:
        """Raise `Invalid` if two fields, at least one of them in the file, set a path to different values."""
        other, before = self._solved.setdefault(path, (self._name, value))
        if before != value and not self._values.keys().isdisjoint((self._name, other)):
            message = f"{self._gives(self._name, value)}, but {self._gives(other, before)}"
            raise Invalid("", message, help="correct one of the two fields")

    def _gives(self, name: str, value: Any) -> str:
        left_out = "" if name in self._values else ", which is missing,"
        return f"{quoted(name)}{left_out} gives {quoted(case_of(value))}"

    def layers(self, stack: str) -> list[str] | None:
        n_layers = self.at(f"{stack}.n_layers")
        if type(n_layers) is not int or not 0 < n_layers <= MAX_LAYERS:
            return None  # an error of the field that gives it
        return self._stacks[stack][0] if stack in self._stacks else [BASE] * n_layers

    def variants(self, stack: str) -> dict[str, Any]:
        changes = plain_data(self._variants(stack))
        assert isinstance(changes, dict)
        return changes

    def _variants(self, stack: str) -> Mapping:
        variants = self._stacks[stack][1] if stack in self._stacks else self._node(self._family.variants)
        here = self._node_at(f"{stack}.layers.variants")
        assert isinstance(variants, Mapping)
        return merge(variants, here) if isinstance(here, Mapping) else variants

    def arrange(self, stack: str, names: Sequence[str]) -> None:
        variants = self._variants(stack)
        self._stacks[stack] = list(names), variants
        self.put(f"{stack}.layers", None)
        if any(name != BASE for name in names):
            self._merge(f"{stack}.layers.variants", without_keys(variants, variants.items.keys() - set(names)))
            self.put(f"{stack}.layers.pattern", pattern_of(names))

    def listed(self, stack: str) -> bool:
        field = self._family.listing(stack)
        return field is not None and self.value(field) is not None

    def drop_unused_variants(self) -> None:
        """Remove the variants that no layer uses, including values that later fields set in them."""
        for stack, (names, _) in list(self._stacks.items()):
            if self.at(f"{stack}.layers") is not None:
                self.arrange(stack, names)

    def check_all_known(self) -> None:
        """Record an error for every unknown field that may affect the model."""
        for name, node in self._values.items():
            empty = node.value is None if isinstance(node, Scalar) else not node.items
            around, _, leaf = name.rpartition(".")
            if not self._used.isdisjoint((name, around)) or leaf in SILENT or empty:
                continue
            if leaf in INERT_VALUES and plain_data(node) == INERT_VALUES[leaf]:
                continue
            if name == QUANTIZATION:
                method = plain_data(node).get("quant_method") if isinstance(node, Mapping) else None
                message = f"the weights of this folder are quantized{f' by {quoted(method)}' if method else ''}"
                way_out = "build the model with weights of a folder that is not quantized"
                self.ignored.append(Diagnostic(message, node.span, name, (), way_out))
                continue
            near = closest_name(name, self._family.fields)
            message = f"{self.model_type} does not have the field {quoted(name)}"
            help = f"a field of the family has a similar name: {quoted(near)}" if near else None
            # Code next to the file may read the field, and these fields change the models of some classes.
            if CODE in self._values or leaf in INERT_VALUES or ROTARY.search(name):
                self._error(message, name, help=help or self._way_out(name))
            else:
                self.ignored.append(Diagnostic(message, node.span, name, (IGNORED,), help))

    def _way_out(self, name: str) -> str:
        """Return the help for a field without effect: a family that ignores it."""
        family = f"checkpoint: {{extends: {self.model_type}, fields: {{{name}: unused}}}}"
        return f"if it has no effect: --family FILE, a spec with `extends: {self.at('name')}` and `{family}`"

    def _error(self, message: str, name: str, *notes: str, help: str | None = None) -> None:
        span = self._values[name].span if name in self._values else self._span
        self.errors.append(Diagnostic(message, span, name, notes, help))


def contains_text_model(config: MappingABC[str, Any], family: FamilyConfig) -> bool:
    """Return True if the model of a config.json contains the model of a family, as a model of images and text does."""
    in_family = any(name == TEXT or name.startswith(f"{TEXT}.") for name in (*family.fields, *family.families))
    node = config.get("model_type")
    model_type = str(node.value if isinstance(node, Scalar) else node)
    flat = model_type in family.text_types and any(map(OF_MEDIA.match, config))
    return flat or (isinstance(config.get(TEXT), Mapping | dict) and not in_family)


def text_config_in(config: MappingABC[str, Any]) -> Any:
    """Return the config of a text model: `text_config`, or the fields in which no name begins with images or sound."""
    return config.get(TEXT) or {name: value for name, value in config.items() if not OF_MEDIA.match(name)}


def text_fields(inner: MappingABC[str, Any], outer: MappingABC[str, Any]) -> dict[str, Any]:
    """Return the fields of a text model: the fields of its config, and the fields around it that apply to it."""
    return {**inner, **{key: value for key, value in outer.items() if key in OF_TEXT and value is not None}}


def further_fields(config: MappingABC[str, Any], family: FamilyConfig | None) -> dict[str, Any]:
    """Return the fields of a config.json that no spec contains, such as the ids of special tokens.

    If the file belongs to the family, they include the fields that have no effect in this family.
    """
    if family is None or config.get("model_type") != family.model_type:
        return _further_entries(config, {}, "")
    inner = {name: config.get(name) for name in family.families}
    outer = {name: value for name, value in config.items() if name not in inner}
    fields = _further_entries(outer, family.fields, "")
    for name, part in inner.items():
        if isinstance(part, dict) and (further := further_fields(part, family.families[name])):
            fields[name] = further
    return fields


def _further_entries(config: MappingABC[str, Any], rules: MappingABC[str, FieldConfig], start: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{start}{key}"
        if isinstance(value, dict) and any(rule.startswith(f"{name}.") for rule in rules):
            fields |= {key: inner} if (inner := _further_entries(value, rules, f"{name}.")) else {}
        elif key in LABELS or (key not in FILE_FIELDS and _is_free(key, value, rules.get(name))):
            fields[key] = value
    return fields


def _is_free(key: str, value: Any, rule: FieldConfig | None) -> bool:
    """Return True for a field that does not determine the model."""
    if rule is not None:
        return not rule.determines
    return key in SILENT or (key in INERT_VALUES and value == INERT_VALUES[key])


def with_further_fields(config: MappingABC[str, Any], further: MappingABC[str, Any]) -> dict[str, Any]:
    """Return a config.json with the fields that no spec contains; the names of classes only if their number fits."""
    merged, names = dict(config), config.get(LABELS[0])
    if names is not None and (len(names) != len(further.get(LABELS[0], ())) or not _has_default_labels(names)):
        further = {key: value for key, value in further.items() if key not in LABELS}
    for key, value in further.items():
        inner = merged.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and key not in LABELS:
            merged[key] = with_further_fields(inner, value)
        else:
            merged[key] = value
    return merged


def _has_default_labels(names: MappingABC[Any, str]) -> bool:
    """Return True for the names that transformers gives to classes without names."""
    return all(name == f"LABEL_{key}" for key, name in names.items())


def _rounded_number(value: Number) -> Number:
    near = round(value)
    return near if abs(value - near) <= 1e-12 * abs(value) else value


BASE = "base"


def pattern_of(names: Sequence[str]) -> Any:
    """Return the shortest layer pattern for `names`: a cycle with counts, or ranges and the rest."""
    n = len(names)
    length = next(k for k in range(1, n + 1) if all(names[i] == names[i % k] for i in range(n)))
    runs = [(name, len(list(run))) for name, run in groupby(names[:length])]
    if length == n and len(runs) == 2:
        (first, count), (rest, _) = runs
        return {"0" if count == 1 else f"0-{count - 1}": first, "rest": rest}
    return [name if times == 1 else f"{name}*{times}" for name, times in runs]


# ---- writing ----


def write_fields(spec: Spec, family: FamilyConfig, *, nearest: bool = False) -> dict[str, Any]:
    """Return the fields of the config.json for a model. Values that no field covers are detected only by reading it.

    With `nearest`, a field that cannot express its values has a value near them, or is omitted.

    Raises:
        SpecError: no value of a field expresses a value of the spec.
    """
    fields: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    errors = []
    for part, rules in {**family.families, "": family}.items():
        writing = FieldWriting(spec, rules, family)
        for name in rules.fields:
            try:
                writing.write(name)
            except Invalid as error:
                path = f"{part}.{name}".lstrip(".")
                if not nearest:
                    errors.append(Diagnostic(str(error), None, f"config.json: {path}", tuple(error.notes), error.help))
                else:
                    writing.write_first(name)
            if nearest:
                writing.fit_default(name)
        nested = _nested_fields(writing.fields)
        fields |= {part: {"model_type": rules.model_type, **nested}} if part else nested
    if errors:
        raise SpecError(*errors)
    return fields


class FieldWriting:
    """Implementation of `Writing`: a spec, and the `fields` of its config.json so far."""

    def __init__(self, spec: Spec, family: FamilyConfig, outer: FamilyConfig | None = None) -> None:
        self.fields: dict[str, Any] = {}
        self._spec = spec
        self._family = family
        self._families = (family, *(() if outer in (None, family) else (outer,)))
        self._started: set[str] = set()

    def write(self, name: str) -> None:
        """Write a field unless other fields disable it, or it has been written because another field needed it."""
        if name in self._started:
            return
        self._started.add(name)
        when = self._family.when.get(name, {})
        for other in when:
            self.write(other)
        rule = self._family.fields[name]
        means = all(self.fields.get(other) == expected for other, expected in when.items())
        (rule.write if means else rule.write_unread)(name, self)

    def write_first(self, name: str) -> None:
        """Write a field from the first of its values that the spec has, or omit it."""
        expressions = self._family.fields[name].expressions
        for expression, value in zip(expressions, self.values(expressions).values(), strict=True):
            if value is not ABSENT and value is not None:
                with suppress(Invalid):
                    return self.put(name, self.evaluate(expression, value))
        return None

    def fit_default(self, name: str) -> None:
        """Give a field whose default is an integer a value of that type: one side of an image, or the next integer."""
        value = self.fields.get(name)
        if type(self.default(name)) is int and isinstance(value, list) and value:
            value = value[0]
        if type(self.default(name)) is int and isinstance(value, float) and not value.is_integer():
            value = max(1, round(value))
        if value is not None:
            self.fields[name] = value

    def default(self, name: str) -> Any:
        return self._family.defaults.get(name)

    def omits(self, name: str) -> bool:
        rule = self._family.fields[name]
        return rule.null is not None or self._family.defaults.get(name, ABSENT) is None

    def knows(self, name: str) -> bool:
        return name in self._family.fields

    def value(self, path: str) -> Any:
        direct = value_at(self._spec.model, path)
        shared, _, rest = path.partition(".")
        if direct is not ABSENT or shared in ModelSpec.model_fields:
            return direct
        for here, source in self._spec.provenance.inherited.items():
            if source == (shared,) and (value := value_at(self._spec.model, ".".join(here[1:]))) is not ABSENT:
                return value_at(value, rest) if rest else value
        covered = {
            Expression.parse(text, family.fields).path
            for family in self._families
            for rule in family.fields.values()
            for text in rule.expressions
        }
        return _shared_value(self._spec.model.graph, path, "", covered)

    def values(self, expressions: Sequence[str]) -> dict[str, Any]:
        paths = [Expression.parse(text, self._family.fields).path for text in expressions]
        return {path: self.value(path) for path in paths}

    def evaluate(self, expression: str, value: Any) -> Any:
        solved = Expression.parse(expression, self._family.fields)
        return value if value is None or solved.is_path else _shortened_number(solved.forward(value, self._number))

    def compute(self, text: str) -> Number:
        return evaluate(text, self._number)

    def _number(self, name: str) -> Number:
        if name in self._family.fields:
            self.write(name)
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Invalid("", f"{quoted(name)} must be a number that does not depend on this field")
        return value

    def says(self, path: str, expected: Any) -> bool:
        value = self.value(path)
        if isinstance(expected, str) and isinstance(value, float):
            with suppress(Invalid):  # arithmetic over fields
                expected = self.compute(expected)
        return self._family.removes(path) or is_expected_value(value, expected)

    def layers(self, stack: str) -> list[str]:
        block = self.value(stack)
        structure = block.stack() if isinstance(block, BlockConfig) else None
        if structure is None:
            raise Invalid("", f"{quoted(stack)} is not a stack of layers")
        return [layer.name for layer in structure.layers]

    def listed(self, stack: str) -> bool:
        return self._family.listing(stack) is not None

    def put(self, name: str, value: Any) -> None:
        self.fields[name] = list(value) if isinstance(value, tuple) else value


def _shortened_number(value: Number) -> Number:
    """Remove the rounding error of arithmetic from a number."""
    value = round(value) if abs(value - round(value)) <= 1e-9 * abs(value) else value
    short = float(f"{value:.12g}")
    return short if isinstance(value, float) and abs(value - short) <= 1e-14 * abs(value) else value


def value_at(config: Any, path: str) -> Any:
    """Return the value of a resolved spec at a path from its top or its graph; ABSENT if the path does not exist."""
    value: Any = config
    keys = path.split(".")
    if isinstance(config, ModelSpec) and keys[0] in config.graph:
        value = config.graph
    for key in keys:
        value = value.get(key, ABSENT) if isinstance(value, MappingABC) else getattr(value, key, ABSENT)
        if value is ABSENT:
            return ABSENT
    return value


def _shared_value(config: Any, path: str, location: str, covered: Set[str]) -> Any:
    """Return an inherited value from the first component that has it at a path outside of `covered`."""
    key, _, rest = path.partition(".")
    if isinstance(config, MappingABC):
        values = (
            _shared_value(value, path, f"{location}.{name}".lstrip("."), covered) for name, value in config.items()
        )
        return next((value for value in values if value is not ABSENT), ABSENT)
    if not isinstance(config, Config):
        return ABSENT
    fields = type(config).model_fields
    if key in fields and marker(fields[key], SharedMarker) is not None and f"{location}.{path}" not in covered:
        return value_at(getattr(config, key), rest) if rest else getattr(config, key)
    return _shared_value({name: getattr(config, name) for name in fields}, path, location, covered)


def is_expected_value(value: Any, expected: Any) -> bool:
    """Return True if a resolved value equals an unresolved value of a spec."""
    if isinstance(expected, MappingABC):
        return value is not None and all(
            is_expected_value(_entry_value(value, key), entry) for key, entry in expected.items()
        )
    if isinstance(value, Component) and isinstance(expected, str):
        return value.kind_name() == expected
    if isinstance(value, Config):
        return value.word_key is not None and is_expected_value(getattr(value, value.word_key, ABSENT), expected)
    return case_of(value) == case_of(expected)


def _entry_value(value: Any, key: str) -> Any:
    """Return an entry of a mapping, whose keys may have dots, or a field of a config."""
    return value.get(key, ABSENT) if isinstance(value, MappingABC) else value_at(value, key)


def _nested_fields(fields: MappingABC[str, Any]) -> dict[str, Any]:
    """Convert fields with dots in their names to nested mappings."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *around, last = name.split(".")
        location = nested
        for key in around:
            location = location.setdefault(key, {})
        location[last] = value
    return nested
