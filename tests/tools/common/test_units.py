"""Numbers with units as texts."""

from __future__ import annotations

import pytest

from tfkit.tools.common.units import bytes_text, count_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.0K"), (124_439_808, "124.4M"), (999_960, "1.0M"), (405_853_388_800, "405.9B")],
)
def test_short(count: int, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (497_759_232, "497.8 MB"), (1_623_413_555_200, "1.6 TB")],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text
