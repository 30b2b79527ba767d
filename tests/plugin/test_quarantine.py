"""Failing plugins are omitted; faults that affect all users are errors; plugins can be switched off."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tfkit.errors import PluginWarning, SpecError

from .written import HEAD, HOOK, causes, config, kinds, load, origins, plugin, project, write

pytestmark = pytest.mark.usefixtures("clean")


# ---- quarantine ----


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        ("\nimport nowhere", "ModuleNotFoundError: No module named 'nowhere'", 2),
        ("raise SystemExit(3)", "SystemExit: 3", 1),
        ("raise RuntimeError", "RuntimeError", 1),
        ("class Stop(BaseException): ...\nraise Stop('now')", "Stop: now", 2),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError", 2),
        (plugin("half", body="raise GeneratorExit"), "`tfkit_register` failed: GeneratorExit", 13),
        ("raise ValueError('two\\nlines')", "ValueError: two lines", 1),
        ("def broken(:", "SyntaxError: invalid syntax (bad.py, line 1)", 1),
        (plugin("half", body="{}['x']"), "`tfkit_register` failed: KeyError: 'x'", 13),
        (
            plugin("half", body="register(int)"),
            "`tfkit_register` failed: TypeError: register() must be called with a subclass of tfkit.Component; got "
            "`int`",
            13,
        ),
        (plugin("half", body="raise SystemExit"), "`tfkit_register` failed: SystemExit", 13),
        (
            f"TFKIT_CONTRACT = 2\n{plugin('late')}",
            "its TFKIT_CONTRACT must be 1; got 2: install a newer tfkit",
            None,
        ),
        (
            f"TFKIT_CONTRACT = 0\n{plugin('early')}",
            "its TFKIT_CONTRACT must be 1; got 0: install a newer plugin",
            None,
        ),
        ("x = 1", f"it defines no hook; {HOOK}", None),
        ("def tfkit_register(register): ...", f"it does not mark its hook; {HOOK}", None),
    ],
)
def test_quarantine(text: str, cause: str, line: int | None) -> None:
    write("plugins/bad.py", text)
    write("plugins/good.py", plugin("good"))
    plugins = load("plugins")
    assert kinds(plugins) == ["good"]
    assert list(origins(plugins)) == ["tfkit", "good"]
    (broken,) = plugins.broken
    assert (broken.name, broken.origin, broken.cause) == ("bad", "plugins/bad.py", cause)
    assert broken.where == ("" if line is None else f"{Path('plugins/bad.py').resolve()}:{line}")
    assert broken.help == "to switch it off: TFKIT_DISABLE=bad"


def test_a_failed_import_leaves_no_module() -> None:
    write("pack/__init__.py", "from . import part\nraise RuntimeError")
    write("pack/part.py", "")
    for _ in range(2):
        assert causes(load("pack")) == {"pack": "RuntimeError"}
    assert not [name for name in sys.modules if name.startswith("tfkit_plugin_pack")]
    write("pack/__init__.py", plugin("one") + "# mended")
    assert kinds(load("pack")) == ["one"]


def test_quarantine_of_a_hook_with_other_arguments() -> None:
    write("bad.py", f"{HEAD}@hookimpl\ndef tfkit_register(registry): ...")
    (broken,) = load("bad.py").broken
    assert "Argument(s) {'registry'} are declared in the hookimpl" in broken.cause
    assert "\n" not in broken.cause


def test_quarantine_of_an_entry_point(install: Callable[..., None]) -> None:
    install("tfkit-bad", "0.1.0", "import nowhere")
    install("tfkit-one", "0.1.0", plugin("one"))
    plugins = load(entry_points=True)
    assert kinds(plugins) == ["one"]
    assert causes(plugins) == {"tfkit-bad": "ModuleNotFoundError: No module named 'nowhere'"}
    assert plugins.broken[0].help == "to switch it off: TFKIT_DISABLE=tfkit-bad"


def test_absolute_import_of_a_part() -> None:
    write("plugins/pack/__init__.py", "from pack.part import tfkit_register")
    write("plugins/pack/part.py", plugin("one"))
    (broken,) = load("plugins").broken
    assert broken.cause == "ModuleNotFoundError: No module named 'pack'"
    assert broken.help.startswith("a plugin of several files is a package and writes `from .module import name`; ")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[project", "Expected ']'"),
        ("[project]\nname = 'x'", "it has no [project.entry-points.tfkit]"),
        ("project = 1", "'int' object has no attribute 'get'"),
    ],
)
def test_quarantine_of_a_project_file(text: str, cause: str) -> None:
    write("plugins/demo/pyproject.toml", text)
    write("plugins/good.py", plugin("good"))
    plugins = load("plugins")
    assert kinds(plugins) == ["good"]
    assert causes(plugins)["demo"].startswith(f"ImportError: plugins/demo/pyproject.toml: {cause}")


def test_project_without_its_module() -> None:
    project("demo", "tfkit-demo", "nowhere_at_all")
    (broken,) = load("demo").broken
    assert (broken.name, broken.where) == ("tfkit-demo", "")
    assert broken.cause == f"ModuleNotFoundError: no module `nowhere_at_all` in {Path('demo').resolve()}"


def test_a_plugin_may_change_the_path_only_while_it_is_imported() -> None:
    write("one.py", f"import sys\nsys.path.append('elsewhere')\n{plugin('one')}")
    assert kinds(load("one.py")) == ["one"]
    assert "elsewhere" not in sys.path


@pytest.mark.parametrize("text", ["raise KeyboardInterrupt", plugin("half", body="raise KeyboardInterrupt")])
def test_an_interrupt_is_not_caught(text: str) -> None:
    write("bad.py", text)
    with pytest.raises(KeyboardInterrupt):
        load("bad.py")


@pytest.mark.parametrize(
    ("call", "change"),
    [
        ("set_default_dtype(torch.float64)", "default dtype from torch.float32 to torch.float64"),
        ("set_default_device('meta')", "default device from cpu to meta"),
        ("set_grad_enabled(False)", "gradient mode from True to False"),
        ("set_num_threads(torch.get_num_threads() + 3)", "number of threads from "),
        ("use_deterministic_algorithms(True)", "deterministic algorithms from False to True"),
        ("set_float32_matmul_precision('medium')", "float32 matmul precision from highest to medium"),
    ],
)
@pytest.mark.parametrize("module", ["import", "hook"])
def test_a_plugin_cannot_change_the_settings_of_torch(module: str, call: str, change: str) -> None:
    line = f"import torch; torch.{call}"
    write("plugins/odd.py", plugin("odd", body=line) if module == "hook" else f"{line}\n{plugin('odd')}")
    write("plugins/good.py", plugin("good"))
    before = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()
    with pytest.warns(PluginWarning, match=f"plugin plugins/odd.py changes torch's {change}.*restored") as caught:
        plugins = load("plugins")
    after = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()
    assert len(caught) == 1
    assert before == after
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert kinds(plugins) == ["good", "odd"]


def test_the_settings_of_torch_are_restored_after_a_failure() -> None:
    write("odd.py", "import torch; torch.set_default_dtype(torch.float64); raise RuntimeError")
    with pytest.warns(PluginWarning, match="default dtype"):
        assert causes(load("odd.py")) == {"odd": "RuntimeError"}
    assert torch.get_default_dtype() == torch.float32


# ---- errors for everybody ----


def test_duplicates_name_both(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("one"))
    install("tfkit-two", "2.0", plugin("one", "two"))
    write("plugins/three.py", plugin("two"))
    with pytest.raises(SpecError) as caught:
        load("plugins", entry_points=True)
    first, second = caught.value.diagnostics
    assert first.message == "kind `one` of slot `ffn` is registered twice"
    assert first.notes == (
        f"tfkit-one 0.1.0: `OneConfig`, {Path('site/tfkit_one.py').resolve()}:6",
        f"tfkit-two 2.0: `OneConfig`, {Path('site/tfkit_two.py').resolve()}:6",
    )
    assert second.notes[1] == f"plugins/three.py: `TwoConfig`, {Path('plugins/three.py').resolve()}:6"


def test_a_duplicate_is_no_matter_of_the_plugins_own_excuses() -> None:
    swallow = f"{HEAD}{config('one')}@hookimpl\ndef tfkit_register(register):\n    try: register(OneConfig)\n"
    write("plugins/a.py", plugin("one"))
    write("plugins/b.py", f"{swallow}    except Exception: pass\n")
    with pytest.raises(SpecError, match="registered twice"):
        load("plugins")


def test_misspelt_hook(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("one", hook="tfkit_regster"))
    with pytest.raises(SpecError) as caught:
        load(entry_points=True)
    assert str(caught.value) == inspect.cleandoc(f"""
        error: unknown hook `tfkit_regster` in plugin tfkit-one 0.1.0
           = {Path("site/tfkit_one.py").resolve()}:10
           = known hooks: tfkit_register, tfkit_specs, tfkit_documents, tfkit_export_formats,
             tfkit_save_layouts, tfkit_spec_loaded, tfkit_model_built, tfkit_checks, tfkit_properties,
             tfkit_reference
           = help: a hook with a similar name exists: `tfkit_register`
    """)


def test_misspelt_hooks_and_duplicates_come_together() -> None:
    write("plugins/a.py", plugin("one"))
    write("plugins/b.py", plugin("one"))
    write("plugins/c.py", plugin("three", hook="quite_another"))
    with pytest.raises(SpecError) as caught:
        load("plugins")
    twice, misspelt = caught.value.diagnostics
    assert "registered twice" in twice.message
    assert (misspelt.message, misspelt.help) == ("unknown hook `quite_another` in plugin plugins/c.py", None)


# ---- switching plugins off ----


@pytest.mark.parametrize("name", ["tfkit-one", "TFKIT_One", " tfkit-one, not-here,"])
def test_switched_off(name: str, install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", "raise AssertionError('imported')")
    install("tfkit-two", "0.1.0", plugin("two"))
    plugins = load(entry_points=True, disabled=[name])
    assert kinds(plugins) == ["two"]
    assert plugins.broken == ()
    assert plugins.disabled == ("tfkit-one",)


def test_switched_off_in_a_folder() -> None:
    write("plugins/one.py", plugin("one"))
    plugins = load("plugins", disabled=["one"])
    assert kinds(plugins) == []
    assert plugins.disabled == ("one",)


def test_switching_off_solves_a_duplicate() -> None:
    write("plugins/a.py", plugin("one"))
    write("plugins/b.py", plugin("one"))
    assert origins(load("plugins", disabled=["b"])) == {
        "tfkit": "built in",
        "a": "plugins/a.py",
    }
