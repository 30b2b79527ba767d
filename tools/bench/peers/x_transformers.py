"""x-transformers: its biases and norms differ, so its models are slightly different."""

from __future__ import annotations

import re

import torch
from torch import nn
from x_transformers import Decoder, TransformerWrapper

from peers.peer import Peer
from peers.shape import Shape
from peers.weights import State, neighbours, renamed, split_heads


def gpt2(shape: Shape) -> nn.Module:
    """Build GPT-2: learned positions, a tied head, and otherwise its defaults."""
    layers = Decoder(
        dim=shape.d_model,
        depth=shape.n_layers,
        heads=shape.n_heads,
        attn_dim_head=shape.d_head,
        attn_flash=True,
        ff_mult=shape.d_ff / shape.d_model,
        ff_custom_activation=nn.GELU(approximate="tanh"),
    )
    return TransformerWrapper(
        num_tokens=shape.vocab_size,
        max_seq_len=shape.length,
        attn_layers=layers,
        tie_embedding=True,
        tie_embedding_scale=1.0,
    )


def llama(shape: Shape) -> nn.Module:
    """Build Llama: RMSNorm, rotation of entire heads, grouped queries, SwiGLU."""
    layers = Decoder(
        dim=shape.d_model,
        depth=shape.n_layers,
        heads=shape.n_heads,
        attn_dim_head=shape.d_head,
        attn_kv_heads=shape.n_kv_heads,
        attn_flash=True,
        use_rmsnorm=True,
        rotary_pos_emb=True,
        rotary_emb_dim=shape.d_head,
        ff_mult=shape.d_ff / shape.d_model,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        verbose=False,
    )
    return TransformerWrapper(num_tokens=shape.vocab_size, max_seq_len=shape.length, attn_layers=layers)


def weights(state: State, shape: Shape) -> State:
    """Convert weights: norms without biases and relative to 1, scaled positions, separate attention and FFN layers.

    The biases that it lacks are initially 0 in the other models, and its additional bias is initially 0 here.
    """
    state = split_heads(state, shape)
    state = state if shape.family == "gpt2" else neighbours(state, shape)
    weights_used = {
        name: value for name, value in state.items() if not re.search(r"(norm\w*|attention\.\w+)\.bias$", name)
    }
    gated = [name for name in weights_used if name.endswith("gate_up.weight")]
    weights_used |= {name.replace("weight", "bias"): torch.zeros(2 * shape.d_ff) for name in gated}
    gamma, up = ("gamma", "0.0") if shape.family == "gpt2" else ("g", "0.proj")
    moved_weights = renamed(
        {name: moved(name, value, shape) for name, value in weights_used.items()},
        ("embedding.tokens.", "token_emb.emb."),
        ("embedding.position.table.", "pos_emb.emb."),
        ("logits.output.", "to_logits."),
        ("decoder.final_norm.weight", f"attn_layers.final_norm.{gamma}"),
        ("attention_norm_in.weight", f"attention.0.0.{gamma}"),
        ("ffn_norm_in.weight", f"ffn.0.0.{gamma}"),
        *((f".attention.{part}.", f".attention.1.to_{part}.") for part in "qkv"),
        (".attention.output.", ".attention.1.to_out."),
        (".ffn.up.", f".ffn.1.ff.{up}."),
        (".ffn.gate_up.", f".ffn.1.ff.{up}."),
        (".ffn.down.", ".ffn.1.ff.2."),
    )
    return {
        re.sub(r"decoder\.layers\.(\d+)\.(attention|ffn)", layer_prefix, name): value
        for name, value in moved_weights.items()
    }


def moved(name: str, value: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return a weight in the layout of x-transformers: of gate and up, up comes first."""
    if "norm" in name:
        return value - 1.0
    if "position" in name:
        return value * shape.d_model**0.5
    if name.endswith("attention.q.weight"):
        return heads_apart(value, shape)
    if name.endswith("attention.output.weight"):
        return heads_apart(value.t(), shape).t()
    return torch.cat(value.chunk(2)[::-1]) if ".gate_up." in name else value


def heads_apart(value: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Reorder query heads: heads that share keys are n_kv_heads apart in x-transformers, and adjacent in tfkit."""
    return value.unflatten(0, (shape.n_kv_heads, -1, shape.d_head)).transpose(0, 1).flatten(0, 2)


def layer_prefix(layer: re.Match[str]) -> str:
    """Return the prefix of a layer: layer i of tfkit is two layers of x-transformers."""
    return f"attn_layers.layers.{2 * int(layer[1]) + (layer[2] == 'ffn')}"


PEER = Peer(
    {"gpt2": gpt2, "llama": llama},
    weights,
    packages=("x-transformers",),
    differs={
        "gpt2": "no biases in attention and norms",
        "llama": "a bias in the gated FFN, no epsilon in RMSNorm",
    },
)
