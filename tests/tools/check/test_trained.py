"""Misplaced tensors of trained weights: the check names them, in a published folder and in a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import tfkit

from ...sampling import some
from .models import LLAMA, publish

Run = Callable[..., str]
Weights = dict[str, Tensor]
VERSES = """
tfkit: 1
name: verses
seed: 1
model:
  vocab_size: data.vocab_size
  d_model: 64
  norm: rmsnorm
  graph:
    embedding: embedding
    decoder:
      block: decoder
      n_layers: 4
      attention: {kind: mha, n_heads: 4, position: rope}
      ffn: {kind: swiglu, d_ff: 128}
    head: lm_head
data: {kind: text, files: tinyshakespeare}
batch: {sequences: 16, length: 64}
steps: 800
optimizer: {kind: adamw, lr: 3e-3, weight_decay: 0.1}
schedule: {kind: cosine, warmup: 20}
clip: 1.0
"""


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A published folder whose weights are balanced."""
    publish(tmp_path / "small")
    return tmp_path / "small"


def change(folder: Path, change: Callable[[Weights], None]) -> None:
    """Change the weights in a folder."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def exchange(first: str, other: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[first], weights[other] = weights[other].clone(), weights[first].clone()

    return change


def transpose(name: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[name] = weights[name].T.contiguous()

    return change


@pytest.mark.parametrize(
    ("fault", "text"),
    some(
        [
            (
                exchange("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
                "`decoder.layers.1.ffn.gate.weight` and `decoder.layers.1.ffn.up.weight` are exchanged",
            ),
            (
                exchange("model.layers.0.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"),
                "`decoder.layers.0.ffn.down.weight` and `decoder.layers.3.ffn.down.weight` are exchanged",
            ),
            (
                transpose("model.layers.2.self_attn.o_proj.weight"),
                "`decoder.layers.2.attention.output.weight` is transposed",
            ),
        ],
        1,
    ),
)
def test_it_is_named(run: Run, published: Path, fault: Callable[[Weights], None], text: str) -> None:
    arguments = "check", str(published), "--only", "locations"
    assert "1 ok" in run(*arguments)
    change(published, fault)
    assert text in " ".join(run(*arguments, status=1).split())


def test_random_weights_say_nothing(run: Run, tmp_path: Path) -> None:
    tfkit.save(tfkit.build(tfkit.loads(LLAMA)), tmp_path / "new")
    text = " ".join(run("check", str(tmp_path / "new"), "--only", "locations").split())
    assert "does not apply: no 4 identical layers show effects of training" in text


@pytest.mark.slow
def test_other_values_of_a_published_model_have_its_weights(run: Run, published: Path) -> None:
    only = [f"--only={name}" for name in ("values", "neutral", "train-mode")]
    assert "3 ok" in run("check", str(published), *only)


@pytest.mark.slow
def test_training_leaves_what_it_takes(run: Run, tmp_path: Path) -> None:
    """Of a model that was really trained."""
    (tmp_path / "verses.yaml").write_text(VERSES)
    run("train", str(tmp_path / "verses.yaml"), "-o", str(tmp_path / "out"))
    folder = tmp_path / "out" / "step-800"
    arguments = "check", str(folder), "--only", "locations"
    assert "1 ok" in run(*arguments)
    at = "decoder.layers.{}.{}.weight".format
    for first, other in (
        (at(1, "ffn.down"), at(2, "ffn.down")),
        (at(0, "attention.output"), at(3, "attention.output")),
    ):
        change(folder, exchange(first, other))
        assert f"`{first}` and `{other}` are exchanged" in " ".join(run(*arguments, status=1).split())
        change(folder, exchange(first, other))
    change(folder, transpose(at(2, "attention.output")))
    assert f"`{at(2, 'attention.output')}` is transposed" in " ".join(run(*arguments, status=1).split())
