"""The utilisation of a device by a run, compared with separate arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.training.runs import small_run
from tfkit.tools.cost.devices import listed_devices
from tfkit.tools.train.plan import device_of_run, device_utilisation


def test_causal_and_full(tmp_path: Path) -> None:
    run = small_run(tmp_path, "precision=bfloat16")
    width, ffn, vocabulary, length, layers = 16, 32, run.data.vocab_size, 12, 2
    weights = layers * (4 * width * width + 2 * width * ffn) + width * vocabulary
    pairs = layers * 2 * width * length  # scores and mixing, for each token
    records = layers * 2 * width * (length + 1) / 2
    actual = device_utilisation(run, 1e9, listed_devices()["h100"])
    assert actual is not None
    peak = 989.5e12
    assert actual.full == pytest.approx(1e9 * 6 * (weights + pairs) / peak, rel=0.05)
    assert actual.causal == pytest.approx(1e9 * 6 * (weights + records) / peak, rel=0.05)
    assert actual.full - actual.causal == pytest.approx(1e9 * 6 * (pairs - records) / peak, rel=0.02)


def test_an_unknown_device_has_none(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    assert device_of_run(run) is None
    assert device_utilisation(run, 1e9, None) is None
