"""`Rearrange`: axes by their names, at the cost of torch's own operations.

einops (https://openreview.net/forum?id=oapKSVM2bcj) parses and checks the pattern once, when the module is made. The
forward runs the operations of torch that a person would write for it: `unflatten`, `transpose` or `permute`, `flatten`.
tfkit's letters for axes are listed in `tfkit/README.md`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, ClassVar, TypeAlias

from einops import EinopsError
from einops.layers import RearrangeMixin
from einops.parsing import ParsedExpression
from torch import Tensor, nn

from tfkit.nn.code_files import run_text
from tfkit.nn.forward_text import is_name

Side: TypeAlias = Sequence[Sequence[str]]
"""One side of a pattern: for each axis of the tensor, the names of its factors."""
Cut: TypeAlias = tuple[str, tuple[str, ...]]
"""An axis that is cut, and the names of its parts."""


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
        self.known: tuple[str, ...] = tuple(sizes_by_axis)
        cut = [(axis, tuple(size)) for axis, size in sizes.items() if isinstance(size, Mapping)]
        self.__class__ = _written(pattern, self.known, tuple(cut))
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
        return _made, (self.pattern, self.sizes), self.__dict__


def _made(pattern: str, sizes: Mapping[str, int | Mapping[str, int]]) -> Rearrange:
    """Create the module without its state, for unpickling and copying."""
    return Rearrange(pattern, **sizes)


def _by_axis(pattern: str, sizes: Mapping[str, int | Mapping[str, int]]) -> dict[str, int | list[int]]:
    """Return the size of each axis, a list if it is cut. Sizes of products are divided and removed."""
    left, right = _sides(pattern)
    axes = {axis for names in left for axis in names}
    products = {"".join(names): names for names in (*left, *right) if len(names) > 1}
    sizes_by_axis: dict[str, int | list[int]] = {}
    wholes: dict[str, int] = {}
    for name, size in sizes.items():
        parts = list(size.values()) if isinstance(size, Mapping) else [size]
        if not parts or not all(map(_is_size, parts)):
            raise _wrong(pattern, f"the size of `{name}` must be an integer above 0; got {size!r}")
        if name in axes or name not in products:
            sizes_by_axis[name] = parts if isinstance(size, Mapping) else parts[0]
        else:
            wholes[name] = sum(parts)
    for name, whole in wholes.items():
        missing = [axis for axis in products[name] if axis not in sizes_by_axis]
        product = prod(_total(sizes_by_axis[axis]) for axis in products[name] if axis in sizes_by_axis)
        if whole % product or (not missing and whole != product):
            sized, product_axes = (
                " ".join(axes) for axes in ([a for a in products[name] if a in sizes_by_axis], products[name])
            )
            raise _wrong(pattern, f"`{sized}` of size {product} does not divide `{product_axes}` of size {whole}")
        if len(missing) == 1:
            sizes_by_axis[missing[0]] = whole // product
    return sizes_by_axis


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _total(size: int | list[int]) -> int:
    return sum(size) if isinstance(size, list) else size


@cache
def _sides(pattern: str) -> tuple[Side, Side]:
    sides = pattern.split("->")
    try:
        expressions = [ParsedExpression(side) for side in sides]
    except EinopsError as error:
        raise _wrong(pattern, str(error)) from None
    if len(expressions) != 2 or any(side.has_ellipsis or side.has_non_unitary_anonymous_axes for side in expressions):
        raise _wrong(pattern, "a pattern is `axes -> axes`, and an axis is a name or 1")
    return expressions[0].composition, expressions[1].composition


@cache
def _written(pattern: str, sized: tuple[str, ...], cut: tuple[Cut, ...]) -> type[Rearrange]:
    """Return the class of a pattern: all modules with this pattern share it, and it is compiled once."""
    try:
        RearrangeMixin(pattern, **dict.fromkeys(sized, 1))
    except EinopsError as error:
        raise _wrong(pattern, str(error).partition("\n")[2]) from None
    if taken := [axis for axis in sized if hasattr(Rearrange, axis) or axis in ("pattern", "sizes", "known")]:
        raise _wrong(pattern, f"every module has a `{taken[0]}`: an axis needs another name")
    parts = [part for _, names in cut for part in names]
    if bad := [part for part in parts if not is_name(part) or part in ("self", "x")]:
        raise _wrong(pattern, f"a part cannot be called {bad[0]!r}")
    code = _forward(pattern, sized, cut)
    forward = run_text(code, "Rearrange", {"Tensor": Tensor})["forward"]
    return type("Rearrange", (Rearrange,), {"__module__": __name__, "code": code, "forward": forward})


def _forward(pattern: str, sized: Sequence[str], cut: Sequence[Cut]) -> str:
    if len(cut) > 1:
        raise _wrong(pattern, "one axis can be cut, not two")
    left, right = _sides(pattern)
    before = [axis for names in left for axis in names]
    split = "".join(_splits(pattern, sized, cut))
    ordered = "".join(_orders(before, [axis for names in right for axis in names]))
    merged = "".join(_merges(right))
    if not cut:
        return f"def forward(self, x: Tensor) -> Tensor:\n    return x{split}{ordered}{merged}\n"
    ((axis, parts),) = cut
    # Cut before the parts are permuted: their gradients are joined in the layout of x, without a copy.
    return (
        f"def forward(self, x: Tensor) -> tuple[{', '.join(['Tensor'] * len(parts))}]:\n"
        f"    {', '.join(parts)}{',' * (len(parts) == 1)} = "
        f"x{split}.split_with_sizes(self.{axis}, dim={before.index(axis)})\n"
        f"    return {', '.join(part + ordered + merged for part in parts)}{',' * (len(parts) == 1)}\n"
    )


def _splits(pattern: str, sized: Sequence[str], cut: Sequence[Cut]) -> Iterator[str]:
    dim = 0
    for names in _sides(pattern)[0]:
        if not names:
            yield f".squeeze({dim})"
        if len(names) > 1:
            sizes = [f"self.{axis}" if axis in sized and axis not in dict(cut) else "-1" for axis in names]
            if sizes.count("-1") > 1:
                raise _wrong(pattern, f"`{' '.join(names)}` has an axis that is cut: it needs the sizes of the others")
            yield f".unflatten({dim}, ({', '.join(sizes)}))"
        dim += len(names)


def _orders(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    order = [before.index(axis) for axis in after]
    moved = [dim for dim, source in enumerate(order) if dim != source]
    if len(moved) == 2:
        yield f".transpose({moved[0]}, {moved[1]})"
    elif moved:
        yield f".permute({', '.join(map(str, order))})"


def _merges(right: Side) -> Iterator[str]:
    for dim, names in enumerate(right):
        if not names:
            yield f".unsqueeze({dim})"
        elif len(names) > 1:
            last = not any(right[dim + 1 :])
            yield f".flatten({dim})" if last else f".flatten({dim}, {dim + len(names) - 1})"


def _wrong(pattern: str, why: str) -> EinopsError:
    return EinopsError(f"`{pattern}`: {' '.join(why.split())}")
