"""Specs of plugins: a folder that a distribution or a project declares, and the hook `tfkit_specs`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tfkit.errors import SpecError
from tfkit.plugin.known_specs import built_in_specs_folder, named_specs
from tfkit.plugin.manager import available_plugins
from tfkit.spec.extending import find_spec
from tfkit.spec.load import read_tree
from tfkit.spec.source import plain_data
from tfkit.tools.list_.gallery import shipped_specs

from .written import HEAD, causes, load, origins, write

pytestmark = pytest.mark.usefixtures("clean")
POINTS = '[project.entry-points."tfkit.specs"]\nlab = "tfkit_lab.specs"\n'
HOOK = f"{HEAD}from pathlib import Path\n@hookimpl\ndef tfkit_specs():\n"


def project(points: str = POINTS) -> None:
    """A project of specs, with code that must not run."""
    write("lab/pyproject.toml", f'[project]\nname = "tfkit-lab"\nversion = "0.3"\n{points}')
    write("lab/src/tfkit_lab/__init__.py", "raise AssertionError('imported')")
    write("lab/src/tfkit_lab/specs/lab_gpt.yaml", "extends: gpt2\nname: lab_gpt\n")


def test_without_a_plugin_they_are_those_of_tfkit() -> None:
    assert named_specs().files["gpt2"].path == built_in_specs_folder() / "gpt2.yaml"
    assert {file.plugin for file in named_specs().files.values()} == {"built in"}


def test_of_a_project_without_running_it() -> None:
    project()
    plugins = available_plugins(plugin_dirs="lab", entry_points=False)
    spec = plugins.specs.files["lab_gpt"]
    assert (spec.plugin, spec.path) == ("tfkit-lab 0.3", Path("lab/src/tfkit_lab/specs/lab_gpt.yaml").resolve())
    assert plain_data(read_tree("lab_gpt", plugins.specs))["d_model"] == 768
    assert "tfkit_lab" not in sys.modules


def test_names_are_sorted_over_all_folders() -> None:
    project()
    for name in ("a_lab", "m_lab"):
        write(f"lab/src/tfkit_lab/specs/{name}.yaml", f"extends: gpt2\nname: {name}\n")
    specs = available_plugins(plugin_dirs="lab", entry_points=False).specs
    assert list(specs.files) == sorted({*named_specs().files, "a_lab", "lab_gpt", "m_lab"})
    assert list(specs.families) == sorted(specs.families)


def test_of_a_distribution(install: Callable[..., None]) -> None:
    install("tfkit-lab", "0.3", "raise AssertionError('imported')", "[tfkit.specs]\nlab = tfkit_pack.specs\n")
    write("site/tfkit_pack/specs/lab_gpt.yaml", "extends: gpt2\nname: lab_gpt\n")
    (actual,) = (spec for spec in shipped_specs() if spec.name == "lab_gpt")
    assert (actual.plugin, actual.model_type, actual.kind) == ("tfkit-lab 0.3", "gpt2", "decoder")
    assert load(entry_points=True).specs.files["lab_gpt"].plugin == "tfkit-lab 0.3"


def test_of_a_hook() -> None:
    write("one.py", f"{HOOK}    return Path(__file__).parent / 'mine'\n")
    write("mine/mine.yaml", "extends: gpt2\nname: mine\n")
    plugins = load("one.py")
    assert plugins.specs.files["mine"].plugin == "one.py"
    assert find_spec("mine", plugins.specs) == Path("mine/mine.yaml").resolve()
    assert "mine" not in available_plugins(plugin_dirs="one.py", entry_points=False).specs.files


def test_the_specs_of_a_plugin_whose_code_fails_are_data() -> None:
    project(f'{POINTS}[project.entry-points.tfkit]\nlab = "tfkit_lab"\n')
    plugins = load("lab")
    assert causes(plugins) == {"tfkit-lab": "AssertionError: imported"}
    assert "lab_gpt" in plugins.specs.files


def test_switched_off() -> None:
    project()
    assert "lab_gpt" not in load("lab", disabled=["tfkit-lab"]).specs.files


# ---- faults ----


@pytest.mark.parametrize(
    ("body", "cause", "line"),
    [
        ("{}['x']", "`tfkit_specs` failed: KeyError: 'x'", 8),
        ("raise SystemExit(3)", "`tfkit_specs` failed: SystemExit: 3", 8),
        ("return 3", "`tfkit_specs` must return the path of a folder; got int", 6),
        ("return 'specs'", "`tfkit_specs` must return the path of a folder; got str", 6),
        ("return ['specs']", "`tfkit_specs` must return paths; got str among them", 6),
        ("return Path('no')", "`tfkit_specs` must return a folder that holds *.yaml; got no", 6),
    ],
)
def test_a_hook_that_fails_leaves_out_its_plugin(body: str, cause: str, line: int) -> None:
    write("plugins/bad.py", f"{HOOK}    {body}\n")
    write("plugins/good.py", f"{HOOK}    yield Path(__file__).parent / 'good'\n")
    write("plugins/good/good.yaml", "extends: gpt2\nname: good\n")
    plugins = load("plugins/bad.py", "plugins/good.py")
    assert list(origins(plugins)) == ["tfkit", "good"]
    assert "good" in plugins.specs.files
    (broken,) = plugins.broken
    assert (broken.cause, broken.where) == (cause, f"{Path('plugins/bad.py').resolve()}:{line}")


@pytest.mark.parametrize(
    ("points", "cause"),
    [
        (POINTS.replace('.specs"\n', '.nowhere"\n'), "ModuleNotFoundError: there is no folder `tfkit_lab/nowhere`"),
        (POINTS.replace("tfkit_lab", "tfkit_bal"), "ModuleNotFoundError: no module `tfkit_bal` in "),
        (POINTS.replace('.specs"\n', '"\n'), "ImportError: the folder "),
        (
            POINTS.replace('"tfkit.specs"', "tfkit.specs"),
            "ImportError: lab/pyproject.toml: the group must be quoted, as in [project.entry-points.",
        ),
    ],
)
def test_a_wrong_declaration_leaves_out_its_plugin(points: str, cause: str) -> None:
    project(points)
    (broken,) = load("lab").broken
    assert broken.cause.startswith(cause)


def test_a_wrong_declaration_is_found_without_running_anything() -> None:
    project(POINTS.replace("tfkit_lab", "tfkit_bal"))
    plugins = available_plugins(plugin_dirs="lab", entry_points=False)
    assert [value.name for value in plugins.broken] == ["tfkit-lab"]
    assert plugins.specs.files == named_specs().files


@pytest.mark.parametrize("ask", [load, lambda folder: available_plugins(plugin_dirs=folder, entry_points=False)])
def test_two_specs_of_one_name_name_both(ask: Callable[..., object]) -> None:
    project()
    spec_path = write("lab/src/tfkit_lab/specs/gpt2.yaml", "extends: llama_7b\nname: gpt2\n").resolve()
    with pytest.raises(SpecError) as caught:
        ask("lab")
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message == "there are two specs named `gpt2`"
    assert diagnostic.notes == (f"built in: {built_in_specs_folder() / 'gpt2.yaml'}", f"tfkit-lab 0.3: {spec_path}")


def test_a_spec_that_cannot_be_read_is_listed_with_the_cause() -> None:
    project()
    write("lab/src/tfkit_lab/specs/far.yaml", "extends: elsewhere\nname: far\n")
    actual = {
        spec.name: spec for spec in shipped_specs(plugins=available_plugins(plugin_dirs="lab", entry_points=False))
    }
    assert actual["far"].error == "there is no spec named `elsewhere`"
    assert actual["lab_gpt"].error is None
