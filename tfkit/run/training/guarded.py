"""Errors in the code of a run's kinds while the run trains or is evaluated: each names its kind and its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from tfkit.building.model import layer_of
from tfkit.component import Component
from tfkit.run.checked_run import Run
from tfkit.run.training.memory import is_out_of_memory


@contextmanager
def guarded(run: Run, model: fx.GraphModule, config: Component, method: str, *path: str) -> Iterator[None]:
    """Turn an exception of a method of a kind into its error, as `run.guarded`.

    Exceptions of the model that the method runs, and out-of-memory errors, are raised unchanged.
    """
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error) or layer_of(error, model) is not None:
            raise
        with run.guarded(config, method, *path):
            raise
