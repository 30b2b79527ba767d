"""Generated answers, compared with a handwritten loop; and floors, compared with counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import tfkit
from tfkit.errors import Invalid, SpecError
from tfkit.run.contract import IGNORE_INDEX, Ratio
from tfkit.run.guarded_data import GuardedData
from tfkit.run.kinds.calculator import SYMBOLS
from tfkit.run.kinds.metrics import _answer_start, exact_matches
from tfkit.run.run_spec import SplitConfig
from tfkit.run.training.evaluate import evaluate_splits

from .small import small_run
from .test_tasks import PAIR

ROWS = "{kind: calculator, problems: 50, test: 40, layout: rows, loss_on: answer}"
ALL_OF_TEST = {"test": SplitConfig(batches="all")}


def numbers_of(
    folder: Path,
    metrics: str,
    *sets: str,
    data: str = ROWS,
    splits: dict[str, SplitConfig] = ALL_OF_TEST,
    end: int | None = None,
) -> dict[str, float]:
    evaluated = f"eval={{every: 1, splits: {{train: all}}, metrics: [{metrics}]}}"
    run = small_run(folder, data, evaluated, "batch.sequences=7", *sets)
    assert isinstance(run.data, GuardedData)
    run.data.end = end
    model = tfkit.build(run.graph, seed=1)
    assert run.config.eval is not None
    return evaluate_splits(model, run, splits, run.config.eval.metrics)


@pytest.mark.parametrize("stops", [None, "metric", "data"])
def test_greedy_answers_are_written_token_by_token(stops: str | None, tmp_path: Path) -> None:
    run = small_run(tmp_path, ROWS)
    model = tfkit.build(run.graph, seed=1).eval()
    batch = run.data.examples("test", "sequential").batch(np.arange(40))
    tokens, targets = torch.from_numpy(batch.inputs["tokens"]), torch.from_numpy(batch.targets[:, -11:])
    read = tokens[:, :25]
    with torch.no_grad():
        for _ in range(11):
            read = torch.cat([read, model(read)[:, -1:].argmax(-1)], dim=1)
    written, option, stop = read[:, 25:], "", None
    if stops is not None:
        stop = int(written[:, 5].mode().values)
        option = f", stop: {SYMBOLS[stop]!r}" if stops == "metric" else ""
        ended = written.masked_fill((written == stop).cumsum(1) > 0, stop)
        assert (ended == targets).sum() != (written == targets).sum()
        written = ended
    metrics = f"{{kind: decoded_accuracy{option}}}, {{kind: decoded_exact_match{option}}}"
    actual = numbers_of(tmp_path, metrics, end=stop if stops == "data" else None)
    assert actual["test.decoded_accuracy"] == pytest.approx((written == targets).float().mean().item())
    assert actual["test.decoded_exact_match"] == (written == targets).all(-1).float().mean().item()


def test_a_model_may_write_tokens_that_the_data_lacks(tmp_path: Path) -> None:
    """Such a token is a wrong answer."""
    evaluated = "eval={every: 1, splits: {train: all}, metrics: [decoded_accuracy]}"
    run = small_run(tmp_path, ROWS, evaluated, "batch.sequences=7", "model.vocab_size=30")
    model = tfkit.build(run.graph, seed=1)
    with torch.no_grad():
        model.head.output.weight.zero_()[29] = 1.0
        model.decoder.final_norm.bias.fill_(100.0)
    assert run.config.eval is not None
    numbers = evaluate_splits(model, run, ALL_OF_TEST, run.config.eval.metrics)
    assert numbers == {"test.decoded_accuracy": 0.0}


def test_a_temperature_changes_answers_and_the_same_are_drawn_again(tmp_path: Path) -> None:
    hot = "{kind: decoded_accuracy, temperature: 1}"
    assert numbers_of(tmp_path, hot) == numbers_of(tmp_path, hot) != numbers_of(tmp_path, "decoded_accuracy")
    assert numbers_of(tmp_path, hot) == numbers_of(tmp_path, hot, "machine.micro_batch=3")


def test_an_encoder_decoder_writes_to_its_source(tmp_path: Path) -> None:
    run = small_run(
        tmp_path, "{kind: copy, layout: pair, symbols: 3, items: 4, sequences: 60}", PAIR, "batch.sequences=5"
    )
    model = tfkit.build(run.graph, seed=1).eval()
    examples = run.data.examples("val", "sequential")
    batch = examples.batch(np.arange(len(examples)))
    source, targets = torch.from_numpy(batch.inputs["source"]), torch.from_numpy(batch.targets)
    read = torch.full_like(source[:, :1], 3)
    with torch.no_grad():
        for _ in range(4):
            read = torch.cat([read, model(source, read)[:, -1:].argmax(-1)], dim=1)
    config = small_run(tmp_path, "{kind: addition}", "eval={every: 1, splits: {val: all}, metrics: [decoded_accuracy]}")
    assert config.config.eval is not None
    splits = {"val": SplitConfig(batches="all")}
    results = evaluate_splits(model, run, splits, config.config.eval.metrics)
    assert results["val.decoded_accuracy"] == pytest.approx((read[:, 1:] == targets).float().mean().item())


def test_constants_are_counted(tmp_path: Path) -> None:
    actual = numbers_of(tmp_path, "constant_accuracy, constant_exact_match")
    batch = small_run(tmp_path, ROWS).data.examples("test", "sequential").batch(np.arange(40))
    answers = [tuple(row) for row in batch.targets[:, -11:].tolist()]
    counts = [Counter(column).most_common(1)[0][1] for column in zip(*answers, strict=True)]
    assert (batch.targets[:, :-11] == IGNORE_INDEX).all()
    assert actual["test.constant_accuracy"] == pytest.approx(sum(counts) / (11 * 40))
    assert actual["test.constant_exact_match"] == Counter(answers).most_common(1)[0][1] / 40


def test_an_example_without_an_answer_does_not_count() -> None:
    targets = torch.tensor([[IGNORE_INDEX, 3, 4], [IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX], [5, IGNORE_INDEX, 6]])
    correct = torch.tensor([[False, True, True], [True, True, True], [True, True, False]])
    assert exact_matches(correct, targets) == Ratio(1, 2)


@pytest.mark.parametrize("answer", [[-100, 2, 3, 4], [-100, -100, -100, 4], [-100, -100, 3, -100]])
def test_answers_that_do_not_fill_the_same_positions_are_an_error(answer: list[int]) -> None:
    first = [-100, -100, 3, 4]
    assert _answer_start(torch.tensor([first, first]), minimum=1) == 2
    with pytest.raises(Invalid, match="all answers must start at the same position"):
        _answer_start(torch.tensor([first, answer]), minimum=1)


def test_errors(tmp_path: Path) -> None:
    train = {"train": SplitConfig(batches=1)}
    with pytest.raises(SpecError, match="every example must end with an answer"):
        numbers_of(tmp_path, "decoded_accuracy", data="{kind: addition, loss_on: all}", splits=train)
    with pytest.raises(SpecError, match="`#` is not a token of the data"):
        numbers_of(tmp_path, "{kind: decoded_accuracy, stop: '#'}")
    with pytest.raises(SpecError, match="`loss` must be listed once: both metrics would have the same name"):
        numbers_of(tmp_path, "loss, loss")
    with pytest.raises(SpecError, match="`bits_per_byte` needs text"):
        numbers_of(tmp_path, "bits_per_byte", data="{kind: copy}", splits=train)
