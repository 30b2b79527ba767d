"""The command that prepares a release: `make release`, here without a network."""

from __future__ import annotations

import importlib.util
import re
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]


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
    assert "tfkit-0.1.0-py3-none-any.whl" in names
