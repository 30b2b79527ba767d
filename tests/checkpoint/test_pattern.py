"""The layout operation of the weight map, compared with expected tensors, einops and an oracle; memory and dtypes."""

from __future__ import annotations

from itertools import product

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfkit.checkpoint.pattern import Pattern, PatternError

from .both_ways import PER_HEAD, apply, count

few = settings(max_examples=30, deadline=None)


# ---- by hand ----


def test_transpose_and_reshape():
    w = count(4, 6)
    assert torch.equal(apply("i o -> o i", w)[0], w.T)
    assert torch.equal(apply("i o->\n  o\ti \n", w)[0], w.T)
    assert torch.equal(apply("(h d) i -> h d i", w, h=2)[0], w.view(2, 2, 6))
    assert torch.equal(apply("(e f) d -> e f d", w, f=2)[0], w.view(2, 2, 6))
    assert torch.equal(apply("1 e -> e", count(1, 5))[0], count(5))
    assert torch.equal(apply("e -> 1 e 1", count(5))[0], count(1, 5, 1))
    assert torch.equal(apply("1 -> (1 1) 1", count(1))[0], count(1, 1))


def test_resizing_appends_and_divides():
    """A resizing pattern appends zeros or values that the result has, also within a product, and divides old values."""
    w, initial = count(2, 6) + 2, count(3, 6) + 100
    rows = apply_resizing("o i -> [o 0] i", w, initial)
    assert torch.equal(rows, torch.cat([w, torch.zeros(1, 6)]))
    rows = apply_resizing("o i -> [o ?] i / 2", w, initial)
    assert torch.equal(rows, torch.cat([w / 2, initial[2:]]))
    wide = count(2, 8) + 100
    heads = apply_resizing("o (h d) -> o (h [d 0])", w, wide, h=2)
    assert torch.equal(heads.view(2, 2, 4), torch.cat([w.view(2, 2, 3), torch.zeros(2, 2, 1)], dim=2))
    stride = apply_resizing("o i -> o (i [1 ?]) / 4", w, count(2, 12))
    assert torch.equal(stride[:, ::2], w / 4)
    assert torch.equal(stride[:, 1::2], count(2, 12)[:, 1::2])


def apply_resizing(text, old, initial, **sizes):
    pattern = Pattern.parse(text, resizing=True)
    return pattern.apply([old], sizes, [tuple(initial.shape)], [initial])[0]


@pytest.mark.parametrize("text", ["o i -> [o 0] i", "o i -> o i / 2", "o i -> [o ?] i"])
def test_only_resizing_patterns_append_and_divide(text):
    with pytest.raises(PatternError):
        Pattern.parse(text)


@pytest.mark.parametrize("text", ["o i -> o i 0", "[o 0] i -> o i", "o i -> o i / 0", "o i -> [o 0] [i ?] / x"])
def test_invalid_appended_values_and_divisors(text):
    with pytest.raises(PatternError):
        Pattern.parse(text, resizing=True)


def test_joined_and_taken_apart():
    q, k, v = count(4, 3), count(2, 3) + 100, count(1, 3) + 200
    assert torch.equal(apply("q i, k i, v i -> [q k v] i", q, k, v, q=4, k=2)[0], torch.cat([q, k, v]))
    for part, actual in zip(
        (q, k, v), apply("[q k v] i -> q i, k i, v i", torch.cat([q, k, v]), q=4, v=1), strict=True
    ):
        assert torch.equal(part, actual)
    assert torch.equal(apply("[u g] i -> [g u] i", torch.cat([q, k]), u=4)[0], torch.cat([k, q]))
    assert torch.equal(apply("i [u g] -> [g u] i", torch.cat([q, k]).T, u=4)[0], torch.cat([k, q]))


def test_interleaved_rows():
    w = count(3, 8)
    actual = apply("e (f [g u]) -> e [(g f) (u f)]", w, g=1, u=1)[0]
    assert torch.equal(actual, torch.cat([w[:, ::2], w[:, 1::2]], 1))
    a, b = apply("(f [g u]) -> g f, u f", w[0], g=1, u=1)
    assert torch.equal(a[0], w[0, ::2])
    assert torch.equal(b[0], w[0, 1::2])


def test_rotary_rows():
    w = count(12, 5)  # 2 heads of 6 rows
    assert torch.equal(
        apply("(h t d) i -> (h d t) i", w, h=2, t=2)[0], w.view(2, 2, 3, 5).transpose(1, 2).reshape(12, 5)
    )
    actual = apply("(h [(t d) p]) i -> (h [(d t) p]) i", w, h=2, t=2, d=2, p=2)[0]
    heads = [torch.cat([head[[0, 2, 1, 3]], head[4:]]) for head in w.chunk(2)]
    assert torch.equal(actual, torch.cat(heads))


def test_experts():
    gate_up, down = count(3, 8, 5), count(3, 5, 4) + 1000
    gate, up, other = apply("e [g u] i, e o d -> e g i, e u i, e d o", gate_up, down, g=4)
    assert torch.equal(gate, gate_up[:, :4])
    assert torch.equal(up, gate_up[:, 4:])
    assert torch.equal(other, down.transpose(1, 2))
    one_by_one = [count(4, 5) + 100 * n for n in range(3)]
    stacked = apply("1 a i, 1 b i, 1 c i -> [a b c] i", *(w[None] for w in one_by_one), a=4, b=4)[0]
    assert torch.equal(stacked.view(3, 4, 5), torch.stack(one_by_one))


# ---- any pattern ----


@st.composite
def permutations_of(draw, names):
    """One tensor's axes: the names in any order, some of them in products, with ones between them."""
    items = draw(st.permutations([*names, *["1"] * draw(st.integers(0, 2))]))
    axes, at = [], 0
    while at < len(items):
        n = draw(st.integers(1, 3))
        axes.append(("(", items[at : at + n]) if draw(st.booleans()) else items[at])
        at += n if isinstance(axes[-1], tuple) else 1
    return axes


@st.composite
def arranged(draw, blocks):
    """Axes of a tensor with just these blocks, which are sets of names."""
    if len(blocks) == 1:
        return draw(permutations_of(sorted(blocks[0])))
    common = frozenset.intersection(*blocks)
    groups = draw(groupings([block - common for block in blocks], at_least=2))
    join = "[", [("(", draw(arranged(group)) or ["1"]) for group in groups]
    axes = [*sorted(common), join]
    return draw(st.permutations([("(", axes)] if draw(st.booleans()) else axes))


@st.composite
def groupings(draw, items, at_least=1):
    n = draw(st.integers(at_least, len(items)))
    groups = [[] for _ in range(n)]
    for index, item in enumerate(draw(st.permutations(items))):
        groups[index if index < n else draw(st.integers(0, n - 1))].append(item)
    return groups


@st.composite
def patterns(draw, n_blocks=6):
    """Two sides, each a list of tensors, which are lists of axes; and the sizes of the names."""
    blocks = draw(
        st.lists(st.frozensets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=n_blocks, unique=True)
    )
    sides = [[draw(arranged(group)) for group in draw(groupings(blocks))] for _ in range(2)]
    sizes = {name: draw(st.integers(1, 3)) for name in sorted(frozenset.union(*blocks))}
    return sides, sizes


def text_of(axes):
    if isinstance(axes, str):
        return axes
    return axes[0] + " ".join(map(text_of, axes[1])) + {"(": ")", "[": "]"}[axes[0]]


def side_text(tensors):
    return ", ".join(" ".join(map(text_of, axes)) for axes in tensors)


def elements(axis, sizes):
    """What each element along an axis stands for: an index for every name that it has."""
    if axis == "1":
        return [{}]
    if isinstance(axis, str):
        return [{axis: index} for index in range(sizes[axis])]
    items = [elements(item, sizes) for item in axis[1]]
    if axis[0] == "[":
        return [element for item in items for element in item]
    return [{name: index for part in parts for name, index in part.items()} for parts in product(*items)]


def numbered(tensors, sizes):
    """Tensors in which an element's value tells which one it is."""
    results = []
    for axes in tensors:
        shape = [len(elements(axis, sizes)) for axis in axes]
        values = [hash(frozenset(element.items())) for element in elements(("(", axes), sizes)]
        results.append(torch.tensor(values).view(shape))
    return results


@few
@given(patterns())
def test_every_element_goes_where_the_names_say_and_comes_back(drawn):
    (left, right), sizes = drawn
    actual = apply(f"{side_text(left)} -> {side_text(right)}", *numbered(left, sizes), **sizes)
    for tensor, expected in zip(actual, numbered(right, sizes), strict=True):
        assert torch.equal(tensor, expected)


@few
@given(patterns(), st.sets(st.sampled_from("abcde")))
def test_a_size_that_is_not_given_is_found_or_asked_for(drawn, left_out):
    (left, right), sizes = drawn
    tensors, given_sizes = numbered(left, sizes), {n: size for n, size in sizes.items() if n not in left_out}
    try:
        actual = Pattern.parse(f"{side_text(left)} -> {side_text(right)}").apply(tensors, given_sizes)
    except PatternError as error:
        if "does not determine" not in error.message:
            raise
        alone = {axis for axes in left for axis in axes if isinstance(axis, str)}
        assert not left_out & sizes.keys() <= alone, "the shapes of the tensors determine every size"
        return
    assert all(torch.equal(a, b) for a, b in zip(actual, numbered(right, sizes), strict=True))


@few
@given(patterns(n_blocks=1))
def test_without_joins_it_is_einops(drawn):
    (left, right), sizes = drawn
    text, (tensor,) = f"{side_text(left)} -> {side_text(right)}", numbered(left, sizes)
    assert torch.equal(apply(text, tensor, **sizes)[0], einops.rearrange(tensor, text, **sizes))


# ---- memory, dtypes, gradients ----


def test_nothing_is_copied_that_a_view_can_say():
    w = torch.randn(24, 5)
    address = w.untyped_storage().data_ptr()
    for text in ("i o -> o i", "[q k] i -> i k, q i", "(h [q k] d) i -> h q d i, k i h d", "(h d) i -> 1 i d h"):
        pattern = Pattern.parse(text)
        sizes = {name: size for name, size in {"h": 3, "q": 3, "k": 1}.items() if name in pattern.names}
        sizes |= {"q": 20, "k": 4} if text.startswith("[") else {}
        assert all(part.untyped_storage().data_ptr() == address for part in pattern.apply([w], sizes))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.int64, torch.bool])
def test_bits_of_any_dtype_stay_as_they_are(dtype):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24, 4 * dtype.itemsize), dtype=torch.uint8)
    pattern, sizes = Pattern.parse(PER_HEAD), {"q": 2, "k": 1, "v": 1, "d": 2}
    there = pattern.apply([raw.view(dtype)], sizes)
    assert there[0].dtype == dtype
    assert torch.equal(there[0].view(torch.uint8), pattern.apply([raw], sizes)[0])
    assert torch.equal(pattern.inverse().apply(there, sizes)[0].view(torch.uint8), raw)


def test_on_the_meta_device():
    joined = Pattern.parse(PER_HEAD).apply([torch.empty(24, 5, device="meta")], {"q": 2, "k": 1, "v": 1, "d": 2})[0]
    assert (joined.device.type, joined.shape) == ("meta", (24, 5))


def test_gradients_pass():
    w = torch.randn(24, 5, requires_grad=True)
    Pattern.parse(PER_HEAD).apply([w], {"q": 2, "k": 1, "v": 1, "d": 2})[0].sum().backward()
    assert torch.equal(w.grad, torch.ones(24, 5))
