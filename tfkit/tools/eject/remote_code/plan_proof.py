"""Verification of parallel plans: two processes on the CPU compute the logits and gradients of one process.

The plans are verified on the reduced model of the spec, whose weights are all random: a matrix of zeros, as before
training, would hide a wrong plan.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import fx

from tfkit.building.builder import build, graph_of
from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.errors import Diagnostic, NamesWarning, SpecError, listing
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.common.isolated import Isolated
from tfkit.tools.eject.remote_code import plan_runner
from tfkit.tools.eject.remote_code.parallel_plan import parallel_plan
from tfkit.tools.eject.remote_code.parts import ParallelPlan, Parts, parts_of
from tfkit.tools.eject.remote_code.plan_runner import PROCESSES

GATHERED = (frozenset[str](), frozenset({"self_attn"}), frozenset({"mlp"}), frozenset({"self_attn", "mlp"}))
"""The sublayers whose values are gathered, in the order of the attempts."""
NOISE = 0.1
"""Standard deviation of the numbers that are added to the weights of the reduced model."""


class DividedFolders:
    """Processes with transformers that divide the model of a folder among them."""

    def __init__(self, scratch: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        shared = {"WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
        self.processes = []
        for rank in range(PROCESSES):
            modules = str(scratch / f"modules{rank}")
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "HF_MODULES_CACHE": modules}
            self.processes.append(Isolated(plan_runner.__file__, shared | numbers))
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for process in self.processes:
            self._stack.enter_context(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def error(self, folder: Path, kind: str) -> str | None:
        """Describe the difference between the divided and the complete model. Ends the processes if there is one."""
        with ThreadPoolExecutor(PROCESSES) as pool:
            answers = [pool.submit(process.answer, [str(folder), kind]) for process in self.processes]
            for answer in as_completed(answers):
                if answer.result() is not None:
                    for process in self.processes:  # they may wait for each other
                        process.kill()
                    return str(answer.result())
        return None


def _noisy_model(graph: Graph) -> fx.GraphModule:
    """Build a model, and add noise to all of its initial weights."""
    model, generator = build(graph, seed=0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=NOISE)
    return model


def proved_plan(
    model: fx.GraphModule,
    parts: Parts,
    plugins: Plugins,
    scratch: Path,
    write: Callable[[fx.GraphModule, Parts, Path], None],
) -> ParallelPlan | None:
    """Return the plans of a decoder with the names of Llama, verified with transformers; None if it has none.

    Heads and hidden units are divided if the results are right, and gathered otherwise, with a warning. Experts are
    divided if the results are right, and complete in each process otherwise, with a warning.

    Args:
        model: the model.
        parts: its parts, with names.
        plugins: the plugins that its spec was read with.
        scratch: a folder for temporary files.
        write: writes a model to a folder.

    Raises:
        SpecError: the results differ even if heads and hidden units are gathered.
    """
    small = _noisy_model(reduced_model(parts.graph, plugins).graph)
    small_parts = replace(parts_of(graph_of(small)), names=LlamaNames.of(small, graph_of(small)))
    errors: dict[ParallelPlan, str] = {}
    for gathered in GATHERED:
        plan = parallel_plan(small, small_parts, gathered)
        kinds = ["tp"] * bool(plan.tensor) + ["pp"] * plan.pipeline + ["ep"] * bool(plan.tensor and plan.experts)
        if not kinds:
            return None
        if plan in errors:
            continue
        (folder := scratch / f"plan{len(errors)}").mkdir()
        with DividedFolders(folder) as processes:
            write(small, replace(small_parts, plan=plan), folder)
            checks = ((kind, processes.error(folder, kind)) for kind in kinds)
            failed, error = next((check for check in checks if check[1] is not None), ("", None))
        full = parallel_plan(model, parts, gathered)
        if failed == "ep":
            message = f"the experts of `{parts.graph.name}` cannot be divided among processes"
            warnings.warn(Diagnostic(message, notes=(str(error),)).warning(), NamesWarning, stacklevel=2)
            plan, full, error = plan._replace(experts=()), full._replace(experts=()), None
        if error is None:
            if errors:
                why = f"if they are divided, {next(iter(errors.values()))}"
                message = f"each process computes all of {listing(sorted(gathered))} of `{parts.graph.name}`"
                warnings.warn(Diagnostic(message, notes=(why,)).warning(), NamesWarning, stacklevel=2)
            return plan if full == plan else None
        errors[plan] = error
    first = next(iter(errors.values()))
    message = f"`{parts.graph.name}` computes something else if it is divided among processes: {first}"
    raise SpecError(Diagnostic(message, help="write it without --names"))
