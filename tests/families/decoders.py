"""Decoders that are no kin of Llama: small, with everything switched on that a family can do."""

from __future__ import annotations

from .case import Case

DECODERS: dict[str, Case] = {
    "gpt2": Case("gpt2", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "n_inner": 80}),
}
