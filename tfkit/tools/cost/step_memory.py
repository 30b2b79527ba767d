"""Memory and FLOPs of a training step, with activations in float32 or in bfloat16 under autocast.

The meta device does not support autocast. This module converts the arguments of the functions that torch lists for
CUDA, and each weight once: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tfkit.building.edits import MeasuredModel
from tfkit.graph.expand import Graph
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.cost.cost import shape_of
from tfkit.tools.cost.counter import Observer, Tallies, Tally
from tfkit.tools.cost.model_step import make_inputs, make_step
from tfkit.tools.cost.watch_step import frames_of, watch_step
from tfkit.torch_private.dispatch import unobserved


def _functions_named(*names: str) -> set[Callable[..., Any]]:
    homes = (torch, Tensor, F)
    return {getattr(home, name) for home in homes for name in names if name in dir(home)}


BFLOAT16_FUNCTIONS = _functions_named(
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "einsum", "prelu"
) | _functions_named(
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "addr"),
    "scaled_dot_product_attention",
)
"""Functions that run in bfloat16 under autocast."""
FLOAT32_FUNCTIONS = _functions_named(
    "softmax", "log_softmax", "layer_norm", "group_norm", "softplus", "cross_entropy", "nll_loss"
) | _functions_named(
    *("exp", "expm1", "log", "log1p", "log2", "log10", "pow", "__pow__", "__rpow__", "rsqrt", "reciprocal"),
    *("sum", "prod", "cumsum", "cumprod", "norm", "cosine_similarity", "erfinv", "acos", "asin", "cosh", "sinh", "tan"),
)
"""Functions that run in float32 under autocast."""


@dataclass(frozen=True)
class LayerMemory:
    """Memory, parameters and FLOPs of a layer. Memory is in bytes.

    Attributes:
        freed: activations that are not saved if the layer saves only its input.
        kept: activations that the layer saves in addition to its input and output.
        products: results of the layer's matrix products and of attention.
        casts: bfloat16 copies of the layer's weights.
        parameters: parameters of the layer that no earlier layer shares.
        forward: FLOPs of the layer's forward pass, without query-key pairs that a mask hides.
    """

    freed: int
    kept: int
    products: int
    casts: int
    parameters: int
    forward: int


@dataclass(frozen=True)
class StepMemory:
    """Memory that the forward of a step saves for the backward, in bytes, parameters, and FLOPs.

    Attributes:
        layers: the layers of each stack, by path.
        activations: all activations, including the layers.
        casts: weights outside of layers in bfloat16.
        parameters: all parameters.
        trained: parameters with a gradient.
        flops: FLOPs of forward and backward, without the pairs of query and key that a mask hides.
    """

    layers: dict[str, LayerMemory]
    activations: int
    casts: int
    parameters: int
    trained: int
    flops: int


def memory_of_step(model: Graph | MeasuredModel, sequences: int, length: int, *, bfloat16: bool) -> StepMemory:
    """Return the memory that a step saves for the backward. Nothing is allocated, and equal layers run once."""
    measured = model if isinstance(model, MeasuredModel) else MeasuredModel(model)
    graph = measured.graph
    shape = shape_of(graph, "train", sequences, length, None)
    built = build_with_weights(measured, None, device="meta", dtype=torch.float32).train()
    step, casts = make_step(built, make_inputs(graph, shape, torch.float32), shape), dict[Tallies, int]()

    def computed(watch: Observer) -> Any:
        with _Autocast(watch, casts) if bfloat16 else nullcontext():
            return step(watch)

    seen = watch_step(built, computed, kernels="cuda", train=True, merge=not measured.edits)
    parameters, calls = Counter[str](), Counter(path for path, _ in seen.layers.calls)
    for name, parameter in built.named_parameters():
        parameters[".".join(name.split(".")[:3])] += parameter.numel()
    layers = {
        path: LayerMemory(
            freed=run.frees,
            kept=run.keeps,
            products=sum(tally.products for tally in run.tallies.values()),
            casts=casts.get(run, 0),
            parameters=parameters[path],
            forward=calls[path] * _visible_flops(run.tallies.values(), 0),
        )
        for path, run in seen.layers.calls
    }
    # The loss is in no frame: its saved tensors are counted as logits and as gradients of the head.
    tallies = [tally for path in frames_of(built) for tally in seen.tallies.get(path, ())]
    runs = {run for _, run in seen.layers.calls}
    return StepMemory(
        layers,
        activations=sum(tally.saved for tally in tallies) + sum(seen.extra.values()),
        casts=sum(size for record, size in casts.items() if record not in runs),
        parameters=parameters.total(),
        trained=sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad),
        flops=_visible_flops(tallies, 0) + _visible_flops(tallies, 1),
    )


def _visible_flops(tallies: Iterable[Tally], phase: int) -> int:
    """Return the FLOPs of the forward, phase 0, or of the backward, phase 1, without hidden pairs."""
    return sum(tally.flops[phase] - round(tally.hidden[phase]) for tally in tallies)


class _Autocast(TorchFunctionMode):
    """Converts the arguments of functions; `casts` has the bytes of converted weights by component."""

    def __init__(self, watch: Observer, casts: dict[Tallies, int]) -> None:
        super().__init__()
        self._watch, self._casts = watch, casts
        self._weights: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BFLOAT16_FUNCTIONS or func in FLOAT32_FUNCTIONS:
            convert = self._short if func in BFLOAT16_FUNCTIONS else _as_float32
            args, kwargs = (
                _map_tensors(convert, args),
                {name: _map_tensors(convert, value) for name, value in kwargs.items()},
            )
        return func(*args, **kwargs)

    def _short(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(torch.bfloat16)
        key = self._watch.live.number(tensor)
        if key not in self._weights:
            with unobserved():
                short = tensor.to(torch.bfloat16)
            self._weights[key] = short
            self._watch.weights.add(self._watch.live.number(short))  # a converted weight is not an activation
            record = self._watch.position.record
            self._casts[record] = self._casts.get(record, 0) + short.nbytes
        return self._weights[key]


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _map_tensors(convert: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return convert(tree)
    return type(tree)(_map_tensors(convert, item) for item in tree) if type(tree) in (list, tuple) else tree
