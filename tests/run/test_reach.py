"""Digests of the code of a kind: changes that affect them, and changes that do not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfkit.plugin.import_code import MODULE_PREFIX, load_file
from tfkit.run import reach

FILES = {
    "__init__.py": '''
"""A plugin."""
import tfkit
from .layers import Own

class OwnConfig(tfkit.FFNConfig):
    """An FFN."""
    kind: str = "own"
    """Its name."""
    def build(self, make):
        return Own(self.d_model)

@tfkit.hookimpl
def tfkit_register(register):
    register(OwnConfig)
''',
    "layers.py": '''
from dataclasses import dataclass
from torch import nn
from torch.nn.functional import relu as activation
from .constants import *
TABLE = {}

def half(x):
    return x / 2  # of x

def counted(function):
    TABLE[function.__name__] = function
    return function

@counted
def twice(x):
    return 2 * x

TABLE["third"] = lambda x: x / 3

@dataclass
class Settings:
    width: int

class Own(nn.Module):
    """[b, t, d] -> the same."""
    def __init__(self, d):
        super().__init__()
        self.linear = nn.Linear(Settings(d).width, d)
    def forward(self, x):
        from .late import shift
        return shift(activation(self.linear(x)) * SCALE + half(x)) + TABLE["twice"](x)
''',
    "late.py": """
def shift(x):
    return x + 1

def unused(x):
    return x
""",
    "constants.py": "SCALE = 2.0\nOTHER = 3.0\n",
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name.startswith(MODULE_PREFIX) and name not in before]:
        del sys.modules[name]


def digests(folder: Path, **edits: tuple[str, str]) -> dict[str, str]:
    """The digests of the plugin in a new folder, with edits of its modules."""
    folder = folder / str(len(list(folder.iterdir()))) / "own"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        old, new = edits.get(name.removesuffix(".py"), ("", ""))
        assert old in text
        (folder / name).write_text(text.replace(old, new) if old else text, encoding="utf-8")
    module: Any = load_file(folder)[0]
    return dict(reach.digests_of_class(module.OwnConfig))


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("layers", "x / 2  # of x", "(\n        x /\n        2\n    )"),
        ("layers", '"""[b, t, d] -> the same."""', '"""Another docstring."""'),
        ("__init__", '"""Its name."""', ""),
        ("layers", "TABLE = {}", "TABLE = {}\n\n\nclass Another(nn.Module):\n    width = 3\n"),
        (
            "layers",
            "@dataclass\nclass Settings",
            "@dataclass\nclass Another:\n    size: int\n\n@dataclass\nclass Settings",
        ),
        ("__init__", "    register(OwnConfig)", "    register(OwnConfig)\n    print()"),
        ("late", "    return x\n", "    return 2 * x\n"),
        ("constants", "OTHER = 3.0", "OTHER = 4.0"),
    ],
)
def test_the_same_code(module: str, old: str, new: str, tmp_path: Path) -> None:
    assert digests(tmp_path, **{module: (old, new)}) == digests(tmp_path)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("__init__", "Own(self.d_model)", "Own(self.d_model + 1)"),
        ("layers", "relu as activation", "tanh as activation"),
        ("layers", "x / 2", "x / 4"),
        ("layers", "return 2 * x", "return 3 * x"),
        ("layers", "x / 3", "x / 4"),
        ("layers", "width: int", "width: float"),
        ("layers", "TABLE = {}", "TABLE = {'twice': None}"),
        ("late", "x + 1", "x + 2"),
        ("constants", "SCALE = 2.0", "SCALE = 2.5"),
    ],
)
def test_other_code(module: str, old: str, new: str, tmp_path: Path) -> None:
    before, after = digests(tmp_path), digests(tmp_path, **{module: (old, new)})
    name = "own" if module == "__init__" else f"own.{module}"
    assert [key for key in before if before[key] != after[key]] == [name]


def test_a_file_that_is_no_source_counts_as_one_piece(tmp_path: Path) -> None:
    for number in range(2):
        file = tmp_path / f"own{number}.py"
        file.write_text("class OwnConfig: pass\n", encoding="utf-8")
    first, second = (load_file(tmp_path / f"own{number}.py")[0] for number in range(2))
    for number in range(2):
        (tmp_path / f"own{number}.py").write_bytes(b"\x00" * (number + 1))
    (first_digest,), (second_digest,) = (
        reach.digests_of_class(module.OwnConfig).values() for module in (first, second)
    )  # type: ignore[attr-defined]
    assert first_digest != second_digest


def test_the_code_of_tfkit_that_computes_counts() -> None:
    from tfkit.components.feedforward import SwiGLUConfig
    from tfkit.run.training.loop import Trainer

    assert {"tfkit.components.feedforward", "tfkit.nn.layers", "tfkit.component.slots"} <= {
        *reach.digests_of_class(SwiGLUConfig)
    }
    loop = reach.digests_of_class(Trainer)
    assert {"tfkit.run.training.loop", "tfkit.run.training.order", "tfkit.building.initialize"} <= {*loop}
    assert {"tfkit.learning.loss", "tfkit.learning.chunked_loss", "tfkit.learning.adamw"} <= {*loop}
    assert all(name.startswith(reach.COMPUTING) for name in loop)
