"""Layers and sublayers as nodes: a model that spells its layers out computes what the stack computes, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.graph.decode_split import static_inputs
from tfkit.testing import check_model, check_script, example_inputs, small_spec
from tfkit.tools.check.components import LISTS, required_values
from tfkit.tools.show.layer_programs import programs_of

PLUGINS = tfkit.load_plugins()
HEADER: dict[str, Any] = {"tfkit": 1, "name": "small", "d_model": 24, "vocab_size": 40, "max_len": 32}
ATTENTION = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope", "qk_norm": "rmsnorm"}
FFN = {"kind": "swiglu", "d_ff": 40}
WINDOW = {**ATTENTION, "mask": {"left": 4, "right": 0}}


def spec(graph: Mapping[str, Any], **fields: Any) -> tfkit.Graph:
    ends = {"logits": {"block": "lm_head", "bias": True}}
    return tfkit.load({**HEADER, "graph": {"embedding": {"block": "embedding"}, **graph, **ends}, **fields})


def decoder(attention: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"block": "decoder", "n_layers": 2, "norm": "rmsnorm", "attention": attention, "ffn": FFN, **fields}


def layers(attention: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    layer = {"block": "layer", "causal": True, "norm": "rmsnorm", "attention": attention, "ffn": FFN, **fields}
    return {"layer0": layer, "layer1": layer, "end": {"block": "norm", "norm": "rmsnorm"}}


def sublayers(attention: Mapping[str, Any], residual: Any = "add", **fields: Any) -> dict[str, Any]:
    """Return pre-LN layers, node by node."""
    graph: dict[str, Any] = {}
    stream = "embedding"
    for i in range(2):
        for name, block in (
            ("attention", {"block": "attention", "attention": attention, "causal": True}),
            ("ffn", {"block": "ffn", "ffn": FFN}),
        ):
            graph[f"{name}{i}_norm"] = {"block": "norm", "norm": "rmsnorm", "input": stream}
            graph[f"{name}{i}"] = block
            graph[f"{name}{i}_sum"] = {"block": "residual", "inputs": [stream, f"{name}{i}"], "residual": residual}
            stream = f"{name}{i}_sum"
    return {**graph, "end": {"block": "norm", "norm": "rmsnorm"}}


def name_in_nodes(name: str) -> str:
    """Return the name in the graph of sublayers of a weight of the decoder."""
    node, _, inner = name.partition(".")
    if node != "decoder":
        return name
    if inner.startswith("final_norm."):
        return f"end.{inner.removeprefix('final_norm.')}"
    _, number, sublayer, rest = inner.split(".", 3)
    for part in ("attention", "ffn"):
        if sublayer == f"{part}_norm_in":
            return f"{part}{number}_norm.{rest}"
        if sublayer in (f"{part}_residual_scale", f"{part}_residual_scale_onto"):
            return f"{part}{number}_sum.{sublayer.removeprefix(f'{part}_residual_')}.{rest}"
    return f"attention{number}.layers.0.attention.{rest}" if sublayer == "attention" else f"ffn{number}.{rest}"


def name_in_layers(name: str) -> str:
    """Return the name in the graph of layers of a weight of the decoder."""
    name = name.replace("decoder.final_norm.", "end.")
    for number in range(2):
        name = name.replace(f"decoder.layers.{number}.", f"layer{number}.layers.0.")
    return name


SPELLED = {
    "layers": (layers, name_in_layers),
    "sublayers": (sublayers, name_in_nodes),
}


def pair(spelled: str, attention: Mapping[str, Any], **fields: Any) -> tuple[Any, Any]:
    """Return the model with a stack, and the spelled-out model with the same weights."""
    graph, renamed = SPELLED[spelled]
    stack = tfkit.build(spec({"decoder": decoder(attention, **fields)}), seed=3)
    nodes = tfkit.build(spec(graph(attention, **fields)), seed=4)
    with torch.no_grad():
        for parameter in stack.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    nodes.load_state_dict({renamed(name): value for name, value in stack.state_dict().items()})
    return stack.eval(), nodes.eval()


def tokens(b: int, t: int) -> Tensor:
    return torch.randint(40, (b, t), generator=torch.Generator().manual_seed(t))


@pytest.mark.parametrize("attention", [ATTENTION, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("spelled", SPELLED)
def test_spelled_out_layers_compute_what_the_stack_computes(spelled: str, attention: Mapping[str, Any]) -> None:
    stack, nodes = pair(spelled, attention)
    x = tokens(3, 9)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4], mask[1, 6:] = False, False
    pairs = torch.ones(3, 9, 9, dtype=torch.bool).tril()
    pairs[:, 5:, :5] = False
    for arguments in ({}, {"tokens_mask": mask}, {"tokens_mask": pairs}):
        ours, theirs = nodes(x, **arguments), stack(x, **arguments)
        assert torch.equal(ours, theirs), f"differs by {(ours - theirs).abs().max():.1e} for {list(arguments)}"


@pytest.mark.parametrize("attention", [ATTENTION, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("spelled", SPELLED)
def test_spelled_out_layers_are_decoded_with_caches(spelled: str, attention: Mapping[str, Any]) -> None:
    stack, nodes = pair(spelled, attention)
    prompt = tokens(2, 5)
    expected = tfkit.generate(stack, prompt, max_new_tokens=7, temperature=0)
    assert torch.equal(tfkit.generate(nodes, prompt, max_new_tokens=7, temperature=0).tokens, expected.tokens)


@pytest.mark.parametrize(
    "residual",
    [{"scale": 0.5, "learned": "vector", "learned_onto": "scalar"}, {"scale": 2.0, "scale_onto": 0.5}],
    ids=["learned", "scaled"],
)
def test_a_residual_node_is_the_residual_of_a_layer(residual: Mapping[str, Any]) -> None:
    stack, nodes = pair("sublayers", ATTENTION, residual=residual)
    x = tokens(3, 9)
    torch.testing.assert_close(nodes(x), stack(x), rtol=0, atol=1e-6)


def test_a_residual_node_drops_the_sublayer_only() -> None:
    residual = {"block": "residual", "inputs": ["embedding", "norm"], "dropout": 0.5}
    model = tfkit.build(spec({"norm": {"block": "norm"}, "sum": residual}, outputs=["sum", "logits"])).train()
    x = tokens(2, 6)
    stream, branch = model.embedding(x), model.norm(model.embedding(x))
    ratio = (model(x)[0] - stream) / branch
    assert set(ratio.round(decimals=3).flatten().tolist()) == {0.0, 2.0}


def test_a_skipless_layer_keeps_only_its_output() -> None:
    graph = spec({"decoder": decoder(ATTENTION, n_layers=1, residual={"onto": "nothing", "scale": 0.5})})
    model = tfkit.build(graph).eval()
    outputs: dict[str, Tensor] = {}
    layer = model.decoder.layers[0]
    layer.ffn.register_forward_hook(lambda _module, _args, output: outputs.update(ffn=output))
    layer.register_forward_hook(lambda _module, _args, output: outputs.update(layer=output))
    model(tokens(2, 6))
    assert torch.equal(outputs["layer"], outputs["ffn"] * 0.5)
    assert programs_of(graph)[0].lines[1] == "x = 0.5 * ffn(rmsnorm(x))"
    check_model(graph, only=["meaning", "zero-sublayers"])


@pytest.mark.parametrize(
    ("node", "path", "message"),
    [
        ({"block": "attention"}, "attention", "missing key"),
        ({"block": "attention", "attention": {"n_heads": 5}}, "attention.n_heads", "multiple of n_heads"),
        ({"block": "attention", "attention": {"n_heads": 4, "mask": {"left": 3}}, "causal": True}, "mask", "later key"),
        ({"block": "cross_attention", "memory": "embedding", "attention": ATTENTION}, "attention.position", "no pos"),
        ({"block": "ffn", "ffn": {**FFN, "d_model": 12}}, "input", "width of d_model, 12"),
        ({"block": "position"}, "block", "is a slot"),
        ({"block": "residual", "inputs": ["embedding"]}, "inputs", "2"),
        ({"block": "layer", "causal": True}, "", "must have a sublayer"),
    ],
)  # fmt: skip
def test_errors_name_the_field(node: Mapping[str, Any], path: str, message: str) -> None:
    with pytest.raises(tfkit.SpecError) as caught:
        spec({"node": node})
    text = str(caught.value)
    assert message in text
    assert path in text


def test_a_slot_that_is_no_block_is_explained() -> None:
    registry = PLUGINS.registry
    slots = {*registry.slots()} - {*registry.kinds("block")} - {"block"}
    assert {"position", "rope_scaling", "mask_rule", "optimizer", "tokenizer"} <= slots
    for slot in slots:
        with pytest.raises(tfkit.SpecError) as caught:
            spec({"node": {"block": slot}})
        text = " ".join(str(caught.value).split())
        assert f"`{slot}` is a slot: its kinds fill a field, as `rope` does in `attention: {{position: rope}}`" in text
        assert f"help: list the kinds of the slot with `tfkit components {slot}`" in text
    with pytest.raises(tfkit.SpecError) as caught:
        spec({"node": {"block": "block"}})
    assert "is a slot" not in str(caught.value)


def test_a_residual_that_reads_the_stream_must_be_in_a_stack() -> None:
    node = {"block": "residual", "inputs": ["embedding", "copy"], "residual": {"kind": "depth"}}
    with pytest.raises(tfkit.SpecError, match="it must be in a stack"):
        spec({"copy": {"block": "norm"}, "sum": node})


@pytest.mark.parametrize(("key", "verb"), [("kv_name", "gives"), ("kv_from", "takes")])
def test_a_sublayer_that_shares_its_keys_must_be_in_a_stack(key: str, verb: str) -> None:
    attention = {**ATTENTION, key: "keys"}
    with pytest.raises(tfkit.SpecError, match=f"attention `gqa` {verb} `keys.keys`: it must be in a stack"):
        spec({"attention": {"block": "attention", "attention": attention, "causal": True}})


@pytest.mark.slow
@pytest.mark.parametrize("spelled", SPELLED)
def test_a_spelled_out_model_keeps_every_promise(spelled: str) -> None:
    check_model(spec(SPELLED[spelled][0](ATTENTION)))


# ---- every kind of a sublayer ----

KINDS = [(slot, kind) for slot in ("attention", "ffn", "mixer") for kind in PLUGINS.registry.kinds(slot)]
QUICK_KINDS = {("attention", "gqa"), ("ffn", "moe"), ("mixer", "gated_delta"), ("attention", "mla")}
NOT_ALONE = {
    "channel_mix": "must be in a stack",
    "feature_gate": "needs layer features",
    "value_residual": "must be in a stack",
}
"""Errors of kinds that take more than a sequence."""
INDEX = {"n_heads": 2, "d_head": 8, "keep": 3}
ROPE_AND_INDEX = {"mla_indexed": {"index": INDEX, "position": {"kind": "rope", "width": 4}}}


def spelled_out(stack: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nodes of a pre-LN stack of one layer."""
    graph: dict[str, Any] = {}
    stream, causal = stack.get("input", "embedding"), stack["block"] == "decoder"
    blocks: dict[str, dict[str, Any]] = {}
    if "mixer" in stack:
        blocks["mixer"] = {"mixer": stack["mixer"]}
    if "attention" in stack:
        blocks["attention"] = {"attention": stack["attention"], "causal": causal}
    if "memory" in stack:
        blocks["cross_attention"] = {"attention": stack["attention"], "memory": stack["memory"]}
    blocks["ffn"] = {"ffn": stack["ffn"]}
    for name, fields in blocks.items():
        graph[f"{name}_norm_in"] = {"block": "norm", "input": stream}
        graph[name] = {"block": name, **fields}
        graph[f"{name}_sum"] = {"block": "residual", "inputs": [stream, name]}
        stream = f"{name}_sum"
    return {**graph, "final_norm": {"block": "norm"}}


def small(slot: str, kind: str, layout: Any) -> dict[str, Any]:
    config = PLUGINS.registry.kinds(slot)[kind].config
    lists = LISTS | ROPE_AND_INDEX
    return small_spec(layout, config, {"kind": kind, **required_values(config), **lists.get(kind, {})})


@pytest.mark.parametrize("layout", ["decoder", "encoder", "memory"])
@pytest.mark.parametrize(
    ("slot", "kind"), [pytest.param(*key, marks=[] if key in QUICK_KINDS else [pytest.mark.slow]) for key in KINDS]
)
def test_a_kind_is_the_same_as_a_node(slot: str, kind: str, layout: str) -> None:
    spec = small(slot, kind, layout)
    if layout != "encoder" and not PLUGINS.registry.kinds(slot)[kind].config.causal:
        with pytest.raises(tfkit.SpecError, match=r"must not depend on later positions|is self-attention only"):
            tfkit.load(spec, plugins=PLUGINS)
        return
    graph = spec["graph"]
    spelled = {name: node for name, node in graph.items() if name not in ("stack", "logits")}
    spelled = {**spelled, **spelled_out(graph["stack"]), "logits": graph["logits"]}
    if kind in NOT_ALONE:
        with pytest.raises(tfkit.SpecError, match=NOT_ALONE[kind]):
            tfkit.load({**spec, "graph": spelled}, plugins=PLUGINS)
        return
    if kind == "mla_indexed" and layout == "memory":
        pytest.skip("it chooses among the keys of its own sequence")
    stack = tfkit.build(tfkit.load(spec, plugins=PLUGINS), seed=1).eval()
    nodes = tfkit.build(tfkit.load({**spec, "graph": spelled}, plugins=PLUGINS), seed=2).eval()
    weights = {
        name.rpartition("layers.0.")[2].removeprefix("stack."): value for name, value in stack.state_dict().items()
    }
    ours = [*nodes.state_dict()]
    nodes.load_state_dict({name: weights[name.rpartition("layers.0.")[2]] for name in ours})
    for padding in ("none", "left", "right"):
        inputs = example_inputs(stack.meta["graph"], padding=padding)
        assert torch.equal(nodes(**inputs), stack(**inputs))
    if layout == "decoder":
        steps = [in_steps(model, inputs["tokens"]) for model in (stack, nodes)]
        assert torch.equal(*steps)


def in_steps(model: Any, x: Tensor) -> Tensor:
    cached = tfkit.CachedModel(model, length=8)
    cached.start(len(x))
    return torch.cat([cached(x[:, :3]), cached(x[:, 3:4]), cached(x[:, 4:])], dim=1)


# ---- latents ----


def perceiver(**fields: Any) -> tfkit.Graph:
    latents = {"block": "latents", "n_latents": 5, "input": "embedding", **fields}
    attention = {"block": "cross_attention", "memory": "embedding", "attention": {"n_heads": 4}}
    return spec({"latents": latents, "attention": attention})


def test_latents_are_the_same_for_every_row() -> None:
    graph = perceiver()
    assert [graph.node(name).output.length for name in ("embedding", "latents", "attention")] == [None, 5, 5]
    model = tfkit.build(graph, seed=5).eval()
    x = tokens(3, 9)
    assert model(x).shape == (3, 5, 40)
    latents = model.latents(model.embedding(x))
    assert latents.shape == (3, 5, 24)
    assert all(torch.equal(row, model.latents.weight) for row in latents)


def test_latents_have_no_padding_and_read_past_the_padding_of_the_input() -> None:
    model = tfkit.build(perceiver(), seed=5).eval()
    x = tokens(3, 9)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = False
    torch.testing.assert_close(model(x, tokens_mask=mask)[1], model(x[1:2, :6])[0], rtol=0, atol=1e-6)


def test_latents_are_filled_like_a_table_and_never_decay() -> None:
    model = tfkit.build(perceiver(n_latents=200), seed=5)
    assert 0.015 < model.latents.weight.std() < 0.025
    (no_decay,) = (
        group["params"] for group in tfkit.parameter_groups(model, weight_decay=0.1) if not group["weight_decay"]
    )
    assert any(parameter is model.latents.weight for parameter in no_decay)


def test_latents_of_decoded_tokens_cannot_be_decoded() -> None:
    memory = {"latents": {"block": "latents", "n_latents": 5, "input": "embedding"}}
    layer = {"block": "layer", "input": "embedding", "causal": True, "attention": ATTENTION, "memory": "latents"}
    model = tfkit.build(spec({**memory, "layer": layer})).eval()
    with pytest.raises(tfkit.SpecError, match="cannot be decoded token by token"):
        tfkit.CachedModel(model, length=8)


def features(**graph: Any) -> tfkit.Graph:
    """Return a model that decodes nothing: latents attend to the sum of two sequences of features."""
    inputs = {name: {"type": "features", "width": 24} for name in ("image", "places")}
    latents = {"block": "latents", "n_latents": 5, "input": "image"}
    sums = {"sum": {"block": "add", "inputs": ["image", "places"]}}
    attention = {"block": "cross_attention", "input": "latents", "memory": "sum", "attention": {"n_heads": 4}}
    graph = {"latents": latents, **sums, "attention": attention, **graph}
    return tfkit.load({"tfkit": 1, "name": "features", "d_model": 24, "inputs": inputs, "graph": graph})


def test_the_input_of_latents_is_complete_like_a_memory() -> None:
    """Tools that choose two lengths, for what is complete and for the rest, then choose one for both inputs."""
    assert static_inputs(features()) == ("image", "places")


@pytest.mark.parametrize("along", ["width", "length"])
def test_a_concatenation_of_latents_is_scripted(along: str) -> None:
    check_script(tfkit.build(features(both={"block": "concat", "inputs": ["latents", "attention"], "along": along})))


@pytest.mark.parametrize(
    ("node", "path", "message"),
    [
        ({"n_latents": 0}, "n_latents", "from 1"),
        ({}, "n_latents", "missing key"),
        ({"n_latents": 3, "input": "nobody"}, "input", "nobody"),
    ],
)
def test_errors_of_latents(node: Mapping[str, Any], path: str, message: str) -> None:
    with pytest.raises(tfkit.SpecError) as caught:
        spec({"latents": {"block": "latents", **node}})
    assert message in str(caught.value)
    assert path in str(caught.value)
