"""Small runs for tests of a single kind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import tfkit
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run

PLUGINS = tfkit.load_plugins(entry_points=False)
RUN = """\
tfkit: 1
name: small
model:
  vocab_size: data.vocab_size
  d_model: 16
  graph:
    embedding: {{block: embedding, position: {{kind: learned, max_len: 128}}}}
    decoder: {{block: decoder, n_layers: 1, attention: {{kind: mha, n_heads: 2}}, ffn: {{kind: relu, d_ff: 32}}}}
    head: lm_head
data: {data}
batch: {batch}
steps: 2
optimizer: {optimizer}
"""


def small_run(
    folder: Path, data: str, *sets: str, length: int | None = None, optimizer: str = "{kind: adamw, lr: 1e-2}"
) -> Run:
    """The run of some data, written as YAML, with some of its values changed."""
    path = folder / "small.yaml"
    batch = "{sequences: 4}" if length is None else f"{{sequences: 4, length: {length}}}"
    path.write_text(RUN.format(data=data, batch=batch, optimizer=optimizer), encoding="utf-8")
    return load_run(path, PLUGINS, sets=sets)


def refused(folder: Path, data: str, *sets: str, length: int | None = None) -> str:
    """The error of a run that is wrong."""
    with contextlib.chdir(folder):  # errors then show short paths
        try:
            small_run(Path(), data, *sets, length=length)
        except SpecError as error:
            return str(error)
    raise AssertionError(f"{data} is accepted")
