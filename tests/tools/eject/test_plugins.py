"""What a plugin's component may do, and what is refused: an ejected file is the model, or there is none."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.cli import main
from tfkit.plugin.manager import load_plugins
from tfkit.tools.eject.alone import Alone
from tfkit.tools.eject.check import check
from tfkit.tools.eject.write import eject

from ...sampling import slow
from ...small_specs import reduced

SPEC = """
tfkit: 1
name: mine
d_model: 8
vocab_size: 13
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: odd, d_ff: 12}}
  logits: {block: lm_head}
"""
PLUGIN = """
from typing import Literal

import torch
from torch import Tensor, nn

import tfkit

LIMIT = 3.0
counted = [0]


def halved(x: Tensor, times: int = 1) -> Tensor:
    for _ in range(times):
        x = x / 2
    return x


class OddConfig(tfkit.FFNConfig):
    kind: Literal["odd"] = "odd"
    d_ff: tfkit.Dim

    def build(self, make):
        return Odd(self)


class Odd(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)
        self.scale = nn.Parameter(torch.empty(config.d_ff, 2))
        self.steps = [1, 2]

    def reset_parameters(self):
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        BODY


@tfkit.hookimpl
def tfkit_register(register):
    register(OddConfig)
"""


def graph_with(
    body: str, folder: Path, init: str = "self.steps = [1, 2]", forward: str = "class Odd", takes: str = "Tensor"
) -> tfkit.Graph:
    text = PLUGIN.replace("class Odd(", f"{forward}(").replace("(self, x: Tensor)", f"(self, x: {takes})")
    text = text.replace("        BODY", textwrap.indent(textwrap.dedent(body).strip(), "        "))
    text = text.replace("self.steps = [1, 2]", init)
    (folder / "odd.py").write_text(text, encoding="utf-8")
    (folder / "mine.yaml").write_text(SPEC, encoding="utf-8")
    return tfkit.load(folder / "mine.yaml", plugins=load_plugins(plugin_dirs=[folder]))


@cache
def ejected() -> tuple[tfkit.Graph, str]:
    """A small GPT-2, and its file."""
    graph = reduced("gpt2")
    return graph, eject(graph)


@pytest.mark.parametrize(
    "body",
    [
        """
        hidden = self.up(x)
        for i, step in enumerate(self.steps):
            hidden = hidden + step * self.scale[:, i]
        return self.down(hidden)
        """,
        """
        hidden = self.up(x)
        if self.config.d_ff > 10 and not self.training:
            hidden = halved(hidden, times=2).clamp(max=LIMIT)
        return self.down(hidden * self.scale.sum(dim=1))
        """,
        """
        pieces = []
        for part in self.up(x).unbind(1):
            if len(pieces) > 2:
                break
            pieces.append(torch.relu(part))
        total = pieces[0]
        for other in pieces[1:]:
            total += other
        return self.down(total[:, None] * self.scale[:, 0]) + 0 * x
        """,
        """
        hidden = [self.down(one) for one in self.up(x).split(2, dim=1)]
        kept: Tensor | None = None
        if x.size(0) > 2:
            kept = hidden[0].sum()
        joined = torch.cat(hidden, dim=1)
        return joined if kept is None else joined + kept
        """,
        """
        hidden = self.up(x)
        hidden[..., 0] = 0.0
        hidden[..., 1] += 1.0
        other = hidden.clone()
        hidden.mul_(2.0)
        return self.down(hidden + other)
        """,
        """
        hidden = self.up(x)
        for i, step in enumerate(self.steps, start=3):
            hidden = hidden + i * step * self.scale[:, 0]
        (only,) = hidden.split(hidden.size(-1), dim=-1)
        return self.down(only)
        """,
        r"""
        '''As in \"\"\"the paper\"\"\", on \N{BULLET} C:\\new, \0 and "quoted"'''
        return self.down(self.up(x))
        """,
    ],
)
def test_what_a_forward_may_do(alone: Alone, body: str, tmp_path: Path) -> None:
    graph = graph_with(body, tmp_path)
    assert check(graph, eject(graph), alone).ran


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("while x.abs().max() > 1:\n    x = x / 2\nreturn x", "`Odd` (odd.py) cannot be ejected: forward: a `while`"),
        ("return (lambda y: 2 * y)(x)", "cannot be ejected: forward: a `lambda`"),
        ("return x * NOWHERE", "cannot be ejected: forward: nothing says what `NOWHERE` is"),
    ],
)
def test_what_cannot_be_written_out_is_refused(
    body: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph_with(body, tmp_path)
    output = tmp_path / "mine.py"
    status = main(["eject", str(tmp_path / "mine.yaml"), "--plugin-dir", str(tmp_path), "-o", str(output)])
    assert status == 1
    assert why in capsys.readouterr().err
    assert not output.exists()


def test_what_the_code_does_not_say_is_found(alone: Alone, tmp_path: Path) -> None:
    hooked = "self.register_forward_hook(lambda module, args, output: 2 * output)"
    graph = graph_with("return self.down(self.up(x))", tmp_path, init=hooked)
    with pytest.raises(tfkit.SpecError, match="computes something else"):
        check(graph, eject(graph), alone)


def test_the_tutorial_plugin(alone: Alone, tmp_path: Path) -> None:
    graph = tfkit.load("char_relu", sets=["decoder.attention.kind=additive", "decoder.n_layers=2"])
    assert check(graph, eject(graph), alone).ran


@pytest.mark.parametrize(
    ("said", "written"),
    [
        slow(("Optional[Tensor]", "x: Tensor | None)")),
        ("typing.Union[Tensor, list[Optional[int]], None]", "x: Tensor | list[int | None] | None)"),
        slow(("torch.nn.Module", "x: nn.Module)")),
        ("Sequence[Tensor]", "x)"),
        slow(("Signal", "x)")),
    ],
)
def test_a_type_has_a_name_in_the_file(alone: Alone, said: str, written: str, tmp_path: Path) -> None:
    """Types are read when a file runs, whatever name they have where the component stands."""
    names = "import typing\nfrom collections.abc import Sequence\nfrom typing import Optional\nSignal = Tensor | None\n"
    graph = graph_with("return self.down(self.up(x))", tmp_path, forward=f"{names}\n\nclass Odd", takes=said)
    assert written in (text := eject(graph))
    assert check(graph, text, alone).ran


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("x: Tensor", "x: Nowhere"), "NameError: name 'Nowhere' is not defined"),
        (("import torch\n", "import torch\nimport tfkit\n"), "it imports tfkit, and a file needs nothing but torch"),
        (
            ("import torch\n", "import torch\nimport importlib\nimportlib.import_module('tfkit')\n"),
            "ModuleNotFoundError",
        ),
        (("model = ", "model = nowhere or "), "NameError: name 'nowhere' is not defined"),
    ],
)
def test_a_file_must_run_alone(alone: Alone, change: tuple[str, str], why: str) -> None:
    graph, text = ejected()
    assert change[0] in text
    with pytest.raises(tfkit.SpecError, match=re.escape(why)):
        check(graph, text.replace(*change, 1), alone)


@pytest.mark.slow
def test_a_file_that_ends_its_process_is_found() -> None:
    graph, _ = ejected()
    with pytest.raises(tfkit.SpecError, match="the process that ran it ended with status 3"):
        check(graph, "import os\n\nos._exit(3)\n")


def test_a_bug_in_the_file_is_found(alone: Alone) -> None:
    graph, text = ejected()
    check(graph, text, alone)
    assert "x = x + " in text
    with pytest.raises(tfkit.SpecError, match="computes something else"):
        check(graph, text.replace("x = x + ", "x = 2 * x + ", 1), alone)
    with pytest.raises(tfkit.SpecError, match="NameError: name 'nowhere' is not defined"):
        check(graph, text.replace("x = x + ", "x = nowhere + ", 1), alone)
    with pytest.raises(tfkit.SpecError, match="other tensors"):
        check(graph, text.replace("self.down = ", "self.below = ").replace("self.down(", "self.below("), alone)
    assert torch.is_grad_enabled()
