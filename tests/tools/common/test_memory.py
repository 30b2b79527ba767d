from __future__ import annotations

import pytest
import torch

import tfkit
from tfkit.tools.common.memory import check_memory, free_memory, size_of
from tfkit.tools.common.units import bytes_text


def test_size_is_that_of_the_built_model(small: tfkit.Graph) -> None:
    model = tfkit.build(small, device="meta", dtype=torch.bfloat16)
    assert size_of(model) == 2 * sum(parameter.numel() for parameter in model.parameters())


def test_what_fits_and_what_does_not(small: tfkit.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tfkit.build(small, device="meta")
    monkeypatch.setattr("tfkit.tools.common.memory.free_memory", lambda device: 2 * size_of(model))
    check_memory(model, "cpu")
    monkeypatch.setattr("tfkit.tools.common.memory.free_memory", lambda device: size_of(model))
    with pytest.raises(tfkit.SpecError, match="not enough memory on cpu"):
        check_memory(model, "cpu")


def test_this_machine_has_memory() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (497_759_232, "497.8 MB"), (1_623_413_555_200, "1.6 TB")],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text
