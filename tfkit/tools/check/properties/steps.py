"""Properties of reading in steps: every token has the outputs that it has in its own sequence."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.builder import evaluating, inputs_of
from tfkit.component import Cached, State
from tfkit.decoding.cached import CachedModel
from tfkit.errors import SpecError
from tfkit.graph.decode_split import split_for_decoding
from tfkit.nn import StackedLinear
from tfkit.placement import name_of
from tfkit.tools.check.inputs import Inputs, cast
from tfkit.tools.check.measure import TOLERANCE, DoesNotApplyError, Measured, distance, in_words, place_of, property_of
from tfkit.tools.check.rows import Rows, Schedule, cut, pick, schedules
from tfkit.tools.check.subject import Subject
from tfkit.tools.common.comparison_inputs import as_tensors
from tfkit.torch_private.torchscript import quiet

ROUGH = 0.1
"""The largest difference of steps from the whole in bfloat16, relative to the largest value if that is above 1."""
COMPILED = ("token by token", "padded on the left", "padded in between", "with a row that begins later")
"""The schedules that are also read with the compiled step, which takes single tokens."""


@property_of("cached", "read in steps, is the whole", follows=("alone", "look-ahead", "padding"))
def cached_steps(subject: Subject) -> Iterator[Measured]:
    """Read in steps, with caches, every token has the outputs that it has in the whole."""
    model = _decodable(subject)
    try:
        yield from read_in_steps(model, subject.inputs())
    except Exception as error:
        detail = f"read in steps, it fails; does `cached` declare what is cached? {in_words(error)}"
        yield Measured.fault(detail, place_of(error))


@property_of("cached-step", "has a step that is captured, scripted", level="full", follows=("cached",))
def cached_step(subject: Subject) -> Iterator[Measured]:
    """The step of one token is captured once for all tokens, and TorchScript takes a step of any size."""
    yield from step_as_program(_decodable(subject), subject.inputs())


@property_of("cached-types", "keeps the type of its caches", follows=("cached", "types"))
def cached_types(subject: Subject) -> Iterator[Measured]:
    """Caches of a model in bfloat16, and under autocast; `keep` returns the last positions of a piece."""
    yield from _kept(_decodable(subject), subject)
    for dtype in (torch.float64, torch.bfloat16):
        yield from _typed(copy.deepcopy(subject.model).to(dtype), subject, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        yield from _typed(subject.model, subject, torch.bfloat16)


@property_of("state", "keeps padding out of its states", follows=("cached",))
def state(subject: Subject) -> Iterator[Measured]:
    """Padding between tokens changes no state, and a piece of padding alone leaves every bit of it."""
    model = _decodable(subject)
    if not any(isinstance(entry, State) for entry in split_for_decoding(subject.graph).cached):
        raise DoesNotApplyError("no sublayer keeps a state")
    rows = Rows.of(model, subject.inputs())
    generator = torch.Generator().manual_seed(subject.seed)
    order = torch.stack([torch.randperm(rows.length, generator=generator) for _ in range(rows.batch)])
    n_tokens = rows.length // 2
    padding = torch.zeros(rows.batch, rows.length - n_tokens, dtype=torch.bool)
    ways: list[Schedule] = [[n_tokens], [*(order < n_tokens).split(5, dim=1)], [n_tokens, padding]]
    with evaluating(model), torch.no_grad():
        states = [_states_after(rows.started_by(1), pieces) for pieces in ways]
    for (path, alone), (_, between), (_, after) in zip(*states, strict=True):
        error = distance(between, alone)
        yield Measured(error, f"with padding between the tokens, a state differs by {error:.1e}", where=path)
        error = 0.0 if torch.equal(after, alone) else distance(after, alone) or math.inf
        yield Measured(error, f"a piece of padding alone changes a state by {error:.1e}", 0.0, path)


def _states_after(rows: Rows, pieces: Schedule) -> list[tuple[str, Tensor]]:
    """Return the states of a model that has read these pieces, each with the path of its layer."""
    reading = _Reading(CachedModel(rows.model, length=rows.length), rows, rows.alone(), "", TOLERANCE)
    deque(reading.read(pieces), maxlen=0)
    return [(path, tensor) for path, entry, tensor in _tensors_of(reading.cached) if isinstance(entry, State)]


def _tensors_of(cached: CachedModel) -> Iterator[tuple[str, Cached | State, Tensor]]:
    """Yield the tensors that a model keeps, each with the path of its layer and its declaration."""
    for name, (node, pieces) in cached._parts.again.items():
        for key, layers in {name: pieces.caches, f"{name}.memory": pieces.memory_caches}.items():
            for number, (entries, tensors) in enumerate(zip(layers, cached._cache.get(key, []), strict=True)):
                path = f"{name}.layers.{number // (node.stack.repeats if node.stack else 1)}"
                yield from ((path, entry, tensor) for entry, tensor in zip(entries, tensors, strict=True))


def _decodable(subject: Subject) -> fx.GraphModule:
    """Return the model; raise `DoesNotApplyError` if it cannot be decoded step by step."""
    try:
        split_for_decoding(subject.graph)
    except SpecError as error:
        raise DoesNotApplyError(error.diagnostics[0].message) from None
    return subject.model


def _kept(model: fx.GraphModule, subject: Subject) -> Iterator[Measured]:
    """Compare the last positions of a piece with the same positions of its full output."""
    rows = Rows.of(model, subject.inputs())
    outputs = []
    for keep in (0, 2):
        cached = CachedModel(model, length=rows.length)
        cached.start(rows.batch, **rows.once)
        arguments: dict[str, Any] = dict(rows.pieces)
        outputs.append(as_tensors(cached(arguments.pop(rows.main), keep=keep, **arguments)))
    for name, whole, last in zip(subject.graph.outputs, *outputs, strict=True):
        expected = whole[:, -2:] if subject.graph.node(name).output.type == "logits" else whole
        error = distance(last, expected) if last.shape == expected.shape else math.inf
        yield Measured(error, f"`keep=2` returns other positions than the last two: they differ by {error:.1e}")


def _typed(model: fx.GraphModule, subject: Subject, dtype: torch.dtype) -> Iterator[Measured]:
    """Compare the types of the caches with the model's, and single tokens with the whole in that type."""
    rows = Rows.of(model, subject.inputs())
    pieces, once = (cast(inputs, next(model.parameters()).dtype) for inputs in (rows.pieces, rows.once))
    rows = replace(rows, pieces=pieces, once=once)
    with evaluating(model), torch.no_grad():
        cached = CachedModel(model, length=rows.length)
        cached.start(rows.batch, **rows.once)
        for path, entry, tensor in _tensors_of(cached):
            wide = isinstance(entry, State) and entry.wide
            if tensor.dtype != (torch.promote_types(dtype, torch.float32) if wide else dtype):
                yield Measured.fault(
                    f"a model of {dtype} has {'wide states' * wide or 'caches'} of {tensor.dtype}", path
                )
        if dtype != torch.float64 and any(isinstance(module, StackedLinear) for module in model.modules()):
            return  # rounding may send a token to other experts
        limit = TOLERANCE if dtype == torch.float64 else ROUGH
        name = name_of(dtype)
        batch = rows.started_by(rows.length // 2)
        reading = _Reading(cached, batch, batch.alone(), f"in {name}", limit)
        yield from reading.read([rows.length // 2, *cut(rows.length - rows.length // 2, 1)])


def read_in_steps(model: fx.GraphModule, inputs: Inputs, *, tolerance: float = TOLERANCE) -> Iterator[Measured]:
    """Compare a model read in steps with a full forward over each sequence alone.

    The steps and the arguments are the same as in `tfkit.testing.check_cached`.
    """
    rows = Rows.of(model, inputs)
    with evaluating(model), torch.no_grad():
        plain, static = CachedModel(model, length=rows.length), CachedModel(model, length=rows.length)
        compile_step(static, lambda step: step)
        whole, prefixes = rows.alone(), any(value.dim() == 1 for value in rows.once.values())
        for number, (way, pieces) in enumerate(schedules(rows.batch, rows.length).items()):
            batch = rows.rolled(number).started_by(pieces[0])
            want = batch.alone() if prefixes else [output.roll(number, dims=0) for output in whole]
            yield from _Reading(plain, batch, want, way, tolerance).read_all(pieces)
            if way in COMPILED:
                compiled = _Reading(static, batch, want, f"{way}, by the compiled step", tolerance)
                yield from compiled.read_all(pieces)
        yield from _repeated(plain, rows, tolerance)


def step_as_program(model: fx.GraphModule, inputs: Inputs) -> Iterator[Measured]:
    """Capture the step of one token, and script the step of any size; see `read_in_steps` for the arguments."""
    captures: list[fx.GraphModule] = []

    def count(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        captures.append(graph)
        return graph

    rows = Rows.of(model, inputs)
    left = schedules(rows.batch, rows.length)["padded on the left"]
    singles = [left[0], *cut(rows.length // 2, 1)]
    torch.compiler.reset()
    with evaluating(model), torch.no_grad():
        captured, scripted = CachedModel(model, length=rows.length), CachedModel(model, length=rows.length)
        compile_step(captured, lambda step: torch.compile(step, fullgraph=True, dynamic=False, backend=count))
        for number in range(2):
            batch = rows.rolled(number).started_by(left[0])
            yield from _Reading(captured, batch, batch.alone(), "by the compiled step", TOLERANCE).read(singles)
        if len(captures) != 1:
            yield Measured.fault(f"the step of one token was captured {len(captures)} times")
        with quiet():
            scripted.stepping = torch.jit.script(scripted.stepping)  # type: ignore[assignment]
        batch = rows.started_by(left[0])
        yield from _Reading(scripted, batch, batch.alone(), "by the scripted step", TOLERANCE).read(left)


def compile_step(cached: CachedModel, how: Callable[[fx.GraphModule], Any]) -> None:
    """Compile the step of one token by other means than `torch.compile`."""
    cached._compiled = how(cached.stepping)


class _Reading:
    """A batch that is read step by step, and the expected output of each of its tokens."""

    def __init__(self, cached: CachedModel, rows: Rows, want: Sequence[Tensor], way: str, tolerance: float) -> None:
        self.cached, self.rows, self.want, self.way, self.tolerance = cached, rows, want, way, tolerance
        self.done = torch.zeros(rows.batch, dtype=torch.long)
        cached.start(rows.batch, **rows.once)

    def read(self, pieces: Schedule) -> Iterator[Measured]:
        """Read on, with arbitrary tokens where there is padding."""
        for piece in pieces:
            mask = None if isinstance(piece, int) else piece
            tokens = torch.ones(self.rows.batch, piece, dtype=torch.bool) if isinstance(piece, int) else piece
            columns = self.done[:, None] + tokens.long().cumsum(dim=1) - 1
            columns = torch.where(tokens, columns, (columns + self.rows.length // 2) % self.rows.length)
            arguments: dict[str, Any] = {name: pick(value, columns) for name, value in self.rows.pieces.items()}
            main = arguments.pop(self.rows.main)
            if mask is not None:
                masks = {f"{name}_mask": mask for name in arguments}
                arguments |= {name: mask for name, mask in masks.items() if name in inputs_of(self.rows.model)}
            result: Any = self.cached(main, mask, **arguments)
            outputs = as_tensors(result)
            yield from self._compare(outputs, columns, tokens)
            self.done = self.done + tokens.sum(dim=1)

    def _compare(self, outputs: list[Tensor], columns: Tensor, tokens: Tensor) -> Iterator[Measured]:
        last = self.cached.used - 1
        for output, expected in zip(outputs, self.want, strict=True):
            error = distance(output[tokens], pick(expected, columns)[tokens])
            first = last - columns.size(1) + 1
            place = f"column {last} differs" if first == last else f"columns {first} to {last} differ"
            yield Measured(error, f"read {self.way}, {place} from the whole by {error:.1e}", self.tolerance)

    def repeat(self, rows: Rows) -> None:
        """Continue with `rows`, twice as many, that begin with the tokens read so far."""
        self.cached.repeat(2)
        self.done = self.done.repeat_interleave(2)
        self.rows, self.want, self.way = rows, rows.alone(), "after it was repeated"

    def read_all(self, pieces: Schedule) -> Iterator[Measured]:
        """Read to the last column; then the cache is full."""
        yield from self.read(pieces)
        token: dict[str, Any] = {name: value[:, :1] for name, value in self.rows.pieces.items()}
        try:
            self.cached(token.pop(self.rows.main), **token)
        except ValueError:
            return
        yield Measured.fault(f"more tokens are accepted than the {self.cached.length} that the caches are made for")


def _repeated(cached: CachedModel, rows: Rows, tolerance: float) -> Iterator[Measured]:
    """Compare rows that go on in two ways each."""
    first, *rest = schedules(rows.batch, rows.length)["padded on the left"]
    rows = rows.started_by(first)
    reading = _Reading(cached, rows, rows.alone(), "before it is repeated", tolerance)
    yield from reading.read([first])
    twice = rows.changed(lambda value: value.repeat_interleave(2, dim=0))
    pieces = {name: _crossed(value, rows.length // 2) for name, value in twice.pieces.items()}
    reading.repeat(replace(twice, pieces=pieces))
    yield from reading.read(rest)


def _crossed(x: Tensor, column: int) -> Tensor:
    """Continue every second row of x [b, t, ...] as a different row from `column` on."""
    crossed = torch.cat((x[:, :column], x[:, column:].roll(2, dims=0)), dim=1)
    odd = torch.arange(x.size(0)) % 2 == 1
    return torch.where(odd.view(-1, *[1] * (x.dim() - 1)), crossed, x)
