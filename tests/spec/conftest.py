"""Fixtures for the tests of the spec language."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

import tfkit
from tfkit.plugin.manager import Plugins


@pytest.fixture(params=["C", "Python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML with libyaml and without it: errors read the same."""
    if request.param == "C" and not hasattr(yaml, "CSafeLoader"):
        pytest.skip("PyYAML without libyaml")
    if request.param == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    """The built-in components."""
    return tfkit.load_plugins(entry_points=False)


@pytest.fixture(scope="session")
def specs() -> st.SearchStrategy[dict[str, Any]]:
    """Small specs as plain data, of which most are right."""

    def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.none(), strategy)

    def part(required: dict[str, Any] | None = None, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries(required or {}, optional=optional)

    small = st.floats(0.001, 10).map(lambda x: round(x, 4))
    chance = st.sampled_from([0, 0.1, 0.25])
    norm = st.one_of(
        st.sampled_from(["layernorm", "rmsnorm"]),
        part({"kind": st.just("layernorm")}, eps=small, bias=st.booleans(), scale=st.just(True)),
        part({"kind": st.just("rmsnorm")}, eps=small, offset=st.sampled_from([0, 1])),
    )
    position = st.one_of(
        st.sampled_from(["rope", "alibi", "t5", "none"]),
        part({"kind": st.just("rope")}, theta=small, width=st.just(2), style=st.sampled_from(["half", "interleaved"])),
        part({"kind": st.just("rope"), "scaling": part({"kind": st.just("linear"), "factor": small})}),
    )
    mask = part(left=maybe(st.integers(0, 4)), right=st.just(0))
    bias = st.one_of(st.booleans(), part(q=st.booleans(), k=st.booleans(), o=st.booleans()))
    heads = {
        "dropout": chance, "bias": bias, "scale": maybe(small), "softcap": maybe(small), "qk_norm": maybe(norm),
        "d_head": maybe(st.just(8)),
    }  # fmt: skip
    attention = st.one_of(
        part({"n_heads": st.sampled_from([2, 4])}, position=maybe(position), mask=maybe(mask), **heads),
        part(
            {"kind": st.just("gqa"), "n_heads": st.just(4), "n_kv_heads": st.just(2)}, position=maybe(position), **heads
        ),
    )
    ffn = st.one_of(
        part(
            {"kind": st.sampled_from(["relu", "swiglu", "gelu"]), "d_ff": st.integers(1, 9)},
            bias=st.booleans(),
            dropout=chance,
        ),
        part({"kind": st.just("mlp"), "d_ff": st.just(8), "activation": st.sampled_from(["silu", "gelu", "relu2"])}),
    )
    layer = {
        "norm": norm, "ffn": ffn, "dropout": chance,
        "placement": st.sampled_from(["pre", "post", "sandwich", "parallel"]),
        "attention": attention, "residual": part(scale=small, learned=st.sampled_from(["none", "vector"])),
        "input_norm": st.one_of(norm, st.booleans()),
    }  # fmt: skip
    other = {name: strategy for name, strategy in layer.items() if name != "ffn"}
    patch = part(
        **{**layer, "attention": maybe(st.one_of(attention, part(mask=maybe(mask), position=maybe(position))))}
    )
    layers = st.one_of(
        st.fixed_dictionaries(
            {"variants": st.fixed_dictionaries({"a": patch, "b": patch}), "pattern": st.just(["a", "b*2"])}
        ),
        st.fixed_dictionaries(
            {"variants": st.fixed_dictionaries({"a": patch}), "pattern": st.just({"0": "a", "rest": "base"})}
        ),
        st.fixed_dictionaries({"groups": st.sampled_from([1, 2])}),
    )
    shared = part(dropout=chance, bias=st.booleans(), norm=norm, max_len=st.just(32))
    spec: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {
            "tfkit": st.just(1), "name": st.just("m"), "d_model": st.just(16), "vocab_size": st.just(11),
            "graph": st.fixed_dictionaries({
                "embedding": part({"block": st.just("embedding")}, scale=st.sampled_from([2, "sqrt_d_model"]),
                                  norm=maybe(norm), dropout=chance, position=maybe(st.just("sinusoidal"))),
                "decoder": part({"block": st.just("decoder"), "n_layers": st.just(4), "ffn": ffn},
                                layers=layers, **other, final_norm=st.one_of(norm, st.booleans(), st.none())),
                "logits": part({"block": st.just("lm_head")}, bias=st.booleans(), tie=st.just("embedding")),
            }),
        }
    )  # fmt: skip
    return st.builds(lambda first, more: {**first, **more}, spec, shared)
