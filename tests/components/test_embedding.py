"""Embeddings of published models that seem to need a special kind, but do not."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.ctrl.modeling_ctrl import CTRLModel
from transformers.models.esm.modeling_esm import EsmEmbeddings
from transformers.models.xlm.modeling_xlm import XLMModel

import tfkit

HEAD = "tfkit: 1\nname: test\nd_model: 16\nvocab_size: 61\nmax_len: 32\ngraph:\n"
IDS = torch.randint(2, 61, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(9) < torch.tensor([[9], [5], [7]])


def embedding_of(text: str, tensors: dict[str, Tensor]) -> nn.Module:
    model = tfkit.build(tfkit.loads(f"{HEAD}  embedding: {{block: embedding, {text}}}\n")).eval()
    model.load_state_dict({f"embedding.{name}": tensor for name, tensor in tensors.items()})
    return model


def test_ctrl_scales_its_tokens_and_not_its_positions() -> None:
    """A model without layers: its embedding, and the norm at the end."""
    theirs = CTRLModel(transformers.CTRLConfig(vocab_size=61, n_positions=32, n_embd=16, n_layer=0, n_head=2)).eval()
    position = "scale: sqrt_d_model, position: {kind: sinusoidal, layout: half}"
    ours = embedding_of(position, {"tokens.weight": theirs.w.weight.data})
    with torch.no_grad():
        expected = theirs(IDS).last_hidden_state
        torch.testing.assert_close(theirs.layernorm(ours(IDS)), expected, rtol=1e-5, atol=1e-5)


def test_esm_without_mask_tokens_is_scaled_by_a_constant() -> None:
    config = transformers.EsmConfig(
        vocab_size=61, hidden_size=16, token_dropout=True, mask_token_id=1, pad_token_id=0, emb_layer_norm_before=True
    )
    config.position_embedding_type = "rotary"
    theirs = EsmEmbeddings(config).eval()
    norm = theirs.layer_norm
    tensors = {"tokens.weight": theirs.word_embeddings.weight, "norm.weight": norm.weight, "norm.bias": norm.bias}
    ours = embedding_of("scale: 0.88, norm: {kind: layernorm, eps: 1e-12}", tensors)
    expected = theirs(IDS, attention_mask=MASK.long())
    torch.testing.assert_close(ours(IDS)[MASK], expected[MASK], rtol=1e-5, atol=1e-5)


def test_zeros_in_place_of_padding_do_not_reach_the_tokens_of_xlm() -> None:
    """It multiplies by the padding mask after each layer; tokens have the outputs that they have alone."""
    config = transformers.XLMConfig(
        vocab_size=61, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=32, pad_index=0, n_langs=1
    )
    theirs = XLMModel(config).eval()
    zeroed = theirs(IDS.masked_fill(~MASK, 0), attention_mask=MASK.long()).last_hidden_state
    for row, n in enumerate(MASK.sum(dim=1).tolist()):
        alone = theirs(IDS[row : row + 1, :n], attention_mask=torch.ones(1, n, dtype=torch.long)).last_hidden_state
        torch.testing.assert_close(zeroed[row, :n], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stage", "field"), [("project", "d_embed"), ("scale", "scale")])
def test_a_stage_needs_its_field(stage: str, field: str) -> None:
    with pytest.raises(tfkit.SpecError, match=f"stage `{stage}` has no effect: `{field}` is not set"):
        embedding_of(f"stages: [{stage}]", {})


@pytest.mark.parametrize(("max_len", "of_table"), [(4, 6), (6, 4), (None, 4)])
def test_the_shorter_of_two_limits_applies(max_len: int | None, of_table: int) -> None:
    limits = {"max_len": max_len, "position": {"kind": "learned", "max_len": of_table}}
    graph = {"embedding": {"block": "embedding", **limits}}
    model = tfkit.build({"tfkit": 1, "name": "e", "d_model": 8, "vocab_size": 11, "graph": graph})
    assert model(torch.arange(8).view(2, 4)).shape == (2, 4, 8)
    with pytest.raises(ValueError, match=r"5 tokens of `tokens` are more than max_len \(4\)"):
        model(torch.arange(10).view(2, 5))
