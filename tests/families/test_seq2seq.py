"""Fields and tensors that the file of an encoder-decoder may omit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tfkit
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.import_.importing import import_config

from ..sampling import some
from .case import reference
from .seq2seq import SEQ2SEQ

HEADLESS = "model.safetensors"


def headless(folder: Path) -> tfkit.Graph:
    """Save BART without its head, whose bias is then nowhere, under the class with a head; return the full graph."""
    theirs = reference(SEQ2SEQ["bart"])
    theirs.model.save_pretrained(folder)  # type: ignore[union-attr, operator]
    theirs.config.architectures = ["BartForConditionalGeneration"]
    theirs.config.save_pretrained(folder)
    return import_config(folder).graph


@torch.no_grad()
def test_a_file_without_the_head_has_no_bias_of_the_logits(tmp_path: Path) -> None:
    graph = headless(tmp_path)
    assert "final_logits_bias" not in load_file(tmp_path / HEADLESS)
    ours = build_with_weights(graph, tmp_path).eval()
    theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    source, target = torch.randint(3, 61, (2, 7)), torch.randint(3, 61, (2, 5))
    expected = theirs(input_ids=source, decoder_input_ids=target).logits
    torch.testing.assert_close(ours(source, target), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", some(["bart", "mbart", "blenderbot", "pegasus", "plbart", "mvp"], 2))
def test_a_bias_of_the_logits_is_in_the_spec_if_the_file_has_one(name: str, tmp_path: Path) -> None:
    theirs = reference(replace(SEQ2SEQ[name], buffers={"final_logits_bias": "not zero"}))
    theirs.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    ours = build_with_weights(import_config(tmp_path / "theirs").graph, tmp_path / "theirs").eval()
    source, target = torch.randint(3, 61, (2, 7)), torch.randint(3, 61, (2, 5))
    expected = theirs(input_ids=source, decoder_input_ids=target).logits
    torch.testing.assert_close(ours(source, target), expected, rtol=1e-5, atol=1e-5)
    tfkit.save(ours, tmp_path / "back", layout="huggingface")
    before, after = (load_file(tmp_path / value / HEADLESS) for value in ("theirs", "back"))
    assert torch.equal(after["final_logits_bias"], before["final_logits_bias"])


def test_a_bias_of_the_logits_is_refused_where_the_spec_has_none(tmp_path: Path) -> None:
    graph = headless(tmp_path)
    save_file({**load_file(tmp_path / HEADLESS), "final_logits_bias": torch.zeros(1, 61)}, tmp_path / HEADLESS)
    build_with_weights(graph, tmp_path)
    save_file({**load_file(tmp_path / HEADLESS), "final_logits_bias": torch.ones(1, 61)}, tmp_path / HEADLESS)
    with pytest.raises(
        tfkit.SpecError, match=r"`final_logits_bias` must have only the value 0(.|\n)*--set logits\.bias=true"
    ):
        build_with_weights(graph, tmp_path)


def test_all_else_must_be_there(tmp_path: Path) -> None:
    graph = headless(tmp_path)
    tensors = load_file(tmp_path / HEADLESS)
    del tensors["encoder.layers.1.fc1.bias"]
    save_file(tensors, tmp_path / HEADLESS)
    with pytest.raises(tfkit.SpecError, match=r"encoder\.layers\.1\.fc1\.bias"):
        build_with_weights(graph, tmp_path)
