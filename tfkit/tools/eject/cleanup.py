"""Removes code that a person would not write: steps without effect, names used once, a new name for every step."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

WIDTH = 112
"""Longest line, in characters, into which steps are merged."""
SHORT = 88
"""Longest such line where a person wrote two lines."""


def tidied(steps: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a function, tidied."""
    steps = _without_copies([one for step in copy.deepcopy(steps) for one in _one_by_one(step)])
    steps, _ = _Living().block(steps, set())
    return _drawn_together(_shortened(steps))


def _shortened(steps: list[ast.stmt]) -> list[ast.stmt]:
    """Write a choice between two values, or a loop that fills a list, as one expression."""
    made: list[ast.stmt] = []
    for step in steps:
        for name in ("body", "orelse"):
            if hasattr(step, name):
                setattr(step, name, _shortened(getattr(step, name)))
        if isinstance(step, ast.If) and (chosen := _choice(step)) is not None:
            step = chosen
        if isinstance(step, ast.For) and made and (filled := _filled(made[-1], step)) is not None:
            made.pop()
            step = filled
        if made and _same_way_out(made[-1], step):
            step.test = ast.BoolOp(ast.Or(), [made.pop().test, step.test])  # type: ignore[attr-defined]
        made.append(step)
    return made


def _same_way_out(before: ast.stmt, step: ast.stmt) -> bool:
    """True if both statements are an `if` that returns the same."""
    if not (isinstance(before, ast.If) and isinstance(step, ast.If)) or before.orelse or step.orelse:
        return False
    return isinstance(step.body[0], ast.Return) and list(map(ast.dump, before.body)) == list(map(ast.dump, step.body))


def _choice(step: ast.If) -> ast.Assign | None:
    if len(step.body) != 1 or len(step.orelse) != 1:
        return None
    body, orelse = step.body[0], step.orelse[0]
    if not (isinstance(body, ast.Assign) and isinstance(orelse, ast.Assign)):
        return None
    if list(map(ast.unparse, body.targets)) != list(map(ast.unparse, orelse.targets)):
        return None
    made = ast.Assign(body.targets, ast.IfExp(step.test, body.value, orelse.value), lineno=0)
    return made if len(ast.unparse(made)) <= WIDTH else None


def _filled(before: ast.stmt, loop: ast.For) -> ast.Assign | None:
    empty = isinstance(before, ast.Assign) and isinstance(before.value, ast.List) and not before.value.elts
    if not empty or len(loop.body) != 1 or not isinstance(step := loop.body[0], ast.Expr):
        return None
    assert isinstance(before, ast.Assign)
    call = step.value
    name = before.targets[0]
    if not (isinstance(call, ast.Call) and isinstance(name, ast.Name)):
        return None
    if ast.unparse(call.func) != f"{name.id}.append" or name.id in reads(call.args[0]):
        return None
    return ast.Assign([name], ast.ListComp(call.args[0], [ast.comprehension(loop.target, loop.iter, [], 0)]), lineno=0)


def _one_by_one(step: ast.stmt) -> list[ast.stmt]:
    """`a, b = c, d` as two steps, if neither reads the variable that the other one assigns."""
    for name in ("body", "orelse"):
        if hasattr(step, name):
            setattr(step, name, [one for inner in getattr(step, name) for one in _one_by_one(inner)])
    if not (
        isinstance(step, ast.Assign) and isinstance(step.value, ast.Tuple) and isinstance(step.targets[0], ast.Tuple)
    ):
        return [step]
    pairs = list(zip(step.targets[0].elts, step.value.elts, strict=True))
    crossed = any(
        reads(target) & reads(value) for target, own in pairs for value in step.value.elts if value is not own
    )
    plain = any(isinstance(value, ast.Name | ast.Constant) for value in step.value.elts)
    return [step] if crossed or not plain else [ast.Assign([target], value, lineno=0) for target, value in pairs]


def _without_copies(steps: list[ast.stmt]) -> list[ast.stmt]:
    """Replace b by a after `b = a`, if neither is assigned again."""
    every = [node for step in steps for node in ast.walk(step)]
    assigned = [
        name
        for node in every
        if isinstance(node, ast.Assign | ast.AugAssign | ast.For | ast.comprehension)
        for name in _targets(node)
    ]
    for step in steps:
        if not (
            isinstance(step, ast.Assign) and isinstance(step.value, ast.Name) and isinstance(step.targets[0], ast.Name)
        ):
            continue
        new, old = step.targets[0].id, step.value.id
        if new != old and assigned.count(new) == 1 and assigned.count(old) == (old in assigned[: assigned.index(new)]):
            steps = [Replaced({new: ast.Name(old)}).visit(one) for one in steps]
            return _without_copies([one for one in steps if ast.unparse(one) != f"{old} = {old}"])
    return steps


def _targets(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
    return [name for target in targets for name in reads(target)]


def reads(node: ast.AST) -> set[str]:
    """The names that are read in a node."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


class _Living:
    """Removes assignments that nothing reads, from the end to the start."""

    def __init__(self) -> None:
        self.around: set[str] = set()
        """Names that are read where a loop ends or continues."""

    def block(self, steps: Sequence[ast.stmt], after: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """The statements that have an effect, and the names that they read from earlier ones."""
        made: list[ast.stmt] = []
        for step in reversed(steps):
            kept, after = self.step(step, after)
            made[:0] = kept
        return made, after

    def step(self, step: ast.stmt, after: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Do for one statement what `block` does for several."""
        if isinstance(step, ast.Return | ast.Raise):
            return [step], reads(step)
        if isinstance(step, ast.Break | ast.Continue):
            return [step], set(self.around)
        if isinstance(step, ast.If):
            return self._if(step, after)
        if isinstance(step, ast.For):
            return self._for(step, after)
        if isinstance(step, ast.With):
            body, before = self.block(step.body, after)
            return [ast.With(step.items, body, lineno=0)], before | {n for item in step.items for n in reads(item)}
        if isinstance(step, ast.AugAssign) and isinstance(step.target, ast.Name):
            return ([step], after | reads(step)) if step.target.id in after else ([], after)
        if isinstance(step, ast.Assign) and (targets := _names(step)) is not None:
            same = len(step.targets) == 1 and ast.unparse(step.targets[0]) == ast.unparse(step.value)
            if same or not (targets & after or _acts(step.value)):
                return [], after
            return [step], (after - targets) | reads(step.value)
        return [step], after | reads(step)

    def _if(self, step: ast.If, after: set[str]) -> tuple[list[ast.stmt], set[str]]:
        body, before = self.block(step.body, after)
        orelse, otherwise = self.block(step.orelse, after)
        if not body and not orelse:
            return [], after
        test = step.test if body else ast.UnaryOp(ast.Not(), step.test)
        kept = ast.If(test, body, orelse) if body else ast.If(test, orelse, [])
        return [kept], before | otherwise | reads(step.test)

    def _for(self, step: ast.For, after: set[str]) -> tuple[list[ast.stmt], set[str]]:
        outer, live = self.around, set(after)
        while True:
            self.around = set(live)
            body, before = self.block(step.body, live)
            if before <= live:
                break
            live |= before
        self.around = outer
        made = ast.For(step.target, step.iter, body or [ast.Pass()], [], lineno=0)
        return [_without_index(made)] if body else [], live | reads(step.iter)


def _names(step: ast.Assign) -> set[str] | None:
    """The names that are assigned; None if a target is not a name."""
    parts = [one for target in step.targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return (
        {one.id for one in parts if isinstance(one, ast.Name)} if all(isinstance(p, ast.Name) for p in parts) else None
    )


def _acts(value: ast.expr) -> bool:
    """True if a value is changed in place, by a method such as `copy_` or `append`."""
    calls = [one.func for one in ast.walk(value) if isinstance(one, ast.Call)]
    names = [one.attr for one in calls if isinstance(one, ast.Attribute)]
    return any(name == "append" or (name.endswith("_") and not name.endswith("__")) for name in names)


def _without_index(step: ast.For) -> ast.For:
    """`for i, x in enumerate(xs)` without an i that nothing reads."""
    target, call = step.target, step.iter
    if not (isinstance(target, ast.Tuple) and isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        return step
    index = target.elts[0]
    if call.func.id == "enumerate" and isinstance(index, ast.Name) and not any(index.id in reads(s) for s in step.body):
        return ast.For(target.elts[1], call.args[0], step.body, [], lineno=0)
    return step


def _drawn_together(steps: list[ast.stmt]) -> list[ast.stmt]:
    """Replace names that only the next step reads, and all names of weights, by their expressions."""
    for step in steps:
        if isinstance(step, ast.For | ast.If):
            step.body = _drawn_together(step.body)
    before, last = steps[-2:] if len(steps) > 1 else (None, None)
    if isinstance(before, ast.Assign) and isinstance(last, ast.Return) and last.value is not None:  # noqa: SIM102
        if [ast.unparse(one) for one in before.targets] == [ast.unparse(last.value)]:
            steps[-2:] = [ast.Return(before.value)]
    index = 0
    while index < len(steps) - 1:
        found = _merged(steps, index)
        if found is None:
            index += 1
            continue
        place, new = found
        steps[place] = new
        del steps[index]
        index = max(0, index - 1)
    return steps


def _merged(steps: list[ast.stmt], index: int) -> tuple[int, ast.stmt] | None:
    """The only step that reads the name that this one assigns, with the value in its place, and its index."""
    step = steps[index]
    if not (isinstance(step, ast.Assign) and len(step.targets) == 1 and isinstance(step.targets[0], ast.Name)):
        return None
    name, value, path = step.targets[0].id, step.value, _is_path(step.value)
    readers = [number for number in range(index + 1, len(steps)) if name in reads(steps[number])]
    if len(readers) != 1 or (readers[0] != index + 1 and not path):
        return None
    reader = steps[readers[0]]
    passed = steps[index + 1 : readers[0] + 1]
    changed = any(_changes(one) or reads(value) & stored(one) for one in passed[:-1]) or _changes(reader)
    once = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(reader)) == 1
    if changed or not once or name in stored(reader) or not isinstance(reader, ast.Assign | ast.Return):
        return None
    new = Replaced({name: value}).visit(copy.deepcopy(reader))
    return (readers[0], new) if len(ast.unparse(new)) <= (WIDTH if path else SHORT) else None


def _changes(step: ast.stmt) -> bool:
    """True if a step changes an object, rather than only assigning names."""
    nodes = list(ast.walk(step))
    targets = [t for n in nodes if isinstance(n, ast.Assign | ast.AugAssign) for t in _places(n)]
    into = any(isinstance(node, ast.Subscript | ast.Attribute) for target in targets for node in ast.walk(target))
    return into or any(_acts(node) for node in nodes if isinstance(node, ast.expr))


def _places(step: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return step.targets if isinstance(step, ast.Assign) else [step.target]


def stored(step: ast.stmt) -> set[str]:
    """The names that a statement assigns."""
    nodes = [node for node in ast.walk(step) if isinstance(node, ast.Assign | ast.AugAssign)]
    return {name for node in nodes for target in _places(node) for name in reads(target)}


def _is_path(value: ast.expr) -> bool:
    parts = [node for node in ast.walk(value) if isinstance(node, ast.expr)]
    return isinstance(value, ast.Attribute | ast.Subscript) and all(
        isinstance(node, ast.Attribute | ast.Name | ast.Subscript | ast.Constant) for node in parts
    )


class Replaced(ast.NodeTransformer):
    """Names replaced by expressions."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.values.get(node.id, node))
