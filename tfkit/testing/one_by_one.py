"""Single properties of any built model; a broken one raises AssertionError."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn

from tfkit.graph.expand import Graph
from tfkit.tools.check.measure import TOLERANCE, Deviation, UnsupportedError
from tfkit.tools.check.properties import basics, forms, numbers, reading, steps, training
from tfkit.tools.check.runs import Inputs

__tracebackhide__ = True  # pytest shows the test that fails, not the functions of this module


def _raise_broken(measured: Iterable[Deviation]) -> None:
    """Raise AssertionError for the first deviation that is too large."""
    try:
        detail = next((measurement.detail for measurement in measured if measurement.broken), None)
    except UnsupportedError as error:
        detail = str(error)
    if detail is not None:
        raise AssertionError(detail)


def check_filled(graph: Graph) -> None:
    """Check that every parameter and buffer is filled from the seed: none is uninitialized, one seed gives one model.

    Buffers outside the state dict are included; a tensor that is neither parameter nor buffer is a fault.
    """
    _raise_broken(basics.unfilled_tensors(graph))


def check_state_dict(graph: Graph) -> None:
    """Check that a state dict carries the model over, bit by bit, into one that was built from another seed."""
    _raise_broken(forms.state_dict(graph))


def check_dtype(graph: Graph, dtype: torch.dtype) -> None:
    """Check that a model of another type computes in that type, and stays finite."""
    _raise_broken(numbers.computes_in(graph, dtype))


def check_causal(model: fx.GraphModule, inputs: Inputs, *, along: str) -> None:
    """Check that no value and no gradient of a later token of `along` reaches an earlier output [b, t, ...]."""
    _raise_broken(reading.later_values(model, inputs, along))
    _raise_broken(reading.later_gradients(model, inputs, along))


def check_padding(model: fx.GraphModule, inputs: Inputs) -> None:
    """Check that outputs of tokens do not depend on the amount or the contents of padding next to them."""
    _raise_broken(reading.padded_rows(model, inputs))


def check_alone(model: fx.GraphModule, inputs: Inputs) -> None:
    """Check that activations, norms and FFNs act on each position independently, and do not depend on their number."""
    _raise_broken(reading.positions_alone(model, inputs))


def check_gradients(model: nn.Module, inputs: Inputs) -> None:
    """Check that in train mode every parameter gets a gradient, all are finite, and some are not zero."""
    _raise_broken(training.parameter_gradients(model, inputs))


def check_script(model: nn.Module, *calls: Inputs) -> None:
    """Check that `torch.jit.script` takes the model, and that the scripted model returns the same."""
    _raise_broken(forms.scripted_outputs(model, *calls))


def check_capture(model: nn.Module, *calls: Inputs, backend: str | None = None) -> None:
    """Check that `torch.compile` captures the full model, once for all lengths. `calls` differ only in length.

    `backend` compiles the captured graph; by default, the graph runs as captured.
    """
    _raise_broken(forms.captured_outputs(model, *calls, backend=backend))


def check_cached(model: fx.GraphModule, inputs: Inputs, *, tolerance: float = TOLERANCE) -> None:
    """Check that a model read in steps has the outputs of one full forward over each sequence alone.

    The steps: the full sequence, uneven steps, single tokens, and several tokens after single tokens; with padding on
    the left, on the right, in between, and in all of a row; single tokens with the compiled step; a second batch in the
    caches of the first; rows that are repeated. The caches are made for `t` columns and filled to the last one.

    Args:
        model: a model that `tfkit.build` returned.
        inputs: inputs of the model, without padding: three rows or more, and for inputs read in steps `t` tokens, at
            least 8 and several times the size of a sliding window.
        tolerance: the largest difference, relative to the largest value if that is above 1.

    Raises:
        AssertionError: an output differs, or more than `t` tokens are taken.
        SpecError: the model needs full sequences.
    """
    _raise_broken(steps.read_in_steps(model, inputs, tolerance=tolerance))


def check_cached_step(model: fx.GraphModule, inputs: Inputs) -> None:
    """Check that the step of one token is captured once for all tokens, and that TorchScript takes a step of any size.

    Their results are also compared; see `check_cached` for the arguments.
    """
    _raise_broken(steps.step_as_program(model, inputs))
