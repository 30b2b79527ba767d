"""The cost of einops' layers in place of `tfkit.Rearrange`, in a training step and in a decoded token.

OMP_NUM_THREADS=1 python tools/bench/einops_layers.py

The difference is smaller than the noise between two equal steps. It is therefore measured call by call: every
rearrangement of a step takes its input many times, in turns with the layer of einops. The sum of the differences of the
minima is compared with the fastest step of the model. CPU time on one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops.layers import torch as layers
from measure import machine, seconds, take_turns
from torch import Tensor, fx, nn

import tfkit
from tfkit.nn import Rearrange

GOAL = 0.01
REPEATS = 500
DEEP, SHALLOW = ("decoder.n_layers=12", "d_model=768"), ("decoder.n_layers=6", "d_model=384")


def heads(count: int) -> tuple[str, str]:
    """Return the changes of a spec for a number of heads, each with its own keys and values."""
    return f"decoder.attention.n_heads={count}", f"decoder.attention.n_kv_heads={count}"


MODELS = {
    "gpt2, step 4 x 256": ("gpt2", *SHALLOW, "decoder.attention.n_heads=6", "decoder.ffn.d_ff=1536", "vocab_size=8192"),
    "gpt2, token": ("gpt2",),
    "llama, token": ("llama3_8b", *DEEP, *heads(12), "decoder.ffn.d_ff=3072", "vocab_size=32000"),
    "small, token": ("llama3_8b", *SHALLOW, *heads(6), "decoder.ffn.d_ff=1024", "vocab_size=32000"),
}
"""The models of `train_step.py` and `decode.py`: a spec, and its changes."""


class Cut(nn.Module):
    """einops' layer for an axis that is cut: it rearranges the axis, and then cuts it."""

    def __init__(self, layer: nn.Module, sizes: list[int], dim: int) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = sizes
        self.dim = dim

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).split_with_sizes(self.sizes, dim=self.dim)


def of_einops(module: Rearrange) -> nn.Module:
    """Return einops' layer for a rearrangement."""
    sizes = {axis: getattr(module, axis) for axis in module.known}
    cut = [axis for axis, size in sizes.items() if isinstance(size, list)]
    layer = layers.Rearrange(module.pattern, **{axis: size for axis, size in sizes.items() if axis not in cut})
    target = module.pattern.partition("->")[2].split()
    return Cut(layer, sizes[cut[0]], target.index(cut[0])) if cut else layer


def calls_of(model: nn.Module, step: Callable[[], object]) -> list[tuple[Rearrange, Tensor]]:
    """Return the calls of rearrangements in a step, with their inputs."""
    calls: list[tuple[Rearrange, Tensor]] = []
    modules = [module for module in model.modules() if isinstance(module, Rearrange)]
    handles = [module.register_forward_pre_hook(lambda m, args: calls.append((m, args[0]))) for module in modules]
    step()
    for handle in handles:
        handle.remove()
    return calls


def repeated(function: Callable[[Tensor], object], x: Tensor) -> Callable[[], float]:
    """Measure the seconds of a call, from many calls."""

    def run() -> None:
        for _ in range(REPEATS):
            function(x)

    return lambda: seconds(run) / REPEATS


def added_seconds(calls: list[tuple[Rearrange, Tensor]], rounds: int) -> float:
    """Return the additional time of einops' layers in these calls. Equal calls are measured once."""
    groups: dict[Any, list[tuple[Rearrange, Tensor]]] = {}
    for module, x in calls:
        groups.setdefault((module.pattern, str(module.sizes), x.shape, x.stride()), []).append((module, x))
    total = 0.0
    for (module, x), *further in groups.values():
        leaf = x.detach().requires_grad_(x.requires_grad)
        contenders = {"tfkit": repeated(module, leaf), "einops": repeated(of_einops(module), leaf)}
        times = take_turns(contenders, rounds)
        total += (1 + len(further)) * (min(times["einops"]) - min(times["tfkit"]))
    return total


def step_of(model: fx.GraphModule, name: str) -> Callable[[], object]:
    """Return a training step, or a decoding step after a prompt of 8 tokens."""
    generator = torch.Generator().manual_seed(0)
    if name.endswith("token"):
        cached, token = tfkit.CachedModel(model.eval(), length=1024), torch.randint(8192, (1, 1), generator=generator)
        cached(token.expand(1, 8))
        return partial(torch.inference_mode()(cached), token)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), fused=True), torch.randint(8192, (4, 256))

    def step() -> None:
        logits = model.train()(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Print the added time, and its fraction of a step and of a token, for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; CPU time; the limit is {GOAL:.0%}")
    for name, (spec, *sets) in MODELS.items():
        model = tfkit.build(tfkit.load(spec, sets=sets))
        step = step_of(model, name)
        calls = calls_of(model, step)
        fastest = min(seconds(step) for _ in range(options.rounds))
        added = added_seconds(calls, options.rounds)
        figures = f"{len(calls)} calls, {1e6 * added / len(calls):.1f} us each: {1e6 * added:.0f} us"
        print(f"  {name:20}{figures} of {1000 * fastest:.2f} ms, {added / fastest:.2%}", flush=True)


if __name__ == "__main__":
    main()
