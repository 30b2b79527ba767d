"""Suitability of a folder for engines such as vLLM and SGLang, which replace parts of a model by their own.

They take the number and the width of heads from config.json, and run an attention of these sizes in each layer. They
compute logits as the product with `lm_head.weight`, and replace modules that are named `experts`. SGLang also replaces
modules whose classes are named `...RMSNorm` by norms that multiply by their weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tfkit.component import AttentionConfig, Cached, Head
from tfkit.tools.eject.remote_code.parts import Parts

EXPERTS = "experts"
NORM = "RMSNorm"


def key_heads(parts: Parts, numbers: Mapping[str, int | float]) -> dict[str, int]:
    """Return `n_kv_heads` as a field of the config if all keys and values have this number of heads without a name."""
    sizes = {(e.heads, e.width) for layer in parts.last.decoding.caches for e in layer if isinstance(e, Cached)}
    if len(sizes) != 1 or "n_kv_heads" in numbers:
        return {}
    ((heads, _),) = sizes
    return {} if heads == numbers.get("n_heads") else {"n_kv_heads": int(heads)}


def runs_in_engines(parts: Parts, body: nn.Module, fields: Mapping[str, Any]) -> bool:
    """Return True if a decoder whose attentions are plain computes the same after the replacements of an engine.

    Args:
        parts: the decoder.
        body: its module without the head.
        fields: the fields of its config, by their names in the spec.
    """
    stack, caches = parts.last.stack.stack, parts.last.decoding.caches
    (head, *further), n_heads = parts.head, fields.get("n_heads")
    if stack is None or n_heads is None or further or head.config.head() != Head():
        return False
    attentions = [step.config for layer in stack.layers for step in layer.steps if step.role == "attention"]
    queries = {config.n_heads if isinstance(config, AttentionConfig) else None for config in attentions}
    width = fields.get("d_head", fields["d_model"] // n_heads)
    layer = [(fields.get("n_kv_heads", n_heads), width)] * 2  # keys and values
    has_sizes = queries == {n_heads} and all(
        [(entry.heads, entry.width) for entry in entries if isinstance(entry, Cached)] == layer for entries in caches
    )
    return has_sizes and not any(map(_is_replaced_wrongly, *zip(*body.named_modules(), strict=True)))


def _is_replaced_wrongly(path: str, module: nn.Module) -> bool:
    """Return True for a module that an engine replaces by a module with other results."""
    is_norm = type(module).__name__.endswith(NORM)
    return path.rpartition(".")[2] == EXPERTS or (is_norm and bool(getattr(module, "offset", 0)))
