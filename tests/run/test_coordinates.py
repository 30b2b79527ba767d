"""The coordinate check of `tools/coordinates.py`, with few widths and seeds."""

from __future__ import annotations

import pytest

from tools import coordinates

SIZES = {"widths": (64, 256), "depths": (2,), "seeds": 2}


@pytest.mark.slow
@pytest.mark.parametrize("check", ["standard", "mup", *(f"mup without {fault}" for fault in coordinates.FAULTS)])
def test_components_change_as_the_parametrization_says(check: str) -> None:
    kind, fault = coordinates.CHECKS[check]
    slopes = coordinates.slopes_of(kind, fault=fault, **SIZES)  # type: ignore[arg-type]
    text, expected = coordinates.verdict(kind, fault, slopes)
    assert expected, (text, slopes)


@pytest.mark.slow
def test_sublayers_of_deep_stacks_change_no_more() -> None:
    slopes = coordinates.slopes_of("completep", widths=(64,), depths=(2, 8), seeds=2)
    assert coordinates.verdict("completep", None, slopes)[1], slopes
