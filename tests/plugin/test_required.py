"""Versions of plugins in `requires`, and versions that a saved spec records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfkit
from tfkit.errors import SpecError
from tfkit.plugin.manager import Plugins, load_plugins
from tfkit.plugin.required import with_versions

from .written import HEAD, project, write

SPEC = """\
tfkit: 1
name: tiny
requires: [REQUIRES]
d_model: 8
vocab_size: 11
graph:
  embedding: {block: embedding}
  body: {block: encoder, n_layers: 1, placement: pre, norm: layernorm, attention: {kind: mha, n_heads: 2}, ffn: twice}
  logits: {block: lm_head}
"""
FFN = f"""{HEAD}
from torch import nn
import tfkit
class Twice(tfkit.FFNConfig):
    kind: Literal["twice"] = "twice"
    def build(self, make):
        return nn.Identity()
@hookimpl
def tfkit_register(register):
    register(Twice)
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("tfkit_required_lab", None)


def plugins(version: str = "0.2.1") -> Plugins:
    project("lab", "tfkit-lab", "tfkit_required_lab", version)
    write("lab/tfkit_required_lab.py", FFN)
    return load_plugins(plugin_dirs="lab", entry_points=False)


def loads(requires: str, version: str = "0.2.1") -> tfkit.Graph:
    return tfkit.loads(SPEC.replace("REQUIRES", requires), plugins=plugins(version))


@pytest.mark.parametrize(
    ("requires", "version"),
    [
        ("tfkit-lab", "0.2.1"),
        ("tfkit_Lab", ""),
        ("tfkit-lab>=0.2", "0.2.1"),
        ('"tfkit-lab>=0.2,<1"', "0.2.1"),
        ("tfkit-lab>=0.2.dev1", "0.2.dev3"),
        ("tfkit>=0.0.1", "0.2"),
    ],
)
def test_a_version_that_fits(requires: str, version: str) -> None:
    assert loads(requires, version).name == "tiny"


@pytest.mark.parametrize(
    ("requires", "version", "text"),
    [
        ("tfkit-lab>=0.3", "0.2.1", "0.2.1"),
        ("tfkit-lab>=0.3", "0.3.dev1", "0.3.dev1"),
        ("tfkit-lab>=0.3", "", "without a version"),
        ("tfkit-lab==1.*", "2.0", "2.0"),
    ],
)
def test_one_that_does_not(requires: str, version: str, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        loads(requires, version)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message == f"the spec needs `{requires}`, but {text} is loaded"
    assert diagnostic.notes == (f"found: tfkit-lab {text}, from lab", f"required: {requires.removeprefix('tfkit-lab')}")
    assert (diagnostic.path, diagnostic.span is not None and diagnostic.span.line) == ("requires", 3)


@pytest.mark.parametrize(
    ("requires", "cause"),
    [
        ("tfkit lab", "it is not the name of a plugin, with versions or without"),
        ("tfkit-lab=0.3", "it is not the name of a plugin, with versions or without"),
        ('"tfkit-lab[all]"', "it must contain only the name of a plugin and its versions"),
        ('"tfkit-lab @ https://example.org"', "it must contain only the name of a plugin and its versions"),
    ],
)
def test_one_that_cannot_be_read(requires: str, cause: str) -> None:
    with pytest.raises(SpecError) as caught:
        loads(requires)
    assert [diagnostic.message.partition(": ")[2] for diagnostic in caught.value.diagnostics] == [cause]


def test_one_that_is_not_there() -> None:
    with pytest.raises(SpecError, match=r"needs the plugin `tfkit-far>=1`, which is not loaded"):
        loads("tfkit-far>=1")


@pytest.mark.parametrize(
    ("requires", "version", "noted"),
    [
        ("tfkit-lab", "0.2.1", '"tfkit-lab>=0.2.1"'),
        ("", "0.2.1", '"tfkit-lab>=0.2.1"'),
        ('"tfkit-lab<1"', "0.2.1+mine", '"tfkit-lab<1,>=0.2.1"'),
        ("", "", "tfkit-lab"),
    ],
)
def test_a_saved_spec_requires_the_version_that_built_it(requires: str, version: str, noted: str) -> None:
    graph = loads(requires, version)
    assert graph.spec.built_with == {"tfkit-lab": version}
    tfkit.save(tfkit.build(graph), "out")
    assert f"requires: [{noted}]\n" in Path("out/spec.yaml").read_text(encoding="utf-8")
    assert tfkit.load("out", plugins=load_plugins(plugin_dirs="lab", entry_points=False)).name == "tiny"


def test_an_older_plugin_does_not_read_it() -> None:
    tfkit.save(tfkit.build(loads("")), "out")
    with pytest.raises(SpecError, match=r"the spec needs `tfkit-lab>=0\.2\.1`, but 0\.1 is loaded"):
        tfkit.load("out", plugins=plugins("0.1"))


def test_what_it_does_not_use_is_not_noted() -> None:
    assert tfkit.load("gpt2", plugins=plugins()).spec.built_with == {}
    assert with_versions((), {"an odd name": "1", "good": "odd"}) == ("good",)
