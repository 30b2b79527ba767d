"""The initialization of weights: the spec's `init` fills each weight from the seed and the name of the weight."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

import torch
from einops.layers.torch import EinMix
from torch import Tensor, nn

from tfkit.building.placement import forked_generator
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.wiring import heads_of_tables
from tfkit.nn import Linear, StackedLinear

RESETS = ("reset_parameters", "_reset_parameters")
"""Names of the method that fills a module. In torch's attention it has a private name."""


class Rule(NamedTuple):
    """The method of the spec's `init` that fills the weight of a module, and its arguments."""

    method: Literal["linear", "table", "tied_table"]
    residual: bool = False
    n_layers: int | None = None


def init_rules(model: nn.Module, graph: Graph) -> dict[str, Rule]:
    """Return the rule of every linear layer and every table of a model, by its path."""
    tied = {f"{owner}.tokens" for owner in heads_of_tables(graph)}
    depths = {node.name: node.stack.depth if node.stack else None for node in graph.nodes}
    plan: dict[str, Rule] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear | StackedLinear):
            residual = isinstance(module, Linear | StackedLinear) and module.residual
            plan[path] = Rule("linear", residual, depths.get(path.partition(".")[0]))
        elif isinstance(module, nn.Embedding):
            plan[path] = Rule("tied_table" if path in tied else "table")
    return plan


def initialize(
    model: torch.fx.GraphModule, graph: Graph, seed: int = 0, *, only: Container[nn.Module] | None = None
) -> None:
    """Fill every parameter and buffer of a model in place, each from `seed` and its name.

    With `only`, fill the parameters and buffers that belong directly to these modules.
    """
    init = graph.spec.model.init
    plan = init_rules(model, graph)
    with torch.no_grad(), forked_generator():
        for path, module in model.named_modules():
            if only is not None and module not in only:
                continue
            if isinstance(module, nn.Linear | StackedLinear):
                _, residual, n_layers = plan[path]
                for i, part in enumerate(_separate_matrices(module)):
                    generator = generator_of(seed, f"{path}.weight.{i}", part.device)
                    init.linear(part, residual=residual, n_layers=n_layers, generator=generator)
                if module.bias is not None:
                    generator = generator_of(seed, f"{path}.bias", module.bias.device)
                    init.bias(module.bias, fan_in=module.weight.size(-1), generator=generator)
            elif isinstance(module, nn.Embedding):
                fill = init.tied_table if plan[path].method == "tied_table" else init.table
                fill(module.weight, generator=generator_of(seed, f"{path}.weight", module.weight.device))
            elif (reset := _reset_of(module)) is not None:
                first = next(chain(module.parameters(), module.buffers()), None)
                seed_device(torch.device("cpu") if first is None else first.device, _derived_seed(seed, path))
                reset()
            elif _has_tensors(module) and not _is_filled_above(model, path):
                message = f"`{path}` has parameters or buffers, but no `reset_parameters` to fill them"
                raise SpecError(
                    Diagnostic(message, help=f"add `reset_parameters` to the class {type(module).__name__}")
                )


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that fills a module; None if there is none."""
    if type(module) is EinMix:  # only its constructor fills it
        return partial(_refill_module, module)
    methods = [getattr(module, name, None) for name in RESETS]
    return next((method for method in methods if callable(method)), None)


def _refill_module(module: EinMix) -> None:
    with torch.device("cpu"):
        again = EinMix(module.pattern, module.weight_shape, module.bias_shape, **module.axes_lengths)
    module.load_state_dict(again.state_dict())


def _has_tensors(module: nn.Module) -> bool:
    """Return True if a module has parameters or buffers, disregarding its children."""
    return any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _is_filled_above(model: nn.Module, path: str) -> bool:
    """Return True for a list or mapping of parameters, which its parent fills."""
    module, above = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    return isinstance(module, nn.ParameterList | nn.ParameterDict) and _reset_of(above) is not None


def _separate_matrices(module: nn.Linear | StackedLinear) -> Iterator[Tensor]:
    """Yield each matrix [out, in] that is filled separately: the parts of a fused layer, the layers of a stack."""
    parts = module.parts if isinstance(module, Linear | StackedLinear) else None
    for matrix in module.weight if isinstance(module, StackedLinear) else [module.weight]:
        yield from matrix.split(list(parts.values()) if parts else matrix.size(0))


def _derived_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()) >> 1


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the random generators of a device and of the CPU.

    `torch.manual_seed` seeds all devices, and records a traceback for every device that is not initialized yet.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def generator_of(seed: int, name: str, device: torch.device | str) -> torch.Generator:
    """Return a random generator for a name, independent of the generators of other names."""
    of_device = "cpu" if torch.device(device).type == "meta" else device  # the meta device has none
    return torch.Generator(of_device).manual_seed(_derived_seed(seed, name))
