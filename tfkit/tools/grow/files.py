"""The files of a grown model: a run that starts from it, or a folder with its weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import fx

from tfkit.building.builder import build
from tfkit.building.transfer import Transfer, changed_paths, fill_from_model
from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import check_run
from tfkit.run.read_run import RunText, read_run, resolve_run
from tfkit.run.run_spec import WeightsConfig, render_run
from tfkit.spec.extending import short_path
from tfkit.spec.folder import RUN
from tfkit.spec.source import parse
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.grow.growth import GrownStart
from tfkit.tools.grow.proof import initial_model


def write_run(
    source: Path, growth: GrownStart, old: Graph, file: Path, plugins: Plugins, *, states: bool = False
) -> None:
    """Write a run with the settings of the run in `source`, the larger model, and weights that a map gives.

    With `states`, the state of the optimizer grows, too.

    Raises SpecError if `source` is not a run, or has settings that belong to its sizes; or if the new run is invalid.
    """
    if not (source / RUN).is_file():
        message = f"a run must start from the folder of a run; {quoted(str(source))} has no {RUN}"
        raise SpecError(Diagnostic(message, help="name a folder for the larger model: -o DIR"))
    if file.resolve() == (source / RUN).resolve():
        message = f"the run of the larger model cannot replace the run that it starts from, {quoted(str(file))}"
        raise SpecError(Diagnostic(message, help="name a new file: -o FILE.yaml"))
    run = read_run(str(source), plugins)
    for key, value in {"adapters": run.config.adapters, "parametrization.base": run.base}.items():
        if value is not None:
            message = f"a run with `{key}` cannot grow: its value belongs to the sizes of the model"
            help = "name a folder for the larger model, and write a run that starts from it: -o DIR"
            raise SpecError(Diagnostic(message, help=help))
    models = [build(graph, device="meta") for graph in (old, growth.graph)]
    path = os.path.relpath(source, file.absolute().parent)
    changes = tuple(changed_paths(*models)) or False
    grown = growth.states if states else ()
    weights = WeightsConfig(path=path, **growth.weights, allow_change=changes, states=grown)
    config = run.config.model_copy(update={"name": file.stem, "weights": weights, "branch": None})
    text = render_run(config, growth.graph.spec)
    check_run(resolve_run(RunText(parse(text, str(file)), str(short_path(file))), plugins), plugins)
    write_file(file, text)


def grown_model(growth: GrownStart, old: Graph, *, seed: int, noise: float) -> fx.GraphModule:
    """Build the larger model in the dtype of the weights of the model.

    `noise` is the standard deviation of the noise that is added to repeated weights, relative to each weight's.
    """
    source = build(old)
    dtype = next(source.parameters()).dtype
    model = initial_model(growth.graph, seed=seed, dtype=dtype)
    assert old.weights is not None
    fill_from_model(model, source, old.weights, Transfer(**growth.weights, allow_change=True))
    if noise:
        _add_noise(model, growth, noise, seed)
    model.meta["filled_from"] = old.weights.absolute()
    return model


@torch.no_grad()
def _add_noise(model: fx.GraphModule, growth: GrownStart, noise: float, seed: int) -> None:
    generator, state = torch.Generator().manual_seed(seed), model.state_dict()
    locations = tensor_locations_of(model)
    for name in growth.repeated:
        view = locations[name].view(state)
        view += noise * view.std(correction=0) * torch.randn(view.shape, generator=generator).to(view)
