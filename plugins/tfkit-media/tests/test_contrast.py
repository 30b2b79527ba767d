"""Two towers: the losses are those of transformers, a batch is seen at once, and a run learns to match pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from tfkit_media import ContrastiveConfig
from tfkit_media.shapes import draw

import tfkit
from tfkit.cli import main

from .models import PLUGINS

TOWERS: dict[str, Any] = {
    "name": "towers",
    "requires": ["tfkit-media"],
    "d_model": 32,
    "vocab_size": 13,
    "max_len": 4,
    "inputs": {"tokens": "tokens", "image": {"type": "image", "channels": 1, "height": 16, "width": 16}},
    "graph": {
        "patches": {"block": "patches", "input": "image", "size": 4},
        "image_encoder": {
            "block": "encoder",
            "n_layers": 2,
            "attention": {"kind": "mha", "n_heads": 4},
            "ffn": {"kind": "gelu", "d_ff": 64},
        },
        "image_vector": "pooler",
        "embedding": {"block": "embedding", "input": "tokens", "position": "learned"},
        "text_encoder": {
            "block": "encoder",
            "n_layers": 1,
            "attention": {"kind": "mha", "n_heads": 4},
            "ffn": {"kind": "gelu", "d_ff": 64},
        },
        "text_vector": {"block": "pooler", "select": "last"},
        "logits": {"block": "contrast", "inputs": ["image_vector", "text_vector"]},
    },
}
INPUTS = {"tokens": torch.randint(13, (5, 4)), "image": torch.randn(5, 1, 16, 16)}


def built(**logits: Any) -> torch.fx.GraphModule:
    graph = {**TOWERS["graph"], "logits": {**TOWERS["graph"]["logits"], **logits}}
    return tfkit.build(tfkit.load({"tfkit": 1, **TOWERS, "graph": graph}, plugins=PLUGINS))


def test_the_softmax_loss_is_that_of_clip() -> None:
    model = built()
    logits = model(**INPUTS)
    expected = transformers.models.clip.modeling_clip.image_text_contrastive_loss(logits)
    loss = ContrastiveConfig().build(model)(INPUTS, torch.arange(5).clamp(max=1)) / 5
    torch.testing.assert_close(loss, expected)


def test_the_sigmoid_loss_is_that_of_siglip() -> None:
    model = built(bias=-2.0)
    logits = model(**INPUTS)
    pairs = 2 * torch.eye(5) - 1
    expected = -torch.log(torch.sigmoid(pairs * logits)).sum(dim=1).mean()
    torch.testing.assert_close(
        ContrastiveConfig(form="sigmoid").build(model)(INPUTS, torch.arange(5).clamp(max=1)) / 5, expected
    )


def test_a_part_of_a_batch_is_an_error() -> None:
    with pytest.raises(tfkit.SpecError, match="must compute all pairs of a batch"):
        ContrastiveConfig().build(built())(INPUTS, torch.ones(5).long())


def test_a_model_without_pairs_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be computed from a block `contrast`"):
        ContrastiveConfig().build(tfkit.build("gpt2", device="meta"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
def test_a_run_learns_to_match(form: str, tmp_path: Path) -> None:
    (tmp_path / "shapes").mkdir()
    for name, array in draw(3000).items():
        np.save(tmp_path / f"shapes/{name}.npy", array)
    run: dict[str, Any] = {
        "tfkit": 1,
        "name": "pairs",
        "model": TOWERS,
        "data": {"kind": "image_pairs", "images": "shapes/images.npy", "tokens": "shapes/captions.npy"},
        "batch": {"sequences": 32},
        "steps": 300,
        "loss": {"kind": "contrastive", "form": form},
        "optimizer": {"kind": "adamw", "lr": 2e-3},
        "eval": {"every": 300, "metrics": ["matches"], "splits": {"val": "all"}},
    }
    if form == "sigmoid":
        run["model"] = {**TOWERS, "graph": {**TOWERS["graph"], "logits": {**TOWERS["graph"]["logits"], "bias": -4.0}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    plugins = ["--plugin-dir", str(Path(__file__).parents[1]), "--no-plugins"]
    assert main(["train", str(tmp_path / "run.yaml"), "-o", str(tmp_path / "out"), *plugins]) == 0
    lines = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    matches = [line["val.matches"] for line in lines if "val.matches" in line]
    assert matches[0] < 0.15
    assert matches[-1] > 0.3  # chance is 1 of 32
