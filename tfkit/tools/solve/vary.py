"""A single value of a spec that varies until the model has a number of parameters: `decoder.ffn.d_ff`.

The number of parameters must grow with the value. The search interpolates, so a value on which the parameters depend
linearly, such as a hidden width, needs a few models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from tfkit.component import leaf_values
from tfkit.errors import Diagnostic, SpecError, listing, quoted, similar_name_help
from tfkit.graph.expand import Graph, expand
from tfkit.plugin.manager import Plugins
from tfkit.spec.load import resolve_spec
from tfkit.spec.merge import without_keys
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.tree import Mapping as Tree
from tfkit.spec.tree import Scalar
from tfkit.tools.solve.budget import Budget, Solved, size_of_graph
from tfkit.tools.solve.sizes import MAX_DIM, changed_tree, node_at, written_numbers

PRECISION = 0.001
"""Difference from the budget, as a fraction, up to which the value is rounded to a power of two."""
UNITS = (256, 128, 64, 32, 16, 8, 4, 2)
SECANTS = 8
"""Number of secant steps in a search, after which it bisects."""


def vary_value(tree: Tree, file: str, plugins: Plugins, path: str, budget: Budget, sets: Iterable[str] = ()) -> Solved:
    """Find the value of `path` with which the spec in `tree`, changed by `sets`, is nearest to a budget.

    Raises SpecError if the path has no integer, or if no value of it reaches the budget.
    """
    changes, tree = tuple(sets), without_keys(tree, {"checkpoint"})

    @cache
    def graph(value: int | None = None) -> Graph:
        more = () if value is None else (f"{path}={value}",)
        return expand(resolve_spec(tree, plugins, sets=(*changes, *more), file=file))

    start = _integer_at(graph(), changed_tree(tree, changes, plugins), path, plugins)
    value = nearest_value(cache(lambda number: budget.count(graph(number))), start, budget, path)
    size = size_of_graph(graph(value), budget, (*changes, f"{path}={value}"))
    return Solved(graph().name, budget, (size,))


def _integer_at(graph: Graph, tree: Tree, path: str, plugins: Plugins) -> int:
    """Return the integer at a path, as the spec writes or resolves it; raise SpecError if there is none."""
    fields = frozenset(ModelSpec.model_fields) | plugins.registry.shared_names()
    words = tuple(path.split("."))
    words = words if words[0] in fields else ("graph", *words)
    node = node_at(tree, words)
    value = node.value if isinstance(node, Scalar) else dict(leaf_values(graph.spec.model)).get(words)
    if type(value) is int:
        return value
    numbers = [words for words, _ in written_numbers(tree, ()) if words not in (("tfkit",), ("parameters",))]
    names = [".".join(words[words[0] == "graph" :]) for words in numbers]
    help = similar_name_help("a value", path, names, "name the path of an integer, such as `decoder.ffn.d_ff`")
    message = f"{quoted(path)} must be the path of an integer of {graph.name}"
    raise SpecError(Diagnostic(message, notes=(f"its integers: {listing(names, 12)}",), help=help))


def nearest_value(count: Callable[[int], int], start: int, budget: Budget, path: str) -> int:
    """Return the value whose count is nearest to a budget, rounded to a power of two if that costs little.

    `count` must not decrease. Raises SpecError if no value up to `MAX_DIM` reaches the budget.
    """
    low, high = start, start
    while count(low) > budget.amount and low > 1:
        low, high = max(low // 2, 1), low
    while count(high) < budget.amount and high < MAX_DIM and count(high) != (count(low) if high > low else None):
        low, high = high, high * 2
    if not count(low) <= budget.amount <= count(high):
        message = f"no value of {quoted(path)} gives {budget.text(budget.amount)}"
        note = f"values from {low:,} to {high:,} give {count(low):,} to {budget.text(count(high))}"
        raise SpecError(Diagnostic(message, notes=(note,), help="vary a different value, or choose a different number"))
    secants = SECANTS
    while high - low > 1 and count(high) > count(low):
        share = (budget.amount - count(low)) / (count(high) - count(low)) if secants else 0.5
        secants = max(secants - 1, 0)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (middle, high) if count(middle) <= budget.amount else (low, middle)
    value = min((low, high), key=lambda number: abs(count(number) - budget.amount))
    for unit in UNITS:
        rounded = (value + unit // 2) // unit * unit
        if rounded and abs(count(rounded) - budget.amount) <= PRECISION * budget.amount:
            return rounded
    return value
