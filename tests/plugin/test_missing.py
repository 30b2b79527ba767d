"""The index of specs and families in tfkit's plugins, for errors when a plugin is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfkit
from tfkit.errors import Source
from tfkit.plugin import missing
from tfkit.plugin.known_specs import built_in_specs_folder
from tfkit.plugin.manager import available_plugins
from tfkit.spec.tree import node_of
from tfkit.tools.import_.importing import family_of

FILE = Path(missing.__file__).with_name("elsewhere.toml")
HEAD = """\
# The specs of the plugins in this repository, with the model type of those that bring a family: without the plugin,
# tfkit says where they are. `pytest tests/plugin/test_missing.py --renew-golden` writes this file.
"""


def index() -> dict[str, dict[str, str]]:
    """The specs of the installed plugins, by plugin."""
    names = available_plugins().specs
    types = {name: model_type for model_type, name in names.by_model_type.items()}
    result: dict[str, dict[str, str]] = {}
    for name, spec in names.files.items():
        if spec.path.parent != built_in_specs_folder():
            result.setdefault(spec.plugin.split(" ")[0], {})[name] = types.get(name, "")
    return dict(sorted(result.items()))


def test_it_has_all_specs_of_the_plugins(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--renew-golden"):
        tables = [
            f"\n[{plugin}]\n" + "".join(f'{name} = "{value}"\n' for name, value in actual.items())
            for plugin, actual in index().items()
        ]
        FILE.write_text(HEAD + "".join(tables), encoding="utf-8")
        missing.specs_elsewhere.cache_clear()
    assert missing.specs_elsewhere() == index()
    plugins = {"tfkit-encoders", "tfkit-media", "tfkit-mla", "tfkit-moe", "tfkit-recurrent", "tfkit-streams"}
    assert set(missing.specs_elsewhere()) == plugins


def test_a_spec_of_a_plugin_that_is_not_loaded() -> None:
    nothing = tfkit.load_plugins(entry_points=False)
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.load("deepseek_v3", plugins=nothing)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message == "`deepseek_v3` comes with the plugin tfkit-mla, which is not loaded"
    assert diagnostic.help == "it is installed, but omitted by `--no-plugins` (`entry_points=False`)"
    with pytest.raises(tfkit.SpecError, match="a spec with a similar name exists: `mixtral_8x7b`"):
        tfkit.load("mixtral_8x7", plugins=nothing)


def test_a_spec_of_a_plugin_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-mla")
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.load("deepseek_v3", plugins=tfkit.load_plugins())
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.help == "it is switched off by TFKIT_DISABLE"


def test_one_that_is_extended() -> None:
    text = "tfkit: 1\nextends: mixtral_8x7b\nname: m\n"
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.loads(text, plugins=tfkit.load_plugins(entry_points=False))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message == "`mixtral_8x7b` comes with the plugin tfkit-moe, which is not loaded"
    assert (diagnostic.path, diagnostic.span is not None and diagnostic.span.line) == ("extends", 2)


def test_a_family_of_a_plugin_that_is_not_loaded() -> None:
    span = Source("config.json", "{}").span(0)
    config = node_of({"model_type": "mixtral"}, span)
    assert family_of(config, available_plugins().specs) == "mixtral_8x7b"
    with pytest.raises(tfkit.SpecError, match="model type `mixtral` comes with the plugin tfkit-moe, which is not"):
        family_of(config, available_plugins(entry_points=False).specs)
