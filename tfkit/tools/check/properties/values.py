"""Properties of the values of a spec: each is read and has an effect, and neutral values have no effect."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.building.builder import allocate_tensors, assemble_model
from tfkit.building.initialize import initialize
from tfkit.building.placement import forked_generator
from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.component import AttentionConfig, Component, Config, FieldPath, PositionConfig, RopeScalingConfig, parts
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.spec.messages import kind_of
from tfkit.tools.check.measure import Deviation, DoesNotApplyError, output_deviations, property_of, require
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.runs import call, example_inputs

CONFIG_READERS = frozenset(("__dict__", "__iter__", "model_dump", "model_copy", "__pydantic_fields_set__"))
"""Functions that read all fields of a config together."""
SHAPES = frozenset("kind block type d_model n_layers vocab_size max_len pad_id parameters length rows".split())  # noqa: SIM905
"""Fields whose effect other properties show, or that only name a thing."""
NARROW_FIELDS = {"theta": 2, "factor": 2, "scaled": 1}
"""Fields of positions that may have no effect on so few channels: a single pair of channels has the frequency 1."""


@property_of("fields", "reads every field of its component")
def fields_read(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Each field that the class of a component declares is read, at least somewhere in the file of the class."""
    config = subject.component
    if config is None:
        raise DoesNotApplyError("the model was not made for one component")
    declared = inspect.get_annotations(config).keys() & config.model_fields.keys() - {str(config.word_key)}
    with _record_reads(config) as read:
        model = assemble_model(subject.graph)
        initialize(model, subject.graph)
        call(model.train(), example_inputs(subject.graph))
    source = inspect.getsource(sys.modules[config.__module__])
    idle = [name for name in config.model_fields if name in declared - read and not re.search(rf"\.{name}\b", source)]
    if idle:
        names = " and ".join(f"`{name}`" for name in idle)
        where = f"{kind_of(config)} `{config.kind_name()}`"
        yield Deviation.fault(f"{where} never reads its field{'s' * (len(idle) > 1)} {names}")


@contextmanager
def _record_reads(config: type[Component]) -> Iterator[set[str]]:
    """Collect the names of the fields of a class that are read within a block."""
    read: set[str] = set()

    def get(self: Component, name: str) -> Any:
        read.update(config.model_fields if name in CONFIG_READERS else (name,))
        return object.__getattribute__(self, name)

    config.__getattribute__ = get  # type: ignore[method-assign,assignment]
    try:
        yield read
    finally:
        del config.__getattribute__


# ---- every value has an effect ----


@property_of("values", "changes with every value of its spec", follows=("fields",), of_spec=True)
def value_effects(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A different value changes the parameters, their initial values, or the outputs in eval or train mode."""
    reference = _Observed(subject, subject.graph)
    for path, value in _replaceable_numbers(subject):
        field, idle = ".".join(path[1:] if path[0] == "graph" else path), list[str]()
        for other in _allowed_graphs(subject, path, value):
            if not reference.equals(_Observed(subject, other)):
                idle.clear()
                break
            idle.append(field)
        if idle:
            yield Deviation.fault(f"`{field}` has no effect: other values than {value} give the same model", field)
    yield Deviation(0.0, "")


def _allowed_graphs(subject: ModelUnderTest, path: FieldPath, value: float) -> Iterator[Graph]:
    """Yield graphs with a different value at a path; values that the spec rejects are skipped.

    If it rejects all of them, because the layers of a stack must agree, the value changes in all layer variants.
    """
    variants = [other for other in subject.values if _without_variant(other) == _without_variant(path)]
    for paths in ([path], variants):
        accepted = False
        for other in other_numbers(value):
            with suppress(SpecError, ValueError):
                graph = subject.changed(dict.fromkeys(paths, other))
                accepted = True
                yield graph
        if accepted or path != variants[0]:
            return


def _without_variant(path: FieldPath) -> FieldPath:
    """Return the path of the field in the stack for the path of a field in a layer variant."""
    return (*path[:2], *path[5:]) if path[2:4] == ("layers", "variants") else path


def _replaceable_numbers(subject: ModelUnderTest) -> Iterator[tuple[FieldPath, Any]]:
    """Yield the numbers and booleans that a different value can replace."""
    configs = {path: config for path, config in parts((), subject.graph.spec.model) if isinstance(config, Config)}
    for path, value in subject.values.items():
        named = path[-1] in SHAPES or path[0] not in ("graph", "init") or (path[-1] == "dropout" and not value)
        stretched = "scaling" in path[:-1] and path[-1] != "factor"  # most depend on lengths that small models lack
        # The mask hides the distances that `max_distance` would limit.
        cut_off = path[-1] == "max_distance" and (*path[:-2], "mask", "left") in subject.values
        narrow = path[-1] in NARROW_FIELDS and _position_channels(configs, path) <= NARROW_FIELDS[path[-1]]
        if isinstance(value, int | float) and not (named or stretched or cut_off or narrow):
            yield path, value


def _position_channels(configs: Mapping[FieldPath, Config], path: FieldPath) -> float:
    """Return the channels of a head or an embedding that a position acts on; infinite for other configs."""
    location = path[:-2] if path[-2] == "scaling" else path[:-1]
    position, parent = configs[location], configs.get(location[:-1])
    if not isinstance(position, PositionConfig) or parent is None:
        return math.inf
    width = parent.head_width if isinstance(parent, AttentionConfig) else dict(parent).get("d_model")
    inside = [dict(item).get("width") for _, item in parts((), position) if isinstance(item, Config)]
    return min(item for item in (width, dict(parent).get("d_embed"), *inside, math.inf) if item is not None)


def other_numbers(value: float) -> tuple[float, ...]:
    """Return different values, the nearest first: a bound shows only where it is reached."""
    if isinstance(value, bool):
        return (not value,)
    near: tuple[float, ...] = (value * 0.5, value * 1e-2 + 1e-9, value * 100 + 1e-2, value * 1e4 + 100)
    if isinstance(value, int):
        near = (value + 1, value - 1, value + 3, value * 2, value // 4, value * 16)
    return tuple(other for other in dict.fromkeys(near) if other != value)


class _Observed:
    """The observable state of a model: shapes and initial values of its parameters, and outputs in both modes."""

    def __init__(self, subject: ModelUnderTest, graph: Graph) -> None:
        self.subject, self.graph = subject, graph
        with torch.device("meta"):
            self.new = assemble_model(graph)
        self.shapes = {name: parameter.shape for name, parameter in self.new.named_parameters()}
        self.by_mode: dict[bool, list[Tensor]] = {}

    @cached_property
    def first(self) -> list[Tensor]:
        """The initial values of the parameters."""
        allocate_tensors(self.new, "cpu")
        initialize(self.new, self.graph, self.subject.seed)
        return [parameter.detach().clone() for parameter in self.new.parameters()]

    @cached_property
    def model(self) -> fx.GraphModule:
        """The model with the weights of the subject."""
        return self.subject.fill(self.new)

    def outputs(self, *, train: bool) -> list[Tensor]:
        """Return the outputs for a long sequence. In train mode, all calls use equal random numbers."""
        if train not in self.by_mode:
            with forked_generator(), torch.no_grad():
                torch.manual_seed(self.subject.seed)
                inputs = self.subject.inputs(length=self.subject.longest)
                self.by_mode[train] = call(self.model.train(train), inputs)
        return self.by_mode[train]

    def equals(self, other: _Observed) -> bool:
        """Return True if nothing differs."""
        if self.shapes != other.shapes or not _equal_bits(self.first, other.first):
            return False
        with suppress(
            RuntimeError, ValueError
        ):  # the inputs may have more placeholders than the other model has vectors
            return self._has_outputs_of(other)
        return False

    def _has_outputs_of(self, other: _Observed) -> bool:
        return all(_equal_bits(self.outputs(train=mode), other.outputs(train=mode)) for mode in (False, True))


def _equal_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- neutral values have no effect ----


@property_of("neutral", "is not changed by neutral values")
def neutral_values(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A window over all tokens, a bound of a billion, sinks of minus a billion or a rotary factor of 1 change nothing.

    Also groups of query heads: separate key-value heads with equal weights compute the same. Values of one
    field are neutral together, and separately if the combination is rejected or has an effect.
    """
    measured = []
    for values in _neutral_by_field(subject).values():
        together = _with_and_without(subject, values)
        if not together or any(value.broken for value in together):
            together = [*(item for value in values for item in _with_and_without(subject, [value])), *together]
        measured += together
    require(measured, "the spec has no value with a neutral one")
    yield from measured


@dataclass(frozen=True)
class _Neutral:
    """A neutral value as text, the values of the spec with it and without it, and the weights of the model with it."""

    words: str
    present: dict[FieldPath, Any]
    left_out: dict[FieldPath, Any]
    weights: Callable[[fx.GraphModule, fx.GraphModule], dict[str, Tensor]]


def _with_and_without(subject: ModelUnderTest, values: Sequence[_Neutral]) -> list[Deviation]:
    """Compare the model with these neutral values and the model without them; empty if the spec rejects a model."""
    present, left_out = ChainMap(*(v.present for v in values)), ChainMap(*(v.left_out for v in values))
    try:
        first, second = (subject.build(subject.changed(changes)) for changes in (present, left_out))
    except (SpecError, ValueError):
        return []
    second.load_state_dict(values[0].weights(first, second))
    inputs, detail = subject.inputs(), f"{values[0].words} changes the outputs by {{}}"
    return [*output_deviations(first, inputs, inputs, detail, second=second)]


def _neutral_by_field(subject: ModelUnderTest) -> dict[str, list[_Neutral]]:
    """Return the neutral values, by the name of their field."""
    by_field = defaultdict[str, list[_Neutral]](list)
    for path, value in subject.values.items():
        name = ".".join(path[1:])
        if path[-1] == "softcap" and value is not None:
            candidate = _Neutral(f"`{name}: 1e9`", {path: 1e9}, {path: None}, _equal_weights)
        elif path[-2:] == ("mask", "left") and value is not None:
            candidate = _Neutral(f"`{name}: 1000`", {path: 1000}, {path: None}, _equal_weights)
        elif path[-1] == "sinks" and value:
            candidate = _Neutral(f"`{name}`, each minus a billion,", {}, {path: False}, _without_sinks)
        elif path[-1] == "n_kv_heads" and value < (heads := subject.values[*path[:-1], "n_heads"]):
            candidate = _Neutral(
                f"`{name}: {heads}`, with equal weights,", {}, {path: heads}, partial(_repeated_heads, subject)
            )
        elif path[-2:] == ("scaling", "factor") and _is_neutral(subject, path):
            candidate = _Neutral(f"`{name}: 1`", {path: 1.0}, {path[:-1]: None}, _equal_weights)
        else:
            continue
        by_field[path[-1]].append(candidate)
    return by_field


def _is_neutral(subject: ModelUnderTest, path: FieldPath) -> bool:
    """Return True if a factor of 1 is all that a rotary scaling needs to change nothing, as far as the check reads."""
    for location, part in subject.graph.configs(RopeScalingConfig):
        if tuple(location.split(".")) == path[:-1]:
            lists = any(isinstance(value, tuple) for _, value in part)
            short = dict(part).get("original_max_len", math.inf) >= subject.length
            return short and not lists and part.model_copy(update={"factor": 1.0}).attention_factor == 1
    return False


def _without_sinks(first: fx.GraphModule, second: fx.GraphModule) -> dict[str, Tensor]:
    state = first.state_dict()
    for name in state.keys() - second.state_dict().keys():
        state[name].fill_(-1e9)
    return {name: state[name] for name in second.state_dict()}


def _equal_weights(first: fx.GraphModule, second: fx.GraphModule) -> dict[str, Tensor]:
    return first.state_dict()


def _repeated_heads(subject: ModelUnderTest, first: fx.GraphModule, second: fx.GraphModule) -> dict[str, Tensor]:
    """Repeat the weights of each key-value head for every query head that shares it."""
    ours, state, wider = tensor_locations_of(first), first.state_dict(), second.state_dict()
    heads = {f"{attention.path}.": attention.config.kv_heads for attention in subject.attentions}
    for name, location in tensor_locations_of(second).items():
        view, old = location.view(wider), ours[name].view(state)
        if view.shape != old.shape:
            owner = next(path for path in heads if name.startswith(path))
            each = old.unflatten(0, (heads[owner], -1))
            old = each.repeat_interleave(view.size(0) // old.size(0), dim=0).flatten(0, 1)
        view.copy_(old)
    return wider
