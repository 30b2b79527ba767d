"""The calculator: the rules of the published generator, and measured scores of constant answers."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tfkit.run.contract import IGNORE_INDEX
from tfkit.run.kinds.calculator import CalculatorConfig, Problems

from .small import refused, small_run

PROBLEM = re.compile(r"\$\((0*)(\d+(?:\.\d{1,2})?)([-+*/])(0*)(\d+(?:\.\d{1,2})?)\)=(.{10})\$")

ANSWER = re.compile(r"0*(nan|-?(0|[1-9]\d*)(\.\d\d?)?)")


@pytest.fixture(scope="module")
def problems() -> list[str]:
    drawn = Problems(1, 20_000)
    return [drawn.text(number) for number in range(20_000)]


def test_every_problem_is_right(problems: list[str]) -> None:
    for text in problems[:4000]:
        match = PROBLEM.fullmatch(text)
        assert match is not None
        assert len(text) == 36
        assert len(match[1] + match[2]) == len(match[4] + match[5]) == 10
        assert ANSWER.fullmatch(match[6][::-1])
        answer = match[6][::-1].lstrip("0")
        if Fraction(match[5]) == 0 and match[3] == "/":
            assert answer == "nan"
            continue
        exact = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "/": lambda a, b: a / b,
        }[match[3]](Fraction(match[2]), Fraction(match[5]))
        assert abs(Fraction(answer or "0") - exact) <= Fraction(501, 100_000)
        integers = "." not in match[2] + match[5] and match[3] != "/"
        assert ("." in answer) != integers


def test_the_numbers_are_distributed_as_published(problems: list[str]) -> None:
    actual = [PROBLEM.fullmatch(text) for text in problems]
    operators = Counter(match[3] for match in actual if match)
    assert all(abs(count / len(problems) - 0.25) < 0.015 for count in operators.values())
    numbers = [number for match in actual if match for number in (match[2], match[5])]
    decimal = [float(number) for number in numbers if "." in number]
    integers = [int(number) for number in numbers if "." not in number]
    assert abs(len(decimal) / len(numbers) - 0.4) < 0.01
    assert (min(integers), max(integers)) == (1, 1000)
    assert abs(np.mean(integers) - 500.5) < 8
    assert abs(np.mean(decimal) - 250.25) < 6  # of a product of two uniform numbers
    decimals = Counter((("." in match[2]) + ("." in match[5])) for match in actual if match)
    assert [round(decimals[count] / len(problems), 2) for count in range(3)] == [0.36, 0.48, 0.16]


def test_scores_of_constants_are_those_that_were_measured() -> None:
    """The most frequent character of each place is right in 0.616, the most frequent answer in 0.0028."""
    rows = Problems(1, 100_000).rows(np.arange(100_000))[:, -11:]
    of_places = [np.bincount(column).max() / len(rows) for column in rows.T]
    assert np.mean(of_places) == pytest.approx(0.616, abs=0.002)
    assert np.unique(rows, axis=0, return_counts=True)[1].max() / len(rows) == pytest.approx(0.0028, abs=0.0004)


def test_windows_begin_anywhere_in_one_text(tmp_path: Path) -> None:
    data = small_run(tmp_path, "{kind: calculator, problems: 300, test: 5}", length=50).data
    assert data.vocab_size == 21
    assert data.splits == ["train", "val", "test"]
    assert data.tokenizer is not None
    text = "".join(Problems(0, 300).text(number) for number in range(300))
    train, val = text[:9720], text[9720:]  # 90% of the characters
    windows = data.examples("train", "sampled")
    assert len(windows) == 9720 - 50
    indices = np.array([0, 7, 35, 9669])
    batch = windows.batch(indices)
    for row, index in enumerate(indices):
        assert data.tokenizer.decode(batch.inputs["tokens"][row]) == train[index : index + 50]
        assert data.tokenizer.decode(batch.targets[row]) == train[index + 1 : index + 51]
    first = data.examples("val", "sequential").batch(np.array([0]))
    assert data.tokenizer.decode(first.inputs["tokens"][0]) == val[:50]


@pytest.mark.parametrize("fractions", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.5, 0.4, 0.1)])
def test_fractions_that_add_up_to_1_leave_nothing_out(fractions: tuple[float, ...]) -> None:
    """In binary, the first two sums are less than 1. A random part has its items in stored order."""
    config = CalculatorConfig(split=dict(zip(("train", "val", "rest"), fractions, strict=True)))
    ends = config.ends(10)
    assert [end - start for start, end in ends.values()] == [round(10 * fraction) for fraction in fractions]
    parts = [indices.tolist() for indices in config.drawn(10).values()]
    assert sorted(index for part in parts for index in part) == [*range(10)]
    assert all(part == sorted(part) for part in parts)


def test_rows_are_one_problem_each_and_may_count_the_answer_alone(tmp_path: Path) -> None:
    data = small_run(tmp_path, "{kind: calculator, problems: 30, test: 5, layout: rows, loss_on: answer}").data
    assert data.length == 35
    assert data.tokenizer is not None
    drawn = Problems(0, 30)
    for split, first in (("train", drawn.text(0)), ("val", drawn.text(27)), ("test", Problems(1, 5).text(0))):
        batch = data.examples(split, "sequential").batch(np.array([0]))
        assert data.tokenizer.decode(batch.inputs["tokens"][0]) == first[:-1]
        assert (batch.targets[0, :-11] == IGNORE_INDEX).all()
        assert data.tokenizer.decode(batch.targets[0, -11:]) == first[-11:]
    integers = CalculatorConfig(problems=30, layout="rows").build(None).examples("train", "sequential")
    assert (integers.batch(np.array([0])).targets != IGNORE_INDEX).all()


def test_answers_in_their_usual_order(tmp_path: Path) -> None:
    plain = small_run(tmp_path, "{kind: calculator, problems: 30, test: 5, layout: rows, reverse: false}").data
    assert plain.tokenizer is not None
    for split, drawn in (("train", Problems(0, 30)), ("test", Problems(1, 5))):
        row = plain.examples(split, "sequential").batch(np.array([0]))
        text = drawn.text(0)
        assert plain.tokenizer.decode(row.inputs["tokens"][0]) == (text[:25] + text[34:24:-1])
        assert plain.tokenizer.decode(row.targets[0, -11:]) == text[34:24:-1] + "$"


def test_errors(tmp_path: Path, golden) -> None:  # type: ignore[no-untyped-def]
    data = [
        "{kind: calculator, split: {train: 0.5, test: 0.5}, layout: rows}",
        "{kind: calculator, loss_on: answer}",
        "{kind: calculator, problems: 1, layout: rows}",
        "{kind: calculator, problems: 1, layout: stream}",
    ]
    lengths = (None, 50, None, 50)
    texts = [refused(tmp_path, fields, length=length) for fields, length in zip(data, lengths, strict=True)]
    short = "model.graph.embedding.position.max_len=20", "eval={every: 2, splits: {test: 1}}"
    texts.append(refused(tmp_path, "{kind: calculator, problems: 30, test: 5}", *short, length=20))
    golden("runs/calculator_errors", "\n\n".join(texts))
