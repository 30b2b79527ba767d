"""litgpt."""

from __future__ import annotations

from litgpt import GPT, Config
from torch import nn

from peers.peer import EPS, THETA, Peer, TokensAndPositions
from peers.shape import Shape
from peers.weights import State, renamed, split_gate


def gpt2(shape: Shape) -> nn.Module:
    """Build GPT-2 without rotation. litgpt lacks learned positions and the tie, so both replace its token table."""
    config = Config(
        **sizes(shape),
        rotary_percentage=0.0,
        bias=True,
        norm_class_name="LayerNorm",
        mlp_class_name="GptNeoxMLP",
        gelu_approximate="tanh",
    )
    model = GPT(config)
    model.transformer.wte = TokensAndPositions(shape)
    model.lm_head.weight = model.transformer.wte.weight
    return model


def llama(shape: Shape) -> nn.Module:
    """Build Llama as in litgpt's configs."""
    config = Config(
        **sizes(shape),
        rotary_percentage=1.0,
        rope_base=int(THETA),
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    return GPT(config)


def sizes(shape: Shape) -> dict[str, object]:
    """Return the sizes that GPT-2 and Llama have in common."""
    return {
        "block_size": shape.length,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.vocab_size,
        "n_layer": shape.n_layers,
        "n_embd": shape.d_model,
        "n_head": shape.n_heads,
        "n_query_groups": shape.n_kv_heads,
        "intermediate_size": shape.d_ff,
        "norm_eps": EPS,
        "parallel_residual": False,
    }


def weights(state: State, shape: Shape) -> State:
    """Convert weights: a plain FFN's matrices are `fc` and `proj`, a gated FFN's `fc_1` (gate), `fc_2` (up), `proj`."""
    return renamed(
        split_gate(state, shape),
        ("embedding.tokens.", "transformer.wte."),
        ("embedding.position.table.", "transformer.wte.positions."),
        ("logits.output.", "lm_head."),
        ("decoder.final_norm.", "transformer.ln_f."),
        ("decoder.layers.", "transformer.h."),
        ("attention_norm_in.", "norm_1."),
        ("ffn_norm_in.", "norm_2."),
        ("attention.project.qkv.", "attn.qkv."),
        ("attention.output.", "attn.proj."),
        ("ffn.gate.", "mlp.fc_1."),
        ("ffn.up.", "mlp.fc." if shape.family == "gpt2" else "mlp.fc_2."),
        ("ffn.down.", "mlp.proj."),
    )


PEER = Peer({"gpt2": gpt2, "llama": llama}, weights, packages=("litgpt",))
