"""The results of a sweep as tables: for a terminal, for LaTeX, for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tfkit.tools.common.units import bytes_text, flops_text, short
from tfkit.tools.sweep.laws import Scaling
from tfkit.tools.sweep.result import Result, Results
from tfkit.tools.sweep.statistics import Interval, half

NONE = "-"
_LATEX = str.maketrans({one: f"\\{one}" for one in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"})
Rows = list[list[str]]


def differences(found: Results) -> tuple[list[str], Rows]:
    """The head and the rows of the comparison."""
    head = ["", found.on, "seeds", "difference", "95% interval", "p, Holm", "verdict"]
    return head, [_difference(one) for one in found.arms]


def costs(found: Results) -> tuple[list[str], Rows]:
    """The head and the rows of sizes, speeds, and what pairing was worth."""
    head = ["", "params", "FLOPs", "tokens/s", "memory", "to equal", "r", "± unpaired"]
    return head, [_cost(one) for one in found.arms]


def trials(found: Results) -> tuple[list[str], Rows]:
    """The head and the rows of all trials, and which of them an arm was given the values of."""
    return ["", "tried", found.trials[0].on, "best"], [
        [one.arm, one.words, NONE if one.mean is None else f"{one.mean:.4f}", "*" if one.best else ""]
        for one in found.trials
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


def _difference(one: Result) -> list[str]:
    mean = NONE if one.mean is None else f"{one.mean:.4f}"
    if one.difference is None:
        return [one.name, mean, str(len(one.curves)), NONE, NONE, NONE, ""]
    own = one.difference
    p = NONE if own.adjusted is None else f"{own.adjusted:.3f}"
    return [one.name, mean, str(own.pairs), f"{own.mean:+.4f}", interval_text(own.interval), p, one.verdict or ""]


def _cost(one: Result) -> list[str]:
    speed = NONE if one.speed is None else f"{one.speed:,.0f}"
    own, reached = one.difference, NONE
    if one.reached is not None:
        reached = "not reached" if one.reached.ratio is None else f"{one.reached.ratio:.2f}x"
        if 0 < one.reached.seeds < len(one.curves):
            reached += f" ({one.reached.seeds}/{len(one.curves)})"
    correlation = NONE if own is None or own.correlation is None else f"{own.correlation:.2f}"
    unpaired = NONE if own is None or own.unpaired is None else f"{half(own.unpaired):.4f}"
    memory = NONE if one.memory is None else bytes_text(one.memory)
    return [one.name, short(one.parameters), flops_text(one.flops), speed, memory, reached, correlation, unpaired]


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
