"""Small models with every form of head."""

from __future__ import annotations

import torch
from torch import Tensor, fx

import tfkit

VOCABULARY = 23


def _sizes(*stacks: str) -> list[str]:
    layer = ["n_layers=2", "attention.n_heads=2", "ffn.d_ff=24"]
    return [f"graph.{stack}.{value}" for stack in stacks for value in layer]


_SIZES = ["d_model=16", f"vocab_size={VOCABULARY}"]
_GPT2 = [*_SIZES, "max_len=16", "dropout=0", *_sizes("decoder")]
_LLAMA = [*_SIZES, "max_len=16", *_sizes("decoder")]
_T5 = [*_SIZES, "dropout=0", *_sizes("encoder", "decoder"), "encoder.ffn.dropout=0", "decoder.ffn.dropout=0"]
_HEADS = [f"graph.{stack}.attention.d_head=8" for stack in ("encoder", "decoder")]

SPECS: dict[str, tuple[str, list[str]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2, bias": ("gpt2", [*_GPT2, "logits.bias=true"]),
    "gpt2, scale and softcap": ("gpt2", [*_GPT2, "logits.scale=3.5", "logits.softcap=0.7"]),
    "llama_7b": ("llama_7b", _LLAMA),
    "llama_7b, bias": ("llama_7b", [*_LLAMA, "logits.bias=true"]),
    "llama_7b, narrow table": (
        "llama_7b",
        [*_LLAMA, "embedding.d_embed=6", "logits.d_embed=6", "logits.tie=embedding"],
    ),
    "bert_base": ("bert_base", [*_SIZES, "max_len=16", "dropout=0", *_sizes("encoder")]),
    "t5_small": ("t5_small", [*_T5, *_HEADS]),
    "bart_base": ("bart_base", [*_T5, "max_len=16"]),
}
NEXT_TOKEN = [name for name in SPECS if name != "bert_base"]


def build(name: str, *sets: str) -> fx.GraphModule:
    """The model in float32, ready to train."""
    spec, changes = SPECS[name]
    return tfkit.build(spec, sets=[*changes, *sets], seed=1)


def inputs_of(name: str, batch: int = 3, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Tokens for every input that is needed; those to predict come last."""
    generator = torch.Generator().manual_seed(seed)
    names = ["source", "target"] if name in ("t5_small", "bart_base") else ["tokens"]
    return {name: torch.randint(VOCABULARY, (batch, length), generator=generator) for name in names}


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter; none is left behind."""
    loss.backward()
    actual = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return actual
