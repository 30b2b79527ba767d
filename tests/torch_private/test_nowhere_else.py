"""Only `tfkit/torch_private` uses private names of torch, and looks each up by its name in a string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "tfkit" / "torch_private"
FILES = sorted(path for pattern in ("tfkit/**/*.py", "plugins/*/src/**/*.py") for path in ROOT.glob(pattern))
ELSEWHERE = {
    "_fields": "collections.namedtuple",
    "_field_defaults": "collections.namedtuple",
    "_replace": "collections.namedtuple",
    "_asdict": "collections.namedtuple",
    "_can_compile_fullgraph": "transformers.PreTrainedModel, set by each class",
    "_modules": "nn.Module, see test_adapters.py",
    "_parameters": "nn.Module, see test_adapters.py",
    "_buffers": "nn.Module, see test_adapters.py",
    "_non_persistent_buffers_set": "nn.Module, see test_adapters.py",
    "_compiled": "tfkit.CachedModel",
    "_attributes": "ast.AST, documented",
    "_exit": "os, documented",
    "_run_exitfuncs": "atexit, as multiprocessing ends its processes",
}
"""Private attributes that are read outside of the file that has them, and whose they are."""


MAYBE = re.compile(
    r"(?<!self)(?<!cls)(?<!super\(\))\._[a-zA-Z]|^ *(from|import) .*\b_[a-zA-Z]|^ *_[a-zA-Z]\w*,$", re.MULTILINE
)
"""Text of every file with a private use, and of a few without: parsing all files takes seconds."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.Module) -> set[str]:
    """The private names that a file gives to attributes, functions and classes."""
    actual = set(ELSEWHERE)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            actual.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            actual.add(node.id if isinstance(node, ast.Name) else node.attr)
    return actual


def private_uses(code: str) -> Iterator[str]:
    """Private modules that are imported, and private names and attributes of others."""
    tree = ast.parse(code)
    local = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and not str(node.module).startswith("tfkit"):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.lineno}: import {name}" for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            yield from (f"{node.lineno}: import {name}" for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            if text.startswith("torch.") or (
                node.attr not in local and not text.startswith(("self._", "cls._", "super()._"))
            ):
                yield f"{node.lineno}: {text}"


@pytest.mark.parametrize(
    ("code", "actual"),
    [
        ("import torch\ntorch._C._len_torch_dispatch_stack()", 2),
        ("from torch._decomp import decomposition_table", 1),
        ("from torch.utils import _pytree", 1),
        ("import torch._inductor.config", 1),
        ("model._apply(f)", 1),
        ("torch.ops.mkldnn._linear_pointwise(x)", 1),
        ("self._cache = torch.__version__, torch.nn.Module.__call__, point._field_defaults", 0),
        ("def _apply():\n    _apply(model)", 0),
    ],
)
def test_what_counts(code: str, actual: int) -> None:
    assert len(list(private_uses(code))) == actual
    assert MAYBE.search(code) or not actual


SCRIPTED = "torch.ops.mkldnn._linear_pointwise"
"""The operation that TorchScript must find in the code; it is compiled only if the operation exists."""


def test_private_names_are_strings_of_the_adapters() -> None:
    actual = [
        f"{path.relative_to(ROOT)}:{use}"
        for path in FILES
        for text in [path.read_text(encoding="utf-8")]
        if MAYBE.search(text)
        for use in private_uses(text)
        if ADAPTERS not in path.parents or not use.endswith(SCRIPTED)
    ]
    assert actual == []
