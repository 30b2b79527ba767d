"""One observed run of a model on the meta device: the work, memory and traffic of each component.

Matrix products are counted with the formulas of `torch.utils.flop_counter`, for the component that is running. In the
backward pass, the sequence number of an autograd node identifies the component that created it.

A plugin's component needs no declaration of its costs. Only the routing of experts, which no run can reveal, is
stated by a module: `StackedLinear` contains the number of layers that a token uses.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from tfkit.tools.cost.shape_rules import rule_of
from tfkit.torch_private import dispatch
from tfkit.torch_private.tensors import storage_key, tensors_in


@dataclass
class Tally:
    """The work of one component: FLOPs of the forward and of the backward pass, and bytes."""

    flops: list[int] = field(default_factory=lambda: [0, 0])
    scores: list[int] = field(default_factory=lambda: [0, 0])
    hidden: list[float] = field(default_factory=lambda: [0.0, 0.0])
    saved: int = 0
    products: int = 0
    """Bytes of the results of matrix products and of attention in the forward."""
    read: dict[int, int] = field(default_factory=dict)
    """Bytes that the component read from other components, by storage."""
    weights: dict[int, int] = field(default_factory=dict)
    written: int = 0
    learned: int = 0
    """Bytes that were read from tensors with gradients."""

    @property
    def moved(self) -> int:
        """Bytes moved by the forward pass."""
        return sum(self.weights.values()) + sum(self.read.values()) + self.written

    @property
    def moved_back(self) -> int:
        """Bytes moved by the backward pass in addition to saved tensors: weights, and all gradients."""
        return 2 * sum(self.weights.values()) + self.learned + self.written

    def repeat(self, before: Tally, times: int, sizes: Mapping[int, int]) -> None:
        """Add everything counted since `before` another `times` times. `sizes` are the bytes of each storage."""
        for mine, old in ((self.flops, before.flops), (self.scores, before.scores)):
            mine[:] = [now + times * (now - then) for now, then in zip(mine, old, strict=True)]
        self.hidden = [now + times * (now - then) for now, then in zip(self.hidden, before.hidden, strict=True)]
        self.saved += times * (self.saved - before.saved)
        self.written += times * (self.written - before.written)
        self.learned += times * (self.learned - before.learned)
        for now_read, then_read in ((self.read, before.read), (self.weights, before.weights)):
            for key, n in now_read.items():
                if key not in then_read:  # each repetition creates such a storage
                    now_read[key] += times * n
                elif n != then_read[key]:  # all repetitions read this storage
                    now_read[key] = min(n + times * (n - then_read[key]), sizes[key])


class Tallies:
    """The tallies of one part of a run, by module path."""

    def __init__(self, layer: str = "") -> None:
        self.layer = layer
        self.tallies: dict[str, Tally] = {}

    def tally(self, path: str) -> Tally:
        """Return the tally of a module."""
        return self.tallies.setdefault(path, Tally())


class PairAxes(NamedTuple):
    """Lengths of the axes by which products of query-key pairs are recognized."""

    queries: frozenset[int]
    """Number of queries, and of the queries of several heads in one axis."""
    keys: int

    def match(self, func: Any, args: Any) -> bool:
        """Return True if a batched product has an axis of queries and another axis of keys."""
        if func not in _BATCHED_PRODUCTS:
            return False
        left, right = args[-2:]
        axes = [left.size(1), left.size(2), right.size(2)]
        return any(n == self.keys and {*axes[:i], *axes[i + 1 :]} & self.queries for i, n in enumerate(axes))


class Position(NamedTuple):
    """The running component, and the fraction of its query-key pairs that a mask hides.

    `pairs` describes the products of query-key pairs in an attention without a core. In a core, it is None: all
    products are of pairs.
    """

    record: Tallies
    path: str
    hidden: float | None = None
    pairs: PairAxes | None = None


class Observer(dispatch.DispatchMode):
    """Observes every operation of a model's run, forward and backward."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = LiveMemory(self._forget)
        self.weights = {self.live.number(weight) for weight in weights}
        self.root = Tallies()
        self.positions = [Position(self.root, "")]
        self.kept: dict[int, Tally] = {}
        self.keeps = True
        self._sizes: dict[int, int] = {}
        self._makers: dict[int, Tally] = {}
        self._made_in: list[tuple[int, Position]] = [(0, self.positions[0])]
        self._from_weights: set[int] = set(self.weights)
        self._pair_nodes: set[int] = set()

    @property
    def position(self) -> Position:
        """The current position in the forward pass."""
        return self.positions[-1]

    @contextmanager
    def inside(self, position: Position) -> Iterator[None]:
        """Assign everything that runs inside this context to a position."""
        self.enter(position)
        try:
            yield
        finally:
            self.leave()

    def enter(self, position: Position) -> None:
        """Assign everything that runs from now on to a position."""
        self.positions.append(position)
        self._made_in.append((dispatch.next_number(), position))

    def leave(self) -> None:
        """Assign everything that runs from now on to the previous position."""
        self.positions.pop()
        self._made_in.append((dispatch.next_number(), self.position))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in inputs:
            self.live.number(tensor)
        node = dispatch.running_node()
        rule = _first_argument if node is not None and self._adds_up(func, args) else rule_of(func)
        out = func(*args, **kwargs) if rule is None else rule(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            pairs = self._multiplies_pairs(func, args, inputs)
            self.count(formula(*args, **kwargs, out_val=out), tensors_in(out), pairs=pairs)
        outputs = [tensor for tensor in tensors_in(out) if self.live.add(tensor)]
        if node is None:
            self._move(func, inputs, outputs)
            if inputs and self._from_weights.issuperset(map(self.live.number, inputs)):  # a copy, such as a cast
                self._from_weights.update(map(self.live.number, outputs))
        return out

    def _adds_up(self, func: Any, args: Any) -> bool:
        """Return True if the operation adds two gradients, which the backward pass does in place if unobserved."""
        if func is not torch.ops.aten.add.Tensor or not isinstance(args[1], Tensor):
            return False
        equal = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
        return equal and self.live.number(args[0]) not in self.kept

    def _multiplies_pairs(self, func: Any, args: Any, inputs: list[Tensor]) -> bool:
        """Return True for a product of pairs in an attention without a core, and for the products of its backward.

        No factor is computed from weights alone. The shapes of a backward product do not distinguish the gradient of a
        weight, but its autograd node does.
        """
        node, axes = dispatch.running_node(), self.position.pairs
        if node is not None:
            return dispatch.number_of(node) in self._pair_nodes
        if axes is None or not self._from_weights.isdisjoint(map(self.live.number, inputs)):
            return False
        if not axes.match(func, args):
            return False
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            self._pair_nodes.add(dispatch.next_number() - 1)
        return True

    def count(self, flops: int, results: Iterable[Tensor] = (), *, pairs: bool = True) -> None:
        """Add FLOPs to the running component, and the bytes of their results in the forward pass.

        `pairs` is False for products in an attention without a core that are not of query-key pairs.
        """
        node = dispatch.running_node()
        location = self.position if node is None else self._maker(node)
        tally, phase = location.record.tally(location.path), int(node is not None)
        tally.flops[phase] += flops
        tally.products += 0 if phase else sum(tensor.nbytes for tensor in results)
        if location.hidden is not None and (pairs or location.pairs is None):
            tally.scores[phase] += flops
            tally.hidden[phase] += flops * location.hidden

    def _maker(self, node: Any) -> Position:
        at = bisect_right(self._made_in, dispatch.number_of(node), key=lambda entry: entry[0])
        return self._made_in[at - 1][1]

    def _move(self, func: Any, args: list[Tensor], outputs: list[Tensor]) -> None:
        """Record the tensors that a forward operation exchanges with other components, as inputs and as outputs."""
        tally = self.position.record.tally(self.position.path)
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
        """Record that a component reads a tensor. The producer of the tensor counts it as well."""
        key, n = self.live.number(tensor), tensor.nbytes if limit is None else limit
        self._sizes[key] = storage_bytes(tensor)
        if key in self.weights:
            tally.weights[key] = min(tally.weights.get(key, 0) + n, storage_bytes(tensor))
            return
        maker = self._makers.get(key)
        if maker is tally:
            return
        if maker is not None:
            maker.written += storage_bytes(tensor)
            self._makers[key] = _NOBODY
        before = tally.read.get(key, 0)
        tally.read[key] = min(before + n, storage_bytes(tensor))
        if tensor.requires_grad:
            tally.learned += tally.read[key] - before

    def keep(self, tensor: Tensor) -> Tensor:
        """Record that a tensor is saved for the backward pass, once for each storage."""
        key = self.live.number(tensor)
        if self.keeps and key not in self.weights and key not in self.kept:
            self.kept[key] = self.position.record.tally(self.position.path)
            self.kept[key].saved += storage_bytes(tensor)
        return tensor.detach()  # else an output would refer to its operation, which refers to the output

    def restore(self, tensor: Tensor) -> Tensor:
        """Return a saved tensor. The backward pass has begun, and from now on frees the saved tensors."""
        self.live.dropped = None
        return tensor

    def _forget(self, key: int, size: int) -> None:
        """Stop counting a storage that is freed before the backward pass: no output depends on its operation."""
        tally = self.kept.pop(key, None)
        if tally is not None:
            tally.saved -= size

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count the work inside this context several times for each component, and its memory once."""
        before = copy.deepcopy(self.root.tallies)
        yield
        for path, tally in self.root.tallies.items():
            tally.repeat(before.get(path, _NOBODY), times - 1, self._sizes)

    def stand_in(self, rows: Tensor, count: int) -> Tensor:
        """Return `count` rows that use memory, and that belong to no component."""
        substitute = rows.new_empty(count, *rows.shape[1:])
        self._makers.pop(self.live.number(substitute), None)
        return substitute

    def read_all(self, tensors: Iterable[Tensor]) -> None:
        """Record that the running component reads tensors."""
        for tensor in tensors:
            self.read(tensor, self.position.record.tally(self.position.path))


_NOBODY = Tally()


def _first_argument(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


_BATCHED_PRODUCTS = {torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default}
_LOOKUPS = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default}
"""Operations that read only those values of a tensor that they return."""


# ---- live memory: nothing is allocated on the meta device, but everything has a size ----


class LiveMemory:
    """Bytes of watched storages that still exist: `level` is the current number, `peak` the maximum since it was set.

    `dropped`, if set, is called with the number and the bytes of each storage that is freed.
    """

    def __init__(self, dropped: Callable[[int, int], Any] | None = None) -> None:
        self.dropped = dropped
        self.level = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._next = count()

    def add(self, tensor: Tensor) -> bool:
        """Watch the storage of a tensor; return True if the storage is new."""
        if not self._meet(tensor):
            return False
        self._sizes[storage_key(tensor)] = storage_bytes(tensor)
        self.grow(storage_bytes(tensor))
        return True

    def number(self, tensor: Tensor) -> int:
        """Return a number that is equal for tensors that share memory, and that no freed storage had."""
        self._meet(tensor)
        return self._numbers[storage_key(tensor)]

    def grow(self, n: int) -> None:
        """Add bytes that belong to no watched storage, or remove them if `n` is negative."""
        self.level += n
        self.peak = max(self.peak, self.level)

    def _meet(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._numbers:
            return False
        self._numbers[key], self._sizes[key] = next(self._next), 0
        weakref.finalize(storage, self._drop, key)  # another storage may have the same address later
        return True

    def _drop(self, key: int) -> None:
        size = self._sizes.pop(key)
        self.level -= size
        number = self._numbers.pop(key)
        if self.dropped is not None:
            self.dropped(number, size)


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's storage; the tensor may be a view of a part."""
    return tensor.untyped_storage().nbytes()


# ---- kernels that keep for the backward what a real device keeps: on the meta device torch would use others ----
#
# `scaled_dot_product_attention` is one kernel that keeps queries, keys, values, its output and a number per query; if
# there is none, on the CPU with dropout or a learned mask, torch computes it step by step, and so does this. The FLOPs
# are the same. Dropout keeps one byte for each value on CUDA, and its factors in the model's type on the CPU.


Kernels = Literal["cuda", "cpu"]


class DeviceKernels(TorchFunctionMode):
    """Runs attention and dropout as the kernels of a device do; `watch` receives the FLOPs of attention."""

    def __init__(self, watch: Observer, kernels: Kernels) -> None:
        super().__init__()
        self.watch = watch
        self.cuda = kernels == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (inputs := self._fused(*args, **kwargs)):
            return Attend.apply(self.watch, *inputs)
        if func is F.dropout and self.cuda:
            return _fused_dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
        """Return the arguments of the fused kernel; None if the device has no fused kernel for them."""
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = attn_mask.to(query.dtype)  # each call of the kernel converts the mask, and saves the result
        learned = attn_mask is not None and attn_mask.requires_grad
        fused = self.cuda or (dropout_p == 0 and not learned and query.size(3) == value.size(3))
        return (query, key, value, attn_mask) if fused else None


def _fused_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


class Attend(torch.autograd.Function):
    """Queries [b, h, q, d], keys [b, g, k, d], values [b, g, k, v] and a mask -> [b, h, q, v], in one kernel."""

    @staticmethod
    def forward(ctx: Any, watch: Observer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(q)  # the kernels follow the strides of the queries
        if q.size(3) != v.size(3):
            out = q.new_empty(q.size(0), q.size(2), q.size(1), v.size(3)).transpose(1, 2)
        ctx.watch, ctx.flops = watch, 2 * q.size(0) * q.size(1) * q.size(2) * k.size(2) * (q.size(3) + v.size(3))
        sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        watch.count(ctx.flops, (out, sums))
        watch.read_all([q, k, v] if mask is None else [q, k, v, mask])
        ctx.save_for_backward(q, k, v, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, mask, _, _ = ctx.saved_tensors
        ctx.watch.count(2 * ctx.flops)
        grads = [
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip((q, k, v), ctx.needs_input_grad[1:4], strict=True)
        ]
        of_mask = None
        if ctx.needs_input_grad[4]:  # of each sequence and head, before shared ones are summed
            scores = q.new_empty(*q.shape[:3], k.size(2))
            of_mask = torch.empty_like(mask) if scores.shape != mask.shape else scores
        return None, *grads, of_mask
