"""The first run of a model: build it, run one forward on random inputs, and report the output of every node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from tfkit.arguments import name_of
from tfkit.building.builder import build, evaluation_mode, graph_of
from tfkit.building.guarantees import Watch
from tfkit.building.instrument import instrument_model
from tfkit.checkpoint.tensor_names import counts_by_module
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph, Node, component_path, wire_sources
from tfkit.plugin.registry import last_line
from tfkit.spec.messages import kind_of
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.common.memory_needs import check_memory, size_of
from tfkit.tools.common.model_inputs import random_inputs


@dataclass(frozen=True)
class NodeReport:
    """The output of a node, or an input of the model. `block` is None for inputs."""

    name: str
    block: str | None
    reads: tuple[str, ...]
    shape: tuple[int, ...]
    parameters: int


@dataclass(frozen=True)
class FirstRun:
    """A model that has been built and has run once. Times are in seconds.

    Attributes:
        left_out: the numbers of tensors of the weights that the model omits, by module.
    """

    name: str
    nodes: tuple[NodeReport, ...]
    code: str
    parameters: int
    bytes: int
    dtype: str
    device: str
    build_time: float
    forward_time: float
    left_out: Mapping[str, int]


def first_run(
    graph: Graph,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    weights: Path | None = None,
    allow_change: bool = False,
    stage: Callable[[str], Any] = lambda text: None,
) -> tuple[fx.GraphModule, FirstRun]:
    """Build a model, run it on random inputs, and return it with the report.

    Its weights come from `weights`, see `tfkit.build`, or else random. `stage` is called with the name of each
    stage. Raises SpecError if there is not enough memory, before any is taken, and if the forward of a component fails.
    """
    stage("building")
    start = time.perf_counter()
    if torch.device(device).type != "meta" and weights is None:  # the type of weights determines their size
        check_memory(build(graph, device="meta", dtype=dtype), device)
    with _memory_errors(device):
        model = build_with_weights(graph, weights, allow_change=allow_change, device=device, dtype=dtype, seed=seed)
        instrument_model(model)
    built = time.perf_counter()
    stage("running it once")
    dtype = next((parameter.dtype for parameter in model.parameters()), dtype or torch.get_default_dtype())
    inputs = random_inputs(graph, device=device, dtype=dtype, seed=seed)
    shapes = run_watched(model, inputs).shapes
    done = time.perf_counter()
    reports = [NodeReport(name, None, (), tuple(value.shape), 0) for name, value in inputs.items()]
    reports += [_node_report(model, node, shapes[node.module]) for node in graph.nodes]
    return model, FirstRun(
        name=graph.name,
        nodes=tuple(reports),
        code=str(model.code).rstrip(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=size_of(model),
        dtype=name_of(dtype),
        device=str(device),
        build_time=built - start,
        forward_time=done - built,
        left_out=counts_by_module(model.meta.get("left_out", ())),
    )


@contextmanager
def _memory_errors(device: torch.device | str) -> Iterator[None]:
    """Raise SpecError in place of errors about too little memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise SpecError(Diagnostic(f"not enough memory on {device}: {_first_line(error)}")) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _node_report(model: fx.GraphModule, node: Node, shape: tuple[int, ...]) -> NodeReport:
    counted = model.get_submodule(node.name).parameters() if node.module == node.name else ()
    parameters = sum(parameter.numel() for parameter in counted)
    return NodeReport(
        node.name, node.config.kind_name(), tuple(dict.fromkeys(wire_sources(node.wires))), shape, parameters
    )


def run_watched(model: fx.GraphModule, inputs: Mapping[str, Tensor]) -> Watch:
    """Run a model once, and check the results of its components.

    Raises SpecError if a component fails, or silently breaks a guarantee.
    """
    graph, watch = graph_of(model), Watch(model)
    try:
        with evaluation_mode(model), torch.no_grad(), watch.watching():
            model(**inputs)
    except Exception as error:
        if not watch.broken:  # it may be the reason
            raise SpecError(forward_error(model, watch.running, error)) from error
    if watch.broken:
        raise SpecError(*(broken.diagnostic(graph) for broken in watch.broken))
    return watch


def forward_error(model: fx.GraphModule, running: Sequence[str], error: Exception) -> Diagnostic:
    """Return the error of a forward that failed in the innermost of the `running` components."""
    graph, components, path = graph_of(model), model.meta["components"], running[-1] if running else ""
    while path and path not in components:
        path = path.rpartition(".")[0]
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    if not path:
        return Diagnostic(f"the forward of `{graph.name}` fails: {cause}")
    component = components[path]
    location, provenance = component_path(graph, path.partition(".")[0], component), graph.spec.provenance
    name = f"{kind_of(type(component))} `{component.kind_name()}`"
    message = f"the forward of {name} fails, in `{path}`: {cause}"
    line = () if type(component).__module__.startswith("tfkit.") else last_line(type(component), error)
    return Diagnostic(message, provenance.span(location), ".".join(provenance.written(location)), line)
