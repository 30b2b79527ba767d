"""A diverse sample of the specs that come with tfkit, and changes that make them small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tfkit.components.stack import StackConfig
from tfkit.graph.expand import Graph, load

from .known import NAMES
from .sampling import chosen, spread

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
SMALL_SPECS = ("bart_base", "bert_base", "bloom_560m", "gpt2", "llama3_8b", "mistral_7b", "palm_540b", "t5_small")
"""An encoder, decoders with each kind of positions and of heads, windows, and both with cross-attention."""


COVERING = tuple(
    """
    a_x_k1 albert_base apertus_8b bart_base bert_base bert_generation bitnet_2b block_512 command_r_plus_104b
    dbrx deepseek_coder_1_3b deepseek_v2_lite dots1 ernie_3_0_base_zh esmc_300m exaone4_1_2b falcon_7b
    falcon_rw_1b flint fsmt_wmt19_en_ru gemma3_1b glm4_32b_0414 glm4_5 glm4_5_air glm_4_9b gpt2 gpt_neo_125m
    gpt_neox_japanese_2_7b gpt_oss_20b granite3_2b granite_3_1b_a400m gte_multilingual_base helium_1_preview_2b
    hunyuan_7b hy_v3 hyperclovax kimi_k2 laguna llama3_8b minicpm3_4b minitron_4b mistral4 modernbert_base
    modernbert_decoder mpnet_base mpt_7b nanochat nomic_bert olmo3_7b olmo_1b_0724 opt_350m opus_mt_en_de
    persimmon_8b phi4_mini phi_2 pythia_1b qwen2_57b_a14b roformer_chinese_base seed_oss_36b smollm2_135m
    stablelm_3b starcoder2_15b starcoder2_3b t5_small t5gemma_2b_2b trinity_mini ultrabert umt5_xl vaswani_base
    xlm_mlm_en_2048
    """.split()  # noqa: SIM905
)
"""Together they have every word and every key that the graphs of all specs have, each in its block, chosen greedily."""


OPERATIONS = (
    "a_x_k1",
    "apertus_8b",
    "block_512",
    "fsmt_wmt19_en_ru",
    "gemma2_2b",
    "gpt_oss_20b",
    "mistral4",
    "phi4_mini",
    "t5_small",
)
"""Together they have every operation of torch that the reduced `COVERING` run, whole and in steps, and every form of
caches."""
PROGRAMS = (
    *OPERATIONS,
    "falcon_7b",
    "falcon_rw_1b",
    "flint",
    "gpt_neo_125m",
    "gpt_neox_japanese_2_7b",
    "modernbert_base",
    "t5gemma_2b_2b",
    "ultrabert",
)
"""And every block, and every attention of a block with each of its positions and of its masks."""


def covering(*quick: str, among: Iterable[str] = COVERING) -> list[Any]:
    """Specs, as parameters of a test; slow are those that are not among the `quick` ones."""
    names = dict.fromkeys((*among, *sorted(quick)))
    return chosen(names, quick)


def covering_first(count: int) -> list[Any]:
    """All shipped specs, as parameters of a test; slow are all but `count` of those in `COVERING`."""
    return chosen(NAMES, spread(COVERING, count))


def reduced(name: str, layers: int = 2) -> Graph:
    """A shipped spec, tiny; see `reductions`."""
    return load(name, sets=[*reductions(load(name), layers)])


def reductions(graph: Graph, layers: int = 2) -> Iterator[str]:
    """Changes that make a model tiny and keep its architecture: a layer of each kind, and so many at least."""
    yield from _everywhere(graph, "d_model", 16)
    for name, signal in graph.inputs.items():
        if signal.type == "sequence":
            yield f"inputs.{name}.{'length=1600' if signal.width == 1 else 'width=16'}"  # of a waveform, or of vectors
    yield from _everywhere(graph, "vocab_size", 13)
    yield from _everywhere(graph, "max_len", 8)
    for node in graph.built_nodes:
        d_embed = getattr(node.config, "d_embed", None)
        if d_embed is not None and d_embed == node.output.width:
            yield f"{node.name}.d_embed=16"
        if node.config.placeholders():
            yield f"{node.name}.token=12"
            same_width = [other for other in graph.built_nodes if other.output.width == node.output.width]
            stated = [other for other in same_width if ("graph", other.name, "d_model") in graph.spec.provenance.spans]
            yield from (f"{other.name}.d_model=16" for other in stated)
        if isinstance(node.config, StackConfig):
            changes = [*stack_reductions(node.config, layers)]
            yield from (f"{node.name}.{change}" for change in changes)
            if node.stack is not None and "layer_features" in node.wires:  # which have a part for each layer
                width = node.signals["layer_features"].width
                (n_layers,) = (int(change.partition("=")[2]) for change in changes if change.startswith("n_layers="))
                tables = [table.name for table in graph.nodes if dict(table.config).get("d_model") == width]
                yield from (f"{table}.d_model={n_layers * width // node.stack.depth}" for table in tables)


def _everywhere(graph: Graph, key: str, value: int) -> Iterator[str]:
    """A value that the nodes share, or that each of them has."""
    if (key,) in graph.spec.provenance.spans:
        yield f"{key}={value}"
    else:
        yield from (f"{node.name}.{key}={value}" for node in graph.built_nodes if getattr(node.config, key, None))


def stack_reductions(stack: Any, layers: int = 2) -> Iterator[str]:
    """The same for an encoder or a decoder: layers of two heads and few channels."""
    kinds = list(dict.fromkeys(name for name, _ in stack.plan()))
    yield f"n_layers={max(layers, len(kinds))}"
    if len(kinds) > 1:
        yield f"layers.pattern=[{', '.join(kinds)}]"
    yield from _layer_reductions(stack)
    for path, layer in stack.distinct():
        if path:
            yield from (f"{path}{change}" for change in _layer_reductions(layer))


def _layer_reductions(layer: Any) -> Iterator[str]:
    ffn = layer.ffn
    if layer.attention is not None:
        yield from _attention_reductions(layer.attention)
    if ffn is not None:
        yield "ffn.d_ff=24"
    if getattr(ffn, "n_experts", None):
        yield "ffn.n_experts=4"
        yield f"ffn.n_experts_per_token={min(2, ffn.n_experts_per_token)}"
        if ffn.router.groups:
            yield "ffn.router.groups={n: 2, keep: 1, by: max}"
        if ffn.shared:
            yield "ffn.shared.d_ff=24"


def _attention_reductions(attention: Any) -> Iterator[str]:
    pairs = attention.kind == "differential"  # whose heads, and whose key-value heads, form pairs
    yield f"attention.n_heads={4 if pairs else 2}"
    if attention.kind in ("gqa", "differential"):
        yield f"attention.n_kv_heads={2 if pairs else 1}"
    if getattr(attention, "d_head", None):
        yield "attention.d_head=4"
    if getattr(attention.position, "sections", None):
        yield "attention.position.sections=[2, 1, 1]"
    for key, size in (("q_rank", 6), ("kv_rank", 6), ("d_nope", 4), ("d_rope", 4), ("d_v", 4)):
        if getattr(attention, key, None):
            yield f"attention.{key}={size}"
    if attention.mask is not None and (attention.mask.left or 0) > 3:
        yield "attention.mask.left=3"
    yield from _position_reductions(attention)


def _position_reductions(attention: Any) -> Iterator[str]:
    position = attention.position
    if getattr(position, "width", None):
        yield "attention.position.width=4"
    scaling = getattr(position, "scaling", None)
    if getattr(scaling, "short_factor", None):
        width = 4 if position.width or getattr(attention, "d_rope", attention.d_head) else 8
        yield from (f"attention.position.scaling.{kind}_factor={[1.5] * (width // 2)}" for kind in ("short", "long"))
    if getattr(scaling, "width", None):
        yield "attention.position.scaling.width=2"
