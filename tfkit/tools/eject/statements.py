"""Statements: branches that are never taken are dropped, loops that run once lose their head."""

from __future__ import annotations

import ast

from tfkit.tools.eject.calls import Calls
from tfkit.tools.eject.values import NONE, SOME, Items, Known, Record, Value, join, truth

Env = dict[str, Value]


class Function(Calls):
    """One function. After `run`, `body` has its statements."""

    def run(self) -> Value | None:
        """The result of the function, as far as it is known; None if it returns nothing."""
        self.result: Value | None = None
        self.exits: list[Env] = []
        self.env = dict(self.entry.arguments)
        self._rename()
        steps = self.entry.code.tree.body
        if isinstance(steps[0], ast.Expr) and isinstance(steps[0].value, ast.Constant):
            steps = steps[1:]
        self.body, _ = self.block(steps)
        return self.result

    def _rename(self) -> None:
        """Name a record after its field, if only one field of it is left."""
        taken = {node.id for node in ast.walk(self.entry.code.tree) if isinstance(node, ast.Name)}
        for name, value in self.env.items():
            only = self.whole.alone(value.type) if isinstance(value, Record) and value.type else None
            if only is not None and only not in taken:
                self.renamed[name] = name.replace("context", only) if "context" in name else only

    def block(self, steps: list[ast.stmt]) -> tuple[list[ast.stmt], bool]:
        """The statements that are left, and True if the code after them is reached."""
        made: list[ast.stmt] = []
        for step in steps:
            written, reached = self.step(step)
            made += written
            if not reached:
                return made, False
        return made, True

    def step(self, step: ast.stmt) -> tuple[list[ast.stmt], bool]:
        """Do for one statement what `block` does for several."""
        if isinstance(step, ast.Return):
            return self._return(step), False
        if isinstance(step, ast.If):
            return self._if(step)
        if isinstance(step, ast.For):
            return self._for(step), True
        if isinstance(step, ast.Break | ast.Continue):
            self.exits.append(dict(self.env))
            return [step], False
        if isinstance(step, ast.Raise):
            return [ast.Raise(step.exc and self.written(step.exc))], False
        return self._simple(step), True

    def _simple(self, step: ast.stmt) -> list[ast.stmt]:
        if isinstance(step, ast.AnnAssign):
            assert step.value is not None
            step = ast.Assign([step.target], step.value, lineno=0)
        if isinstance(step, ast.Assign):
            value, written = self.eval(step.value)
            targets = [self._target(target) for target in step.targets]
            for target in step.targets:
                self.bind(target, value)
            return [ast.Assign(targets, written, lineno=0)]
        if isinstance(step, ast.AugAssign):
            target = self._target(step.target)
            assert isinstance(target, ast.Name | ast.Attribute | ast.Subscript)
            made = ast.AugAssign(target, step.op, self.written(step.value))
            self.bind(step.target, SOME)
            return [made]
        if isinstance(step, ast.Expr):
            return [ast.Expr(self.written(step.value))]
        if isinstance(step, ast.Assert):
            self.env = self.narrowed(step.test, True)
            return []
        if isinstance(step, ast.With):
            items = [ast.withitem(self.written(one.context_expr), one.optional_vars) for one in step.items]
            return [ast.With(items, self.block(step.body)[0], lineno=0)]
        if isinstance(step, ast.Pass):
            return []
        raise NotImplementedError(f"a `{type(step).__name__.lower()}`")

    def _target(self, target: ast.expr) -> ast.expr:
        """The target of an assignment; the value before an index is read."""
        if isinstance(target, ast.Tuple):
            return ast.Tuple([self._target(one) for one in target.elts])
        if isinstance(target, ast.Name):
            return ast.Name(target.id)
        return self._any(target)[1]

    def _return(self, step: ast.Return) -> list[ast.stmt]:
        value, written = self.eval(step.value) if step.value else (NONE, None)
        self.result = value if self.result is None else join(self.result, value)
        return [ast.Return(written)]

    def _if(self, step: ast.If) -> tuple[list[ast.stmt], bool]:
        value, test = self.eval(step.test)
        if (known := truth(value)) is not None:
            if known:
                self.env = self.narrowed(step.test, True)
            return self.block(step.body if known else step.orelse)
        before = dict(self.env)
        self.env = self.narrowed(step.test, True)
        body, through_body = self.block(step.body)
        after_body, self.env = self.env, before
        self.env = self.narrowed(step.test, False)
        orelse, through_orelse = self.block(step.orelse)
        if through_body and through_orelse:
            self.env = joined(after_body, self.env)
        elif through_body:
            self.env = after_body
        if not body and not orelse:
            return [], True
        if not body:
            return [ast.If(ast.UnaryOp(ast.Not(), test), orelse, [])], through_body or through_orelse
        return [ast.If(test, body, orelse)], through_body or through_orelse

    def _for(self, step: ast.For) -> list[ast.stmt]:
        value, written = self.eval(step.iter)
        if isinstance(value, Known) and isinstance(value.value, range) and len(value.value) < 2:
            self.bind(step.target, Known(0, literal=True))
            return self.block(step.body)[0] if len(value.value) else []
        outer, self.exits = self.exits, []
        while True:
            before = dict(self.env)
            self.bind(step.target, self.item_of(value))
            body, through = self.block(step.body)
            after = before
            for env in [*([self.env] if through else []), *self.exits]:
                after = joined(after, env)
            self.env = after
            if after == before:
                break
        self.exits = outer
        return [ast.For(step.target, written, body, [], lineno=0)]


def joined(a: Env, b: Env) -> Env:
    """The variables as they are known where two branches meet. An item that one of them appends may be in the list."""
    return {
        name: join(a[name], b[name]) if name in a and name in b else _unsure(a.get(name, b.get(name)))
        for name in {**a, **b}
    }


def _unsure(value: Value | None) -> Value:
    if isinstance(value, Known) and value.literal:
        return Known(value.value)
    return value or Items(None)
