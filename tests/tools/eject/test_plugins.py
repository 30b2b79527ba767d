"""Components of plugins: the ejected file equals the model, or eject raises an error."""

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
from tfkit.tools.common.model_inputs import full_sequence_cases
from tfkit.tools.eject.proof import Alone, check
from tfkit.tools.eject.runner import build_model, loaded_module
from tfkit.tools.eject.write import eject

from ...sampling import slow, some
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
        self.scale.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        BODY


@tfkit.hookimpl
def tfkit_register(register):
    register(OddConfig)
"""


def graph_with(
    body: str,
    folder: Path,
    init: str = "self.steps = [1, 2]",
    forward: str = "class Odd",
    takes: str = "Tensor",
    kinds: str = "OddConfig",
    sets: tuple[str, ...] = (),
) -> tfkit.Graph:
    text = PLUGIN.replace("class Odd(", f"{forward}(").replace("(self, x: Tensor)", f"(self, x: {takes})")
    text = text.replace("        BODY", textwrap.indent(textwrap.dedent(body).strip(), "        "))
    text = text.replace("self.steps = [1, 2]", init).replace("register(OddConfig)", f"register({kinds})")
    (folder / "odd.py").write_text(text, encoding="utf-8")
    (folder / "mine.yaml").write_text(SPEC, encoding="utf-8")
    return tfkit.load(folder / "mine.yaml", plugins=load_plugins(plugin_dirs=[folder]), sets=sets)


@cache
def ejected() -> tuple[tfkit.Graph, str]:
    """A small GPT-2, and its file."""
    graph = reduced("gpt2")
    return graph, eject(graph)


@pytest.mark.parametrize(
    "body",
    some(
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
            """
        hidden = self.up(x)
        if x.size(1) > 3:
            h = hidden * 2
            hidden = h + 1
        else:
            h = hidden + 1
            hidden = h * 2
        return self.down(hidden * h)
        """,
            """
        hidden = self.up(x)
        for part in hidden.split(4, dim=-1):
            mean = part.mean()
            hidden = hidden - mean
        with torch.autocast("cpu", enabled=False) as context:
            top = hidden.amax()
            hidden = hidden / top
        return self.down(hidden) + mean + top + context.fast_dtype.itemsize
        """,
            """
        hidden, parts = self.up(x), []
        for part in hidden.split(5, dim=-1):
            parts.append(part.sum())
        for i, step in enumerate(self.steps):
            hidden = hidden * step
        for j in range(2, 3):
            if x.size(1) > 3:
                break
            hidden = hidden * j
        return self.down(hidden + torch.stack(parts).sum()) + part.mean() + i
        """,
            r"""
        '''As in \"\"\"the paper\"\"\", on \N{BULLET} C:\\new, \0 and "quoted"'''
        return self.down(self.up(x))
        """,
        ],
        4,
    ),
)
def test_what_a_forward_may_do(alone: Alone, body: str, tmp_path: Path) -> None:
    graph = graph_with(body, tmp_path)
    assert check(graph, eject(graph), alone).ran


@pytest.mark.parametrize(
    ("body", "why"),
    some(
        [
            (
                "while x.abs().max() > 1:\n    x = x / 2\nreturn x",
                "`Odd` (odd.py) cannot be ejected: forward: a `while`",
            ),
            ("for i in (1, 2):\n    x = x * i\nelse:\n    x = x + 1\nreturn x", "forward: a `for` with an `else`"),
            ("return (lambda y: 2 * y)(x)", "cannot be ejected: forward: a `lambda`"),
            ("return x * NOWHERE", "cannot be ejected: forward: nothing says what `NOWHERE` is"),
        ],
        2,
    ),
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


CONSTANTS = """
from math import sqrt as root
from torch import relu


class Other(nn.Module):
    pass


KINDS, PLUGIN_KINDS = (nn.Linear, nn.Embedding), (Other, nn.Linear)
SIZES, NONE, VALUES = [2, 3], [None, torch.float32], (float("-inf"), slice(1, 2), torch.relu)
"""


def test_constants_of_any_type(alone: Alone, tmp_path: Path) -> None:
    body = """
    hidden = relu(self.up(x)) * root(4.0)
    if isinstance(self.up, KINDS) and not isinstance(self, PLUGIN_KINDS) and x.dim() in SIZES:
        hidden = VALUES[2](hidden).clamp(min=VALUES[0])[..., : hidden.size(-1)]
    if NONE[0] is not None:
        hidden = hidden + 1.0
    return self.down(hidden.clamp(max=self.limit))
    """
    graph = graph_with(body, tmp_path, init="self.limit = float('inf')", forward=f"{CONSTANTS}\n\nclass Odd")
    text = eject(graph)
    assert check(graph, text, alone).ran
    assert "if x.dim() in SIZES:" in text
    assert "PLUGIN_KINDS" not in text


@pytest.mark.parametrize(
    ("constant", "body", "why"),
    some(
        [
            (
                "KINDS = [halved]",
                "len([*KINDS])",
                "the constant `KINDS` cannot be ejected: it contains <function halved at",
            ),
            (
                "KINDS = torch.ones(2)",
                "len([*KINDS])",
                "the constant `KINDS` cannot be ejected: it contains tensor([1., 1.])",
            ),
            ("KINDS = {'odd': 1}", "len([*KINDS])", "the constant `KINDS` cannot be ejected: it contains {'odd': 1}"),
            ("from enum import Enum\nKINDS = [Enum('Mode', 'SUM').SUM]", "len([*KINDS])", "it contains Mode.SUM"),
            ("KINDS = 1", "self.config.d_ff", "`Odd.config` cannot be ejected: it contains d_model=8"),
        ],
        2,
    ),
)
def test_a_value_without_an_expression_is_an_error(constant: str, body: str, why: str, tmp_path: Path) -> None:
    graph = graph_with(f"return x + {body}", tmp_path, forward=f"{constant}\n\n\nclass Odd")
    with pytest.raises(tfkit.SpecError, match=re.escape(why)):
        eject(graph)


INIT = """
class WideConfig(tfkit.InitConfig):
    kind: Literal["wide"] = "wide"
    std: tfkit.PositiveFloat = 0.5
    shape: tuple[int, ...] = (1,)

    def linear(self, weight, *, residual, n_layers, generator):
        for row in weight:
            nn.init.trunc_normal_(row, std=halved_number(self.std), generator=generator)

    def bias(self, bias, *, fan_in, generator):
        nn.init.constant_(bias, 1 / fan_in)

    def table(self, weight, *, generator):
        WEIGHT.normal_(0.0, self.std, generator=generator)


def halved_number(number: float) -> float:
    if number > 1:
        return number / 4
    return number / 2


"""


def graph_with_init(folder: Path, table: str = "weight") -> tfkit.Graph:
    code = f"{INIT.replace('WEIGHT', table)}class Odd"
    return graph_with(
        "return self.down(self.up(x))",
        folder,
        forward=code,
        kinds="OddConfig); register(WideConfig",
        sets=("init=wide",),
    )


def test_an_initialization_of_a_plugin(alone: Alone, tmp_path: Path) -> None:
    graph = graph_with_init(tmp_path)
    text = eject(graph)
    assert check(graph, text, alone).ran
    with loaded_module(text) as module:
        model = build_model(module)
    assert 0.2 < model.get_parameter("decoder.layers.0.ffn.up.weight").std() < 0.3
    assert torch.equal(model.get_parameter("decoder.layers.0.ffn.up.bias"), torch.full([12], 1 / 8))
    assert 0.4 < model.get_parameter("embedding.tokens.weight").std() < 0.6


def test_an_initialization_that_cannot_be_ejected(tmp_path: Path) -> None:
    graph = graph_with_init(tmp_path, table="weight[self.shape[0]]")
    why = "`table` (odd.py) cannot be ejected: `self.shape` is neither a number nor a string"
    with pytest.raises(tfkit.SpecError, match=re.escape(why)):
        eject(graph)


def test_what_the_code_does_not_say_is_found(alone: Alone, tmp_path: Path) -> None:
    hooked = "self.register_forward_hook(lambda module, args, output: 2 * output)"
    graph = graph_with("return self.down(self.up(x))", tmp_path, init=hooked)
    with pytest.raises(tfkit.SpecError, match="computes something else"):
        check(graph, eject(graph), alone)


@pytest.mark.slow
def test_the_tutorial_plugin(alone: Alone, tmp_path: Path) -> None:
    graph = tfkit.load("char_relu", sets=["decoder.attention.kind=additive", "decoder.n_layers=2"])
    assert check(graph, eject(graph), alone).ran


@pytest.mark.parametrize(
    ("message", "written"),
    [
        slow(("list[Tensor] | None", "x: list[Tensor] | None)")),
        ("typing.Union[Tensor, list[Optional[int]], None]", "x)"),
        slow(("torch.nn.Module", "x: nn.Module)")),
        slow(("Sequence[Tensor]", "x)")),
        slow(("Signal", "x)")),
    ],
)
def test_a_type_has_a_name_in_the_file(alone: Alone, message: str, written: str, tmp_path: Path) -> None:
    """Types are read when a file runs, whatever name they have where the component stands."""
    names = "import typing\nfrom collections.abc import Sequence\nfrom typing import Optional\nSignal = Tensor | None\n"
    graph = graph_with("return self.down(self.up(x))", tmp_path, forward=f"{names}\n\nclass Odd", takes=message)
    assert written in (text := eject(graph))
    assert check(graph, text, alone).ran


@pytest.mark.parametrize(
    ("change", "why"),
    some(
        [
            (("x: Tensor", "x: Nowhere"), "NameError: name 'Nowhere' is not defined"),
            (
                ("import torch\n", "import torch\nimport tfkit\n"),
                "it must import only torch; it imports tfkit",
            ),
            (
                ("import torch\n", "import torch\nimport importlib\nimportlib.import_module('tfkit')\n"),
                "ModuleNotFoundError",
            ),
            (("model = ", "model = nowhere or "), "NameError: name 'nowhere' is not defined"),
        ],
        2,
    ),
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
    first, *_, last = (
        tuple(next(iter(case.inputs.values())).shape) for case in full_sequence_cases(tfkit.build(graph))
    )
    assert first != last
    with pytest.raises(tfkit.SpecError, match=f"computes something else for {last[0]} x {last[1]}"):
        check(graph, text.replace("x = x + ", f"x = (1 + (tuple(x.shape[:2]) == {last})) * x + ", 1), alone)
    with pytest.raises(tfkit.SpecError, match="NameError: name 'nowhere' is not defined"):
        check(graph, text.replace("x = x + ", "x = nowhere + ", 1), alone)
    with pytest.raises(tfkit.SpecError, match="it has other tensors"):
        check(graph, text.replace("self.down = ", "self.below = ").replace("self.down(", "self.below("), alone)
    assert torch.is_grad_enabled()
