"""Tools read configs through the names of the contract, and never probe objects for attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tfkit"
PATTERNS = (
    "tools/**/*.py",
    "cli.py",
    "console/*.py",
    "building/[bfgi]*.py",
)  # building/model.py asks wrappers of torch
FILES = sorted(path for pattern in PATTERNS for path in PACKAGE.glob(pattern))
CONTRACT = {"attention", "block", "config", "ffn", "layer", "norm", "position", "stack", "step"}
"""Names of values that have a type in the contract."""
OF_OTHERS = {
    "console/signals.py": "signal",
    "building/initialize.py": "module",
    "tools/common/atomic_files.py": "error, os, library",
    "tools/common/companions.py": "tokenizer",
    "tools/compare/other_model.py": "transformers, result, theirs.config",
    "tools/check/measure.py": "error",
    "tools/train/check/run_under_test.py": "data",
    "tools/components/component_docs.py": "item",
    "tools/draw/svg.py": "shape",
    "tools/eject/remote_code/engines.py": "module",
    "tools/eject/remote_code/modeling.py": "sublayer, core",
    "tools/eject/remote_code/parallel_plan.py": "ffn, experts",
    "tools/export/export.py": "os, error",
    "tools/generate/command.py": "sys.stdout",
    "tools/save/save.py": "error",
    "tools/train/checkpoints.py": "data",
}
"""The objects that a file asks for a name they may lack: of the system, torch, another library; none is a config.

The modules of a sublayer lack `core` and `softmax` unless they are attentions with a softmax. Only some norms have an
`offset`, and only mixtures of experts have `experts`.

The data of a run lack `n_classes` unless their targets are classes, and may lack `start`, `end` and `classes`.
Tokenizers of plugins lack `folder` and `pieces`.
"""
SYNTAX = {
    *(PACKAGE / "tools" / "eject").glob("*.py"),
    *(PACKAGE / "tools/eject/remote_code" / f"{name}.py" for name in ("dynamic_cache", "plan_runner", "renaming")),
    PACKAGE / "tools" / "check" / "mutations.py",
}
"""These read the nodes of Python's syntax trees, live modules and functions."""


def probes(code: str, text: str = "") -> Iterator[str]:
    """Questions for a name that an object may lack, and values of the contract without its types."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if asks and ast.unparse(node.args[0]) not in text.split(", "):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if name in CONTRACT and "Any" in ast.unparse(node.annotation):
                yield f"{node.lineno}: {name}: {ast.unparse(node.annotation)}"


@pytest.mark.parametrize(
    ("code", "actual"),
    [
        ("if hasattr(node.config, 'plan'): pass", 1),
        ("width = getattr(config, 'd_model', None)", 1),
        ("config: Any = node.config", 1),
        ("def tower(layer: Any, steps: list[Step]): pass", 1),
        ("def draw(config: Config): return {n: getattr(config, n) for n in type(config).model_fields}", 0),
        ("found = hasattr(os, 'renameat2')", 0),
    ],
)
def test_what_counts(code: str, actual: int) -> None:
    assert len(list(probes(code, "os"))) == actual


@pytest.mark.slow
def test_no_config_is_probed() -> None:
    for path in FILES:
        if path not in SYNTAX:
            rest = OF_OTHERS.get(str(path.relative_to(PACKAGE)), "")
            assert list(probes(path.read_text(encoding="utf-8"), rest)) == [], path


def test_each_exception_is_one() -> None:
    for name, value in OF_OTHERS.items():
        calls = list(probes((PACKAGE / name).read_text(encoding="utf-8")))
        assert all(any(f"({word}, " in question for question in calls) for word in value.split(", ")), name
