"""The sizes of a spec's family that fit a budget: layers and d_model vary, everything else stays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from tfkit.arguments import AnyPath, Sets, checked
from tfkit.component import AttentionConfig, FFNConfig, Layers
from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin.manager import AnyPlugins, load_plugins
from tfkit.spec.merge import as_changes
from tfkit.tools.params.count import count_params
from tfkit.tools.solve.budget import Budget
from tfkit.tools.solve.family import Family
from tfkit.tools.solve.search import Candidate, Form, Grid, nearest

Kept: TypeAlias = Literal["d_model", "n_layers"]


@dataclass(frozen=True)
class Size:
    """A size of the family, counted from the model that it builds.

    Attributes:
        n_layers: layers of each stack, by its node.
        d_model: width of the first stack.
        n_heads: query heads of the first stack; None without attention.
        n_kv_heads: heads of keys and values.
        d_ff: hidden width of its layers; None without one.
        parameters: their exact number.
        value: the quantity that the budget limits.
        difference: `value` minus the budget.
        sets: the changes to the spec that give it, as `--set` takes them.
    """

    n_layers: Mapping[str, int]
    d_model: int | None
    n_heads: int | None
    n_kv_heads: int | None
    d_ff: int | None
    parameters: int
    value: float
    difference: float
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Solved:
    """The result of `solve`, the family's own shape first."""

    name: str
    budget: Budget
    sizes: tuple[Size, ...]


@checked
def solve(
    spec: AnyPath,
    budget: Budget,
    *,
    sets: Sets = (),
    keep: Kept | Iterable[Kept] = (),
    plugins: AnyPlugins | None = None,
) -> Solved:
    """Find the sizes of a spec's family that are nearest to a budget.

    All stacks get deeper and all widths wider in the same proportion. The width of a head, the ratio of d_ff to d_model
    (rounded as the spec's is), the ratio of query heads to key-value heads, and everything else stay.

    Args:
        spec: path or bare name of a spec.
        budget: the limit or target.
        sets: changes, as `load` takes them, that apply to every size; one of `d_model` or `n_layers` is kept.
        keep: `d_model` or `n_layers`, or both, to keep as in the spec.
        plugins: the installed ones unless given.

    Raises:
        SpecError: the spec is wrong, nothing is left to solve for, or even the least size costs more.
    """
    kept_sizes = (keep,) if isinstance(keep, str) else tuple(keep)
    return sizes_of(
        Family.of(os.fspath(spec), plugins or load_plugins(), sets=as_changes(sets), keep=kept_sizes), budget
    )


def sizes_of(family: Family, budget: Budget) -> Solved:
    """Find the sizes of a family nearest to a budget; raises SpecError, see `solve`."""
    form = Form(family, lambda *size: budget.measure(family.load(family.changes(*size))).value)
    kept = family.width if family.scale is not None else None
    shape = 1 / float(family.step) / max(family.depth, 1)
    grid = Grid(family.depths, family.all_widths, kept, shape, form, budget.at_most)
    factor = budget.factor(family.own)
    least = grid.least()
    if least.value * factor > budget.amount:
        raise _out_of_reach(family, budget, least, "small")
    candidates = nearest(grid, budget.amount / factor)
    most = max(candidates, key=lambda candidate: candidate.value)
    if 2 * most.value * factor < budget.amount:
        raise _out_of_reach(family, budget, most, "large")
    return Solved(family.own.name, budget, tuple(_fitting(family, budget, candidate) for candidate in candidates))


def _fitting(family: Family, budget: Budget, candidate: Candidate) -> Size:
    """Measure a size as it is built, with fewer layers while it exceeds a limit: a peak need not be a sum."""
    size = _size(family, budget, candidate)
    while budget.at_most and size.difference > 0 and candidate.depth > family.depths[0]:
        candidate = replace(candidate, depth=candidate.depth - family.depths.step)
        size = _size(family, budget, candidate)
    return size


def _size(family: Family, budget: Budget, candidate: Candidate) -> Size:
    changes = family.changes(candidate.depth, candidate.width)
    graph = family.load(changes)
    measured = budget.measure(graph)
    value = measured.value * budget.factor(graph)
    stacks = [(node, node.stack) for node in graph.nodes if node.stack is not None]
    attention, ffn = _usual(stacks[0][1]) if stacks else (None, None)
    return Size(
        n_layers={node.name: stack.depth for node, stack in stacks},
        d_model=stacks[0][0].output.width if stacks else None,
        n_heads=attention.n_heads if attention else None,
        n_kv_heads=attention.kv_heads if attention else None,
        d_ff=ffn.hidden_width if ffn else None,
        parameters=measured.parameters,
        value=value,
        difference=value - budget.amount,
        sets=(*family.sets, *changes),
    )


def _usual(stack: Layers) -> tuple[AttentionConfig | None, FFNConfig | None]:
    """Return the self-attention and the FFN of most layers of a stack."""
    steps = stack.layers[max(stack.variants.values(), key=len)[0]].steps
    attention = (step.config for step in steps if isinstance(step.config, AttentionConfig) and not step.reads_memory)
    ffn = (step.config for step in steps if isinstance(step.config, FFNConfig))
    return next(attention, None), next(ffn, None)


def _out_of_reach(family: Family, budget: Budget, end: Candidate, what: str) -> SpecError:
    """Return the error, with its reason, if even the smallest size is above the budget or the largest far below."""
    graph = family.load(family.changes(end.depth, end.width))
    stacks = [(node.output.width, node.stack.depth) for node in graph.nodes if node.stack is not None]
    layers = " + ".join(str(depth) for _, depth in stacks)
    end_name = "least" if what == "small" else "largest"
    value = budget.text(end.value * budget.factor(graph))
    notes = [f"the {end_name} takes {value}, with n_layers {layers} and d_model {stacks[0][0]}"]
    help = None
    if what == "small" and budget.of == "params":
        counted = count_params(graph)
        notes.append(f"{counted.total - counted.non_embedding:,} of them are embedding tables")
        help = "a smaller vocabulary makes the tables smaller: `--set vocab_size=N`"
    message = f"no size of {family.own.name} is as {what} as {budget.text(budget.amount)}"
    return SpecError(Diagnostic(message, None, "", tuple(notes), help))
