"""The code that runs in each mode: a training step, the prefill of a prompt, or one decoding step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tfkit.building.builder import graph_of, inputs_of
from tfkit.component import Signal
from tfkit.decoding.modules import empty_caches, initial_value_names, reading_module, stepping_module
from tfkit.graph.decode_split import DecodeSplit, memory_field, split_if_decodable
from tfkit.graph.expand import Graph, Node
from tfkit.graph.input_shapes import input_shapes
from tfkit.learning.chunked_loss import ChunkedLoss
from tfkit.learning.loss import Loss
from tfkit.nn import Past
from tfkit.tools.common.modes import Mode
from tfkit.tools.cost.counter import Observer

StepFunction = Callable[[Observer], Any]
"""Runs a step under an observer."""
Inputs = dict[str, Tensor]
REPEATED = 5
"""Minimum number of chunks of a loss for running equal chunks once: fewer chunks have no equal chunks."""


class StepShape(NamedTuple):
    """Mode, sequences in the batch, tokens of each, tokens that cross-attention reads; see `tfkit.cost`."""

    mode: Mode
    batch: int
    length: int
    memory_length: int | None


def make_inputs(graph: Graph, shape: StepShape, dtype: torch.dtype) -> Inputs:
    """Return a tensor of the right shape on the meta device for each input."""
    shapes = input_shapes(graph, batch=shape.batch, length=shape.length, memory_length=shape.memory_length)
    real = {name for name, config in graph.spec.model.inputs.items() if config.is_real}
    return {
        name: torch.empty(size, dtype=dtype if name in real else torch.long, device="meta")
        for name, size in shapes.items()
    }


def memory_of(node: Node, shape: StepShape) -> int:
    """Return the number of positions that a node's cross-attention attends to."""
    memory: Signal | None = node.signals.get(memory_field(node))
    return (memory.length or memory.image_length if memory else None) or shape.memory_length or 0


def make_step(model: fx.GraphModule, inputs: Inputs, shape: StepShape) -> StepFunction:
    """Return the function to run."""
    if shape.mode == "train":
        return _training_step(model, inputs)
    parts = split_if_decodable(graph_of(model))
    if parts is None:
        return lambda _: model(**inputs)
    return _CachedStep(model, parts, inputs, shape)


class _CachedStep:
    """The prefill of a prompt, or one decoding step: the calls of `CachedModel`, with fixed lengths."""

    def __init__(self, model: fx.GraphModule, parts: DecodeSplit, inputs: Inputs, shape: StepShape) -> None:
        graph = graph_of(model)
        self.parts, self.shape = parts, shape
        self.once = {name: inputs[name] for name in parts.initial_inputs}
        self.again = {name: inputs[name] for name in parts.step_inputs if not graph.inputs[name].optional}
        self.reading = reading_module(model, graph, parts) if parts.initial_nodes else None
        self.stepping = stepping_module(model, graph, parts)
        self.dtype = next(model.parameters()).dtype
        self.cache = self._make_caches() if shape.mode == "decode" else {}

    def __call__(self, watch: Observer) -> Any:
        """Return the logits of the last token."""
        if self.shape.mode == "decode":
            lengths = {name: value for name, value in self.once.items() if value.dim() == 1}
            inputs = {name: value[:, :1] for name, value in self.again.items()} | self._taken(lengths)
            past = Past(self.shape.length - 1, self.shape.length, None)
            return self.stepping(**inputs, past=past, cache=self.cache, keep=1)
        inputs = self.again | self._taken(self._read_once())
        past = Past(0, self.shape.length, None)
        return self.stepping(**inputs, past=past, cache=self._make_caches(), keep=1)

    def _read_once(self) -> dict[str, Tensor]:
        """Return the inputs that are read only once, and the encoder's output for them."""
        if self.reading is None:
            return dict(self.once)
        results = self.reading(**{name: value for name, value in self.once.items() if name in inputs_of(self.reading)})
        outputs = zip(initial_value_names(self.parts), results, strict=True)
        return self.once | {name: value for name, value in outputs if value is not None}

    def _taken(self, values: Inputs) -> Inputs:
        return {name: value for name, value in values.items() if name in inputs_of(self.stepping)}

    def _make_caches(self) -> dict[str, list[list[Tensor]]]:
        """Return the caches by node and layer, with the length of the sequence."""
        shape, like = self.shape, torch.empty(0, dtype=self.dtype, device="meta")
        return empty_caches(self.parts, shape.batch, shape.length, lambda node: memory_of(node, shape), like)


def _training_step(model: fx.GraphModule, inputs: Inputs) -> StepFunction:
    """Run the forward pass, the loss of all positions in chunks as in `tfkit.Loss`, and the backward pass."""
    try:
        loss = Loss(model, outputs=dict.fromkeys(graph_of(model).outputs, 1.0))
    except ValueError:  # the model has no loss: the sum of all outputs stands for it
        return lambda _: _sum_of_outputs(model(**inputs)).backward()

    def step(watch: Observer) -> None:
        loss.in_pieces = partial(_RepeatedChunks, watch)
        reads = loss.read(inputs)
        shapes = {name: read.hidden.shape[:-1] for name, read in reads.items()}
        loss.of(
            reads, {name: torch.empty(shape, dtype=torch.long, device="meta") for name, shape in shapes.items()}
        ).backward()

    return step


class _RepeatedChunks(ChunkedLoss):
    """Runs the first chunk of a loss, a single chunk for all others of equal length, and the last, at the peak."""

    def __init__(self, watch: Observer, *args: Any) -> None:
        super().__init__(*args)
        self.watch = watch
        self.rest: list[Tensor] = []

    def _ranges(self, rows: Tensor, n_chunks: int) -> Iterator[tuple[int, int]]:
        self.rest = []
        if n_chunks < REPEATED:
            yield from super()._ranges(rows, n_chunks)
            return
        n_rows = rows.size(0)
        length, longer = divmod(n_rows, n_chunks)
        last = length + (longer > 0)
        yield 0, length
        counts = {length: n_chunks - longer - 1}
        counts[last] = (longer or counts[length]) - 1
        for size, count in counts.items():
            if count:
                with self.watch.repeated(count):
                    yield length, length + size
                if rows.requires_grad:
                    self.rest.append(self.watch.stand_in(rows, (count - 1) * size))
        yield n_rows - last, n_rows

    def _joined(self, of_rows: Sequence[Tensor]) -> Tensor:
        return super()._joined([*of_rows, *self.rest])


def _sum_of_outputs(out: Any) -> Tensor:
    """Return a number that depends on all outputs of a model."""
    return out.sum() if isinstance(out, Tensor) else torch.stack([_sum_of_outputs(output) for output in out]).sum()
