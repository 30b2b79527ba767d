"""A folder with a small sweep and its base run, and its runs, trained in this process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tfkit.run.training import memory
from tfkit.tools.sweep import sweep as module

from .in_process import InProcess
from .small import MEMORY, SWEEP, TUNE, sweep, write, write_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def new_folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train runs in this process, and return the names of the folders of the trained runs."""
    here = InProcess()
    monkeypatch.setattr(module, "train_missing_runs", here)
    monkeypatch.setattr(memory, "peak_memory", lambda device: MEMORY)
    return here.made


def trained(folder: Path) -> list[str]:
    """Train the runs of the sweep in a folder, and return the names of their folders."""
    here = InProcess()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(module, "train_missing_runs", here)
        patched.setattr(memory, "peak_memory", lambda device: MEMORY)
        assert sweep() == 0
    return here.made


@pytest.fixture(scope="session")
def complete_sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder in which the sweep is made, and the folders of its runs."""
    folder = tmp_path_factory.mktemp("sweep")
    write_files(folder)
    return folder / "out", trained(folder)


@pytest.fixture(scope="session")
def complete_tuned_sweep(complete_sweep: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the sweep is made with tuning."""
    folder = tmp_path_factory.mktemp("tuned")
    write_files(folder)
    write(SWEEP + TUNE, folder)
    shutil.copytree(complete_sweep[0], folder / "out")
    trained(folder)
    return folder / "out"


@pytest.fixture
def finished(complete_sweep: tuple[Path, list[str]], here: None, new_folders: list[str]) -> list[str]:
    """Names of the folders of the sweep's runs, which are all trained; further folders are in `new_folders`."""
    shutil.copytree(complete_sweep[0], "out")
    return complete_sweep[1]


@pytest.fixture
def tuned(complete_tuned_sweep: Path, here: None, new_folders: list[str]) -> None:
    """The sweep with tuning, in the current folder; all its runs are trained."""
    write(SWEEP + TUNE)
    shutil.copytree(complete_tuned_sweep, "out")
