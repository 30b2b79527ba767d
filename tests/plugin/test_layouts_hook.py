"""Layouts of plugins: the hook `tfkit_save_layouts`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tfkit
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins
from tfkit.tools.save.layouts import Layouts, layouts_of

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
LAYOUT = """
import numpy as np
import tfkit

class Arrays(tfkit.Layout):
    name = "arrays"
    description = "a NumPy file for each tensor"
    files = ("*.npy",)

    def write(self, model, folder, origin):
        origin.write(folder)
        for name, tensor in model.state_dict().items():
            np.save(folder / f"{name}.npy", tensor.numpy())
"""
HOOK = "\n@tfkit.hookimpl\ndef tfkit_save_layouts():\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def layouts(body: str, layout: str = LAYOUT) -> Layouts:
    write("mine.py", f"{layout}{HOOK}    {body}\n")
    return layouts_of(load("mine.py"))


def arrays(layout: str = LAYOUT) -> tuple[Plugins, torch.fx.GraphModule]:
    """Plugins with the layout, and a model."""
    write("mine.py", f"{layout}{HOOK}    return [Arrays]\n")
    plugins = load("mine.py")
    return plugins, tfkit.build(tfkit.loads(SPEC, plugins=plugins), seed=4)


def test_a_model_is_written_with_its_spec_and_the_files_next_to_its_weights() -> None:
    plugins, model = arrays()
    write("published/tokenizer.json", "{}")
    files = tfkit.save(model, "out", layout="arrays", files_from="published", plugins=plugins)
    names = {"spec.yaml", "tokenizer.json", "embedding.tokens.weight.npy", "logits.output.weight.npy"}
    assert {file.name for file in files} == names
    expected = model.state_dict()["logits.output.weight"].numpy()
    np.testing.assert_array_equal(np.load("out/logits.output.weight.npy"), expected)
    again = tfkit.build(tfkit.load("out/spec.yaml", plugins=plugins))
    assert again.state_dict().keys() == model.state_dict().keys()


def test_the_command_writes_it(run: Callable[..., str]) -> None:
    arrays()
    write("tiny.yaml", SPEC)
    run("build", "tiny.yaml", "-o", "built")
    out = run("save", "built", "--layout", "arrays", "-o", "out", "--plugin-dir", ".")
    assert out.splitlines() == [
        *("wrote out/spec.yaml", "wrote out/logits.output.weight.npy", "wrote out/embedding.tokens.weight.npy"),
    ]


def test_a_folder_of_a_layout_is_replaced_by_force_and_no_other_folder() -> None:
    plugins, model = arrays()
    tfkit.save(model, "out", layout="arrays", plugins=plugins)
    with pytest.raises(SpecError, match=r"must hold only the files of a model; got embedding\.tokens\.weight\.npy"):
        tfkit.save(model, "out", force=True, plugins=load())  # nobody loads the layout of these files
    tfkit.save(model, "out", force=True, plugins=plugins)
    assert {path.name for path in Path("out").iterdir()} == {"spec.yaml", "model.safetensors"}
    write("out/thesis.tex", "years of work")
    with pytest.raises(SpecError, match=r"thesis\.tex"):
        tfkit.save(model, "out", layout="arrays", force=True, plugins=plugins)


def test_a_layout_that_fails_leaves_nothing() -> None:
    plugins, model = arrays(LAYOUT.replace("for name, tensor in", "raise KeyError('x')\n        for name, tensor in"))
    with pytest.raises(SpecError) as caught:
        tfkit.save(model, "deep/out", layout="arrays", plugins=plugins)
    assert str(caught.value) == inspect.cleandoc("""
        error: cannot write `deep/out`: KeyError: 'x'
           = in the layout `arrays`, from mine.py
    """)
    assert [path.name for path in Path().iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_the_hook_is_called_only_when_it_is_asked() -> None:
    write("mine.py", f"{LAYOUT}{HOOK}    raise AssertionError\n")
    plugins = load("mine.py")
    assert not plugins.broken
    assert [call.hook for call in plugins.hooks.calls if call.plugin == "mine.py"] == []


def test_they_stand_next_to_the_built_in_layouts() -> None:
    actual = layouts("return [Arrays]")
    assert list(actual.named) == ["tfkit", "huggingface", "peft", "transformers", "arrays"]
    assert (actual.plugins["arrays"], actual.plugins["tfkit"]) == ("mine.py", "built in")


@pytest.mark.parametrize(
    ("body", "layout", "cause"),
    [
        ("{}['x']", LAYOUT, "failed: KeyError: 'x'"),
        ("return 3", LAYOUT, "must return a list of subclasses of tfkit.Layout; got int"),
        ("return [int]", LAYOUT, "must return subclasses of tfkit.Layout; got `<class 'int'>`"),
        (
            "return [Arrays]",
            LAYOUT.replace("def write", "def wirte"),
            "returned `Arrays`, which does not define",
        ),
        ("return [Arrays]", LAYOUT.replace('name = "arrays"', ""), "returned `Arrays`, which needs a `name`"),
        ("return [Arrays]", LAYOUT.replace('"*.npy",', '"*.npy", "*.*"'), "returned `Arrays`, whose `files` are not"),
        ("return [Arrays]", LAYOUT.replace('("*.npy",)', '"*.npy"'), "returned `Arrays`, whose `files` are not"),
    ],
)
def test_a_hook_that_fails_leaves_out_its_layouts(body: str, layout: str, cause: str) -> None:
    actual = layouts(body, layout)
    assert list(actual.named) == ["tfkit", "huggingface", "peft", "transformers"]
    (fault,) = actual.faults
    assert fault.message.startswith(f"plugin mine.py: `tfkit_save_layouts` {cause}")
    with pytest.raises(SpecError) as caught:
        actual.choose("arrays")
    assert caught.value.diagnostics[0].notes[-1] == f"skipped: {fault.message}"


def test_two_of_one_name_name_both() -> None:
    with pytest.raises(SpecError) as caught:
        layouts("return [Arrays]", LAYOUT.replace('name = "arrays"', 'name = "transformers"'))
    assert str(caught.value) == inspect.cleandoc("""
        error: two layouts have the name `transformers`
           = built in
           = mine.py
           = help: switch one plugin off by its name: TFKIT_DISABLE=<name>
    """)


def test_an_unknown_layout_names_a_similar_one() -> None:
    with pytest.raises(SpecError) as caught:
        layouts_of(load()).choose("huggingfaces")
    assert str(caught.value) == inspect.cleandoc("""
        error: unknown layout `huggingfaces`
           = known: tfkit, huggingface, peft, transformers
           = help: a layout with a similar name exists: `huggingface`
    """)


def test_a_layout_without_the_tensors_of_a_family_drops_none() -> None:
    drops = {name: layout.drops for name, layout in layouts("return [Arrays]").named.items()}
    assert drops == {"tfkit": False, "huggingface": True, "peft": False, "transformers": False, "arrays": False}
