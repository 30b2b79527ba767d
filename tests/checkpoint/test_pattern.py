"""The layout operation of the weight map, against einops, Hugging Face's own splits and an oracle."""

from __future__ import annotations

import importlib
from itertools import product
from types import SimpleNamespace

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfkit.checkpoint.pattern import Pattern, PatternError

few = settings(max_examples=60, deadline=None)


def apply(text, *tensors, **sizes):
    """Both directions: what comes back is what went in, and the shapes are those that were foretold."""
    pattern = Pattern.parse(text)
    results = pattern.apply(tensors, sizes)
    assert pattern.shapes([t.shape for t in tensors], sizes) == [tuple(t.shape) for t in results]
    back = pattern.inverse().apply(results, sizes)
    assert len(back) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    return results


def count(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


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


def test_joined_and_taken_apart():
    q, k, v = count(4, 3), count(2, 3) + 100, count(1, 3) + 200
    assert torch.equal(apply("q i, k i, v i -> [q k v] i", q, k, v, q=4, k=2)[0], torch.cat([q, k, v]))
    for part, found in zip((q, k, v), apply("[q k v] i -> q i, k i, v i", torch.cat([q, k, v]), q=4, v=1), strict=True):
        assert torch.equal(part, found)
    assert torch.equal(apply("[u g] i -> [g u] i", torch.cat([q, k]), u=4)[0], torch.cat([k, q]))
    assert torch.equal(apply("i [u g] -> [g u] i", torch.cat([q, k]).T, u=4)[0], torch.cat([k, q]))


def test_interleaved_rows():
    w = count(3, 8)
    found = apply("e (f [g u]) -> e [(g f) (u f)]", w, g=1, u=1)[0]
    assert torch.equal(found, torch.cat([w[:, ::2], w[:, 1::2]], 1))
    a, b = apply("(f [g u]) -> g f, u f", w[0], g=1, u=1)
    assert torch.equal(a[0], w[0, ::2])
    assert torch.equal(b[0], w[0, 1::2])


def test_rotary_rows():
    w = count(12, 5)  # 2 heads of 6 rows
    assert torch.equal(
        apply("(h t d) i -> (h d t) i", w, h=2, t=2)[0], w.view(2, 2, 3, 5).transpose(1, 2).reshape(12, 5)
    )
    found = apply("(h [(t d) p]) i -> (h [(d t) p]) i", w, h=2, t=2, d=2, p=2)[0]
    heads = [torch.cat([head[[0, 2, 1, 3]], head[4:]]) for head in w.chunk(2)]
    assert torch.equal(found, torch.cat(heads))


def test_experts():
    gate_up, down = count(3, 8, 5), count(3, 5, 4) + 1000
    gate, up, other = apply("e [g u] i, e o d -> e g i, e u i, e d o", gate_up, down, g=4)
    assert torch.equal(gate, gate_up[:, :4])
    assert torch.equal(up, gate_up[:, 4:])
    assert torch.equal(other, down.transpose(1, 2))
    one_by_one = [count(4, 5) + 100 * n for n in range(3)]
    stacked = apply("1 a i, 1 b i, 1 c i -> [a b c] i", *(w[None] for w in one_by_one), a=4, b=4)[0]
    assert torch.equal(stacked.view(3, 4, 5), torch.stack(one_by_one))


# ---- Hugging Face's own code ----

PER_HEAD = "(h [q k v] d) i -> [(h q d) (h k d) (h v d)] i"


def huggingface(model_type):
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def config_of(model_type, name, **fields):
    module = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    config = getattr(module, name)(**fields)
    config._attn_implementation = "eager"
    return config


def rows(states):
    """[1, h, t, d] of the identity matrix as input: the projection's rows, head by head."""
    return states[0].transpose(1, 2).flatten(0, 1)


def heads_seen(monkeypatch, model_type, attention, linear, **inputs):
    """The rows of queries, keys and values that the attention computes, and the weight that holds them all."""
    seen = []

    def spy(self, query, key, value, *args, **kwargs):
        seen.extend((query, key, value))
        return query.transpose(1, 2), None

    monkeypatch.setattr(huggingface(model_type), "eager_attention_forward", spy)
    torch.nn.init.normal_(linear.weight)
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    with torch.no_grad():
        attention(torch.eye(linear.in_features)[None], attention_mask=None, **inputs)
    return torch.cat([rows(states) for states in seen]), linear.weight.detach()


def no_rotation(width):
    return torch.ones(1, 16, width), torch.zeros(1, 16, width)


def test_gpt_neox(monkeypatch):
    config = config_of("gpt_neox", "GPTNeoXConfig", hidden_size=16, num_attention_heads=4)
    attention = huggingface("gpt_neox").GPTNeoXAttention(config, layer_idx=0)
    inputs = {"position_embeddings": no_rotation(attention.rotary_ndims)}
    wanted, fused = heads_seen(monkeypatch, "gpt_neox", attention, attention.query_key_value, **inputs)
    assert torch.equal(apply(PER_HEAD, fused, q=1, k=1, v=1, d=4)[0], wanted)


def test_phi3(monkeypatch):
    config = config_of("phi3", "Phi3Config", hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    attention = huggingface("phi3").Phi3Attention(config, layer_idx=0)
    inputs = {"position_embeddings": no_rotation(4)}
    wanted, fused = heads_seen(monkeypatch, "phi3", attention, attention.qkv_proj, **inputs)
    q, k, v = apply("[q k v] i -> q i, k i, v i", fused, q=16, k=8)
    assert torch.equal(torch.cat([q, k, v]), wanted)


@pytest.mark.parametrize("multi_query", [False, True])
def test_gpt_bigcode(monkeypatch, multi_query):
    config = config_of("gpt_bigcode", "GPTBigCodeConfig", n_embd=16, n_head=4, multi_query=multi_query)
    attention = huggingface("gpt_bigcode").GPTBigCodeAttention(config, layer_idx=0)
    wanted, fused = heads_seen(monkeypatch, "gpt_bigcode", attention, attention.c_attn)
    text, sizes = (
        ("[(h d) k v] i -> [(h d) k v] i", {"k": 4, "v": 4, "h": 4})
        if multi_query
        else (PER_HEAD, {"h": 4, "q": 1, "k": 1, "v": 1})
    )
    assert torch.equal(apply(text, fused, **sizes)[0], wanted)


def test_codegen(monkeypatch):
    module = huggingface("codegen")
    config = config_of("codegen", "CodeGenConfig", n_embd=32, n_head=8, n_positions=32, rotary_dim=4)
    attention = module.CodeGenAttention(config, layer_idx=0)
    seen = []

    def spy(query, key, value, mask=None):
        seen.extend((query, key, value))
        return query, None

    monkeypatch.setattr(attention, "_attn", spy)
    with torch.no_grad():
        attention(torch.eye(32)[None], position_ids=torch.zeros(1, 32, dtype=torch.long))
    found = apply(
        "(m [q v k] d) i -> [(m q d) (m k d) (m v d)] i", attention.qkv_proj.weight.detach(), m=4, q=2, v=2, k=2
    )
    assert torch.equal(found[0], torch.cat([rows(states) for states in seen]))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_falcon(n_kv_heads):
    fused = torch.randn((4 + 2 * n_kv_heads) * 3, 5)
    model = SimpleNamespace(new_decoder_architecture=True, num_heads=4, num_kv_heads=n_kv_heads, head_dim=3)
    split = huggingface("falcon").FalconAttention._split_heads(model, fused.T[None])
    q, k, v = (states[0].permute(1, 2, 0) for states in split)  # keys and values repeated for each query of a group
    group = 4 // n_kv_heads
    found = apply("(g [q k v] d) i -> (g q) d i, (g k) d i, (g v) d i", fused, q=group, k=1, v=1, d=3)
    for wanted, states in zip((q, k[::group], v[::group]), found, strict=True):
        assert torch.equal(states, wanted)


def test_bloom_and_the_older_falcon():
    fused = torch.randn(4 * 3 * 2, 5)
    model = SimpleNamespace(num_heads=4, head_dim=2, new_decoder_architecture=False, multi_query=False)
    found = apply(PER_HEAD, fused, q=1, k=1, v=1, h=4)[0]
    bloom = huggingface("bloom").BloomAttention._reshape(model, fused.T[None])
    assert torch.equal(found, torch.cat([rows(states) for states in bloom]))
    falcon = huggingface("falcon").FalconAttention._split_heads(model, fused.T[None])
    assert torch.equal(found, torch.cat([rows(states.transpose(1, 2)) for states in falcon]))


def test_gpt_oss():
    gate_up = torch.randn(2, 5, 8)  # experts, width, gates and ups in turn
    model = SimpleNamespace(limit=100.0, alpha=1.702)
    wanted = huggingface("gpt_oss").GptOssExperts._apply_gate(model, gate_up)
    gate, up = apply("e i (f [g u]) -> e i (f g), e i (f u)", gate_up, g=1, u=1)
    assert torch.equal((up + 1) * (gate * torch.sigmoid(gate * 1.702)), wanted)


def test_conv1d():
    layer = importlib.import_module("transformers.pytorch_utils").Conv1D(6, 4)
    linear = torch.nn.Linear(4, 6)
    x = torch.randn(3, 4)
    linear.load_state_dict({"weight": apply("i o -> o i", layer.weight.detach())[0], "bias": layer.bias.detach()})
    torch.testing.assert_close(linear(x), layer(x))


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
    made = []
    for axes in tensors:
        shape = [len(elements(axis, sizes)) for axis in axes]
        values = [hash(frozenset(element.items())) for element in elements(("(", axes), sizes)]
        made.append(torch.tensor(values).view(shape))
    return made


@few
@given(patterns())
def test_every_element_goes_where_the_names_say_and_comes_back(drawn):
    (left, right), sizes = drawn
    found = apply(f"{side_text(left)} -> {side_text(right)}", *numbered(left, sizes), **sizes)
    for tensor, wanted in zip(found, numbered(right, sizes), strict=True):
        assert torch.equal(tensor, wanted)


@few
@given(patterns(), st.sets(st.sampled_from("abcde")))
def test_a_size_that_is_not_given_is_found_or_asked_for(drawn, left_out):
    (left, right), sizes = drawn
    tensors, given_sizes = numbered(left, sizes), {n: size for n, size in sizes.items() if n not in left_out}
    try:
        found = Pattern.parse(f"{side_text(left)} -> {side_text(right)}").apply(tensors, given_sizes)
    except PatternError as error:
        if "does not tell" not in error.message:
            raise
        return
    assert all(torch.equal(a, b) for a, b in zip(found, numbered(right, sizes), strict=True))


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


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("text", "blamed", "message"),
    [
        ("", "", "found the end where a name, `1`, `(` or `[` can stand"),
        ("-> a", "->", "found `->` where a name, `1`, `(` or `[` can stand"),
        ("a, -> a", "->", "found `->` where a name, `1`, `(` or `[` can stand"),
        ("a () -> a", ")", "found `)` where a name, `1`, `(` or `[` can stand"),
        ("a b ", "", "found the end where a name, `1`, `(`, `[`, `,` or `->` can stand"),
        ("(a b] -> a", "]", "found `]` where a name, `1`, `(`, `[` or `)` can stand"),
        ("[a b -> a", "->", "found `->` where a name, `1`, `(`, `[` or `]` can stand"),
        ("a -> a) b", ")", "found `)` where a name, `1`, `(`, `[`, `,` or the end can stand"),
        ("a -> b -> c", "->", "found `->` where a name, `1`, `(`, `[`, `,` or the end can stand"),
        ("a ... -> ... a", "...", "found `...` where a name, `1`, `(`, `[`, `,` or `->` can stand"),
        ("\u00e9 -> a", "\u00e9", "found `\u00e9` where a name, `1`, `(` or `[` can stand"),
        ("h h -> h", "h h", "a name stands twice in the block `h h`"),
        ("i ([a b] [b c]) -> i", "([a b] [b c])", "a name stands twice in the block `b b`"),
        ("[a a] i -> a i", "[a a] i", "the block `a i` is on the left side twice"),
        ("a i -> a i, i a", "a i", "the block `a i` is on the right side twice"),
        ("1, 1 -> 1", "1", "the block `1` is on the left side twice"),
        ("a b -> b", "a b", "the block `a b` is on the left side only"),
        (" ".join(f"[a{i} b{i}]" for i in range(9)), None, "a tensor has at most 256 blocks"),
        (" ".join(f"n{i}" for i in range(65)), None, "a pattern has at most 64 names, and this one 65"),
        ("1 " * 501, None, "a pattern has at most 1000 characters, and this one 1002"),
    ],
)
def test_texts_that_are_no_pattern(text, blamed, message):
    with pytest.raises(PatternError) as caught:
        Pattern.parse(f"{text} -> i" if message.startswith("a tensor") else text)
    assert caught.value.message == message
    start, end = caught.value.part
    assert blamed is None or text[start:end] == blamed


FUSED = "(h [q k] d) i -> [(h q d) (h k d)] i"


@pytest.mark.parametrize(
    ("text", "shapes", "sizes", "message"),
    [
        (FUSED, [], {}, "tensors wanted: 1, given: 0"),
        (FUSED, [(24,)], {}, "axes wanted: 2, given: 1, in a tensor of shape 24"),
        ("1 -> 1 1", [()], {}, "axes wanted: 1, given: 0, in a tensor of shape ()"),
        (FUSED, [(24, 5)], {"x": 2}, "the pattern has no name `x`"),
        (FUSED, [(24, 5)], {"q": 0}, "the size of `q` is `0`, not a whole number from 1 on"),
        (FUSED, [(24, 5)], {"q": 2.0}, "the size of `q` is `2.0`, not a whole number from 1 on"),
        (FUSED, [(24, 5)], {"q": True}, "the size of `q` is `True`, not a whole number from 1 on"),
        (FUSED, [(24, 5)], {"q": 2, "k": 1}, "`(h [q k] d)` of size 24 does not tell `h`, `d`"),
        (
            "(h d) -> h d",
            [(7,)],
            {"d": 2},
            "`(h d)` is 7, which no size of `h` makes with d = 2, in a tensor of shape 7",
        ),
        ("(h d) -> h d", [(7,)], {"d": 2, "h": 3}, "`(h d)` is 7, not 6 with h = 3, d = 2, in a tensor of shape 7"),
        (
            "[a b] -> a, b",
            [(4,)],
            {"a": 4},
            "`[a b]` is 4, which no size of `b` makes with a = 4, in a tensor of shape 4",
        ),
        ("a i, b i -> [a b] i", [(2, 3), (2, 4)], {}, "`i` is 4, not 3, in a tensor of shape 2 x 4"),
        ("1 e -> e", [(2, 3)], {}, "`1` is 2, not 1, in a tensor of shape 2 x 3"),
    ],
)
def test_tensors_and_sizes_that_do_not_fit(text, shapes, sizes, message):
    for call in (
        Pattern.parse(text).shapes,
        lambda shapes, sizes: Pattern.parse(text).apply([torch.empty(s) for s in shapes], sizes),
    ):
        with pytest.raises(PatternError) as caught:
            call(shapes, sizes)
        assert caught.value.message == message


def test_kinds_are_not_mixed():
    with pytest.raises(PatternError) as caught:
        Pattern.parse("a, b -> [a b]").apply([torch.ones(2), torch.ones(2, dtype=torch.int8)], {})
    assert caught.value.message == "tensors of several kinds cannot be joined: torch.float32 on cpu, torch.int8 on cpu"


def test_how_an_error_reads():
    with pytest.raises(ValueError, match="only") as caught:
        Pattern.parse("i, (h [q k] d) -> i, [(h q d) (h v d)]")
    assert (
        str(caught.value)
        == """\
error: the block `h k d` is on the left side only
  --> pattern:1:4
   |
 1 | i, (h [q k] d) -> i, [(h q d) (h v d)]
   |    ^^^^^^^^^^^
   = blocks of the other side: `i`, `h q d`, `h v d`"""
    )
    with pytest.raises(ValueError, match="given") as caught:
        Pattern.parse("i -> 1 i").inverse().shapes([(3,), (4,)], {"i": 3})
    assert (
        str(caught.value)
        == """\
error: tensors wanted: 1, given: 2
  --> pattern:1:6
   |
 1 | i -> 1 i
   |      ^^^"""
    )
    with pytest.raises(PatternError) as caught:
        Pattern.parse("heads i -> i heads").shapes([(3, 4)], {"head": 3})
    assert caught.value.notes == ("names: `heads`, `i`",)
    assert caught.value.help == "a name of the pattern is similar: `heads`"


@settings(max_examples=100, deadline=None)
@given(st.text("ab1 ()[],->.\t\n\u00e92", max_size=30))
def test_any_text_is_a_pattern_or_a_pattern_error(text):
    try:
        Pattern.parse(text)
    except PatternError as error:
        assert str(error).startswith("error: ")  # noqa: PT017 - which texts fail is not known


@pytest.mark.parametrize(
    "text", ["(" * 499, "[" * 480 + "a", "(" * 400 + "a" + ")" * 400 + " -> a", "1 " * 490 + "-> 1"]
)
def test_deep_and_long_texts_are_read_without_recursion(text):
    if "->" not in text:
        with pytest.raises(PatternError, match="found the end"):
            Pattern.parse(text)
    else:
        Pattern.parse(text).inverse().shapes([(1,)], {})
