"""Hugging Face transformers, with its fused attention (`sdpa`, the default)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from peers.peer import EPS, THETA, Peer
from peers.shape import Shape
from peers.weights import State, renamed, split_gate, split_heads, transposed


def gpt2(shape: Shape) -> nn.Module:
    """Build its GPT-2 with the activation of the published config, `gelu_new`."""
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.length,
        n_embd=shape.d_model,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        n_inner=shape.d_ff,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def llama(shape: Shape) -> nn.Module:
    """Build its Llama."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=shape.length,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def weights(state: State, shape: Shape) -> State:
    """Convert weights: the matrices of GPT-2 are [d_in, d_out]; Llama has a matrix for each projection."""
    if shape.family == "gpt2":
        matrices = ("project.qkv.weight", "attention.output.weight", "ffn.up.weight", "ffn.down.weight")
        return renamed(
            transposed(state, matrices),
            ("embedding.tokens.", "transformer.wte."),
            ("embedding.position.table.", "transformer.wpe."),
            ("decoder.final_norm.", "transformer.ln_f."),
            ("decoder.layers.", "transformer.h."),
            ("attention_norm_in.", "ln_1."),
            ("ffn_norm_in.", "ln_2."),
            ("attention.project.qkv.", "attn.c_attn."),
            ("attention.output.", "attn.c_proj."),
            ("ffn.up.", "mlp.c_fc."),
            ("ffn.down.", "mlp.c_proj."),
        )
    return renamed(
        split_gate(split_heads(state, shape), shape),
        ("embedding.tokens.", "model.embed_tokens."),
        ("logits.output.", "lm_head."),
        ("decoder.final_norm.", "model.norm."),
        ("decoder.", "model."),
        ("attention_norm_in.", "input_layernorm."),
        ("ffn_norm_in.", "post_attention_layernorm."),
        ("attention.output.", "self_attn.o_proj."),
        *((f".attention.{part}.", f".self_attn.{part}_proj.") for part in "qkv"),
        *((f".ffn.{part}.", f".mlp.{part}_proj.") for part in ("gate", "up", "down")),
    )


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits, without the default cache, which a training step does not need."""
    return model(tokens, use_cache=False).logits


PEER = Peer({"gpt2": gpt2, "llama": llama}, weights, packages=("transformers",), logits=logits)
