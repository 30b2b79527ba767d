"""Check a parametrization by coordinates: how the outputs of components change in the first steps, at growing widths.

A correct parametrization changes every component by the same amount at any width. The script trains a small model of
characters for a few steps at several widths, or depths, and prints for each component the largest exponent of the width
with which its change since the start grows, from the second step on. Figures are means of several seeds.

    python tools/coordinates.py                      # standard and muP over widths, CompleteP over depths, and faults
    python tools/coordinates.py mup --model hybrid --widths 64 128

The faults are errors of a rule: the output matrix as a hidden matrix, tied logits without their factor, and a rate that
is not divided. The check must name their components. https://arxiv.org/abs/2203.03466, appendix D.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, fx

import tfkit
from tfkit.errors import FirstLossWarning
from tfkit.graph.expand import expand
from tfkit.plugin.manager import load_plugins
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import Factors
from tfkit.run.training.optimizer import Rules, groups_of
from tfkit.run.training.parametrize import parameter_rules, scale_initial_values
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.run_data import RunData

WIDTHS, DEPTHS, BASE_WIDTH, BASE_DEPTH = (64, 128, 256, 512), (2, 4, 8, 16, 32), 64, 2
SEEDS, STEPS, D_HEAD = 5, 4, 16
LIMIT, STANDARD = 0.15, 0.5
"""Largest exponent under a correct parametrization, and exponent that some component exceeds without any."""
RATE = 2**-8
FFN = "decoder.layers.0.ffn"
FAULTS = {"output": "head", "factor": "head", "rate": FFN}
"""The component that each fault must name."""


@dataclass(frozen=True)
class Slope:
    """The growth of a component's change: the largest exponent over steps, and the mean change of the last step."""

    exponent: float
    changes: tuple[float, ...]


def decoder_of(model: str, width: int) -> dict[str, Any]:
    """Return the fields of a decoder that distinguish a model. Heads have equal widths at all widths."""
    heads = width // D_HEAD
    mha, mlp = {"kind": "mha", "n_heads": heads, "position": "rope"}, {"kind": "gelu", "d_ff": 4 * width}
    delta = {"kind": "gated_delta", "n_heads": heads, "n_key_heads": heads, "d_key": D_HEAD, "d_value": D_HEAD}
    latent = {"kind": "mla", "n_heads": heads, "kv_rank": 24, "d_nope": 16, "d_rope": 8, "d_v": 16, "position": "rope"}
    hybrid = {"variants": {"linear": {"mixer": delta, "attention": None}}, "pattern": ["linear", "base"]}
    experts = {"kind": "moe", "n_experts": 4, "n_experts_per_token": 2, "d_ff": 2 * width}
    ssm = {"kind": "mamba2", "n_heads": 2 * heads, "d_head": D_HEAD, "n_groups": 1, "d_state": 16}
    further: dict[str, dict[str, Any]] = {
        "gpt": {},
        "llama": {
            "attention": {**mha, "kind": "gqa", "n_kv_heads": heads // 2},
            "ffn": {"kind": "swiglu", "d_ff": 3 * width},
        },
        "mixture": {"ffn": experts},
        "latent": {"attention": latent},
        "hybrid": {"layers": hybrid},
        "mamba2": {"mixer": ssm, "attention": None, "ffn": None},
        "streams": {"residual": {"kind": "manifold", "streams": 2}},
    }
    return {"attention": mha, "ffn": mlp, **further[model]}


MODELS = ("gpt", "llama", "mixture", "latent", "hybrid", "mamba2", "streams")


def model_of(model: str, width: int, depth: int, *, tied: bool) -> dict[str, Any]:
    """Return the spec of a model whose number of heads grows with its width."""
    decoder = {"block": "decoder", "n_layers": depth, **decoder_of(model, width)}
    head = {"block": "lm_head", **({"tie": "embedding"} if tied else {})}
    graph = {"embedding": "embedding", "decoder": decoder, "head": head}
    sizes = {"vocab_size": "data.vocab_size", "d_model": width}
    return {**sizes, "norm": "rmsnorm", "bias": False, "init": {"kind": "normal", "std": 0.1}, "graph": graph}


def sizes_in(values: Mapping[str, Any], path: str = "model") -> dict[str, int]:
    """Return the sizes in a spec by path."""
    sizes: dict[str, int] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            sizes |= sizes_in(value, f"{path}.{key}")
        elif type(value) is int:
            sizes[f"{path}.{key}"] = value
    return sizes


def run_of(model: str, kind: str, width: int, depth: int, seed: int, *, tied: bool) -> Run:
    """Return a run of the model with base sizes."""
    base_depth = BASE_DEPTH if kind == "completep" else depth
    spec, small = model_of(model, width, depth, tied=tied), model_of(model, BASE_WIDTH, base_depth, tied=tied)
    base = {path: size for path, size in sizes_in(small).items() if sizes_in(spec)[path] != size}
    run: dict[str, Any] = {"tfkit": 1, "name": "coordinates", "seed": seed, "steps": STEPS}
    run |= {"model": spec, "parametrization": {"kind": kind, "base": base}}
    run |= {"data": {"kind": "text", "files": "tinyshakespeare", "tokenizer": "characters", "order": "sampled"}}
    run |= {"batch": {"sequences": 8, "length": 32}, "optimizer": {"kind": "adamw", "lr": RATE}}
    return load_run(run, load_plugins(), count=flops_of_step)


def with_fault(rules: Rules, fault: str) -> Rules:
    """Return rules with a fault in the factors of one weight."""
    name = "head.output.weight" if fault == "output" else f"{FFN}.down.weight"
    rule = rules[name]
    ((rows, scale),) = rule.scales
    if fault == "output":  # the factors of a hidden matrix: the root of the ratio in the initial values
        std = math.sqrt(rule.factors.std)
        return {**rules, name: replace(rule, scales=((rows, scale / rule.factors.std * std),))}
    return {**rules, name: replace(rule, factors=Factors(rule.factors.std))}


def component_outputs(model: fx.GraphModule, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of the embedding, of each sublayer, of the stack and of the head, by path."""
    graph, outputs = model.meta["graph"], dict[str, Tensor]()
    paths = [node.name for node in graph.built_nodes]
    for node in graph.built_nodes:
        for number, layer in enumerate(node.stack.layers if node.stack else ()):
            paths += [f"{node.name}.layers.{number}.{step.name}" for step in layer.steps]
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: outputs.__setitem__(path, output.detach().double())
        )
        for path in paths
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    order = {path: number for number, path in enumerate(paths)}
    return dict(sorted(outputs.items(), key=lambda item: (item[0].count("."), order[item[0]])))


def changes_of(run: Run, fault: str | None = None) -> dict[str, list[float]]:
    """Train a few steps, and return the root mean square of each component's change since the start, by step."""
    data, rules = RunData(run), parameter_rules(run)
    assert rules is not None
    if fault == "factor":
        run = replace(run, graph=expand(run.written))
    elif fault is not None:
        rules = with_fault(rules, fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FirstLossWarning)  # of the values before they are scaled
        model = tfkit.build(run.graph, seed=run.config.seed)
    scale_initial_values(model, rules)
    loss, optimizer = data.build_loss(model), run.config.optimizer.build(groups_of(model, run.config.optimizer, rules))
    batch = data.train.batch(1)
    start, changes = component_outputs(model, batch.inputs), dict[str, list[float]]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss(batch.inputs, batch.targets) / batch.targets.numel()).backward()
        optimizer.step()
        for path, output in component_outputs(model, batch.inputs).items():
            changes.setdefault(path, []).append(float((output - start[path]).square().mean().sqrt()))
    return changes


def slopes_of(
    kind: str,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    seeds: int,
    fault: str | None = None,
    model: str = "gpt",
) -> dict[str, Slope]:
    """Return the growth of each component's change over widths or depths, from the second step on."""
    sizes = [(width, depth) for width in widths for depth in depths]
    tied, changes = fault == "factor", list[dict[str, list[float]]]()
    for width, depth in sizes:
        runs = (run_of(model, kind, width, depth, seed, tied=tied) for seed in range(seeds))
        of_seeds = [changes_of(run, fault) for run in runs]
        paths = of_seeds[0]
        changes.append({path: list(map(fmean, zip(*(run[path] for run in of_seeds), strict=True))) for path in paths})
    ratios = [math.log(width * depth) for width, depth in sizes]
    slopes = {}
    for path in (path for path in changes[0] if all(path in of_size for of_size in changes)):
        exponents = [
            exponent(ratios, [math.log(of_size[path][step]) for of_size in changes]) for step in range(1, STEPS)
        ]
        slopes[path] = Slope(max(exponents), tuple(of_size[path][-1] for of_size in changes))
    return slopes


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the line with the least squares."""
    mean_x, mean_y = fmean(x), fmean(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


def named_component(slopes: Mapping[str, Slope]) -> str | None:
    """Return the first component, in the order of the model, whose change grows; None if none does.

    A sublayer comes before the stack that contains it, because a stack grows with its sublayers.
    """
    growing = [path for path, slope in slopes.items() if slope.exponent > LIMIT]
    return next((path for path in growing if not any(inner.startswith(f"{path}.") for inner in growing)), None)


def verdict(kind: str, fault: str | None, slopes: Mapping[str, Slope]) -> tuple[str, bool]:
    """Return the result of a check as text, and whether it is expected."""
    largest, name = max(slopes.values(), key=lambda slope: slope.exponent), named_component(slopes)
    if fault is not None:
        return f"names `{name}`, expected `{FAULTS[fault]}`", name == FAULTS[fault]
    if kind == "standard":
        return f"a component grows with exponent {largest.exponent:.2f}", largest.exponent > STANDARD
    return f"the largest exponent is {largest.exponent:.2f}", largest.exponent <= LIMIT


def main() -> int:
    """Print the growth of all components; return 1 if a result is unexpected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--model", choices=MODELS, default="gpt", help="the components of the model")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options, failed = parser.parse_args(), 0
    torch.set_num_threads(1)
    for name in options.checks or CHECKS:
        kind, fault = CHECKS[name]
        sizes = {"widths": options.widths, "depths": (BASE_DEPTH,)}
        if kind == "completep":
            sizes = {"widths": (BASE_WIDTH,), "depths": options.depths}
        slopes = slopes_of(kind, seeds=options.seeds, fault=fault, model=options.model, **sizes)
        text, expected = verdict(kind, fault, slopes)
        failed += not expected
        print(f"{name}: {text}{'' if expected else '  <- unexpected'}", flush=True)
        for path, slope in slopes.items():
            print(f"  {path:32} {slope.exponent:6.2f}   {'  '.join(f'{change:.3g}' for change in slope.changes)}")
    return int(failed > 0)


CHECKS: dict[str, tuple[str, str | None]] = {
    "standard": ("standard", None),
    "mup": ("mup", None),
    "completep": ("completep", None),
    **{f"mup without {fault}": ("mup", fault) for fault in FAULTS},
}
"""The kind of parametrization and the fault of each check."""
if __name__ == "__main__":
    raise SystemExit(main())
