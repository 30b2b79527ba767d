"""A plugin with an FFN and data that tests edit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.run.training.runs import RUN, write_run
from tfkit.plugin.import_code import MODULE_PREFIX
from tfkit.run import reach

FFN = '''
from typing import Literal

import numpy as np
from torch import nn

import tfkit
from .helper import activate


class OwnConfig(tfkit.FFNConfig):
    """An FFN."""

    kind: Literal["own"] = "own"

    def build(self, make):
        return Own(self.d_model)


class Own(nn.Module):
    """[b, t, d_model] -> the same."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        return self.down(activate(self.up(x)))


class TaughtConfig(tfkit.LossConfig):
    """Cross-entropy, and the distance from a teacher's logits."""

    kind: Literal["taught"] = "taught"
    teacher: tfkit.ContentPath

    @property
    def predicts_targets(self):
        return True

    def build(self, model):
        return Taught(model, tfkit.build(self.teacher).requires_grad_(False))


class Taught(nn.Module):
    def __init__(self, model, teacher):
        super().__init__()
        self.loss, self.model, self.teacher = tfkit.Loss(model, reduction="sum"), model, teacher

    def forward(self, inputs, targets):
        distance = (self.model(inputs["tokens"]) - self.teacher(inputs["tokens"])).square().sum()
        return self.loss(inputs, targets) + distance


class StripesConfig(tfkit.DataConfig):
    """Rows of numbers that rise."""

    kind: Literal["stripes"] = "stripes"

    def build(self, length):
        return Stripes()


class Stripes:
    vocab_size, length, splits, fingerprint, tokenizer = 12, 12, ("train", "val"), "", None

    def examples(self, split, order):
        return self

    def __len__(self):
        return 40

    def batch(self, indices):
        rows = (indices[:, None] + np.arange(13)) % 12
        return tfkit.Batch({"tokens": rows[:, :-1]}, rows[:, 1:])


@tfkit.hookimpl
def tfkit_register(register):
    register(OwnConfig)
    register(StripesConfig)
    register(TaughtConfig)
'''
HELPER = "import torch\n\n\ndef activate(x):\n    return torch.relu(x)\n"
OWN_RUN = RUN.replace("{kind: relu, d_ff: 32}", "own")


def write_plugin(text: str = OWN_RUN) -> None:
    """The plugin and a run that uses it, in the current folder."""
    write_run(Path(), text)
    Path("own").mkdir()
    Path("own/__init__.py").write_text(FFN, encoding="utf-8")
    Path("own/helper.py").write_text(HELPER, encoding="utf-8")


def edit(file: str, old: str, new: str) -> None:
    """Edit a file of the plugin, which the next command imports as a new process would."""
    path = Path("own", file)
    text = path.read_text(encoding="utf-8")
    assert old in text
    written = path.stat().st_mtime
    path.write_text(text.replace(old, new), encoding="utf-8")
    os.utime(path, times=(written + 2, written + 2))  # bytecode is renewed by the second
    forget()


def forget() -> None:
    """Forget the modules of the plugin, and what was read of them."""
    for name in [name for name in sys.modules if name.startswith(f"{MODULE_PREFIX}own_")]:
        del sys.modules[name]
    for cached in (reach._module_source, reach._module_file):
        cached.cache_clear()
