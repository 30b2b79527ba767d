"""Places that show the numbers of a run, in addition to `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tfkit.errors import Invalid
from tfkit.run.contract import Tracker, TrackerConfig


class TensorBoardConfig(TrackerConfig):
    """TensorBoard, in the folder `tb` of the run."""

    kind: Literal["tensorboard"] = "tensorboard"

    def build(self, folder: Path, step: int) -> Tracker:
        try:
            return TensorBoard(folder / "tb", step)
        except ModuleNotFoundError as error:
            message = f"`tensorboard` needs the package {error.name}"
            raise Invalid("", message, help='pip install "tfkit[profile]", or remove it from `track`') from error


class TensorBoard:
    """Event files. Events of steps that are run again are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name.replace(".", "/"), number, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, f"    {text.replace(chr(10), chr(10) + '    ')}", step)  # indented: not Markdown

    def close(self) -> None:
        self._writer.close()
