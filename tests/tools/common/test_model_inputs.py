from __future__ import annotations

import torch

import tfkit
from tfkit.tools.build.first_run import first_run
from tfkit.tools.common.model_inputs import random_inputs


def test_each_input_is_of_its_kind(captions: tfkit.Graph) -> None:
    inputs = random_inputs(captions, batch=64)
    assert list(inputs) == ["pixels", "words", "types", "known"]
    assert inputs["pixels"].shape == (64, 12, 10)
    assert inputs["words"].shape == inputs["types"].shape == (64, 12)
    assert (inputs["words"].min(), inputs["words"].max()) == (0, 39)
    assert (inputs["types"].min(), inputs["types"].max()) == (0, 2)
    assert inputs["known"].shape == (64,)
    assert (inputs["known"].min(), inputs["known"].max()) == (1, 12)


def test_length_is_that_of_the_model_up_to_16(small: tfkit.Graph) -> None:
    assert random_inputs(small)["tokens"].shape == (2, 8)
    longer = tfkit.load("gpt2")
    assert random_inputs(longer)["tokens"].shape == (2, 16)
    assert random_inputs(longer, length=5)["tokens"].shape == (2, 5)


def test_the_seed_decides(small: tfkit.Graph) -> None:
    first, again, other = (random_inputs(small, seed=seed)["tokens"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_model_runs_on_them(captions: tfkit.Graph) -> None:
    model, report = first_run(captions, dtype=torch.float64)
    shapes = {node.name: node.shape for node in report.nodes}
    assert shapes["pixels"] == (2, 12, 10)
    assert shapes["both"] == (2, 24, 16)
    assert shapes["logits"] == (2, 24, 40)
    assert model.training
    assert report.bytes == 8 * report.parameters
