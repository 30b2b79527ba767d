"""Writes `nanogpt_mup.json`: the settings of every weight of a GPT-2 by nanoGPT-mup, at its branch completep.

    git clone --branch completep https://github.com/EleutherAI/nanoGPT-mup
    PYTHONPATH=nanoGPT-mup:. python tests/run/nanogpt_mup.py

Commit 6f8bc3bdc744556141255f810a22387b2255b6c1. The standard deviations are exact: `normal_` writes its `std`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_suffix(".json")
COMMIT = "6f8bc3bdc744556141255f810a22387b2255b6c1"
SIZES = {"base": {"n_embd": 32, "n_head": 2, "n_layer": 2}, "model": {"n_embd": 128, "n_head": 8, "n_layer": 6}}
WIDTH, DEPTH, DECAY, EPS, STD = 4.0, 3.0, 0.5, 1e-8, 0.02


def nanogpt_settings() -> dict[str, Any]:
    """Return rate, decay, epsilon and standard deviation of every weight, and the factors of the forward pass."""
    from model import GPT, GPTConfig

    torch.nn.init.normal_ = lambda tensor, mean=0.0, std=1.0: tensor.data.fill_(std)  # type: ignore[assignment]
    config = GPTConfig(
        block_size=64,
        vocab_size=96,
        **SIZES["model"],
        init_std=STD,
        mup_enabled=True,
        mup_width_multiplier=WIDTH,
        depth_alpha_enabled=True,
        depth_multiplier=DEPTH,
    )
    model = GPT(config)
    optimizer = model.configure_optimizers(DECAY, 1.0, (0.9, 0.95), EPS, "cpu")
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = {
        names[parameter]: {
            "lr": group["lr_scale"],
            "weight_decay": group["weight_decay"] / DECAY,
            "eps": group["eps"] / EPS,
            "std": parameter.flatten()[0].item() if parameter.dim() > 1 else None,
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    factors = {"logits": config.mup_output_alpha / config.mup_width_multiplier}
    return {"weights": weights, **factors, "branch": model.transformer.h[0].residual_scaling}


if __name__ == "__main__":
    source = {"repository": "EleutherAI/nanoGPT-mup", "commit": COMMIT, "sizes": SIZES, "init_std": STD}
    FILE.write_text(json.dumps({**source, **nanogpt_settings()}, indent=1) + "\n")
