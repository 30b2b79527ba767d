"""A sweep does not combine runs that different code trained, unless an option accepts it; the results then state it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools.train.plugin import OWN_RUN, edit, forget, write_plugin
from tfkit.cli import main
from tfkit.tools.sweep import sweep as module

from .small import TUNE, write

SWEEP = """\
tfkit: 1
base: small.yaml
variants:
  own: {}
  relu: {model.decoder.ffn: {kind: relu, d_ff: 8}}
seeds: [0]
compare: {to: own, on: val.loss}
"""
EVAL = "eval: {every: 8, splits: {val: {batches: 1}}}\n"


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_folders: list[str]) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(tmp_path / "own"))
    write_plugin(OWN_RUN + EVAL)
    write(SWEEP)
    yield
    forget()


def sweep(*options: str) -> int:
    return main(["sweep", "sweep.yaml", "-o", "out", *options])


def test_other_code_is_an_error_that_names_it(
    new_folders: list[str], golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep() == 0
    edit("helper.py", "torch.relu(x)", "torch.tanh(x)")
    for options in ((), ("--so-far",), ("--plan",)):
        capsys.readouterr()
        assert sweep(*options) == 1
        printed = capsys.readouterr().err
        assert len(new_folders) == 2
    golden("runs/errors/other_code_in_a_sweep", printed)
    assert sweep("--allow-change", "--markdown") == 0
    assert "different code" not in capsys.readouterr().out  # all runs are of the code before
    write(SWEEP.replace("[0]", "[0, 1]"))
    assert sweep("--allow-change") == 0
    assert len(new_folders) == 4
    assert "the runs were trained by different code: ffn `own`" in " ".join(capsys.readouterr().out.split())
    assert main(["runs", *(f"out/runs/{name}" for name in new_folders)]) == 0
    assert "the runs were trained by different code: ffn `own`" in " ".join(capsys.readouterr().out.split())


def test_the_code_of_kinds_that_no_variant_has_does_not_count(new_folders: list[str]) -> None:
    write(
        SWEEP.replace("  own: {}\n", "  gelu: {model.decoder.ffn: {kind: gelu, d_ff: 8}}\n").replace(
            "to: own", "to: gelu"
        )
    )
    assert sweep() == 0
    edit("helper.py", "torch.relu(x)", "torch.tanh(x)")
    assert sweep() == 0
    assert len(new_folders) == 2


@pytest.mark.slow
def test_trials_of_other_code_are_not_used(new_folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write(SWEEP + TUNE)
    assert sweep() == 0
    count = len(new_folders)
    edit("helper.py", "torch.relu(x)", "torch.tanh(x)")
    capsys.readouterr()
    assert sweep() == 1
    assert "error: the code of 2 runs has changed since they began" in capsys.readouterr().err
    assert len(new_folders) == count


def test_the_processes_of_runs_accept_what_the_sweep_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Sequence[str]] = []

    def work(cells: Any, *, options: Sequence[str], **_: Any) -> dict[str, str]:
        passed.append(options)
        return {}

    monkeypatch.setattr(module, "train_missing_runs", work)
    assert sweep() == 0
    assert sweep("--allow-change") == 0
    assert passed == [[], ["--allow-change"]]
