"""The promise of `CachedModel`: read in steps, every token has the outputs that it has in its own sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from tfkit.builder import evaluating, graph_of, inputs_of
from tfkit.decoding.cached import CachedModel
from tfkit.graph.decode_split import split_for_decoding
from tfkit.testing.inputs import TOLERANCE, Inputs, call, distance
from tfkit.torch_private.torchscript import quiet

Piece: TypeAlias = int | Tensor
"""A number of columns without a mask, or a mask [b, t], True where there is a token."""
Schedule: TypeAlias = list[Piece]

COMPILED = ("token by token", "padded on the left", "padded in between", "with a row that begins later")
"""The schedules that are also read with the compiled step, which takes single tokens."""


def check_cached(model: fx.GraphModule, inputs: Inputs, *, tolerance: float = TOLERANCE) -> None:
    """Check that a model read in steps has the outputs of the whole forward over each sequence by itself.

    The steps: the whole, uneven ones, single tokens, and several tokens after single ones; with padding on the left,
    on the right, in between, and in all of a row; single tokens with the compiled step; a second batch in the caches of
    the first; rows that are repeated. The caches are made for `t` columns and filled to the last one.

    Args:
        model: a model that `tfkit.build` returned.
        inputs: those of the model, without padding: three rows or more, and for inputs read in steps `t` tokens, at
            least 8 and several times the size of a sliding window.
        tolerance: the largest difference, relative to the largest value if that is above 1.

    Raises:
        AssertionError: an output differs, or more than `t` tokens are taken.
        SpecError: the model needs its sequence as a whole.
    """
    rows = _Rows.of(model, inputs)
    with evaluating(model), torch.no_grad():
        plain, static = CachedModel(model, length=rows.length), CachedModel(model, length=rows.length)
        compile_step(static, lambda step: step)
        for number, (way, pieces) in enumerate(schedules(rows.batch, rows.length).items()):
            batch = rows.rolled(number).started_by(pieces[0])
            want = batch.alone()
            _Reading(plain, batch, want, way, tolerance).read_all(pieces)
            if way in COMPILED:
                _Reading(static, batch, want, f"{way}, by the compiled step", tolerance).read_all(pieces)
        _check_repeated(plain, rows, tolerance)


def check_cached_step(model: fx.GraphModule, inputs: Inputs) -> None:
    """Check that the step of one token is captured once for all tokens, and that TorchScript takes a step of any size.

    Their results are compared too; see `check_cached` for the arguments.
    """
    captures: list[fx.GraphModule] = []

    def count(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        captures.append(graph)
        return graph

    rows = _Rows.of(model, inputs)
    left = schedules(rows.batch, rows.length)["padded on the left"]
    singles = [left[0], *_cut(rows.length // 2, 1)]
    torch.compiler.reset()
    with evaluating(model), torch.no_grad():
        captured, scripted = CachedModel(model, length=rows.length), CachedModel(model, length=rows.length)
        compile_step(captured, lambda step: torch.compile(step, fullgraph=True, dynamic=False, backend=count))
        for number in range(2):
            batch = rows.rolled(number).started_by(left[0])
            _Reading(captured, batch, batch.alone(), "by the compiled step", TOLERANCE).read(singles)
        assert len(captures) == 1, f"the step of one token was captured {len(captures)} times"
        with quiet():
            scripted.stepping = torch.jit.script(scripted.stepping)  # type: ignore[assignment]
        batch = rows.started_by(left[0])
        _Reading(scripted, batch, batch.alone(), "by the scripted step", TOLERANCE).read(left)


def compile_step(cached: CachedModel, how: Callable[[fx.GraphModule], Any]) -> None:
    """Compile the step of one token by other means than `torch.compile`."""
    cached._compiled = how(cached.stepping)


def schedules(batch: int, length: int) -> dict[str, Schedule]:
    """Ways to read `batch` rows in `length` columns, and their names."""
    half, row = length // 2, torch.arange(batch)[:, None]
    left = torch.arange(half) >= row.clamp(max=half - 1)
    gap = torch.ones(batch, 4, dtype=torch.bool)
    gap[1, 1:3] = gap[0, 3] = gap[2] = False
    return {
        "whole": [length],
        "in uneven steps": _cut(length, 3, 1, 2),
        "token by token": _cut(length, 1),
        "by single tokens and several": _cut(length, half, 1, 1, 3),
        "padded on the left": [left, *_cut(length - half, 1, 1, 3)],
        "padded on the right": [left.flip(1), *_cut(length - half, 1, 3, 1)],
        "padded in between": [2, gap, row > 0, *_cut(length - 7, 2, 1)],
        "with a row that begins later": [(row < batch - 1).expand(batch, half), *_cut(length - half, 1, 2)],
    }


def _cut(length: int, *sizes: int) -> Schedule:
    """Steps of these sizes, again and again, up to `length` columns."""
    pieces: Schedule = []
    for size in cycle(sizes):
        if length <= 0:
            return pieces
        pieces.append(min(size, length))
        length -= size
    return pieces


@dataclass(frozen=True)
class _Rows:
    """The sequences of a batch."""

    model: fx.GraphModule
    main: str
    """The input whose tokens are counted."""
    pieces: Mapping[str, Tensor]
    """The inputs read in steps, [b, t, ...] each, without padding."""
    once: Mapping[str, Tensor]
    """The inputs given once, with padding masks."""

    @classmethod
    def of(cls, model: fx.GraphModule, inputs: Inputs) -> _Rows:
        """Rows of these inputs, with increasing padding in the inputs given once."""
        parts = split_for_decoding(graph_of(model))
        once = {name: inputs[name] for name in parts.given_once if name in inputs}
        for name, value in list(once.items()):
            if f"{name}_mask" in inputs_of(model):
                row = torch.arange(value.size(0))[:, None]
                once[f"{name}_mask"] = torch.arange(value.size(1)) < (value.size(1) - row).clamp(min=1)
        pieces = {name: inputs[name] for name in parts.given_again if name in inputs}
        return cls(model, parts.given_again[0], pieces, once)

    @property
    def batch(self) -> int:
        return self.pieces[self.main].size(0)

    @property
    def length(self) -> int:
        return self.pieces[self.main].size(1)

    def rolled(self, shift: int) -> _Rows:
        """The rows in another order, so that the old contents of the caches belong to other rows."""
        return self.changed(lambda value: value.roll(shift, dims=0))

    def changed(self, change: Callable[[Tensor], Tensor]) -> _Rows:
        """Another batch of rows from these."""
        pieces = {name: change(value) for name, value in self.pieces.items()}
        return _Rows(self.model, self.main, pieces, {name: change(value) for name, value in self.once.items()})

    def started_by(self, piece: Piece) -> _Rows:
        """The rows with the prefixes that this first step holds."""
        most = torch.full((self.batch,), piece) if isinstance(piece, int) else piece.sum(dim=1)
        once = {name: torch.minimum(x, most) if x.dim() == 1 else x for name, x in self.once.items()}
        return _Rows(self.model, self.main, self.pieces, once)

    def alone(self) -> list[Tensor]:
        """The outputs [b, t, ...] of the whole forward over one row after the other, without padding."""
        found = []
        for row in range(self.batch):
            given = {name: value[row : row + 1] for name, value in {**self.pieces, **self.once}.items()}
            for name in [name for name in given if f"{name}_mask" in given]:
                given[name] = given[name][given.pop(f"{name}_mask")][None]
            found.append(call(self.model, given))
        return [torch.cat(outputs) for outputs in zip(*found, strict=True)]


class _Reading:
    """A batch that is read step by step, and the expected output of each of its tokens."""

    def __init__(self, cached: CachedModel, rows: _Rows, want: Sequence[Tensor], way: str, tolerance: float) -> None:
        self.cached, self.rows, self.want, self.way, self.tolerance = cached, rows, want, way, tolerance
        self.done = torch.zeros(rows.batch, dtype=torch.long)
        cached.start(rows.batch, **rows.once)

    def read(self, pieces: Schedule) -> None:
        """Read on, with arbitrary tokens where there is padding."""
        for piece in pieces:
            mask = None if isinstance(piece, int) else piece
            tokens = torch.ones(self.rows.batch, piece, dtype=torch.bool) if isinstance(piece, int) else piece
            columns = self.done[:, None] + tokens.long().cumsum(dim=1) - 1
            columns = torch.where(tokens, columns, (columns + self.rows.length // 2) % self.rows.length)
            given: dict[str, Any] = {name: _pick(value, columns) for name, value in self.rows.pieces.items()}
            main = given.pop(self.rows.main)
            if mask is not None:
                masks = {f"{name}_mask": mask for name in given}
                given |= {name: mask for name, mask in masks.items() if name in inputs_of(self.rows.model)}
            result: Any = self.cached(main, mask, **given)
            found = [result] if isinstance(result, Tensor) else list(result)
            self._compare(found, columns, tokens)
            self.done = self.done + tokens.sum(dim=1)

    def _compare(self, found: list[Tensor], columns: Tensor, tokens: Tensor) -> None:
        last = self.cached.used - 1
        for one, want in zip(found, self.want, strict=True):
            error = distance(one[tokens], _pick(want, columns)[tokens])
            place = f"columns {last - columns.size(1) + 1} to {last}"
            assert error <= self.tolerance, f"read {self.way}, {place} differ from the whole by {error:.1e}"

    def repeat(self, rows: _Rows) -> None:
        """Go on with `rows`, twice as many, that begin with the tokens read so far."""
        self.cached.repeat(2)
        self.done = self.done.repeat_interleave(2)
        self.rows, self.want, self.way = rows, rows.alone(), "after it was repeated"

    def read_all(self, pieces: Schedule) -> None:
        """Read to the last column; then the cache is full."""
        self.read(pieces)
        one: dict[str, Any] = {name: value[:, :1] for name, value in self.rows.pieces.items()}
        try:
            self.cached(one.pop(self.rows.main), **one)
        except ValueError:
            return
        raise AssertionError(f"more tokens are accepted than the {self.cached.length} that the caches are made for")


def _check_repeated(cached: CachedModel, rows: _Rows, tolerance: float) -> None:
    """Check that each row goes on in two ways."""
    first, *rest = schedules(rows.batch, rows.length)["padded on the left"]
    rows = rows.started_by(first)
    reading = _Reading(cached, rows, rows.alone(), "before it is repeated", tolerance)
    reading.read([first])
    twice = rows.changed(lambda value: value.repeat_interleave(2, dim=0))
    pieces = {name: _crossed(value, rows.length // 2) for name, value in twice.pieces.items()}
    reading.repeat(_Rows(twice.model, twice.main, pieces, twice.once))
    reading.read(rest)


def _crossed(x: Tensor, column: int) -> Tensor:
    """Every second row of x [b, t, ...] continued as another one from `column` on."""
    crossed = torch.cat((x[:, :column], x[:, column:].roll(2, dims=0)), dim=1)
    odd = torch.arange(x.size(0)) % 2 == 1
    return torch.where(odd.view(-1, *[1] * (x.dim() - 1)), crossed, x)


def _pick(x: Tensor, columns: Tensor) -> Tensor:
    """The `columns` [b, s] of x [b, t, ...]."""
    return x[torch.arange(x.size(0))[:, None], columns]
