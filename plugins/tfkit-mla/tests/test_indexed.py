"""The index: its choice against the formula, what it costs nothing, and what a spec may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tfkit
from tfkit.testing import check_component, check_model

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)
FIELDS = {"n_heads": 3, "q_rank": 7, "kv_rank": 8, "d_nope": 6, "d_rope": 4, "d_v": 5}
ROPE = {"kind": "rope", "style": "interleaved"}
INDEX = {"n_heads": 9, "d_head": 6, "keep": 3}


def graph_of(
    kind: str = "mla_indexed", block: str = "decoder", layers: Any = None, max_len: int = 12, **fields: Any
) -> tfkit.Graph:
    attention = {"kind": kind, **FIELDS, "position": ROPE, **fields}
    stack = {"block": block, "n_layers": 2, "attention": attention, "layers": layers}
    graph = {"embedding": {"block": "embedding"}, "stack": stack, "logits": {"block": "lm_head"}}
    spec = {"tfkit": 1, "name": "m", "d_model": 16, "vocab_size": 11, "max_len": max_len, "graph": graph}
    return tfkit.loads(yaml.safe_dump(spec, sort_keys=False), plugins=PLUGINS)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"position": None}, {"mask": {"left": 4, "right": 0}, "bias": True}])
def test_it_has_every_property(fields: dict[str, Any]) -> None:
    fields = {**FIELDS, "position": ROPE, "index": INDEX, **fields}
    check_component("mla_indexed", slot="attention", fields=fields, within=["decoder"], plugins=PLUGINS)


def test_what_check_measures_of_the_choice() -> None:
    check_model(graph_of(index=INDEX), plugins=PLUGINS, only=["extents", "gradients", "meaning"])


@torch.no_grad()
@pytest.mark.parametrize("block", ["decoder", "encoder"])
def test_each_query_attends_to_the_best_keys(block: str) -> None:
    """Halves rotate in the index, and neighbors in the attention."""
    model = tfkit.build(graph_of(block=block, index=INDEX), seed=1).eval()
    attention: Any = model.get_submodule("stack.layers.0.attention")
    contexts: list[tfkit.Context] = []
    attention.register_forward_pre_hook(lambda _, args: contexts.append(args[1]))
    model(torch.arange(18).view(2, 9) % 11)
    x, context, index = torch.randn(2, 9, 16), contexts[0], attention.index
    latent = attention.q_norm(attention.q_down(x))
    masks = index(x, latent, context)
    angles = torch.arange(9.0)[:, None] * 10000.0 ** -(torch.arange(2) / 2)

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second, rest = y[..., :2], y[..., 2:4], y[..., 4:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    q, k = turned(index.q(latent).view(2, 9, 9, 6).transpose(1, 2)), turned(index.k_norm(index.k(x)))
    products = torch.einsum("b h q d, b k d -> b h q k", q, k).relu() * 6**-0.5
    scores = torch.einsum("b h q k, b q h -> b q k", products, index.weight(x)) * 9**-0.5
    for row in range(2):
        for query in range(9):
            visible = range(query + 1) if block == "decoder" else range(9)
            best = sorted(visible, key=lambda key: -scores[row, query, key].item())[:3]
            mask = masks[row, 0, query]
            chosen = mask if mask.dtype == torch.bool else mask == 0
            assert chosen.nonzero().flatten().tolist() == sorted(best)


SHARED = {
    "variants": {"shared": {"attention": {"index": None, "index_name": None, "index_from": "choice"}}},
    "pattern": ["base", "shared"],
}
WINDOW = {"attention": {"index": None, "index_name": None, "index_from": "choice", "mask": {"left": 3, "right": 0}}}
SHARED_WINDOW = {"variants": {"shared": WINDOW}, "pattern": ["base", "shared"]}


@torch.no_grad()
def test_layers_attend_to_the_keys_of_an_earlier_index() -> None:
    model = tfkit.build(graph_of(index=INDEX, index_name="choice", layers=SHARED), seed=1).eval()
    calls: list[Any] = []
    for layer in model.stack.layers:
        layer.attention.register_forward_hook(lambda _, args, result: calls.append((*args, result)))
    tokens = torch.arange(18).view(2, 9) % 11
    expected = model(tokens)
    (_, _, (_, wires)), (x, context, y) = calls
    assert (wires["choice"] == 0).sum(dim=3).unique().tolist() == [1, 2, 3]
    attention: Any = model.stack.layers[1].attention
    assert [name for name, _ in attention.named_parameters() if "index" in name] == []
    torch.testing.assert_close(y, attention.attend(x, attention.queries(x), context, wires["choice"]))
    cached = tfkit.CachedModel(model, length=9)
    actual = torch.cat([cached(tokens[:, :4]), cached(tokens[:, 4:5]), cached(tokens[:, 5:])], dim=1)
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_a_shared_index_has_every_property() -> None:
    check_model(graph_of(index=INDEX, index_name="choice", layers=SHARED), plugins=PLUGINS)


def by_shape(scores: torch.Tensor, k: int, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Choose the largest scores without a rule of ties."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(k)[1], True)


def test_check_finds_a_choice_that_depends_on_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(index=INDEX)
    check_model(graph, plugins=PLUGINS, only=["equal-scores"])
    monkeypatch.setattr("tfkit_mla.indexed.choose_top", by_shape)
    with pytest.raises(AssertionError, match=r"- equal-scores.*: with equal scores: read in uneven steps, column"):
        check_model(graph, plugins=PLUGINS, only=["equal-scores"])


@torch.no_grad()
@pytest.mark.parametrize(("mask", "keep"), [({}, 5), ({"left": 8, "right": 0}, 4)], ids=["all", "window"])
def test_keys_with_equal_scores_are_chosen_by_position(mask: dict[str, int], keep: int) -> None:
    """With one head of the index, about half of all keys score 0. The slots of a window are a ring."""
    fields = {"index": {**INDEX, "n_heads": 1, "keep": keep}, "max_len": 30, **({"mask": mask} if mask else {})}
    model = tfkit.build(graph_of(**fields), seed=1).eval()
    tokens = torch.randint(11, (2, 27), generator=torch.Generator().manual_seed(0))
    expected, cached = model(tokens), tfkit.CachedModel(model, length=27)
    actual = torch.cat([cached(piece) for piece in tokens.split([12, 1, 1, 7, 1, 5], dim=1)], dim=1)
    torch.testing.assert_close(actual, expected)
    real = torch.arange(27) >= 10
    padded = model(torch.where(real, tokens.roll(10, dims=1), 0), tokens_mask=real.expand(2, -1))
    torch.testing.assert_close(padded[:, real], expected[:, :17])


@torch.no_grad()
def test_an_index_that_keeps_all_keys_changes_nothing() -> None:
    indexed = tfkit.build(graph_of(index={**INDEX, "keep": 12}), seed=1).eval()
    plain = tfkit.build(graph_of("mla"), seed=2).eval()
    weights = {name: value for name, value in indexed.state_dict().items() if ".index." not in name}
    plain.load_state_dict(weights)
    tokens = torch.arange(24).view(2, 12) % 11
    torch.testing.assert_close(indexed(tokens), plain(tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index": {**INDEX, "keep": 0}}, "keep must be at least 1; got 0"),
        ({"index": {**INDEX, "d_head": 3}}, "must have at least d_rope channels, 4; got 3"),
        ({"index": INDEX, "position": "alibi"}, "the index supports rotary positions only"),
        ({}, "`index` is missing"),
        ({"index": INDEX, "index_from": "choice"}, "`index` has no effect with `index_from`"),
        ({"index_name": "choice", "index_from": "choice"}, "`index_name` has no effect with `index_from`"),
        ({"index_from": "choice"}, "`attention` of layer 0 takes `choice`, but no earlier layer gives it"),
        ({"index": INDEX, "index_name": "choice"}, "`attention` gives `choice`, which has no effect"),
        (
            {"index": INDEX, "index_name": "choice", "layers": SHARED_WINDOW},
            "`mask` must be equal in the layer that gives choice",
        ),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(tfkit.SpecError, match=message):
        graph_of(**fields)


def test_the_index_may_rotate_all_of_its_channels() -> None:
    graph_of(index={**INDEX, "d_head": FIELDS["d_rope"]})


def test_a_memory_is_an_error_of_the_spec() -> None:
    spec = {
        "tfkit": 1,
        "name": "m",
        "d_model": 16,
        "vocab_size": 11,
        "inputs": ["source", "tokens"],
        "graph": {
            "memory": {"block": "embedding", "input": "source"},
            "embedding": {"block": "embedding", "input": "tokens"},
            "decoder": {
                "block": "decoder",
                "n_layers": 1,
                "memory": "memory",
                "attention": {"kind": "mla_indexed", **FIELDS, "index": INDEX},
            },
            "logits": {"block": "lm_head"},
        },
    }
    decoder: dict[str, Any] = spec["graph"]["decoder"]  # type: ignore[index]
    for key, attention in (("attention", decoder["attention"]), ("cross_attention", decoder["attention"])):
        decoder[key] = attention
        with pytest.raises(tfkit.SpecError, match="attention `mla_indexed` cannot attend to a memory") as raised:
            tfkit.load(spec, plugins=PLUGINS)
        assert [item.path for item in raised.value.diagnostics] == [f"graph.decoder.{key}"]
    decoder["cross_attention"] = {"kind": "mha", "n_heads": 2}
    tfkit.build(tfkit.load(spec, plugins=PLUGINS))
