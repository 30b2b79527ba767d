"""The costs of one step of a model, counted by running it once on the meta device, where nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import fx

from tfkit.arguments import Positive, checked, name_of
from tfkit.building.edits import AnyModel, MeasuredModel, as_model
from tfkit.building.guarantees import Watch
from tfkit.building.placement import AnyDtype, dtype_of
from tfkit.component import Cached
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.decode_split import split_for_decoding, split_if_decodable, static_inputs
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import fixed_length, fixed_lengths, length_of, max_len, max_len_text
from tfkit.tools.build.first_run import forward_error
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.common.memory_needs import cached_bytes, size_of
from tfkit.tools.common.modes import LENGTH, Mode, Optimizer
from tfkit.tools.common.ownership import By, added_owner, in_rows, owners_of
from tfkit.tools.common.pages import notebook_table
from tfkit.tools.common.units import bytes_text, flops_text
from tfkit.tools.cost.counter import Kernels, Observer
from tfkit.tools.cost.devices import Device
from tfkit.tools.cost.model_step import StepShape, make_inputs, make_step, memory_of
from tfkit.tools.cost.watch_step import Seen, frames_of, layers_of, watch_step
from tfkit.tools.params.count import active_of


class UncountableError(SpecError):
    """The model does not run on the meta device. Components of plugins may not support it."""


_STATES = {"adamw": 2, "sgd_momentum": 1, "sgd": 0}


@checked
def cost(
    graph: AnyModel,
    *,
    batch: Positive = 1,
    length: Positive | None = None,
    mode: Mode = "train",
    dtype: AnyDtype | None = None,
    optimizer: Optimizer | None = None,
    memory_length: Positive | None = None,
    recompute: bool = False,
    kernels: Kernels = "cuda",
    merge: bool = True,
) -> Cost:
    """Count the costs of one step of a model by component: FLOPs, bytes moved and memory.

    Nothing is allocated, and equal layers run only once, so the model may have any size. Of a built model, a copy
    without values runs with all of its edits; only the pairs that a mask hides, and the caches, follow from the spec.

    Args:
        graph: a spec, or a built model.
        batch: number of sequences.
        length: tokens per sequence; by default 2,048, or the model's `max_len` if it is smaller.
        mode: `train`: forward, the loss of `tfkit.Loss`, and backward. `prefill`: a prompt of `length` tokens is read
            into the caches, with logits of its last token. `decode`: one token, number `length`, for each
            sequence. For a model that cannot be decoded, `prefill` is its forward pass.
        dtype: type of weights, activations, gradients and optimizer states; by default the type of a built model, or
            bfloat16.
        optimizer: the optimizer of a training step, from `OPTIMIZERS`; by default `adamw`.
        memory_length: tokens that cross-attention attends to; by default `length`.
        recompute: layers save only their inputs, and the backward pass recomputes them, as with
            `build(recompute=True)`: the FLOPs of the backward pass include the second forward pass.
        kernels: the device whose kernels determine what is saved for the backward pass; only attention and dropout
            differ.
        merge: run one of several equal layers, and count its costs for all of them.

    Raises:
        SpecError: `length` is beyond the model's `max_len`, or the model cannot be decoded; `UncountableError` if it
            does not run on the meta device.
        ValueError: an argument is out of its range, or has no effect.
    """
    measured = as_model(graph, "its modules are counted; hidden pairs and caches follow from the spec")
    graph = measured.graph
    default = torch.bfloat16 if measured.module is None else next(measured.module.parameters()).dtype
    dtype, train = dtype_of(dtype or default), mode == "train"
    for name, value in (("optimizer", optimizer), ("recompute", recompute)):
        if value and not train:
            raise ValueError(f"`{name}` has no effect without a backward: omit it, or use mode='train'")
    shape = shape_of(graph, mode, batch, length, memory_length)
    model = build_with_weights(measured, None, device="meta", dtype=dtype)
    optimizer = (optimizer or "adamw") if train else None
    model.train(train)
    parts, layers = _unmeasured_components(model), layers_of(model)
    step = make_step(model, make_inputs(graph, shape, dtype), shape)
    try:
        seen = watch_step(model, step, kernels=kernels, train=train, merge=merge and not measured.edits)
    except SpecError:
        raise
    except Exception as error:
        raise _uncountable_error(measured, shape, dtype, error) from error
    return Cost(
        name=graph.name,
        mode=mode,
        batch=batch,
        length=shape.length,
        memory_length=shape.memory_length,
        dtype=name_of(dtype),
        optimizer=optimizer,
        recompute=recompute,
        parts=tuple(
            _measured_component(part, seen, train=train, again=recompute and part.layer in layers) for part in parts
        ),
        memory=_memory_cost(model, graph, seen, shape, optimizer),
    )


def shape_of(graph: Graph, mode: Mode, batch: int, length: int | None, memory_length: int | None) -> StepShape:
    """Return the shape of the step. Raise ValueError or SpecError if an argument is out of its range."""
    limit, once = max_len(graph), static_inputs(graph)
    if memory_length is not None and not once:
        raise ValueError(f"memory_length ({memory_length}) has no effect: `{graph.name}` reads one sequence")
    fixed, fixed_once = fixed_length(graph), once and set(once) <= fixed_lengths(graph).keys()
    if fixed_once and memory_length is not None:
        raise ValueError(f"memory_length ({memory_length}) has no effect: the spec fixes the length of `{once[0]}`")
    length = length_of(graph, length)
    length = min(LENGTH, limit or LENGTH) if length is None else length
    if once:
        memory_length = fixed_lengths(graph)[once[0]] if fixed_once else memory_length or length
    longest = max(0 if fixed else length, 0 if fixed_once else memory_length or 0)
    if limit is not None and longest > limit:
        raise SpecError(Diagnostic(f"{longest} tokens are more than {max_len_text(limit)}"))
    if mode == "decode":
        split_for_decoding(graph)
    return StepShape(mode, batch, length, memory_length)


def _uncountable_error(
    measured: MeasuredModel, shape: StepShape, dtype: torch.dtype, error: Exception
) -> UncountableError:
    """Return the error of a step that failed. Run the step again to find the component that fails."""
    model = build_with_weights(measured, None, device="meta", dtype=dtype)
    watch = Watch(model)
    with suppress(Exception), watch.watching():
        make_step(model, make_inputs(measured.graph, shape, dtype), shape)(Observer(model.parameters()))
    return UncountableError(forward_error(model, watch.running, error))


def _unmeasured_components(model: fx.GraphModule) -> list[ComponentCost]:
    """Return the components with their parameters."""
    modules, parts = dict(model.named_modules()), owners_of(model) | {"": added_owner("")}
    counts: dict[str, list[tuple[int, int]]] = {path: [] for path in frames_of(model)}
    for path, weight in model.named_parameters():
        frame = holder = path.rpartition(".")[0]
        while frame and frame not in counts:
            frame = frame.rpartition(".")[0]
        counts.setdefault(frame, []).append((weight.numel(), active_of(modules[holder], weight)))
    return [
        ComponentCost(
            path=path,
            component=parts[path].component,
            label=parts[path].label,
            node=parts[path].node,
            layer=parts[path].layer,
            parameters=sum(count for count, _ in weights),
            active_parameters=sum(active for _, active in weights),
        )
        for path, weights in counts.items()
    ]


def _measured_component(part: ComponentCost, seen: Seen, *, train: bool, again: bool) -> ComponentCost:
    """Return a component with its measurements; with `again`, the backward pass repeats its forward pass."""
    tallies = seen.tallies.get(part.path, [])
    forward, backward = (sum(tally.flops[phase] for tally in tallies) for phase in (0, 1))
    hidden, hidden_back = (round(sum(tally.hidden[phase] for tally in tallies)) for phase in (0, 1))
    scores, scores_back = (sum(tally.scores[phase] for tally in tallies) for phase in (0, 1))
    saved = sum(tally.saved for tally in tallies) + seen.extra.get(part.path, 0)
    moved = sum(tally.moved for tally in tallies)
    moved_back = saved + sum(tally.moved_back for tally in tallies) if train else 0
    return replace(
        part,
        flops_forward=forward,
        flops_backward=backward + again * forward,
        scores_forward=scores,
        scores_backward=scores_back + again * scores,
        visible_forward=forward - hidden,
        visible_backward=backward - hidden_back + again * (forward - hidden),
        saved=saved,
        traffic_forward=moved,
        traffic_backward=moved_back + again * moved,
    )


def _memory_cost(
    model: fx.GraphModule, graph: Graph, seen: Seen, shape: StepShape, optimizer: str | None
) -> MemoryCost:
    """Return the memory use; `optimizer` is None unless training."""
    weights = size_of(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and optimizer is not None]
    gradients = sum(parameter.nbytes for parameter in trained)
    states = (
        0
        if optimizer is None
        else sum(parameter.numel() * bytes_of_states(optimizer, parameter.itemsize) for parameter in trained)
    )
    per_token, per_sequence, cache = _cache_bytes(graph, shape, next(model.parameters()).dtype)
    runs = [run for _, run in seen.layers.calls] if optimizer is not None else []
    saved = sum(tally.saved for path in frames_of(model) for tally in seen.tallies.get(path, ()))
    saved += sum(seen.extra.values())
    base = weights + states + (cache if shape.mode == "decode" else 0)
    return MemoryCost(
        weights=weights,
        gradients=gradients,
        optimizer=states,
        activations=saved,
        activations_recomputed=saved - sum(run.frees for run in runs) + max((run.keeps for run in runs), default=0),
        cache=0 if optimizer is not None else cache,
        cache_per_token=per_token,
        states=per_sequence,
        peak=base + seen.layers.peak(recompute=False),
        peak_recomputed=base + seen.layers.peak(recompute=True),
    )


def bytes_of_states(optimizer: str, itemsize: int) -> int:
    """Return the bytes that an optimizer stores for each number of a weight."""
    if optimizer != "adamw_float32":
        return _STATES[optimizer] * itemsize
    return 2 * max(4, itemsize) + (4 if itemsize < 4 else 0)


def _cache_bytes(graph: Graph, shape: StepShape, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the bytes cached for one more token of one sequence, for its states, and for all tokens of the batch."""
    parts = split_if_decodable(graph)
    if parts is None:
        return 0, 0, 0
    total = cached_bytes(parts.cached, shape.length, dtype)
    for node, state in parts.step_nodes.values():
        total += sum(cached_bytes(layer, memory_of(node, shape), dtype) for layer in state.memory_caches)
    slots = [entry for entry in parts.cached if isinstance(entry, Cached)]
    return cached_bytes(slots, 1, dtype), cached_bytes(parts.cached, 0, dtype), total * shape.batch


# ---- the costs of a model as data: components that add up, memory, and the least time that a device needs ----


@dataclass(frozen=True)
class Amounts:
    """Quantities to add up. FLOPs count a multiplication and an addition as two; bytes are in the model's type.

    Attributes:
        flops_forward: FLOPs of matrix products, with every pair of query and key, including hidden pairs.
        flops_backward: FLOPs of the backward; 0 unless training. With `recompute`, they include the second forward.
        scores_forward: the part of `flops_forward` for the query-key pairs of attention.
        scores_backward: the part of `flops_backward` for the query-key pairs of attention.
        visible_forward: FLOPs without the pairs that the mask hides, as in a kernel that skips them.
        visible_backward: FLOPs of the backward without the pairs that the mask hides.
        parameters: weights of the component. Weights that are used twice are counted once, for their owner.
        active_parameters: weights that one token is multiplied by: of routed experts, the chosen experts.
        saved: bytes that the forward saves for the backward.
        traffic_forward: minimum bytes to move: weights, inputs, outputs and cache, each once.
        traffic_backward: minimum bytes to move in the backward: saved tensors, weights, and all their gradients.
    """

    flops_forward: int = 0
    flops_backward: int = 0
    scores_forward: int = 0
    scores_backward: int = 0
    visible_forward: int = 0
    visible_backward: int = 0
    parameters: int = 0
    active_parameters: int = 0
    saved: int = 0
    traffic_forward: int = 0
    traffic_backward: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward."""
        return self.flops_forward + self.flops_backward

    @property
    def visible(self) -> int:
        """FLOPs of forward and backward without hidden pairs."""
        return self.visible_forward + self.visible_backward

    @property
    def traffic(self) -> int:
        """Bytes moved by forward and backward."""
        return self.traffic_forward + self.traffic_backward

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.traffic if self.traffic else 0.0


@dataclass(frozen=True)
class ComponentCost(Amounts):
    """One component of the running model; `component`, `label`, `node` and `layer` as in an `Ownership`.

    Attributes:
        path: path of the module, as in the state dict.
    """

    path: str = ""
    component: str = ""
    label: str = ""
    node: str = ""
    layer: str = ""


@dataclass(frozen=True)
class CostRow(Amounts):
    """The sum of all components with the same name, or of one node or layer."""

    name: str = ""
    label: str = ""


@dataclass(frozen=True)
class MemoryCost:
    """Memory use of a step, in bytes.

    Attributes:
        weights: parameters and buffers.
        gradients: gradients of the trained parameters.
        optimizer: the optimizer's states.
        activations: bytes that the full forward saves for the backward.
        activations_recomputed: `activations` if only layer inputs are saved, and one layer at a time is recomputed.
        cache: keys, values and states, and everything else that is cached for tokens, for all sequences of the batch.
        cache_per_token: cached bytes of one token of one sequence, if the token is within every window.
        states: bytes of the states of one sequence, which do not grow with its length.
        peak: peak memory use of a step.
        peak_recomputed: the peak with recomputed layers.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    activations_recomputed: int
    cache: int
    cache_per_token: int
    states: int
    peak: int
    peak_recomputed: int


@dataclass(frozen=True)
class Floor:
    """Minimum seconds on a device: max(FLOPs / peak FLOPs, bytes / bandwidth), component by component.

    Attributes:
        device: the name of the device.
        compute: seconds if only FLOPs counted.
        transfer: seconds if only bytes counted.
        seconds: the sum over components of the larger of both times, because components run one after the other.
        fits: True if the peak memory fits into the device.
    """

    device: str
    compute: float
    transfer: float
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Cost:
    """The costs of one step of a model: a training step, the reading of a prompt, or one more token.

    Attributes:
        name: name of the spec.
        mode: see `tfkit.cost`.
        batch: number of sequences.
        length: tokens of each sequence; in decode, tokens in the cache including the newest token.
        memory_length: tokens that cross-attention attends to; None without cross-attention.
        dtype: type of weights and activations.
        optimizer: the optimizer whose states are counted; None unless training.
        recompute: True if the backward pass recomputes layers. `memory` has the peaks of both cases.
        parts: every component that runs or has parameters, in the order of the model.
        memory: bytes by their purpose.
    """

    name: str
    mode: Mode
    batch: int
    length: int
    memory_length: int | None
    dtype: str
    optimizer: str | None
    recompute: bool
    parts: tuple[ComponentCost, ...]
    memory: MemoryCost

    @property
    def total(self) -> CostRow:
        """The sum of all components."""
        return add_up("total", "total", self.parts)

    def rows(self, by: By = "component") -> tuple[CostRow, ...]:
        """Return the components in rows that add up to `total`."""
        return tuple(row for row, _ in self.groups(by))

    def groups(self, by: By = "component") -> tuple[tuple[CostRow, list[ComponentCost]], ...]:
        """Return the rows with their components."""
        return tuple((add_up(name, label, parts), parts) for name, label, parts in in_rows(self.parts, by))

    @property
    def peak(self) -> int:
        """Peak memory of the step, in bytes."""
        return self.memory.peak_recomputed if self.recompute else self.memory.peak

    def floor(self, device: Device, parts: Iterable[ComponentCost] | None = None, *, visible: bool = False) -> Floor:
        """Return the minimum time of a step on a device.

        Args:
            device: the limits of the device, see `tfkit.tools.cost.devices`.
            parts: the components to sum over; by default all components.
            visible: omit the query-key pairs that the mask hides.

        Raises:
            ValueError: the device does not compute in this type.
        """
        peak = device.flops(self.dtype)
        compute = transfer = seconds = 0.0
        for part in self.parts if parts is None else parts:
            for flops, moved in part_phases(part, visible):
                compute += flops / peak
                transfer += moved / device.bandwidth
                seconds += max(flops / peak, moved / device.bandwidth)
        return Floor(device.name, compute, transfer, seconds, self.peak <= device.memory)

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        columns = ("component", "FLOPs", "bytes moved", "parameters")
        rows = [
            (row.label, flops_text(row.flops), bytes_text(row.traffic), f"{row.parameters:,}")
            for row in (*self.rows(), self.total)
        ]
        return notebook_table(f"{self.name}: {self.mode}, {self.dtype}", columns, rows)


def part_phases(part: Amounts, visible: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the FLOPs and bytes of the forward pass, and of the backward pass."""
    forward, backward = part.flops_forward, part.flops_backward
    if visible:
        forward, backward = part.visible_forward, part.visible_backward
    return (forward, part.traffic_forward), (backward, part.traffic_backward)


def add_up(name: str, label: str, parts: Iterable[Amounts]) -> CostRow:
    """Return the sum of components as a row."""
    amounts = list(parts)
    return CostRow(
        **{field: sum(getattr(part, field) for part in amounts) for field in _SUMMED_FIELDS}, name=name, label=label
    )


_SUMMED_FIELDS = tuple(Amounts.__dataclass_fields__)
