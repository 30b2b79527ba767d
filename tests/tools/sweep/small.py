"""A sweep of small runs in the current folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.run.training.runs import RUN, write_run
from tfkit.cli import main

SWEEP = """\
tfkit: 1
base: small.yaml
variants:
  relu: {}
  again: {model: {graph: {decoder: {ffn: {kind: relu}}}}}
  gelu: {model.decoder.ffn.kind: gelu}
seeds: [0, 1, 2]
compare: {to: relu, on: val.loss}
"""
TUNE = "tune: {over: {optimizer.lr: [1e-6, 1e-2]}, seeds: [9], steps: 4}\n"
MEMORY = 2**28
"""Bytes in use at the peak of every run that is made in this process."""


def write(text: str, folder: Path = Path()) -> None:
    (folder / "sweep.yaml").write_text(text, encoding="utf-8")


def write_files(folder: Path) -> None:
    """The sweep and its run."""
    write_run(folder, RUN + "eval: {every: 4, splits: {val: {batches: 2}}, metrics: [loss, accuracy]}\n")
    write(SWEEP, folder)


def sweep(*options: str) -> int:
    return main(["sweep", "sweep.yaml", "-o", "out", *options, "--no-plugins"])


def result(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> dict[str, Any]:
    """The result as data."""
    capsys.readouterr()
    assert sweep("--json", *options) == status
    text = capsys.readouterr().out
    report: dict[str, Any] = json.loads(text[text.index('{\n  "name"') :])
    return report


def drawn(page: str) -> tuple[list[str], int]:
    """What the charts of a page are called, and the number of its pictures of models."""
    return re.findall('<svg [^>]*class="chart"[^>]*aria-label="([^"]*)"', page), page.count('class="picture"')
