"""The command that prepares a release: `make release`, here without a network."""

from __future__ import annotations

import importlib.util
import re
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RELATIVE = re.compile(r"\]\((?!https?:|#)[^)]*\)|<img src=\"(?!https?:)")


def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
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
    kept = "```text\n[a](b.md)\n```\n[c](https://host/d.md) and [e](#e)\n"
    assert module.long_description(kept, ".") == kept
    assert module.long_description("[`f`](../../docs/g.md#h)", "plugins/x") == "`f` (`docs/g.md`)"
    assert module.long_description("[docs/g.md](docs/g.md)", ".") == "docs/g.md"
    assert module.long_description('<img src="i.svg" alt="A plot" width="9">', "docs") == "A plot (`docs/i.svg`)"


def test_the_workflows_call_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        assert set(yaml.safe_load(text)) == {"name", True, "permissions", "jobs"}  # YAML 1.1 reads `on` as true
        targets += re.findall(r"run: make (\w+)", text)
    assert sorted(targets) == ["docs", "release", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.slow
def test_a_release_is_built_and_its_readme_runs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    module = release()
    assert module.main(["--offline", "-o", str(tmp_path / "dist")]) == 0
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert len(names) == 2 * len(module.PROJECTS)
    with zipfile.ZipFile(tmp_path / "dist" / "tfkit-0.1.0-py3-none-any.whl") as wheel:
        assert RELATIVE.findall(wheel.read("tfkit-0.1.0.dist-info/METADATA").decode()) == []
