"""`Rearrange`: axes by their names, at the cost of torch's own operations.

einops (https://openreview.net/forum?id=oapKSVM2bcj) parses and checks the pattern once, when the module is made. The
forward runs the operations of torch that a person would write for it: `unflatten`, `transpose` or `permute`, `flatten`.
`operations` writes them, also for einops' reductions and repetitions, which ejected files need.
tfkit's letters for axes are listed in `tfkit/README.md`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, ClassVar, TypeAlias

from einops import EinopsError
from einops.layers import ReduceMixin
from einops.parsing import AnonymousAxis, ParsedExpression
from torch import Tensor, nn

from tfkit.nn.code_files import run_text
from tfkit.nn.forward_text import is_name

Side: TypeAlias = Sequence[Sequence[Any]]
"""One side of a pattern: for each axis of the tensor, its factors. A factor is a name, a number or the ellipsis."""
Cut: TypeAlias = tuple[str, tuple[str, ...]]
"""An axis that is cut, and the names of its parts."""
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
"""Any number of axes, as einops writes it in a parsed pattern."""


class Rearrange(nn.Module):
    """A tensor with its axes split, merged and in another order, as `einops.rearrange` returns it.

        Rearrange("b t (h d) -> b h t d", d=64)
        Rearrange("b t (h d) -> b h t d", h={"q": 32, "k": 8, "v": 8}, d=64)

    The second one returns a tuple: an axis with a mapping as its size is cut into these parts, and each is rearranged.

    Args:
        pattern: in einops' language, without `...`.
        sizes: of axes, by name. One axis of each product may be left out. The joined names of a product are the name
            of its size: `h=3, hd=10` is then an error now, and not only when the module runs.

    Raises:
        EinopsError: the pattern is not valid, or the sizes do not fit it.

    Attributes:
        pattern: as given.
        sizes: as given.
        known: the axes with a known size: each is an attribute of that name.
        code: the forward, which reads these attributes.
    """

    code: ClassVar[str]

    def __init__(self, pattern: str, **sizes: int | Mapping[str, int]) -> None:
        super().__init__()
        self.pattern = pattern
        self.sizes = sizes
        sizes_by_axis = _by_axis(pattern, sizes)
        if taken := [
            axis for axis in sizes_by_axis if hasattr(Rearrange, axis) or axis in vars(self) or axis == "known"
        ]:
            raise _invalid_pattern(pattern, f"every module has a `{taken[0]}`: an axis needs another name")
        self.known: tuple[str, ...] = tuple(sizes_by_axis)
        cut = [(axis, tuple(size)) for axis, size in sizes.items() if isinstance(size, Mapping)]
        self.__class__ = written(pattern, self.known, tuple(cut), "rearrange")
        vars(self).update(sizes_by_axis)

    def __call__(self, x: Tensor) -> Any:
        # nn.Module's own call costs more than this forward, and only hooks need it.
        if self._forward_pre_hooks or self._forward_hooks or self._backward_pre_hooks or self._backward_hooks:
            return super().__call__(x)
        return self.forward(x)

    def extra_repr(self) -> str:
        """Return the pattern and the sizes."""
        return ", ".join([repr(self.pattern), *(f"{name}={size}" for name, size in self.sizes.items())])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.pattern, self.sizes), self.__dict__


def _rebuilt(pattern: str, sizes: Mapping[str, int | Mapping[str, int]]) -> Rearrange:
    """Create the module without its state, for unpickling and copying."""
    return Rearrange(pattern, **sizes)


def _by_axis(pattern: str, sizes: Mapping[str, int | Mapping[str, int]]) -> dict[str, int | list[int]]:
    """Return the size of each axis, a list if it is cut. Sizes of products are divided and removed."""
    left, right = _sides(pattern)
    axes = {axis for names in left for axis in names}
    if not all(isinstance(axis, str) and axis != ELLIPSIS for names in (*left, *right) for axis in names):
        raise _invalid_pattern(pattern, _FORM)
    products = {"".join(names): names for names in (*left, *right) if len(names) > 1}
    sizes_by_axis: dict[str, int | list[int]] = {}
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        parts = list(size.values()) if isinstance(size, Mapping) else [size]
        if not parts or not all(map(_is_size, parts)):
            raise _invalid_pattern(pattern, f"the size of `{name}` must be an integer above 0; got {size!r}")
        if name in axes or name not in products:
            sizes_by_axis[name] = parts if isinstance(size, Mapping) else parts[0]
        else:
            totals[name] = sum(parts)
    for name, total in totals.items():
        missing = [axis for axis in products[name] if axis not in sizes_by_axis]
        product = prod(_total(sizes_by_axis[axis]) for axis in products[name] if axis in sizes_by_axis)
        if total % product or (not missing and total != product):
            sized, product_axes = (
                " ".join(axes) for axes in ([a for a in products[name] if a in sizes_by_axis], products[name])
            )
            raise _invalid_pattern(
                pattern, f"`{sized}` of size {product} does not divide `{product_axes}` of size {total}"
            )
        if len(missing) == 1:
            sizes_by_axis[missing[0]] = total // product
    return sizes_by_axis


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _total(size: int | list[int]) -> int:
    return sum(size) if isinstance(size, list) else size


_FORM = "a pattern is `axes -> axes`, and an axis is a name or 1"


@cache
def _sides(pattern: str) -> tuple[Side, Side]:
    try:
        sides: list[Side] = [ParsedExpression(side).composition for side in pattern.split("->")]
    except EinopsError as error:
        raise _invalid_pattern(pattern, str(error)) from None
    if len(sides) != 2:
        raise _invalid_pattern(pattern, _FORM)
    return sides[0], sides[1]


@cache
def written(pattern: str, sized: tuple[str, ...], cut: tuple[Cut, ...], operation: str) -> type[Rearrange]:
    """Return the class of a pattern: all modules with this pattern share it, and it is compiled once."""
    parts = [part for _, names in cut for part in names]
    if bad := [part for part in parts if not is_name(part) or part in ("self", "x")]:
        raise _invalid_pattern(pattern, f"a part cannot be called {bad[0]!r}")
    code = _forward(pattern, sized, cut, operation)
    forward = run_text(code, "Rearrange", {"Tensor": Tensor})["forward"]
    name, docs = ("Rearrange", pattern) if operation == "rearrange" else ("Reduce", f"{operation}: {pattern}")
    return type(name, (Rearrange,), {"__module__": __name__, "__doc__": docs, "code": code, "forward": forward})


def _forward(pattern: str, sized: Sequence[str], cut: Sequence[Cut], operation: str) -> str:
    if len(cut) > 1:
        raise _invalid_pattern(pattern, "one axis can be cut, not two")
    sizes = {axis: "-1" if axis in dict(cut) else f"self.{axis}" for axis in sized}
    split, ordered = operations(pattern, sizes, operation)
    if not cut:
        return f"def forward(self, x: Tensor) -> Tensor:\n    return x{split}{ordered}\n"
    ((axis, parts),) = cut
    # Cut before the parts are permuted: their gradients are joined in the layout of x, without a copy.
    return (
        f"def forward(self, x: Tensor) -> tuple[{', '.join(['Tensor'] * len(parts))}]:\n"
        f"    {', '.join(parts)}{',' * (len(parts) == 1)} = "
        f"x{split}.split_with_sizes(self.{axis}, dim={_flat(_sides(pattern)[0]).index(axis)})\n"
        f"    return {', '.join(part + ordered for part in parts)}{',' * (len(parts) == 1)}\n"
    )


def operations(pattern: str, sizes: Mapping[Any, str], operation: str) -> tuple[str, str]:
    """Return the methods of a tensor that a pattern of einops stands for: methods that split its axes, and the others.

    `sizes` holds expressions for the sizes of axes. An operation is `rearrange`, `repeat` or a reduction.
    """
    try:
        ReduceMixin(pattern, operation, **dict.fromkeys(sizes, 1))
    except EinopsError as error:
        raise _invalid_pattern(pattern, str(error).partition("\n")[2]) from None
    left, right = _sides(pattern)
    before, after = _flat(left), _flat(right)
    sizes = {**sizes, **{axis: str(axis.value) for axis in before + after if isinstance(axis, AnonymousAxis)}}
    remaining, reduced = [axis for axis in after if axis in before], [axis for axis in before if axis not in after]
    if ELLIPSIS in reduced:
        raise _invalid_pattern(pattern, "a reduction over `...` depends on the number of axes: name them")
    steps: list[str] = []
    # Rounding depends on the order of axes, and einops reduces the last axes. The other cases have the same bits.
    if not reduced or operation == "prod" or [axis for axis in before if axis in remaining] != remaining:
        steps += _orders(before, [*remaining, *reduced])
        before = [*remaining, *reduced]
    dims = tuple(_dim(before, before.index(axis)) for axis in reduced)
    name = {"min": "amin", "max": "amax"}.get(operation, operation)
    if reduced and name == "prod":
        steps += [".prod(dim=-1)"] * len(dims)
    elif reduced:
        steps += [f".{name}(dim={dims[0] if len(dims) == 1 else dims})"]
    steps += _additions(remaining, after, sizes)
    return "".join(_splits(pattern, left, sizes)), "".join([*steps, *_merges(after, right)])


def _flat(side: Side) -> list[Any]:
    return [axis for names in side for axis in names]


def _dim(axes: Sequence[Any], index: int) -> int:
    """Return the number of a dimension. Dimensions after an ellipsis are counted from the end."""
    return index - len(axes) if ELLIPSIS in axes[:index] else index


def _splits(pattern: str, left: Side, sizes: Mapping[Any, str]) -> Iterator[str]:
    axes: list[Any] = list(left)
    index = 0
    for names in left:
        if not names:
            yield f".squeeze({_dim(axes, index)})"
        if len(names) > 1:
            texts = [sizes.get(axis, "-1") for axis in names]
            if texts.count("-1") > 1:
                raise _invalid_pattern(
                    pattern, f"`{' '.join(names)}` has an axis that is cut: it needs the sizes of the others"
                )
            yield f".unflatten({_dim(axes, index)}, ({', '.join(texts)}))"
        axes[index : index + 1] = names
        index += len(names)


def _orders(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    moved = [index for index, axis in enumerate(after) if before[index] != axis]
    if len(moved) == 2 and ELLIPSIS not in [before[index] for index in moved]:
        yield f".transpose({_dim(before, moved[0])}, {_dim(before, moved[1])})"
    elif moved and ELLIPSIS not in before:
        yield f".permute({', '.join(str(before.index(axis)) for axis in after)})"
    elif moved:
        named = [axis for axis in before if axis != ELLIPSIS]
        sources, targets = (tuple(_dim(axes, axes.index(axis)) for axis in named) for axes in (before, after))
        yield f".movedim({sources}, {targets})"


def _additions(remaining: Sequence[Any], after: Sequence[Any], sizes: Mapping[Any, str]) -> Iterator[str]:
    axes = list(remaining)
    added = [index for index, axis in enumerate(after) if axis not in remaining]
    for index in added:
        axes.insert(index, after[index])
        yield f".unsqueeze({_dim(axes, index)})"
    if added and ELLIPSIS not in after:
        yield f".expand({', '.join('-1' if axis in remaining else sizes[axis] for axis in after)})"
    elif added:
        yield from (f".repeat_interleave({sizes[after[index]]}, dim={_dim(after, index)})" for index in added)


def _merges(after: Sequence[Any], right: Side) -> Iterator[str]:
    axes = list(after)
    for index, names in enumerate(right):
        if not names:
            axes.insert(index, None)
            yield f".unsqueeze({_dim(axes, index)})"
        elif len(names) > 1 or names == [ELLIPSIS]:  # in parentheses
            last = index + len(names) - 1
            end = last - len(axes) if ELLIPSIS in axes[: last + 1] else last
            yield f".flatten({_dim(axes, index)}{f', {end}' if last < len(axes) - 1 else ''})"
            axes[index : last + 1] = [None]


def _invalid_pattern(pattern: str, why: str) -> EinopsError:
    return EinopsError(f"`{pattern}`: {' '.join(why.split())}")
