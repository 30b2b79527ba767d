"""One watched run of a model on the meta device: the work, memory and traffic of each component.

Matrix products are counted as `torch.utils.flop_counter` does, by its own formulas, and belong to the component that is
running. In the backward, the number of an autograd node tells when it was made, and so to whom it belongs.

A plugin's component needs no declaration of its costs. Only the routing of experts, which no run can reveal, is
stated by a module: `StackedLinear` contains the number of layers that a token uses.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tfkit.tools.cost.live_memory import LiveMemory, nbytes
from tfkit.tools.cost.shapes import rule_of
from tfkit.torch_private import dispatch
from tfkit.torch_private.tensors import tensors_in


@dataclass
class Tally:
    """The work of one component: FLOPs by forward and backward, and bytes."""

    flops: list[int] = field(default_factory=lambda: [0, 0])
    scores: list[int] = field(default_factory=lambda: [0, 0])
    hidden: list[float] = field(default_factory=lambda: [0.0, 0.0])
    saved: int = 0
    read: dict[int, int] = field(default_factory=dict)
    """Bytes that it read from other components, by storage."""
    weights: dict[int, int] = field(default_factory=dict)
    written: int = 0
    learned: int = 0
    """Bytes that were read from tensors with gradients."""

    @property
    def moved(self) -> int:
        """Bytes of the forward."""
        return sum(self.weights.values()) + sum(self.read.values()) + self.written

    @property
    def moved_back(self) -> int:
        """Bytes of the backward in addition to saved tensors: weights, and all gradients."""
        return 2 * sum(self.weights.values()) + self.learned + self.written

    def repeat(self, before: Tally, times: int, sizes: Mapping[int, int]) -> None:
        """Add everything that was counted since `before` that many times. `sizes` are the bytes of each storage."""
        for mine, old in ((self.flops, before.flops), (self.scores, before.scores)):
            mine[:] = [now + times * (now - then) for now, then in zip(mine, old, strict=True)]
        self.hidden = [now + times * (now - then) for now, then in zip(self.hidden, before.hidden, strict=True)]
        self.saved += times * (self.saved - before.saved)
        self.written += times * (self.written - before.written)
        self.learned += times * (self.learned - before.learned)
        for now_read, then_read in ((self.read, before.read), (self.weights, before.weights)):
            for key, n in now_read.items():
                if key not in then_read:  # each repetition makes such a storage
                    now_read[key] += times * n
                elif n != then_read[key]:  # all of them read this one
                    now_read[key] = min(n + times * (n - then_read[key]), sizes[key])


class Record:
    """The tallies of a stretch of a run, by module path."""

    def __init__(self, layer: str = "") -> None:
        self.layer = layer
        self.tallies: dict[str, Tally] = {}

    def tally(self, path: str) -> Tally:
        """Return the tally of a module."""
        return self.tallies.setdefault(path, Tally())


class Place(NamedTuple):
    """The position of a run: a component, and in it the pairs of query and key, of which a mask hides a share."""

    record: Record
    path: str
    hidden: float | None = None


class Watch(dispatch.DispatchMode):
    """Observes every operation of a run, forward and backward, of a model with these weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = LiveMemory()
        self.weights = {self.live.number(weight) for weight in weights}
        self.root = Record()
        self.places = [Place(self.root, "")]
        self.kept: dict[int, Tally] = {}
        self.keeps = True
        self._sizes: dict[int, int] = {}
        self._makers: dict[int, Tally] = {}
        self._made_in: list[tuple[int, Place]] = [(0, self.places[0])]

    @property
    def place(self) -> Place:
        """The position of the forward."""
        return self.places[-1]

    @contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        """Assign everything that runs within to that place."""
        self.enter(place)
        try:
            yield
        finally:
            self.leave()

    def enter(self, place: Place) -> None:
        """Assign everything that runs from now on to that place."""
        self.places.append(place)
        self._made_in.append((dispatch.next_number(), place))

    def leave(self) -> None:
        """Assign everything that runs from now on to the previous place."""
        self.places.pop()
        self._made_in.append((dispatch.next_number(), self.place))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in inputs:
            self.live.number(tensor)
        node = dispatch.running_node()
        rule = _first if node is not None and self._adds_up(func, args) else rule_of(func)
        out = func(*args, **kwargs) if rule is None else rule(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.count(formula(*args, **kwargs, out_val=out))
        outputs = [tensor for tensor in tensors_in(out) if self.live.add(tensor)]
        if node is None:
            self._move(func, inputs, outputs)
        return out

    def _adds_up(self, func: Any, args: Any) -> bool:
        """Return True if the backward adds one gradient to another: in place, as it does unobserved."""
        if func is not torch.ops.aten.add.Tensor or not isinstance(args[1], Tensor):
            return False
        equal = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
        return equal and self.live.number(args[0]) not in self.kept

    def count(self, flops: int) -> None:
        """Add FLOPs to whatever is running."""
        node = dispatch.running_node()
        place = self.place if node is None else self._maker(node)
        tally, phase = place.record.tally(place.path), int(node is not None)
        tally.flops[phase] += flops
        if place.hidden is not None:
            tally.scores[phase] += flops
            tally.hidden[phase] += flops * place.hidden

    def _maker(self, node: Any) -> Place:
        at = bisect_right(self._made_in, dispatch.number_of(node), key=lambda entry: entry[0])
        return self._made_in[at - 1][1]

    def _move(self, func: Any, args: list[Tensor], outputs: list[Tensor]) -> None:
        """Record the tensors of others that an operation of the forward reads, and those that it writes for others."""
        tally = self.place.record.tally(self.place.path)
        for tensor in outputs:
            self._makers[self.live.number(tensor)] = tally
        if dispatch.is_view(func):
            return
        limit = sum(tensor.nbytes for tensor in outputs) if func in _LOOKUPS else None
        changed = dispatch.is_mutable(func) and bool(args)
        if changed and self._makers.get(self.live.number(args[0])) is not tally:
            tally.written += max((tensor.nbytes for tensor in args[1:]), default=0)
        for tensor in args[1:] if changed else args:
            self.read(tensor, tally, limit)

    def read(self, tensor: Tensor, tally: Tally, limit: int | None = None) -> None:
        """Record that a component reads a tensor: it counts for its producer, too."""
        key, n = self.live.number(tensor), tensor.nbytes if limit is None else limit
        self._sizes[key] = nbytes(tensor)
        if key in self.weights:
            tally.weights[key] = min(tally.weights.get(key, 0) + n, nbytes(tensor))
            return
        maker = self._makers.get(key)
        if maker is tally:
            return
        if maker is not None:
            maker.written += nbytes(tensor)
            self._makers[key] = _NOBODY
        before = tally.read.get(key, 0)
        tally.read[key] = min(before + n, nbytes(tensor))
        if tensor.requires_grad:
            tally.learned += tally.read[key] - before

    def keep(self, tensor: Tensor) -> Tensor:
        """Record that a tensor is kept for the backward, once for each storage."""
        key = self.live.number(tensor)
        if self.keeps and key not in self.weights and key not in self.kept:
            self.kept[key] = self.place.record.tally(self.place.path)
            self.kept[key].saved += nbytes(tensor)
        return tensor

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count the work inside this context several times for each component, and its memory once."""
        before = copy.deepcopy(self.root.tallies)
        yield
        for path, tally in self.root.tallies.items():
            tally.repeat(before.get(path, _NOBODY), times - 1, self._sizes)

    def stand_in(self, rows: Tensor, count: int) -> Tensor:
        """Return as many rows that take memory, and that no component made."""
        substitute = rows.new_empty(count, *rows.shape[1:])
        self._makers.pop(self.live.number(substitute), None)
        return substitute

    def read_all(self, tensors: Iterable[Tensor]) -> None:
        """Record that the running component reads tensors."""
        for tensor in tensors:
            self.read(tensor, self.place.record.tally(self.place.path))


_NOBODY = Tally()


def _first(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


_LOOKUPS = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default}
"""Operations that read no more of a tensor than they return."""
