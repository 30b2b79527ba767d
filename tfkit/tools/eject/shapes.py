"""Adds shapes as comments: the file runs once on the meta device, and each assigned tensor gets a comment."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tfkit.component import SublayerConfig
from tfkit.graph.decode_split import memory_field
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import fixed_lengths
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.tools.eject.runner import FILE, build_model, loaded_module

WIDTH = 120
BATCH, LENGTHS = 10007, (10009, 10037, 10039, 10061)
"""Primes that no width of a model equals, which identify the batch size and lengths in a shape."""
CHUNKED_LENGTHS = (1031, 1033, 1039, 1049)
"""Primes for a model that reads its tokens in chunks, in a loop whose time grows with the length."""
LETTERS = "tsuv"
MAX_CALLS = 100_000
"""Maximum number of Python calls within a statement. A recurrence makes more, and would take minutes."""


def with_shapes(text: str, graph: Graph) -> str:
    """Return the text of an ejected model, with a comment after each statement that assigns a tensor.

    The length of the first input is t; the lengths of additional inputs are s, u and v.
    """
    with loaded_module(text) as module, torch.device("meta"):
        model = build_model(module)
    inputs = _meta_inputs(graph)
    watch = _Watch(text)
    previous = sys.gettrace()
    sys.settrace(watch.call)
    try:
        with torch.no_grad():
            model.eval()(**inputs)
    except Exception:  # a component that cannot run without values, or at this size, only lacks comments
        pass
    finally:
        sys.settrace(previous)
    return watch.commented()


def _meta_inputs(graph: Graph) -> dict[str, Tensor]:
    """Build inputs on the meta device. Lengths differ unless two inputs must have the same length."""
    few, fixed = random_inputs(graph, batch=2, length=2), fixed_lengths(graph)
    chunked = any(config.chunk_attributes for _, config in graph.configs(SublayerConfig))
    lengths = CHUNKED_LENGTHS if chunked else LENGTHS
    later = len(few) > 1 and any(memory_field(node) for node in graph.nodes)
    inputs = {}
    for index, (name, value) in enumerate(few.items()):
        length = fixed.get(name) or lengths[min(index, len(lengths) - 1) if later else 0]
        shape = (BATCH, length, *value.shape[2:])[: value.dim()]
        inputs[name] = torch.empty(shape, dtype=value.dtype, device="meta")
    return inputs


class _Watch:
    """Follows a run of the file line by line."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.targets = _targets_by_line(text)
        self.found: dict[int, set[str]] = {}
        self.running: dict[FrameType, int] = {}
        self.calls = 0

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Follow a function of the file. Python calls this hook for every function."""
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise RuntimeError("a recurrence")
        return self.line if frame.f_code.co_filename == FILE else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Record the result of the previous line.

        Python calls this hook before every line of the functions followed.
        """
        self.calls = 0
        done = self.running.pop(frame, None)
        if done in self.targets:
            self._note(done, frame.f_locals)
        if event == "line":
            self.running[frame] = frame.f_lineno
        return self.line

    def _note(self, line: int, values: Mapping[str, Any]) -> None:
        tensors = [values.get(name) for name in self.targets[line]]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return
        shapes = [_shape_text(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
        text = shapes[0] if len(set(shapes)) == 1 else ", ".join(shapes)
        self.found.setdefault(line, set()).add(text)

    def commented(self) -> str:
        """Return the text with the comments."""
        lines = list(self.lines)
        for number, shapes in self.found.items():
            line = f"{lines[number - 1]}  # {min(shapes)}"
            if len(shapes) == 1 and len(line) <= WIDTH:
                lines[number - 1] = line
        return "\n".join(lines) + "\n"


def _targets_by_line(text: str) -> dict[int, list[str]]:
    """Return the names that statements of one line in functions assign, by line number."""
    names = {}
    for function in [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]:
        for step in [node for node in ast.walk(function) if isinstance(node, ast.Assign)]:
            target = step.targets[0]
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            if step.lineno == step.end_lineno and all(isinstance(part, ast.Name) for part in parts):
                names[step.lineno] = [part.id for part in parts if isinstance(part, ast.Name)]
    return names


def _shape_text(tensor: Tensor) -> str:
    """Return a shape as text, such as `[b, t, 768]`."""
    return f"[{', '.join(map(_size_text, tensor.shape))}]"


@cache
def _size_text(size: int) -> str:
    """Return a size as text: `b`, `t`, and `b * t * 2` for two parts of each token."""
    letters = {
        length: letter
        for lengths in (LENGTHS, CHUNKED_LENGTHS)
        for length, letter in zip(lengths, LETTERS, strict=True)
    }
    for length, letter in letters.items():
        parts, rest = divmod(size, BATCH * length)
        if parts and not rest:
            return f"b * {letter}" + (f" * {parts}" if parts > 1 else "")
    return letters.get(size, "b" if size == BATCH else str(size))
