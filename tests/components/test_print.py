"""`print(model)` and the code of its modules show every field of every component that changes the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tfkit
from tfkit.building.builder import assemble_model
from tfkit.component import WireMarker, marker
from tfkit.testing import small_spec

from ..sampling import some
from ..small_specs import reduced

Part = dict[str, Any]
PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[2] / "plugins"], entry_points=False)

GOLDEN = ("gpt2", "llama3_8b", "t5_small", "deepseek_v3")

ELSEWHERE = {"callback", "data", "field", "loss", "metric", "optimizer", "parametrization", "schedule"}
ELSEWHERE |= {"tokenizer", "tracker"}
"""Slots that are not in a model."""
NOT_SHOWN = {
    "sections": "an input of positions with several axes: tests/components/test_positions.py",
    "rope.interleaved": "of `sections`",
    "kv_name": "a wire needs a layer at each end: tests/components/test_wires.py",
    "kv_from": "a wire, as `kv_name`",
    "index_name": "a wire, as `kv_name`",
    "index_from": "a wire, as `kv_name`",
    "d_model": "a part keeps the width of its model, which every layer shows",
    "vocab_size": "the model's, as `d_model`",
    "max_len": "no module has it: the model refuses longer sequences when it is called",
    "init": "it fills the weights, and no module has it",
    "labels": "the names of classes, for those who read the logits",
    "problem_type": "the meaning of logits, for those who read them",
    "pad_id": "for others, as the mask says what is padding",
    "mixer": "no built-in kind fills it",
    **dict.fromkeys(
        ("add.scale", "add.learned", "add.onto", "add.scale_onto", "add.learned_onto"),
        "by the field `residual` of a layer",
    ),
    "blocks.size": "the decoder of this test has masks in which it has no effect",
    "additive.scale": "refused",
    "differential.sinks": "refused",
    "additive.softcap": "refused",
    "additive.sinks": "refused",
}
OTHER_MODELS = ("tfkit_media", "tfkit_streams")
"""Plugins whose kinds fit images or residual streams, and not the small model of this test."""
INDEX: Part = {"n_heads": 2, "d_head": 6, "keep": 4}
SMALL_FIELDS: Part = {"n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "activation": "gelu", "factor": 2.0, "n_classes": 3}
SMALL_FIELDS |= {"original_max_len": 64, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SMALL_FIELDS |= {"q_rank": 6}
SMALL_FIELDS |= {"kv_rank": 6, "d_nope": 4, "d_rope": 4, "d_v": 4, "n_experts": 4, "n_experts_per_token": 2}
SMALL_OF: dict[str, Part] = {
    "learned": {"max_len": 32},
    "longrope": {"factor": 2.0},
    "proportional": {"width": 2},
    "chunk": {"size": 4},
    "expression": {"where": "q - k < 2"},
    "mla_indexed": {"index": INDEX},
    "latents": {"n_latents": 3},
}
"""Fields that a kind requires, by their names, or by kind."""

NORMS = ["rmsnorm", {"kind": "layernorm", "eps": 0.5}]
BIASES = [False, {"q": True}, {"k": True}, {"v": True}, {"o": True}]
TEMPERATURES = [
    {"beta": beta, "original_max_len": length, "offset": offset}
    for beta, length, offset in ((0.5, 2, 0), (0.7, 2, 0), (0.5, 3, 0), (0.5, 2, 1))
]
OTHER_VALUES: dict[str, list[Any]] = {
    "n_heads": [2],
    "n_kv_heads": [1],
    "d_head": [6],
    "dropout": [0.3],
    "position": ["rope", "alibi", "t5"],
    "mask": [{"left": 2, "right": 0}, {"left": 3, "right": 0}],
    "bias": [False],
    "mha.bias": BIASES,
    "lm_head.bias": [True],
    "mla.bias": [True],
    "mla_indexed.bias": [True],
    "clip": [0.5, 2.0],
    "qk_norm_full": NORMS,
    "scale": [0.25, 1.0],
    "softcap": [5.0, 7.0],
    "sinks": [True],
    "qk_norm": NORMS,
    "qk_norm_rotated": NORMS,
    "value_norm": NORMS,
    "values": ["keys"],
    "temperature": TEMPERATURES,
    "gate": ["sigmoid", "tanh", {"activation": "sigmoid", "per": "head"}],
    "inner_norm": NORMS,
    "d_ff": [20],
    "approximate": ["tanh"],
    "activation": ["silu", "relu", "relu2", "tanh", "sigmoid", "softplus", "quick_gelu", "xielu"],
    "eps": [0.5],
    "layernorm.scale": [False],
    "rmsnorm.scale": [False],
    "offset": [1],
    "max_slope_exponent": [4.0],
    "scaled": [True],
    "learned.max_len": [40],
    "theta": [500.0],
    "rope.width": [2],
    "style": ["interleaved"],
    "reverse": [True],
    "scaling": [{"kind": kind, "factor": 2.0} for kind in ("linear", "ntk")],
    "proportional.width": [4],
    "input_norm": ["rmsnorm", False],
    "layout": ["half"],
    "endpoint": [True],
    "n_buckets": [16],
    "max_distance": [64],
    "shared": [False],
    "disentangled.terms": [["c2p"], ["p2c"]],
    "disentangled.shared": [True],
    "disentangled.dropout": [0.2],
    "factor": [3.0],
    "original_max_len": [32],
    "low_freq_factor": [2.0],
    "high_freq_factor": [6.0],
    "short_factor": [[1.0, 1.0, 1.75, 1.0]],
    "long_factor": [[2.0, 2.0, 3.0, 2.0]],
    "longrope.temperature": [1.5],
    "yarn.temperature": [1.5],
    "beta_fast": [8.0],
    "beta_slow": [4.0],
    "mscale": [2.0],
    "mscale_all_dim": [0.5],
    "truncate": [False],
    "placement": ["post", "sandwich", "output", "parallel", "parallel_two_norms"],
    "norm": NORMS,
    "attention": [None, {"kind": "mqa", "n_heads": 4}, {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2}],
    "cross_attention": [{"kind": "mqa", "n_heads": 4}],
    "ffn": [None, {"kind": "relu", "d_ff": 24}, {"kind": "geglu", "d_ff": 24}],
    "residual": [
        {"scale": 0.5},
        {"scale": 0.7},
        {"learned": "scalar"},
        {"learned": "vector"},
        {"onto": "normed"},
        {"scale_onto": 0.5},
        {"scale_onto": 0.7},
        {"learned_onto": "scalar"},
        {"learned_onto": "vector"},
    ],
    "around": [{"kind": "manifold", "streams": streams} for streams in (2, 3)],
    "sublayers": [["ffn", "attention"], ["attention", "ffn", "ffn"]],
    "n_layers": [6],
    "layers": [
        {"groups": 2},
        {"groups": 1},
        {"variants": {"local": {"attention": {"mask": {"left": 2, "right": 0}}}}, "pattern": ["local", "base"]},
        {"variants": {"local": {"attention": {"mask": {"left": 2, "right": 0}}}}, "pattern": ["base", "local"]},
        {"variants": {"local": {"attention": {"mask": {"left": 3, "right": 0}}}}, "pattern": ["base", "local"]},
    ],
    "final_norm": [False, *NORMS],
    "d_embed": [8],
    "tables": [{"types": 2}, {"types": 3}],
    "embedding.scale": [2.0, 3.0, "sqrt_d_model"],
    "embedding.position": ["learned", "sinusoidal"],
    "select": ["last", "mean"],
    "n_classes": [4],
    "n_latents": [4],
    "causal": [True],
    "ffn.ffn": [{"kind": "relu", "d_ff": 24}, {"kind": "geglu", "d_ff": 24}],
    "attention.attention": [{"kind": "mqa", "n_heads": 4}, {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2}],
    "cross_attention.attention": [{"kind": "mqa", "n_heads": 4}],
    "residual.residual": [{"scale": 0.5}, {"learned": "scalar"}, {"scale_onto": 0.5}, {"learned_onto": "vector"}],
    "classifier.squeeze": [True],
    "chunk.size": [8],
    "expression.where": ["q - k < 4"],
    "transform": [{"activation": "gelu"}, {"activation": "silu"}, {"norm": "rmsnorm"}, {"bias": False}],
    "along": ["width"],
    "q_rank": [6, 4],
    "kv_rank": [4],
    "mla_indexed.position": ["rope", {"kind": "rope", "theta": 500.0}],
    "mla_indexed.q_rank": [4],
    "index": [{**INDEX, "n_heads": 3}, {**INDEX, "keep": 3}, {**INDEX, "d_head": 8}],
    "d_nope": [6],
    "d_rope": [6],
    "d_v": [6],
    "kv_scale": [2.0],
    "low_rank": [False],
    "max_rate": [5.0],
    "latent_norm": NORMS[1:],
    "additive.position": ["alibi", "t5"],
    "n_experts": [8],
    "n_experts_per_token": [1],
    "gated": [False],
    "limit": [5.0],
    "up_offset": [1],
    "router": [
        {"score": "sigmoid"},
        {"order": "topk_then_score"},
        {"renormalize": True},
        {"renormalize": True, "eps": 0.1},
        {"scale": 2.0},
        {"weighs": "input"},
        {"correction_bias": True},
        {"groups": {"n": 2, "keep": 1}},
        {"groups": {"n": 2, "keep": 1, "by": "top2sum"}},
        {"bias": True},
        {"softcap": 5.0},
        {"sparse_mixer": {}},
        {"sparse_mixer": {"jitter": 0.1}},
        {"sparse_mixer": {"sampled": False}},
        {"norm": "rmsnorm"},
        {"logit_scale": 0.5},
        {"expert_scale": True},
    ],
    "differential.n_kv_heads": [4],
    "head_norm": NORMS[1:],
    "lambda_init": [0.3],
    "lambda_std": [0.2],
    "moe.shared": [{"d_ff": 24}, {"d_ff": 20}, {"d_ff": 24, "gate": True}, {"d_ff": 24, "combine": "average"}],
    "moe.norm_in": NORMS,
    "moe.norm_out": NORMS,
    "conv_size": [3, 5],
    "mixed_conv.mask": [{"left": 5}, {"left": 6}],
    "groups": [2],
    "qk_norm_weight": ["per_head"],
    "project_bias": [False],
    "stages": [["norm", "scale", "dropout"], ["dropout", "norm", "scale"]],
}
"""Values of each field of that name, or KIND.FIELD, that give different models."""

BESIDE: dict[str, Part] = {
    "qk_norm_weight": {"qk_norm": "rmsnorm"},
    "project_bias": {"d_embed": 8},
    "input_norm": {"placement": "parallel"},
    "stages": {"scale": 2.0, "norm": "layernorm"},
    "layernorm.scale": {"bias": False},
    "longrope.temperature": {"factor": None, "temperature": 1.25},
    "beta_fast": {"truncate": False},
    "cross_attention": {"memory": "source"},
    "classifier.squeeze": {"n_classes": 1},
}
"""Fields without which another one has no effect."""


def text_of(spec: Part) -> str:
    """Everything that the model of a spec says of itself."""
    model = assemble_model(tfkit.loads(yaml.safe_dump(spec, sort_keys=False), plugins=PLUGINS))
    codes = {path: module.code for path, module in model.named_modules() if hasattr(module, "code")}
    return "\n".join([str(model), *(f"{path}: {code}" for path, code in codes.items())])


def required(kind: str, fields: Any) -> Part:
    expected = {
        name: SMALL_FIELDS[name] for name, info in fields.items() if name in SMALL_FIELDS and info.is_required()
    }
    return expected | SMALL_OF.get(kind, {})


def fields_of_parts() -> Iterator[Any]:
    """Slot, kind and field of all components of models, but for those that `NOT_SHOWN` has."""
    for slot in PLUGINS.registry.slots():
        if slot in NOT_SHOWN or slot in ELSEWHERE:
            continue
        for kind, component in PLUGINS.registry.kinds(slot).items():
            if component.config.__module__.startswith(OTHER_MODELS):
                continue
            for name, info in component.config.model_fields.items():
                hidden = {name, f"{kind}.{name}"} & NOT_SHOWN.keys() and (kind, name) != ("learned", "max_len")
                if name != component.config.word_key and not hidden and marker(info, WireMarker) is None:
                    yield pytest.param(slot, kind, name, id=f"{kind}.{name}")


@pytest.mark.parametrize(("slot", "kind", "name"), some(fields_of_parts(), 8))
def test_every_field_shows(slot: str, kind: str, name: str) -> None:
    key = f"{kind}.{name}"
    rest = OTHER_VALUES.get(key) or OTHER_VALUES.get(name)
    assert rest is not None, f"say in OTHER_VALUES which values `{kind}.{name}` takes that give other models"
    component = PLUGINS.registry.find(slot, kind)
    assert component is not None
    extra = BESIDE.get(key) or BESIDE.get(name, {})
    part = {**required(kind, component.config.model_fields), **extra}
    spec_of = blocks(kind) if slot == "block" else in_a_stack(component.config, kind)
    texts = {text_of(spec_of(part)): "as it was"}
    for value in rest:
        text = text_of(spec_of({**part, name: value}))
        assert text not in texts, f"`{name}: {value}` looks like `{name}: {texts[text]}`"
        texts[text] = str(value)


def in_a_stack(config: Any, kind: str) -> Callable[[Part], Part]:
    def spec_of(part: Part) -> Part:
        return small_spec("decoder" if getattr(config, "causal", True) else "encoder", config, {"kind": kind, **part})

    return spec_of


PAIRS = ("add", "concat", "residual")
"""Blocks with two inputs."""


def blocks(kind: str) -> Callable[[Part], Part]:
    """A model with one node of that kind between others."""
    stack = {"n_layers": 4, "attention": {"kind": "mha", "n_heads": 4}, "ffn": {"kind": "gelu", "d_ff": 24}}
    before: Part = {"embedding": {"block": "embedding", "input": "tokens"}}

    def spec_of(part: Part) -> Part:
        options, graph, inputs = dict(part), copy.deepcopy(before), ["tokens"]
        shared: Part = {"d_model": 16, "vocab_size": 11, "max_len": 32}
        if kind in ("encoder", "decoder"):
            options, shared = {**copy.deepcopy(stack), **part}, {**shared, "dropout": 0.1}
        if kind in ("layer", "attention", "cross_attention", "ffn"):
            needed = {"layer": [*stack][1:], "cross_attention": ["attention"]}.get(kind, [kind])
            options, shared = (
                {**{name: copy.deepcopy(stack[name]) for name in needed}, **part},
                {**shared, "dropout": 0.1},
            )
        if kind == "cross_attention":
            options["memory"] = "source"
        if "memory" in options:
            graph["source"] = {"block": "embedding", "input": "other"}
            inputs.append("other")
        if kind == "embedding":
            graph["embedding"] |= {"dropout": 0.1, **options}
            inputs += list(options.get("tables", ()))
        else:
            sources = {"inputs": ["embedding", "embedding"]} if kind in PAIRS else {"input": "embedding"}
            graph["node"] = {"block": kind, **sources, **options}
        return {"tfkit": 1, "name": "small", **shared, "inputs": inputs, "graph": graph}

    return spec_of


@pytest.mark.parametrize("name", GOLDEN)
def test_it_reads_well(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"print/{name}", str(assemble_model(reduced(name))))
