"""What tfkit guarantees for every component, what a cache holds, and what a spec may not say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tfkit_mla import LatentAttention, LatentAttentionConfig
from torch import Tensor, fx, nn

import tfkit
from tfkit.cli import main
from tfkit.testing import Layout, check_component, check_model

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)
FIELDS = {"n_heads": 3, "kv_rank": 8, "d_nope": 6, "d_rope": 4, "d_v": 5}
ROPE = {"kind": "rope", "style": "interleaved"}


@pytest.mark.slow
@pytest.mark.parametrize("within", ["decoder", "encoder", "memory"])
def test_it_has_every_property(within: Layout) -> None:
    fields = {"q_rank": 7, "bias": True, "kv_scale": 1.5, "position": ROPE, "gate": "sigmoid"}
    check_component(LatentAttentionConfig, fields={**FIELDS, **fields}, within=[within])


def test_it_trains_is_scripted_and_is_read_in_pieces() -> None:
    graph = graph_of(q_rank=7, bias=True, kv_scale=1.5, position=ROPE, mask={"left": 2, "right": 0})
    check_model(graph, plugins=PLUGINS, only=["weights", "padded-gradients", "look-ahead", "script", "cached"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"position": ROPE, "temperature": {"beta": 0.7, "original_max_len": 3}},
        {"position": "alibi", "latent_norm": "layernorm", "q_rank": 7},
        {"position": {"kind": "rope", "width": 2}, "mask": {"left": 2, "right": 0}},
    ],
)
def test_it_keeps_them_with_other_fields(fields: dict[str, Any]) -> None:
    check_component(LatentAttentionConfig, fields={**FIELDS, **fields}, within=["decoder"])


@pytest.mark.parametrize(
    "fields",
    [
        {"q_rank": 7, "bias": True, "kv_scale": 1.5, "position": ROPE, "mask": {"left": 2, "right": 0}},
        {"position": "alibi", "scale": 0.3, "temperature": {"beta": 0.7, "original_max_len": 3}, "gate": "sigmoid"},
        {"position": {**ROPE, "scaling": {"kind": "yarn", "factor": 4, "original_max_len": 4, "mscale_all_dim": 0.7}}},
    ],
)
def test_it_computes_what_the_reference_says(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mla.yaml").write_text(spec_of(**fields))
    assert main(["check", str(tmp_path / "mla.yaml"), "--only", "meaning"]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 ok")  # not: does not apply


def graph_of(**fields: Any) -> tfkit.Graph:
    return tfkit.loads(spec_of(**fields), plugins=PLUGINS)


def spec_of(**fields: Any) -> str:
    stack = {"block": "decoder", "n_layers": 2, "attention": {"kind": "mla", **FIELDS, **fields}}
    graph = {"embedding": {"block": "embedding"}, "decoder": stack, "logits": {"block": "lm_head"}}
    spec = {"tfkit": 1, "name": "m", "d_model": 16, "vocab_size": 11, "max_len": 12, "graph": graph}
    return yaml.safe_dump(spec, sort_keys=False)


def model_of(backend: str = "sdpa", dtype: torch.dtype | None = None, **fields: Any) -> fx.GraphModule:
    return tfkit.build(graph_of(position=ROPE, **fields), attention_backend=backend, dtype=dtype).eval()


TOKENS = torch.arange(24).view(3, 8) % 11
PADDING = torch.arange(8) >= torch.tensor([[0], [2], [7]])


@pytest.mark.parametrize("q_rank", [None, 7])
def test_names_and_shapes(q_rank: int | None) -> None:
    model = model_of(q_rank=q_rank, bias=True)
    attention = model.decoder.layers[0].attention
    queries = {"q.weight": (30, 16)}
    if q_rank:
        queries = {"q_down.weight": (7, 16), "q_down.bias": (7,), "q_norm.weight": (7,), "q_up.weight": (30, 7)}
    rest = {"kv_norm.weight": (8,), "kv_up.weight": (33, 8), "output.weight": (16, 15), "output.bias": (16,)}
    rest |= {"kv_down.weight": (12, 16), "kv_down.bias": (12,)}
    assert {name: tuple(weight.shape) for name, weight in attention.state_dict().items()} == queries | rest
    assert attention.kv_down.parts == {"latent": 8, "rope": 4}
    assert attention.output.residual
    assert attention.kv_norm.eps == 1e-6


def test_a_cache_holds_one_latent_and_one_key() -> None:
    cached = tfkit.CachedModel(tfkit.build(graph_of(position=ROPE)).eval(), length=11)
    with torch.no_grad():
        cached(TOKENS[:1, :1])
    layers, slots, one_more = 2, 11, 1  # which takes what padding writes
    assert cached.nbytes == layers * (slots + one_more) * (8 + 4) * 4


def test_a_single_token_expands_no_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(q_rank=7)
    calls: list[int] = []
    model.decoder.layers[0].attention.kv_up.register_forward_hook(lambda *options: calls.append(options[2].size(2)))
    cached = tfkit.CachedModel(model, length=12)
    with torch.no_grad():
        for piece in TOKENS.split([3, 1, 2, 1, 1], dim=1):
            cached(piece)
    assert calls == [3, 6]


class Doubled(nn.Module):
    """A layer in the place of another, as an adapter puts it there: it has the weight of the one within."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


class Quantized(nn.Module):
    """A layer whose weight is a method, as those of torch.ao are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight().T


@pytest.mark.parametrize("kind", [Doubled, Quantized])
def test_a_single_token_calls_a_layer_that_was_put_in_afterwards(kind: type[nn.Module]) -> None:
    model = model_of(q_rank=7)
    for layer in model.decoder.layers:
        layer.attention.kv_up = kind(layer.attention.kv_up)
    cached = tfkit.CachedModel(model.eval(), length=12)
    with torch.no_grad():
        actual = torch.cat([cached(piece) for piece in TOKENS.split([3, 1, 2, 1, 1], dim=1)], dim=1)
        torch.testing.assert_close(actual, model(TOKENS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_the_absorbed_form_is_the_expanded_one(masked: bool) -> None:
    attention = model_of(q_rank=7).decoder.layers[0].attention
    attention.causal = False
    q_nope, q_rope = torch.randn(2, 3, 1, 6), torch.randn(2, 3, 1, 4)
    latent, k_rope = torch.randn(2, 1, 9, 8), torch.randn(2, 1, 9, 4)
    mask = torch.randn(2, 3, 1, 9).masked_fill(torch.arange(9) < 3, -torch.inf) if masked else None
    actual = attention.absorbed(q_nope, q_rope, latent, k_rope, mask)
    torch.testing.assert_close(actual, attention.expanded(q_nope, q_rope, latent, k_rope, mask), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("mask", [None, {"left": 2, "right": 0}], ids=["causal", "window"])
def test_backends_compute_the_same(padding: Tensor | None, mask: dict[str, int] | None) -> None:
    with torch.no_grad():
        want, *rest = (model_of(backend, mask=mask)(TOKENS, padding) for backend in ("sdpa", "eager", "flex"))
    for other in rest:
        torch.testing.assert_close(other, want)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_dropout_is_for_training_alone(backend: str, dropout: float) -> None:
    model = model_of(backend, dropout=dropout).train()
    assert torch.equal(model(TOKENS), model(TOKENS)) == (dropout == 0)
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))


def test_its_weights_can_be_seen() -> None:
    actual = tfkit.attention_weights(model_of(q_rank=7), TOKENS, PADDING)
    assert list(actual) == ["decoder.layers.0.attention", "decoder.layers.1.attention"]
    for weights in actual.values():
        assert weights.shape == (3, 3, 8, 8)
        assert not weights.triu(1).any()
        torch.testing.assert_close(weights.sum(dim=-1), PADDING[:, None].expand(3, 3, 8).float())


def read(model: fx.GraphModule) -> Tensor:
    cached = tfkit.CachedModel(model, length=8)
    return torch.cat([cached(piece) for piece in TOKENS.split([4, 1, 1, 2], dim=1)], dim=1)


def test_half_precision_and_autocast() -> None:
    want = model_of(q_rank=7)
    half = copy.deepcopy(want).to(torch.bfloat16)
    with torch.no_grad():
        exact = want(TOKENS)
        torch.testing.assert_close(read(half).float(), exact, atol=0.1, rtol=0.05)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(want(TOKENS).float(), exact, atol=0.1, rtol=0.05)
            torch.testing.assert_close(read(want).float(), exact, atol=0.1, rtol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        want.train()(TOKENS).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in want.parameters())


@pytest.mark.parametrize(
    ("fields", "location", "reason"),
    [
        ({"d_head": 4}, "d_head", "unknown key `d_head`"),
        (
            {"d_rope": 3, "position": "rope"},
            "d_rope",
            r"d_rope must be even, because",
        ),
        ({"position": {"kind": "rope", "width": 6}}, "position.width", r"width \(6\) must be even and at most"),
        ({"n_kv_heads": 1}, "n_kv_heads", "unknown key `n_kv_heads`"),
        ({"kv_rank": 0}, "kv_rank", "`kv_rank`"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], location: str, reason: str) -> None:
    with pytest.raises(tfkit.SpecError, match=reason) as raised:
        graph_of(**fields)
    assert f"(graph.decoder.attention.{location})" in str(raised.value)


def test_no_head_has_the_width_of_others() -> None:
    with pytest.raises(tfkit.SpecError, match="d_head"):
        graph_of(scale="d_head ** -0.5")


def test_heads_need_not_divide_the_width() -> None:
    assert isinstance(model_of(n_heads=5).decoder.layers[0].attention, LatentAttention)
