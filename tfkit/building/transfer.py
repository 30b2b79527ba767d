"""A map of weights to weights, for a model that differs from the model of a checkpoint.

A map has the form of a family's `tensors`, with the names of two models instead of the names of a model and of a file.
Its keys are weights of the new model, or modules around them; its values are weights of the old model:

    decoder.layers.{i}: decoder.layers.{i // 2}                                   each layer twice
    decoder.layers.{i}.ffn.experts: {decoder.layers.{i}.ffn: "o i -> e o i"}      each expert a copy
    decoder.layers.4.ffn.down: 0                                                  zeros

Numbers in the braces of a value are computed from the numbers of the key. Weights without an entry have the same name
in the old model. If several entries match, the most specific entry counts: it has the most segments, then the fewest
braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.building.builder import build, graph_of
from tfkit.checkpoint.files import BROKEN, is_finite
from tfkit.checkpoint.fitting import reject_changes
from tfkit.checkpoint.links import pattern_of
from tfkit.checkpoint.pattern import UNCHANGED, PatternError
from tfkit.checkpoint.selection import (
    CHANGE,
    Selection,
    check_matches,
    matches_any,
    mismatch_error,
    no_match,
    not_allowed,
    weights_description,
    without_layers,
)
from tfkit.checkpoint.tensor_names import collapsed_layers, hole_names
from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.graph.semantics import ValueChange, semantics_of, value_changes
from tfkit.nn.spread import full_tensor, outlines
from tfkit.spec.arithmetic import ExpressionError, evaluate
from tfkit.spec.extending import short_path
from tfkit.spec.families import expanded_names
from tfkit.spec.folder import model_folder

SIZES = ("n_layers", "vocab_size")
"""Semantic values that a map may change, because it maps the weights of each layer and each token."""
ZEROS = 0
"""The value of an entry for weights that are zero."""
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Transfer(Selection):
    """The weights that a model takes from a checkpoint or, by a map, from the model of a checkpoint."""

    map: Mapping[str, Any] | None = None
    """The map: weights of the model, each with the weight of the checkpoint's model that fills it."""
    tokens: Sequence[str] = ()
    """Patterns of weights with a row for each token, of which only `rows` are copied."""
    rows: Sequence[tuple[int, int]] = ()
    """Pairs of rows for the same token: in the model, and in the checkpoint's model."""

    def fill(self, model: fx.GraphModule, path: Path) -> str:
        return _fill_by_map(model, model_folder(path), self) if self.map or self.tokens else super().fill(model, path)

    def check(self, model: fx.GraphModule, path: Path) -> None:
        if not self.map and not self.tokens:  # they need the values of the old model
            super().check(model, path)


@dataclass(frozen=True)
class TransferRule:
    """An entry of a map, for one combination of the words in its brackets."""

    key: str
    """The key of the entry, with its brackets."""
    target: str
    source: str
    pattern: str | None

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """A regular expression for the names that the rule maps. Raises `Invalid` for a malformed name."""
        names = hole_names(self.target)
        text = re.escape(self.target)
        for name in names:
            text = text.replace(rf"\{{{name}\}}", rf"(?P<{name}>\d+)", 1)
        if "{" in text or len(set(names)) < len(names) or not all(map(str.isidentifier, names)):
            help = "write arithmetic in the value: `decoder.layers.{i}: decoder.layers.{i // 2}`"
            raise Invalid("map", f"braces of a key must hold a name, each once; got {quoted(self.key)}", help=help)
        return re.compile(rf"{text}(?P<_rest>\..+)?")

    @property
    def is_zero(self) -> bool:
        """True if the rule sets weights to zero."""
        return self.source == str(ZEROS)

    @property
    def keeps_values(self) -> bool:
        """True if a part of each weight keeps its initial values."""
        return self.pattern is not None and UNCHANGED in self.pattern

    @property
    def rank(self) -> tuple[int, int]:
        """The priority of the rule: of several rules that match a name, the largest rank applies."""
        return self.target.count("."), -len(hole_names(self.target))

    def source_of(self, name: str) -> str | None:
        """Return the weight of the old model that fills a weight; None if the rule does not map it."""
        match = self.regex.fullmatch(name)
        if match is None or self.is_zero:
            return None if match is None else self.source
        numbers = match.groupdict()
        rest = numbers.pop("_rest") or ""

        def number(braces: re.Match[str]) -> str:
            value = evaluate(braces[1], lambda word: self._number(word, numbers))
            if value != int(value) or value < 0:
                raise ExpressionError(f"{braces[0]} must be an integer of 0 or more; got {value:g} for {quoted(name)}")
            return str(int(value))

        try:
            return _BRACES.sub(number, self.source) + rest
        except ExpressionError as error:
            raise Invalid("map", f"{quoted(self.source)}: {error.message}", help=error.help) from error

    def _number(self, word: str, numbers: Mapping[str, str]) -> int:
        if word not in numbers:
            raise ExpressionError(f"`{word}` must be a name in the braces of {quoted(self.key)}")
        return int(numbers[word])


def rules_of(entries: Mapping[str, Any]) -> list[TransferRule]:
    """Return the rules of a map. Raise `Invalid` for a malformed entry."""
    rules = []
    for key, value in entries.items():
        text, pattern = next(iter(value.items()), (None, None)) if isinstance(value, Mapping) else (value, None)
        text = str(ZEROS) if type(text) is int and text == ZEROS and pattern is None else text
        if not isinstance(text, str) or (
            isinstance(value, Mapping) and (len(value) > 1 or not isinstance(pattern, str))
        ):
            help = 'write `NEW: OLD`, `NEW: 0`, or `NEW: {OLD: "f i -> e f i"}`'
            raise Invalid("map", f"{quoted(key)} must be mapped to a weight, or to a weight and a pattern", help=help)
        targets, sources = expanded_names(key), expanded_names(text)
        if len(sources) not in (1, len(targets)):
            message = f"the brackets of {quoted(text)} must have {len(targets)} words, as in {quoted(key)}"
            raise Invalid("map", f"{message}; got {len(sources)}")
        sources = sources if len(sources) == len(targets) else sources * len(targets)
        rules += [TransferRule(key, target, source, pattern) for target, source in zip(targets, sources, strict=True)]
    return rules


def _fill_by_map(model: fx.GraphModule, folder: Path, transfer: Transfer) -> str:
    """Fill a model by a map, from the model of a folder."""
    if not folder.is_dir():
        help = "name the folder of a run or of a model, which has a spec"
        raise Invalid("path", f"weights can be mapped only from a folder; got {quoted(folder.name)}", help=help)
    return fill_from_model(model, build(folder, device="cpu"), folder, transfer)


def fill_from_model(model: fx.GraphModule, old: fx.GraphModule, folder: Path, transfer: Transfer) -> str:
    """Fill a model by a map, from the model of a checkpoint in `folder`, and return a description.

    All errors are raised before the model changes. In addition to the two models, one weight is in memory.
    """
    rules = rules_of(transfer.map or {})
    reject_changes(not_allowed(semantic_changes(old, model), transfer), folder, help=CHANGE)
    state, new_state = old.state_dict(), model.state_dict()
    weights = {name: location.view(state) for name, location in tensor_locations_of(old).items()}
    locations, outline = tensor_locations_of(model), outlines(new_state)
    views = {name: location.view(outline) for name, location in locations.items()}
    missing = [name for name in views if matches_any(name, transfer.missing)]
    sources = {name: source_and_rule(name, rules) for name in views if name not in missing}
    _check_effect(rules, sources)
    read = {source for source, _ in sources.values()}
    unread = [name for name in weights if name not in read]
    unused = [name for name in unread if matches_any(name, transfer.unused)]
    check_matches("missing", transfer.missing, views, weights, "no weight of the model matches")
    check_matches("tokens", transfer.tokens, sources, (), "no weight that is read matches")
    check_matches("unused", transfer.unused, unread, views, "no weight that the map leaves out matches")
    lost = {
        name: _origin(rule)
        for name, (source, rule) in sources.items()
        if source not in weights and not (rule is not None and rule.is_zero)
    }
    misfits: dict[str, str] = {}

    def mapped(name: str) -> Tensor:
        source, rule = sources[name]
        view = views[name]
        if rule is not None and rule.is_zero:
            return torch.zeros(view.shape, dtype=view.dtype)
        if matches_any(name, transfer.tokens) or (rule is not None and rule.keeps_values):
            parameter = locations[name].parameter
            view = locations[name].view({parameter: full_tensor(new_state[parameter])})
        return _mapped_tensor(name, weights[source], view, rule, transfer, model)

    for name in sources:  # in an order that all processes share, because `full_tensor` is a collective operation
        if name not in lost and (tensor := mapped(name)).shape != views[name].shape:
            misfits[name] = f": {list(tensor.shape)}{_origin(sources[name][1])}, {list(views[name].shape)} in the model"
    surplus = {name: f" {list(weights[name].shape)}" for name in unread if name not in unused}
    titles = "weights that the old model lacks", "other shapes", "weights of the old model that the model does not use"
    if lost or misfits or surplus:
        problems = zip(titles, (lost, misfits, surplus), strict=True)
        raise mismatch_error(
            folder,
            {title: [name + text for name, text in collapsed_layers(names)] for title, names in problems if names},
        )
    with torch.no_grad():
        for name in sources:
            locations[name].fill(new_state, mapped(name))
    count = f"{len(sources):,} of {len(views):,} weights from {short_path(folder)}"
    rows = f"; {len(transfer.rows):,} tokens are in both vocabularies" if transfer.tokens else ""
    return weights_description(count + rows, missing=missing, unused=unused)


def _origin(rule: TransferRule | None) -> str:
    """Name the source of a rule as in its entry, without numbers of layers, so that equal layers are listed once."""
    return "" if rule is None else f" from {quoted(rule.source)}"


def _mapped_tensor(
    name: str, tensor: Tensor, view: Tensor, rule: TransferRule | None, transfer: Transfer, model: fx.GraphModule
) -> Tensor:
    """Return the new values of a weight from a weight of the old model."""
    by_rows = matches_any(name, transfer.tokens)
    if rule is not None and rule.pattern is not None:
        if by_rows:
            raise Invalid("tokens", f"{quoted(name)} cannot have a pattern, because `tokens` selects its rows")
        try:
            pattern, sizes = pattern_of(rule.pattern, view.dim(), name, model.meta["components"], resizing=True)
            unchanged = [view] if rule.keeps_values else ()
            tensor = pattern.apply([tensor.to(view.dtype)], sizes, [tuple(view.shape)], unchanged)[0]
        except PatternError as error:
            message = f"{quoted(rule.pattern)} does not fit {quoted(name)} {list(view.shape)}: {error.message}"
            raise Invalid("map", message, notes=error.notes, help=error.help) from error
    elif by_rows and view.shape[1:] == tensor.shape[1:]:
        # Tables may have fewer or more rows than a tokenizer has tokens.
        rows = [row for row in transfer.rows if row[0] < len(view) and row[1] < len(tensor)]
        values = tensor[[old for _, old in rows]].to(view)
        tensor = view.index_copy(0, torch.tensor([new for new, _ in rows], device=view.device), values)
    if not is_finite(tensor, view.dtype):
        raise SpecError(Diagnostic(f"{quoted(name)} would have {BROKEN}"))
    return tensor


def source_and_rule(name: str, rules: Sequence[TransferRule]) -> tuple[str, TransferRule | None]:
    """Return the weight of the old model for a weight, and the rule that maps it; None without a rule."""
    matches = [(rule, source) for rule in rules if (source := rule.source_of(name)) is not None]
    if not matches:
        return name, None
    highest = max(rule.rank for rule, _ in matches)
    (rule, source), *rivals = [(rule, source) for rule, source in matches if rule.rank == highest]
    if rivals:
        message = f"{quoted(name)} must match one entry; got {quoted(rule.key)} and {quoted(rivals[0][0].key)}"
        raise Invalid("map", message)
    return source, rule


def _check_effect(rules: Sequence[TransferRule], sources: Mapping[str, tuple[str, TransferRule | None]]) -> None:
    """Raise `Invalid` for an entry whose removal would not change any weight."""
    for rule in rules:
        remaining = [other for other in rules if other is not rule]
        mapped = [name for name, (_, winner) in sources.items() if winner is rule]
        if all(_mapping_effect(source_and_rule(name, remaining)) == _mapping_effect(sources[name]) for name in mapped):
            names = list(sources)
            reason = "fills weights that it would fill anyway" if mapped else "matches no weight that is read"
            error = no_match("map", f"{quoted(rule.target)} {reason}", rule.target, names)
            error.help = "remove the entry: weights without an entry keep their name" if mapped else error.help
            raise error


def _mapping_effect(mapping: tuple[str, TransferRule | None]) -> tuple[str, str | None]:
    source, rule = mapping
    return source, None if rule is None else rule.pattern


def changed_paths(old: fx.GraphModule, model: fx.GraphModule) -> list[str]:
    """Return the paths of the semantic values in which two models differ, as `allow_change` lists them."""
    return sorted({without_layers(change.path) for change in semantic_changes(old, model)})


def semantic_changes(old: fx.GraphModule, model: fx.GraphModule) -> list[ValueChange]:
    """Return the semantic values in which two models differ, except parts that only one model has."""
    differences = value_changes(semantics_of(graph_of(old)), semantics_of(graph_of(model)))
    return [
        change
        for change in differences
        if "nothing" not in (change.there, change.here) and change.path.rpartition(".")[2] not in SIZES
    ]
