"""Modules with named axes use `tfkit.Rearrange` or an einsum instead of numbers of dimensions."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [*ROOT.glob("tfkit/components/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]  # kinds of runs have no forward
SOURCES = [path for path in FILES if path.name not in ("reference.py", "balance.py")]  # formulas and a loss of a run
BARE = {"view", "reshape", "unflatten", "permute", "transpose", "swapaxes", "movedim"}
ALLOWED = {
    "out.view(x.shape)": "batch and length are known only when it runs",
    "_exchange_axes(y).unflatten(1, v.shape[1:3])": "how many groups there are is known only when it runs",
    "last.unflatten(1, v.shape[1:3])": "how many groups there are is known only when it runs",
    "x.reshape(images.size(0), images.size(1) * x.size(1), x.size(2))": "how many images a row has is known only then",
    "chosen.view(x.size(0), x.size(1), -1)": "batch and length are known only when it runs",
    "rows[:n * size].unflatten(0, [n, size])": "how many rows an expert has is known only when it runs",
    "x.unflatten(1, [-1, chunk])": "how many chunks there are is known only when it runs",
    "rows.index_select(0, back).view(chosen.size(0), chosen.size(1), rows.size(1))": "how many ids is known only then",
}
"""What names no axis, and why."""


def bare_calls(source):
    """Calls that change the shape of a tensor without naming its axes; methods of `self` are our own."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BARE):
            continue
        if ast.unparse(node.func.value) != "self":
            yield ast.unparse(node)


def test_no_forward_has_a_bare_reshape():
    assert len(SOURCES) > 30
    actual = {call: path.name for path in SOURCES for call in bare_calls(path.read_text(encoding="utf-8"))}
    assert {call: name for call, name in actual.items() if call not in ALLOWED} == {}
    assert ALLOWED.keys() <= actual.keys()
