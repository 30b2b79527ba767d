"""A stack of a single layer equals torch's encoder and decoder layers, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import tfkit

D, HEADS, FF = 16, 4, 24
BATCH, LENGTH, MEMORY = 3, 7, 5

NORMS = {"pre": "norm_in", "post": "norm_after"}
LENGTHS = {"queries": [7, 4, 1], "memory": [2, 5, 3]}


def spec(block: str, placement: str, ffn: str, mask: str = "null") -> str:
    memory = "memory: {type: features, width: 16}" if block == "memory_decoder" else ""
    return f"""
        tfkit: 1
        name: layer
        d_model: {D}
        inputs:
          x: {{type: features, width: {D}}}
          {memory}
        graph:
          stack:
            block: {block.removeprefix("memory_")}
            input: x
            n_layers: 1
            placement: {placement}
            norm: {{kind: layernorm, eps: 1e-4}}
            attention: {{kind: mha, n_heads: {HEADS}, mask: {mask}}}
            ffn: {{kind: {ffn}, d_ff: {FF}}}
            final_norm: false
            {"memory: memory" if memory else ""}
    """


def renamed(theirs: Mapping[str, Tensor], placement: str) -> dict[str, Tensor]:
    """The tensors of torch's layer, all of them, under the names of ours."""
    norm, memory = NORMS[placement], "norm3.weight" in theirs
    modules = {
        f"attention_{norm}": "norm1",
        "attention.output": "self_attn.out_proj",
        f"ffn_{norm}": "norm3" if memory else "norm2",
        "ffn.up": "linear1",
        "ffn.down": "linear2",
    }
    if memory:
        modules |= {f"cross_attention_{norm}": "norm2", "cross_attention.output": "multihead_attn.out_proj"}
    result = {}
    for leaf in ("weight", "bias"):
        result |= {f"{ours}.{leaf}": theirs[f"{name}.{leaf}"] for ours, name in modules.items()}
        result[f"attention.project.qkv.{leaf}"] = theirs[f"self_attn.in_proj_{leaf}"]
        if memory:
            parts = theirs[f"multihead_attn.in_proj_{leaf}"].chunk(3)
            result |= {f"cross_attention.project.{x}.{leaf}": tensor for x, tensor in zip("qkv", parts, strict=True)}
    assert sum(tensor.numel() for tensor in result.values()) == sum(tensor.numel() for tensor in theirs.values())
    return {f"stack.layers.0.{name}": tensor for name, tensor in result.items()}


def pair(block: str, placement: str, ffn: str, mask: str = "null") -> tuple[nn.Module, nn.Module]:
    """Our stack and torch's layer with the same random parameters."""
    torch.manual_seed(0)
    memory = block == "memory_decoder"
    cls = nn.TransformerDecoderLayer if memory else nn.TransformerEncoderLayer
    theirs = cls(D, HEADS, FF, 0.0, ffn, layer_norm_eps=1e-4, batch_first=True, norm_first=placement == "pre")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    ours = tfkit.build(tfkit.loads(spec(block, placement, ffn, mask)))
    ours.load_state_dict(renamed(dict(theirs.named_parameters()), placement))
    return ours, theirs


def tokens(kind: str, side: str, length: int) -> Tensor | None:
    """Which positions are tokens, bool [b, length]; None for `side` none."""
    if side == "none":
        return None
    numbers = torch.tensor(LENGTHS[kind])[:, None]
    positions = torch.arange(length)
    return positions < numbers if side == "right" else positions >= length - numbers


def hidden(mask: Tensor) -> Tensor:
    """A mask of ours as a float mask of torch: minus infinity where there is no token."""
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def key_padding(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else hidden(mask)


def extent(left: float, right: float) -> Tensor:
    """Which keys attention reads that reaches so far to each side, bool [q, k]."""
    distance = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
    return (distance >= -left) & (distance <= right)


def float_mask(visible: Tensor, padding: Tensor | None) -> Tensor:
    """Extent and padding as one float mask, [q, k] or [b * h, q, k].

    Queries that are padding may have no key at all, which is NaN in torch: here they read every key.
    """
    if padding is None:
        return hidden(visible)
    return hidden((visible & padding[:, None, :]) | ~padding[:, :, None]).repeat_interleave(HEADS, dim=0)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def compare(
    ours: nn.Module,
    theirs: nn.Module,
    placement: str,
    our_inputs: dict[str, Tensor | None],
    their_output: Tensor,
    real: Tensor | None,
) -> None:
    """Outputs, and the gradients of inputs and parameters, agree at the positions that are tokens."""
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool) if real is None else real
    our_output = ours(**our_inputs)
    assert_equal(our_output[real], their_output[real])
    leaves = [tensor for tensor in our_inputs.values() if tensor is not None and tensor.requires_grad]
    cotangent = torch.randn(D)
    their_parameters = dict(theirs.named_parameters())
    their_loss, our_loss = ((output[real] @ cotangent).sin().sum() for output in (their_output, our_output))
    expected = torch.autograd.grad(their_loss, [*leaves, *their_parameters.values()])
    actual = torch.autograd.grad(our_loss, [*leaves, *ours.parameters()])
    for mine, reference in zip(actual[: len(leaves)], expected[: len(leaves)], strict=True):
        assert_equal(mine, reference)
    names = [name for name, _ in ours.named_parameters()]
    gradients = dict(zip(their_parameters, expected[len(leaves) :], strict=True))
    for name, reference in renamed(gradients, placement).items():
        assert_equal(actual[len(leaves) + names.index(name)], reference)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("ffn", ["relu", "gelu"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_encoder_layer(placement: str, ffn: str, side: str) -> None:
    ours, theirs = pair("encoder", placement, ffn)
    x = torch.randn(BATCH, LENGTH, D, requires_grad=True)
    mask = tokens("queries", side, LENGTH)
    expected = theirs(x, src_key_padding_mask=key_padding(mask))
    compare(ours, theirs, placement, {"x": x, "x_mask": mask}, expected, mask)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize(
    ("block", "mask", "reach"),
    [
        ("decoder", "null", (math.inf, 0)),
        ("decoder", "{left: 2, right: 0}", (2, 0)),
        ("encoder", "{left: 2, right: 1}", (2, 1)),
        ("encoder", "{right: 3}", (math.inf, 3)),
    ],
)
def test_layer_with_a_float_mask(block: str, mask: str, reach: tuple[float, float], placement: str, side: str) -> None:
    ours, theirs = pair(block, placement, "gelu", mask)
    x = torch.randn(BATCH, LENGTH, D, requires_grad=True)
    padding = tokens("queries", side, LENGTH)
    records = float_mask(extent(*reach), padding)
    expected = theirs(x, src_mask=records)
    compare(ours, theirs, placement, {"x": x, "x_mask": padding}, expected, padding)


@pytest.mark.parametrize("memory_side", ["none", "right", "left"])
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize(("placement", "ffn"), [("pre", "gelu"), ("post", "relu")])
def test_decoder_layer(placement: str, ffn: str, side: str, memory_side: str) -> None:
    ours, theirs = pair("memory_decoder", placement, ffn)
    x = torch.randn(BATCH, LENGTH, D, requires_grad=True)
    memory = torch.randn(BATCH, MEMORY, D, requires_grad=True)
    mask, memory_mask = tokens("queries", side, LENGTH), tokens("memory", memory_side, MEMORY)
    records = float_mask(extent(math.inf, 0), mask)
    expected = theirs(x, memory, tgt_mask=records, memory_key_padding_mask=key_padding(memory_mask))
    inputs = {"x": x, "memory": memory, "x_mask": mask, "memory_mask": memory_mask}
    compare(ours, theirs, placement, inputs, expected, mask)


@pytest.mark.parametrize("softcap", ["null", "20.0"])
@pytest.mark.parametrize("block", ["encoder", "decoder", "memory_decoder"])
def test_rows_without_a_key_give_no_nan(block: str, softcap: str) -> None:
    """A sequence of nothing but padding, a memory of nothing but padding, and queries in front of the first token."""
    graph = tfkit.loads(spec(block, "pre", "gelu"), sets=[f"stack.attention.softcap={softcap}"])
    model = tfkit.build(graph)
    x = torch.randn(BATCH, LENGTH, D, requires_grad=True)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0], mask[1, :3] = False, False
    inputs = {"x": x, "x_mask": mask}
    if block == "memory_decoder":
        memory_mask = torch.ones(BATCH, MEMORY, dtype=torch.bool)
        memory_mask[2] = False
        inputs |= {"memory": torch.randn(BATCH, MEMORY, D), "memory_mask": memory_mask}
    output = model(**inputs)
    output.square().sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_memory_of_padding_adds_only_the_bias() -> None:
    """Cross-attention without any key mixes nothing: what is left of it is the bias of its output."""
    model = tfkit.build(tfkit.loads(spec("memory_decoder", "pre", "relu")))
    layer = model.stack.layers[0]
    torch.nn.init.normal_(layer.cross_attention.output.bias)
    calls: list[Tensor] = []
    layer.cross_attention.register_forward_hook(lambda module, inputs, output: calls.append(output))
    memory_mask = torch.zeros(BATCH, MEMORY, dtype=torch.bool)
    model(torch.randn(BATCH, LENGTH, D), torch.randn(BATCH, MEMORY, D), memory_mask=memory_mask)
    torch.testing.assert_close(calls[0], layer.cross_attention.output.bias.expand(BATCH, LENGTH, D))
