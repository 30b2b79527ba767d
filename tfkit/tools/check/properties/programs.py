"""Properties of the model as a program: scripted, captured, exported, written out, it returns the same."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.builder import evaluating, inputs_of
from tfkit.errors import SpecError
from tfkit.tools.check.inputs import Inputs, call
from tfkit.tools.check.measure import DoesNotApplyError, Measured, distance, in_words, property_of
from tfkit.tools.check.places import compared
from tfkit.tools.check.subject import Subject
from tfkit.tools.export.torchscript_format import refusal, script
from tfkit.torch_private import compiler
from tfkit.torch_private.torchscript import as_written, quiet


@property_of("backends", "is alike with every attention backend", follows=("alone",))
def backends(subject: Subject) -> Iterator[Measured]:
    """The attention written out step by step, in the forward and in the gradients."""
    if not subject.attentions:
        raise DoesNotApplyError("the spec has no stack with attention")
    other = subject.build(attention_backend="eager")
    for padding in ("none", "left") if subject.padded else ("none",):
        run, detail = (
            partial(subject.run, subject.inputs(padding=padding)),
            "attention that is written out differs by {}",
        )
        yield from compared(subject.model, run, partial(run, other), detail, second=other)


def _calls(subject: Subject) -> list[Inputs]:
    """Return inputs of several lengths, with and without padding."""
    lengths = [max(1, subject.length - 4), subject.length]
    padded = [subject.inputs(length=n, padding="left") for n in lengths] if subject.padded else []
    return [subject.inputs(), *padded]


@property_of("script", "is the same by TorchScript", follows=("eval-mode",))
def scripted(subject: Subject) -> Iterator[Measured]:
    """`torch.jit.script` takes the model, and the scripted model returns the same."""
    yield from scripts(subject.model, *_calls(subject))


def scripts(model: nn.Module, *calls: Inputs) -> Iterator[Measured]:
    """Script a model, and compare the results."""
    with quiet():
        try:
            program = script(model)
        except Exception as error:
            assert isinstance(model, fx.GraphModule)
            why = refusal(model, error)
            yield Measured.fault(f"{why.message}: {why.notes[0]}")
            return
        with as_written():
            yield from list(_agree("the scripted model", model, program, calls))


@property_of("capture", "is captured once by torch.compile", level="full")
def captured(subject: Subject) -> Iterator[Measured]:
    """`torch.compile` captures the model whole, once for all lengths."""
    yield from captures(subject.model, *_calls(subject)[1:])


def captures(model: nn.Module, *calls: Inputs, backend: str | None = None) -> Iterator[Measured]:
    """Capture a model for `calls` that differ only in length, and compare the results.

    `backend` compiles the captured graph, which runs as it is unless given.
    """
    graphs: list[fx.GraphModule] = []

    def count(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        ready = compiler.backend(backend or "eager")(graph, examples)
        graphs.append(graph)  # only now: a compiler may ask for the capture again
        return ready

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with compiler.sizes_apart():
        try:
            yield from list(_agree("the compiled model", model, compiled, calls))
        except Exception as error:
            yield Measured.fault(f"torch.compile does not capture the model whole: {in_words(error)}")
            return
    if len(graphs) != 1:
        yield Measured.fault(f"the model was captured {len(graphs)} times for {len(calls)} lengths")


def _agree(what: str, model: nn.Module, other: Any, calls: Sequence[Inputs]) -> Iterator[Measured]:
    names = inputs_of(model)
    with evaluating(model), torch.no_grad():
        other.eval()
        for inputs in calls:
            for expected, output in zip(call(model, inputs), call(other, inputs, names), strict=True):
                error = distance(output, expected)
                yield Measured(error, f"{what} differs from the model by {error:.1e}")


@property_of("export", "is exported to pt2 and ONNX", level="full", follows=("capture",))
def exported(subject: Subject) -> Iterator[Measured]:
    """Files of torch.export and ONNX, read again, return the same at other shapes."""
    from tfkit.tools.export.export import export

    for name in ("pt2", "onnx"):
        with tempfile.TemporaryDirectory() as folder:
            yield from _written(lambda path=Path(folder), name=name: export(subject.model, path / f"model.{name}"))  # type: ignore[misc]


@property_of("eject", "is written out as plain PyTorch", level="full")
def ejected(subject: Subject) -> Iterator[Measured]:
    """The file that `tfkit eject` writes returns the same, bit by bit, without tfkit."""
    from tfkit.tools.eject.check import check
    from tfkit.tools.eject.write import eject

    yield from _written(lambda: check(subject.graph, eject(subject.graph)))


def _written(write: Callable[[], Any]) -> Iterator[Measured]:
    """Call a tool that proves what it writes."""
    try:
        write()
    except SpecError as error:
        yield Measured.fault(in_words(error))
    else:
        yield Measured(0.0, "")
