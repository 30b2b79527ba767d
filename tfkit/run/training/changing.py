"""Numbers of the model and of the loss that change by step, as `by_step` of a run describes.

The modules are built once, with the largest values, and the values of a step are set as attributes of these modules.
The attributes of the model are found by building it with two values. If anything else differs between both, a step
would not compute what the spec with its value describes, and the run is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from tfkit.building.builder import assemble_model, graph_of
from tfkit.building.edits import OF_TORCH, SCALAR_TYPES, module_differences
from tfkit.component import Config, FieldPath
from tfkit.run.checked_run import Run
from tfkit.run.contract import LossConfig, OutputConfig
from tfkit.run.run_meaning import content_paths
from tfkit.spec.document import MODEL

DESCRIPTION = ("graph", "components", "given")
"""The keys of `model.meta` that describe the values of a model."""
Attribute = tuple[str, str]
"""The path of a module, and the name of one of its attributes."""


class ChangingValues:
    """The numbers of a run that change by step, in a model and its loss that were built with their largest values.

    Raises SpecError if a module does not have a number as an attribute, or if more depends on it.
    """

    def __init__(self, run: Run, model: fx.GraphModule) -> None:
        self._run, self._models = run, [model]
        self._largest = {path: max(values.values) for path, values in run.by_step.items()}
        self._values = dict(self._largest)
        self._of_model: dict[FieldPath, list[Attribute]] = {}
        self._of_loss: dict[FieldPath, nn.Module] = {}
        for path, values in run.by_step.items():
            if path[0] == MODEL and path not in self._of_model:  # layers with equal values may share modules
                equal = [other for other, of_other in run.by_step.items() if (other[0], of_other) == (MODEL, values)]
                self._of_model |= dict.fromkeys(equal, self._attributes(equal))
        self.terms: Mapping[str, OutputConfig] = run.config.loss.terms
        """The terms of the loss, with their weights of the current step."""

    def follow(self, loss: nn.Module) -> None:
        """Set the values in the loss of the model as well, and in copies of the model that the loss contains."""
        self._models += _copies(self._run, self._models[0], loss)
        for path in self._run.by_step:
            if path[0] != MODEL and (module := _module_of_loss(self._run, loss, path)) is not None:
                self._of_loss[path] = module

    def _attributes(self, paths: Sequence[FieldPath]) -> list[Attribute]:
        """Return the attributes of the modules that have the number of some fields of the model."""
        largest, values = self._largest[paths[0]], {*self._run.by_step[paths[0]].values}
        listed = [largest / 2] if isinstance(largest, float) else sorted(values - {largest})
        if len(listed) > MAX_BUILDS:  # of a linear change
            listed = [listed[0], listed[-1]]
        first, attributes = self._assembled(self._run), list[Attribute]()
        for value in listed:
            try:
                second = self._assembled(self._run.with_changes(dict.fromkeys(paths, value)))
                attributes = _changed_attributes(first, second, largest, value)
            except ValueError as error:
                name = self._run.file.changing[paths[0]]
                message = f"`{name}` cannot change by step: with {value} in place of {largest}, {error}"
                raise self._run.error(message, "by_step", name) from error
            for path, attribute in attributes:
                setattr(first.get_submodule(path), attribute, largest)
        return attributes

    def _assembled(self, run: Run) -> fx.GraphModule:
        with torch.device("meta"):
            return assemble_model(run.graph, attention_backend=self._run.config.machine.attention)

    def apply(self, step: int) -> None:
        """Set the values of a step; before the first step, of the first step."""
        self._set(self._run.values_at(step))

    def _set(self, values: Mapping[FieldPath, Any]) -> None:
        changed = {path: value for path, value in values.items() if self._values[path] != value}
        if not changed:
            return
        self._values = dict(values)
        for path, value in changed.items():
            for module_path, attribute in self._of_model.get(path, ()):
                for model in self._models:
                    setattr(model.get_submodule(module_path), attribute, value)
            if path in self._of_loss:
                setattr(self._of_loss[path], path[-1], value)
        if any(path[0] != MODEL for path in changed):
            of_loss = {path: value for path, value in values.items() if path[0] != MODEL}
            self.terms = self._run.file.changed(of_loss).config.loss.terms
        if any(isinstance(value, int) for path, value in changed.items() if path[0] == MODEL):
            self.describe()  # caches have the size of a window

    def describe(self) -> None:
        """Give the models the graph of their current values, which is written with their weights."""
        if self._of_model:
            described = self._assembled(self.run).meta
            for model in self._models:
                model.meta |= {key: described[key] for key in DESCRIPTION}

    @property
    def run(self) -> Run:
        """The run with its current values."""
        return self._run.with_changes(self._values)

    @contextmanager
    def as_built(self) -> Iterator[None]:
        """Set the values with which the modules were built, and restore the current values on exit."""
        values, described = self._values, [{key: model.meta[key] for key in DESCRIPTION} for model in self._models]
        self._set(self._largest)
        self.describe()
        try:
            yield
        finally:
            self._set(values)
            for model, description in zip(self._models, described, strict=True):
                model.meta |= description


MAX_BUILDS = 8
"""Maximum number of values of a change in jumps with which a model is built for a comparison."""


def _copies(run: Run, model: fx.GraphModule, loss: nn.Module) -> list[fx.GraphModule]:
    """Return the copies of the model in its loss, such as a teacher by averages; not a model that a file determines."""
    if not run.by_step or any(True for _ in content_paths((), run.config.loss)):
        return []
    spec, modules = graph_of(model).spec.model, loss.modules()
    models = [module for module in modules if isinstance(module, fx.GraphModule) and "graph" in module.meta]
    return [module for module in models if module is not model and graph_of(module).spec.model == spec]


def _changed_attributes(first: fx.GraphModule, second: fx.GraphModule, before: Any, after: Any) -> list[Attribute]:
    """Return the attributes that are `before` in one model and `after` in the other, and set them to `after` in both.

    Raise ValueError if there are none, or if anything else differs.
    """
    attributes, counterparts = list[Attribute](), dict(second.named_modules(remove_duplicate=False))
    for path, module in first.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if name in OF_TORCH or path not in counterparts:
                continue
            twin = vars(counterparts[path]).get(name)
            if type(value) is type(twin) is type(before) and (value, twin) == (before, after):
                attributes.append((path, name))
            elif isinstance(value, (*SCALAR_TYPES, Config)) and value != twin:
                raise ValueError(f"`{path}.{name}` of the model changes as well")
    for path, name in attributes:
        setattr(first.get_submodule(path), name, after)
    shapes = [{name: buffer.shape for name, buffer in model.named_buffers()} for model in (first, second)]
    if differences := module_differences(first, second):
        raise ValueError(f"more of the model changes: {differences[0][0]}")
    if shapes[0] != shapes[1]:
        raise ValueError("the buffers of the model change as well")
    if not attributes:
        raise ValueError("no module of the model changes")
    return attributes


def _module_of_loss(run: Run, loss: nn.Module, path: FieldPath) -> nn.Module | None:
    """Return the module of the loss that has a field as an attribute; None for the weight of a term."""
    name = run.file.changing[path]
    config: Any = run.config.loss
    module: Any = loss
    for inside in path[1:-1]:
        config = config[inside] if isinstance(config, Mapping) else getattr(config, inside)
        module = getattr(module, inside, None) if isinstance(config, LossConfig) else module
    if any(config is term for term in run.config.loss.terms.values()):
        if module is loss:
            return None
        message = f"`{name}` cannot change by step: the loss `{run.config.loss.kind_name()}` is built with its value"
        raise run.error(message, "by_step", name)
    value = getattr(config, path[-1])
    if not isinstance(module, nn.Module) or getattr(module, path[-1], None) != value:
        message = (
            f"the loss `{run.config.loss.kind_name()}` must have the attribute `{'.'.join(path[1:])}` to change it"
        )
        raise run.error(f"{message} by step", "by_step", name)
    return module
