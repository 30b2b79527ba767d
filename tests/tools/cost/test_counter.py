"""Counts, compared with `torch.utils.flop_counter`, the modules, the cache, and single layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import tfkit
from tfkit.errors import SpecError
from tfkit.graph.decode_split import static_inputs
from tfkit.graph.expand import Graph
from tfkit.tools.common.memory_needs import cache_size
from tfkit.tools.cost import counter, model_step
from tfkit.tools.cost.cost import cost
from tfkit.tools.cost.counter import DeviceKernels, Observer
from tfkit.tools.cost.model_step import StepShape, make_inputs
from tfkit.tools.cost.shape_rules import dense_tensor, rule_of
from tfkit.tools.params.count import count_params

from ...small_specs import OPERATIONS, covering, reduced

aten: Any = torch.ops.aten
B, T, S = 2, 8, 6
SAMPLE = {
    "gpt2": [],
    "t5_small": [],
    "vaswani_base": [],
    "llama3_8b": ["decoder.n_layers=2"],
    "gemma2_2b": ["decoder.n_layers=2"],
    "mixtral_8x7b": ["decoder.n_layers=2"],
}
"""What is held against others always; all other specs are as they are, and slow."""


def quick(*names: str) -> list[Any]:
    """Specs with every operation of torch; slow are those that are not named. `check` counts all that ship, reduced."""
    return covering(*names, among=OPERATIONS)


def load(name: str) -> Graph:
    return tfkit.load(name, sets=SAMPLE.get(name, []))


def memory_length(graph: Graph) -> int | None:
    return S if static_inputs(graph) else None


def counted(graph: Graph) -> tuple[int, int]:
    """FLOPs of forward and backward, as torch counts them where attention is not one operation."""
    model = tfkit.build(graph, device="meta").train()
    inputs = make_inputs(graph, StepShape("train", B, T, memory_length(graph)), torch.float32)
    with FlopCounterMode(display=False) as forward:
        out = model(**inputs)
    total = torch.stack([leaf.sum() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]).sum()
    with FlopCounterMode(display=False) as backward:
        total.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", quick("gemma2_2b", "mixtral_8x7b"))
def test_flops_are_those_of_the_flop_counter(name: str) -> None:
    graph = load(name)
    actual = cost(graph, batch=B, length=T, memory_length=memory_length(graph), dtype=torch.float32).total
    assert (actual.flops_forward, actual.flops_backward) == counted(graph)


def test_a_layer_that_reads_the_input_of_the_model_computes_no_gradient_of_it() -> None:
    """The first of three equal layers: its input is neither an embedding nor the output of a norm."""
    graph = tfkit.loads("""
    {tfkit: 1, name: vectors, d_model: 16, inputs: {x: {type: features, width: 16}}, graph: {
      encoder: {block: encoder, n_layers: 3, placement: post, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}},
      classes: {block: classifier, n_classes: 3}}}""")
    actual = cost(graph, batch=B, length=T, dtype=torch.float32).total
    assert (actual.flops_forward, actual.flops_backward) == counted(graph)
    assert actual.flops_backward < 2 * actual.flops_forward


@pytest.mark.parametrize("name", quick("t5_small", "albert_base"))
def test_layers_that_are_alike_cost_what_they_cost_one_by_one(name: str) -> None:
    graph = load(name)
    options: dict[str, Any] = {"batch": B, "length": T, "memory_length": memory_length(graph)}
    merged, single = cost(graph, **options), cost(graph, **options, merge=False)
    assert merged.parts == single.parts
    rises = ("peak", "peak_recomputed")  # shared weights add up their gradients layer by layer
    for key, actual in vars(merged.memory).items():
        assert actual == pytest.approx(getattr(single.memory, key), rel=0.02 if key in rises else 0)


@pytest.mark.parametrize("name", quick("t5_small"))
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_every_rule_says_what_torch_says(name: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(func: Any) -> Callable[..., Any] | None:
        rule = rule_of(func)

        def both(*args: Any, **kwargs: Any) -> Any:
            assert rule is not None
            actual, expected = rule(*args, **kwargs), func(*args, **kwargs)
            assert looks(actual) == looks(expected), func
            return actual

        return None if rule is None else both

    monkeypatch.setattr(counter, "rule_of", checked)
    graph = load(name)
    lacks_cache = mode == "decode" and cache_size(graph) is None
    with pytest.raises(SpecError, match="cannot be decoded") if lacks_cache else nullcontext():
        cost(graph, batch=B, length=T, mode=mode, memory_length=memory_length(graph))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, INDEX = meta(2, 3, 5), meta(2, 4, 5, dtype=torch.int64)
ROWS, IDS = meta(6, 7), meta(6, dtype=torch.int64)
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.constant_pad_nd.default, (X, [0, 2]), {}),
    (aten.constant_pad_nd.default, (X, [1, 2, 4, 0]), {}),
    (aten.topk.default, (X, 2, 1), {}),
    (aten.sort.stable, (X,), {"stable": True, "dim": 1}),
    (aten.gather.default, (meta(2, 6, 5), 1, INDEX), {}),
    (aten.index_select.default, (X, 1, IDS), {}),
    (aten.mean.dim, (X, [1]), {}),
    (aten.mean.dim, (X, [0, -1], True), {"dtype": torch.float64}),
    (aten.amax.default, (X, [-2], True), {}),
    (aten.all.dim, (X > 0, 1), {}),
    (aten.sum.default, (IDS.int(),), {}),
    (aten.sum.dim_IntList, (X, [0], True), {"dtype": torch.float32}),
    (aten.sum.dim_IntList, (INDEX.int(), [1]), {}),
    (aten.cumsum.default, (X.transpose(1, 2), 1), {"dtype": torch.float32}),
    (aten.cat.default, ([X, meta(2, 4, 5)], 1), {}),
    (aten.cat.default, ([X, meta(2, 3, 6, dtype=torch.float32)], -1), {}),
    (aten.stack.default, ([X, X, X, X], 1), {}),
    (aten.stack.default, ([X, X, X, X], -1), {}),
    (aten.mm.default, (ROWS, meta(7, 4)), {}),
    (aten.bmm.default, (X, meta(2, 5, 4)), {}),
    (aten.addmm.default, (meta(4), ROWS, meta(7, 4)), {}),
    (aten.embedding.default, (meta(9, 4), INDEX), {}),
    (aten.embedding_dense_backward.default, (meta(2, 4, 5, 8), INDEX, 9, -1, False), {}),
    (aten.arange.default, (7,), {"device": "meta"}),
    (aten.arange.start, (2, 7), {"device": "meta"}),
    (aten.arange.start_step, (2, 12, 3), {"device": "meta"}),
    (aten.arange.start_step, (2, 12, 2.5), {"device": "meta"}),
    (aten.zeros.default, ([2, 3],), {"device": "meta"}),
    (aten.full.default, ([2, 3], 7), {"device": "meta", "dtype": torch.int32}),
    (aten.new_zeros.default, (X, [4, 1]), {}),
    (aten.new_full.default, (X, [4, 1], 3), {"dtype": torch.float32}),
    (aten.full_like.default, (X, 3), {"dtype": torch.float32}),
    (aten.ones_like.default, (X.transpose(1, 2),), {"dtype": torch.bool}),
    (aten.clone.default, (X.transpose(1, 2),), {"memory_format": torch.contiguous_format}),
    (aten.searchsorted.Tensor, (meta(9), X), {}),
    (aten.nll_loss_forward.default, (ROWS, IDS, None, 0, -100), {}),
    (aten.nll_loss_forward.default, (ROWS, IDS, None, 1, -100), {}),
    (aten.nll_loss_backward.default, (meta(), ROWS, IDS, None, 1, -100, meta()), {}),
    (aten.native_dropout.default, (X, 0.3, True), {}),
    (aten.native_layer_norm.default, (X, [5], meta(5), meta(5), 1e-5), {}),
    (aten.slice_backward.default, (X, [2, 9, 5], 1, 0, 3, 1), {}),
    (aten.select_backward.default, (meta(2, 5), [2, 9, 5], 1, 4), {}),
    (aten.masked_fill.Scalar, (X, X > 0, 2.0), {}),
    (aten.scatter.src, (X, 1, INDEX, meta(2, 4, 5)), {}),
    (aten.flip.default, (X.transpose(0, 1), [1]), {}),
    (aten.add.Tensor, (X, meta(4, 1, 3, 1)), {}),
    (aten.mul.Tensor, (INDEX, 0.5), {}),
    (aten.div.Tensor, (INDEX, 2), {}),
    (aten.div.Tensor_mode, (INDEX, 2), {"rounding_mode": "floor"}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.gt.Scalar, (X, 1), {}),
    (aten.exp.default, (INDEX,), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS, ids=[str(func) for func, _, _ in CALLS])
def test_rules_agree_with_torch_on_unequal_sizes(func: Any, args: Any, kwargs: Any) -> None:
    rule = rule_of(func)
    assert rule is not None
    assert looks(rule(*args, **kwargs)) == looks(func(*args, **kwargs))


def looks(out: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def test_results_have_the_memory_order_that_torch_gives_them() -> None:
    draw = random.Random(0)
    for _ in range(500):
        shape = draw.choices([1, 2, 3], k=draw.randint(1, 4))
        arguments = [view(draw, shape) for _ in range(draw.randint(1, 3))]
        expected = (torch.exp, torch.add, torch.addcmul)[len(arguments) - 1](*arguments)
        actual = dense_tensor(expected.shape, [argument.to("meta") for argument in arguments], expected.dtype)
        assert memory_order(actual) == memory_order(expected), [argument.stride() for argument in arguments]


def view(draw: random.Random, shape: list[int]) -> Tensor:
    """A tensor that broadcasts to a shape, with its axes in any order in memory, and gaps between them."""
    order, sizes = draw.sample(range(len(shape)), len(shape)), [draw.choice([size, size, 1]) for size in shape]
    operand = torch.empty([sizes[axis] + draw.choice([0, 0, 1]) for axis in order])
    return operand.permute(torch.tensor(order).argsort().tolist())[tuple(slice(size) for size in sizes)]


def memory_order(value: Tensor) -> list[int]:
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


@pytest.mark.parametrize("name", covering("bloom_560m", among=[*OPERATIONS, "bart_base"]))
def test_a_cost_adds_up(name: str) -> None:
    graph = tfkit.load(name)
    params = count_params(graph)
    actual = cost(graph, batch=1, length=T)
    assert actual.total.parameters == params.total
    assert actual.memory.weights == 2 * (params.total + params.buffers)
    assert {row.name: row.parameters for row in actual.rows() if row.parameters} == {
        row.name: row.parameters for row in params.rows if row.parameters
    }
    for by in ("node", "layer"):
        assert sum(row.flops for row in actual.rows(by)) == actual.total.flops > 0
    assert actual.total.active_parameters <= actual.total.parameters
    assert 0 < actual.total.visible_forward <= actual.total.flops_forward
    fixed = actual.memory.weights + actual.memory.optimizer
    assert min(actual.memory.peak, actual.memory.peak_recomputed) >= fixed + actual.memory.gradients
    size = cache_size(graph)
    assert actual.memory.cache_per_token == (0 if size is None else size.per_token)
    if size is None:
        return
    limit = size.max_len or T
    token = cost(graph, length=limit, mode="decode")
    memory = size.per_memory_token * (token.memory_length or 0)
    assert token.memory.cache == (size.at_max_len or size.per_token * T) + memory


@pytest.mark.parametrize("by_name", [True, False])
def test_a_mask_is_read_however_attention_is_called(by_name: bool) -> None:
    q = torch.empty(2, 4, 6, 8, device="meta")
    mask = torch.empty(2, 1, 6, 6, device="meta")
    watch = counter.Observer([])
    with DeviceKernels(watch, "cuda"), watch:
        if by_name:
            F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=mask)
        else:
            F.scaled_dot_product_attention(q, q, q, mask)
    assert sum(watch.root.tally("").read.values()) == q.nbytes + mask.nbytes


def test_a_mask_of_true_and_false_is_kept_as_numbers_by_each_call() -> None:
    def attend(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, q, q, mask), q, q, mask)

    q, mask = torch.randn(2, 4, 6, 8, requires_grad=True), torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    saved: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda x: saved.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
        attend(q, mask)
    watch = counter.Observer([])
    with DeviceKernels(watch, "cpu"), watch, saved_tensors_hooks(watch.keep, watch.restore):
        output = attend(q.to("meta"), mask.to("meta"))
    assert output.requires_grad
    assert watch.root.tally("").saved == sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_a_tensor_is_not_saved_if_no_output_depends_on_it() -> None:
    """A recurrence without a cache drops its last state, and the graph behind it."""
    x, watch = torch.empty(3, 4, device="meta", requires_grad=True), counter.Observer([])
    with watch, saved_tensors_hooks(watch.keep, watch.restore):
        y = x.exp()
        state = y.exp()
        assert watch.root.tally("").saved == y.nbytes + state.nbytes
        del state
        assert watch.root.tally("").saved == y.nbytes
        y.sum().backward()
        del y
    assert watch.root.tally("").saved == x.nbytes


@pytest.mark.parametrize("name", covering("bert_base"))
def test_equal_chunks_of_the_loss_count_as_if_each_ran(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = reduced(name)
    for batch in (4096, 4099):  # nine chunks: equal ones, and ones that differ by a row
        merged = cost(graph, batch=batch, length=8)
        with monkeypatch.context() as all_chunks:
            all_chunks.setattr(model_step, "REPEATED", 2**62)
            assert cost(graph, batch=batch, length=8) == merged


def test_a_batch_of_any_size_takes_no_longer() -> None:
    costs = [cost(reduced("gpt2"), batch=batch, length=8) for batch in (4096, 4096 * 10**5)]
    small, large = (sum(part.flops for part in result.parts) for result in costs)
    assert large == small * 10**5


def test_a_cast_of_a_weight_is_no_weight() -> None:
    weight, x = torch.ones(4, 3, device="meta"), torch.ones(2, 3, dtype=torch.bfloat16, device="meta")
    observer = Observer([weight])
    with observer:
        product = x @ weight.bfloat16().mT
    assert product.shape == (2, 4)
    assert observer.weights == {observer.live.number(weight)}
