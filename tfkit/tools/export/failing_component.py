"""The component of a model on which an exporter fails, named as in the spec."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from tfkit.building.builder import graph_of
from tfkit.errors import Diagnostic, SpecError
from tfkit.spec.messages import fault_of
from tfkit.tools.common.ownership import owners_of
from tfkit.torch_private.programs import decomposed_program

ANSI = re.compile(r"\x1b\[\d*m")


def exporter_error(model: fx.GraphModule, path: str | None, error: Exception, exporter: str) -> SpecError:
    """Return the error for a module on which an exporter fails; `path` is None if the module is unknown."""
    part = owners_of(model).get(path or "")
    if part is None:
        message = f"`{graph_of(model).name}` cannot be exported by {exporter}: {error_summary(error)}"
        return SpecError(Diagnostic(message, help="try a different --format"))
    config = model.meta["components"][part.owner]
    message = f"{config.slot} `{config.kind_name()}` cannot be exported by {exporter}: {error_summary(error)}"
    return SpecError(Diagnostic(message, None, f"graph.{part.owner}", help=fault_of(type(config))))


def failing_module_path(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """Return the path of the innermost module running when `run` fails; None if there is none."""
    running: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: running.append(path)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path:
                hooks.enter_context(module.register_forward_pre_hook(enter(path)))
                hooks.enter_context(module.register_forward_hook(leave))
        try:
            run()
        except Exception:
            return running[-1] if running else None
    return None


def operation_module_path(program: ExportedProgram, error: Exception) -> str | None:
    """Return the path of the first module with the operation that an error names, or an operation derived from it."""
    named = re.search(r"op='([\w.]+)'|torch\.ops\.([\w.]+)", str(error))
    if named is None:
        return None
    operation = ".".join((named[1] or named[2]).split(".")[:2])
    with suppress_messages():
        core = decomposed_program(program)
    for node in (*program.graph.nodes, *core.graph.nodes):
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        if stack and str(node.target).startswith(f"{operation}."):
            return stack[-1]
    return None


def error_summary(error: Exception) -> str:
    """Summarize an exporter's error in one line: the innermost error that it quotes."""
    text = ANSI.sub("", str(error))
    _, _, summary = text.partition("## Exception summary")
    quoted = re.findall(r"<class '[\w.]*?(\w+)'>: ([^\n]+)", summary)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = quoted[0][1] if quoted else next(iter(lines), type(error).__name__)
    return line.rstrip(".")


@contextmanager
def suppress_messages() -> Iterator[None]:
    """Suppress an exporter's progress messages, and the program that it prints before an error."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
