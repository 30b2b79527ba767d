"""tfkit."""

from __future__ import annotations

from torch import nn

import tfkit
from peers.peer import EPS, THETA, Peer
from peers.shape import Shape
from peers.weights import State


def gpt2(shape: Shape) -> nn.Module:
    """Build the spec that comes with tfkit, at this size."""
    return tfkit.build("gpt2", sets=["dropout=0", *sizes(shape)])


def llama(shape: Shape) -> nn.Module:
    """Build the Llama spec that comes with tfkit, at this size."""
    attention = [f"decoder.attention.n_kv_heads={shape.n_kv_heads}", f"decoder.attention.position.theta={THETA}"]
    return tfkit.build("llama3_8b", sets=[*sizes(shape), *attention, f"norm.eps={EPS}"])


def sizes(shape: Shape) -> list[str]:
    """Return the sizes of both specs."""
    return [
        f"d_model={shape.d_model}",
        f"vocab_size={shape.vocab_size}",
        f"max_len={shape.length}",
        f"decoder.n_layers={shape.n_layers}",
        f"decoder.attention.n_heads={shape.n_heads}",
        f"decoder.ffn.d_ff={shape.d_ff}",
    ]


def unchanged(state: State, shape: Shape) -> State:
    """Return the weights unchanged."""
    return state


PEER = Peer({"gpt2": gpt2, "llama": llama}, unchanged)
