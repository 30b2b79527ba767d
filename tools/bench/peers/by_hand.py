"""The models of `handwritten.py`."""

from __future__ import annotations

from handwritten import GPT2, Llama
from torch import nn

from peers.peer import EPS, THETA, Peer
from peers.shape import Shape
from peers.weights import State, renamed, split_gate


def gpt2(shape: Shape) -> nn.Module:
    """Build GPT-2 as in nanoGPT."""
    return GPT2(
        n_layers=shape.n_layers,
        d_model=shape.d_model,
        n_heads=shape.n_heads,
        d_ff=shape.d_ff,
        vocab_size=shape.vocab_size,
        max_len=shape.length,
    )


def llama(shape: Shape) -> nn.Module:
    """Build Llama in the same manner."""
    return Llama(
        n_layers=shape.n_layers,
        d_model=shape.d_model,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        d_ff=shape.d_ff,
        vocab_size=shape.vocab_size,
        max_len=shape.length,
        theta=THETA,
        eps=EPS,
    )


def weights(state: State, shape: Shape) -> State:
    """Convert weights: separate gate and up, and shorter names."""
    return renamed(
        split_gate(state, shape),
        ("embedding.tokens.", "tokens."),
        ("embedding.position.table.", "positions."),
        ("logits.output.", "output."),
        ("decoder.final_norm.", "norm."),
        ("decoder.", ""),
        ("_norm_in.", "_norm."),
        ("project.qkv.", "qkv."),
    )


PEER = Peer({"gpt2": gpt2, "llama": llama}, weights)
