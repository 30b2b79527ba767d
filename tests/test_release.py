"""The command that prepares a release: `make release`, here without a network."""

from __future__ import annotations

import importlib.util
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tfkit.cli import main

ROOT = Path(__file__).parents[1]
RELATIVE = re.compile(r"\]\((?!https?:|#)[^)]*\)|<img src=\"(?!https?:)")


def release() -> ModuleType:
    return tool("release")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_versions_are_the_version_of_tfkit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = release()
    assert list(module.versions()) == []
    monkeypatch.setattr(module, "project", lambda folder: {"version": "0.1.0" if folder != ROOT else "0.2.0"})
    assert len(list(module.versions())) == len(module.PROJECTS) + 1


def test_every_distribution_has_types() -> None:
    """Type checkers read the annotations of an installed package only if it contains `py.typed`."""
    template = ROOT / "tfkit" / "tools" / "new" / "template"
    projects = [*(file.parent for file in ROOT.glob("plugins/*/pyproject.toml")), template]
    assert len(projects) > 5
    for folder in projects:
        wheel = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
        (package,) = wheel["targets"]["wheel"]["packages"]
        assert (folder / package / "py.typed").read_bytes() == b""


def test_an_sdist_has_what_its_tests_read(tmp_path: Path) -> None:
    module = release()
    with tarfile.open(tmp_path / "tfkit.tar.gz", "w:gz") as archive:
        for name in module.NEEDED[1:]:
            archive.add(ROOT / name, f"tfkit-0.1.0/{name}")
    with pytest.raises(ValueError, match=r"tfkit.tar.gz is missing Makefile\Z"):
        module.check_sdist(tmp_path / "tfkit.tar.gz")


@pytest.mark.parametrize("urls", [{}, {"Repository": "https://host/owner/tfkit"}])
def test_long_descriptions_have_no_relative_links(monkeypatch: pytest.MonkeyPatch, urls: dict[str, str]) -> None:
    module = release()
    monkeypatch.setattr(module, "project", lambda folder: {"version": "0.1.0", "urls": urls})
    for folder in module.PROJECTS:
        readme = (folder / "README.md").read_text(encoding="utf-8")
        text = module.long_description(readme, folder.relative_to(ROOT).as_posix())
        assert RELATIVE.findall(text) == []
        paths = re.findall(
            r"https://host/owner/tfkit/(?:blob|raw)/v0.1.0/([^])#\"]+)" if urls else r"\(`([\w./-]+\.md)`\)", text
        )
        assert paths
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_long_description_keeps_code_addresses_and_anchors() -> None:
    module = release()
    unchanged = "```text\n[a](b.md)\n```\n[c](https://host/d.md) and [e](#e)\n"
    assert module.long_description(unchanged, ".") == unchanged
    assert module.long_description("[`f`](../../docs/g.md#h)", "plugins/x") == "`f` (`docs/g.md`)"
    assert module.long_description("[docs/g.md](docs/g.md)", ".") == "docs/g.md"
    assert module.long_description('<img src="i.svg" alt="A plot" width="9">', "docs") == "A plot (`docs/i.svg`)"


def workflow(name: str) -> dict[Any, Any]:
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    document: dict[Any, Any] = yaml.safe_load(text)
    return document


def test_the_workflows_call_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    declared = re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE)
    called: dict[str, set[str]] = {}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        document = workflow(path.stem)
        # YAML 1.1 reads `on` as true
        assert set(document) == {"name", True, "permissions", "concurrency", "jobs"}
        jobs = [job for job in document["jobs"].values() if "uses" not in job]
        assert all(job["timeout-minutes"] <= 240 for job in jobs)
        commands = [step["run"].split() for job in jobs for step in job["steps"] if "run" in step]
        assert {command[0] for command in commands} <= {"make", ".ci/run"}
        called[path.stem] = {command[1] for command in commands}
        variables = {word.partition("=")[0] for command in commands for word in command[2:] if "=" in word}
        assert all(re.search(rf"^{name} +\?=", makefile, re.MULTILINE) for name in variables - {"--python"})
    assert called == {
        "docs": {"test-site"},
        "nightly": {"test-all", "test-around"},
        "release": {"release"},
        "tests": {"test", "test-near"},
    }
    assert set().union(*called.values()) <= {*declared}


def test_a_release_needs_the_tests() -> None:
    jobs = workflow("release")["jobs"]
    assert jobs["tests"] == {"uses": "./.github/workflows/tests.yml"}
    assert "workflow_call" in workflow("tests")[True]
    assert {"tests", "build"} == {*jobs["publish"]["needs"]}


def test_every_night_torch_is_the_oldest_and_the_newest_that_are_tested() -> None:
    document = workflow("nightly")
    assert {"schedule", "workflow_dispatch"} == {*document[True]}
    oldest, newest = document["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    (lower,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert oldest == f"{lower}.0"
    assert f"torch {oldest} and {newest}" in (ROOT / "docs/installing.md").read_text("utf-8")


def test_the_tests_run_on_each_python_that_a_distribution_names() -> None:
    versions = workflow("tests")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert versions[0] == "3.11"
    module = release()
    for folder in module.PROJECTS:
        if folder.name != "tfkit-additive":  # the example of a plugin, which its README shows line by line
            classifiers = "\n".join(module.project(folder)["classifiers"])
            assert re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE) == versions


def test_a_release_runs_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    commands = {line.partition(" ")[0] for line in tool("every_command").COMMANDS.splitlines() if line}
    assert commands == tool("every_command").names_in(capsys.readouterr().out)
    assert {"build", "new", "list"} <= commands


@pytest.mark.slow
def test_commands_that_fail_or_are_missing_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tool("every_command")
    monkeypatch.setattr(module, "COMMANDS", "list gpt2\nshow nothere\n")
    assert module.main() == 1
    printed = capsys.readouterr()
    assert re.search(r"^  0 .* tfkit list gpt2$", printed.out, re.MULTILINE)
    assert re.search(r"^  1 .* tfkit show nothere$", printed.out, re.MULTILINE)
    assert printed.out.endswith("2 commands, 1 failed\n")
    assert "error: COMMANDS is missing attention, build, check, " in printed.err
    monkeypatch.setattr(module, "names_in", lambda text: {"list"})
    monkeypatch.setattr(module, "COMMANDS", "list gpt2\n")
    assert module.main() == 0


def test_warnings_of_a_command_are_reported_without_folders() -> None:
    text = "/a/b/c/d/e.py:7: DeprecationWarning: old\n  call()\nno warning: 7\n"
    assert list(tool("every_command").warnings_in(text)) == ["c/d/e.py:7: DeprecationWarning: old"]


@pytest.mark.slow
def test_a_release_is_built_and_its_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hatchling")
    module = release()
    commands: list[Path] = []
    monkeypatch.setattr(
        module, "run_commands", lambda python, *_, **__: commands.append(python)
    )  # other tests run them
    assert module.main(["--offline", "-o", str(tmp_path / "dist")]) == 0
    assert [python.name for python in commands] == ["python"]
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert len(names) == 2 * len(module.PROJECTS)
    with zipfile.ZipFile(tmp_path / "dist" / "tfkit-0.1.0-py3-none-any.whl") as wheel:
        assert RELATIVE.findall(wheel.read("tfkit-0.1.0.dist-info/METADATA").decode()) == []
    for path in (tmp_path / "dist").glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            assert [name for name in wheel.namelist() if name.endswith("/py.typed")], path.name
