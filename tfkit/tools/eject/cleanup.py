"""Removes code that a person would not write, such as statements without effect and names that are used only once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 112
"""Maximum length of a line of merged statements, in characters."""
MAX_JOINED_LINE = 88
"""Maximum length if the source has two lines."""


def tidied_statements(steps: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a function, tidied."""
    steps = copied_tree(steps)
    for block in statement_blocks(steps):
        block[:] = [part for step in block for part in _separate_statements(step)]
    steps = _Living().block(_without_copies(steps))
    _compact_block(steps, set(), set())
    return steps


def statement_blocks(steps: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield the nested lists of statements, innermost first, and finally `steps`."""
    for step in steps:
        for name in ("body", "orelse"):
            yield from statement_blocks(getattr(step, name, []))
    yield steps


def variable_names(node: ast.AST) -> set[str]:
    """Return the names in a node."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def returned_expression(step: ast.stmt) -> ast.expr:
    """Return the expression of a `return`."""
    assert isinstance(step, ast.Return)
    assert step.value is not None
    return step.value


def assignment_targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment, a loop or a `with`; empty for any other node."""
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.withitem):
        return [node.optional_vars] if node.optional_vars else []
    return [node.target] if isinstance(node, ast.AugAssign | ast.For | ast.comprehension) else []


def assigned_names(step: ast.stmt) -> list[str]:
    """Return the names that a statement assigns, with repetitions."""
    return [name for node in ast.walk(step) for target in assignment_targets(node) for name in variable_names(target)]


def is_path(value: ast.expr) -> bool:
    """Return True for a name, an attribute of a path, or an item of a path."""
    parts = ast.Attribute | ast.Name | ast.Subscript | ast.Constant
    return all(isinstance(node, parts) for node in ast.walk(value) if isinstance(node, ast.expr))


def _separate_statements(step: ast.stmt) -> list[ast.stmt]:
    """Split `a, b = c, d` into two statements if neither value reads the target of the other."""
    if not (
        isinstance(step, ast.Assign) and isinstance(step.value, ast.Tuple) and isinstance(step.targets[0], ast.Tuple)
    ):
        return [step]
    pairs = list(zip(step.targets[0].elts, step.value.elts, strict=True))
    crossed = any(
        variable_names(target) & variable_names(value)
        for target, source in pairs
        for value in step.value.elts
        if value is not source
    )
    simple = any(isinstance(value, ast.Name | ast.Constant) for value in step.value.elts)
    return [step] if crossed or not simple else [ast.Assign([target], value, lineno=0) for target, value in pairs]


def _without_copies(steps: list[ast.stmt]) -> list[ast.stmt]:
    """Replace b by a after `b = a` if neither is assigned again."""
    names = [name for step in steps for name in assigned_names(step)]
    for step in steps:
        if not (
            isinstance(step, ast.Assign) and isinstance(step.value, ast.Name) and isinstance(step.targets[0], ast.Name)
        ):
            continue
        new, old = step.targets[0].id, step.value.id
        if new != old and names.count(new) == 1 and names.count(old) == (old in names[: names.index(new)]):
            return _without_copies(
                [Replaced({new: ast.Name(old)}).visit(statement) for statement in steps if statement is not step]
            )
    return steps


def _compact_block(steps: list[ast.stmt], live: set[str], around: set[str]) -> None:
    """Merge the statements of a block and of its nested blocks, in place.

    Args:
        steps: the statements of the block.
        live: the names that are read after the block.
        around: the names that are read after the enclosing loop, or in its next iteration.
    """
    for index, step in enumerate(steps):
        after = _live_names(steps[index + 1 :], live, around)
        loop = isinstance(step, ast.For)
        after |= _live_names([step], after, around) if loop else set()
        for name in ("body", "orelse"):
            _compact_block(getattr(step, name, []), after, after if loop else around)
    live = set() if steps and isinstance(steps[-1], ast.Return | ast.Raise) else live
    steps[:] = _shortened_statements(steps, live, around)
    _draw_together(steps, live)


def _live_names(steps: Sequence[ast.stmt], live: set[str], around: set[str]) -> set[str]:
    """Return the names that are live before these statements: these or later statements read their values."""
    living = _Living()
    living.read, living.around = set(live), around
    living.block(steps)
    return living.read


class _Living:
    """Removes assignments of values that are never read, from the end to the start.

    Attributes:
        read: the names that later statements read.
        around: the names that are read after the enclosing loop, or in its next iteration.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.around: set[str] = set()

    def block(self, steps: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return the statements that have an effect."""
        statements: list[ast.stmt] = []
        for step in reversed(steps):
            statements[:0] = self.step(step)
        return statements

    def step(self, step: ast.stmt) -> list[ast.stmt]:
        """Return the statements that have an effect, of a single statement."""
        if isinstance(step, ast.If):
            return self._if(step)
        if isinstance(step, ast.For):
            return self._for(step)
        if isinstance(step, ast.With):
            body = self.block(step.body)
            self.read |= {name for item in step.items for name in variable_names(item)}
            return [ast.With(step.items, body, lineno=0)]
        if isinstance(step, ast.Return | ast.Raise):
            self.read = set()
        if isinstance(step, ast.Break | ast.Continue):
            self.read = set(self.around)
        if isinstance(step, ast.AugAssign) and isinstance(step.target, ast.Name) and step.target.id not in self.read:
            return []
        if isinstance(step, ast.Assign) and not _is_member_assignment(step):
            names = {name for target in step.targets for name in variable_names(target)}
            same = len(step.targets) == 1 and ast.unparse(step.targets[0]) == ast.unparse(step.value)
            if same or not (names & self.read or _has_mutating_call(step.value)):
                return []
            self.read = (self.read - names) | variable_names(step.value)
            return [step]
        self.read |= variable_names(step)
        return [step]

    def _if(self, step: ast.If) -> list[ast.stmt]:
        later = set(self.read)
        body = self.block(step.body)
        read_in_body, self.read = self.read, set(later)
        orelse = self.block(step.orelse)
        if not body and not orelse:
            self.read = later
            return []
        self.read |= read_in_body | variable_names(step.test)
        return [ast.If(step.test, body, orelse) if body else ast.If(ast.UnaryOp(ast.Not(), step.test), orelse, [])]

    def _for(self, step: ast.For) -> list[ast.stmt]:
        outer, after, live = self.around, set(self.read), set(self.read)
        while True:
            self.around, self.read = set(live), set(live)
            body = self.block(step.body)
            if self.read <= live:
                break
            live |= self.read
        self.around, self.read = outer, live | variable_names(step.iter)
        return [_without_index(ast.For(step.target, step.iter, body or [ast.Pass()], [], lineno=0), after)]


def _without_index(step: ast.For, after: set[str]) -> ast.For:
    """Replace `for i, x in enumerate(xs)` by `for x in xs` if i is read neither in the loop nor after it."""
    target, call = step.target, step.iter
    if not (isinstance(target, ast.Tuple) and isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        return step
    index = target.elts[0]
    read = after.union(*map(variable_names, step.body))
    if call.func.id == "enumerate" and isinstance(index, ast.Name) and index.id not in read:
        return ast.For(target.elts[1], call.args[0], step.body, [], lineno=0)
    return step


def _shortened_statements(steps: list[ast.stmt], live: set[str], around: set[str]) -> list[ast.stmt]:
    """Replace a choice between two values, or a loop that fills a list, by an expression."""
    statements: list[ast.stmt] = []
    for index, written in enumerate(steps):
        step = (_conditional_assignment(written) or written) if isinstance(written, ast.If) else written
        if (
            isinstance(step, ast.For)
            and statements
            and (filled := _comprehension_assignment(statements[-1], step)) is not None
        ):
            read_later = variable_names(step.target) & _live_names(steps[index + 1 :], live, around)
            step = step if read_later else filled
            statements = statements if read_later else statements[:-1]
        if isinstance(step, ast.For) and statements and (counted := _enumerate_loop(statements[-1], step)) is not None:
            read_later = variable_names(counted.target) & _live_names(steps[index + 1 :], live, around)
            step = step if read_later else counted
            statements = statements if read_later else statements[:-1]
        if statements and _same_way_out(statements[-1], step):
            step.test = ast.BoolOp(ast.Or(), [statements.pop().test, step.test])  # type: ignore[attr-defined]
        statements.append(step)
    return statements


def _conditional_assignment(step: ast.If) -> ast.Assign | None:
    if len(step.body) != 1 or len(step.orelse) != 1:
        return None
    body, orelse = step.body[0], step.orelse[0]
    if not (isinstance(body, ast.Assign) and isinstance(orelse, ast.Assign)):
        return None
    if list(map(ast.unparse, body.targets)) != list(map(ast.unparse, orelse.targets)):
        return None
    assignment = ast.Assign(body.targets, ast.IfExp(step.test, body.value, orelse.value), lineno=0)
    return assignment if len(ast.unparse(assignment)) <= WIDTH else None


def _comprehension_assignment(before: ast.stmt, loop: ast.For) -> ast.Assign | None:
    empty = isinstance(before, ast.Assign) and isinstance(before.value, ast.List) and not before.value.elts
    if not empty or len(loop.body) != 1 or not isinstance(step := loop.body[0], ast.Expr):
        return None
    assert isinstance(before, ast.Assign)
    call = step.value
    name = before.targets[0]
    if not (isinstance(call, ast.Call) and isinstance(name, ast.Name)):
        return None
    if ast.unparse(call.func) != f"{name.id}.append" or name.id in variable_names(call.args[0]):
        return None
    return ast.Assign([name], ast.ListComp(call.args[0], [ast.comprehension(loop.target, loop.iter, [], 0)]), lineno=0)


def _enumerate_loop(before: ast.stmt, loop: ast.For) -> ast.For | None:
    """Rewrite a loop that counts with `n += 1`, after `n = 0`, with `enumerate`; return None for any other loop."""
    *body, last = loop.body
    if not (isinstance(before, ast.Assign) and isinstance(last, ast.AugAssign) and isinstance(last.target, ast.Name)):
        return None
    name = last.target.id
    if ast.unparse(before) != f"{name} = 0" or ast.unparse(last) != f"{name} += 1" or not body:
        return None
    if any(name in assigned_names(step) or isinstance(node, ast.Continue) for step in body for node in ast.walk(step)):
        return None
    target = ast.Tuple([ast.Name(name), loop.target])
    return ast.For(target, ast.Call(ast.Name("enumerate"), [loop.iter], []), body, [], lineno=0)


def _same_way_out(before: ast.stmt, step: ast.stmt) -> bool:
    """Return True if both statements are `if`s that return the same expression."""
    if not (isinstance(before, ast.If) and isinstance(step, ast.If)) or before.orelse or step.orelse:
        return False
    return isinstance(step.body[0], ast.Return) and list(map(ast.dump, before.body)) == list(map(ast.dump, step.body))


def _draw_together(steps: list[ast.stmt], live: set[str]) -> None:
    """Replace names that only the next statement reads, and all names of weights, by their expressions.

    Names in `live` are also read after these statements.
    """
    before, last = steps[-2:] if len(steps) > 1 else (None, None)
    if isinstance(before, ast.Assign) and isinstance(last, ast.Return) and last.value is not None:  # noqa: SIM102
        if [ast.unparse(target) for target in before.targets] == [ast.unparse(last.value)]:
            steps[-2:] = [ast.Return(before.value)]
    index = 0
    while index < len(steps) - 1:
        index = max(0, index - 1) if _merge_assignment(steps, index, live) else index + 1


def _merge_assignment(steps: list[ast.stmt], index: int, live: set[str]) -> bool:
    """Move an assigned value into the only statement that reads it; return False if that is not possible."""
    step = steps[index]
    if not (isinstance(step, ast.Assign) and len(step.targets) == 1 and isinstance(step.targets[0], ast.Name)):
        return False
    name, value = step.targets[0].id, step.value
    path = is_path(value) and isinstance(value, ast.Attribute | ast.Subscript)
    readers = [number for number in range(index + 1, len(steps)) if name in variable_names(steps[number])]
    if len(readers) != 1 or (readers[0] != index + 1 and not path) or name in live:
        return False
    passed, reader = steps[index + 1 : readers[0]], steps[readers[0]]
    changed = any(
        _has_side_effect(statement) or variable_names(value) & {*assigned_names(statement)} for statement in passed
    ) or _has_side_effect(reader)
    once = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(reader)) == 1
    if changed or not once or name in assigned_names(reader) or not isinstance(reader, ast.Assign | ast.Return):
        return False
    new = Replaced({name: value}).visit(copied_tree(reader))
    if len(ast.unparse(new)) > (WIDTH if path else MAX_JOINED_LINE):
        return False
    steps[readers[0]] = new
    del steps[index]
    return True


def _has_side_effect(step: ast.stmt) -> bool:
    """Return True if a statement modifies an object instead of only assigning names."""
    return _has_mutating_call(step) or any(map(_is_member_assignment, ast.walk(step)))


def changes_tensors(steps: Sequence[ast.stmt]) -> bool:
    """Return True if tensors are modified in place except by `nn.init`. Autograd rejects this for parameters."""
    changing = [step for step in steps if not isinstance(step, ast.With)]
    plain = [_WithoutInit().visit(copied_tree(step)) for step in changing]
    return any(map(_has_side_effect, plain))


class _WithoutInit(ast.NodeTransformer):
    """Removes calls of functions of `nn.init`."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return ast.Constant(None) if ast.unparse(node.func).startswith(("nn.init.", "init.")) else node


def _is_member_assignment(node: ast.AST) -> bool:
    """Return True if a node assigns to an attribute or to an item."""
    inside = [child for target in assignment_targets(node) for child in ast.walk(target)]
    return any(isinstance(child, ast.Subscript | ast.Attribute) for child in inside)


def _has_mutating_call(node: ast.AST) -> bool:
    """Return True for a call that modifies a value in place, such as `copy_` or `append`."""
    calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
    names = [function.attr for function in calls if isinstance(function, ast.Attribute)]
    return any(name == "append" or (name.endswith("_") and not name.endswith("__")) for name in names)


def copied_tree(tree: Any) -> Any:
    """Return a copy of a node or of a list of nodes. `copy.deepcopy` takes longer, because it expects cycles."""
    if isinstance(tree, ast.AST):
        new = type(tree).__new__(type(tree))
        vars(new).update({name: copied_tree(value) for name, value in vars(tree).items()})
        return new
    return [copied_tree(value) for value in tree] if isinstance(tree, list) else tree


class Replaced(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copied_tree(self.values.get(node.id, node))
