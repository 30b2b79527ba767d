"""Values of the exported folder in TransformerLens: equal wherever it has a name for a value of `tfkit.trace`.

TransformerLens comes with `pip install --group around -e .`, in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tfkit

HOOKS = {
    "stream.in": "hook_resid_pre",
    "stream.mid": "hook_resid_mid",
    "stream.out": "hook_resid_post",
    "attention.in": "ln1.hook_out",
    "attention.q": "attn.hook_q",
    "attention.k": "attn.hook_k",
    "attention.v": "attn.hook_v",
    "attention.weights": "attn.hook_pattern",
    "attention.heads": "attn.hook_z",
    "attention.out": "hook_attn_out",
    "ffn.in": "ln2.hook_out",
    "ffn.hidden": "mlp.out.hook_in",
    "ffn.out": "hook_mlp_out",
}
"""The hook in `blocks.I` for each value of `decoder.layers.I`."""
SIZES = ["d_model=32", "vocab_size=50", "max_len=24", "decoder.n_layers=3", "decoder.attention.n_heads=4"]
FIELDS = {"gpt2": [], "llama3_8b": ["decoder.attention.n_kv_heads=2", "decoder.ffn.d_ff=48"]}
ROTATED = {"attention.q", "attention.k"}
"""TransformerLens reads them before the rotation, and tfkit after it."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TransformerLens, at its own imports
@pytest.mark.parametrize("name", FIELDS)
def test_values_are_those_of_transformer_lens(name: str, tmp_path: Path) -> None:
    bridge: Any = pytest.importorskip("transformer_lens.model_bridge", reason="pip install --group around -e .")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    vocabulary = WordLevel({str(index): index for index in range(50)}, unk_token="0")
    model, tokens = tfkit.build(name, sets=SIZES + FIELDS[name]).eval(), torch.randint(0, 50, (2, 10))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tfkit.save(model, tmp_path / "model", layout="huggingface")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), bos_token="0", eos_token="1")
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    lens = bridge.TransformerBridge.boot_transformers(str(tmp_path / "model"), hf_model=loaded)
    logits, cache = lens.run_with_cache(tokens)
    hooks = {value: hook for value, hook in HOOKS.items() if name == "gpt2" or value not in ROTATED}
    with tfkit.trace(model, read=[f"decoder.layers.*.{value}" for value in hooks]) as values:
        torch.testing.assert_close(model(tokens), logits)
    assert len(values) == 3 * len(hooks)
    for layer in range(3):
        for value, hook in hooks.items():
            ours, theirs = values[f"decoder.layers.{layer}.{value}"], cache[f"blocks.{layer}.{hook}"]
            torch.testing.assert_close(arranged(ours, theirs), theirs, msg=f"{layer} {value}")


def arranged(value: Tensor, like: Tensor) -> Tensor:
    """Return heads in the order of TransformerLens, [b, t, h, d] or [b, t, (h d)]; patterns have one order."""
    if value.dim() < 4 or value.size(2) == value.size(3):
        return value
    value = value.transpose(1, 2)
    return value if like.dim() == 4 else value.flatten(2)
