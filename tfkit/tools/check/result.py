"""The result of a check: the outcomes for one model, and for several at once."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfkit.tools.check.measure import Outcome

ORDER = ("failed", "ok", "not run", "does not apply")
"""Results of one property for several models: the first of these that any model has."""


@dataclass(frozen=True)
class Checked:
    """The outcomes of a model's properties.

    Attributes:
        name: the model's.
        words: the model that was checked, in words, such as `2 of 12 layers`; empty if it was the spec as it is.
        level: `quick` or `full`.
        seed: of all random numbers.
        outcomes: one for each property, in the order in which they were measured.
    """

    name: str
    words: str
    level: str
    seed: int
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """True if no property is broken."""
        return not self.failed

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The outcomes of broken properties."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")

    @property
    def summary(self) -> str:
        """`23 ok, 1 failed, 2 do not apply`."""
        counts = {
            status: sum(outcome.status == status for outcome in self.outcomes) for status in ("ok", "failed", "not run")
        }
        idle = sum(outcome.status == "does not apply" for outcome in self.outcomes)
        parts = [f"{count} {status}" for status, count in counts.items() if count or status == "ok"]
        return ", ".join([*parts, *([f"{idle} {'does' if idle == 1 else 'do'} not apply"] if idle else [])])


def worst_of(models: Sequence[Checked]) -> tuple[Outcome, ...]:
    """Return the worst outcome of each property over several models."""
    by_name: dict[str, list[Outcome]] = {}
    for model in models:
        for outcome in model.outcomes:
            by_name.setdefault(outcome.name, []).append(outcome)
    return tuple(
        min(same, key=lambda outcome: (ORDER.index(outcome.status), -(outcome.worst or 0.0)))
        for same in by_name.values()
    )


def again(arguments: Sequence[str], failed: Iterable[Outcome]) -> str:
    """Return the command that measures the broken properties again."""
    only = [f"--only {outcome.name}" for outcome in failed]
    return " ".join(["tfkit check", *map(shlex.quote, arguments), *only])
