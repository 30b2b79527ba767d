"""`tfkit save --layout transformers --names llama`: the same model with the projections and the names of Llama."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from transformers import AutoModelForCausalLM

import tfkit
from tfkit.cli import main
from tfkit.spec.render import render_spec
from tfkit.tools.eject.remote_code import folder as folder_of_code
from tfkit.tools.eject.remote_code import plan_proof
from tfkit.tools.eject.remote_code.folder import llama_names_of, write_folder
from tfkit.tools.eject.remote_code.llama_config import LlamaFields
from tfkit.tools.eject.remote_code.parallel_plan import parallel_plan
from tfkit.tools.eject.remote_code.parts import ParallelPlan, Parts, parts_of

ATTENTION = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope", "bias": False}
FFN = {"kind": "swiglu", "d_ff": 48, "bias": False}
MOE = {"kind": "moe", "d_ff": 32, "n_experts": 4, "n_experts_per_token": 2, "bias": False}


def decoder(attention: Any = ATTENTION, ffn: Any = FFN, tie: str | None = None, **fields: Any) -> tfkit.Graph:
    """A decoder like Llama, with other parts."""
    stack = {"block": "decoder", "n_layers": 2, "attention": attention, "ffn": ffn, **fields}
    graph = {"embedding": "embedding", "decoder": stack, "logits": {"block": "lm_head", "bias": False, "tie": tie}}
    sizes = {"d_model": 32, "vocab_size": 64, "max_len": 64, "norm": {"kind": "rmsnorm", "eps": 1e-5}}
    return tfkit.loads(json.dumps({"tfkit": 1, "name": "small", **sizes, "graph": graph}), plugins=PLUGINS)


class OwnAttention(tfkit.MultiHeadConfig):
    """Each key has the weight sigmoid(score - 3)."""

    kind: Literal["own"] = "own"

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return OwnCore(self.head_width**-0.5)


class OwnCore(nn.Module):
    """Queries, keys and values [b, h, q or k, d] and a mask -> [b, h, q, d]."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.einsum("b h q d, b h k d -> b h q k", q, k) * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return torch.einsum("b h q k, b h k d -> b h q d", torch.sigmoid(scores - 3), v)


class OwnFFNConfig(tfkit.FFNConfig):
    """Hidden units times their sigmoid, or with `mixed` the softmax over all of them."""

    kind: Literal["own"] = "own"
    d_ff: tfkit.Dim
    mixed: bool = False

    def build(self, make: tfkit.Make) -> nn.Module:
        return OwnFFN(self)


class OwnFFN(nn.Module):
    """[..., d_model] -> [..., d_model]."""

    def __init__(self, config: OwnFFNConfig) -> None:
        super().__init__()
        self.first = tfkit.Linear(config.d_model, config.d_ff, bias=True)
        self.mixed = config.mixed
        self.second = tfkit.Linear(config.d_ff, config.d_model, bias=True, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(torch.softmax(hidden, dim=-1) if self.mixed else hidden * torch.sigmoid(hidden))


class OwnPlugin:
    """The kinds `own`."""

    @tfkit.hookimpl
    def tfkit_register(self, register: tfkit.Register) -> None:
        register(OwnAttention)
        register(OwnFFNConfig)


PLUGINS = tfkit.load_plugins(objects={"own": OwnPlugin()})


def plan_of(graph: tfkit.Graph) -> ParallelPlan:
    model = tfkit.build(graph, device="meta")
    return parallel_plan(model, named(model))


def named(model: fx.GraphModule) -> Parts:
    """The parts of a model with the names of Llama."""
    parts = parts_of(model.meta["graph"])
    return replace(parts, names=llama_names_of(model, parts))


def written(model: fx.GraphModule, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a folder without opening it in transformers, which takes seconds; return the code."""
    monkeypatch.setattr(folder_of_code, "compare_folder", lambda *_: True)
    graph = model.meta["graph"]
    process: Any = None
    parts = replace(named(model), plan=parallel_plan(model, named(model)))
    write_folder(model, folder, render_spec(graph.spec.model), process, parts)
    return (folder / "modeling_small.py").read_text()


def test_a_folder_has_the_names_of_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tfkit.build(decoder(), seed=3)
    code = written(model, tmp_path, monkeypatch)
    layer = "model.layers.0"
    llama = {
        "model.embed_tokens.weight",
        *(f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        f"{layer}.input_layernorm.weight",
        f"{layer}.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    tensors = load_file(tmp_path / "model.safetensors").keys()
    assert {name for name in tensors if "layers.1" not in name} == llama
    reopened = tfkit.build(tmp_path).state_dict()
    assert all(torch.equal(tensor, reopened[name]) for name, tensor in model.state_dict().items())
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 0
    rebuilt = tfkit.build(tmp_path)
    with tfkit.trace(rebuilt, read="decoder.layers.0.attention.q") as values:
        rebuilt(torch.ones(1, 3, dtype=torch.long))
    assert values["decoder.layers.0.attention.q"].shape == (1, 4, 3, 8)
    assert "self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))" in code
    assert "torch.cat((self" not in code
    config = json.loads((tmp_path / "config.json").read_text())
    fields = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    fields |= {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    assert {name: config.get(name) for name in fields} == fields
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert not config.keys() & {"d_model", "n_heads", "d_ff", "theta", "eps", "n_layers", "max_len"}
    assert "attribute_map" not in (tmp_path / "configuration_small.py").read_text()
    configuration = (tmp_path / "configuration_small.py").read_text()
    assert '"layers.*.self_attn.o_proj": "rowwise"' in configuration
    assert "base_model_pp_plan" in configuration
    assert 'config.rope_parameters.get("rope_type", "default")) != "default"' in code


def test_rotary_positions_that_differ_between_layers_keep_their_names() -> None:
    numbers = {"theta": 10000.0}
    for theta, rope in ((10000.0, {"rope_type": "default", "rope_theta": 10000.0}), (77.0, {})):
        variants = {"far": {"attention": {"position": {"kind": "rope", "theta": theta}}}}
        graph = decoder(layers={"variants": variants, "pattern": ["base", "far"]})
        assert LlamaFields.of(graph.node("decoder"), numbers).rope == rope


def test_router_logits_are_recorded_by_the_names_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = written(tfkit.build(decoder(ffn=MOE)), tmp_path, monkeypatch)
    assert '"router_logits": OutputRecorder(SoftBound, 0, "mlp.gate.bound")' in code


QKV = ("q_proj", "k_proj", "v_proj")
DIVIDED = {**dict.fromkeys(QKV, "colwise"), "o_proj": "rowwise"}
GATHERED = {**dict.fromkeys(QKV, "colwise_gather_output"), "o_proj": "rowwise_split_input"}


@pytest.mark.parametrize(
    ("change", "plan"),
    [
        ({}, DIVIDED),
        ({"qk_norm": "rmsnorm"}, {**DIVIDED, **dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")}),
        ({"qk_norm_full": "rmsnorm"}, GATHERED),  # a norm of all heads
        ({"sinks": True}, GATHERED),  # a parameter of each head
        ({"position": "alibi"}, GATHERED),  # a bias of each head
        ({"kind": "mqa", "n_kv_heads": None}, GATHERED),  # a single head of keys
    ],
    ids=["plain", "norm of a head", "norm of all heads", "sinks", "alibi", "one key head"],
)
def test_heads_are_divided_if_they_are_independent(change: dict[str, Any], plan: dict[str, str]) -> None:
    attention = {key: value for key, value in {**ATTENTION, **change}.items() if value is not None}
    entries = dict(plan_of(decoder(attention)).tensor)
    start = "layers.*.self_attn."
    assert {name.removeprefix(start): style for name, style in entries.items() if name.startswith(start)} == plan


def test_hidden_units_are_divided_if_they_are_independent() -> None:
    start = "layers.*.mlp."
    plain, normed = (dict(plan_of(decoder(ffn={**FFN, **norm})).tensor) for norm in ({}, {"inner_norm": "rmsnorm"}))
    assert plain.items() >= {f"{start}up_proj": "colwise", f"{start}down_proj": "rowwise"}.items()
    assert normed.items() >= {f"{start}up_proj": "colwise_gather_output"}.items()
    experts = dict(plan_of(decoder(ffn=MOE)).tensor)
    assert (
        experts.items() >= {f"{start}experts": "moe_tp_experts", f"{start}experts.down_proj.weight": "rowwise"}.items()
    )
    assert not any("experts" in name for name in dict(plan_of(decoder(ffn={**MOE, "bias": True})).tensor))


@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_divided_among_processes(bias: bool) -> None:
    start = "layers.*.mlp.experts"
    layers = {f"{start}.{name}_proj" for name in ("gate_up", "down")}
    weights = {f"{layer}.{name}" for layer in layers for name in ["weight", *["bias"] * bias]}
    assert dict(plan_of(decoder(ffn={**MOE, "bias": bias})).experts) == {
        **dict.fromkeys(weights, "grouped_gemm"),
        **dict.fromkeys(layers, "local_params"),
        start: "ep_dispatch_experts",
    }
    assert not plan_of(decoder()).experts


def test_a_pipeline_begins_with_the_table() -> None:
    assert plan_of(decoder()).pipeline
    learned = tfkit.load("gpt2")
    assert not plan_of(learned).pipeline


@pytest.mark.parametrize("name", ["bert_tiny", "t5_small", "mamba_130m"])
def test_other_models_cannot_take_the_names(name: str) -> None:
    with pytest.raises(tfkit.SpecError, match=f"`{name}` cannot be written with the names of Llama: it"):
        named(tfkit.build(tfkit.load(name), device="meta"))


def test_a_sublayer_with_other_projections_keeps_its_names() -> None:
    mla = {"kind": "mla", "n_heads": 4, "kv_rank": 16, "d_nope": 4, "d_rope": 4, "d_v": 8, "position": "rope"}
    with pytest.warns(tfkit.NamesWarning, match="`attention` of kind `mla` of `small` keep the names"):
        assert all("self_attn" not in name for name, _ in plan_of(decoder(mla)).tensor)


def test_only_a_layout_with_names_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tfkit.save(tfkit.build(decoder()), tmp_path / "model")
    command = ["save", str(tmp_path / "model"), "--layout", "tfkit", "--names", "llama", "-o", str(tmp_path / "out")]
    assert main(command) == 1
    assert "--layout transformers --names llama" in capsys.readouterr().err


PLUGIN_ATTENTION = {"kind": "own", "n_heads": 4, "position": "rope", "bias": False}
PROVED = {
    "tied, norms of heads": {"attention": {**ATTENTION, "qk_norm": "rmsnorm"}, "tie": "embedding"},
    "experts, gathered heads": {"attention": {**ATTENTION, "position": "alibi"}, "ffn": MOE},
    "components of a plugin": {"attention": PLUGIN_ATTENTION, "ffn": {"kind": "own", "d_ff": 48}},
}


def saved(graph: tfkit.Graph, folder: Path) -> fx.GraphModule:
    model = tfkit.build(graph, seed=3)
    tfkit.save(model, folder, layout="transformers", names="llama", plugins=PLUGINS)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("names", [None, "llama"])
def test_a_process_that_has_opened_other_folders(
    names: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of Python then has their code, in the package that the verified folder needs, too."""
    (tmp_path / "cache" / "transformers_modules").mkdir(parents=True)
    (tmp_path / "cache" / "transformers_modules" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "cache")
    tfkit.save(tfkit.build(decoder(), seed=3), tmp_path / "model", layout="transformers", names=names)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROVED)
def test_transformers_computes_the_same_in_one_and_in_two_processes(name: str, tmp_path: Path) -> None:
    """`save` compares the logits, and the logits and gradients of two processes; see the planted plans below."""
    model = saved(decoder(**PROVED[name]), tmp_path / "model")
    text = (tmp_path / "model" / "configuration_small.py").read_text()
    divided = {f'"layers.*.self_attn.{key}": "{style}"' in text for key, style in DIVIDED.items()}
    assert divided == {"gathered" not in name}
    assert ("ep_dispatch_experts" in text) == ("experts" in name)  # also if only the heads are gathered
    spec = tfkit.load(str(tmp_path / "model"), plugins=PLUGINS)
    reopened = tfkit.build(spec, weights=tmp_path / "model").state_dict()
    assert all(torch.equal(tensor, reopened[key]) for key, tensor in model.state_dict().items())
    tokens = torch.randint(64, (2, 9))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens), rtol=1e-5, atol=1e-5)
    if "experts" in name:
        with tfkit.trace(model, read="decoder.layers.*.ffn.router_logits") as values:
            model(tokens)
        recorded = loaded(tokens, output_router_logits=True).router_logits
        for logits, expected in zip(recorded, values.values(), strict=True):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_hidden_units_that_depend_on_each_other_are_gathered(tmp_path: Path) -> None:
    graph = decoder(ffn={"kind": "own", "d_ff": 48, "mixed": True})
    with pytest.warns(tfkit.NamesWarning, match=r"each process computes all of mlp of `small`(.|\n)*down_proj\.weight"):
        saved(graph, tmp_path / "model")
    assert '"layers.*.mlp.up_proj": "colwise_gather_output"' in (tmp_path / "model/configuration_small.py").read_text()


@pytest.mark.slow
def test_experts_with_weighted_inputs_are_complete_in_each_process(tmp_path: Path) -> None:
    """In training, transformers multiplies the outputs of experts by the weights of the router."""
    graph = decoder(ffn={**MOE, "router": {"score": "sigmoid", "weighs": "input"}})
    with pytest.warns(
        tfkit.NamesWarning, match=r"the experts of `small` cannot be divided among processes(.|\n)*the gradient of"
    ):
        saved(graph, tmp_path / "model")
    text = (tmp_path / "model" / "configuration_small.py").read_text()
    assert "moe_tp_experts" in text
    assert "ep_dispatch_experts" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"layers.*.self_attn.q_norm": "replicate"}, "self_attn.q_norm.weight"),  # only a gradient is wrong
        ({"layers.*.mlp.gate_proj": "colwise_gather_output"}, "mlp.up_proj.weight"),
    ],
)
def test_a_wrong_plan_leaves_no_folder(
    change: dict[str, str], parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = decoder({**ATTENTION, "qk_norm": "rmsnorm"})
    plan = plan_of(graph)
    planted = plan._replace(tensor=tuple({**dict(plan.tensor), **change}.items()))
    monkeypatch.setattr(plan_proof, "parallel_plan", lambda *_: planted)
    with pytest.raises(tfkit.SpecError, match=f"divided among processes: .*{parameter}"):
        saved(graph, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="pip install --group around -e .")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_a_published_recipe_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of `q_proj` and `v_proj` trains, merges, and is read by tfkit."""
    from peft import LoraConfig, get_peft_model

    model, tokens = tfkit.build(decoder(), seed=3), torch.randint(64, (4, 9))
    (tmp_path / "model").mkdir()
    written(model, tmp_path / "model", monkeypatch)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(loaded, config)
    optimizer, losses = torch.optim.AdamW(adapted.parameters(), lr=0.05), []
    for _ in range(5):
        losses.append(adapted(tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    logits = adapted.eval()(tokens).logits
    assert not torch.allclose(logits, model.eval()(tokens), atol=1e-3)
    adapted.save_pretrained(tmp_path / "adapter")
    ours = tfkit.build(tmp_path / "model", weights=tmp_path / "adapter").eval()
    torch.testing.assert_close(ours(tokens), logits, rtol=1e-5, atol=1e-5)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-5, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    torch.testing.assert_close(again(tokens).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("position", "rope"),
    [
        ({"theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
        ({"theta": 500.0, "width": 4}, {}),
        ({"theta": 500.0, "scaling": {"kind": "dynamic", "factor": 2.0, "original_max_len": 32}}, {}),
    ],
)
def test_rotary_positions_that_transformers_describes(position: dict[str, Any], rope: dict[str, Any]) -> None:
    stack = decoder({**ATTENTION, "position": {"kind": "rope", **position}}).node("decoder")
    assert LlamaFields.of(stack, {"theta": 500.0}).rope == rope
