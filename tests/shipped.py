"""Some of the specs that come with tfkit, as different as they are, and how to make them small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tfkit.graph.expand import Graph
from tfkit.spec.load import shipped_specs, specs_folder
from tfkit.tools.importing import families

SHIPPED = (
    "bart_base",
    "bert_base",
    "block_512",
    "bloom_560m",
    "char_relu",
    "char_swiglu",
    "command_r_35b",
    "falcon_7b",
    "gpt2",
    "gpt3_175b",
    "gpt_j_6b",
    "gpt_neo_125m",
    "llama2_70b",
    "llama3_405b",
    "llama3_8b",
    "llama_7b",
    "mistral_7b",
    "mpt_7b",
    "nanogpt",
    "olmo2_7b",
    "opt_125m",
    "opus_mt_en_de",
    "palm_540b",
    "t5_small",
    "vaswani_base",
)
"""For what takes too long for all of them; every family is held against Hugging Face's in `families`."""


def one_of_each_family() -> list[Any]:
    """All shipped specs, as parameters of a test; slow are those that extend another one and are no family's first."""
    first = set(families().values())
    return [
        pytest.param(name, marks=[] if name in first or _alone(name) else pytest.mark.slow) for name in shipped_specs()
    ]


def _alone(name: str) -> bool:
    return "\nextends:" not in (specs_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def reductions(graph: Graph) -> Iterator[str]:
    """Changes that make a model tiny and keep its architecture."""
    yield "d_model=16"
    for name, signal in graph.inputs.items():
        if signal.type == "sequence":
            yield f"inputs.{name}.width=16"
    if any(hasattr(node.config, "vocab_size") for node in graph.nodes):
        yield "vocab_size=13"
    if any(getattr(node.config, "max_len", None) for node in graph.nodes):
        yield "max_len=8"
    for node in graph.nodes:
        if hasattr(node.config, "n_layers"):
            yield from (f"{node.name}.{change}" for change in stack_reductions(node.config))


def stack_reductions(stack: Any) -> Iterator[str]:
    """The same for an encoder or a decoder: two layers of two heads."""
    yield "n_layers=2"
    yield "attention.n_heads=2"
    yield "ffn.d_ff=24"
    if stack.attention.kind == "gqa":
        yield "attention.n_kv_heads=1"
    if stack.attention.d_head:
        yield "attention.d_head=4"
    if getattr(stack.attention.position, "width", None):
        yield "attention.position.width=4"
