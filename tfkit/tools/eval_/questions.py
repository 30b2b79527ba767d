"""Comparison of two models over the questions of a task: the exact test of McNemar.

Each question is a pair: both models answer it. If the models are equally accurate, a question that only one of them
answers correctly is as likely to be a gain as a loss, so the number of gains has a binomial distribution. The interval
of the difference follows from the exact interval of Clopper and Pearson for the fraction of gains. It excludes 0 if and
only if the p-value is below 5%.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tfkit.tools.common.scipy_library import import_scipy

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALPHA = 0.05


@dataclass(frozen=True)
class QuestionComparison:
    """The difference between two models on the questions of a task.

    Attributes:
        questions: the number of questions.
        gained: the number of questions that only the model answers correctly.
        lost: the number of questions that only the baseline answers correctly.
        difference: the accuracy of the model minus the accuracy of the baseline.
        interval: the 95% interval of the difference, for the number of questions on which the models differ.
        p: the p-value of this comparison alone.
    """

    questions: int
    gained: int
    lost: int
    difference: float
    interval: tuple[float, float]
    p: float


def compare_questions(values: NDArray[np.float64], base: NDArray[np.float64]) -> QuestionComparison:
    """Compare the answers of two models, 1 for a correct answer and 0 for all others, question by question."""
    special = import_scipy().special
    gained, lost = int(np.sum(values > base)), int(np.sum(values < base))
    n, differing = len(values), gained + lost
    tail = special.bdtr(min(gained, lost), differing, 0.5) if differing else 1.0
    low = special.betaincinv(gained, lost + 1, ALPHA / 2) if gained else 0.0
    high = special.betaincinv(gained + 1, lost, 1 - ALPHA / 2) if lost else 1.0
    interval = tuple(float((2 * fraction - 1) * differing / n) for fraction in (low, high))
    return QuestionComparison(
        n, gained, lost, (gained - lost) / n, (interval[0], interval[1]), min(1.0, 2 * float(tail))
    )
