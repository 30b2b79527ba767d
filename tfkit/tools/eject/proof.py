"""Verification of an ejected file: it runs without tfkit, and its tensors and results equal the model's bit by bit."""

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
from tfkit.tools.common.isolated import Isolated
from tfkit.tools.common.memory_needs import free_memory, size_of
from tfkit.tools.common.model_inputs import as_tensors, full_sequence_cases
from tfkit.tools.eject import runner
from tfkit.tools.eject.runner import CODE, INPUTS, ExpectedResults

MAX_PARAMETERS = 2**30
"""Largest number of parameters for which both are run. A larger model would take minutes."""


@dataclass(frozen=True)
class Proof:
    """The result of a verification."""

    tensors: int
    parameters: int
    ran: bool
    """True if both ran, with equal results; False if the model is too large to run."""


class Alone(Isolated):
    """A process without tfkit that runs ejected files one after the other."""

    def __init__(self) -> None:
        super().__init__(runner.__file__)

    def error_in(self, text: str, facts: ExpectedResults, folder: Path) -> str | None:
        """Describe an error in a file; None if there is none. `folder` is an empty folder for temporary files."""
        (folder / CODE).write_text(text, encoding="utf-8")
        torch.save(facts, folder / INPUTS)
        error: str | None = self.answer(str(folder))
        return error


def check(graph: Graph, text: str, alone: Alone | None = None) -> Proof:
    """Run an ejected file in a process without tfkit, and compare it with the model that is built.

    Args:
        graph: the model.
        text: the file.
        alone: the process, if several files share it; by default, the check starts a new process.

    Raises:
        SpecError: they differ, because a component depends on more than its code and fields; or the file imports more
            than torch.
    """
    nodes = list(ast.walk(ast.parse(text)))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    if packages := sorted({name.partition(".")[0] for name in names} - {"torch", *sys.stdlib_module_names}):
        raise _difference_error(f"it must import only torch; it imports {listing(packages)}")
    with Alone() if alone is None else nullcontext(alone) as process, TemporaryDirectory() as folder:
        model = build(graph, device="meta")
        count = sum(parameter.numel() for parameter in model.parameters())
        free = free_memory(torch.device("cpu"))
        runs = count <= MAX_PARAMETERS and (free is None or 2 * size_of(model) < free)
        facts = _facts_of(graph, runs)
        if error := process.error_in(text, facts, Path(folder)):
            raise _difference_error(error)
    return Proof(len(facts["shapes"]), count, runs)


def _facts_of(graph: Graph, runs: bool) -> ExpectedResults:
    """Return the expected tensors and results of the file."""
    model = build(replace(graph, weights=None), device="cpu" if runs else "meta").eval()
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    cases = []
    for case in full_sequence_cases(model) if runs else ():
        with torch.no_grad():
            cases.append((case.words, dict(case.inputs), list(as_tensors(model(**case.inputs)))))
    shapes = [(name, list(tensor.shape)) for name, tensor in state.items()]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return ExpectedResults(
        shapes=shapes, frozen=frozen, state=state if runs else None, cases=cases, threads=torch.get_num_threads()
    )


@contextmanager
def convert_errors() -> Iterator[None]:
    """Convert any exception of an ejected file to a SpecError."""
    try:
        yield
    except SpecError:
        raise
    except Exception as cause:
        raise _difference_error(f"{type(cause).__name__}: {cause}") from cause


def _difference_error(why: str) -> SpecError:
    message = f"the ejected file differs from the model: {why}"
    return SpecError(
        Diagnostic(
            message, help="write the forward of each component so that it depends only on its code and its fields"
        )
    )
