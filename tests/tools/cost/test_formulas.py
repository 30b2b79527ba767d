"""FLOPs of each component, compared with handwritten formulas: 2 for a multiplication and an addition."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.tools.check.components import with_component
from tfkit.tools.cost.cost import Amounts, Cost, Mode, cost

B, T, S = 3, 40, 56  # sequences, tokens, tokens of the memory


def of(spec: str, mode: Mode = "train", **options: int) -> Cost:
    return cost(tfkit.load(spec), batch=B, length=T, mode=mode, **options)


def forward(actual: Cost) -> dict[str, int]:
    """FLOPs of the forward by component, those that have some."""
    return {row.name: row.flops_forward for row in actual.rows() if row.flops_forward}


def pairs(n: int, left: int | None = None) -> int:
    """Pairs of query and key of a causal mask, which lets `left` earlier keys through."""
    return sum(min(i, n if left is None else left) + 1 for i in range(n))


def test_gpt2() -> None:
    d, layers, vocab = 768, 12, 50257
    actual = of("gpt2")
    scores = layers * 2 * (2 * B * T * T * d)  # queries times keys, weights times values
    assert forward(actual) == {
        "attention": layers * (2 * B * T * d * 3 * d + 2 * B * T * d * d) + scores,
        "ffn": layers * 2 * (2 * B * T * d * 4 * d),
        "head": 2 * B * T * d * vocab,
    }
    total = actual.total
    assert total.flops_backward == 2 * total.flops_forward
    assert total.scores_forward == scores
    assert total.visible_forward == total.flops_forward - scores + scores * pairs(T) // T**2
    assert total.visible_backward == 2 * total.visible_forward


def test_llama3_with_fewer_heads_of_keys() -> None:
    d, h, g, width, hidden, layers, vocab = 4096, 32, 8, 128, 14336, 32, 128256
    actual = of("llama3_8b")
    project = 2 * B * T * d * (2 * h * width + 2 * g * width)
    assert forward(actual) == {
        "attention": layers * (project + 2 * (2 * B * T * T * h * width)),
        "ffn": layers * 3 * (2 * B * T * d * hidden),
        "head": 2 * B * T * d * vocab,
    }
    assert actual.total.flops_backward == 2 * actual.total.flops_forward


def test_t5_with_an_encoder_and_cross_attention() -> None:
    d, inner, hidden, layers, vocab = 512, 8 * 64, 2048, 6, 32128
    actual = of("t5_small", memory_length=S)
    value = 2 * B * d * inner  # a projection of one token of each sequence
    pair = 2 * (2 * B * inner)  # one query and one key
    assert forward(actual) == {
        "attention": layers * (4 * value * S + pair * S * S) + layers * (4 * value * T + pair * T * T),
        "cross_attention": layers * (2 * value * T + 2 * value * S + pair * T * S),
        "ffn": layers * 2 * (2 * B * (S + T) * d * hidden),
        "head": 2 * B * T * d * vocab,
    }
    assert {row.name: row.flops_backward for row in actual.rows() if row.flops} == {
        name: 2 * flops for name, flops in forward(actual).items()
    }
    hidden_pairs = layers * pair * (T * T - pairs(T))  # of the decoder's self-attention alone
    assert actual.total.visible_forward == actual.total.flops_forward - hidden_pairs


def test_a_window_hides_what_is_before_it() -> None:
    graph = tfkit.load("mistral_7b", sets=["decoder.n_layers=2", "decoder.attention.mask.left=9"])
    actual = cost(graph, batch=B, length=T)
    share = actual.total.scores_forward // T**2
    assert actual.total.visible_forward == actual.total.flops_forward - share * (T * T - pairs(T, 9))


class NoCoreConfig(tfkit.AttentionConfig):
    """Attention whose module has no core; `form` is the way in which it multiplies."""

    kind: Literal["no_core"] = "no_core"
    form: Literal["einsum", "folded", "fused", "states"]

    @property
    def cached(self) -> tuple[tfkit.Cached, ...]:
        return (tfkit.Cached(self.n_heads, self.head_width), tfkit.Cached(self.n_heads, self.head_width))

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        return NoCore(self, d_memory or self.d_model)


class NoCore(nn.Module):
    def __init__(self, config: NoCoreConfig, d_source: int) -> None:
        super().__init__()
        self.form, self.n_heads, d = config.form, config.n_heads, config.d_model
        self.k, self.v = (tfkit.Linear(d_source, d, bias=False) for _ in range(2))
        self.q = nn.Parameter(torch.empty(config.n_heads, d, d // config.n_heads))
        self.output = tfkit.Linear(d, d, bias=False, residual=True)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.q)

    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        q, (k, v) = torch.einsum("b t d, h d e -> b h t e", x, self.q), self.keys_values(x, context)
        if self.form == "fused":
            y = F.scaled_dot_product_attention(q, k, v, context.mask)
        elif self.form == "states":
            y = q @ (k.mT @ v)
        elif self.form == "folded":  # the queries of all heads are rows of one matrix, for the first head of keys
            weights = (q.flatten(1, 2) @ k[:, 0].mT).unflatten(1, (self.n_heads, -1))
            y = (weights.flatten(1, 2) @ v[:, 0]).unflatten(1, (self.n_heads, -1))
        else:
            weights = torch.einsum("b h q d, b h k d -> b h q k", q, k)
            y = torch.einsum("b h q k, b h k d -> b h q d", weights, v)
        return self.output(y.transpose(1, 2).flatten(2))

    def keys_values(self, x: Tensor, context: tfkit.Context) -> tuple[Tensor, Tensor]:
        memory, cache = context.memory, context.cache
        if memory is None and cache is not None and self.k.in_features != x.size(2):
            return cache.tensors[0], cache.tensors[1]
        new = [
            layer(x if memory is None else memory).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.k, self.v)
        ]
        if memory is not None:
            return new[0], new[1]
        return tfkit.update_cache(new[0], context, 0), tfkit.update_cache(new[1], context, 1)


def of_no_core(form: str, mode: Mode, length: int = T, **changes: Any) -> Amounts:
    """Total cost of a decoder of two layers with width 16, four heads and the attention above."""
    attention = {"kind": "no_core", "form": form, "n_heads": 4, **changes}
    decoder = {"block": "decoder", "n_layers": 2, "attention": attention, "ffn": {"kind": "relu", "d_ff": 8}}
    graph = {"embedding": {"block": "embedding"}, "decoder": decoder, "head": {"block": "lm_head"}}
    spec = {"tfkit": 1, "name": "a", "d_model": 16, "vocab_size": 9, "max_len": 99, "graph": graph}
    plugins = with_component(tfkit.load_plugins(), NoCoreConfig)
    return cost(tfkit.loads(str(spec), plugins=plugins), batch=B, length=length, mode=mode).total


@pytest.mark.parametrize("form", ["einsum", "folded", "fused"])
@pytest.mark.parametrize("length", [T, 16])
def test_pairs_of_an_attention_without_a_core(form: str, length: int) -> None:
    """Products of the backward are of pairs if they belong to a product of pairs, also if all axes are equal."""
    scores = 2 * 2 * (2 * B * length * length * 16)
    train, prompt, token = (of_no_core(form, mode, length) for mode in ("train", "prefill", "decode"))
    assert (train.scores_forward, train.scores_backward) == (scores, 2 * scores)
    assert train.flops_forward - train.visible_forward == scores - scores * pairs(length) // length**2
    assert (prompt.scores_forward, token.scores_forward) == (scores, scores // length)
    windowed = of_no_core(form, "decode", length, mask={"left": 9, "right": 0})
    assert windowed.scores_forward == scores * 10 // length**2


def test_states_have_no_pairs() -> None:
    assert of_no_core("states", "train").scores_forward == 0


def test_latent_attention_multiplies_pairs_with_and_without_absorbed_weights() -> None:
    """Queries and keys are wider than values; a single query is compared with latents instead of keys."""
    pytest.importorskip("tfkit_mla")
    h, nope, rope, value, latent, layers = 16, 128, 64, 128, 512, 27
    train, token = of("deepseek_v2_lite").total, of("deepseek_v2_lite", "decode").total
    assert train.scores_forward == layers * 2 * B * T * T * h * (nope + rope + value)
    assert token.scores_forward == layers * 2 * B * T * h * (latent + rope + latent)


def test_experts_count_as_often_as_tokens_go_through_them() -> None:
    d, hidden, n, k, layers, tokens = 4096, 14336, 8, 2, 32, B * (T + 1)  # so many that experts get unequal shares
    actual = cost(tfkit.load("mixtral_8x7b"), batch=B, length=T + 1)
    assert k * tokens % n
    assert forward(actual)["ffn"] == layers * (k * 3 * (2 * tokens * d * hidden) + 2 * tokens * d * n)
    experts = layers * 3 * d * hidden
    row = next(row for row in actual.rows() if row.name == "ffn")
    assert row.parameters - row.active_parameters == (n - k) * experts
    assert actual.total.active_parameters == actual.total.parameters - (n - k) * experts


def test_one_more_token() -> None:
    d, h, g, width, hidden, layers, vocab, n = 4096, 32, 8, 128, 14336, 32, 128256, 100
    graph = tfkit.load("llama3_8b")
    actual = cost(graph, batch=B, length=n, mode="decode")
    matrices = layers * (d * (2 * h * width + 2 * g * width) + 3 * d * hidden) + d * vocab
    assert actual.total.flops_forward == B * (2 * matrices + layers * 4 * n * h * width)
    assert actual.total.flops_backward == 0
    minimum = 2 * matrices + actual.memory.cache  # every weight and all of the cache, in bfloat16
    assert minimum < actual.total.traffic < 1.01 * minimum


def test_a_window_bounds_what_a_token_reads() -> None:
    sets = ["decoder.n_layers=2", "decoder.attention.mask.left=9"]
    actual = cost(tfkit.load("mistral_7b", sets=sets), length=1000, mode="decode")
    assert actual.total.scores_forward == actual.total.flops_forward - 2 * (
        actual.total.active_parameters - _spared(sets)
    )
    assert actual.memory.cache == 10 * actual.memory.cache_per_token


def _spared(sets: list[str]) -> int:
    """Parameters that are no matrices of the forward: the embedding table, and norms."""
    model = tfkit.build("mistral_7b", sets=sets, device="meta")
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "norm" in name or name.startswith("embedding")
    )


def test_a_prompt_makes_logits_of_its_last_token() -> None:
    step, prompt = of("gpt2"), of("gpt2", mode="prefill")
    assert forward(prompt)["head"] == forward(step)["head"] // T
    assert forward(prompt)["attention"] == forward(step)["attention"]
    assert prompt.memory.cache == B * T * prompt.memory.cache_per_token


def test_layers_that_run_again_cost_their_forward_again() -> None:
    once, again = of("gpt2"), cost(tfkit.load("gpt2"), batch=B, length=T, recompute=True)
    rows = {row.name: row for row in once.rows("layer")}
    for row in again.rows("layer"):
        for field in ("flops", "scores", "visible", "traffic"):
            first, backward = (getattr(rows[row.name], f"{field}_{phase}") for phase in ("forward", "backward"))
            assert getattr(row, f"{field}_forward") == first
            assert getattr(row, f"{field}_backward") == backward + ("layers" in row.name) * first, field
    assert again.total.scores_backward == 3 * again.total.scores_forward
    assert again.peak == once.memory.peak_recomputed <= once.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_for_every_weight(dtype: torch.dtype) -> None:
    n, size = 124_439_808, dtype.itemsize
    memory = cost(tfkit.load("gpt2"), length=8, dtype=dtype).memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (n * size, n * size, 2 * n * size)
    assert cost(tfkit.load("gpt2"), length=8, dtype=dtype, optimizer="sgd").memory.optimizer == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_mixed_precision_keeps(dtype: torch.dtype) -> None:
    """Against AdamW on float32 copies of the weights, which is how it is done by hand."""
    graph = tfkit.load("gpt2", sets=["d_model=24", "vocab_size=500", "decoder.n_layers=2"])
    model = tfkit.build(graph, dtype=dtype)
    copies = [p.detach().float() if dtype.itemsize < 4 else p.detach() for p in model.parameters()]
    trained = [nn.Parameter(tensor) for tensor in copies]
    optimizer = torch.optim.AdamW(trained)
    for tensor in trained:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    states = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values() if tensor.dim())
    states += sum(
        tensor.nbytes for tensor, item in zip(copies, model.parameters(), strict=True) if tensor.dtype != item.dtype
    )
    assert cost(graph, length=8, dtype=dtype, optimizer="adamw_float32").memory.optimizer == states
