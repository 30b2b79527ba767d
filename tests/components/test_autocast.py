"""Mixed precision: every position, mask and norm trains under autocast, close to float32, without a warning."""

import pytest
import torch

import tfkit

from ..sampling import some

SPEC = """
tfkit: 1
name: t
d_model: 32
vocab_size: 50
max_len: 32
norm: rmsnorm
graph:
  embedding: {block: embedding, position: learned}
  decoder:
    block: decoder
    n_layers: 2
    attention: {kind: gqa, n_heads: 4, n_kv_heads: 2}
    ffn: {kind: swiglu, d_ff: 64}
  logits: {block: lm_head, tie: embedding}
"""
CHANGES = {
    "plain": "",
    "layernorm": "norm=layernorm",
    "rope": "decoder.attention.position=rope",
    "alibi": "decoder.attention.position=alibi",
    "t5": "decoder.attention.position=t5",
    "softcap": "decoder.attention.softcap=30",
    "qk_norm": "decoder.attention.qk_norm=rmsnorm",
    "qk_norm_offset": "decoder.attention.qk_norm={kind: rmsnorm, offset: 1}",
    "window": "decoder.attention.mask={left: 3, right: 0}",
    "sinusoidal": "embedding.position=sinusoidal",
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("change", some(CHANGES, 4))
def test_mixed_precision_is_close_to_single(change, padded):
    model = tfkit.build(tfkit.loads(SPEC, sets=[CHANGES[change]] if CHANGES[change] else []))
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) >= torch.tensor([[3], [0]]) if padded else None
    exact = model(tokens, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(tokens, mask)
    mixed.float().square().mean().backward()
    assert mixed.dtype == torch.bfloat16
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask
    scale = exact[real].std()
    assert (mixed.float() - exact)[real].abs().max() < 0.1 * scale
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
