"""Properties of incremental reading: the outputs of every token equal its outputs in one full forward pass."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from tfkit.arguments import name_of
from tfkit.building.builder import evaluation_mode, graph_of, inputs_of
from tfkit.component import State
from tfkit.decoding.cached import CachedModel
from tfkit.errors import SpecError
from tfkit.graph.decode_split import split_for_decoding
from tfkit.graph.expand import Node
from tfkit.graph.input_shapes import fixed_length, fixed_lengths, max_len
from tfkit.nn import StackedLinear
from tfkit.tools.check.measure import (
    TOLERANCE,
    Deviation,
    DoesNotApplyError,
    in_words,
    location_of,
    output_deviations,
    property_of,
    relative_distance,
    tensor_deviation,
)
from tfkit.tools.check.model_under_test import CHUNK, ModelUnderTest, allow_rounding, chunk_sizes
from tfkit.tools.check.properties.forms import script_fault
from tfkit.tools.check.runs import Inputs, call, cast_inputs
from tfkit.tools.common.model_inputs import as_tensors
from tfkit.tools.export.torchscript_format import script_module

InputChunk: TypeAlias = int | Tensor
"""A number of columns without a mask, or a mask [b, t], True where there is a token."""
Schedule: TypeAlias = list[InputChunk]
BFLOAT16_TOLERANCE = 0.1
"""Largest difference between steps and a full forward in bfloat16, relative to the largest value if it is above 1."""
PRESUMED_CHUNK = 64
"""Number of positions of a chunk in components that carry a state and do not declare their chunks."""
COMPILED = ("token by token", "padded on the left", "padded in between", "with a row that begins later")
"""The schedules that are also read with the compiled step, which takes single tokens."""


def reading_schedules(batch: int, length: int) -> dict[str, Schedule]:
    """Return named schedules for reading `batch` rows in `length` columns."""
    half, row = length // 2, torch.arange(batch)[:, None]
    left = torch.arange(half) >= row.clamp(max=half - 1)
    gap = torch.ones(batch, 4, dtype=torch.bool)
    gap[1, 1:3] = gap[0, 3] = gap[2] = False
    return {
        "whole": [length],
        "in uneven steps": stepwise_schedule(length, 3, 1, 2),
        "token by token": stepwise_schedule(length, 1),
        "by single tokens and several": stepwise_schedule(length, half, 1, 1, 3),
        "padded on the left": [left, *stepwise_schedule(length - half, 1, 1, 3)],
        "padded on the right": [left.flip(1), *stepwise_schedule(length - half, 1, 3, 1)],
        "padded in between": [2, gap, row > 0, *stepwise_schedule(length - 7, 2, 1)],
        "with a row that begins later": [
            (row < batch - 1).expand(batch, half),
            *stepwise_schedule(length - half, 1, 2),
        ],
    }


def stepwise_schedule(length: int, *sizes: int) -> Schedule:
    """Repeat steps of these sizes up to `length` columns."""
    schedule: Schedule = []
    for size in cycle(sizes):
        if length <= 0:
            return schedule
        schedule.append(min(size, length))
        length -= size
    return schedule


@dataclass(frozen=True)
class SequenceBatch:
    """The sequences of a batch."""

    model: fx.GraphModule
    main: str
    """The input whose tokens are counted."""
    stepwise: Mapping[str, Tensor]
    """The inputs read in steps, [b, t, ...] each, without padding."""
    once: Mapping[str, Tensor]
    """The inputs of the first step only, with padding masks."""

    @classmethod
    def of(cls, model: fx.GraphModule, inputs: Inputs) -> SequenceBatch:
        """Build rows of these inputs. The inputs of the first step have more padding in each further row."""
        parts = split_for_decoding(graph_of(model))
        once = {name: inputs[name] for name in parts.initial_inputs if name in inputs}
        for name, value in list(once.items()):
            if f"{name}_mask" in inputs_of(model):
                row = torch.arange(value.size(0))[:, None]
                once[f"{name}_mask"] = torch.arange(value.size(1)) < (value.size(1) - row).clamp(min=1)
        stepwise = {name: inputs[name] for name in parts.step_inputs if name in inputs}
        return cls(model, parts.step_inputs[0], stepwise, once)

    @property
    def blocks(self) -> set[str]:
        """Inputs with the block of each token."""
        return split_for_decoding(graph_of(self.model)).block_inputs

    @property
    def batch(self) -> int:
        return self.stepwise[self.main].size(0)

    @property
    def length(self) -> int:
        return self.stepwise[self.main].size(1)

    def rolled(self, shift: int) -> SequenceBatch:
        """Return the rows in a different order, so that the old contents of the caches belong to different rows."""
        return self.changed(lambda value: value.roll(shift, dims=0))

    def changed(self, change: Callable[[Tensor], Tensor]) -> SequenceBatch:
        """Return a changed batch of rows."""
        stepwise, once = ({name: change(x) for name, x in tensors.items()} for tensors in (self.stepwise, self.once))
        return replace(self, stepwise=stepwise, once=once)

    def started_by(self, piece: InputChunk) -> SequenceBatch:
        """Return the rows with the prefixes and the blocks that this first step holds."""
        upper = torch.full((self.batch,), piece) if isinstance(piece, int) else piece.sum(dim=1)
        once = {name: torch.minimum(x, upper) if x.dim() == 1 else x for name, x in self.once.items()}
        first = torch.arange(self.length) < upper[:, None]
        stepwise = {name: x * first if name in self.blocks else x for name, x in self.stepwise.items()}
        graph = graph_of(self.model)
        nodes = [graph.node(name) for name in self.blocks - graph.inputs.keys()]
        stepwise[self.main] = _without_placeholders(stepwise[self.main], nodes, ~first)
        return replace(self, stepwise=stepwise, once=once)

    def alone(self) -> list[Tensor]:
        """Return the outputs [b, t, ...] of full forwards over each row alone, without padding.

        Inputs of a fixed length keep their padding.
        """
        rows, fixed = [], fixed_lengths(graph_of(self.model))
        for row in range(self.batch):
            arguments = {name: value[row : row + 1] for name, value in {**self.stepwise, **self.once}.items()}
            for name in [name for name in arguments if f"{name}_mask" in arguments and name not in fixed]:
                arguments[name] = arguments[name][arguments.pop(f"{name}_mask")][None]
            rows.append(call(self.model, arguments))
        return [torch.cat(outputs) for outputs in zip(*rows, strict=True)]


def _without_placeholders(tokens: Tensor, nodes: Sequence[Node], where: Tensor) -> Tensor:
    """Replace the placeholder tokens that nodes seek by another token of the text, where `where` is True."""
    for token in (token for node in nodes for token in node.config.placeholders().values()):
        tokens = tokens.masked_fill((tokens == token) & where, token - 1 if token else 1)
    return tokens


def selected_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return the `columns` [b, s] of x [b, t, ...]."""
    return x[torch.arange(x.size(0))[:, None], columns]


@property_of("cached", "read in steps, equals one call", follows=("position-wise", "look-ahead", "padding"))
def cached_steps(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A model that reads in steps, with caches, returns the outputs of a full forward for every token."""
    model = _decodable_model(subject)
    try:
        yield from allow_rounding(subject, read_in_steps(model, subject.inputs()), torch.float32, relative_distance)
    except Exception as error:
        detail = f"read in steps, it fails; does `cached` declare what is cached? {in_words(error)}"
        yield Deviation.fault(detail, location_of(error))


@property_of("chunks", "computes chunks like single tokens", follows=("cached",))
def chunks_as_steps(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Over more than two chunks of the full size, the outputs equal the outputs of steps of one token, in float64.

    In a model that is not read in steps, they equal the outputs with short chunks. All other properties use short
    chunks. A component that carries a state, and does not declare its chunks, is measured over 131 tokens.
    """
    sizes = chunk_sizes(subject.model)
    if not sizes and not any(node.stack.keeps_state for node in subject.stacks if node.stack is not None):
        raise DoesNotApplyError("no component computes a sequence in chunks")
    unclear = next((path for path, size in sizes.items() if size is None), None)
    if unclear is not None and not subject.edits:
        yield Deviation.fault(f"`chunk_attributes` declares `{unclear}`, which is not a positive integer")
    full = chunk_sizes(subject.with_full_chunks.model).values()
    limit = fixed_length(subject.graph) or max_len(subject.graph) or math.inf
    size = int(min(max((size for size in full if size is not None), default=PRESUMED_CHUNK), (limit - 3) // 2))
    model = replace(subject, chunk=max(1, size)).model.double()
    inputs = cast_inputs(subject.inputs(batch=1, length=2 * size + 3), torch.float64)
    try:
        rows = SequenceBatch.of(_decodable_model(subject, model), inputs)
    except DoesNotApplyError:
        detail = f"with chunks of {size} positions, the outputs differ by {{}} from those with short chunks"
        second = copy.deepcopy(subject.model).double()
        yield from output_deviations(second, inputs, inputs, detail, second=model)
        return
    with evaluation_mode(model), torch.no_grad():
        step = 1 if sizes else CHUNK
        way = f"{'token by token' if sizes else f'in steps of {step}'}, where a chunk has {size}"
        reading = _StepReader(CachedModel(model, length=rows.length), rows, rows.alone(), way, TOLERANCE)
        yield from reading.read(stepwise_schedule(rows.length, step))


@property_of("cached-step", "has a step that is captured, scripted", level="full", follows=("cached",))
def cached_step(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The step of one token is captured once for all tokens, and TorchScript accepts a step of any size."""
    deviations = step_as_program(_decodable_model(subject), subject.inputs())
    yield from allow_rounding(subject, deviations, torch.float32, relative_distance)


@property_of("cached-types", "keeps the type of its caches", follows=("cached", "types"))
def cached_types(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Caches have the dtype of the model, also in bfloat16 and under autocast; `keep` returns the last positions."""
    yield from _kept_positions(_decodable_model(subject), subject)
    for dtype in (torch.float64, torch.bfloat16):
        yield from _typed_caches(copy.deepcopy(subject.model).to(dtype), subject, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        yield from _typed_caches(subject.model, subject, torch.bfloat16)


@property_of("state", "keeps padding out of its states", follows=("cached",))
def states_without_padding(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Padding between tokens does not change a state, and a step of padding alone leaves the state bit-identical."""
    model = _decodable_model(subject)
    if not any(isinstance(entry, State) for entry in split_for_decoding(subject.graph).cached):
        raise DoesNotApplyError("no sublayer keeps a state")
    rows = SequenceBatch.of(model, subject.inputs())
    generator = torch.Generator().manual_seed(subject.seed)
    order = torch.stack([torch.randperm(rows.length, generator=generator) for _ in range(rows.batch)])
    n_tokens = rows.length // 2
    padding = torch.zeros(rows.batch, rows.length - n_tokens, dtype=torch.bool)
    ways: list[Schedule] = [[n_tokens], [*(order < n_tokens).split(5, dim=1)], [n_tokens, padding]]
    with evaluation_mode(model), torch.no_grad():
        states = [_states_after(rows.started_by(1), schedule) for schedule in ways]
    for (path, alone), (_, between), (_, after) in zip(*states, strict=True):
        error = relative_distance(between, alone)
        yield Deviation(error, f"with padding between the tokens, a state differs by {error:.1e}", where=path)
        error = 0.0 if torch.equal(after, alone) else relative_distance(after, alone) or math.inf
        yield Deviation(error, f"a piece of padding alone changes a state by {error:.1e}", 0.0, path)


def _states_after(rows: SequenceBatch, schedule: Schedule) -> list[tuple[str, Tensor]]:
    """Return the states of a model that has read these pieces, each with the path of its layer."""
    reading = _StepReader(CachedModel(rows.model, length=rows.length), rows, rows.alone(), "", TOLERANCE)
    deque(reading.read(schedule), maxlen=0)
    return [(path, tensor) for path, entry, tensor in reading.cached.tensors() if isinstance(entry, State)]


def _decodable_model(subject: ModelUnderTest, model: fx.GraphModule | None = None) -> fx.GraphModule:
    """Return the model, or a second model of its graph; raise `DoesNotApplyError` if it is not read in steps."""
    try:
        split_for_decoding(subject.graph)
    except SpecError as error:
        raise DoesNotApplyError(error.diagnostics[0].message) from None
    return model or subject.model


def _kept_positions(model: fx.GraphModule, subject: ModelUnderTest) -> Iterator[Deviation]:
    """Compare the last positions of a piece with the same positions of its full output."""
    rows = SequenceBatch.of(model, subject.inputs())
    outputs = []
    for keep in (0, 2):
        cached = CachedModel(model, length=rows.length)
        cached.start(rows.batch, **rows.once)
        arguments: dict[str, Any] = dict(rows.stepwise)
        outputs.append(as_tensors(cached(arguments.pop(rows.main), keep=keep, **arguments)))
    for name, full, last in zip(subject.graph.outputs, *outputs, strict=True):
        expected = full[:, -2:] if subject.graph.node(name).output.type == "logits" else full
        error = relative_distance(last, expected) if last.shape == expected.shape else math.inf
        yield Deviation(error, f"`keep=2` returns other positions than the last two: they differ by {error:.1e}")


def _typed_caches(model: fx.GraphModule, subject: ModelUnderTest, dtype: torch.dtype) -> Iterator[Deviation]:
    """Compare the types of the caches with the model's, and single tokens with a full forward in that type."""
    rows = SequenceBatch.of(model, subject.inputs())
    stepwise, once = (cast_inputs(inputs, next(model.parameters()).dtype) for inputs in (rows.stepwise, rows.once))
    rows = replace(rows, stepwise=stepwise, once=once)
    with evaluation_mode(model), torch.no_grad():
        cached = CachedModel(model, length=rows.length)
        cached.start(rows.batch, **rows.once)
        for path, entry, tensor in cached.tensors():
            wide = isinstance(entry, State) and entry.wide
            if tensor.dtype != (torch.promote_types(dtype, torch.float32) if wide else dtype):
                names = "wide states" if wide else "caches"
                yield Deviation.fault(f"a model of {dtype} has {names} of {tensor.dtype}", path)
        if dtype != torch.float64 and any(isinstance(module, StackedLinear) for module in model.modules()):
            return  # rounding may send a token to other experts
        limit = TOLERANCE if dtype == torch.float64 else BFLOAT16_TOLERANCE
        batch = rows.started_by(rows.length // 2)
        reading = _StepReader(cached, batch, batch.alone(), f"in {name_of(dtype)}", limit)
        deviations = reading.read([rows.length // 2, *stepwise_schedule(rows.length - rows.length // 2, 1)])
        yield from allow_rounding(subject, deviations, dtype, relative_distance)


def read_in_steps(model: fx.GraphModule, inputs: Inputs, *, tolerance: float = TOLERANCE) -> Iterator[Deviation]:
    """Compare a model read in steps with a full forward over each sequence alone.

    The steps and the arguments are the same as in `tfkit.testing.check_cached`.
    """
    rows = SequenceBatch.of(model, inputs)
    with evaluation_mode(model), torch.no_grad():
        plain, static = CachedModel(model, length=rows.length), CachedModel(model, length=rows.length)
        compile_step(static, lambda step: step)
        full, prefixes = rows.alone(), rows.blocks or any(value.dim() == 1 for value in rows.once.values())
        for number, (way, schedule) in enumerate(reading_schedules(rows.batch, rows.length).items()):
            batch = rows.rolled(number).started_by(schedule[0])
            expected = batch.alone() if prefixes else [output.roll(number, dims=0) for output in full]
            yield from _StepReader(plain, batch, expected, way, tolerance).read_all(schedule)
            if way in COMPILED:
                compiled = _StepReader(static, batch, expected, f"{way}, by the compiled step", tolerance)
                yield from compiled.read_all(schedule)
        yield from _repeated_rows(plain, rows, tolerance)


def step_as_program(model: fx.GraphModule, inputs: Inputs) -> Iterator[Deviation]:
    """Capture the step of one token, and script the step of any size; see `read_in_steps` for the arguments."""
    captures: list[fx.GraphModule] = []

    def count(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        captures.append(graph)
        return graph

    rows = SequenceBatch.of(model, inputs)
    left = reading_schedules(rows.batch, rows.length)["padded on the left"]
    singles = [left[0], *stepwise_schedule(rows.length // 2, 1)]
    torch.compiler.reset()
    with evaluation_mode(model), torch.no_grad():
        captured, scripted = CachedModel(model, length=rows.length), CachedModel(model, length=rows.length)
        compile_step(captured, lambda step: torch.compile(step, fullgraph=True, dynamic=False, backend=count))
        for number in range(2):
            batch = rows.rolled(number).started_by(left[0])
            yield from _StepReader(captured, batch, batch.alone(), "by the compiled step", TOLERANCE).read(singles)
        if len(captures) != 1:
            yield Deviation.fault(f"the step of one token was captured {len(captures)} times")
        try:
            scripted.stepping = script_module(scripted.stepping)
        except Exception as error:
            yield script_fault(model, error)
            return
        batch = rows.started_by(left[0])
        yield from _StepReader(scripted, batch, batch.alone(), "by the scripted step", TOLERANCE).read(left)


def compile_step(cached: CachedModel, how: Callable[[fx.GraphModule], Any]) -> None:
    """Compile the step of one token by other means than `torch.compile`."""
    cached._compiled = how(cached.stepping)


class _StepReader:
    """A batch that is read step by step, and the expected output of each of its tokens."""

    def __init__(
        self, cached: CachedModel, rows: SequenceBatch, expected: Sequence[Tensor], way: str, tolerance: float
    ) -> None:
        self.cached, self.rows, self.expected, self.way, self.tolerance = cached, rows, expected, way, tolerance
        self.done = torch.zeros(rows.batch, dtype=torch.long)
        cached.start(rows.batch, **rows.once)

    def read(self, schedule: Schedule) -> Iterator[Deviation]:
        """Read further pieces, with arbitrary tokens at padded positions."""
        for piece in schedule:
            mask = None if isinstance(piece, int) else piece
            tokens = torch.ones(self.rows.batch, piece, dtype=torch.bool) if isinstance(piece, int) else piece
            columns = self.done[:, None] + tokens.long().cumsum(dim=1) - 1
            columns = torch.where(tokens, columns, (columns + self.rows.length // 2) % self.rows.length)
            arguments: dict[str, Any] = {
                name: selected_columns(value, columns) for name, value in self.rows.stepwise.items()
            }
            main = arguments.pop(self.rows.main)
            if mask is not None:
                masks = {f"{name}_mask": mask for name in arguments}
                arguments |= {name: mask for name, mask in masks.items() if name in inputs_of(self.rows.model)}
            outputs = as_tensors(self.cached(main, mask, **arguments))
            yield from self._compare(outputs, columns, tokens)
            self.done = self.done + tokens.sum(dim=1)

    def _compare(self, outputs: list[Tensor], columns: Tensor, tokens: Tensor) -> Iterator[Deviation]:
        last = self.cached.used - 1
        first = last - columns.size(1) + 1
        location = f"column {last} differs" if first == last else f"columns {first} to {last} differ"
        detail = f"read {self.way}, {location} from the full forward by {{}}"
        for output, expected in zip(outputs, self.expected, strict=True):
            yield tensor_deviation(
                output[tokens], selected_columns(expected, columns)[tokens], detail, limit=self.tolerance
            )

    def repeat(self, rows: SequenceBatch) -> None:
        """Continue with `rows`, twice as many, that begin with the tokens read so far."""
        self.cached.repeat(2)
        self.done = self.done.repeat_interleave(2)
        self.rows, self.expected, self.way = rows, rows.alone(), "after it was repeated"

    def read_all(self, schedule: Schedule) -> Iterator[Deviation]:
        """Read to the last column; then the cache is full."""
        yield from self.read(schedule)
        token: dict[str, Any] = {name: value[:, :1] for name, value in self.rows.stepwise.items()}
        try:
            self.cached(token.pop(self.rows.main), **token)
        except ValueError:
            return
        yield Deviation.fault(f"more tokens are accepted than the {self.cached.length} that the caches are made for")


def _repeated_rows(cached: CachedModel, rows: SequenceBatch, tolerance: float) -> Iterator[Deviation]:
    """Compare rows that are repeated after some tokens, so that each continues in two ways."""
    first, *rest = reading_schedules(rows.batch, rows.length)["padded on the left"]
    rows = rows.started_by(first)
    reading = _StepReader(cached, rows, rows.alone(), "before it is repeated", tolerance)
    yield from reading.read([first])
    twice = rows.changed(lambda value: value.repeat_interleave(2, dim=0))
    half = rows.length // 2
    stepwise = {name: _crossed_rows(value, half) for name, value in twice.stepwise.items()}
    crossed = (torch.arange(twice.batch)[:, None] % 2 == 1) & (torch.arange(rows.length) >= half)
    # Other rows may have more placeholders there than vectors remain.
    stepwise[rows.main] = _without_placeholders(stepwise[rows.main], graph_of(rows.model).nodes, crossed)
    reading.repeat(replace(twice, stepwise=stepwise))
    yield from reading.read(rest)


def _crossed_rows(x: Tensor, column: int) -> Tensor:
    """Continue every second row of x [b, t, ...] as a different row from `column` on."""
    crossed = torch.cat((x[:, :column], x[:, column:].roll(2, dims=0)), dim=1)
    odd = torch.arange(x.size(0)) % 2 == 1
    return torch.where(odd.view(-1, *[1] * (x.dim() - 1)), crossed, x)
