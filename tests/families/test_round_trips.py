"""Round trips of published folders, of which `tools/round_trips.py` makes all."""

from __future__ import annotations

from pathlib import Path

import pytest

from .round_trip import round_trip

CASES = ("bart", "gemma2", "gpt2", "mixtral", "t5")


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True], ids=["saved", "trained"])
@pytest.mark.parametrize("name", CASES)
def test_generation_comes_back(name: str, trained: bool, tmp_path: Path) -> None:
    assert round_trip(name, tmp_path, trained=trained) == []
