"""Folders in vLLM and SGLang, whose demands are tested on a CPU: neither of them runs here.

The attention below takes its sizes from the config, has the caches of one layer, and ignores the mask, as in both. They
run several sequences in one row, and multiply the vectors by the matrix of `lm_head`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

import tfkit
from tfkit.tools.eject.remote_code.engines import key_heads, runs_in_engines
from tfkit.tools.eject.remote_code.parts import parts_of

from .test_like_transformers import GPT2, LLAMA, close, ids, pair

MULTI_QUERY = LLAMA.replace("n_heads: 4, n_kv_heads: 2", "kind: mqa, n_heads: 4")
PROMPTS, TOKENS = (5, 2), 3
"""Lengths of two prompts, and the number of tokens that follow each."""


class LayerAttention:
    """The attention of a layer, with the keys and values of all sequences."""

    def __init__(self, config: Any) -> None:
        n_heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // n_heads
        self.queries, self.keys = (n_heads, width), (getattr(config, "num_key_value_heads", n_heads), width)
        self.caches: list[list[Tensor]] = [[], []]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: list[int]) -> Tensor:
        assert q.shape[1::2] == self.queries
        assert k.shape[1::2] == v.shape[1::2] == self.keys
        outputs = []
        parts = (tensor.split(lengths, dim=2) for tensor in (q, k, v))
        for cache, new_q, *new in zip(self.caches, *parts, strict=True):
            cache[:] = [torch.cat(tensors, dim=2) for tensors in zip(cache, new, strict=True)] if cache else new
            last = torch.ones(new_q.size(2), cache[0].size(2)).tril(cache[0].size(2) - new_q.size(2)).bool()
            outputs.append(
                F.scaled_dot_product_attention(new_q, cache[0], cache[1], last, scale=scale, enable_gqa=True)
            )
        return torch.cat(outputs, dim=2)


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Call the attention of a layer, as the function that an engine registers."""
    layer = options["attention_instances"][module.layer_idx]
    return layer(q, k, v, options["scaling"], options["forward_batch"]).transpose(1, 2), None


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_an_engine_runs_the_body_with_its_attention(spec: str, tmp_path: Path) -> None:
    ours, theirs = pair(spec, tmp_path)
    model, config = ours.model, ours.config
    assert "AutoModel" in config.auto_map
    assert type(model).is_backend_compatible()
    assert model.get_decoder() is model
    assert not any(getattr(module, "is_causal", True) is False for module in model.modules())
    with torch.device("meta"):
        assert type(model)(config).get_input_embeddings().weight.shape == (config.vocab_size, config.hidden_size)
    AttentionInterface.register("engine", attend)
    ours.set_attn_implementation("engine")
    attentions = [LayerAttention(config) for _ in range(config.num_hidden_layers)]
    tokens = ids(2, max(PROMPTS) + TOKENS)
    logits: list[list[Tensor]] = [[], []]
    past = [0, 0]
    for lengths in (list(PROMPTS), *[[1, 1]] * TOKENS):
        spans = [slice(begin, begin + length) for begin, length in zip(past, lengths, strict=True)]
        row = torch.cat([tokens[number, span] for number, span in enumerate(spans)])[None]
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])[None]
        options = {"attention_instances": attentions, "forward_batch": lengths, "use_cache": False}
        vectors = model(input_ids=row, position_ids=positions, return_dict=False, **options)[0]
        for number, part in enumerate((vectors @ ours.lm_head.weight.T).split(lengths, dim=1)):
            logits[number].append(part)
        past = [span.stop for span in spans]
    for number, end in enumerate(past):
        close(torch.cat(logits[number], dim=1), theirs(tokens[number : number + 1, :end]).logits)


def decoder(norm: str = "{kind: rmsnorm}", ffn: str = "{kind: swiglu, d_ff: 48}", head: str = "lm_head") -> tfkit.Graph:
    """A decoder that an engine runs, with other parts."""
    return tfkit.loads(f"""tfkit: 1
name: small
d_model: 32
vocab_size: 50
norm: {norm}
graph:
  embedding: embedding
  decoder:
    block: decoder
    n_layers: 2
    attention: {{kind: gqa, n_heads: 4, n_kv_heads: 2, position: rope}}
    ffn: {ffn}
  logits: {head}
""")


FIELDS = {"d_model": 32, "n_heads": 4, "n_kv_heads": 2}
MOE = "{kind: moe, n_experts: 4, n_experts_per_token: 2, d_ff: 48}"


def runs(graph: tfkit.Graph, **fields: int) -> bool:
    return runs_in_engines(parts_of(graph), tfkit.build(graph, device="meta"), FIELDS | fields)


def test_replacements_of_an_engine_must_not_change_results() -> None:
    assert runs(decoder())
    assert runs(decoder(head="{block: lm_head, bias: true}"))
    for change in ("softcap: 30.0", "scale: 0.5", "transform: {}"):
        assert not runs(decoder(head=f"{{block: lm_head, {change}}}"))
    assert not runs(decoder(norm="{kind: rmsnorm, offset: 1}"))
    assert runs(decoder(norm="layernorm"))
    assert not runs(decoder(ffn=MOE))


def test_the_config_has_the_sizes_of_heads() -> None:
    assert not runs(decoder(), n_kv_heads=4)
    assert not runs(decoder(), n_heads=8)
    assert not runs(decoder(), d_head=16)
    shared = parts_of(tfkit.loads(MULTI_QUERY))
    assert key_heads(shared, {"n_heads": 4}) == {"n_kv_heads": 1}
    assert key_heads(shared, {"n_heads": 4, "n_kv_heads": 1}) == {}
    assert key_heads(parts_of(tfkit.loads(GPT2)), {"n_heads": 4}) == {}
