"""Two towers: a run learns to match images and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tfkit_media.shapes import draw

from tfkit.cli import main

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
