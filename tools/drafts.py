"""Compare speculative with plain greedy generation: `drafts.py`, or `drafts.py gpt2 bloom_560m`.

The reduced model of each spec gets two heads for the tokens after the next token, and learns from Shakespeare's text in
a short run. Then it continues 8 prompts of different lengths, each alone and all in one batch: without drafts, with the
first head, and with both heads. All tokens must be equal. The last row is a model with modules for the later tokens, as
in DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

import tfkit
from tfkit.plugin.manager import load_plugins
from tfkit.spec.folder import model_folder, tokenizer_in
from tfkit.spec.render import spec_data
from tfkit.tools.check.reduced import reduced_model

SPECS = (
    *("gpt2", "llama3_8b", "bloom_560m", "pythia_70m", "qwen3_0_6b"),
    *("olmo2_1b", "falcon_7b", "gpt_j_6b", "granite3_2b", "command_r_35b"),
)
VOCABULARY, LENGTH, NEW = 65, 64, 40
TEXTS = ("ROMEO:", "The ", "What", "First Citizen:\nBefore", "O", "I will ", "And the king ", "KING HENRY VI:\nNo")
OUTPUTS = ["logits", "second", "third"]
STACK = {"block": "decoder", "attention": {"n_heads": 4, "position": "rope"}, "ffn": {"kind": "swiglu", "d_ff": 64}}
MODULES: dict[str, Any] = {
    "d_model": 32,
    "vocab_size": VOCABULARY,
    "norm": "rmsnorm",
    "inputs": ["tokens", "after", "after_next"],
    "graph": {
        "embedding": {"block": "embedding", "input": "tokens"},
        "decoder": {**STACK, "n_layers": 2},
        "logits": {"block": "lm_head", "tie": "embedding"},
        "next": {"block": "embedding", "input": "after", "tie": "embedding"},
        "joined": {"block": "concat", "inputs": ["decoder", "next"], "along": "width"},
        "merged": {"block": "linear"},
        "module": {**STACK, "n_layers": 1},
        "second": {"block": "lm_head", "tie": "embedding"},
        "later": {"block": "embedding", "input": "after_next", "tie": "embedding"},
        "joined_2": {"block": "concat", "inputs": ["module", "later"], "along": "width"},
        "merged_2": {"block": "linear"},
        "module_2": {**STACK, "n_layers": 1},
        "third": {"block": "lm_head", "tie": "embedding"},
    },
    "outputs": OUTPUTS,
}


def main() -> int:
    """Compare all models, and print a row for each; return 1 if any token differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("specs", nargs="*", help="names of specs with a head `logits` after a node `decoder`")
    parser.add_argument("--steps", type=int, default=400, help="steps of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: _with_heads(name) for name in options.specs or SPECS}
    models |= {} if options.specs else {"modules, as in DeepSeek-V3": MODULES}
    print(
        f"{'':28}{'tokens':>8}{'equal':>8}{'plain':>8}{'1 head':>8}{'2 heads':>8}   forwards for 8 prompts, each alone"
    )
    n_different = 0
    for name, spec in models.items():
        model, prompts = _trained(spec, options.steps)
        results = [_generated(model, prompts, OUTPUTS[1:number]) for number in (1, 2, 3)]
        plain, *drafted = (torch.tensor(rows) for rows, _ in results)
        n_equal = int(torch.stack([tokens == plain for tokens in drafted]).all(dim=0).sum())
        n_different += plain.numel() - n_equal
        forwards = "".join(f"{count:8}" for _, count in results)
        print(f"{name:28}{plain.numel():8}{n_equal:8}{forwards}", flush=True)
    return int(n_different > 0)


def _with_heads(name: str) -> dict[str, Any]:
    """Return the reduced model of a spec with heads for the two tokens after the next token."""
    plugins = load_plugins()
    graph = reduced_model(tfkit.load(name, plugins=plugins), plugins, tokens=VOCABULARY, length=LENGTH).graph
    spec: dict[str, Any] = {**spec_data(graph.spec.model)}
    for key in ("tfkit", "name", "checkpoint"):
        spec.pop(key, None)
    head = {key: value for key, value in spec["graph"]["logits"].items() if key != "tie"} | {"input": "decoder"}
    return {**spec, "graph": {**spec["graph"], "second": head, "third": head}, "outputs": OUTPUTS}


def _trained(model: dict[str, Any], steps: int) -> tuple[fx.GraphModule, list[list[int]]]:
    """Train a model to predict the next token and, by its heads, the two tokens after it; return it and the prompts."""
    ahead = {name: distance for distance, name in enumerate(model["inputs"][1:], start=1)} if model is MODULES else {}
    outputs = {name: {"shift": shift} for shift, name in enumerate(OUTPUTS, start=1)}
    run = {
        "tfkit": 1,
        "name": "drafts",
        "model": model,
        "data": {"kind": "text", "files": "tinyshakespeare"},
        "batch": {"sequences": 16, "length": LENGTH},
        "steps": steps,
        "loss": {"kind": "cross_entropy", "outputs": outputs, "ahead": ahead},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup": min(20, steps)},
    }
    with tempfile.TemporaryDirectory() as folder:
        tfkit.train(run, output=folder, quiet=True)
        file = tokenizer_in(model_folder(Path(folder)))
        assert file is not None
        return tfkit.build(folder), [list(tfkit.load_tokenizer(file).encode(text)) for text in TEXTS]


def _generated(
    model: fx.GraphModule, prompts: Sequence[list[int]], drafts: Sequence[str]
) -> tuple[list[list[int]], int]:
    """Return the tokens of all prompts, each alone and then in one batch, and the forwards of each alone."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "drafts": drafts, "output": "logits"}
    alone = [tfkit.generate(model, [prompt], **options) for prompt in prompts]
    together = tfkit.generate(model, prompts, **options)
    return [*(row for result in alone for row in result.rows()), *together.rows()], sum(r.forwards for r in alone)


if __name__ == "__main__":
    raise SystemExit(main())
