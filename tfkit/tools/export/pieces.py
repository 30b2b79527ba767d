"""Sequences read in steps by the programs of a file: the same calls for every format that has them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tfkit.decoding.modules import made_once
from tfkit.graph.expand import Graph, as_list
from tfkit.nn import is_token
from tfkit.tools.export.format import Inputs, Opened, Reader
from tfkit.tools.export.programs import DECODE, MODEL, PREFILL, READ, Caches, caches_of


class PieceReader:
    """Reads up to `length` tokens of each sequence in steps: the first by one program, then token by token."""

    def __init__(self, graph: Graph, caches: Caches, programs: Programs, *, length: int, like: Tensor) -> None:
        self._graph = graph
        self._caches = caches
        self._programs = programs
        self._length = length
        self._like = like
        self._batch: int | None = None
        self._always: dict[str, Any] = {}
        self._first: dict[str, Tensor] = {}
        self._lengths: Tensor | None = None
        self._used = 0

    def start(self, batch: int, /, **inputs: Tensor) -> None:
        """Begin new sequences, and read the inputs that are given once."""
        parts, values = self._caches.parts, dict(inputs)
        if parts.once:
            arguments = complete(self._graph, inputs, self._programs.takes(READ))
            values |= arguments | dict(zip(made_once(parts), self._programs.run(READ, arguments), strict=True))
        self._first = {name: values[name] for name in self._caches.first}
        memory = next((value.size(1) for value in self._first.values()), 1)
        again = (*parts.given_again, *(f"{name}_mask" for name in parts.given_again))
        always = complete(self._graph, values, [name for name in self._programs.takes(DECODE) if name not in again])
        self._always = {**always, "cache": self._caches.make(batch, self._length, memory, self._like)}
        self._batch, self._lengths, self._used = batch, None, 0

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, /, **inputs: Tensor) -> Any:
        """Return the outputs for the next tokens [b, t]; the mask is False at padding.

        Raise ValueError if the cache is full.
        """
        if self._batch is None:
            self.start(tokens.size(0))
        if self._used + tokens.size(1) > self._length:
            raise ValueError(f"{tokens.size(1)} more tokens do not fit: {self._used} of {self._length} have been read")
        main = self._caches.parts.given_again[0]
        real = is_token(mask, f"{main}_mask")
        mask = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        arguments = {main: tokens, f"{main}_mask": mask, **inputs}
        results = self._prefill(arguments) if self._lengths is None else self._decode(arguments, mask)
        read = mask.sum(dim=1)
        self._lengths = read if self._lengths is None else self._lengths + read
        self._used += tokens.size(1)
        return results[0] if len(results) == 1 else tuple(results)

    def _prefill(self, arguments: dict[str, Tensor]) -> list[Tensor]:
        taken = complete(self._graph, arguments | self._always | self._first, self._programs.takes(PREFILL))
        return self._programs.run(PREFILL, taken)

    def _decode(self, arguments: dict[str, Tensor], mask: Tensor) -> list[Tensor]:
        """Read several tokens one after the other."""
        columns = []
        for i in range(mask.size(1)):
            assert self._lengths is not None
            column_inputs = {name: value[:, i : i + 1].contiguous() for name, value in arguments.items()}
            column_inputs |= self._always | {"past": self._lengths + mask[:, :i].sum(dim=1)}
            columns.append(
                self._programs.run(DECODE, complete(self._graph, column_inputs, self._programs.takes(DECODE)))
            )
        return [torch.cat(column, dim=1) for column in zip(*columns, strict=True)]


def complete(graph: Graph, inputs: Inputs, names: Iterable[str]) -> dict[str, Tensor]:
    """Return all arguments of a program: missing masks hide nothing, missing optional tokens are 0."""
    arguments = dict(inputs)
    names = list(names)
    for name in names:
        if name in graph.inputs and name not in arguments:
            arguments[name] = torch.zeros_like(arguments[_beside(graph, name)])
    for name in names:
        if name.endswith("_mask") and name not in arguments and name.removesuffix("_mask") in arguments:
            hidden = arguments[name.removesuffix("_mask")]
            arguments[name] = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    return {name: arguments[name] for name in names if name in arguments}


def _beside(graph: Graph, name: str) -> str:
    """Return the input that an optional input describes."""
    for node in graph.nodes:
        if any(name in as_list(source) for source in node.wires.values()):
            return str(node.wires["input"])
    raise AssertionError(f"nothing reads `{name}`")


class Programs(Opened):
    """The programs of a file, see `tfkit.tools.export.programs`; `graph` is the graph of the exported model."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @abstractmethod
    def takes(self, name: str) -> Iterable[str]:
        """Return the argument names of a program."""

    @abstractmethod
    def run(self, name: str, arguments: dict[str, Any]) -> list[Tensor]:
        """Run a program and return its results. The tensors in `cache` are updated in place."""

    def forward(self, inputs: Inputs) -> list[Tensor]:
        return self.run(MODEL, complete(self.graph, inputs, self.takes(MODEL)))

    def cached(self, length: int) -> Reader | None:
        caches = caches_of(self.graph)
        like = next(iter(self.weights().values()), torch.empty(0))
        return None if caches is None else PieceReader(self.graph, caches, self, length=length, like=like)
