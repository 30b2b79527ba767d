"""Statements: branches that are never taken are dropped, loops that run once lose their head."""

from __future__ import annotations

import ast

from tfkit.tools.eject.calls import Calls
from tfkit.tools.eject.cleanup import reads, tidied
from tfkit.tools.eject.code import Key
from tfkit.tools.eject.values import ANY, NONE, SOME, Items, Known, Value, is_constant, join, join_all, truth
from tfkit.tools.eject.whole import Whole

Env = dict[str, Value]


class Function(Calls):
    """A function of the model, and what is left of it after `run`.

    Attributes:
        arguments: the value of each parameter, as far as it is known over all calls.
        result: the value that it returns, as far as it is known.
        needed: parameters that are read, here or by a function that is called in the same place.
        body: the statements that are left.
        attributes: attributes of the module that they read, parameters and children among them.
    """

    def __init__(self, whole: Whole, key: Key) -> None:
        super().__init__(whole, key)
        self.arguments: Env = {}
        self.result: Value = SOME
        self.needed: set[str] = set()
        self.body: list[ast.stmt] = []
        self.attributes: set[str] = set()

    @property
    def parameters(self) -> list[str]:
        """The parameters that are left: constants are written where they are used, unread arguments are not passed."""
        return [name for name, value in self.arguments.items() if not is_constant(value) and name in self.needed]

    @property
    def expression(self) -> ast.expr | None:
        """The expression that it returns, if it does nothing else."""
        only = self.body[0] if len(self.body) == 1 else None
        return only.value if isinstance(only, ast.Return) else None

    @property
    def returns(self) -> str | None:
        """The parameter that it returns unchanged, if it does nothing else: such calls are left out."""
        value = self.expression
        return value.id if isinstance(value, ast.Name) and value.id in self.code.parameters else None

    def run(self) -> None:
        """Decide all that follows from the arguments, as far as they are known by now."""
        self.env = dict(self.arguments)
        self.uses = {}
        self.exits: list[Env] = []
        self.results: list[Value] = []
        self.set_body(self.block(self.code.tree.body))
        self.result = join_all(self.results) if self.results else NONE
        self.needed |= {name for step in self.body for name in reads(step)}

    def set_body(self, steps: list[ast.stmt]) -> None:
        """Take these statements, tidied, as the body."""
        self.body = tidied(steps)
        nodes = [node for step in self.body for node in ast.walk(step)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.uses = {name: value for name, value in self.uses.items() if name in names}
        self.attributes = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.self_name
        }

    def block(self, steps: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements that are left."""
        statements: list[ast.stmt] = []
        for step in steps:
            statements += self.step(step)
            if leaves(statements):
                break
        return statements

    def step(self, step: ast.stmt) -> list[ast.stmt]:
        """Return the statements that remain of one statement, as `block` does for several."""
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
            assignment = ast.AugAssign(target, step.op, self.written(step.value))
            self.bind(step.target, SOME)
            return [assignment]
        if isinstance(step, ast.Return):
            value, returned = self.eval(step.value) if step.value else (NONE, None)
            self.results.append(value)
            return [ast.Return(returned)]
        if isinstance(step, ast.If):
            return self._if(step)
        if isinstance(step, ast.For):
            return self._for(step)
        if isinstance(step, ast.Break | ast.Continue):
            self.exits.append(dict(self.env))
            return [step]
        if isinstance(step, ast.Raise):
            return [ast.Raise(step.exc and self.written(step.exc))]
        if isinstance(step, ast.Assert):
            self.narrow(step.test, True)
            return []
        if isinstance(step, ast.With):
            items = [ast.withitem(self.written(item.context_expr), item.optional_vars) for item in step.items]
            for item in step.items:
                self.bind(item.optional_vars or ast.Tuple([]), ANY)
            return [ast.With(items, self.block(step.body), lineno=0)]
        if isinstance(step, ast.Pass) or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant)):
            return []
        if isinstance(step, ast.Expr):
            return [ast.Expr(self.written(step.value))]
        raise NotImplementedError(f"a `{type(step).__name__.lower()}`")

    def _target(self, target: ast.expr) -> ast.expr:
        """Return the target of an assignment; the value before an index is read."""
        if isinstance(target, ast.Tuple):
            return ast.Tuple([self._target(element) for element in target.elts])
        if isinstance(target, ast.Name):
            return ast.Name(target.id)
        return self._any(target)[1]

    def _if(self, step: ast.If) -> list[ast.stmt]:
        value, test = self.eval(step.test)
        if (outcome := truth(value)) is not None:
            if outcome:
                self.narrow(step.test, True)
            return self.block(step.body if outcome else step.orelse)
        before = dict(self.env)
        self.narrow(step.test, True)
        body = self.block(step.body)
        after_body, self.env = self.env, before
        self.narrow(step.test, False)
        orelse = self.block(step.orelse)
        if leaves(orelse):
            self.env = after_body
        elif not leaves(body):
            self.env = joined(after_body, self.env)
        return [ast.If(test, body, orelse)]

    def _for(self, step: ast.For) -> list[ast.stmt]:
        if step.orelse:
            raise NotImplementedError("a `for` with an `else`")
        value, written = self.eval(step.iter)
        if isinstance(value, Known) and isinstance(value.value, range) and len(value.value) < 2 and not _exits(step):
            if not value.value:
                return []
            self.bind(step.target, Known(value.value[0], literal=True))
            return self.block(step.body)
        outer, self.exits = self.exits, []
        while True:
            before = dict(self.env)
            self.bind(step.target, self.item_of(value))
            body = self.block(step.body)
            after = before
            for env in [*([] if leaves(body) else [self.env]), *self.exits]:
                after = joined(after, env)
            self.env = after
            if after == before:
                break
        self.exits = outer
        return [ast.For(step.target, written, body, [], lineno=0)]


def _exits(step: ast.For) -> bool:
    """Return True if a loop contains a `break` or a `continue`."""
    return any(isinstance(node, ast.Break | ast.Continue) for node in ast.walk(step))


def leaves(steps: list[ast.stmt]) -> bool:
    """Return True if the code after these statements is never reached."""
    last = steps[-1] if steps else None
    if isinstance(last, ast.If):
        return leaves(last.body) and leaves(last.orelse)
    return isinstance(last, ast.Return | ast.Raise | ast.Break | ast.Continue)


def joined(a: Env, b: Env) -> Env:
    """Join the variables where two branches meet. An item that one branch appends may be in the list."""
    return {
        name: join(a[name], b[name]) if name in a and name in b else _unsure(a.get(name, b.get(name)))
        for name in {**a, **b}
    }


def _unsure(value: Value | None) -> Value:
    if value is not None and is_constant(value):
        return Known(value.value)
    return value or Items(None)
