"""Loading plugins: where they come from, how a failing one is set aside, what is an error for everybody."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

import tfkit.plugin
from tfkit.component import NormConfig
from tfkit.errors import SpecError
from tfkit.plugin import discover
from tfkit.plugin.hookspecs import hookimpl
from tfkit.plugin.manager import Plugins, available, load_plugins
from tfkit.plugin.wanted import how_to_get, where_it_is

HEAD = """
from typing import Literal
from tfkit.component import FFNConfig
from tfkit.plugin.hookspecs import hookimpl
"""
HOOK = "write `@tfkit.hookimpl def tfkit_register(register)`"


class PlainConfig(NormConfig):
    kind: Literal["plain"] = "plain"

    def build(self, make: Any, width: int) -> Any: ...


def config(kind: str) -> str:
    return f"""
class {kind.title()}Config(FFNConfig):
    kind: Literal["{kind}"] = "{kind}"
    def build(self, make): ...
"""


def plugin(*kinds: str, hook: str = "tfkit_register", body: str = "") -> str:
    """The text of a plugin module that registers FFNs of these kinds, then runs `body` in its hook."""
    calls = "".join(f"    register({kind.title()}Config)\n" for kind in kinds)
    classes = "".join(map(config, kinds))
    return f"{HEAD}{classes}\n@hookimpl\ndef {hook}(register):\n{calls}    {body or 'pass'}\n"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A built-in plugin of one norm, no switches from outside, and no module of the test left behind."""
    components = ModuleType("tfkit.components")
    components.tfkit_register = hookimpl(_register_plain)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tfkit.components", components)
    for name in ("TFKIT_DISABLE", "TFKIT_PLUGIN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if name.startswith("tfkit_plugin_") or file.startswith(str(tmp_path)):
            del sys.modules[name]


def _register_plain(register: Any) -> None:
    register(PlainConfig)


def load(*folders: str | Path, entry_points: bool = False, disabled: Sequence[str] = ()) -> Plugins:
    before = sys.path[:]
    try:
        return load_plugins(
            plugin_dirs=[Path(folder) for folder in folders], entry_points=entry_points, disabled=disabled
        )
    finally:
        assert sys.path == before


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def project(folder: str, name: str, modules: str, version: str = "0.1.0") -> None:
    entry = f'[project.entry-points.tfkit]\nplugin = "{modules}"\n'
    write(f"{folder}/pyproject.toml", f'[project]\nname = "{name}"\nversion = "{version}"\n{entry}')


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None) -> Callable[..., None]:
    """Put a distribution of one module in a site folder, where alone entry points are then looked for."""
    site = tmp_path / "site"
    site.mkdir()

    def only_site(group: str) -> Sequence[Any]:
        found = importlib.metadata.distributions(path=[str(site)])
        return [point for dist in found for point in dist.entry_points if point.group == group]

    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(discover, "entry_points", only_site)

    def install(name: str, version: str, text: str) -> None:
        module = name.replace("-", "_")
        (site / f"{module}.py").write_text(text)
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[tfkit]\n{module} = {module}\n")

    return install


def origins(plugins: Plugins) -> dict[str, str]:
    return {one.name: one.origin for one in plugins.loaded}


def causes(plugins: Plugins) -> dict[str, str]:
    return {one.name: one.cause for one in plugins.broken}


def kinds(plugins: Plugins) -> list[str]:
    return list(plugins.registry.kinds("ffn"))


def test_the_tutorial_is_true() -> None:
    text = inspect.cleandoc(tfkit.plugin.__doc__ or "")
    example = text[text.index("    # tfkit_double_gelu.py") : text.index("The base classes in")]
    write("tfkit_double_gelu.py", textwrap.dedent(example))
    plugins = load("tfkit_double_gelu.py")
    assert plugins.broken == ()
    registered = plugins.registry.find("ffn", "double_gelu")
    assert registered is not None
    module = registered.config(d_model=4, d_ff=8).build(None)  # type: ignore[attr-defined, call-arg]
    assert [tuple(one.shape) for one in module.parameters()] == [(8, 4), (8,), (4, 8), (4,)]


# ---- where plugins come from ----


def test_built_in() -> None:
    plugins = load()
    (found,) = plugins.loaded
    assert (found.name, found.origin) == ("tfkit", "built in")
    assert [(one.config, one.plugin) for one in found.components] == [(PlainConfig, "built in")]
    assert plugins.registry.find("norm", "plain") == found.components[0]
    assert plugins.broken == ()


def test_broken_built_ins_are_nobodys_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tfkit.components", None)
    with pytest.raises(ModuleNotFoundError):
        load()


def test_entry_point(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("one", "two"))
    plugins = load(entry_points=True)
    found = plugins.loaded[-1]
    assert (found.name, found.version, found.origin) == ("tfkit-one", "0.1.0", "entry point")
    assert kinds(plugins) == ["one", "two"]
    registered = plugins.registry.find("ffn", "one")
    assert registered is not None
    assert registered.plugin == "tfkit-one 0.1.0"
    assert registered.file.endswith("site/tfkit_one.py")
    assert kinds(load()) == []


def test_entry_points_are_those_of_python(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("tfkit-one", "0.1.0", plugin("one"))
    monkeypatch.setattr(discover, "entry_points", importlib.metadata.entry_points)
    assert "tfkit-one 0.1.0" in [one.label for one in discover.find_plugins((), ambient=True)]


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
    one, two = write("own/one.py", plugin("one")).resolve(), write("lab/two.py", plugin("two")).resolve()
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", f"{one.parent}:{two}:")
    plugins = load(entry_points=True)
    assert kinds(plugins) == ["one", "two"]
    assert origins(plugins)["one"] == f"{one}, by TFKIT_PLUGIN_DIR"
    assert kinds(load()) == [], "a call that asks for what it names gets no more"
    assert sorted(available()) == ["one", "two"]


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
    assert origins(plugins)["tfkit-one"].endswith("project, by TFKIT_PLUGIN_DIR (instead of the installed 0.1.0)")


def test_the_environment_runs_nothing_that_lies_where_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    write("plugins/one.py", "raise SystemExit")
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", "plugins")
    with pytest.raises(SpecError, match="TFKIT_PLUGIN_DIR takes absolute paths, not `plugins`"):
        load(entry_points=True)


def test_the_environment_names_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SpecError, match=r"(?s)nowhere` does not exist.*named in TFKIT_PLUGIN_DIR"):
        load(entry_points=True)


def test_one_folder_needs_no_list() -> None:
    write("plugins/one.py", plugin("one"))
    assert kinds(load_plugins(plugin_dirs="plugins", entry_points=False)) == ["one"]


def test_what_is_available_does_not_run() -> None:
    write("plugins/one.py", "raise SystemExit")
    assert available(plugin_dirs="plugins", entry_points=False) == {"one"}
    assert available(plugin_dirs="plugins", entry_points=False, disabled=["one"]) == frozenset()


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
    assert (
        where_it_is("tfkit-four", folders) == "it is installed, and left out by `--no-plugins` (`entry_points=False`)"
    )


def test_a_wanted_plugin_that_is_off_or_broken() -> None:
    write("plugins/one.py", "raise OSError('no such thing')")
    assert "it is installed and fails: OSError: no such thing" in how_to_get("one", load("plugins"), ())
    assert "it is switched off: by `--disable one`" in how_to_get("one", load("plugins", disabled=["one"]), ())


def test_files_of_one_name_in_two_folders() -> None:
    write("a/same.py", plugin("one"))
    write("b/same.py", plugin("two"))
    assert kinds(load("a", "b")) == ["one", "two"]


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
    found = plugins.loaded[-1]
    assert (found.name, found.version, found.origin) == ("tfkit-demo", "0.1.0", "plugins/demo")
    assert [one.plugin for one in found.components] == ["tfkit-demo 0.1.0"]


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
    assert origins(plugins)["TFKit_One"] == "plugins/one (instead of the installed 0.1.0)"


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
    place = Path("site/tfkit_one.py").resolve()
    assert causes(plugins) == {"tfkit-one": f"ImportError: another module `tfkit_one` has been imported, from {place}"}


@pytest.mark.parametrize("folder", ["missing", "empty", "notes.txt", "other"])
def test_folder_without_plugin(folder: str) -> None:
    Path("empty").mkdir()
    write("notes.txt", "")
    write("other/pyproject.toml", "[project]\nname = 'other'")
    with pytest.raises(SpecError) as caught:
        load(folder)
    what = "does not exist" if folder == "missing" else "holds no plugin"
    assert str(caught.value) == inspect.cleandoc(f"""
        error: plugin folder `{folder}` {what}
           = help: it may hold a *.py file, a package, or a project whose pyproject.toml has
             [project.entry-points.tfkit]
    """)


def test_folder_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    Path("plugins").mkdir()
    with pytest.raises(SpecError, match="plugin folder `plugins` cannot be read: Permission denied"):
        load("plugins")


# ---- quarantine ----


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        ("\nimport nowhere", "ModuleNotFoundError: No module named 'nowhere'", 2),
        ("raise SystemExit(3)", "SystemExit: 3", 1),
        ("raise RuntimeError", "RuntimeError", 1),
        ("raise ValueError('two\\nlines')", "ValueError: two lines", 1),
        ("def broken(:", "SyntaxError: invalid syntax (bad.py, line 1)", 1),
        (plugin("half", body="{}['x']"), "KeyError: 'x'", 13),
        (
            plugin("half", body="register(int)"),
            "TypeError: register() takes a subclass of tfkit.Component, not `int`",
            13,
        ),
        (plugin("half", body="raise SystemExit"), "SystemExit", 13),
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


def test_an_interrupt_is_not_caught() -> None:
    write("bad.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load("bad.py")


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
        f"tfkit-one 0.1.0: `OneConfig`, {Path('site/tfkit_one.py').resolve()}",
        f"tfkit-two 2.0: `OneConfig`, {Path('site/tfkit_two.py').resolve()}",
    )
    assert second.notes[1] == f"plugins/three.py: `TwoConfig`, {Path('plugins/three.py').resolve()}"


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
           = known hooks: tfkit_register
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


@pytest.mark.parametrize("name", ["tfkit-one", "TFKIT_One"])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_switched_off(name: str, by: str, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("tfkit-one", "0.1.0", "raise AssertionError('imported')")
    install("tfkit-two", "0.1.0", plugin("two"))
    if by == "environment":
        monkeypatch.setenv("TFKIT_DISABLE", f" {name}, not-here,")
    plugins = load(entry_points=True, disabled=[name] if by == "argument" else ())
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


def test_switching_off_an_unknown_name(install: Callable[..., None]) -> None:
    install("tfkit-one", "0.1.0", plugin("one"))
    with pytest.raises(SpecError) as caught:
        load(entry_points=True, disabled=["tfkit-oen"])
    assert str(caught.value) == inspect.cleandoc("""
        error: cannot switch off plugin `tfkit-oen`: there is no plugin of that name
           = plugins: tfkit-one
           = help: a plugin with a similar name exists: `tfkit-one`
    """)
    with pytest.raises(SpecError, match="no plugin was found"):
        load(disabled=["x"])
