"""Small runs for tests: models of width 16 that learn a short text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

import tfkit
from tfkit.run.checked_run import Run, load_run
from tfkit.run.training.adapters import checkpoint_tensors
from tfkit.run.training.checkpoint import Checkpoint, Restored
from tfkit.run.training.loop import Trainer
from tfkit.tools.cost.counter import LiveMemory
from tfkit.torch_private.tensors import tensors_in

from ...docs.page import blocks

PLUGINS = tfkit.load_plugins(entry_points=False)
MEDIA, RECURRENT, STREAMS = (
    Path(__file__).parents[3] / "plugins" / f"tfkit-{name}" for name in ("media", "recurrent", "streams")
)
WITH_PLUGINS = tfkit.load_plugins(plugin_dirs=[MEDIA, RECURRENT, STREAMS], entry_points=False)
"""With the plugins that some of the runs and sweeps that come with tfkit require."""
PLUGIN_OPTIONS = [
    "--no-plugins",
    *(word for root in (MEDIA, RECURRENT, STREAMS) for word in ("--plugin-dir", str(root))),
]
"""The options of a command that load these plugins alone."""
TEXT = "".join(f"{number} sheep and {number * 7 % 13} goats went up the hill.\n" for number in range(150))
BUMP = '''"""An activation of a test."""

from typing import Literal

import tfkit
from torch import nn


class BumpConfig(tfkit.ActivationConfig):
    kind: Literal["bump"] = "bump"

    def build(self, make: tfkit.Make) -> nn.Module:
        return nn.Tanh()


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(BumpConfig)
'''
"""A plugin with the activation `bump`."""
RUN = """\
tfkit: 1
name: small
seed: 3
model:
  vocab_size: data.vocab_size
  d_model: 16
  graph:
    embedding: {block: embedding, position: {kind: learned, max_len: 12}}
    decoder: {block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 32}}
    head: lm_head
data: {kind: text, files: sheep.txt}
batch: {sequences: 6, length: 12}
steps: 8
optimizer: {kind: adamw, lr: 1e-2}
"""


def write_run(folder: Path, text: str = RUN) -> Path:
    """The run and its text as files."""
    (folder / "sheep.txt").write_text(TEXT, encoding="utf-8")
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def write_objectives(folder: Path) -> Path:
    """Write the files of the pages on preferences and losses and the data of their sums, and return the folder."""
    docs = Path(__file__).parents[3] / "docs"
    for block in (*blocks(docs / "preferences.md"), *blocks(docs / "custom_objectives.md")):
        if block.file is not None:
            file = folder / block.file
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
    draw = random.Random(0)
    with (folder / "sums.jsonl").open("w", encoding="utf-8") as lines:
        for _ in range(400):
            a, b = draw.randrange(30), draw.randrange(30)
            row = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + draw.choice([-2, -1, 1, 2]))}
            lines.write(json.dumps(row) + "\n")
    return folder


def small_run(folder: Path, *sets: str) -> Run:
    return load_run(write_run(folder), PLUGINS, sets=sets)


class Live(TorchDispatchMode):
    """The bytes of all tensors that are created within and still exist; tensors of `before` have no bytes."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.memory = LiveMemory()
        for tensor in before:
            self.memory.number(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self.memory.add(tensor)
        return out


class Memory:
    """A record in memory; `saved` may be continued from."""

    def __init__(self, saved: Restored | None = None) -> None:
        self.saved = saved
        self.lines: list[dict[str, Any]] = []
        self.models: dict[str, dict[str, Tensor]] = {}

    def restored(self, model: fx.GraphModule) -> Restored | None:
        return self.saved

    def resume(self) -> None:
        """Nothing was recorded after the checkpoint."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.lines.append({"step": step, **numbers})

    def text(self, step: int, name: str, text: str) -> None:
        self.lines.append({"step": step, name: text})

    def save(self, checkpoint: Checkpoint) -> None:
        weights = {name: tensor.clone() for name, tensor in checkpoint_tensors(checkpoint.model).items()}
        optimizer = {name: tensor.clone() for name, tensor in checkpoint.optimizer.items()}
        tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
        rest = checkpoint.callbacks, checkpoint.ended, checkpoint.skipped, tensors
        self.saved = Restored(checkpoint.step, weights, optimizer, *rest)

    def saving(self) -> Callable[[Checkpoint], None]:
        return self.save

    @contextmanager
    def shards(self) -> Iterator[Path]:
        with TemporaryDirectory() as folder:
            yield Path(folder)

    def save_model(self, name: str, model: fx.GraphModule) -> None:
        self.models[name] = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    def close(self) -> None:
        """Nothing is left to write."""

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if "loss" in line]


def trained(run: Run, memory: Memory | None = None, **options: Any) -> tuple[Memory, dict[str, Tensor]]:
    """The record of a run, and its weights."""
    memory = memory or Memory()
    trainer = Trainer(run, memory, **options)
    trainer.train()
    return memory, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(first: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str] | None = None) -> bool:
    """True if tensors are equal to the last bit."""
    return all(bool((first[name] == other[name]).all()) for name in (first if names is None else names))
