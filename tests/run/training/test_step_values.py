"""Batch sizes that change by step."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.run.training.runs import PLUGINS, Memory, same, small_run, trained, write_run
from tfkit.errors import SpecError
from tfkit.run.checked_run import load_run
from tfkit.run.step_values import step_values
from tfkit.run.training.loop import Trainer
from tfkit.run.training.order import indices_of
from tfkit.run.training.processes import Processes, check_count
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.sweep.equal import evaluation_differences
from tfkit.tools.train.check.data import epoch_order
from tfkit.tools.train.check.run_under_test import Half, reduced_run
from tfkit.tools.train.check.step import loss_sums
from tfkit.tools.train.plan import run_plan
from tfkit.tools.train.progress import TrainingProgress

JUMPS = "batch.sequences={at: {0: 2, 3: 4, 5: 6}}"
SIZES = [2, 2, 2, 4, 4, 6, 6, 6]


def test_values_of_each_step() -> None:
    jumps = step_values({"at": {"0": 2, "3": 4, "0.625": 6}}, steps=8)
    assert [jumps.value(step) for step in range(1, 9)] == SIZES
    assert [jumps.before(step) for step in range(1, 10)] == [0, 2, 4, 6, 10, 14, 20, 26, 32]
    assert [jumps.steps_for(Fraction(n)) for n in (1, 6, 7, 14, 15, 33)] == [1, 3, 4, 5, 6, 9]
    rising = step_values({"from": 2, "to": 5, "over": 0.5}, steps=12)
    assert [rising.value(step) for step in range(1, 9)] == [2, 3, 3, 4, 4, 5, 5, 5]  # 2 + 0.5 c, halves upwards
    falling = step_values({"from": 9, "to": 1, "over": 4})
    assert [falling.value(step) for step in range(1, 7)] == [9, 7, 5, 3, 1, 1]


def test_no_example_is_left_out_or_repeated() -> None:
    sizes = step_values({"at": {"0": 2, "3": 4, "5": 6}})
    drawn = np.concatenate([indices_of("sequential", 0, step, sizes, examples=1000) for step in range(1, 9)])
    assert drawn.tolist() == list(range(32))


def test_the_batches_tokens_and_flops_of_a_run(tmp_path: Path) -> None:
    run, constant = small_run(tmp_path, JUMPS), small_run(tmp_path, "batch.sequences=4")
    trainer = Trainer(run, Memory())
    assert [len(trainer.batch(step).targets) for step in range(1, 9)] == SIZES
    plan, same_total = run_plan(run), run_plan(constant)  # 8 steps of 4: 32 examples as well
    assert plan.tokens == 32 * 12
    assert (plan.flops, plan.epochs) == (same_total.flops, same_total.epochs)
    assert run.digest != constant.digest
    progress = TrainingProgress(run.tokens_before, quiet=True)
    progress.first, progress.last, progress.seconds = 3, 5, 2.0
    assert progress.tokens_per_second == 8 * 12 / 2
    for end in (f"tokens={20 * 12}", f"epochs={20 / len(run.data.examples('train', 'sequential'))}"):
        assert small_run(tmp_path, "steps=null", end, JUMPS).steps == 6


def test_a_run_with_flops_has_the_steps_that_compute_them(tmp_path: Path) -> None:
    write_run(tmp_path)
    sets = ["steps=null", "flops=2000", JUMPS]
    run = load_run(tmp_path / "small.yaml", PLUGINS, sets=sets, count=lambda graph, sequences, length: 100 * sequences)
    assert run.steps == 6  # 20 examples of 100


def test_resumed_runs_are_equal(tmp_path: Path) -> None:
    run = small_run(tmp_path, JUMPS, "batch.length=9", "model.dropout=0.1")
    full, weights = trained(run)
    for stop in (2, 3, 5):
        first, _ = trained(run, until=stop)
        second, resumed = trained(run, Memory(first.saved))
        assert first.losses + second.losses == full.losses
        assert same(resumed, weights)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{at: {2: 4}}", "the first step must be 0; got 2"),
        ("{at: {0: 4, 5: 8, 3: 2}}", "steps must increase; got 3 after 5"),
        ("{at: {0: 4, 8: 6}}", "the change after 8 steps has no effect: the run has 8 steps"),
        ("{from: 2, to: 4, over: 20}", "has no effect: the run has 8 steps"),
        ("{at: {0: 4, x: 6}}", "a step must be an integer, or a fraction between 0 and 1; got `x`"),
        ("{at: {0: 4, 2: 1.5}}", "the value must be an integer from 1"),
        ("{from: 4, over: 3}", "must have `at`, or `from`, `to` and `over`"),
        ("{from: 4, to: 4, over: 3}", "`to` has no effect"),
        ("{from: 4, to: 6, over: 0}", "`over` must be a number of steps"),
    ],
)
def test_errors(value: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        small_run(tmp_path, f"batch.sequences={value}")
    assert words in str(error.value)


def test_limits_of_a_run_with_changes(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a batch of 3 sequences cannot be divided among 2"):
        check_count(small_run(tmp_path, "batch.sequences={at: {0: 2, 3: 3, 5: 4}}"), 2)
    with pytest.raises(SpecError, match="must be combined with `steps`"):
        small_run(tmp_path, "steps=null", "tokens=1000", "batch.sequences={at: {0: 2, 0.5: 4}}")
    with pytest.raises(SpecError, match="`micro_batch` must be at most the batch, 6 sequences; got 7"):
        small_run(tmp_path, JUMPS, "machine.micro_batch=7")
    with pytest.raises(SpecError, match="a key must be text"):
        small_run(tmp_path, "batch={sequences: {0: 2}, length: 12}")
    evaluation = "eval={every: 4, splits: {val: 2}}"
    before, after = small_run(tmp_path, evaluation), small_run(tmp_path, evaluation, JUMPS)
    assert evaluation_differences(before, after, "val.loss") == []  # 6 sequences in each evaluation
    assert small_run(tmp_path, JUMPS).digest == load_run(_python_run(tmp_path), PLUGINS).digest


def _python_run(folder: Path) -> dict[str, object]:
    return {"extends": str(folder / "small.yaml"), "batch": {"sequences": {"at": {0: 2, 3: 4, 5: 6}}, "length": 12}}


def test_two_processes_share_the_examples_of_each_step(tmp_path: Path) -> None:
    run = small_run(tmp_path, JUMPS)
    alone, *halves = (Trainer(run, Memory(), processes=each) for each in (Processes(), Half(0), Half(1)))
    for step, size in enumerate(SIZES, 1):
        parts = [half.batch(step).inputs["tokens"] for half in halves]
        assert [len(part) for part in parts] == [size // 2] * 2
        assert (np.concatenate(parts) == alone.batch(step).inputs["tokens"]).all()


def test_check_measures_a_run_with_changes(tmp_path: Path) -> None:
    subject = reduced_run(small_run(tmp_path, JUMPS), PLUGINS)
    assert subject.run.sizes.values == (4, 2)
    assert {outcome.status for outcome in outcomes_of(subject, [epoch_order, loss_sums])} == {"ok"}
