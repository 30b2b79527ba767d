"""torchtune, assembled from its modules."""

from __future__ import annotations

from functools import partial

from torch import nn
from torchtune.models.llama3 import llama3
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from peers.peer import EPS, THETA, Peer, TokensAndPositions
from peers.shape import Shape
from peers.weights import State, neighbours, renamed, split_gate, split_heads


def gpt2(shape: Shape) -> nn.Module:
    """Build GPT-2 from its layers, with LayerNorm, biases, a plain FFN, and a token table with learned positions."""
    tokens = TokensAndPositions(shape)
    return TransformerDecoder(
        tok_embeddings=tokens,
        layers=[gpt2_layer(shape) for _ in range(shape.n_layers)],
        max_seq_len=shape.length,
        num_heads=shape.n_heads,
        head_dim=shape.d_head,
        norm=nn.LayerNorm(shape.d_model),
        output=TiedLinear(tokens),
    )


def gpt2_layer(shape: Shape) -> nn.Module:
    """Build a layer of GPT-2."""
    square = partial(nn.Linear, shape.d_model, shape.d_model)
    attention = MultiHeadAttention(
        embed_dim=shape.d_model,
        num_heads=shape.n_heads,
        num_kv_heads=shape.n_heads,
        head_dim=shape.d_head,
        q_proj=square(),
        k_proj=square(),
        v_proj=square(),
        output_proj=square(),
        max_seq_len=shape.length,
    )
    ffn = FeedForward(
        gate_proj=nn.Linear(shape.d_model, shape.d_ff),
        down_proj=nn.Linear(shape.d_ff, shape.d_model),
        activation=nn.GELU(approximate="tanh"),
    )
    norms = nn.LayerNorm(shape.d_model), nn.LayerNorm(shape.d_model)
    return TransformerSelfAttentionLayer(attention, ffn, sa_norm=norms[0], mlp_norm=norms[1])


def llama(shape: Shape) -> nn.Module:
    """Build Llama with its builder of Llama 3."""
    return llama3(
        vocab_size=shape.vocab_size,
        num_layers=shape.n_layers,
        num_heads=shape.n_heads,
        num_kv_heads=shape.n_kv_heads,
        embed_dim=shape.d_model,
        max_seq_len=shape.length,
        rope_base=int(THETA),
        intermediate_dim=shape.d_ff,
        norm_eps=EPS,
    )


def weights(state: State, shape: Shape) -> State:
    """Convert weights: a matrix for each projection, w1 to w3 for the FFN, adjacent channels as rotary pairs."""
    state = split_gate(split_heads(state, shape), shape)
    first, weight = ("up", "weight") if shape.family == "gpt2" else ("gate", "scale")
    return renamed(
        state if shape.family == "gpt2" else neighbours(state, shape),
        ("embedding.tokens.", "tok_embeddings."),
        ("embedding.position.table.", "tok_embeddings.positions."),
        ("logits.output.", "output."),
        ("decoder.final_norm.weight", f"norm.{weight}"),
        ("decoder.final_norm.", "norm."),
        ("decoder.", ""),
        ("attention_norm_in.weight", f"sa_norm.{weight}"),
        ("attention_norm_in.", "sa_norm."),
        ("ffn_norm_in.weight", f"mlp_norm.{weight}"),
        ("ffn_norm_in.", "mlp_norm."),
        *((f".attention.{part}.", f".attn.{part}_proj.") for part in "qkv"),
        ("attention.output.", "attn.output_proj."),
        (f"ffn.{first}.", "mlp.w1."),
        ("ffn.down.", "mlp.w2."),
        ("ffn.up.", "mlp.w3."),
    )


PEER = Peer({"gpt2": gpt2, "llama": llama}, weights, packages=("torchtune", "torchao"))
