"""The parametrization of a run: the role of each weight, the factors of its settings, and its initial values.

Two builds of the model on the meta device, at the base sizes and at the sizes of the run, show which axes of each
weight grow. The initial values are derived in the same way: the filling of both models is executed on a few quantiles
instead of random numbers, so the ratio of their standard deviations is exact for any `init` and `reset_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import build
from tfkit.building.initialize import initialize
from tfkit.errors import Invalid
from tfkit.graph.expand import Graph
from tfkit.graph.wiring import heads_of_tables
from tfkit.nn import Linear, StackedLinear, part
from tfkit.run.checked_run import Run
from tfkit.run.contract import Factors, Growth, OptimizerConfig, ParametrizationConfig, Role
from tfkit.run.parametrization import depth_ratio, head_width_ratio, width_ratio
from tfkit.run.training.optimizer import ParameterRule, Rules, matrices_of
from tfkit.torch_private.dispatch import TO_COPY, DispatchMode

POINTS = 4096
"""Number of quantiles that stand for the random values of a weight."""
TOLERANCE = 1e-6
"""Largest relative difference of initial values that differ only by a factor."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def parameter_rules(run: Run) -> Rules | None:
    """Return the rule of each parameter by its name; None if the run has no base sizes.

    Raises SpecError for a weight whose role cannot be derived, or for which there is no rule.
    """
    config, base = run.config.parametrization, run.base_graph
    if base is None:
        return None
    with run.guarded(config, "`factors`", "parametrization"):
        return rules_of(config, run.config.optimizer, run.graph, base)


def rules_of(config: ParametrizationConfig, optimizer: OptimizerConfig, graph: Graph, base: Graph) -> Rules:
    """Return the rules of a model. `base` is its graph at the base sizes. Raises `Invalid` as `parameter_rules`."""
    model, small = (build(sized, device="meta") for sized in (graph, base))
    fills, base_fills = (initial_values(built) for built in (model, small))
    matrices = {} if optimizer.rest is None else matrices_of(model)
    rules = {}
    for name, parameter in model.named_parameters():
        before = _base_name(name, graph, base)
        growths = [*growths_of(model, small, name, before)]
        of = optimizer if parameter in matrices or optimizer.rest is None else optimizer.rest
        factors = [config.factors(growth, of) for growth in growths]
        node = graph.node(name.partition(".")[0])
        forward = config.head_factor(head_width_ratio(node, base.node(node.name)))
        if forward != 1 and growths[0].role == "fixed":  # the bias of a head, which `scale` multiplies
            factors = [factor.under(forward, squared=of.update == "sgd") for factor in factors]
        _check_equal_settings(name, factors, config)
        ratios = [1.0 for _ in growths]
        if config.rescales:
            ratios = [*_ratios(name, growths, fills[name], base_fills[before])]
        scales = [ratio * factor.std for ratio, factor in zip(ratios, factors, strict=True)]
        spread = fills[name].spread
        rows = (growth.shape[0] for growth in growths)
        rules[name] = ParameterRule(
            growths[0].role,
            factors[0],
            None if spread is None else spread * scales[0],
            tuple(zip(rows, scales, strict=True)),
        )
    return rules


def _check_equal_settings(name: str, factors: Sequence[Factors], config: ParametrizationConfig) -> None:
    """Raise `Invalid` if the matrices that are fused into a weight need different settings of the optimizer."""
    settings = {(factor.lr, factor.weight_decay, factor.eps) for factor in factors}
    if len(settings) > 1:
        rates = " and ".join(sorted({f"{factor.lr:g}" for factor in factors}))
        message = f"`{config.kind_name()}` needs several rates for the matrices of `{name}`: factors {rates}"
        raise Invalid("base", message, help="let all of its widths grow by the same ratio, or use `adamw`")


def _base_name(name: str, graph: Graph, base: Graph) -> str:
    """Return the name of a weight at the base sizes; in a layer, the name in a layer of the same variant."""
    node_name, _, inside = name.partition(".")
    stack, small = graph.node(node_name).stack, base.node(node_name).stack
    if stack is None or small is None:
        return name
    for number, layer in enumerate(stack.layers):
        twins = small.variants[layer.name]
        twin = twins[stack.variants[layer.name].index(number) % len(twins)]
        prefixes = {f"layers.{number}.": f"layers.{twin}."}
        if layer.context is not None:
            prefixes[f"{layer.context}."] = f"{small.layers[twin].context}."
        for prefix, replaced in prefixes.items():
            if inside.startswith(prefix):
                return f"{node_name}.{replaced}{inside.removeprefix(prefix)}"
    return name


def growths_of(model: fx.GraphModule, small: fx.GraphModule, name: str, before: str) -> Iterator[Growth]:
    """Yield the growth of each matrix in a weight. Raise `Invalid` if its role cannot be derived."""
    names = dict(small.named_parameters())
    tensor, base = model.get_parameter(name), names.get(before)
    if base is None or base.dim() != tensor.dim():
        raise Invalid("base", f"the model must have the weight `{name}` at the base sizes, with as many axes")
    graph: Graph = model.meta["graph"]
    node = graph.node(name.partition(".")[0])
    base_node = small.meta["graph"].node(node.name)
    width, in_layer = width_ratio(node, base_node), name.startswith(f"{node.name}.layers.")
    depth = depth_ratio(node, base_node) if in_layer else 1.0
    owner, base_owner = (
        built.get_submodule(path.rpartition(".")[0]) for built, path in ((model, name), (small, before))
    )
    is_output = node.name in graph.outputs
    if not name.endswith(".weight"):
        owner = base_owner = nn.Module()
    if isinstance(owner, nn.Linear | StackedLinear):
        _check_fixed(name, base.shape[:-2], tensor.shape[:-2])
        columns = base.size(-1), tensor.size(-1)
        parts, base_parts = (_rows_of(layer) for layer in (owner, base_owner))
        for rows in zip(base_parts, parts, strict=True):
            growth = _growth(rows, columns, is_output=is_output)
            yield replace(growth, width=width, depth=depth)
    elif isinstance(owner, nn.Embedding):
        _check_fixed(name, base.shape[:1], tensor.shape[:1])
        tied = node.name in heads_of_tables(graph) and name == f"{node.name}.tokens.weight"
        role: Role = "fixed" if base.shape == tensor.shape else "table" if tied else "input"
        yield Growth(role, (base.size(1), base.size(0)), (tensor.size(1), tensor.size(0)), width, depth)
    elif isinstance(owner, CONVOLUTIONS):
        _check_fixed(name, base.shape[2:], tensor.shape[2:])
        kernel = math.prod(tensor.shape[2:])
        columns = base.size(1) * kernel, tensor.size(1) * kernel
        growth = _growth((base.size(0), tensor.size(0)), columns, is_output=is_output)
        yield replace(growth, width=width, depth=depth)
    else:
        yield replace(_growth_of_other(name, base.shape, tensor.shape), width=width, depth=depth)


def _rows_of(layer: nn.Module) -> list[int]:
    parts = layer.parts if isinstance(layer, Linear | StackedLinear) else None
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return [*parts.values()] if parts else [weight.size(-2)]


def _check_fixed(name: str, base: Sequence[int], shape: Sequence[int]) -> None:
    """Raise `Invalid` if axes that are neither inputs nor outputs of a weight grow: rows of a table, experts."""
    if tuple(base) != tuple(shape):
        sizes = " and ".join("x".join(map(str, axes)) for axes in (base, shape))
        message = f"there is no rule for numbers of rows of a table, or of experts, that grow: `{name}` has {sizes}"
        raise Invalid("base", message, help="remove this size from `base`")


def _growth(rows: tuple[int, int], columns: tuple[int, int], *, is_output: bool) -> Growth:
    """Return the growth of a matrix, from its rows and columns at the base sizes and in the model."""
    (base_rows, n_rows), (base_columns, n_columns) = rows, columns
    role: Role = "fixed"
    if base_rows != n_rows:
        role = "input" if base_columns == n_columns else "hidden"
    elif base_columns != n_columns:
        role = "output" if is_output else "latent"
    return Growth(role, (base_rows, base_columns), (n_rows, n_columns))


def _growth_of_other(name: str, base: Sequence[int], shape: Sequence[int]) -> Growth:
    """Return the growth of a weight that is not the matrix of a layer.

    A weight with one axis that grows is a vector. With two axes, it is a matrix; its inputs are unknown, so both axes
    must grow by the same ratio.
    """
    pairs = list(zip(base, shape, strict=True))
    grown = [number for number, (size, new) in enumerate(pairs) if size != new]
    if not grown:
        return Growth("fixed", (math.prod(base), 1), (math.prod(shape), 1))
    if len(grown) == 1:
        return Growth("vector", (math.prod(base), 1), (math.prod(shape), 1))
    ratios = {new / size for size, new in (pairs[number] for number in grown)}
    if len(grown) > 2 or len(ratios) > 1:
        sizes = " and ".join("x".join(map(str, axes)) for axes in (base, shape))
        message = f"the inputs of `{name}` are unknown: it has {sizes}, and is not the matrix of a linear layer"
        raise Invalid("base", message, help="use `tfkit.nn.Linear` in the component, or let both axes grow equally")
    fixed = math.prod(size for size, new in pairs if size == new)
    (rows, new_rows), (columns, new_columns) = (pairs[number] for number in grown)
    return Growth("hidden", (rows * fixed, columns), (new_rows * fixed, new_columns))


# ---- initial values ----


class _Quantiles(DispatchMode):
    """Executes the filling of tensors on the meta device with quantiles instead of random numbers.

    `values` has the quantiles of each range of a tensor that was filled, by the tensor's memory and the offset in it.
    They are None for values that do not follow from quantiles.
    """

    def __init__(self) -> None:
        super().__init__()
        grid = (torch.arange(POINTS, dtype=torch.float64, device="cpu") + 0.5) / POINTS
        normal = torch.special.ndtri(grid)
        self.uniform = (grid - 0.5) / grid.std(correction=0) / math.sqrt(12) + 0.5
        self.normal = normal / normal.std(correction=0)
        self.values: dict[tuple[int, int], Tensor | None] = {}
        self.random: set[int] = set()
        """The memory of tensors with random values."""
        self._memory: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_meta:
            return result
        name, key = func.overloadpacket.__name__, self._key(result)
        tensors = [value for value in args if isinstance(value, Tensor)]
        if name == "normal_":
            mean, std = (*map(float, args[1:]), *(0.0, 1.0)[len(args) - 1 :])
            self._fill(key, mean + std * self.normal)
        elif name == "uniform_":
            low, high = (*map(float, args[1:]), *(0.0, 1.0)[len(args) - 1 :])
            self._fill(key, low + (high - low) * self.uniform)
        elif name in ("zero_", "fill_") and not tensors[1:]:
            self.values[key] = torch.full_like(self.normal, float(args[1]) if len(args) > 1 else 0.0)
        elif name == "copy_" or func is TO_COPY:
            values = self.values.get(self._key(tensors[-1]))
            self._take(key, None if values is None else values.clone(), tensors[-1:])
        elif not func.is_view:
            pointwise = torch.Tag.pointwise in func.tags and all(value.shape in (result.shape, ()) for value in tensors)
            inputs = [self.values.get(self._key(value)) if isinstance(value, Tensor) else value for value in args]
            has_values = all(self.values.get(self._key(value)) is not None for value in tensors)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.random.add(key[0])
            self._take(key, func(*inputs, **kwargs) if pointwise and has_values else None, tensors)
        return result

    def _key(self, tensor: Tensor) -> tuple[int, int]:
        memory = tensor.untyped_storage()
        self._memory[id(memory)] = memory  # as long as it exists, no other memory has its id
        return id(memory), int(tensor.storage_offset())

    def _fill(self, key: tuple[int, int], values: Tensor) -> None:
        """Record values that are random."""
        self.values[key] = values
        self.random.add(key[0])

    def _take(self, key: tuple[int, int], values: Tensor | None, sources: Sequence[Tensor]) -> None:
        """Record values that are computed from tensors; None for values without quantiles."""
        self.values[key] = values if values is not None and values.shape == self.normal.shape else None
        if any(self._key(source)[0] in self.random for source in sources):
            self.random.add(key[0])


@dataclass(frozen=True)
class InitialValues:
    """Quantiles of the initial values of a parameter, by the offset of the range that was filled with them."""

    quantiles: Mapping[int, Tensor | None]
    """None for values that depend on their position."""
    is_random: bool

    @property
    def spread(self) -> float | None:
        """The standard deviation of the first range; None if it is constant or unknown."""
        first = self.quantiles.get(0)
        return None if first is None else float(first.std(correction=0)) or None

    @property
    def is_known(self) -> bool:
        """False if the values are random without quantiles, or if nothing filled the parameter on the meta device."""
        return bool(self.quantiles) and not (self.is_random and None in self.quantiles.values())


def initial_values(model: fx.GraphModule) -> dict[str, InitialValues]:
    """Return the initial values of each parameter of a model on the meta device."""
    with _Quantiles() as fills:
        initialize(model, model.meta["graph"])
    values = {}
    for name, parameter in model.named_parameters():
        memory = id(parameter.untyped_storage())
        ranges = {offset: filled for (owner, offset), filled in fills.values.items() if owner == memory}
        values[name] = InitialValues(ranges, memory in fills.random)
    return values


def _ratios(name: str, growths: Sequence[Growth], values: InitialValues, base: InitialValues) -> Iterator[float]:
    """Yield the factor from the initial values of each matrix in a weight to its initial values at the base sizes."""
    if not values.is_known or not base.is_known:
        message = (
            f"the initial values of `{name}` must be filled by operations on single values, also on the meta device"
        )
        raise Invalid("base", message, help="fill them by `normal_` or `uniform_`, and not by `trunc_normal_`")
    offset = base_offset = 0
    for growth in growths:
        yield _ratio(name, values.quantiles.get(offset), base.quantiles.get(base_offset))
        offset += math.prod(growth.shape)
        base_offset += math.prod(growth.base)


def _ratio(name: str, values: Tensor | None, base: Tensor | None) -> float:
    """Return the factor from initial values to the initial values at the base sizes; 1 for constants."""
    if values is None or base is None or not (values.std() or base.std()):
        return 1.0
    size, base_size = float(values.abs().max()), float(base.abs().max())
    ratio = base_size / size if size else 0.0
    if not ratio or float((values * ratio - base).abs().max()) > TOLERANCE * base_size:
        message = f"the initial values of `{name}` at the two sizes must differ only by a factor"
        raise Invalid("base", message, help="choose a different `init`")
    return ratio


@torch.no_grad()
def scale_initial_values(model: nn.Module, rules: Rules | None) -> None:
    """Multiply the initial values of a new model by the factors of its rules."""
    for name, rule in ({} if rules is None else rules).items():
        parameter, scales = model.get_parameter(name), rule.scales
        factors = {factor for _, factor in scales}
        if len(factors) == 1:
            if factors != {1.0}:
                parameter.mul_(factors.pop())
            continue
        rows = torch.cat([torch.full((count,), factor) for count, factor in scales])
        shape = parameter.shape
        full = rows.to(parameter.dtype)[:, None].expand(shape).contiguous()
        parameter.mul_(part(full, parameter))
