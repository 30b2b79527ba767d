"""The layout operation of a weight map: a pattern that rearranges a list of tensors into another list.

A pattern has the syntax of einops (https://openreview.net/forum?id=oapKSVM2bcj), and can also join axes:

    i o -> o i                                           transpose
    [q k v] i -> q i, k i, v i                           rows of q, then k, then v: three tensors, each a slice
    q i, k i, v i -> [q k v] i                           and joined again
    (h [q k v] d) i -> [(h q d) (h k d) (h v d)] i       fused per head; then all queries, all keys, all values
    (h [(t d) p]) i -> (h [(d t) p]) i                   rotary rows of each head permuted, the other p kept
    e (f [gate up]) -> e [(gate f) (up f)]               even elements first, then odd elements, where gate = up = 1
    1 e -> e                                             an axis of size 1 removed

A pattern has two sides around `->`, a side has tensors with `,` between them, a tensor has axes. An axis is a name;
`1`; a product `(a b)` of axes, the last of which varies fastest; or a join `[a b]` of axes, one after the other.

A *block* consists of one item of each join of a tensor and all axes outside joins. It is identified by the set of its
names: the tensor `(h [q k v] d) i` has the blocks `h q d i`, `h k d i` and `h v d i`. Both sides must have the same
blocks, each once. A pattern therefore loses and adds nothing, has an inverse, and works for any dtype.

A *resizing* pattern may also have names on only one side: the result is the mean over names of the left side, and is
repeated over names of the right side. A pattern cannot have both, because a misspelt name would then be accepted:

    (g r d) i -> (g d) i                                 the mean of r heads for each of g groups
    f i -> e f i                                         a matrix for each of e experts
    o i -> o (i c) / 2                                   each column c times, and all values divided by 2
    f i -> [f 0] i                                       rows of zeros after the other rows
    f i -> [f ?] i                                       rows that are left as they are

Sizes of names are set, or follow from the tensors: an axis with one unknown name determines the size of that name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, product
from math import prod
from typing import Literal

from torch import Tensor

from tfkit.errors import Diagnostic, Invalid, Source, closest_name, listing, quoted

MAX_LENGTH = 1000
MAX_NAMES = 64
MAX_BLOCKS = 256  # the number of blocks grows exponentially with the number of joins

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIVISOR = re.compile(r"\s*/\s*([0-9]+(?:\.[0-9]+)?)\s*$", re.ASCII)
ZERO, UNCHANGED = "0", "?"
"""Items of a join on the right side of a resizing pattern: zeros, and values that the result already has."""
_TOKEN = re.compile(rf"\s*(->|\.+|{_NAME.pattern}|[0-9]\w*|\S|$)", re.ASCII)
_CLOSES = {"(": ")", "[": "]"}
_KINDS: dict[str, Literal["product", "join"]] = {"(": "product", "[": "join"}

Kind = Literal["name", "product", "join"]
Columns = tuple[int, int]  # a range of characters in the pattern
Names = tuple[str, ...]
Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Blocks = Mapping[frozenset[str], tuple[Names, Tensor]]


class PatternError(Invalid):
    """An error in a pattern, or in the tensors and sizes to which it is applied.

    `columns` is the invalid range of `text`. The message shows the text with carets below that range.
    """

    def __init__(self, message: str, text: str, columns: Columns, *, note: str = "", help: str | None = None) -> None:
        super().__init__("", message, notes=[note] if note else [], help=help)
        self.text = text
        self.columns = columns

    def __str__(self) -> str:
        span = Source("pattern", self.text).span(*self.columns)
        return Diagnostic(self.message, span, notes=self.notes, help=self.help).render()


@dataclass(frozen=True, eq=False)
class Axis:
    """A name, or a product or join of items. `1` is the empty product, and a tensor is the product of its axes."""

    columns: Columns
    blocks: tuple[Names, ...]
    items: tuple[Axis, ...] = ()
    kind: Kind = "product"

    @cached_property
    def names(self) -> Names:
        return tuple(dict.fromkeys(chain.from_iterable(self.blocks)))

    def unknown(self, sizes: Sizes) -> list[str]:
        return [name for name in self.names if name not in sizes]

    def size(self, sizes: Sizes) -> int:
        return sum(prod(sizes[name] for name in block) for block in self.blocks)

    def shape(self, sizes: Sizes) -> Shape:
        return tuple(item.size(sizes) for item in self.items)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A bit-exact, invertible rearrangement of tensors.

    `source` and `target` have a product of axes for each tensor. In an inverse, `source` is the right side of `text`.
    """

    text: str
    source: tuple[Axis, ...] = field(repr=False)
    target: tuple[Axis, ...] = field(repr=False)
    divisor: float = 1.0
    """The number by which a resizing pattern divides all values."""

    @classmethod
    def parse(cls, text: str, *, resizing: bool = False) -> Pattern:
        """Parse a pattern that maps the left side to the right side. The time is bounded for any text.

        A `resizing` pattern may have names on only one side, joins with `0` and `?`, and a divisor. It has no inverse.

        Raises:
            PatternError: the text is not a pattern, is too large, or its two sides do not have the same blocks.
        """
        names = set(_NAME.findall(text))
        for noun, limit, count in [("characters", MAX_LENGTH, len(text)), ("names", MAX_NAMES, len(names))]:
            if count > limit:
                raise PatternError(f"a pattern must have at most {limit} {noun}; got {count}", text, (0, len(text)))
        division = _DIVISOR.search(text) if resizing else None
        divisor = float(division[1]) if division else 1.0
        if division and not divisor:
            raise PatternError("a pattern cannot divide by 0", text, division.span(1))
        source, target = _parsed_sides(text if division is None else text[: division.start()], resizing=resizing)
        pattern = cls(text, source, target, divisor)
        left, right = pattern.names_of_sides
        _check_blocks(pattern, left & right if resizing and (left <= right or right <= left) else left | right)
        return pattern

    @cached_property
    def names_of_sides(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of `source` and of `target`, which differ in a resizing pattern."""
        left, right = (
            frozenset(name for tensor in side for name in tensor.names if not _is_fill(name))
            for side in (self.source, self.target)
        )
        return left, right

    @cached_property
    def shared(self) -> frozenset[str]:
        """The names that are on both sides."""
        return frozenset.intersection(*self.names_of_sides)

    @property
    def names(self) -> Set[str]:
        """All names, in order. Their sizes are set, or follow from the tensors."""
        return dict.fromkeys(_NAME.findall(self.text)).keys()

    def inverse(self) -> Pattern:
        """Return the inverse pattern. With the same sizes, it restores the original tensors."""
        return Pattern(self.text, self.target, self.source)

    def shapes(self, shapes: Sequence[Sequence[int]], sizes: Sizes, required: Sequence[Shape] = ()) -> list[Shape]:
        """Return the shapes of the results of `apply` for tensors of these shapes. Raises the same errors."""
        solved = self._solve([tuple(shape) for shape in shapes], sizes, required)
        return [tensor.shape(solved) for tensor in self.target]

    def apply(
        self,
        tensors: Sequence[Tensor],
        sizes: Sizes,
        required: Sequence[Shape] = (),
        unchanged: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Rearrange tensors.

        The results are views where possible. Joins copy, and so do products whose axes are not adjacent in memory.

        Args:
            tensors: of any dtype and on any device, meta included.
            sizes: sizes of names. A size that follows from the tensors may be omitted.
            required: the required shapes of the results, from which sizes also follow.
            unchanged: for a resizing pattern, tensors of the required shapes with the values that `?` leaves.

        Raises:
            PatternError: number or shapes of the tensors do not fit, joined tensors differ in dtype or device, or a
                size is missing, invalid, or set for an unknown name.
        """
        solved = self._solve([tuple(tensor.shape) for tensor in tensors], sizes, required)
        views = chain.from_iterable(_block_views(*pair, solved) for pair in zip(tensors, self.source, strict=True))
        blocks = dict(self._averaged(names, view) for names, view in views)
        if self.divisor != 1:
            blocks = {names: (order, view / self.divisor) for names, (order, view) in blocks.items()}
        values: Sequence[Tensor | None] = unchanged or [None] * len(self.target)
        return [self._arranged(*pair, blocks, solved) for pair in zip(self.target, values, strict=True)]

    def _averaged(self, names: Names, view: Tensor) -> tuple[frozenset[str], tuple[Names, Tensor]]:
        """Return a block under the set of its shared names, averaged over the names of the left side only."""
        dims = [dim for dim, name in enumerate(names) if name not in self.shared]
        averaged = tuple(name for name in names if name in self.shared)
        return frozenset(averaged), (averaged, view.mean(dims) if dims else view)

    def _block(self, blocks: Blocks, names: Names, sizes: Sizes) -> Tensor:
        """Return the block with its axes in the order of `names`, repeated over the names of the right side."""
        order, view = blocks[frozenset(names) & self.shared]
        view = view.permute([order.index(name) for name in names if name in self.shared])
        for dim in (dim for dim, name in enumerate(names) if name not in self.shared):
            view = view.unsqueeze(dim)
        return view.expand([sizes[name] for name in names])

    def _arranged(self, tensor: Axis, unchanged: Tensor | None, blocks: Blocks, sizes: Sizes) -> Tensor:
        first, *rest = (self._block(blocks, names, sizes) for names in tensor.blocks if not any(map(_is_fill, names)))
        if not rest and len(tensor.blocks) == 1:
            return first.reshape(tensor.shape(sizes))
        kinds = dict.fromkeys(f"{block.dtype} on {block.device}" for block in (first, *rest))
        if len(kinds) > 1:  # a copy would convert silently
            raise PatternError(
                f"tensors of several kinds cannot be joined: {listing(kinds)}", self.text, tensor.columns
            )
        joined = first.new_empty(tensor.shape(sizes)) if unchanged is None else unchanged.to(first, copy=True)
        for names, view in _block_views(joined, tensor, sizes):  # each block is copied only once
            fills = {name[0] for name in names if _is_fill(name)}
            if ZERO in fills:
                view.zero_()
            elif not fills:
                view.copy_(self._block(blocks, names, sizes))
        return joined

    def _solve(self, shapes: Sequence[Shape], set_sizes: Sizes, required: Sequence[Shape]) -> dict[str, int]:
        """Return the size of every name, consistent with the sizes of all axes."""
        self._check_given(shapes, set_sizes)
        tensors = [*zip(self.source, shapes, strict=True), *zip(self.target, required, strict=bool(required))]
        axes = [(*pair, shape) for tensor, shape in tensors for pair in zip(tensor.items, shape, strict=True)]
        sizes = dict(set_sizes)
        while ready := [pair for pair in axes if len(pair[0].unknown(sizes)) == 1]:
            sizes.update(self._inferred(*ready[0], sizes))
        for axis, size, shape in axes:
            if unknown := axis.unknown(sizes):
                message = f"{self._quoted(axis)} of size {size} does not determine {listing(map(quoted, unknown))}"
                raise PatternError(message, self.text, axis.columns, help="set the sizes of all names but one")
            if axis.size(sizes) != size:
                raise self._misfit(axis, shape, f"is {size} instead of {axis.size(sizes)}", sizes)
        return sizes

    def _inferred(self, axis: Axis, size: int, shape: Shape, sizes: Sizes) -> dict[str, int]:
        (name,) = axis.unknown(sizes)
        # No block has a name twice, so the size of an axis is a linear function of the size of one name.
        at_0, at_1 = (axis.size({**sizes, name: value}) for value in (0, 1))
        value, rest = divmod(size - at_0, at_1 - at_0)
        if rest or value < 1:
            raise self._misfit(axis, shape, f"is {size}, which no size of {quoted(name)} gives", sizes)
        return {name: value}

    def _check_given(self, shapes: Sequence[Shape], sizes: Sizes) -> None:
        if len(shapes) != len(self.source):
            columns = self.source[0].columns[0], self.source[-1].columns[1]
            raise PatternError(f"the pattern takes {len(self.source)} tensors; got {len(shapes)}", self.text, columns)
        for tensor, shape in zip(self.source, shapes, strict=True):
            if len(tensor.items) != len(shape):
                message = (
                    f"the tensor must have {len(tensor.items)} axes; got {len(shape)}, with shape {_shape_text(shape)}"
                )
                raise PatternError(message, self.text, tensor.columns)
        for name, size in sizes.items():
            if name not in self.names:
                near = closest_name(name, self.names)
                note = f"names: {listing(map(quoted, self.names)) or 'none'}"
                help = f"a name of the pattern is similar: {quoted(near)}" if near else None
                message = f"the pattern has no name {quoted(name)}"
                raise PatternError(message, self.text, (0, len(self.text)), note=note, help=help)
            if type(size) is not int or size < 1:
                message = f"the size of {quoted(name)} must be a positive integer; got {quoted(repr(size))}"
                raise PatternError(message, self.text, (0, len(self.text)))

    def _misfit(self, axis: Axis, shape: Shape, why: str, sizes: Sizes) -> PatternError:
        set_sizes = ", ".join(f"{name} = {sizes[name]}" for name in axis.names if axis.items and name in sizes)
        message = (
            f"{self._quoted(axis)} {why}{set_sizes and f' with {set_sizes}'}, in a tensor of shape {_shape_text(shape)}"
        )
        return PatternError(message, self.text, axis.columns)

    def _quoted(self, axis: Axis) -> str:
        return quoted(self.text[slice(*axis.columns)])


def _is_fill(name: str) -> bool:
    """Return True for the name of zeros or of unchanged values."""
    return name[0] in (ZERO, UNCHANGED)


def _parsed_sides(text: str, *, resizing: bool) -> list[tuple[Axis, ...]]:
    """Return the two sides of a pattern."""
    fills = 0
    sides: list[list[Axis]] = [[]]
    open_: list[tuple[str, int, list[Axis]]] = [("", 0, [])]  # character, location, items
    for match in _TOKEN.finditer(text.rstrip()):
        token, columns = match[1], match.span(1)
        opener, begin, items = open_[-1]
        ends = [_CLOSES[opener]] if opener else [",", "->" if len(sides) == 1 else ""]
        if token in _CLOSES:
            open_.append((token, columns[0], []))
        elif token == "1" or _NAME.fullmatch(token):
            items.append(Axis(columns, ((),)) if token == "1" else Axis(columns, ((token,),), kind="name"))
        elif resizing and token in (ZERO, UNCHANGED) and opener == "[" and len(sides) == 2:
            items.append(Axis(columns, ((token + "'" * fills,),), kind="name"))  # each has a separate size
            fills += 1
        elif token not in ends or not (items or token == "->"):  # a scalar has no axes
            raise _unexpected_token(token, text, columns, ends if items else [])
        elif opener:
            open_.pop()
            open_[-1][2].append(_axis_of_items(text, (begin, columns[1]), items, _KINDS[opener]))
        else:
            location = (items[0].columns[0], items[-1].columns[1]) if items else columns
            sides[-1].append(_axis_of_items(text, location, items))
            open_ = [("", 0, [])]
            sides += [[]] if token == "->" else []
    return [tuple(side) for side in sides]


def _unexpected_token(token: str, text: str, columns: Columns, ends: Sequence[str]) -> PatternError:
    *choices, last = ["a name", *(quoted(word) if word else "the end" for word in ["1", "(", "[", *ends])]
    message = f"found {quoted(token) if token else 'the end'} where {', '.join(choices)} or {last} is expected"
    help = "write a name for the axis, and set its size next to the pattern" if token.isdecimal() else None
    return PatternError(message, text, columns, help=help)


def _axis_of_items(text: str, columns: Columns, items: Sequence[Axis], kind: Kind = "product") -> Axis:
    counts = [len(item.blocks) for item in items]
    if (sum(counts) if kind == "join" else prod(counts)) > MAX_BLOCKS:
        raise PatternError(f"a tensor has at most {MAX_BLOCKS} blocks", text, columns)
    if kind == "join":
        return Axis(columns, tuple(chain.from_iterable(item.blocks for item in items)), tuple(items), kind)
    blocks = tuple(tuple(chain.from_iterable(parts)) for parts in product(*(item.blocks for item in items)))
    for block in blocks:
        if len(set(block)) < len(block):
            raise PatternError(f"a name is twice in the block {quoted(' '.join(block))}", text, columns)
    return Axis(columns, blocks, tuple(items))


def _check_blocks(pattern: Pattern, compared: Set[str]) -> None:
    """Raise PatternError unless the two sides have the same blocks of the names in `compared`, each once."""
    sides = [
        [(t.columns, block) for t in side for block in t.blocks if not any(map(_is_fill, block))]
        for side in (pattern.source, pattern.target)
    ]
    counts = [Counter(frozenset(block) & compared for _, block in side) for side in sides]
    for at, name in enumerate(("left", "right")):
        for columns, block in sides[at]:
            text = quoted(" ".join(block) or "1")
            if counts[at][frozenset(block) & compared] > 1:
                raise PatternError(f"the block {text} is on the {name} side twice", pattern.text, columns)
            if frozenset(block) & compared not in counts[1 - at]:
                note = f"blocks of the other side: {listing(quoted(' '.join(b) or '1') for _, b in sides[1 - at])}"
                raise PatternError(f"the block {text} is on the {name} side only", pattern.text, columns, note=note)


def _block_views(tensor: Tensor, axes: Axis, sizes: Sizes) -> Iterator[tuple[Names, Tensor]]:
    """Yield a view of each block of a tensor, and the names of the view's axes."""
    pending = [(tensor, axes.items)]
    while pending:
        view, items = pending.pop()
        dim = next((dim for dim, item in enumerate(items) if item.kind != "name"), None)
        if dim is None:
            yield tuple(item.names[0] for item in items), view
            continue
        before, axis, after = items[:dim], items[dim], items[dim + 1 :]
        shape = axis.shape(sizes)
        if axis.kind == "product":
            split = view.view((*view.shape[:dim], *shape, *view.shape[dim + 1 :]))
            pending.append((split, (*before, *axis.items, *after)))
            continue
        starts = accumulate(shape, initial=0)  # not `split`: autograd forbids writing to its results
        for item, start, length in zip(axis.items, starts, shape, strict=False):
            pending.append((view.narrow(dim, start, length), (*before, item, *after)))


def _shape_text(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "()"
