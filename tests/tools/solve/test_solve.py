"""`solve`: published sizes of families, exact counts, and the optimum of an exhaustive search of the grid."""

from __future__ import annotations

from fractions import Fraction
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfkit
from tfkit.plugin.manager import load_plugins
from tfkit.tools.params.count import count_params
from tfkit.tools.solve.budget import Budget, Size, parameters_of
from tfkit.tools.solve.search import Form, Grid
from tfkit.tools.solve.sizes import Family, HiddenWidth
from tfkit.tools.solve.solve import solve

from ...sampling import chosen, slow, some
from ...small_specs import PROGRAMS

PLUGINS = load_plugins()
TINY = """\
tfkit: 1
name: tiny
d_model: 64
vocab_size: 50
max_len: 8
bias: false
norm: rmsnorm
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 4, attention: {n_heads: 4}, ffn: {kind: swiglu, d_ff: 168}}
  logits: {block: lm_head}
"""


def sizes_of(spec: str, amount: float, *sets: str, keep: tuple[str, ...] = ()) -> list[Size]:
    return list(solve(spec, Budget("params", amount), sets=sets, keep=keep, plugins=PLUGINS).sizes)


def counted(spec: str, size: Size) -> int:
    return count_params(tfkit.load(spec, sets=size.sets, plugins=PLUGINS)).total


@pytest.mark.parametrize(
    ("family", "amount", "published", "sets"),
    [
        slow(("gpt2", 1.5576e9, "gpt2_xl", ())),
        slow(("gpt2_xl", 124.4e6, "gpt2", ())),
        slow(("llama_7b", 13.016e9, "llama_13b", ())),
        slow(("llama3_8b", 8.03e9, "llama3_8b", ())),
        ("llama3_8b", 70.55e9, "llama3_70b", ("decoder.attention.n_kv_heads=8",)),
        slow(("t5_small", 222.9e6, "t5_base", ())),
        slow(("t5_base", 60.5e6, "t5_small", ())),
        slow(("bert_base", 335.174e6, "bert_large", ())),
        slow(("deepseek_v3", 671e9, "deepseek_v3", ())),
        slow(("gemma3_1b", 1e9, "gemma3_1b", ())),
    ],
)
def test_published_sizes_are_found(family: str, amount: float, published: str, sets: tuple[str, ...]) -> None:
    actual = sizes_of(family, amount, *sets)
    graph = tfkit.load(published, plugins=PLUGINS)
    stack = next(node.config for node in graph.nodes if hasattr(node.config, "n_layers"))
    expected = (stack.n_layers, stack.d_model, stack.attention.n_heads, parameters_of(graph)[0])  # type: ignore[attr-defined]
    assert expected in [(next(iter(s.n_layers.values())), s.d_model, s.n_heads, s.parameters) for s in actual]
    if published == family:
        assert actual[0].sets == ()


@pytest.mark.parametrize(
    ("family", "active"),
    [
        ("mixtral_8x7b", 13e9),  # https://arxiv.org/abs/2401.04088, abstract
        slow(("gpt2", 124439808)),
    ],
)
def test_a_published_number_of_active_parameters_is_that_of_the_published_size(family: str, active: float) -> None:
    local, *rest = solve(family, Budget("active", active), plugins=PLUGINS).sizes
    assert local.sets == ()
    for size in [local, *rest[:2]]:
        graph = tfkit.load(family, sets=size.sets, plugins=PLUGINS)
        assert size.value == count_params(graph).active
        assert size.parameters == count_params(graph).total


@pytest.mark.parametrize(
    "spec", some(["gpt2", "llama_7b", "t5_small", "gemma3_1b", "mixtral_8x7b", "distilbart_cnn_12_6"], 1)
)
def test_the_changes_give_that_count(spec: str) -> None:
    for size in sizes_of(spec, 400e6 if spec != "mixtral_8x7b" else 9e9):
        assert counted(spec, size) == size.parameters == size.value
        assert size.difference == size.parameters - (400e6 if spec != "mixtral_8x7b" else 9e9)


@pytest.mark.parametrize(
    "spec",
    chosen(
        ["llama_7b", "palm_540b", "deepseek_v2_lite", "t5gemma_2b_2b", "block_512", "bert_base"],
        {"palm_540b", "block_512"},
    ),
)
def test_a_form_is_what_is_built(spec: str) -> None:
    """Rounded hidden widths, arithmetic, experts and latents, widths by node, features, token types."""
    family = Family.of(spec, PLUGINS)
    form = Form(family, lambda *size: parameters_of(family.load(family.changes(*size)))[0])
    for depth, width in [(family.depths[1], 3), (family.depths[2], family.width + 5), (family.depths[0], 1)]:
        assert form(depth, width) == parameters_of(family.load(family.changes(depth, width)))[0]


def by_hand(n_layers: int, d_model: int) -> int:
    """The parameters of TINY: d_ff is 2.625 times d_model, in multiples of 8 as far as those are fine enough."""
    exact, step = d_model * 168 / 64, 8
    while step > 1 and exact < 16 * step:
        step //= 2
    d_ff = int(exact / step + 0.5) * step
    return 2 * 50 * d_model + n_layers * (4 * d_model**2 + 3 * d_model * d_ff + 2 * d_model) + d_model


@settings(max_examples=4, deadline=None)
@given(amount=st.floats(2e4, 2e7))
def test_the_best_of_the_grid(tmp_path_factory: pytest.TempPathFactory, amount: float) -> None:
    """All sizes of up to 200 layers and 120 heads, counted by hand: none is nearer than the one of its kind."""
    path = tmp_path_factory.getbasetemp() / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    actual = sizes_of(str(path), amount)
    grid = [(n, 16 * heads) for heads in range(1, 120) for n in range(1, 200)]
    kinds: dict[int, list[tuple[float, int, int]]] = {}
    for n, d in grid:
        kinds.setdefault(round(2 * log2(d / n / 16)), []).append((abs(by_hand(n, d) - amount), n, d))
    best = {kind: min(item) for kind, item in kinds.items() if abs(kind) <= 2}
    near = {kind: value for kind, value in best.items() if value[0] <= 0.02 * amount}
    if not near:
        assert len(actual) == 1
        assert abs(actual[0].difference) == min(value[0] for value in best.values())
        return
    shapes = [log2(s.d_model / s.n_layers["decoder"] / 16) for s in actual if s.d_model]
    assert {round(2 * shape): abs(s.difference) for shape, s in zip(shapes, actual, strict=True)} == {
        kind: value[0] for kind, value in near.items()
    }
    assert shapes == sorted(shapes, key=abs)
    assert all(s.parameters == by_hand(s.n_layers["decoder"], s.d_model or 0) for s in actual)


@pytest.mark.slow
def test_heads_and_hidden_widths_of_a_family_stay() -> None:
    for size in sizes_of("llama3_8b", 30e9):
        d_model, heads, kv_heads, d_ff = (x or 0 for x in (size.d_model, size.n_heads, size.n_kv_heads, size.d_ff))
        assert (d_model, heads) == (128 * heads, 4 * kv_heads)
        assert d_ff == 3.5 * d_model


@pytest.mark.slow
def test_what_else_makes_a_family_stays() -> None:
    for size in sizes_of("gemma2_2b", 700e6):
        assert size.n_layers["decoder"] % 2 == 0
    for size in sizes_of("distilbart_cnn_12_6", 500e6):
        assert size.n_layers["encoder"] == 2 * size.n_layers["decoder"]
    for size in sizes_of("deepseek_v2_lite", 3e9):
        graph = tfkit.load("deepseek_v2_lite", sets=size.sets, plugins=PLUGINS)
        (decoder,) = [node.config for node in graph.nodes if node.name == "decoder"]
        assert (decoder.ffn.n_experts, decoder.attention.kv_rank) == (64, 512)  # type: ignore[attr-defined]
        assert [name for name, _ in decoder.plan()][:2] == ["dense", "base"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("d_ff", "numerator", "rounded"),
    [(11008, 5, 13824), (11008, 8, 22016), (14336, 8, 28672), (2730, 4, 2730), (1280, 1, 320)],
)
def test_hidden_widths_are_rounded_as_published(d_ff: int, numerator: int, rounded: int) -> None:
    """LLaMA 13B has 13824, 65B 22016, Llama 3 70B 28672; all from the 4096 of their smallest.

    The unit of rounding gets smaller with the width: to a multiple of 128, 320 would become 384.
    """
    assert HiddenWidth((), d_ff).at(Fraction(numerator, 4)) == rounded


@pytest.mark.slow
def test_kept_sizes() -> None:
    first, other = sizes_of("gpt2", 1e9, keep=("d_model",))
    assert {first.d_model, other.d_model} == {768}
    assert first.difference * other.difference < 0
    assert {size.n_layers["decoder"] for size in sizes_of("gpt2", 1e9, keep=("n_layers",))} == {12}
    assert {(size.d_model, size.n_heads) for size in sizes_of("gpt2", 1e9, "d_model=1280")} == {(1280, 20)}
    assert {size.n_layers["decoder"] for size in sizes_of("gpt2", 1e9, "decoder.n_layers=36")} == {36}
    half = sizes_of("t5_small", 100e6, "decoder.n_layers=2")
    assert {size.n_layers["decoder"] for size in half} == {2}
    assert len({size.n_layers["encoder"] for size in half}) > 1
    like = sizes_of("t5_small", 100e6, "encoder.n_layers=2")  # the decoder takes its keys from the encoder
    assert {(size.n_layers["encoder"], size.n_layers["decoder"]) for size in like} == {(2, 2)}


@pytest.mark.slow
def test_other_changes_hold_for_every_size() -> None:
    for size in sizes_of("gpt2", 200e6, "vocab_size=1000", "decoder.ffn.d_ff=2 * d_model"):
        assert size.sets[:2] == ("vocab_size=1000", "decoder.ffn.d_ff=2 * d_model")
        assert size.d_ff == 2 * (size.d_model or 0)
        assert counted("gpt2", size) == size.parameters
    assert {size.d_ff for size in sizes_of("gpt2", 100e6, "decoder.ffn.d_ff=1024")} == {1024}
    for size in sizes_of("llama3_8b", 8e9, "decoder.attention.n_kv_heads=2"):
        assert size.n_kv_heads == 2


def test_layers_that_share_their_weights() -> None:
    for size in sizes_of("albert_base", 18e6):
        assert size.parameters == counted("albert_base", size)


@pytest.mark.parametrize(
    ("budget", "sets", "keep", "text"),
    [
        (
            1e6,
            (),
            (),
            "no size of gpt2 is as small as 1,000,000 parameters\n   = the smallest size has 3,332,096 parameters",
        ),
        (1e6, (), (), "   = 3,281,984 of them are embedding tables"),
        (1e12, (), ("d_model",), "no size of gpt2 is as large as 1,000,000,000,000 parameters"),
        (1e9, ("d_model=1000",), (), "`d_model=1000` cannot be a width of the family: its heads need a multiple of 64"),
        (1e9, ("d_model=x",), (), "`d_model` must be an integer from 1 to 67,108,864; got `x`"),
        (1e9, ("decoder.n_layers=2 * 6",), (), "`decoder.n_layers` must be a positive integer"),
        (1e9, ("d_model=1280",), ("n_layers",), "no size is left to solve for"),
        (1e9, ("decoder.atention.n_heads=2",), (), "unknown key `atention`"),
    ],
)
def test_what_cannot_be_met(budget: float, sets: tuple[str, ...], keep: tuple[str, ...], text: str) -> None:
    with pytest.raises(tfkit.SpecError) as raised:
        sizes_of("gpt2", budget, *sets, keep=keep)
    assert text in str(raised.value)


@pytest.mark.parametrize(("budget", "depths"), [(35, [3, 4]), (5, [1]), (200, [8])])
def test_sizes_on_both_sides_of_a_budget(budget: float, depths: list[int]) -> None:
    grid = Grid(range(1, 9), range(10, 11), None, 5.0, lambda depth, width: depth * width)
    assert [point.depth for point in grid.around(budget, 10)] == depths


@pytest.mark.slow
@pytest.mark.parametrize("spec", PROGRAMS)
def test_a_spec_has_a_family(spec: str) -> None:
    """Each is found from its own count, and twice as much is there too."""
    graph = tfkit.load(spec, plugins=PLUGINS)
    local, _ = parameters_of(graph)
    assert solve(spec, Budget("params", local), plugins=PLUGINS).sizes[0].sets == ()
    for size in sizes_of(spec, 2 * local):
        assert counted(spec, size) == size.parameters
