"""Floors of a plan, compared with counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tfkit
from tests.run.kinds.small import small_run
from tfkit.cli import main
from tfkit.run.contract import IGNORE_INDEX, Batch
from tfkit.tools.train.plan import MAX_EXAMPLES, _has_answers, metric_floors

PLUGINS = tfkit.load_plugins(entry_points=False)


def test_the_best_constants_of_a_task(tmp_path: Path) -> None:
    run = small_run(tmp_path, "{kind: addition, digits: 2}")
    examples = run.data.examples("val", "sequential")
    batch = examples.batch(np.arange(min(len(examples), MAX_EXAMPLES)))
    answers = [tuple(target for target in row if target != IGNORE_INDEX) for row in batch.targets.tolist()]
    counts = [Counter(answer[column] for answer in answers).most_common(1)[0][1] for column in range(len(answers[0]))]
    assert metric_floors(run, PLUGINS) == {
        "val.constant_accuracy": pytest.approx(sum(counts) / (len(answers) * len(counts))),
        "val.constant_exact_match": pytest.approx(Counter(answers).most_common(1)[0][1] / len(answers)),
    }


def test_text_has_no_answers(tmp_path: Path) -> None:
    assert metric_floors(small_run(tmp_path, "{kind: text, files: tinyshakespeare}", length=32), PLUGINS) == {}
    assert metric_floors(small_run(tmp_path, "{kind: mqar}", "model.embedding.position=null"), PLUGINS) == {}


def test_the_floors_of_the_published_calculator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "calculator", "--plan", "--json", "--set", "data.problems=1000"]) == 0
    report = json.loads(capsys.readouterr().out)["floors"]
    assert report["test.constant_accuracy"] == pytest.approx(0.616, abs=0.003)
    assert report["test.constant_exact_match"] == pytest.approx(0.0028, abs=0.001)


@pytest.mark.parametrize(
    ("second", "has_answers"),
    [
        ([-100, -100, 5, 6], True),
        ([-100, 2, 3, 4], False),
        ([-100, -100, -100, 4], False),
        ([-100, -100, 3, -100], False),
    ],
)
def test_only_answers_at_the_same_positions_have_a_floor(second: list[int], has_answers: bool) -> None:
    targets = np.array([[-100, -100, 3, 4], second])
    assert _has_answers(Batch({"tokens": targets}, targets)) is has_answers
