"""Tables of the results of a sweep, for a terminal, for LaTeX and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tfkit.commands import bytes_text, count_text, flops_text, print_tables, table
from tfkit.run.training.loop import DIVERGED
from tfkit.tools.sweep.equal import short_size
from tfkit.tools.sweep.result import ArmResult, Results, Scaling, TrialResult
from tfkit.tools.sweep.statistics import NEEDED_PAIRS, Interval

NONE = "-"
_LATEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
)
Rows = list[list[str]]


def difference_table(results: Results) -> tuple[list[str], Rows]:
    """Return the head and the rows of the comparison."""
    head = ["", results.on, "seeds", "difference", "95% interval", "p", "verdict"]
    return head, [_difference_row(arm, lower=results.lower) for arm in results.arms]


def cost_table(results: Results) -> tuple[list[str], Rows]:
    """Return the head and the rows of sizes, speeds, and the correlations of pairs."""
    head = ["", "params", "FLOPs", "tokens/s", "memory", "to equal", "r"]
    return head, [_cost_row(arm) for arm in results.arms]


def trial_table(results: Results) -> tuple[list[str], Rows]:
    """Return the head and the rows of all trials; a star marks the values that an arm was trained with."""
    return ["", "tried", results.trials[0].on, "best"], [
        [trial.arm, trial.words, _trial_mean(trial), "*" if trial.best else ""] for trial in results.trials
    ]


def law_table(results: Results) -> tuple[list[str], Rows]:
    """Return the head and the rows of scaling laws."""
    rows = [row for law in results.laws for row in _law_rows(law)]
    return ["", "L = E + A / N^a", "value", "95% interval"], rows


def gain_table(results: Results) -> tuple[list[str], Rows]:
    """Return the head and the rows of comparisons by laws."""
    return ["", f"at {results.laws[0].words}", "difference", "to equal", "95% interval"], [
        [
            gain.name,
            short_size(gain.size, results.laws[0].words),
            f"{gain.difference:+.4f}",
            _factor_text(gain.factor),
            NONE if gain.interval is None else " .. ".join(map(_factor_text, gain.interval)),
        ]
        for gain in results.gains
    ]


def all_tables(results: Results) -> list[tuple[list[str], Rows]]:
    """Return all tables of a sweep. If a tuned sweep has only trials so far, return only the table of trials."""
    parts = [trial_table(results)] if results.trials else []
    if any(arm.curves for arm in results.arms) or not parts:
        parts = [difference_table(results), cost_table(results), *parts]
    parts += [law_table(results)] if results.laws else []
    return [*parts, *([gain_table(results)] if results.gains else [])]


def markdown_tables(results: Results) -> str:
    """Return all tables in Markdown."""
    return "\n\n".join(_markdown_table(*table) for table in all_tables(results))


def latex_tables(results: Results) -> str:
    """Return all tables in LaTeX with booktabs."""
    return "\n\n".join(_latex_table(*table) for table in all_tables(results))


def _trial_mean(trial: TrialResult) -> str:
    if trial.diverged:
        return f"{DIVERGED} {trial.diverged}/{trial.runs}"
    return NONE if trial.mean is None else f"{trial.mean:.4f}"


def _difference_row(arm: ArmResult, *, lower: bool) -> list[str]:
    mean, verdict = NONE if arm.mean is None else f"{arm.mean:.4f}", verdict_text(arm, lower=lower)
    difference = arm.difference
    if difference is None:
        return [arm.name, mean, str(arm.runs), NONE, NONE, NONE, verdict]
    p = NONE if difference.adjusted is None else f"{difference.adjusted:.3f}"
    interval = interval_text(difference.interval)
    return [arm.name, mean, str(difference.pairs), f"{difference.mean:+.4f}", interval, p, verdict]


def verdict_text(arm: ArmResult, *, lower: bool) -> str:
    """Return `better`, `diverged 1/6`, or `3 of 3 better` if a verdict needs more seeds; empty for the baseline."""
    if arm.verdict == DIVERGED:
        return f"{DIVERGED} {len(arm.diverged)}/{arm.runs}"
    if arm.difference is None or arm.difference.pairs >= NEEDED_PAIRS or arm.verdict == "same":
        return arm.verdict or ""
    counts = {"better": arm.difference.lower, "worse": arm.difference.higher}
    if not lower:
        counts = {"better": counts["worse"], "worse": counts["better"]}
    word = max(counts, key=lambda word: counts[word])
    return f"{counts[word]} of {arm.difference.pairs} {word}"


def _cost_row(arm: ArmResult) -> list[str]:
    speed = NONE if arm.speed is None else f"{arm.speed:,.0f}"
    difference, reached = arm.difference, NONE
    if arm.reached is not None:
        reached = "not reached" if arm.reached.ratio is None else f"{arm.reached.ratio:.2f}x"
        if 0 < arm.reached.seeds < len(arm.curves):
            reached += f" ({arm.reached.seeds}/{len(arm.curves)})"
    correlation = NONE if difference is None or difference.correlation is None else f"{difference.correlation:.2f}"
    memory = NONE if arm.memory is None else bytes_text(arm.memory)
    return [arm.name, count_text(arm.parameters), flops_text(arm.flops), speed, memory, reached, correlation]


def _law_rows(scaling: Scaling) -> Rows:
    law = scaling.law
    intervals = law.intervals or [None] * 3
    rows = [
        (name, f"{number:.4g}", interval)
        for name, number, interval in zip("EAa", (law.floor, law.scale, law.exponent), intervals, strict=True)
    ]
    if law.held_out is not None:
        size = short_size(law.held_out.size, scaling.words)
        rows.append((f"at {size}, from smaller sizes", f"{law.held_out.loss:.4f}", law.held_out.interval))
        rows.append((f"loss at {size}, minus prediction", f"{law.missed:+.4f}", None))
    if law.at_target is not None:
        size = short_size(law.at_target.size, scaling.words)
        rows.append((f"at {size}", f"{law.at_target.loss:.4f}", law.at_target.interval))
    return [
        [scaling.name, words, number, NONE if interval is None else f"{interval[0]:.4g} .. {interval[1]:.4g}"]
        for words, number, interval in rows
    ]


def _factor_text(factor: float | None) -> str:
    """Return `1.24x`; `never` if no size has an equal loss."""
    return "never" if factor is None else f"{factor:.3g}x"


def interval_text(interval: Interval | None) -> str:
    """Return `-0.0520 .. -0.0410`."""
    return NONE if interval is None else f"{interval[0]:+.4f} .. {interval[1]:+.4f}"


def _markdown_table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _latex_table(head: Sequence[str], rows: Rows) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"

    columns = "l" + "r" * (len(head) - 1)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(head), r"\midrule", *map(line, rows)]
    return "\n".join([*body, r"\bottomrule", r"\end{tabular}"])


WIDEST = 12
"""Maximum characters in a line of a table's head, so that the table fits a narrow terminal."""
FORMS = {"markdown": markdown_tables, "latex": latex_tables}


def show_results(results: Results, form: str | None) -> None:
    """Print tables and remarks. For LaTeX and Markdown, the remarks are written to standard error."""
    if form is not None:
        click.echo(FORMS[form](results))
        for note in results.notes:
            click.echo(note, err=True)
        return
    for head, rows in all_tables(results):
        lines = [_in_lines(column) for column in head]
        print_tables(table(lines, rows, right=lines[1:]), "")
    if results.notes:
        print_tables(*results.notes)


def _in_lines(name: str) -> str:
    """Split a wide name into lines: `test.exact_match` at its points, then long parts at underscores."""
    if len(name) <= WIDEST:
        return name
    parts = [part if len(part) <= WIDEST else part.replace("_", "_\n") for part in name.split(".")]
    return ".\n".join(parts)
