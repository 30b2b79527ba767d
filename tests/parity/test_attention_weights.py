"""`tfkit.attention_weights` returns what Hugging Face's models return as their attentions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tfkit

from .decoders import DECODERS
from .encoders import ENCODERS
from .family import Family
from .test_huggingface import BATCH, port, reference, tokens

CASES = {
    "gpt2": DECODERS["gpt2"],
    "llama3_8b": DECODERS["llama3_8b"],
    "mistral_7b": DECODERS["mistral_7b"],
    "bloom_560m": DECODERS["bloom_560m"],
    "bert_base": ENCODERS["bert_base"],
    "t5_v1_0": ENCODERS["t5_v1_0"],
}


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", CASES.values(), ids=CASES)
def test_weights_equal_hugging_face(family: Family, padded: bool) -> None:
    theirs = reference(family)
    ours = port(theirs, family)
    lengths = [family.length, family.length - 2] if family.kind == "seq2seq" else [family.length]
    inputs = [torch.randint(2, 61, (BATCH, length)) for length in lengths]
    masks = [tokens("right" if padded else "none", length, 3) for length in lengths]
    given = {"attention_mask": masks[0].long()}
    if family.kind == "seq2seq":
        given |= {"decoder_input_ids": inputs[1], "decoder_attention_mask": masks[1].long()}
    output = theirs(inputs[0], **given, output_attentions=True)
    expected: dict[str, Tensor] = {}
    if family.kind == "seq2seq":
        expected |= {f"encoder.layers.{i}.attention": weights for i, weights in enumerate(output.encoder_attentions)}
        for i, (own, cross) in enumerate(zip(output.decoder_attentions, output.cross_attentions, strict=True)):
            expected |= {f"decoder.layers.{i}.attention": own, f"decoder.layers.{i}.cross_attention": cross}
    else:
        stack = "encoder" if family.kind == "encoder" else "decoder"
        expected |= {f"{stack}.layers.{i}.attention": weights for i, weights in enumerate(output.attentions)}
    names = [f"{name}_mask" for name, signal in ours.meta["graph"].inputs.items() if signal.mask]
    named = dict(zip(names, masks, strict=False)) if padded else {}
    found = tfkit.attention_weights(ours, *inputs, **named)
    assert list(found) == list(expected)
    for name, weights in found.items():
        real = masks[-1] if name.startswith("decoder") else masks[0]
        compare(weights, expected[name], real)


def compare(found: Tensor, want: Tensor, real: Tensor) -> None:
    """`real` [b, q] says which queries are tokens."""
    assert found.shape == want.shape
    rows, expected = found.transpose(1, 2)[real], want.transpose(1, 2)[real]
    assert expected.std() > 0.02, "weights so even that everything is near"
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(rows.shape[:-1]))
