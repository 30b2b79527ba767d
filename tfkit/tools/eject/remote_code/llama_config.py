"""The fields of a config under the names that Llama's config has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfkit.component import AttentionConfig
from tfkit.graph.expand import Node

FIELDS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "d_ff": "intermediate_size",
    "max_len": "max_position_embeddings",
    "n_experts": "num_local_experts",
    "n_experts_per_token": "num_experts_per_tok",
}
"""Names of numbers of a spec, and their names in Llama's config, or in Mixtral's."""
EPSILONS = {"rmsnorm": "rms_norm_eps", "layernorm": "layer_norm_eps"}
"""The name of the epsilon, by the kind of norm."""
ROPE = {
    "theta": "rope_theta",
    "factor": "factor",
    "original_max_len": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}
"""Fields of a rotary position and of its scaling, and their keys in `rope_parameters`."""


class LlamaFields(NamedTuple):
    """Names of fields, by the names of the numbers of a spec, and the parameters of the rotary positions."""

    names: Mapping[str, str]
    rope: Mapping[str, Any]

    @classmethod
    def of(cls, stack: Node, numbers: Mapping[str, Any]) -> LlamaFields:
        """Return the fields of a decoder. A number whose name in Llama would be wrong keeps its name."""
        fields: dict[str, Any] = dict(stack.config)
        epsilon = EPSILONS.get(fields["norm"].kind_name()) if "norm" in fields else None
        names = FIELDS | ({"eps": epsilon} if epsilon else {})
        return cls({ours: theirs for ours, theirs in names.items() if theirs not in numbers}, _rope(stack, numbers))

    def code(self, text: str, owner: str = "config") -> str:
        """Replace the fields of a config in code."""
        text = re.sub(rf"\b{owner}\.(\w+)", lambda match: f"{owner}.{self._name(match[1])}", text)
        return re.sub(r"\bdef (\w+)", lambda match: f"def {self.names.get(match[1], match[1])}", text)

    def _name(self, number: str) -> str:
        key = ROPE.get(number, "")
        return f'rope_parameters["{key}"]' if key in self.rope else self.names.get(number, number)

    def values(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields under their names."""
        return {self.names.get(name, name): v for name, v in fields.items() if ROPE.get(name, "") not in self.rope}


def _rope(stack: Node, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`; empty unless all attentions have equal rotary positions that transformers describes."""
    assert stack.stack is not None
    attentions = [step.config for layer in stack.stack.layers for step in layer.steps]
    positions = [config.position for config in attentions if isinstance(config, AttentionConfig)]
    first, *further = positions or [None]
    if first is None or first.kind_name() != "rope" or any(position != first for position in further):
        return {}
    fields: dict[str, Any] = dict(first)
    if fields["width"] is not None or fields["sections"] is not None:
        return {}
    scaling = fields["scaling"]
    kind = "default" if scaling is None else scaling.kind_name()
    if kind not in ("default", "linear", "llama3"):
        return {}
    values = {"theta": fields["theta"], **({} if scaling is None else dict(scaling))}
    # Code contains 0 and 1 instead of a name.
    if any(name in ROPE and value not in (0, 1) and numbers.get(name) != value for name, value in values.items()):
        return {}
    return {"rope_type": kind, **{ROPE[name]: value for name, value in values.items() if name in ROPE}}
