"""Properties of converted models: saved, copied, scripted, captured, exported or ejected, they return equal outputs."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import build, evaluation_mode, inputs_of
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.wiring import heads_of_tables
from tfkit.spec.folder import CONFIG
from tfkit.tools.check.measure import (
    Deviation,
    DoesNotApplyError,
    UnsupportedError,
    in_words,
    output_deviations,
    property_of,
    require,
    tensor_deviation,
)
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.reduced import VOCABULARY
from tfkit.tools.check.runs import Inputs, call, example_inputs
from tfkit.tools.compare.comparison import Comparison, compare
from tfkit.tools.compare.other_model import ShapeError
from tfkit.tools.export.exported_programs import looping_kinds
from tfkit.tools.export.torchscript_format import at_fault, script_module, scripting_error
from tfkit.tools.import_.importing import export_config, family_models
from tfkit.tools.save.save import save
from tfkit.torch_private import compiler
from tfkit.torch_private.torchscript import as_written, no_deprecation_warnings

PAD = "pad_token_id"


@property_of("state-dict", "is copied by its state dict", of_spec=True)
def state_dict_copy(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A model from a different seed that loads the state dict returns bit-identical outputs."""
    yield from state_dict(subject.graph)


def state_dict(graph: Graph) -> Iterator[Deviation]:
    """Load the state dict of one model into another, which was built from another seed."""
    first, second = build(graph, seed=0).eval(), build(graph, seed=1).eval()
    second.load_state_dict(first.state_dict(), strict=True)
    inputs, detail = example_inputs(graph), "the state dict is incomplete: the model that loads it differs"
    yield from output_deviations(first, inputs, inputs, detail, second=second, limit=0.0)


@property_of("copies", "survives deepcopy, pickle, to_empty", follows=("state-dict",), of_spec=True)
def model_copies(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A deep copy, a pickled model, and a model that was moved from the meta device return the same outputs."""
    subject = subject.with_full_chunks
    yield from _bit_deviations(subject, "a deep copy", copy.deepcopy(subject.model))
    yield from _bit_deviations(subject, "a pickled model", pickle.loads(pickle.dumps(subject.model)))
    empty = build(subject.graph, device="meta").to_empty(device="cpu").eval()
    empty.load_state_dict(subject.model.state_dict())
    yield from _bit_deviations(subject, "a model that got memory later", empty)
    state = empty.state_dict()
    for owner, heads in heads_of_tables(subject.graph).items():
        shape = state[f"{owner}.tokens.weight"].shape
        for name in state:
            if name.partition(".")[0] in heads and state[name].shape == shape:
                yield Deviation.fault(
                    f"`{name}` is stored in addition to the table of `{owner}`, to which it is tied", owner
                )


def _bit_deviations(subject: ModelUnderTest, what: str, other: fx.GraphModule) -> Iterator[Deviation]:
    inputs = subject.inputs()
    yield from output_deviations(
        subject.model, inputs, inputs, f"{what} returns a different output", second=other, limit=0.0
    )


@property_of("save", "is read again from its folder", follows=("state-dict",), of_spec=True)
def saved_model(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The model that is built from the folder of a saved model returns the same outputs."""
    yield from _read_again(subject, "tfkit")


@property_of("publish", "is read again from a published folder", follows=("save",), of_spec=True)
def published_model(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The folder of a published model, with a config.json and the tensors of its family, builds the same model."""
    require(subject.graph.spec.model.checkpoint is not None, "the spec has no `checkpoint`")
    with _as_statable():
        export_config(subject.graph, subject.plugins)
    yield from _read_again(subject, "huggingface")


@property_of(
    "transformers",
    "equals the class of its family",
    level="full",
    follows=("publish",),
    of_spec=True,
    compares=lambda subject: "the weight map" if subject.graph.spec.family is not None else "",
)
def in_transformers(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The published folder gives the same outputs in transformers. `publish` tests only tfkit's reader.

    If no config.json can state the values of the reduced model, or the class rejects them, the model has the values
    that its family derives.
    """
    require(subject.graph.spec.model.checkpoint is not None, "the spec has no `checkpoint`")
    installed = importlib.util.find_spec("transformers") is not None
    require(installed, "transformers is not installed")
    comparison: Comparison | None = None
    failure: SpecError | None = None
    with _as_statable():
        for graph in family_models(subject.graph, subject.plugins):
            try:
                comparison = _comparison_with_class(subject, graph)
                break
            except SpecError as error:
                failure = error
    cause = "" if failure is None else "; ".join(failure.diagnostics[0].notes) or in_words(failure)
    if comparison is None and isinstance(failure, ShapeError):
        yield Deviation.fault(f"tensors do not have the shapes of the class of transformers: {cause}")
        return
    if comparison is None:  # the class checks more than its config declares
        raise DoesNotApplyError(f"transformers cannot run the reduced model: {cause}")
    if comparison.difference is None:
        yield Deviation.fault("the outputs of transformers have a different shape")
        return
    relative, where = comparison.parts[-1].relative, comparison.first.name if comparison.first else ""
    deviation = Deviation(relative, f"the outputs of transformers differ by {relative:.1e}", where=where)
    family = subject.graph.spec.family
    if deviation.broken and family is not None and family.differences:
        raise DoesNotApplyError(f"the class of transformers differs: {family.differences[0]}")
    yield deviation


def _comparison_with_class(subject: ModelUnderTest, graph: Graph) -> Comparison:
    """Compare a model with the class of its family, by a published folder; raise SpecError if the class rejects it."""
    full = subject.with_full_chunks
    model = full.model if graph is subject.graph else full.build(graph)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        save(model, path, layout="huggingface", plugins=subject.plugins)
        if graph is not subject.graph:
            config = json.loads((path / CONFIG).read_text())
            if (config.get(PAD) or VOCABULARY) >= VOCABULARY:  # so may be the default of the class
                (path / CONFIG).write_text(json.dumps({**config, PAD: None}))
        return compare(graph, path, length=subject.length)


@contextmanager
def _as_statable() -> Iterator[None]:
    """Convert the error that no config.json can state the values of a spec."""
    try:
        yield
    except SpecError as error:
        raise DoesNotApplyError(f"no config.json can state these values: {error.diagnostics[0].message}") from None


def _read_again(subject: ModelUnderTest, layout: str) -> Iterator[Deviation]:
    subject = subject.with_full_chunks
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(subject.model, Path(folder) / "model", layout=layout, plugins=subject.plugins)
            again = build(subject.graph, weights=Path(folder) / "model").eval()
        except SpecError as error:
            yield Deviation.fault(in_words(error))
            return
    yield from _bit_deviations(subject, "a model that was saved", again)


def _call_inputs(subject: ModelUnderTest) -> list[Inputs]:
    """Return inputs of several lengths, with and without padding."""
    lengths = [max(1, subject.length - 4), subject.length]
    padded = [subject.inputs(length=n, padding="left") for n in lengths] if subject.padded else []
    return [subject.inputs(), *padded]


@property_of("script", "is the same by TorchScript", follows=("eval-mode",))
def scripted_model(subject: ModelUnderTest) -> Iterator[Deviation]:
    """`torch.jit.script` compiles the model, and the scripted model returns the same outputs."""
    yield from scripted_outputs(subject.model, *_call_inputs(subject))


def scripted_outputs(model: nn.Module, *calls: Inputs) -> Iterator[Deviation]:
    """Script a model, and compare the results. Raise `UnsupportedError` if a plugin's component does not script."""
    try:
        program = script_module(model)
    except Exception as error:
        assert isinstance(model, fx.GraphModule)
        yield script_fault(model, error)
        return
    with no_deprecation_warnings(), as_written():
        yield from list(_call_deviations("the scripted model", model, program, calls))


def script_fault(model: fx.GraphModule, error: Exception) -> Deviation:
    """Return TorchScript's error as a fault; raise `UnsupportedError` if a plugin's component may be the cause."""
    path, cause = at_fault(model, error)
    why = scripting_error(model, path, cause)
    detail = f"{why.message}: {why.notes[0]}"
    # A component that scripts alone, without annotations for instance, may stop the component that calls it.
    inside = [config for name, config in model.meta["components"].items() if f"{name}.".startswith(path and f"{path}.")]
    if not all(type(config).__module__.startswith("tfkit.") for config in inside):
        raise UnsupportedError(f"{path}: {detail}".removeprefix(": ")) from error
    return Deviation.fault(detail, path)


@property_of("capture", "is captured once by torch.compile", level="full")
def captured_model(subject: ModelUnderTest) -> Iterator[Deviation]:
    """`torch.compile` captures the full model once for all lengths; once per length if a mixer fixes the length."""
    yield from captured_outputs(subject.model, *_call_inputs(subject)[1:], once=not looping_kinds(subject.graph))


def captured_outputs(
    model: nn.Module, *calls: Inputs, backend: str | None = None, once: bool = True
) -> Iterator[Deviation]:
    """Capture a model for `calls` that differ only in length, and compare the results.

    `backend` compiles the captured graph; by default, the graph runs as captured. `once`: for all lengths.
    """
    graphs: list[fx.GraphModule] = []
    run = compiler.backend_function(backend or "eager")

    def count(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        ready = run(graph, examples)
        graphs.append(graph)  # only now: a compiler may ask for the capture again
        return ready

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with compiler.distinct_sizes():
        try:
            yield from list(_call_deviations("the compiled model", model, compiled, calls))
        except Exception as error:
            yield Deviation.fault(f"torch.compile does not capture the entire model: {in_words(error)}")
            return
    if len(graphs) != 1 and once:
        yield Deviation.fault(f"the model was captured {len(graphs)} times for {len(calls)} lengths")


def _call_deviations(what: str, model: nn.Module, other: Any, calls: Sequence[Inputs]) -> Iterator[Deviation]:
    names = inputs_of(model)
    with evaluation_mode(model), torch.no_grad():
        other.eval()
        for inputs in calls:
            for expected, output in zip(call(model, inputs), call(other, inputs, names), strict=True):
                yield tensor_deviation(output, expected, f"{what} differs from the model by {{}}")


@property_of("export", "is exported to pt2 and ONNX", level="full", follows=("capture",))
def exported_files(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Files of torch.export and ONNX, read again, return the outputs of the model at different shapes."""
    for kind in looping_kinds(subject.graph):
        raise DoesNotApplyError(f"the loop of mixer `{kind}` fixes the length of a program")
    from tfkit.tools.export.export import export

    for name in ("pt2", "onnx"):
        with tempfile.TemporaryDirectory() as folder:
            yield from write_errors(partial(export, subject.with_full_chunks.model, Path(folder) / f"model.{name}"))


def write_errors(write: Callable[[], Any]) -> Iterator[Deviation]:
    """Call a tool that verifies its files, and return its error as text."""
    try:
        write()
    except SpecError as error:
        yield Deviation.fault(in_words(error))
    else:
        yield Deviation(0.0, "")
