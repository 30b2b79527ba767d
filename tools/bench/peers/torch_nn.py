"""torch.nn.TransformerEncoder with a causal mask."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from peers.peer import Peer, TokensAndPositions
from peers.shape import Shape
from peers.weights import State, renamed


class Encoder(nn.Module):
    """A `TransformerEncoder` between an embedding and a tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            shape.d_model,
            shape.n_heads,
            shape.d_ff,
            dropout=0.0,
            activation=partial(F.gelu, approximate="tanh"),
            batch_first=True,
            norm_first=True,
        )
        self.tokens = TokensAndPositions(shape)
        self.encoder = nn.TransformerEncoder(
            layer, shape.n_layers, norm=nn.LayerNorm(shape.d_model), enable_nested_tensor=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        # The fused kernel requires both the mask and the flag that the mask is causal.
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        x = self.encoder(self.tokens(tokens), mask=mask, is_causal=True)
        return F.linear(x, self.tokens.weight)


def weights(state: State, shape: Shape) -> State:
    """Convert the names of weights."""
    return renamed(
        state,
        ("embedding.tokens.", "tokens."),
        ("embedding.position.table.", "tokens.positions."),
        ("decoder.final_norm.", "encoder.norm."),
        ("decoder.", "encoder."),
        ("attention_norm_in.", "norm1."),
        ("ffn_norm_in.", "norm2."),
        ("attention.project.qkv.", "self_attn.in_proj_"),
        ("attention.output.", "self_attn.out_proj."),
        ("ffn.up.", "linear1."),
        ("ffn.down.", "linear2."),
    )


PEER = Peer({"gpt2": Encoder}, weights)
