"""Whether an ejected file is the model: it has the same tensors, and computes the same, to the last bit."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from tfkit.builder import build
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.tools.cases import as_tensors, whole_cases
from tfkit.tools.memory import free_memory, size_of

FILE = "<ejected>"
LARGEST = 2**30
"""Parameters up to which both are run: a larger model takes minutes."""


@dataclass(frozen=True)
class Proof:
    """What was compared."""

    tensors: int
    parameters: int
    ran: bool
    """Whether both computed the same from the same tokens; else the model is too large for that."""


def check(graph: Graph, text: str) -> Proof:
    """Compare an ejected model with the one that is built.

    Raises:
        SpecError: they differ, because a component does something that its code does not say.
    """
    model = build(graph, device="meta")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    with tried(), loaded(text) as module, torch.device("meta"):
        ejected = made(module)
    theirs = {name: tensor.shape for name, tensor in ejected.state_dict().items()}
    if list(theirs.items()) != list(shapes.items()):
        raise _error(f"it has other tensors: {_differing(shapes, theirs)}")
    count = sum(parameter.numel() for parameter in model.parameters())
    free = free_memory(torch.device("cpu"))
    runs = count <= LARGEST and (free is None or 2 * size_of(model) < free)
    if runs:
        model = build(graph).eval()
        ejected.load_state_dict(model.state_dict(), assign=True)
        for case in whole_cases(model):
            # With gradients: without, `tfkit.nn.linear` has a way of its own for large weights on the CPU.
            with tried(), torch.enable_grad():
                outputs = as_tensors(ejected.eval()(**case.inputs))
            with torch.enable_grad():
                same = all(map(torch.equal, as_tensors(model(**case.inputs)), outputs))
            if not same:
                raise _error(f"it computes something else for {case.words} tokens")
    return Proof(len(shapes), count, runs)


@contextmanager
def tried() -> Iterator[None]:
    """Make one error of whatever an ejected file does wrong."""
    try:
        yield
    except SpecError:
        raise
    except Exception as cause:
        raise _error(f"{type(cause).__name__}: {cause}") from cause


@contextmanager
def loaded(text: str) -> Iterator[ModuleType]:
    """The file as a module, which dataclasses look for among all modules."""
    module = ModuleType(FILE)
    sys.modules[FILE] = module
    try:
        exec(compile(text, FILE, "exec"), module.__dict__)
        yield module
    finally:
        del sys.modules[FILE]


def made(module: ModuleType) -> nn.Module:
    """The model of an ejected file: its last class, with the config that stands there."""
    *_, root = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == FILE]
    takes_config = "config" in inspect.signature(root).parameters
    return root(module.Config()) if takes_config else root()


def _error(why: str) -> SpecError:
    message = f"the ejected file would not be the model: {why}"
    return SpecError(Diagnostic(message, help="a component's forward depends on what its code does not say"))


def _differing(ours: dict[str, torch.Size], theirs: dict[str, torch.Size]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(names[:3]) or "their order"
