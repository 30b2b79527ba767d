"""Layers and sublayers as nodes: a model that spells its layers out computes what the stack computes, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.testing import check_model

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
        if sublayer == f"{part}_residual_scale":
            return f"{part}{number}_sum.scale.{rest}"
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
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 5
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
    "residual", [{"scale": 0.5, "learned": "vector"}, {"scale": 2.0, "scale_onto": 0.5}], ids=["learned", "scaled"]
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
    seen: dict[str, Tensor] = {}
    layer = model.decoder.layers[0]
    layer.ffn.register_forward_hook(lambda _module, _args, output: seen.update(ffn=output))
    layer.register_forward_hook(lambda _module, _args, output: seen.update(layer=output))
    model(tokens(2, 6))
    assert torch.equal(seen["layer"], seen["ffn"] * 0.5)
    assert "replaces the stream" in str(tfkit.explain(graph))
    check_model(graph, only=["meaning", "silent"])


@pytest.mark.parametrize(
    ("node", "path", "message"),
    [
        ({"block": "attention"}, "attention", "missing key"),
        ({"block": "attention", "attention": {"n_heads": 5}}, "attention.n_heads", "multiple of n_heads"),
        ({"block": "attention", "attention": {"n_heads": 4, "mask": {"left": 3}}, "causal": True}, "mask", "later keys"),
        ({"block": "cross_attention", "memory": "embedding", "attention": {**ATTENTION}}, "attention.position", "no pos"),
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


def test_a_residual_that_reads_the_stream_must_be_in_a_stack() -> None:
    residual = {"kind": "depth"}
    with pytest.raises(tfkit.SpecError, match="it must be in a stack"):
        spec({"copy": {"block": "norm"}, "sum": {"block": "residual", "inputs": ["embedding", "copy"], "residual": residual}})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spelled", SPELLED)
def test_a_spelled_out_model_keeps_every_promise(spelled: str) -> None:
    check_model(spec(SPELLED[spelled][0](ATTENTION)))
