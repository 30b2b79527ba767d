"""Exceptions of a run's kinds during training and evaluation: each becomes an error with its kind and location."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from tfkit.building.model import layer_of
from tfkit.component import Component
from tfkit.run.checked_run import Run
from tfkit.run.training.memory import is_out_of_memory


@contextmanager
def guarded_component_call(
    run: Run, model: fx.GraphModule, config: Component, method: str, *path: str
) -> Iterator[None]:
    """Turn an exception of a kind's method into an error of that kind, as `run.guarded` does.

    Exceptions of the model that the method runs, and out-of-memory errors, are raised unchanged.
    """
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error) or layer_of(error, model) is not None:
            raise
        with run.guarded(config, method, *path):
            raise


@contextmanager
def guarded_loss_call(run: Run, model: fx.GraphModule, method: str) -> Iterator[None]:
    """Turn an exception of the loss of a run into an error of its kind."""
    try:
        yield
    except RuntimeError:  # of memory, or of the connection to another process
        raise
    except Exception:
        with guarded_component_call(run, model, run.config.loss, method, "loss"):
            raise
