"""`tfkit.attention_weights` returns what Hugging Face's models return as their attentions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tfkit

from ..families.case import BATCH, Trial, tokens
from ..families.cases import CASES
from ..sampling import some


@torch.no_grad()
@pytest.mark.parametrize("name", some(["gpt2", "llama", "mistral", "bloom", "bert", "t5"], 3))
def test_weights_equal_hugging_face(name: str, tmp_path: Path) -> None:
    trial = Trial.of(CASES[name], tmp_path)
    case = trial.case
    lengths = [case.length, case.length - 2] if case.kind == "seq2seq" else [case.length]
    inputs = [torch.randint(3, 61, (BATCH, length)) for length in lengths]
    for side in ("none", "right"):
        masks = [tokens(side, length, 3) for length in lengths]
        expected = attentions(trial, inputs, masks)
        names = [f"{name}_mask" for name, signal in trial.ours.meta["graph"].inputs.items() if signal.mask]
        named = {} if side == "none" else dict(zip(names, masks, strict=False))
        actual = tfkit.attention_weights(trial.ours, *inputs, **named)
        assert list(actual) == list(expected)
        for path, weights in actual.items():
            compare(weights, expected[path], masks[-1] if path.startswith("decoder") else masks[0])


def attentions(trial: Trial, inputs: list[Tensor], masks: list[Tensor]) -> dict[str, Tensor]:
    """Theirs, by the paths of our attentions."""
    options = {"attention_mask": masks[0].long()}
    if trial.case.kind != "seq2seq":
        stack = "encoder" if trial.case.kind == "masked" else "decoder"
        output = trial.theirs(inputs[0], **options, output_attentions=True)
        return {f"{stack}.layers.{i}.attention": weights for i, weights in enumerate(output.attentions)}
    options |= {"decoder_input_ids": inputs[1], "decoder_attention_mask": masks[1].long()}
    output = trial.theirs(inputs[0], **options, output_attentions=True)
    expected = {f"encoder.layers.{i}.attention": weights for i, weights in enumerate(output.encoder_attentions)}
    for i, (weights, cross) in enumerate(zip(output.decoder_attentions, output.cross_attentions, strict=True)):
        expected |= {f"decoder.layers.{i}.attention": weights, f"decoder.layers.{i}.cross_attention": cross}
    return expected


def compare(actual: Tensor, want: Tensor, real: Tensor) -> None:
    """`real` [b, q] says which queries are tokens."""
    assert actual.shape == want.shape
    rows, expected = actual.transpose(1, 2)[real], want.transpose(1, 2)[real]
    assert expected.std() > 0.02, "weights so even that everything is near"
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(rows.shape[:-1]))
