"""The layers of a config.json as the pattern of a spec."""

from __future__ import annotations

from typing import Any

import pytest

from tfkit.checkpoint.config_json import pattern_of


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ("b", ["b"]),
        ("bbb", ["b"]),
        ("ab", {"0": "a", "rest": "b"}),
        ("aabbb", {"0-1": "a", "rest": "b"}),
        ("abab", ["a", "b"]),
        ("aabaab", ["a*2", "b"]),
        ("abc", ["a", "b", "c"]),
        ("aba", ["a", "b"]),
        ("abbca", ["a", "b*2", "c"]),
    ],
)
def test_layers_have_the_shortest_pattern(names: str, pattern: Any) -> None:
    assert pattern_of([*names]) == pattern
