"""Tables of the results of a sweep, for a terminal, for LaTeX and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tfkit.console.output import show, table
from tfkit.tools.common.units import bytes_text, flops_text, short
from tfkit.tools.sweep.result import Result, Results, Scaling, Tried
from tfkit.tools.sweep.statistics import NEEDED_PAIRS, Interval
from tfkit.training.loop import DIVERGED

NONE = "-"
_LATEX = str.maketrans({one: f"\\{one}" for one in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"})
Rows = list[list[str]]


def differences(found: Results) -> tuple[list[str], Rows]:
    """The head and the rows of the comparison."""
    head = ["", found.on, "seeds", "difference", "95% interval", "p", "verdict"]
    return head, [_difference(arm, lower=found.lower) for arm in found.arms]


def costs(found: Results) -> tuple[list[str], Rows]:
    """The head and the rows of sizes, speeds, and the correlations of pairs."""
    head = ["", "params", "FLOPs", "tokens/s", "memory", "to equal", "r"]
    return head, [_cost(one) for one in found.arms]


def trials(found: Results) -> tuple[list[str], Rows]:
    """The head and the rows of all trials, and which of them an arm was given the values of."""
    return ["", "tried", found.trials[0].on, "best"], [
        [trial.arm, trial.words, _trial_mean(trial), "*" if trial.best else ""] for trial in found.trials
    ]


def laws(found: Results) -> tuple[list[str], Rows]:
    """The head and the rows of scaling laws."""
    rows = [row for one in found.laws for row in _law(one)]
    return ["", "L = E + A / N^a", "value", "95% interval"], rows


def tables(found: Results) -> list[tuple[list[str], Rows]]:
    """All tables of a sweep; those of its runs once there is one, if it begins with trials."""
    made = [trials(found)] if found.trials else []
    if any(one.curves for one in found.arms) or not made:
        made = [differences(found), costs(found), *made]
    return [*made, *([laws(found)] if found.laws else [])]


def markdown(found: Results) -> str:
    """All tables, for Markdown."""
    return "\n\n".join(_markdown(*table) for table in tables(found))


def latex(found: Results) -> str:
    """All tables, for LaTeX with booktabs."""
    return "\n\n".join(_latex(*table) for table in tables(found))


def _trial_mean(trial: Tried) -> str:
    if trial.diverged:
        return f"{DIVERGED} {trial.diverged}/{trial.runs}"
    return NONE if trial.mean is None else f"{trial.mean:.4f}"


def _difference(arm: Result, *, lower: bool) -> list[str]:
    mean, verdict = NONE if arm.mean is None else f"{arm.mean:.4f}", verdict_text(arm, lower=lower)
    difference = arm.difference
    if difference is None:
        return [arm.name, mean, str(arm.runs), NONE, NONE, NONE, verdict]
    p = NONE if difference.adjusted is None else f"{difference.adjusted:.3f}"
    interval = interval_text(difference.interval)
    return [arm.name, mean, str(difference.pairs), f"{difference.mean:+.4f}", interval, p, verdict]


def verdict_text(arm: Result, *, lower: bool) -> str:
    """Return `better`, `diverged 1/6`, or `3 of 3 better` if a verdict needs more seeds; nothing for the baseline."""
    if arm.verdict == DIVERGED:
        return f"{DIVERGED} {len(arm.diverged)}/{arm.runs}"
    if arm.difference is None or arm.difference.pairs >= NEEDED_PAIRS or arm.verdict == "same":
        return arm.verdict or ""
    counts = {"better": arm.difference.lower, "worse": arm.difference.higher}
    if not lower:
        counts = {"better": counts["worse"], "worse": counts["better"]}
    word = max(counts, key=lambda word: counts[word])
    return f"{counts[word]} of {arm.difference.pairs} {word}"


def _cost(arm: Result) -> list[str]:
    speed = NONE if arm.speed is None else f"{arm.speed:,.0f}"
    difference, reached = arm.difference, NONE
    if arm.reached is not None:
        reached = "not reached" if arm.reached.ratio is None else f"{arm.reached.ratio:.2f}x"
        if 0 < arm.reached.seeds < len(arm.curves):
            reached += f" ({arm.reached.seeds}/{len(arm.curves)})"
    correlation = NONE if difference is None or difference.correlation is None else f"{difference.correlation:.2f}"
    memory = NONE if arm.memory is None else bytes_text(arm.memory)
    return [arm.name, short(arm.parameters), flops_text(arm.flops), speed, memory, reached, correlation]


def _law(one: Scaling) -> Rows:
    numbers = {"E": one.law.floor, "A": one.law.scale, "a": one.law.exponent}
    between = (
        [NONE] * 3 if one.law.intervals is None else [f"{low:.4g} .. {high:.4g}" for low, high in one.law.intervals]
    )
    rows = [
        [one.name, name, f"{number:.4g}", text] for (name, number), text in zip(numbers.items(), between, strict=True)
    ]
    return [*rows, [one.name, "largest, less what the others foretell", f"{one.law.missed:+.4f}", NONE]]


def interval_text(interval: Interval | None) -> str:
    """`-0.0520 .. -0.0410`."""
    return NONE if interval is None else f"{interval[0]:+.4f} .. {interval[1]:+.4f}"


def _markdown(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _latex(head: Sequence[str], rows: Rows) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"

    columns = "l" + "r" * (len(head) - 1)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(head), r"\midrule", *map(line, rows)]
    return "\n".join([*body, r"\bottomrule", r"\end{tabular}"])


WIDEST = 12
"""Characters of a line in the head of a table: with more, the row would have no room on a narrow terminal."""
FORMS = {"markdown": markdown, "latex": latex}


def show_results(found: Results, form: str | None) -> None:
    """Print tables and remarks; in a form for papers, the remarks go to standard error."""
    if form is not None:
        click.echo(FORMS[form](found))
        for note in found.notes:
            click.echo(note, err=True)
        return
    for head, rows in tables(found):
        lines = [_in_lines(one) for one in head]
        show(table(lines, rows, right=lines[1:]), "")
    if found.notes:
        show(*found.notes)


def _in_lines(name: str) -> str:
    """`test.exact_match` in two lines; names of numbers are broken at points, then at underscores, if they are wide."""
    if len(name) <= WIDEST:
        return name
    parts = [part if len(part) <= WIDEST else part.replace("_", "_\n") for part in name.split(".")]
    return ".\n".join(parts)
