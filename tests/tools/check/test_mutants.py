"""Bugs that `tfkit check --mutate` plants: their results, and code that stays unchanged."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tfkit
from tfkit.components.activation import ReLUConfig
from tfkit.errors import SpecError
from tfkit.tools.check import mutants
from tfkit.tools.check.check import Work
from tfkit.tools.check.components import with_component
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.mutants import PlantedBugs, plant_bugs
from tfkit.tools.check.mutations import mutations

from . import tripled
from .tripled import Tripled, TripledConfig

Run = Callable[..., str]
PLUGINS = with_component(tfkit.load_plugins(entry_points=False), TripledConfig)
FILE = Path(inspect.getfile(tripled))
SPEC = """
tfkit: 1
name: small
d_model: 12
vocab_size: 11
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 1
    attention: {kind: mha, n_heads: 2}
    ffn: {kind: mlp, d_ff: 20, activation: tripled}
  logits: {block: lm_head}
"""


def subjects() -> list[tuple[Any, str]]:
    return [(ModelUnderTest(tfkit.loads(SPEC, plugins=PLUGINS), PLUGINS), "a decoder")]


def planted(*only: str, limit: int = 100, **options: Any) -> PlantedBugs:
    return plant_bugs(Work(PLUGINS, only=only), subjects, [TripledConfig], limit=limit, **options)


def changes(bugs: PlantedBugs) -> dict[str, str]:
    return {f"{bug.before} -> {bug.after}": bug.property or bug.result for bug in bugs.bugs}


def test_each_result() -> None:
    text, code = FILE.read_bytes(), Tripled.forward.__code__
    assert changes(planted("position-wise")) == {
        "x.size(1) > 140 -> x.size(1) >= 140": "no effect",
        "x.size(1) > 140 -> x.size(0) > 140": "survives",
        "x.size(1) > 140 -> x.size(1) > 141": "no effect",
        "x - 0.25 -> x": "survives",
        "x - 0.25 -> x + 0.25": "survives",
        "x - 0.25 -> x - 0.5": "survives",
        "x.size(1) > 499 -> x.size(1) >= 499": "no effect",
        "x.size(1) > 499 -> x.size(0) > 499": "no effect",
        "x.size(1) > 499 -> x.size(1) > 500": "no effect",
        "x * 7 -> x": "not run",
        "x * 7 -> x * 8": "not run",
        "3.0 * torch.tanh(x.flatten(2)).roll(0, dims=1) -> torch.tanh(x.flatten(2)).roll(0, dims=1)": "survives",
        "3.0 -> 6.0": "survives",
        "torch.tanh(x.flatten(2)).roll(0, dims=1) -> torch.tanh(x.flatten(2)).roll(0)": "no effect",
        "torch.tanh(x.flatten(2)).roll(0, dims=1) -> torch.tanh(x.flatten(2))": "no effect",
        "torch.tanh(x.flatten(2)) -> x.flatten(2)": "survives",
        "torch.tanh(x.flatten(2)) -> torch.tanh(x)": "no effect",
        "torch.tanh(x.flatten(2)) -> torch.tanh(x.flatten(3))": "raises an error",
        "0 -> 1": "position-wise",
        "1 -> 0": "no effect",
    }
    assert FILE.read_bytes() == text
    assert Tripled.forward.__code__ is code


def test_a_bug_is_tried_in_the_models_that_run_a_part_of_its_expression() -> None:
    reach = mutants._Reach([TripledConfig])
    reach.record(subjects)
    (cls,) = (
        node for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Tripled"
    )
    (forward,) = (node for node in cls.body if isinstance(node, ast.FunctionDef))
    short, long, result = forward.body
    models = [
        reach.models_of(str(FILE), (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset))
        for node in (forward, short, long.body[0], result)
    ]
    assert models == [["a decoder"], ["a decoder"], [], ["a decoder"]]


@pytest.mark.slow
def test_the_seed_draws_as_many_as_the_limit() -> None:
    bugs = planted("position-wise", limit=3)
    assert len(bugs.bugs) == 3 < bugs.n_possible
    assert [bug.line for bug in bugs.bugs] == sorted(bug.line for bug in bugs.bugs)
    assert bugs == planted("position-wise", limit=3)


def test_no_bug_is_planted_in_checks_and_texts() -> None:
    names = ("check", "check_sizes", "extra_repr", "__repr__", "__str__", "checked", "forward")
    text = "\n".join(f"def {name}(x):\n    return x + 1\n" for name in names)
    assert {names[mutation.line // 3] for mutation in mutations(ast.parse(text), {})} == {"checked", "forward"}


def test_every_token_is_read_in_steps() -> None:
    subject = ModelUnderTest(tfkit.loads(SPEC, plugins=PLUGINS), PLUGINS)
    outputs = mutants._outputs_in_steps(subject, subject.model, 9)
    assert [output.size(1) for output in outputs if output.size(-1) == 11] == [4, 3, 1, 1]


def test_an_interrupt_leaves_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    code, planted_code = Tripled.forward.__code__, []

    def interrupt(evidence: object, subject: object) -> bool:
        planted_code.append(Tripled.forward.__code__)
        raise KeyboardInterrupt

    monkeypatch.setattr(mutants._Evidence, "differs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        planted("position-wise")
    assert planted_code[0] is not code
    assert Tripled.forward.__code__ is code


def test_a_component_with_a_bug_of_its_author(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tripled, "forward", tripled.shifted)
    with pytest.raises(SpecError) as caught:
        planted("position-wise")
    assert "bugs are planted only in code without a bug; `position-wise` is broken" in str(caught.value)
    assert "run the command without `--mutate`" in str(caught.value)


def test_a_component_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("typed_in")
    monkeypatch.setitem(sys.modules, "typed_in", module)
    exec(compile(FILE.read_text(), "<typed in>", "exec"), vars(module))
    plugins = with_component(tfkit.load_plugins(entry_points=False), module.TripledConfig)
    graph = tfkit.loads(SPEC, plugins=plugins)
    work = Work(plugins, only=["position-wise"])
    with pytest.raises(SpecError) as caught:
        plant_bugs(work, lambda: [(ModelUnderTest(graph, plugins), "")], [module.TripledConfig], limit=9)
    assert "no bug can be planted in module `typed_in`: its source text cannot be read" in str(caught.value)
    assert "its file is <typed in>" in str(caught.value)


def test_a_component_without_code_in_python() -> None:
    with pytest.raises(SpecError) as caught:
        plant_bugs(Work(PLUGINS, only=["position-wise"]), subjects, [ReLUConfig], limit=9)
    assert "no bug can be planted in activation kind `relu`: no model runs a line of Python in it" in str(caught.value)


def test_properties_of_programs() -> None:
    with pytest.raises(SpecError) as caught:
        planted("script", "export")
    assert "`script` cannot see planted bugs" in str(caught.value)


def test_each_way_compares_tensors() -> None:
    """A way that fails in all models would compare two equal errors."""
    evidence = mutants._Evidence(subjects()[0][0])
    assert [way for way, values in evidence.values.items() if isinstance(values, str)] == []
    assert all(len(values) for values in evidence.values.values())


TEXT = """
def forward(self, x, mask, *, scale: float = 0.5):
    '''A docstring - with a sign.'''
    if x.dim() != 3:
        raise ValueError(f"{x.dim() - 1} axes")
    if self.causal and not self.open:
        mask = ~mask | mask[:, 0]
    x -= x.mean(dim=-1, keepdim=True)
    q, k = self.project(x), x[:, self.start : -2]
    self.cache.copy_(k)
    while len(q) < 7:
        q = q + 1
    scores = torch.einsum("bqd,bkd->bqk", q, k) / scale
    y = -self.merge(scores @ k // 2, "b h (g d) -> b (h g) d")
    return torch.where(mask, y, torch.zeros(4)) if y.size(0) <= self.rows[-1] else (lambda n: n * y)(scale)


def check(self):
    return self.width - 1
"""
EXPECTED = """
6 condition: self.causal and (not self.open) -> self.causal or not self.open
6 condition: self.causal and (not self.open) -> self.causal and self.open
7 condition: ~mask | mask[:, 0] -> ~mask & mask[:, 0]
7 condition: ~mask | mask[:, 0] -> mask | mask[:, 0]
7 off by one: ~mask | mask[:, 0] -> ~mask | mask[:, 1]
8 sign: x -= x.mean(dim=-1, keepdim=True) -> x += x.mean(dim=-1, keepdim=True)
8 function: x.mean(dim=-1, keepdim=True) -> x.sum(dim=-1, keepdim=True)
8 argument: x.mean(dim=-1, keepdim=True) -> x.mean(keepdim=True)
8 argument: x.mean(dim=-1, keepdim=True) -> x.mean(dim=-1)
8 step: x.mean(dim=-1, keepdim=True) -> x
8 axis: x.mean(dim=-1, keepdim=True) -> x.mean(dim=-2, keepdim=True)
8 flag: x.mean(dim=-1, keepdim=True) -> x.mean(dim=-1, keepdim=False)
9 step: self.project(x) -> x
9 edge: x[:, self.start:-2] -> x[:, self.start + 1:-2]
9 off by one: x[:, self.start:-2] -> x[:, self.start:-3]
10 step: self.cache.copy_(k) -> pass
13 scale: torch.einsum('bqd,bkd->bqk', q, k) / scale -> torch.einsum('bqd,bkd->bqk', q, k) * scale
13 axis: torch.einsum('bqd,bkd->bqk', q, k) -> torch.einsum('bqd,bkd->bkq', q, k)
14 sign: -self.merge(scores @ k // 2, 'b h (g d) -> b (h g) d') -> self.merge(scores @ k // 2, 'b h (g d) -> b (h g) d')
14 step: self.merge(scores @ k // 2, 'b h (g d) -> b (h g) d') -> scores @ k // 2
14 edge: scores @ k // 2 -> scores @ k // 2 + 1
14 order: scores @ k // 2 -> k @ scores // 2
14 off by one: scores @ k // 2 -> scores @ k // 3
14 axis: 'b h (g d) -> b (h g) d' -> 'b h (g d) -> b (g h) d'
15 edge: y.size(0) <= self.rows[-1] -> y.size(0) < self.rows[-1]
15 axis: y.size(0) <= self.rows[-1] -> y.size(1) <= self.rows[-1]
15 first for last: y.size(0) <= self.rows[-1] -> y.size(0) <= self.rows[0]
15 order: torch.where(mask, y, torch.zeros(4)) -> torch.where(y, mask, torch.zeros(4))
15 step: torch.where(mask, y, torch.zeros(4)) -> mask
15 function: torch.zeros(4) -> torch.ones(4)
15 off by one: torch.zeros(4) -> torch.zeros(5)
15 scale: (lambda n: n * y)(scale) -> (lambda n: n)(scale)
"""


def test_the_bugs_of_a_function() -> None:
    tree = ast.parse(TEXT)
    before = ast.dump(tree)
    bugs = [f"{bug.line} {bug.type}: {bug.before} -> {bug.after}" for bug in mutations(tree, {"torch": torch})]
    assert "\n".join(bugs) == EXPECTED.strip()
    assert ast.dump(tree) == before


@pytest.fixture
def tripled_options(specs: Path) -> list[str]:
    """The spec and the options that plant three bugs in a component of a plugin."""
    (specs / "plugins").mkdir()
    hook = "\n\n@tfkit.hookimpl\ndef tfkit_register(register):\n    register(TripledConfig)\n"
    (specs / "plugins" / "tripled.py").write_text(FILE.read_text() + hook)
    (specs / "small.yaml").write_text(SPEC)
    return ["small.yaml", "--kind=tripled", "--plugin-dir=plugins", "--only=position-wise", "--mutants=3"]


def test_the_table_and_its_json(run: Run, tripled_options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results, plant = list[PlantedBugs](), mutants.plant_bugs

    def plant_once(*arguments: Any, **options: Any) -> PlantedBugs:
        if not results:
            results.append(plant(*arguments, **options))
        return results[0]

    monkeypatch.setattr(mutants, "plant_bugs", plant_once)
    result = json.loads(run("check", "--mutate", *tripled_options, "--json"))
    lines = run("check", "--mutate", *tripled_options).splitlines()
    assert result["components"] == ["activation kind `tripled`"]
    assert [bug["file"].rpartition("/")[2] for bug in result["bugs"]] == ["tripled.py"] * 3
    assert sum(result["counts"].values()) == 3
    assert lines[0] == f"activation kind `tripled`, in 1 model: 3 of {result['n_possible']} possible bugs"
    rows = [(line.split()[0], line) for line in lines if line.startswith("tripled.py:")]
    for bug, (location, row) in zip(result["bugs"], rows, strict=True):
        assert location == f"tripled.py:{bug['line']}"
        assert row.endswith(bug["property"] or bug["result"])
    counts = result["counts"]
    caught, survive = counts.get("seen", 0), counts.get("survives", 0)
    assert f"{caught} of {caught + survive} bugs are seen; {survive} survive" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mutate"], "a SPEC, `--kind NAME` or `--plugin NAME` is missing"),
        (["tiny.yaml", "--kind", "gqa"], "a SPEC, `--kind NAME` or `--plugin NAME` is missing"),
        (["tiny.yaml", "--mutants", "7"], "--mutants has no effect without --mutate"),
        (["tiny.yaml", "--mutate", "--level", "full"], "--mutate cannot be combined with --level full"),
        (
            ["--mutate", "--kind", "adamw", "--only=building"],
            "no bug can be planted in optimizer kind `adamw`: it is not part of a model",
        ),
    ],
)
def test_errors(run: Run, specs: Path, arguments: list[str], message: str) -> None:
    assert message in run("check", *arguments, status=2 if "adamw" not in arguments else 1, stderr=True)
