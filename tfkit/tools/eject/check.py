"""Proof that an ejected file is the model: it runs without tfkit, has the same tensors, computes the same bits."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tfkit.building.builder import build
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.expand import Graph
from tfkit.tools.common.memory_needs import free_memory, size_of
from tfkit.tools.common.model_inputs import as_tensors, whole_cases
from tfkit.tools.eject.alone import Alone
from tfkit.tools.eject.runner import Given

LARGEST = 2**30
"""Largest number of parameters for which both are run: a larger model takes minutes."""


@dataclass(frozen=True)
class Proof:
    """Record of a comparison."""

    tensors: int
    parameters: int
    ran: bool
    """True if both computed the same from the same tokens; False if the model is too large to run."""


def check(graph: Graph, text: str, alone: Alone | None = None) -> Proof:
    """Run an ejected file in a process without tfkit, and compare it with the model that is built.

    Args:
        graph: the model.
        text: the file.
        alone: the process, if several files share one; unless given, one is started for this file.

    Raises:
        SpecError: they differ, because a component does something that its code does not say; or the file needs more
            than torch.
    """
    if packages := sorted(_imported(text) - {"torch", *sys.stdlib_module_names}):
        raise _error(f"it imports {listing(packages)}, and a file needs nothing but torch")
    with Alone() if alone is None else nullcontext(alone) as process, TemporaryDirectory() as folder:
        model = build(graph, device="meta")
        count = sum(parameter.numel() for parameter in model.parameters())
        free = free_memory(torch.device("cpu"))
        runs = count <= LARGEST and (free is None or 2 * size_of(model) < free)
        facts = _given(graph, runs)
        if error := process.wrong(text, facts, Path(folder)):
            raise _error(error)
    return Proof(len(facts["shapes"]), count, runs)


def _imported(text: str) -> set[str]:
    """Return the packages that a file imports."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in names}


def _given(graph: Graph, runs: bool) -> Given:
    """Return the tensors that the file must have, and the values that it must compute."""
    model = build(replace(graph, weights=None), device="cpu" if runs else "meta").eval()
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    cases = []
    for case in whole_cases(model) if runs else ():
        with torch.no_grad():
            cases.append((case.words, dict(case.inputs), list(as_tensors(model(**case.inputs)))))
    shapes = [(name, list(tensor.shape)) for name, tensor in state.items()]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return Given(
        shapes=shapes, frozen=frozen, state=state if runs else None, cases=cases, threads=torch.get_num_threads()
    )


@contextmanager
def tried() -> Iterator[None]:
    """Turn any exception of an ejected file into one error."""
    try:
        yield
    except SpecError:
        raise
    except Exception as cause:
        raise _error(f"{type(cause).__name__}: {cause}") from cause


def _error(why: str) -> SpecError:
    message = f"the ejected file would not be the model: {why}"
    return SpecError(Diagnostic(message, help="a component's forward depends on what its code does not say"))
