"""Instruments that plugins add to models by the hook `tfkit_model_built`, which `tfkit.build` calls.

Tools that count, check or write models call `builder.build`, which does not call the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from torch import fx

from tfkit.building import builder
from tfkit.building.edits import MAX_DIFFERENCES, model_edits
from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.manager import unchanged_torch
from tfkit.torch_private.hooks import observing_hooks

P = ParamSpec("P")
M = TypeVar("M", bound=fx.GraphModule)


def _instrumented_build(build: Callable[P, M]) -> Callable[P, M]:
    @wraps(build)
    def build_instrumented(*args: P.args, **kwargs: P.kwargs) -> M:
        return instrument_model(build(*args, **kwargs))

    return build_instrumented


build = _instrumented_build(builder.build)


def instrument_model(model: M, *, in_run: bool = False) -> M:
    """Call `tfkit_model_built`, and return the model; raise SpecError if a plugin fails, or changes a run's model."""
    graph = builder.graph_of(model)
    if graph.hooks is not None:
        graph.hooks.act("tfkit_model_built", partial(_observing_plugin, model, in_run), model=model, graph=graph)
    return model


@contextmanager
def _observing_plugin(model: fx.GraphModule, in_run: bool, plugin: str) -> Iterator[None]:
    before = _model_changes(model) if in_run else set()
    with unchanged_torch(plugin), observing_hooks(model, f"plugin {plugin}"):
        yield
    if in_run and (changes := sorted(_model_changes(model) - before)):
        help = "write the change in the spec, or freeze parameters with `freeze` of the run"
        raise SpecError(
            Diagnostic("a plugin cannot change the model of a run", notes=tuple(changes[:MAX_DIFFERENCES]), help=help)
        )


def _model_changes(model: fx.GraphModule) -> set[str]:
    frozen = {f"{name} is frozen" for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozen.union(text for text, _ in model_edits(model))
