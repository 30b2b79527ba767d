"""Measure a GPT-2 that is spelled out in nodes against the same GPT-2 as a stack.

    python tools/bench/nodes.py [--rounds 12] [--width 256] [--length 128] [--tokens 32]

`stack` is a decoder of 12 layers, `layers` has a node for each layer, and `sublayers` a node for each norm, attention,
FFN and addition. All have the same weights, and must write the same tokens. CPU time on one thread; they take turns.
A step is a forward, a backward and an update of AdamW. A token is read with a cache, without the time of the prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from measure import compare_speeds, machine, per_token, seconds, take_turns
from torch import Tensor

import tfkit

LAYERS, VOCABULARY, PROMPT = 12, 4096, 8
Graph = dict[str, Any]


def stack(attention: Graph, ffn: Graph) -> Graph:
    """Return the decoder as one node."""
    return {"decoder": {"block": "decoder", "n_layers": LAYERS, "attention": attention, "ffn": ffn}}


def layers(attention: Graph, ffn: Graph) -> Graph:
    """Return a node for each layer."""
    layer = {"block": "layer", "causal": True, "attention": attention, "ffn": ffn}
    return {**{f"layer_{i}": layer for i in range(LAYERS)}, "end": {"block": "norm"}}


def sublayers(attention: Graph, ffn: Graph) -> Graph:
    """Return a node for each norm, sublayer and addition."""
    graph, stream = Graph(), "embedding"
    blocks = {"attention": {"attention": attention, "causal": True}, "ffn": {"ffn": ffn}}
    for i in range(LAYERS):
        for name, fields in blocks.items():
            graph[f"{name}_norm_{i}"] = {"block": "norm", "input": stream}
            graph[f"{name}_{i}"] = {"block": name, **fields}
            graph[f"{name}_sum_{i}"] = {"block": "residual", "inputs": [stream, f"{name}_{i}"]}
            stream = f"{name}_sum_{i}"
    return {**graph, "end": {"block": "norm"}}


def models(width: int, length: int) -> Mapping[str, Any]:
    """Return the three models with the same weights."""
    attention, ffn = {"kind": "mha", "n_heads": width // 32}, {"kind": "gelu", "d_ff": 4 * width}
    header = {"tfkit": 1, "name": "gpt2", "d_model": width, "vocab_size": VOCABULARY, "max_len": length}
    built: dict[str, Any] = {}
    for graph in (stack, layers, sublayers):
        embedding = {"block": "embedding", "position": "learned"}
        nodes = {"embedding": embedding, **graph(attention, ffn), "logits": {"block": "lm_head", "tie": "embedding"}}
        built[graph.__name__] = tfkit.build(tfkit.load({**header, "graph": nodes}), seed=0)
    weights = [parameter.detach() for parameter in built["stack"].parameters()]
    for model in built.values():
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
    return built


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Measure a step of training."""

    def run() -> None:
        tfkit.loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds(run)


def decode(cached: tfkit.CachedModel, prompt: Tensor, n: int) -> Tensor:
    """Write `n` tokens with the shortest loop."""
    cached.start(prompt.size(0))
    tokens = [cached(prompt, keep=1).argmax(dim=-1)]
    for _ in range(n - 1):
        tokens.append(cached(tokens[-1], keep=1).argmax(dim=-1))
    return torch.cat(tokens, dim=1)


def main() -> None:
    """Print a table for a step, and a table for a token."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in {"rounds": 12, "width": 256, "length": 128, "batch": 2, "tokens": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    built = models(options.width, options.length)
    tokens = torch.randint(VOCABULARY, (options.batch, options.length), generator=torch.Generator().manual_seed(0))
    prompt = tokens[:1, :PROMPT]
    for model in built.values():
        model.eval()
    writers = {name: partial(decode, tfkit.CachedModel(built[name], length=options.length), prompt) for name in built}
    with torch.inference_mode():
        expected = writers["stack"](8)
        assert all(torch.equal(write(8), expected) for write in writers.values())
    contenders: dict[str, Callable[[], float]] = {
        name: per_token(write, options.tokens, "cpu") for name, write in writers.items()
    }
    print(f"\na token\n{compare_speeds(take_turns(contenders, options.rounds))}", flush=True)
    steps = {
        name: partial(step, model.train(), torch.optim.AdamW(model.parameters(), lr=1e-4), tokens)
        for name, model in built.items()
    }
    print(f"\na training step\n{compare_speeds(take_turns(steps, options.rounds))}")


if __name__ == "__main__":
    main()
