"""The lines of `metrics.jsonl`: those that tfkit does not write are named."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfkit
from tfkit.tools.common.history import METRICS, read_history, read_metric_lines

FIRST = b'{"step": 2, "loss": 1.5}\n'
DAMAGED = {
    "text": (b"nonsense\n", "its JSON is broken at column 1: Expecting value"),
    "list": (b"[2]\n", "its JSON is not an object"),
    "twice": (b'{"step": 4, "loss": 1.5, "loss": 2.5}\n', "its JSON has the key `loss` twice"),
    "deep": (b'{"a":' * 100_000 + b"\n", "its JSON is nested too deeply"),
    "no step": (b'{"loss": 1.5}\n', "it has no `step`"),
    "list of numbers": (b'{"step": 4, "loss": [1.5]}\n', "`loss` must be a number or a text"),
    "long": (b'{"step": 4, "loss": -' + b"7" * 400 + b"}\n", "`loss` must be an integer of at most 64 bits"),
    "long step": (b'{"step": ' + b"7" * 400 + b"}\n", "`step` must be an integer of at most 64 bits"),
    "too long": (b'{"step": ' + b"7" * 5000 + b"}\n", "its JSON has a number that is too long"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_named(name: str, tmp_path: Path) -> None:
    content, reason = DAMAGED[name]
    (tmp_path / METRICS).write_bytes(FIRST + content)
    with pytest.raises(tfkit.SpecError) as refused:
        read_history(tmp_path)
    assert str(refused.value) == f"error: cannot read `{tmp_path / METRICS}`, line 2: {reason}"


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(FIRST + b'{"step": 4, "lo')
    assert read_metric_lines(tmp_path) == [{"step": 2, "loss": 1.5}]
