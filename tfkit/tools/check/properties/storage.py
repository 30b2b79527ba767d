"""Properties of what is stored: a model that was saved, copied or moved is the same model."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import fx

from tfkit.builder import build
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.wiring import heads_of_tables
from tfkit.tools.check.inputs import call, example_inputs
from tfkit.tools.check.measure import DoesNotApplyError, Measured, in_words, property_of
from tfkit.tools.check.places import compared
from tfkit.tools.check.subject import Subject
from tfkit.tools.import_.importing import export_config
from tfkit.tools.save.save import Layout, save


@property_of("state-dict", "is carried over by its state dict")
def state(subject: Subject) -> Iterator[Measured]:
    """A state dict carries the model over, bit by bit, into one that was built from another seed."""
    yield from state_dict(subject.graph)


def state_dict(graph: Graph) -> Iterator[Measured]:
    """Load the state dict of one model into another, which was built from another seed."""
    first, second = build(graph, seed=0).eval(), build(graph, seed=1).eval()
    second.load_state_dict(first.state_dict(), strict=True)
    inputs = example_inputs(graph)
    runs = partial(call, first, inputs), partial(call, second, inputs)
    detail = "the state dict is incomplete: the model that loads it differs"
    with torch.no_grad():
        yield from compared(first, *runs, detail, second=second, limit=0.0)


@property_of("copies", "survives deepcopy, pickle, to_empty", follows=("state-dict",))
def copies(subject: Subject) -> Iterator[Measured]:
    """A copy, a pickled model, and one that got memory later are the same model."""
    yield from _same(subject, "a deep copy", copy.deepcopy(subject.model))
    yield from _same(subject, "a pickled model", pickle.loads(pickle.dumps(subject.model)))
    empty = build(subject.graph, device="meta").to_empty(device="cpu").eval()
    empty.load_state_dict(subject.model.state_dict())
    yield from _same(subject, "a model that got memory later", empty)
    state = empty.state_dict()
    for owner, heads in heads_of_tables(subject.graph).items():
        shape = state[f"{owner}.tokens.weight"].shape
        for name in state:
            if name.partition(".")[0] in heads and state[name].shape == shape:
                yield Measured.fault(f"`{name}` is stored beside the table of `{owner}`, with which it is tied", owner)


def _same(subject: Subject, what: str, other: fx.GraphModule) -> Iterator[Measured]:
    run = partial(subject.run, subject.inputs())
    yield from compared(
        subject.model, run, partial(run, other), f"{what} returns something else", second=other, limit=0.0
    )


@property_of("save", "is read again from its folder", follows=("state-dict",))
def saved(subject: Subject) -> Iterator[Measured]:
    """The folder of a saved model gives the same model."""
    yield from _read_again(subject, "tfkit")


@property_of("publish", "is read again from a published folder", follows=("save",))
def publish(subject: Subject) -> Iterator[Measured]:
    """The folder of a published model, with a config.json and the tensors of its family, gives the same model."""
    if subject.graph.spec.model.checkpoint is None:
        raise DoesNotApplyError("the spec has no `checkpoint`")
    try:
        export_config(subject.graph, subject.plugins)
    except SpecError as error:
        raise DoesNotApplyError(f"no config.json can state these values: {error.diagnostics[0].message}") from None
    yield from _read_again(subject, "huggingface")


def _read_again(subject: Subject, layout: Layout) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(subject.model, Path(folder) / "model", layout=layout, plugins=subject.plugins)
            again = build(subject.graph, weights=Path(folder) / "model").eval()
        except SpecError as error:
            yield Measured.fault(in_words(error))
            return
    yield from _same(subject, "a model that was saved", again)
