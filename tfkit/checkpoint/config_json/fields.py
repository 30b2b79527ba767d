"""From a config.json to a spec: each field changes the values that the family's `checkpoint.config` assigns to it."""

from __future__ import annotations

from typing import Any

from tfkit.checkpoint.config_json import layer_types, per_layer, rope
from tfkit.checkpoint.config_json.reading import Reading, case_of
from tfkit.errors import Invalid, SpecError, closest, listing, quoted
from tfkit.spec.checkpoint import CheckpointConfig, FieldConfig
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
"""Fields of every family that do not affect what the model computes."""
USUAL = {"position_embedding_type": "absolute", "is_decoder": False, "tie_encoder_decoder": False, "pruned_heads": {}}
"""Fields of many families that have no effect as long as they have these values."""


def read_fields(config: Mapping, family: Mapping, section: CheckpointConfig) -> Mapping:
    """The tree of a family's spec, changed to the model that a config.json describes.

    Raises:
        SpecError: with every error in it: fields that the family does not know, lacks, or cannot represent.
    """
    reading = Reading(config, family, section)
    for name, rule in section.fields.items():
        try:
            _apply(reading, name, rule)
        except Invalid as wrong:
            reading.error(str(wrong), reading.values.get(name), name, *wrong.notes, help=wrong.help)
    for name, value in (section.only or {}).items():
        _require(reading, name, value)
    _check_all_known(reading)
    if reading.errors:
        raise SpecError(*reading.errors)
    return reading.tree


def _apply(reading: Reading, name: str, rule: FieldConfig) -> None:
    """Change the spec by one field; raises `Invalid`."""
    if any(plain(reading.node(other)) != wanted for other, wanted in (rule.when or {}).items()):
        reading.read.add(name)
    elif rule.rope is not None:
        rope.read(reading, name, rule)
    elif rule.cases is not None and (rule.set is None or case_of(plain(reading.node(name))) in rule.cases):
        _case(reading, name, rule.cases)
    elif rule.layers or rule.first or rule.every:
        layer_types.read(reading, name, rule)
    elif rule.each is not None:
        per_layer.read(reading, name, rule)
    else:
        _set(reading, name, rule)


def _require(reading: Reading, name: str, wanted: Any) -> None:
    """Note an error if a field differs from the only value that the family supports."""
    reading.read.add(name)
    wanted = list(wanted) if isinstance(wanted, tuple) else wanted
    if name in reading.values and plain(reading.values[name]) not in (wanted, None):
        must = f"{quoted(name)} must be {quoted(case_of(wanted))}"
        reading.error(f"{must}: {reading.section.model_type} supports no other value", reading.values[name], name)


def _set(reading: Reading, name: str, rule: FieldConfig) -> None:
    value = reading.node(name)
    if isinstance(value, Scalar) and value.value is None and rule.if_null is not None:
        value = Scalar(reading.computed(rule.if_null), value.span)
    elif rule.read is not None and not (isinstance(value, Scalar) and value.value is None):
        value = Scalar(reading.computed(rule.read, value), value.span)
    elif rule.null_if is not None and plain(value) == reading.computed(rule.null_if):
        value = Scalar(None, value.span)
    changes: dict[str, Node] = {}
    if plain(value) is not None:  # these first: they may create the config that the value belongs to
        changes = {path: node_of(one, value.span) for path, one in (rule.also or {}).items()}
    changes |= dict.fromkeys(rule.paths, value)
    for path, node in changes.items():
        if not reading.is_null_before(path):
            reading.put(path, node)


def _case(reading: Reading, name: str, cases: dict[str, dict[str, Any]]) -> None:
    value = reading.node(name)
    word = case_of(plain(value))
    if word not in cases:
        message = f"{quoted(name)} is {quoted(word)}, which {reading.section.model_type} does not support here"
        raise Invalid("", message, notes=[f"it can be {listing(cases)}"])
    for path, changed in cases[word].items():
        reading.put(path, node_of(changed, value.span))


def _check_all_known(reading: Reading) -> None:
    """Note an error for every unknown field of the family that may affect the model."""
    family = reading.section
    silent = SILENT | set(family.unused or ())
    for name, node in reading.values.items():
        empty = node.value is None if isinstance(node, Scalar) else not node.items
        around, _, leaf = name.rpartition(".")
        if not reading.read.isdisjoint((name, around)) or name in silent or leaf in SILENT or empty:
            continue
        if leaf in USUAL and plain(node) == USUAL[leaf]:
            continue
        near = closest(name, reading.rules)
        help = f"the family knows {quoted(near)}" if near else "if it has no effect, list it under `unused`"
        reading.error(f"{family.model_type} does not know the field {quoted(name)}", node, name, help=help)
