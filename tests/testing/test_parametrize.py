"""Every check as a separate test: names, known failures, blocks, an installed plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tfkit
from tfkit import pytest_plugin
from tfkit.testing import parametrize_with_checks
from tfkit.tools.check.components import models_of

from .wrong import FFNConfig

PLUGINS = tfkit.load_plugins(entry_points=False)


def checks_of(**options: Any) -> dict[str, Any]:
    """The parameters of the tests, by their names."""
    mark = parametrize_with_checks(FFNConfig, within=["encoder"], plugins=PLUGINS, **options)
    return {argument.id: argument for argument in mark.args[1]}


def test_each_property_is_a_test() -> None:
    tests = checks_of(fields={"wrong": "Wrong"})
    assert {"position-wise", "script", "gradients"} < tests.keys()
    assert "capture" not in tests
    assert "capture" in checks_of(fields={"wrong": "Wrong"}, level="full")


def test_a_property_that_holds_or_breaks() -> None:
    tests = checks_of(fields={"wrong": "LooksBack"})
    tests["gradients"].values[0]()
    with pytest.raises(AssertionError, match=r"in an encoder: ffn kind `wrong`, `stack.layers.0.ffn`, looks back"):
        tests["position-wise"].values[0]()
    with pytest.raises(AssertionError, match=r"^in an encoder: stack\.layers\.0\.ffn: padding on the left") as caught:
        tests["padding"].values[0]()
    assert caught.traceback[-1].ishidden(None)
    with pytest.raises(pytest.skip.Exception, match="every position may read all others"):
        tests["look-ahead"].values[0]()


def test_every_value_of_an_option_has_a_model() -> None:
    tests = checks_of(options={"wrong": ["Wrong", "LooksBack"]})
    with pytest.raises(AssertionError, match=r'^in an encoder, wrong: "LooksBack": ffn kind `wrong`, .* looks back'):
        tests["position-wise"].values[0]()


def test_options_that_are_refused_together_are_left_out() -> None:
    config = PLUGINS.registry.find("attention", "mha")
    assert config is not None
    options = {"qk_norm": [None, "rmsnorm"], "qk_norm_weight": ["shared", "per_head"]}
    models = models_of(config.config, PLUGINS, options=options, within=["encoder"])
    assert list(models) == [
        'an encoder, qk_norm: null, qk_norm_weight: "shared"',
        'an encoder, qk_norm: "rmsnorm", qk_norm_weight: "shared"',
        'an encoder, qk_norm: "rmsnorm", qk_norm_weight: "per_head"',
    ]
    with pytest.raises(tfkit.SpecError, match="`qk_norm_weight` has no effect"):
        models_of(config.config, PLUGINS, options={}, fields={"qk_norm_weight": "per_head"})


def test_options_may_be_mappings() -> None:
    config = PLUGINS.registry.find("attention", "mha")
    assert config is not None
    options = {"position": [None, {"kind": "rope", "theta": 9.0}], "clip": [None, 1.0]}
    models = models_of(config.config, PLUGINS, options=options, within=["encoder"])
    assert len(models) == 4
    assert 'an encoder, position: {"kind": "rope", "theta": 9.0}, clip: 1.0' in models


def test_known_failures_are_strict_and_have_a_reason() -> None:
    tests = checks_of(fields={"wrong": "DoesNotScript"}, xfail={"script": "it takes keywords"})
    (mark,) = tests["script"].marks
    assert (mark.name, mark.kwargs["strict"], mark.kwargs["reason"]) == ("xfail", True, "it takes keywords")
    assert not tests["position-wise"].marks
    with pytest.raises(ValueError, match=r"there is no property `scirpt`"):
        checks_of(xfail={"scirpt": "a misspelt name"})


def test_a_block_brings_its_spec() -> None:
    config = PLUGINS.registry.find("block", "pooler")
    assert config is not None
    with pytest.raises(ValueError, match="a block has no small model: pass its `spec`"):
        parametrize_with_checks(config.config, plugins=PLUGINS)
    graph = {"embedding": {"block": "embedding"}, "pooler": {"block": "pooler", "select": "mean"}}
    spec = {"tfkit": 1, "name": "pooled", "d_model": 16, "vocab_size": 11, "graph": graph}
    mark = parametrize_with_checks(config.config, spec=spec, plugins=PLUGINS)
    next(argument for argument in mark.args[1] if argument.id == "padding").values[0]()


OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:tfkit", "-p", "tfkit.pytest_plugin", "-c", "/dev/null")


def pytest_in(folder: Path, *arguments: str) -> str:
    """The output of pytest with the plugin, in an empty folder."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_an_installed_plugin_is_checked_without_a_test(tmp_path: Path) -> None:
    actual = pytest_in(tmp_path, "--tfkit", "tfkit-additive", "--collect-only")
    assert "attention `additive` in a decoder" in actual.replace("kind ", "")
    assert "script" in actual


def test_a_plugin_that_is_not_installed() -> None:
    session: Any = SimpleNamespace(config=SimpleNamespace(getoption={"--tfkit": ["nothing"]}.get))
    with pytest.raises(pytest.UsageError, match="--tfkit: there is no plugin 'nothing'; installed: "):
        pytest_plugin.pytest_collection(session)
