"""Bidirectional self-attention with a memory equals the published blocks, in value and gradient.

Stable Diffusion's transformer block (diffusers), DETR's decoder layer and BLIP-2's Q-Former (transformers). DETR's
positions, which it adds to queries and keys in every layer, are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import tfkit

D, D_MEMORY, HEADS, FF = 16, 24, 4, 40
BATCH, QUERIES, MEMORY = 3, 7, 5
REAL = torch.tensor([5, 2, 4])[:, None] > torch.arange(MEMORY)
"""Which positions of the memory are tokens."""

SPEC = f"""
    tfkit: 1
    name: memory_encoder
    d_model: {D}
    inputs:
      x: {{type: features, width: {D}}}
      memory: {{type: features, width: {D_MEMORY}}}
    graph:
      stack:
        block: encoder
        input: x
        memory: memory
        n_layers: 1
        attention: {{kind: mha, n_heads: {HEADS}}}
        ffn: {{kind: gelu, d_ff: {FF}}}
        final_norm: false
"""
BASIC = ["stack.attention.bias={o: true}", f"stack.ffn={{kind: geglu, d_ff: {FF}}}"]
DETR = ["stack.placement=post", "stack.ffn.kind=relu", f"inputs.memory.width={D}"]
QFORMER = [
    *("stack.placement=post", "stack.n_layers=2"),
    "stack.layers={variants: {alone: {sublayers: [attention, ffn]}}, pattern: [base, alone]}",
]


def diffusers_block() -> nn.Module:
    attention = pytest.importorskip("diffusers.models.attention")
    return attention.BasicTransformerBlock(D, HEADS, D // HEADS, cross_attention_dim=D_MEMORY, ff_inner_dim=FF)


def detr_layer() -> nn.Module:
    from transformers import DetrConfig
    from transformers.models.detr.modeling_detr import DetrDecoderLayer

    config = DetrConfig(d_model=D, decoder_attention_heads=HEADS, decoder_ffn_dim=FF, activation_function="relu")
    config._attn_implementation = "eager"
    return DetrDecoderLayer(config)


class QFormer(nn.Module):
    """Two layers of BLIP-2's Q-Former, of which the first reads the memory."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Blip2QFormerConfig
        from transformers.models.blip_2.modeling_blip_2 import Blip2QFormerLayer

        config = Blip2QFormerConfig(
            hidden_size=D, num_attention_heads=HEADS, intermediate_size=FF, encoder_hidden_size=D_MEMORY
        )
        config.layer_norm_eps = 1e-5
        config._attn_implementation = "eager"
        self.layers = nn.ModuleList(Blip2QFormerLayer(config, layer_idx=index) for index in range(2))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, encoder_hidden_states=memory, encoder_attention_mask=mask, query_length=x.size(1))
        return x


def names(theirs: str, ours: str, leaves: str = "weight bias") -> dict[str, str]:
    return {f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in leaves.split()}


def projections(theirs: str, ours: str, query: str, leaves: str = "weight bias") -> dict[str, str]:
    """The names of queries, keys and values; those of self-attention lie in one matrix."""
    separate = ours == "cross_attention"
    result: dict[str, str] = {}
    for letter, name in zip("qkv", query.split(), strict=True):
        part = f"{ours}.project.{letter}" if separate else f"{ours}.project.qkv/{letter}"
        result |= {f"{theirs}.{name}.{leaf}": f"{part}.{leaf}" for leaf in leaves.split()}
    return result


def of_diffusers() -> dict[str, str]:
    to = "to_q to_k to_v"
    return {
        **names("norm1", "attention_norm_in"),
        **names("norm2", "cross_attention_norm_in"),
        **names("norm3", "ffn_norm_in"),
        **projections("attn1", "attention", to, "weight"),
        **projections("attn2", "cross_attention", to, "weight"),
        **names("attn1.to_out.0", "attention.output"),
        **names("attn2.to_out.0", "cross_attention.output"),
        **names("ff.net.0.proj", "ffn.gate_up"),
        **names("ff.net.2", "ffn.down"),
    }


def of_detr() -> dict[str, str]:
    of = "q_proj k_proj v_proj"
    return {
        **names("self_attn_layer_norm", "attention_norm_after"),
        **names("encoder_attn_layer_norm", "cross_attention_norm_after"),
        **names("final_layer_norm", "ffn_norm_after"),
        **projections("self_attn", "attention", of),
        **projections("encoder_attn", "cross_attention", of),
        **names("self_attn.o_proj", "attention.output"),
        **names("encoder_attn.o_proj", "cross_attention.output"),
        **names("mlp.fc1", "ffn.up"),
        **names("mlp.fc2", "ffn.down"),
    }


def of_qformer(*, crossing: bool) -> dict[str, str]:
    of = "query key value"
    actual = {
        **names("attention.output.LayerNorm", "attention_norm_after"),
        **projections("attention.attention", "attention", of),
        **names("attention.output.dense", "attention.output"),
        **names("intermediate_query.dense", "ffn.up"),
        **names("output_query.dense", "ffn.down"),
        **names("output_query.LayerNorm", "ffn_norm_after"),
    }
    if crossing:
        actual |= names("crossattention.output.LayerNorm", "cross_attention_norm_after")
        actual |= projections("crossattention.attention", "cross_attention", of)
        actual |= names("crossattention.output.dense", "cross_attention.output")
    return actual


def ours_from(theirs: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Their tensors, or gradients, under our names, all of them: q, k and v in one, and the gate of an FFN first."""
    assert theirs.keys() == table.keys()
    result: dict[str, Tensor] = {}
    for name, path in table.items():
        start, fused, letter_and_leaf = path.partition("/")
        ours = f"{start}.{letter_and_leaf.partition('.')[2]}" if fused else path
        tensor = torch.cat(theirs[name].chunk(2)[::-1]) if ".gate_up." in path else theirs[name]
        result[ours] = torch.cat([result[ours], tensor]) if ours in result else tensor
    return result


def of_layers(table: Mapping[str, str], index: int, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{theirs}": f"stack.layers.{index}.{ours}" for theirs, ours in table.items()}


def additive() -> Tensor:
    return torch.zeros(BATCH, 1, 1, MEMORY).masked_fill(~REAL[:, None, None], -1e9)


def run_diffusers(block: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    return block(x, encoder_hidden_states=memory, encoder_attention_mask=additive()[:, 0])


def run_detr(layer: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    return layer(x, encoder_hidden_states=memory, encoder_attention_mask=additive())


def run_qformer(layers: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    return layers(x, memory, additive())


UNMASKED = {
    **of_layers(of_qformer(crossing=True), 0, "layers.0."),
    **of_layers(of_qformer(crossing=False), 1, "layers.1."),
}
BLOCKS = {
    "stable diffusion": (BASIC, diffusers_block, of_layers(of_diffusers(), 0), run_diffusers),
    "detr": (DETR, detr_layer, of_layers(of_detr(), 0), run_detr),
    "q-former": (QFORMER, QFormer, UNMASKED, run_qformer),
}


@pytest.mark.parametrize(
    "name", [pytest.param("stable diffusion", marks=pytest.mark.slow), "detr", "q-former"]
)  # diffusers takes four seconds to import
def test_a_published_block_with_a_memory(name: str) -> None:
    sets, make, table, run = BLOCKS[name]
    torch.manual_seed(0)
    theirs = make().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.1, 0.3)
    ours = tfkit.build(tfkit.loads(SPEC, sets=sets)).eval()
    ours.load_state_dict(ours_from(dict(theirs.named_parameters()), table))
    d_memory = ours.meta["graph"].inputs["memory"].width
    x = torch.randn(BATCH, QUERIES, D, requires_grad=True)
    memory = torch.randn(BATCH, MEMORY, d_memory, requires_grad=True)
    expected, actual = run(theirs, x, memory), ours(x, memory, memory_mask=REAL)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(expected)
    reference = torch.autograd.grad((expected * weight).sum(), [x, memory, *theirs.parameters()])
    options = torch.autograd.grad((actual * weight).sum(), [x, memory, *ours.parameters()])
    torch.testing.assert_close(options[:2], reference[:2], atol=1e-4, rtol=1e-4)
    their_names = [parameter for parameter, _ in theirs.named_parameters()]
    gradients = ours_from(dict(zip(their_names, reference[2:], strict=True)), table)
    for (parameter, _), gradient in zip(ours.named_parameters(), options[2:], strict=True):
        torch.testing.assert_close(gradient, gradients[parameter], atol=1e-4, rtol=1e-4)


def test_a_query_reads_in_both_directions() -> None:
    model = tfkit.build(tfkit.loads(SPEC)).eval()
    x, memory = torch.randn(1, QUERIES, D), torch.randn(1, MEMORY, D_MEMORY)
    later, other = x.clone(), memory.clone()
    later[:, -1] += 1
    other[:, -1] += 1
    before = model(x, memory)[:, 0]
    assert not torch.equal(model(later, memory)[:, 0], before)
    assert not torch.equal(model(x, other)[:, 0], before)
