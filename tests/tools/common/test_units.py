"""Numbers as texts."""

from __future__ import annotations

import pytest

from tfkit.tools.common.units import short


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.0K"), (124_439_808, "124.4M"), (999_960, "1.0M"), (405_853_388_800, "405.9B")],
)
def test_short(count: int, text: str) -> None:
    assert short(count) == text
