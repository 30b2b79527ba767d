"""`Rearrange` equals `einops.rearrange`, in every conversion of a model."""

import copy
import inspect
import pickle
import re
import subprocess
import sys
from math import prod

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tfkit
from tfkit.nn import Rearrange
from tfkit.nn.rearrange import operations

WRITTEN = [
    ("b t (h d) -> b h t d", {"d": 4}, "x.unflatten(2, (-1, self.d)).transpose(1, 2)"),
    ("b t (h d) -> b h t d", {"h": 3, "d": 4}, "x.unflatten(2, (self.h, self.d)).transpose(1, 2)"),
    ("b t (h d) -> b t h d", {"h": 3, "hd": 12}, "x.unflatten(2, (self.h, self.d))"),
    ("b h t d -> b t (h d)", {}, "x.transpose(1, 2).flatten(2)"),
    ("b (g r) q d -> b g (r q) d", {"g": 2}, "x.unflatten(1, (self.g, -1)).flatten(2, 3)"),
    ("b q k h -> b h q k", {}, "x.permute(0, 3, 1, 2)"),
    ("b 1 k c -> b k c", {}, "x.squeeze(1)"),
    ("h b c -> b 1 h c", {}, "x.transpose(0, 1).unsqueeze(1)"),
    ("s a -> (s a)", {}, "x.flatten(0)"),
    ("b t -> b t", {}, "x"),
]
SIZES = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}


@pytest.mark.parametrize(("pattern", "sizes", "written"), WRITTEN)
def test_it_is_what_a_person_would_write(pattern, sizes, written):
    code = f"def forward(self, x: Tensor) -> Tensor:\n    return {written}\n"
    module = Rearrange(pattern, **sizes)
    assert module.code == code
    assert inspect.getsource(type(module).forward) == code


@st.composite
def drawn(draw):
    """A pattern, the sizes that it needs, and the shape of a tensor."""
    names = draw(st.lists(st.sampled_from(list(SIZES)), unique=True, min_size=1))

    def side(order):
        groups, shape = [], []
        while order:
            if draw(st.booleans()):
                groups, shape = [*groups, "1"], [*shape, 1]
            n = draw(st.integers(1, len(order)))
            group, order = order[:n], order[n:]
            groups.append(group[0] if n == 1 else f"({' '.join(group)})")
            shape.append(prod(SIZES[letter] for letter in group))
        return " ".join(groups), shape

    (left, shape), (right, _) = side(names), side(draw(st.permutations(names)))
    inside = [group.split() for group in re.findall(r"\(([^)]*)\)", left)]
    free = {group[draw(st.integers(0, len(group) - 1))] for group in inside if draw(st.booleans())}
    needed = [name for group in inside for name in group if name not in free]
    return f"{left} -> {right}", {name: SIZES[name] for name in needed}, shape


@settings(max_examples=150, deadline=None)
@given(drawn())
def test_it_is_what_einops_does(case):
    pattern, sizes, shape = case
    x = torch.arange(prod(shape)).view(shape[::-1]).permute(*reversed(range(len(shape))))
    assert torch.equal(Rearrange(pattern, **sizes)(x), einops.rearrange(x, pattern, **sizes))


OPERATIONS = [
    ("b t (g d) -> b 1 g", "mean", {"g": 3}, ".unflatten(2, (g, -1)).mean(dim=(1, 3)).unsqueeze(1)"),
    ("b (t 2) d -> d b t", "max", {}, ".unflatten(1, (-1, 2)).permute(3, 0, 1, 2).amax(dim=3)"),
    ("b (t r) d -> b d", "prod", {"r": 2}, ".unflatten(1, (-1, r)).permute(0, 3, 1, 2).prod(dim=-1).prod(dim=-1)"),
    (
        "... (h d) t -> ... t h",
        "sum",
        {"d": 4},
        ".unflatten(-2, (-1, d)).movedim((-3, -2, -1), (-2, -1, -3)).sum(dim=-1)",
    ),
    ("b ... d -> b (... d)", "rearrange", {}, ".flatten(1)"),
    ("b (...) d -> b d ...", "rearrange", {}, None),
    ("b ... t d -> b (...) (t d) 1", "rearrange", {}, ".flatten(1, -3).flatten(2).unsqueeze(3)"),
    ("... t d -> ... 1 (t d)", "rearrange", {}, ".unsqueeze(-3).flatten(-2)"),
    (
        "b g d -> b (g r) n d",
        "repeat",
        {"r": 2, "n": 3},
        ".unsqueeze(2).unsqueeze(3).expand(-1, -1, r, n, -1).flatten(1, 2)",
    ),
    ("... d -> ... 2 d", "repeat", {}, ".unsqueeze(-2).repeat_interleave(2, dim=-2)"),
    ("b ... d -> d", "sum", {}, None),
    ("b t d -> b t", "median", {}, None),
]


@pytest.mark.parametrize(("pattern", "operation", "sizes", "written"), OPERATIONS)
def test_operations_of_a_pattern(pattern, operation, sizes, written):
    if written is None:
        with pytest.raises(einops.EinopsError, match=f"^`{re.escape(pattern)}`: "):
            operations(pattern, {axis: axis for axis in sizes}, operation)
        return
    assert "".join(operations(pattern, {axis: axis for axis in sizes}, operation)) == written


@st.composite
def any_operation(draw):
    """An operation of einops, its pattern and sizes, and the shape of a tensor."""
    operation = draw(st.sampled_from(["rearrange", "repeat", "mean", "sum", "prod", "min", "all"]))
    names = draw(st.lists(st.sampled_from(["b", "c", "d", "e"]), unique=True, min_size=1))
    axes = [*names, "7"] if operation == "mean" else [*names]
    axes.insert(draw(st.integers(0, len(axes))), "...")
    names_after = [*names] if operation in ("rearrange", "repeat") else [name for name in names if draw(st.booleans())]
    after = draw(st.permutations([*names_after, "..."]))
    if operation == "repeat":
        after.insert(draw(st.integers(0, len(after))), "a2")

    def side(order, open_):
        groups = []
        while order:
            groups += ["1"] * draw(st.booleans())
            n = draw(st.integers(1, len(order)))
            n = n if open_ or "..." not in order[:n] else max(1, order.index("..."))
            groups.append(order[0] if n == 1 else f"({' '.join(order[:n])})")
            order = order[n:]
        return groups

    left, right, shape = side(axes, open_=False), side(after, open_=True), []
    lengths = SIZES | {"7": 7, "1": 1}
    for group in left:
        inside = group.strip("()").split()
        shape += [2, 3][: draw(st.integers(1, 2))] if group == "..." else [prod(lengths[name] for name in inside)]
    sizes = {name: SIZES[name] for group in left if "(" in group for name in group.strip("()").split() if name != "7"}
    sizes |= {"a2": 2} if operation == "repeat" else {}
    return f"{' '.join(left)} -> {' '.join(right)}", operation, sizes, shape


@settings(max_examples=150, deadline=None)
@given(any_operation())
def test_operations_are_those_of_einops_to_the_last_bit(case):
    pattern, operation, sizes, shape = case
    x = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(3)).permute(*reversed(range(len(shape))))
    x = x > 0 if operation == "all" else x
    text = "".join(operations(pattern, {name: str(size) for name, size in sizes.items()}, operation))
    expected = einops.reduce(x, pattern, operation, **sizes)
    assert torch.equal(eval(f"x{text}"), expected)
    assert eval(f"x{text}").shape == expected.shape


def test_an_axis_that_is_cut_gives_its_parts():
    module, x = Rearrange("b t (h d) -> b h t d", h={"q": 4, "k": 2, "v": 2}, d=3), torch.randn(2, 5, 24)
    heads = einops.rearrange(x, "b t (h d) -> b h t d", d=3)
    assert all(map(torch.equal, module(x), heads.split([4, 2, 2], dim=1)))
    assert module.code.splitlines()[1:] == [
        "    q, k, v = x.unflatten(2, (-1, self.d)).split_with_sizes(self.h, dim=2)",
        "    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)",
    ]
    nope, rope = Rearrange("b t (h d) -> b h t d", h=4, d={"nope": 4, "rope": 2})(x)
    assert nope.shape == (2, 4, 5, 4)
    assert torch.equal(torch.cat((nope, rope), dim=3), einops.rearrange(x, "b t (h d) -> b h t d", h=4))


WRONG = [
    ("b t", {}, "a pattern is `axes -> axes`, and an axis is a name or 1"),
    ("b t -> t b -> b t", {}, "a pattern is `axes -> axes`, and an axis is a name or 1"),
    ("... d -> d ...", {}, "a pattern is `axes -> axes`, and an axis is a name or 1"),
    ("b t (2 d) -> b t 2 d", {}, "a pattern is `axes -> axes`, and an axis is a name or 1"),
    ("b t (h d -> b h t d", {"d": 4}, "Imbalanced parentheses"),
    ("b b -> b", {}, 'contains duplicate dimension "b"'),
    ("b t d -> b t", {}, "Identifiers only on one side of expression (should be on both): {'d'}"),
    ("b t (h d) -> b h t d", {}, "Could not infer sizes for"),
    ("b t (h d) -> b h t d", {"e": 4, "d": 4}, "Axis e is not used in transform"),
    ("b t (h d) -> b h t d", {"h": 3, "hd": 10}, "`h` of size 3 does not divide `h d` of size 10"),
    ("b t (h d) -> b h t d", {"h": 3, "d": 3, "hd": 10}, "`h d` of size 9 does not divide `h d` of size 10"),
    ("b t (h d) -> b h t d", {"d": 4.0}, "the size of `d` must be an integer above 0; got 4.0"),
    ("b t (h d) -> b h t d", {"d": True}, "the size of `d` must be an integer above 0; got True"),
    ("b t (h d) -> b h t d", {"d": 0}, "the size of `d` must be an integer above 0; got 0"),
    ("b t (h d) -> b h t d", {"d": {}}, "the size of `d` must be an integer above 0; got {}"),
    ("b t (h d) -> b h t d", {"d": {"a": 1, "b": 2}}, "has an axis that is cut: it needs the sizes of the others"),
    ("b t (h d) -> b h t d", {"h": {"q": 1}, "d": {"a": 1}}, "one axis can be cut, not two"),
    ("b t (h d) -> b h t d", {"h": {"for": 1}, "d": 1}, "a part cannot be called 'for'"),
    ("b t (h half) -> b h t half", {"half": 4}, "every module has a `half`: an axis needs another name"),
    (
        "b t (h training) -> b h t training",
        {"training": 4},
        "every module has a `training`: an axis needs another name",
    ),
]


@pytest.mark.parametrize(("pattern", "sizes", "why"), WRONG)
def test_what_is_wrong_is_said_when_it_is_made(pattern, sizes, why):
    with pytest.raises(einops.EinopsError) as caught:
        Rearrange(pattern, **sizes)
    assert str(caught.value).startswith(f"`{pattern}`: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


class Heads(nn.Module):
    """A module that splits into heads, and merges them again."""

    def __init__(self) -> None:
        super().__init__()
        self.split_heads = Rearrange("b t (h d) -> b h t d", h={"q": 2, "k": 1}, d=3)
        self.merge_heads = Rearrange("b h t d -> b t (h d)")

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.split_heads(x)
        return self.merge_heads(q * k)


def test_it_says_what_it_is():
    assert repr(Heads()) == (
        "Heads(\n"
        "  (split_heads): Rearrange('b t (h d) -> b h t d', h={'q': 2, 'k': 1}, d=3)\n"
        "  (merge_heads): Rearrange('b h t d -> b t (h d)')\n"
        ")"
    )


def test_modules_with_one_pattern_are_of_one_class():
    assert type(Rearrange("b t (h d) -> b h t d", d=3)) is type(Rearrange("b t (h d) -> b h t d", d=4))
    assert type(Rearrange("b t (h d) -> b h t d", d=3)) is not type(Rearrange("b t (h d) -> b h t d", h=3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), torch.jit.script])
def test_a_copy_does_the_same(copied):
    module, x = Heads().eval(), torch.randn(2, 5, 9)
    twin = copied(module)
    assert torch.equal(twin(x), module(x))
    assert not twin.merge_heads.training


@pytest.mark.slow
def test_a_pickle_is_read_by_another_process(tmp_path):
    module, x = Rearrange("b t (h d) -> b h t d", d=3), torch.randn(2, 5, 9)
    torch.save((module, x, module(x)), tmp_path / "saved.pt")
    code = f"""import torch
module, x, y = torch.load({str(tmp_path / "saved.pt")!r}, weights_only=False)
assert torch.equal(module(x), y) and repr(module) == "Rearrange('b t (h d) -> b h t d', d=3)" """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_it_compiles_whole():
    compiled, x = torch.compile(Heads(), fullgraph=True, backend="eager", dynamic=True), torch.randn(2, 5, 9)
    assert torch.equal(compiled(x), Heads()(x))


def test_it_is_exported_with_free_shapes():
    free = {"x": {0: torch.export.Dim("b"), 1: torch.export.Dim("t")}}
    program = torch.export.export(Heads(), (torch.randn(2, 5, 9),), dynamic_shapes=free)
    x = torch.randn(3, 7, 9)
    assert torch.equal(program.module()(x), Heads()(x))


def test_hooks_see_it():
    module, records = Rearrange("b t -> t b"), []
    module.register_forward_hook(lambda _, args, output: records.append(output.shape))
    module(torch.zeros(2, 3))
    assert records == [(3, 2)]


def test_a_single_hook_of_any_type_is_called():
    types = "forward_pre", "forward", "full_backward_pre", "full_backward"
    for name in types:
        module, calls = Rearrange("b t -> t b"), []
        getattr(module, f"register_{name}_hook")(lambda *args, calls=calls: calls.append(args))
        module(torch.zeros(2, 3, requires_grad=True)).sum().backward()
        assert len(calls) == 1, name


def test_gradients_are_joined_in_the_layout_of_what_was_cut():
    x = torch.randn(2, 5, 24, requires_grad=True)
    laid_out = []
    x.register_hook(lambda gradient: laid_out.append(gradient.is_contiguous()))
    q, k = Rearrange("b t (h d) -> b h t d", h={"q": 4, "k": 4}, d=3)(x)
    (q * 2 + k).square().sum().backward()
    assert laid_out == [True]


def test_a_plugin_with_a_wrong_pattern_is_told_the_place(tmp_path):
    (tmp_path / "odd.py").write_text(
        '''
from typing import Literal
import tfkit
from torch import nn

class OddConfig(tfkit.FFNConfig):
    """Splits into heads."""
    kind: Literal["odd"] = "odd"
    n_heads: tfkit.Count = 3
    axis: str = "d"

    def build(self, make):
        return tfkit.Rearrange(f"b t (h {self.axis}) -> b h t d", h=self.n_heads, hd=self.d_model)

@tfkit.hookimpl
def tfkit_register(register):
    register(OddConfig)
''',
        encoding="utf-8",
    )
    spec = """
tfkit: 1
name: odd
d_model: 10
vocab_size: 11
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 1
    attention: {kind: mha, n_heads: 2}
    ffn: odd
"""
    for change, why in [
        ((), "`b t (h d) -> b h t d`: `h` of size 3 does not divide `h d` of size 10"),
        (("decoder.ffn.axis=(",), "EinopsError: `b t (h () -> b h t d`: "),
    ]:
        plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)
        with pytest.raises(tfkit.SpecError) as caught:
            tfkit.build(tfkit.loads(spec, plugins=plugins, sets=list(change)))
        (diagnostic,) = caught.value.diagnostics
        assert diagnostic.path == "graph.decoder.ffn"
        assert diagnostic.message == "ffn kind `odd` failed in `build`"
        assert why in diagnostic.notes[0]
