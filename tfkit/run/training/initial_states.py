"""The state of an optimizer at the start of a run that takes it from the run of its initial weights.

The state moves with the weights. If a map repeats a value n times, divides it by d, and does not change the function,
then the gradient of each copy is the gradient of the value, times d / n. Averages of the gradient are therefore
multiplied by d / n, and averages of its square by the square of d / n. New values have no past: their averages of the
gradient are 0, and their averages of its square are the mean of the parameter. With 0, the first updates of Adam would
be several times larger than the rate.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, fx

from tfkit.building.builder import build
from tfkit.building.transfer import TransferRule, rules_of, source_and_rule
from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.links import pattern_of
from tfkit.checkpoint.pattern import UNCHANGED, ZERO
from tfkit.checkpoint.selection import check_matches, matches_any
from tfkit.checkpoint.weight_map import TensorLocation, tensor_locations_of
from tfkit.errors import Invalid, quoted
from tfkit.run.checked_run import Run
from tfkit.run.run_spec import WeightsConfig
from tfkit.run.training.checkpoint import SEPARATOR, checked_tensors, on_device_of
from tfkit.spec.extending import short_path
from tfkit.spec.folder import FACTS, OPTIMIZER, STATE, model_folder
from tfkit.spec.header import read_object

OPTIMIZER_KIND = re.compile(r"optimizer(\..+)?\.kind")
"""Paths of the kinds of a run's optimizers."""
POWERS = {"step": 0, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1}
"""The power of the gradient in each tensor of a state, by the name that torch's optimizers use."""


@dataclass(frozen=True)
class StateMove:
    """The weight of the old model whose state a weight takes, and the rule of the map."""

    source: TensorLocation
    rule: TransferRule | None

    def moved(self, tensor: Tensor, name: str, shape: tuple[int, ...], power: int, model: fx.GraphModule) -> Tensor:
        """Return an average of a power of the gradient, for a weight of the model; new values of a square are NaN."""
        if self.rule is None or self.rule.pattern is None:
            return tensor
        text, components = self.rule.pattern.replace(UNCHANGED, ZERO), model.meta["components"]
        pattern, sizes = pattern_of(text, len(shape), name, components, resizing=True)
        undivided = replace(pattern, divisor=1.0)
        values, old = (undivided.apply([part], sizes, [shape])[0] for part in (tensor, torch.ones_like(tensor)))
        factor = pattern.divisor * tensor.numel() / float(old.sum(dtype=torch.float64))
        return torch.where(old > 0, values * factor**power, math.nan if power > 1 else 0.0)


def initial_moves(model: fx.GraphModule, run: Run) -> dict[str, StateMove]:
    """Return the move of each weight whose state comes from another run.

    Raise `Invalid` or SpecError if the optimizer of the run cannot begin with that state.
    """
    config = run.config.weights
    assert config is not None
    folder = model_folder(Path(config.path))
    files = folder / OPTIMIZER, folder / STATE, folder.parent / FACTS
    if not all(path.is_file() for path in files):
        message = f"`states` needs the checkpoint of a run as weights; got {quoted(str(short_path(folder)))}"
        raise Invalid("states", message, help="remove `states`: the state of the optimizer then starts at zero")
    meaning = read_object(folder.parent / FACTS, max_values=None).get("meaning")
    kinds, old = (
        {path: value for path, value in values.items() if OPTIMIZER_KIND.fullmatch(path)}
        for values in (run.semantics.values, meaning if isinstance(meaning, dict) else {})
    )
    if kinds != old:
        names = ", ".join(map(str, old.values()))
        message = f"`states` needs the optimizer of the run that the weights come from, {names}"
        raise Invalid("states", f"{message}; got {', '.join(map(str, kinds.values()))}", help="remove `states`")
    with TensorFiles.open(folder / OPTIMIZER) as file:
        unknown = [name for name in file.names if name.partition(SEPARATOR)[2] not in POWERS]
    if unknown:
        message = f"the state of the optimizer has {quoted(unknown[0])}, whose values for other weights are not known"
        raise Invalid("states", message, help="remove `states`: the state of the optimizer then starts at zero")
    return state_moves(model, build(folder, device="meta"), config)


def state_moves(model: fx.GraphModule, source_model: fx.GraphModule, config: WeightsConfig) -> dict[str, StateMove]:
    """Return the move of each weight whose state is taken. Raise `Invalid` for a pattern without effect."""
    rules, old = rules_of(config.map or {}), tensor_locations_of(source_model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moves = {}
    for name, location in tensor_locations_of(model).items():
        source, rule = source_and_rule(name, rules)
        if location.parameter in trained and source in old and not matches_any(name, config.missing):
            moves[name] = StateMove(old[source], rule)
    check_matches("states", config.states, moves, (), "no trained weight that the weights fill matches")
    moves = {name: move for name, move in moves.items() if matches_any(name, config.states)}
    if by_rows := [name for name in moves if matches_any(name, config.tokens)]:
        message = f"the state of {quoted(by_rows[0])} cannot be taken, because `tokens` selects its rows"
        raise Invalid("states", message, help="use patterns without it")
    return moves


def set_initial_states(model: fx.GraphModule, optimizer: torch.optim.Optimizer, run: Run) -> str:
    """Set the state of an optimizer from the run that the weights come from, and return a description.

    In addition to the state, the state of one parameter is in memory. Raises as `initial_moves` does.
    """
    config = run.config.weights
    assert config is not None
    folder, moves = model_folder(Path(config.path)), initial_moves(model, run)
    locations, parameters = tensor_locations_of(model), dict(model.named_parameters())
    names: dict[str, list[str]] = {}
    for name in moves:
        names.setdefault(locations[name].parameter, []).append(name)
    with TensorFiles.open(folder / OPTIMIZER) as file:
        tensors = checked_tensors(file, folder / OPTIMIZER, read_object(folder / STATE).get("optimizer"))
    states: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        owner, _, key = path.partition(SEPARATOR)
        states.setdefault(owner, {})[key] = tensor
    for owner, of_owner in names.items():
        parameter, state = parameters[owner], dict[str, Tensor]()
        for name in of_owner:
            source, location = moves[name].source, locations[name]
            for key, tensor in states.get(source.parameter, {}).items():
                if not POWERS[key]:
                    state[key] = tensor
                    continue
                if key not in state:
                    state[key] = torch.full(parameter.shape, math.nan if POWERS[key] > 1 else 0.0, dtype=tensor.dtype)
                view = location.view({owner: state[key]})
                old = source.view({source.parameter: tensor})
                view.copy_(moves[name].moved(old, name, tuple(view.shape), POWERS[key], model))
        for key, tensor in state.items():
            if POWERS[key] > 1:
                tensor.nan_to_num_(nan=float(tensor.nanmean()))
            optimizer.state[parameter][key] = on_device_of(parameter, tensor)
    return f"{len(moves):,} of {len(locations):,} weights from {short_path(folder)}"
