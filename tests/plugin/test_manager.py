"""Loading of plugins: where they are found."""

from __future__ import annotations

import importlib.metadata
import inspect
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tfkit.errors import SpecError
from tfkit.plugin import discover
from tfkit.plugin.hooks import stdout_to_stderr
from tfkit.plugin.manager import available_plugins, load_plugins
from tfkit.plugin.missing import how_to_get, where_it_is

from .conftest import PlainConfig
from .written import HEAD, causes, config, kinds, load, origins, plugin, project, write

pytestmark = pytest.mark.usefixtures("clean")


# ---- where plugins come from ----


def test_built_in() -> None:
    plugins = load()
    (actual,) = plugins.loaded
    assert (actual.name, actual.origin) == ("tfkit", "built in")
    assert [(component.config, component.plugin) for component in actual.components] == [(PlainConfig, "built in")]
    assert plugins.registry.find("norm", "plain") == actual.components[0]
    assert plugins.broken == ()


def test_broken_built_ins_are_nobodys_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tfkit.components", None)
    with pytest.raises(ModuleNotFoundError):
        load()


def test_entry_point(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("one", "two"))
    plugins = load(entry_points=True)
    actual = plugins.loaded[-1]
    assert (actual.name, actual.version, actual.origin) == ("tfkit-one", "0.1.0", "entry point")
    assert kinds(plugins) == ["one", "two"]
    registered = plugins.registry.find("ffn", "one")
    assert registered is not None
    assert registered.plugin == "tfkit-one 0.1.0"
    assert registered.file.endswith("site/tfkit_one.py")
    assert kinds(load()) == []


def test_entry_points_are_those_of_python(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("tfkit-one", "0.1.0", plugin("one"))
    monkeypatch.setattr(discover, "entry_points", importlib.metadata.entry_points)
    assert "tfkit-one 0.1.0" in [candidate.label for candidate in discover.find_plugins((), ambient=True)]


def test_installed_plugins_are_searched_again_only_after_a_change(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []

    def search() -> importlib.metadata.EntryPoints:
        searches.append(1)
        return importlib.metadata.entry_points()

    def labels() -> list[str]:
        importlib.invalidate_caches()
        return [candidate.label for candidate in discover.find_plugins((), ambient=True)]

    monkeypatch.setattr(discover, "entry_points", search)
    install("tfkit-one", "0.1.0", plugin("one"))
    assert "tfkit-one 0.1.0" in labels()
    assert labels() == labels()
    assert len(searches) == 1
    install("tfkit-two", "0.1.0", plugin("two"))
    assert {"tfkit-one 0.1.0", "tfkit-two 0.1.0"} <= set(labels())
    Path("site/tfkit_one-0.1.0.dist-info/entry_points.txt").write_text("[other]\n")
    assert "tfkit-one 0.1.0" not in labels()
    shutil.rmtree("site/tfkit_two-0.1.0.dist-info")
    assert "tfkit-two 0.1.0" not in labels()
    assert len(searches) == 4


def test_a_finder_of_an_application_is_asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder(importlib.metadata.DistributionFinder):
        def find_distributions(self, context: object = None) -> list[importlib.metadata.Distribution]:
            calls.append(context)
            return []

    calls: list[object] = []
    monkeypatch.setattr(discover, "entry_points", importlib.metadata.entry_points)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    discover.find_plugins((), ambient=True)
    first = len(calls)
    discover.find_plugins((), ambient=True)
    assert len(calls) == 2 * first > 0


def test_folder_of_files_and_packages() -> None:
    write("plugins/one.py", plugin("one"))
    write("plugins/odd name-2.py", plugin("odd"))
    write("plugins/pack/__init__.py", "from .parts.two import tfkit_register")
    write("plugins/pack/parts/two.py", plugin("two"))
    for skipped in ("_helper.py", "test_one.py", "conftest.py", "setup.py", "notes.txt", "tests/__init__.py"):
        write(f"plugins/{skipped}", "raise SystemExit")
    write("plugins/data/table.csv", "")
    plugins = load("plugins")
    assert kinds(plugins) == ["odd", "one", "two"]
    assert plugins.broken == ()
    assert origins(plugins) == {
        "tfkit": "built in",
        "odd name-2": "plugins/odd name-2.py",
        "one": "plugins/one.py",
        "pack": "plugins/pack",
    }
    registered = plugins.registry.find("ffn", "one")
    assert registered is not None
    assert registered.plugin == "plugins/one.py"
    assert registered.file == str(Path("plugins/one.py").resolve())


@pytest.mark.parametrize("folder", ["plugins/one.py", "plugins/pack", "plugins/project"])
def test_the_folder_is_the_plugin(folder: str) -> None:
    write("plugins/one.py", plugin("one"))
    write("plugins/pack/__init__.py", plugin("one"))
    write("plugins/pack/more.py", plugin("more"))
    project("plugins/project", "tfkit-itself", "itself")
    write("plugins/project/itself.py", plugin("one"))
    plugins = load(folder)
    assert kinds(plugins) == ["one"]
    assert plugins.broken == ()


# ---- TFKIT_PLUGIN_DIR ----


def test_the_environment_adds_folders(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    first, two = write("own/one.py", plugin("one")).resolve(), write("lab/two.py", plugin("two")).resolve()
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", f"{first.parent}:{two}:")
    plugins = load(entry_points=True)
    assert kinds(plugins) == ["one", "two"]
    assert origins(plugins)["one"] == f"{first}, by TFKIT_PLUGIN_DIR"
    assert kinds(load()) == [], "a call that asks for what it names gets no more"
    assert sorted(available_plugins().versions) == ["one", "two"]


def test_the_environment_gives_way_to_what_is_named(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(write("lab/one.py", plugin("old")).resolve().parent))
    write("mine/one.py", plugin("new"))
    assert kinds(load("mine", entry_points=True)) == ["new"]
    assert kinds(load("lab", entry_points=True)) == ["old"]


def test_the_environment_goes_before_what_is_installed(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("tfkit-one", "0.1.0", plugin("old"))
    project("lab/project", "tfkit-one", "at_hand", "0.2.0")
    write("lab/project/at_hand.py", plugin("new"))
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(Path("lab").resolve()))
    plugins = load(entry_points=True)
    assert kinds(plugins) == ["new"]
    assert origins(plugins)["tfkit-one"].endswith("project, by TFKIT_PLUGIN_DIR (instead of 0.1.0, installed)")


def test_the_environment_runs_nothing_that_lies_where_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    write("plugins/one.py", "raise SystemExit")
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", "plugins")
    with pytest.raises(SpecError, match="TFKIT_PLUGIN_DIR must contain absolute paths; got `plugins`"):
        load(entry_points=True)


def test_the_environment_names_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SpecError, match=r"(?s)nowhere` does not exist.*named in TFKIT_PLUGIN_DIR"):
        load(entry_points=True)


def test_one_folder_needs_no_list() -> None:
    write("plugins/one.py", plugin("one"))
    assert kinds(load_plugins(plugin_dirs="plugins", entry_points=False)) == ["one"]


def test_what_is_available_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    write("plugins/one.py", "raise SystemExit")
    assert available_plugins(plugin_dirs="plugins", entry_points=False).versions == {"one": ""}
    monkeypatch.setenv("TFKIT_DISABLE", "one")
    assert available_plugins(plugin_dirs="plugins", entry_points=False).versions == {}


# ---- a plugin that a spec needs ----


def test_where_a_wanted_plugin_is(install: Callable[..., None]) -> None:
    write("plugins/one.py", "raise SystemExit")
    project("plugins/tfkit-two", "tfkit-two", "two")
    folders = [Path("nowhere"), Path("plugins")]
    allow = "allow it in place: `--plugin-dir ./plugins/{}`, or TFKIT_PLUGIN_DIR"
    assert where_it_is("one", folders) == allow.format("one.py")
    two = f"`pip install ./plugins/tfkit-two`, or {allow.format('tfkit-two')}"
    assert where_it_is("tfkit_two", folders) == two
    assert "pip install FOLDER" in where_it_is("three", folders)
    install("tfkit-four", "1.0", plugin("four"))
    assert where_it_is("tfkit-four", folders) == "it is installed, but omitted by `--no-plugins` (`entry_points=False`)"


def test_a_wanted_plugin_that_is_off_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    write("plugins/one.py", "raise OSError('no such thing')")
    assert "it is installed and fails: OSError: no such thing" in how_to_get("one", load("plugins"), ())
    monkeypatch.setenv("TFKIT_DISABLE", "One")
    assert how_to_get("one", load("plugins"), ()) == "it is switched off by TFKIT_DISABLE"


def test_two_plugins_of_one_name() -> None:
    write("a/same.py", plugin("one"))
    project("b/project", "Same", "same_project")
    with pytest.raises(SpecError) as caught:
        load("a", "b")
    assert str(caught.value) == inspect.cleandoc("""
        error: there are 2 plugins named `same`
           = a/same.py
           = 0.1.0 b/project
           = help: rename or remove one of the plugins
    """)
    assert load("a", "b", disabled=["same"]).disabled == ("same", "Same")
    assert kinds(load("a")) == ["one"]


def test_two_installed_versions(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("tfkit-one", "0.1.0", plugin("one"))
    first = write("first/tfkit_one.py", plugin("first")).parent
    Path("site/tfkit_one-0.1.0.dist-info").rename(first / "tfkit_one-0.1.0.dist-info")
    install("tfkit-one", "0.2.0", plugin("second"))
    monkeypatch.setattr(sys, "path", [str(first.resolve()), *sys.path])
    monkeypatch.setattr(discover, "entry_points", importlib.metadata.entry_points)
    plugins = load(entry_points=True)
    assert "first" in kinds(plugins)
    assert origins(plugins)["tfkit-one"] == f"entry point (instead of 0.2.0, in {Path('site').resolve()})"


def test_a_file_does_not_shadow_a_module() -> None:
    write("plugins/json.py", plugin("one"))
    before = sys.modules.get("json")
    assert kinds(load("plugins")) == ["one"]
    assert sys.modules.get("json") is before


def test_folders_that_overlap_load_once() -> None:
    write("plugins/one.py", plugin("one"))
    assert kinds(load("plugins", "plugins/one.py", Path("plugins").resolve())) == ["one"]


def test_two_calls_have_the_same_classes_and_their_own_registries() -> None:
    write("plugins/one.py", plugin("one"))
    first, second = (load("plugins") for _ in range(2))
    assert first.registry is not second.registry
    assert first.registry.find("ffn", "one") == second.registry.find("ffn", "one")


@pytest.mark.parametrize("source", ["", "src/"])
def test_project(source: str) -> None:
    name = "layout_src" if source else "layout_flat"
    project("plugins/demo", "tfkit-demo", f"{name}.hooks")
    write(f"plugins/demo/{source}{name}/__init__.py", "")
    write(f"plugins/demo/{source}{name}/hooks.py", f"from {name}.part import tfkit_register")
    write(f"plugins/demo/{source}{name}/part.py", plugin("one"))
    plugins = load("plugins")
    actual = plugins.loaded[-1]
    assert (actual.name, actual.version, actual.origin) == ("tfkit-demo", "0.1.0", "plugins/demo")
    assert [component.plugin for component in actual.components] == ["tfkit-demo 0.1.0"]


def test_project_that_names_an_object() -> None:
    project("demo", "tfkit-demo", "demo_object:plugin")
    body = "class Plugin:\n    @hookimpl\n    def tfkit_register(self, register): register(OneConfig)"
    write("demo/demo_object.py", f"{HEAD}{config('one')}\n{body}\nplugin = Plugin()\n")
    assert kinds(load("demo")) == ["one"]


def test_project_beside_the_same_installed(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("installed"))
    project("plugins/one", "TFKit_One", "local_one", version="0.2.0")
    write("plugins/one/local_one.py", plugin("local"))
    plugins = load("plugins", entry_points=True)
    assert kinds(plugins) == ["local"]
    assert origins(plugins)["TFKit_One"] == "plugins/one (instead of 0.1.0, installed)"


def test_project_of_the_same_version_installed(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("installed"))
    project("plugins/one", "tfkit-one", "local_one")
    write("plugins/one/local_one.py", plugin("local"))
    assert origins(load("plugins", entry_points=True))["tfkit-one"] == "plugins/one"


def test_project_whose_module_is_already_another(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("installed"))
    project("plugins/one", "tfkit-one", "tfkit_one", version="0.2.0")
    write("plugins/one/tfkit_one.py", plugin("local"))
    assert kinds(load(entry_points=True)) == ["installed"]
    plugins = load("plugins", entry_points=True)
    assert kinds(plugins) == []
    location = Path("site/tfkit_one.py").resolve()
    assert causes(plugins) == {
        "tfkit-one": f"ImportError: another module `tfkit_one` has been imported, from {location}"
    }


@pytest.mark.parametrize("folder", ["missing", "empty", "notes.txt", "other"])
def test_folder_without_plugin(folder: str) -> None:
    Path("empty").mkdir()
    write("notes.txt", "")
    write("other/pyproject.toml", "[project]\nname = 'other'")
    with pytest.raises(SpecError) as caught:
        load(folder)
    what = "does not exist" if folder == "missing" else "contains no plugin"
    assert str(caught.value) == inspect.cleandoc(f"""
        error: plugin folder `{folder}` {what}
           = help: use a folder with a *.py file, a package, or a project whose pyproject.toml has
             [project.entry-points.tfkit]
    """)


def test_folder_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    Path("plugins").mkdir()
    with pytest.raises(SpecError, match="plugin folder `plugins` cannot be read: Permission denied"):
        load("plugins")


def test_threads_that_load_at_once_leave_the_output_as_it_was() -> None:
    before = sys.stdout

    def load_slowly() -> None:
        with stdout_to_stderr():
            time.sleep(0.1)

    threads = [threading.Thread(target=load_slowly) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert sys.stdout is before
