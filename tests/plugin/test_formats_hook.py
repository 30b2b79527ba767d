"""Formats of plugins: the hook `tfkit_export_formats`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import tfkit
from tfkit.errors import SpecError
from tfkit.tools.export.formats import Formats, formats_of

from .written import load, write

SPEC = """\
tfkit: 1
name: tiny
d_model: 8
vocab_size: 11
graph:
  embedding: {block: embedding}
  logits: {block: lm_head}
"""
FORMAT = """
import torch
import tfkit

class State(tfkit.Opened):
    def __init__(self, model, state):
        self.model, self.state = model, state

    def forward(self, inputs):
        return [torch.func.functional_call(self.model.to("cpu"), self.state, (), dict(inputs))]

class Mine(tfkit.Format):
    name = "mine"
    suffixes = (".mine",)
    description = "the state dict, pickled"

    def write(self, model, inputs, path):
        torch.save(model.state_dict(), path)

    def open(self, path, model):
        return State(tfkit.build(model.meta["graph"]), torch.load(path))
"""
HOOK = "\n@tfkit.hookimpl\ndef tfkit_export_formats():\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def formats(body: str, format: str = FORMAT) -> Formats:
    write("mine.py", f"{format}{HOOK}    {body}\n")
    return formats_of(load("mine.py"))


def test_a_model_is_exported_to_it_by_suffix_and_by_name() -> None:
    write("mine.py", f"{FORMAT}{HOOK}    return [Mine]\n")
    plugins, model = load("mine.py"), tfkit.build(tfkit.loads(SPEC, plugins=load("mine.py")))
    for path, name in (("a.mine", None), ("b.bin", "mine")):
        exported = tfkit.export(model, path, format=name, plugins=plugins)
        assert exported.format == "mine"
        assert exported.checks
        assert Path(path).stat().st_size > 0


def test_the_hook_is_called_only_when_it_is_asked() -> None:
    write("mine.py", f"{FORMAT}{HOOK}    raise AssertionError\n")
    plugins = load("mine.py")
    assert not plugins.broken
    assert [call.hook for call in plugins.hooks.calls if call.plugin == "mine.py"] == []


def test_they_stand_beside_the_built_in_ones() -> None:
    actual = formats("return [Mine]")
    assert list(actual.named) == ["torchscript", "pt2", "aoti", "onnx", "safetensors", "mine"]
    assert (actual.plugins["mine"], actual.plugins["onnx"]) == ("mine.py", "built in")
    with pytest.raises(SpecError, match=r"the suffix of `a.bin` .*(?s:.*)\.mine \(mine\)"):
        actual.choose(Path("a.bin"))


@pytest.mark.parametrize(
    ("body", "format", "cause", "line"),
    [
        ("{}['x']", FORMAT, "failed: KeyError: 'x'", 1),
        ("yield Mine\n    raise ValueError('no')", FORMAT, "failed: ValueError: no", 2),
        ("return 3", FORMAT, "must return a list of subclasses of tfkit.Format; got int", -1),
        ("return [int]", FORMAT, "must return subclasses of tfkit.Format; got `<class 'int'>`", -1),
        ("return [Mine]", FORMAT.replace("def open", "def opne"), "returned `Mine`, which does not define `open`", -1),
        ("return [Mine]", FORMAT.replace('name = "mine"', ""), "returned `Mine`, which needs a `name`", -1),
        ("return [Mine]", FORMAT.replace('(".mine",)', '"mine"'), "returned `Mine`, whose `suffixes` are not", -1),
    ],
)
def test_a_hook_that_fails_leaves_out_its_formats(body: str, format: str, cause: str, line: int) -> None:
    actual = formats(body, format)
    assert "mine" not in actual.named
    assert "onnx" in actual.named
    (fault,) = actual.faults
    assert fault.message.startswith(f"plugin mine.py: `tfkit_export_formats` {cause}")
    head = f"{format}{HOOK}".count("\n")
    assert fault.notes == (f"{Path('mine.py').resolve()}:{head + line}",)
    assert fault.help == "this hook is skipped; to switch the plugin off: TFKIT_DISABLE=mine"
    with pytest.raises(SpecError) as caught:
        actual.choose(Path("a.mine"))
    assert caught.value.diagnostics[0].notes[-1] == f"skipped: {fault.message}"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [('name = "mine"', 'name = "onnx"', "name `onnx`"), ('".mine"', '".pt2"', "suffix `.pt2`")],
)
def test_two_of_one_name_or_suffix_name_both(old: str, new: str, what: str) -> None:
    with pytest.raises(SpecError) as caught:
        formats("return [Mine]", FORMAT.replace(old, new))
    assert str(caught.value) == inspect.cleandoc(f"""
        error: two formats have the {what}
           = built in
           = mine.py
           = help: switch one plugin off by its name: TFKIT_DISABLE=<name>
    """)
