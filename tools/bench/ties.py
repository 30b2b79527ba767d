"""Measure what the rule of ties costs: `choose_top` against `torch.topk`, in the modules that choose.

    python tools/bench/ties.py [--rounds 9]

CPU time on one thread; both contenders take turns. The modules are the index of `mla_indexed`, over full sequences and
for a token with a cache, and a mixture of experts.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from measure import compare_speeds, machine, seconds, take_turns
from torch import Tensor

import tfkit
from tfkit.nn import Cache, Context, choose_top

WIDTH, RANK, D_HEAD, KEEP = 1024, 512, 128, 1024
ROPE = {"kind": "rope", "style": "interleaved"}
ATTENTION = {"kind": "mla_indexed", "n_heads": 8, "q_rank": RANK, "kv_rank": 128, "d_nope": 64, "d_rope": 64, "d_v": 64}
INDEX = {"n_heads": 32, "d_head": D_HEAD, "keep": KEEP}
EXPERTS = {"kind": "moe", "n_experts": 64, "n_experts_per_token": 8, "d_ff": 256}
LENGTHS = (512, 1024, 2048, 4096)


def by_shape(scores: Tensor, k: int, positions: Tensor | None = None) -> Tensor:
    """Choose the largest scores as `choose_top`, without its rule of ties."""
    columns = torch.topk(scores, k, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, columns, True)


@contextmanager
def choosing(function: Callable[..., Tensor]) -> Iterator[None]:
    """Choose keys and experts by a function within the context."""
    modules: list[Any] = [importlib.import_module(name) for name in ("tfkit_mla.indexed", "tfkit_moe.router")]
    for module in modules:
        module.choose_top = function
    try:
        yield
    finally:
        for module in modules:
            module.choose_top = choose_top


def layer() -> Any:
    """Build a layer with an index and experts."""
    attention = {**ATTENTION, "index": INDEX, "position": ROPE}
    decoder = {"block": "decoder", "n_layers": 1, "attention": attention, "ffn": EXPERTS}
    inputs = {"x": {"type": "features", "width": WIDTH}}
    spec = {"tfkit": 1, "name": "m", "d_model": WIDTH, "bias": False, "inputs": inputs, "graph": {"decoder": decoder}}
    return tfkit.build(tfkit.load(spec), seed=1).eval().decoder.layers[0]


def repeat(run: Callable[[], object], n: int = 20) -> None:
    """Call a function several times."""
    for _ in range(n):
        run()


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name and the call of each measured module."""
    module = layer()
    index, x = module.attention.index, torch.randn(1, LENGTHS[-1], WIDTH)
    latent, table = torch.randn(1, LENGTHS[-1], RANK), torch.randn(2, 1, 1, LENGTHS[-1], 64)
    for length in LENGTHS[:3]:
        mask = torch.full((1, 1, length, length), -math.inf).triu(1)
        context = Context(mask, table[:, :, :, :length], None)
        yield f"index, {length} tokens", partial(index, x[:, :length], latent[:, :length], context)
    for length in LENGTHS:
        keys = torch.randn(1, 1, length + 1, D_HEAD)
        cache = Cache([keys, keys, keys], torch.tensor([length - 1]), 0, length)
        context = Context(None, table[:, :, :, :1], None, cache)
        yield f"index, token {length}", partial(repeat, partial(index, x[:, :1], latent[:, :1], context))
    yield "experts, 1024 tokens", partial(module.ffn, x[:, :1024])


@torch.inference_mode()
def main() -> None:
    """Print a table for each module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())

    def measured(run: Callable[[], object], function: Callable[..., Tensor]) -> Callable[[], float]:
        def measure() -> float:
            with choosing(function):
                return seconds(run)

        return measure

    for name, run in cases():
        contenders = {"by position": measured(run, choose_top), "torch.topk": measured(run, by_shape)}
        print(f"\n{name}\n{compare_speeds(take_turns(contenders, rounds))}", flush=True)


if __name__ == "__main__":
    main()
