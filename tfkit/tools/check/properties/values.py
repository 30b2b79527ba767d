"""Properties of the values of a spec: each is read, and has an effect."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.builder import allocate, assemble
from tfkit.component import AttentionConfig, Component, Config, PositionConfig
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.initialize import initialize
from tfkit.placement import forked_generator
from tfkit.spec.document import parts
from tfkit.spec.messages import kind_of
from tfkit.tools.check.changes import Place, put
from tfkit.tools.check.inputs import call, example_inputs
from tfkit.tools.check.measure import DoesNotApplyError, Measured, property_of
from tfkit.tools.check.subject import Subject

WHOLE = frozenset(("__dict__", "__iter__", "model_dump", "model_copy", "__pydantic_fields_set__"))
"""Functions that read all fields of a config at once."""
SHAPES = frozenset("kind block type d_model n_layers vocab_size max_len pad_id parameters length rows".split())  # noqa: SIM905
"""Fields whose effect other properties show, or that only name a thing."""
NARROW = {"theta": 2, "factor": 2, "scaled": 1}
"""Fields of positions, and the channels up to which they may have no effect: two have the frequency 1, a short wave."""


@property_of("fields", "reads every field of its component")
def fields_read(subject: Subject) -> Iterator[Measured]:
    """Fields that the component's class declares itself; one that its file names may be read elsewhere, and passes."""
    if subject.component is None:
        raise DoesNotApplyError("the model was not made for one component")
    yield from idle_fields(subject.graph, subject.component)


def idle_fields(graph: Graph, config: type[Component]) -> Iterator[Measured]:
    """Find fields of a component that are not read when its model is built or runs."""
    declared = inspect.get_annotations(config).keys() & config.model_fields.keys() - {str(config.word_key)}
    with _reading(config) as read:
        model = assemble(graph)
        initialize(model, graph)
        call(model.train(), example_inputs(graph))
    source = inspect.getsource(sys.modules[config.__module__])
    idle = [name for name in config.model_fields if name in declared - read and not re.search(rf"\.{name}\b", source)]
    if idle:
        names = " and ".join(f"`{name}`" for name in idle)
        where = f"{kind_of(config)} `{config.kind_name()}`"
        yield Measured.fault(f"{where} never reads its field{'s' * (len(idle) > 1)} {names}")


@contextmanager
def _reading(config: type[Component]) -> Iterator[set[str]]:
    """Collect the names of the fields of a class that are read within a block."""
    read: set[str] = set()

    def get(self: Component, name: str) -> Any:
        read.update(config.model_fields if name in WHOLE else (name,))
        return object.__getattribute__(self, name)

    config.__getattribute__ = get  # type: ignore[method-assign,assignment]
    try:
        yield read
    finally:
        del config.__getattribute__


# ---- every value has an effect ----


@property_of("values", "changes with every value of its spec", follows=("fields",))
def values(subject: Subject) -> Iterator[Measured]:
    """Another value changes parameters, their first values, or the outputs in eval or in train mode."""
    reference = _Seen(subject, subject.graph)
    for path, value in _numbers(subject):
        place, idle = ".".join(path[1:] if path[0] == "graph" else path), list[str]()
        for other in _allowed(subject, path, value):
            if not reference.equals(_Seen(subject, other)):
                idle.clear()
                break
            idle.append(place)
        if idle:
            yield Measured.fault(f"`{place}` has no effect: other values than {value} give the same model", place)
    yield Measured(0.0, "")


def _allowed(subject: Subject, path: Place, value: float) -> Iterator[Graph]:
    """Yield the graphs with a different value at a path, as far as the spec allows them."""
    for other in _others(value):
        with suppress(SpecError, ValueError):
            yield subject.changed(put({path: other}))


def _numbers(subject: Subject) -> Iterator[tuple[Place, Any]]:
    """Yield the values that are numbers or true or false, that another value could replace."""
    configs = {path: config for path, config in parts((), subject.graph.spec.model) if isinstance(config, Config)}
    for path, value in subject.values.items():
        named = path[-1] in SHAPES or path[0] not in ("graph", "init") or (path[-1] == "dropout" and not value)
        stretched = "scaling" in path[:-1] and path[-1] != "factor"  # most depend on lengths that small models lack
        cut_off = path[-1] == "max_distance" and (*path[:-2], "mask", "left") in subject.values  # no distance is far
        narrow = path[-1] in NARROW and _channels(configs, path) <= NARROW[path[-1]]
        if isinstance(value, int | float) and not (named or stretched or cut_off or narrow):
            yield path, value


def _channels(configs: Mapping[Place, Config], path: Place) -> float:
    """Return the channels of a head or an embedding that a position acts on; infinite for other configs."""
    place = path[:-2] if path[-2] == "scaling" else path[:-1]
    position, around = configs[place], configs.get(place[:-1])
    if not isinstance(position, PositionConfig) or around is None:
        return math.inf
    width = around.head_width if isinstance(around, AttentionConfig) else dict(around).get("d_model")
    inside = [dict(item).get("width") for _, item in parts((), position) if isinstance(item, Config)]
    return min(item for item in (width, dict(around).get("d_embed"), *inside, math.inf) if item is not None)


def _others(value: float) -> tuple[float, ...]:
    """Return different values, the nearest first: a bound shows only where it is reached."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return tuple({value + 1, value - 1, value * 2, value // 4, value * 16} - {value})
    return (value * 0.5, value * 1e-2 + 1e-9, value * 100 + 1e-2, value * 1e4 + 100)


class _Seen:
    """All that shows of a model: shapes and first values of its parameters, then its outputs in eval and train mode."""

    def __init__(self, subject: Subject, graph: Graph) -> None:
        self.subject, self.graph = subject, graph
        with torch.device("meta"):
            self.new = assemble(graph)
        self.shapes = {name: parameter.shape for name, parameter in self.new.named_parameters()}
        self.found: dict[bool, list[Tensor]] = {}

    @cached_property
    def first(self) -> list[Tensor]:
        """The first values of the parameters."""
        allocate(self.new, "cpu")
        initialize(self.new, self.graph, self.subject.seed)
        return [parameter.detach().clone() for parameter in self.new.parameters()]

    @cached_property
    def model(self) -> fx.GraphModule:
        """The model with the weights of the subject."""
        return self.subject.fill(self.new)

    def outputs(self, *, train: bool) -> list[Tensor]:
        """Return the outputs for a long sequence; in train mode with equal random numbers."""
        if train not in self.found:
            with forked_generator(), torch.no_grad():
                torch.manual_seed(self.subject.seed)
                inputs = self.subject.inputs(length=self.subject.longest)
                self.found[train] = call(self.model.train(train), inputs)
        return self.found[train]

    def equals(self, other: _Seen) -> bool:
        """Return True if nothing differs."""
        if self.shapes != other.shapes or not _equal_bits(self.first, other.first):
            return False
        return all(_equal_bits(self.outputs(train=mode), other.outputs(train=mode)) for mode in (False, True))


def _equal_bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
