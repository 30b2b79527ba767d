"""The cost of einops' layers in place of `tfkit.Rearrange`, in a training step and in a decoded token.

OMP_NUM_THREADS=1 python tools/bench/einops_layers.py

The difference is smaller than the noise between two equal steps. It is therefore the sum over all calls of a step: every
rearrangement of the model takes its input again and again, in turns with the layer of einops, and the minima count.
The ratio of full steps, in turns, is the check. CPU time on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops.layers import torch as layers
from measure import machine, ratio, seconds, take_turns
from torch import Tensor, fx, nn
from train_step import SHAPES

import tfkit
from tfkit.nn import Rearrange

GOAL = 0.01
SETS = {
    "gpt2": ("decoder.n_layers=6", "d_model=384", "decoder.attention.n_heads=6", "decoder.ffn.d_ff=1536"),
    "llama3_8b": ("decoder.n_layers=8", "d_model=512", "decoder.attention.n_heads=8", "decoder.attention.n_kv_heads=2")
    + ("decoder.ffn.d_ff=1408",),
}
Call = tuple[Rearrange, Tensor]


class Cut(nn.Module):
    """einops' layer for an axis that is cut: it rearranges the axis, and then cuts it."""

    def __init__(self, layer: nn.Module, sizes: list[int], dim: int) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = sizes
        self.dim = dim

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.layer(x).split_with_sizes(self.sizes, dim=self.dim)


def of_einops(module: Rearrange) -> nn.Module:
    """Return einops' layer for a rearrangement."""
    sizes = {axis: getattr(module, axis) for axis in module.known}
    cut = [axis for axis, size in sizes.items() if isinstance(size, list)]
    layer = layers.Rearrange(module.pattern, **{axis: size for axis, size in sizes.items() if axis not in cut})
    target = module.pattern.partition("->")[2].split()
    return Cut(layer, sizes[cut[0]], target.index(cut[0])) if cut else layer


@contextmanager
def with_einops(model: nn.Module) -> Iterator[None]:
    """Replace the rearrangements of a model inside the context."""
    places = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    places = [place for place in places if isinstance(place[2], Rearrange)]
    for parent, name, child in places:
        parent._modules[name] = child.einops
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def calls_of(model: nn.Module, step: Callable[[], object]) -> list[Call]:
    """Return the calls of rearrangements in a step, with their inputs."""
    calls: list[Call] = []
    found = [module for module in model.modules() if isinstance(module, Rearrange)]
    handles = [module.register_forward_pre_hook(lambda m, args: calls.append((m, args[0].detach()))) for module in found]
    step()
    for handle in handles:
        handle.remove()
    return calls


def added_seconds(calls: list[Call], rounds: int, *, grad: bool) -> float:
    """Return the additional time of einops' layers in these calls."""
    total = 0.0
    groups: dict[Any, list[Call]] = {}
    for module, x in calls:
        groups.setdefault((module.pattern, str(module.sizes), x.shape, x.stride()), []).append((module, x))
    for group in groups.values():
        module, x = group[0]
        x = x.requires_grad_(grad and x.is_floating_point())

        def repeated(function: Callable[[Tensor], object], x: Tensor = x) -> Callable[[], float]:
            def run() -> float:
                start = time.process_time()
                for _ in range(500):
                    function(x)
                return (time.process_time() - start) / 500

            return run

        times = take_turns({"tfkit": repeated(module), "einops": repeated(module.einops)}, rounds)
        total += len(group) * (min(times["einops"]) - min(times["tfkit"]))
    return total


def main() -> None:
    """Print the added time, and its fraction of a step and of a token, for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; CPU time; the limit is {GOAL:.0%}")
    print(f"  {'':24}{'calls':>6}{'ms':>9}   added by einops      full steps: minima, median (spread)")
    for name, sets in SETS.items():
        model = tfkit.build(tfkit.load(name, sets=(*sets, "vocab_size=8192")))
        for module in model.modules():
            if isinstance(module, Rearrange):
                vars(module)["einops"] = of_einops(module)
        for mode, step in steps_of(model, SHAPES[name.partition("3")[0]]).items():
            calls = calls_of(model, step)

            def einops_step(step: Callable[[], object] = step) -> object:
                with with_einops(model):
                    return step()

            contenders = {"tfkit": lambda step=step: seconds(step), "einops": lambda run=einops_step: seconds(run)}
            times = take_turns(contenders, options.rounds)
            least = min(times["tfkit"])
            added = added_seconds(calls, options.rounds, grad=mode.startswith("step"))
            full = ratio(times["einops"], times["tfkit"])
            print(
                f"  {name + ', ' + mode:24}{len(calls):>6}{1000 * least:>9.2f}   {1e6 * added:7.0f} us, {added / least:6.2%}"
                f"   {full.of_minima:.3f}, {full.median:.3f} ({full.low:.2f} to {full.high:.2f})"
            )


def steps_of(model: fx.GraphModule, shape: Any) -> dict[str, Callable[[], object]]:
    """Return a training step at the shape of `train_step.py`, a small one, and a decoded token."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train(batch: int, length: int) -> Callable[[], object]:
        tokens = torch.randint(8192, (batch, length))

        def step() -> None:
            model.train()
            logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    cached = tfkit.CachedModel(model.eval(), length=64)
    token = torch.randint(8192, (1, 1))

    def decode() -> None:
        model.eval()
        with torch.inference_mode():
            cached.start(1)
            for _ in range(17):
                cached(token)

    return {f"step {shape.batch}x{shape.length}": train(shape.batch, shape.length), "step 1x32": train(1, 32)} | {
        "17 tokens": decode
    }


if __name__ == "__main__":
    main()
