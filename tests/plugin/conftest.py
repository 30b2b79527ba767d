"""An environment for plugins without the installed plugins."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from tfkit.component import NormConfig
from tfkit.plugin import discover
from tfkit.plugin.hookspecs import hookimpl


class PlainConfig(NormConfig):
    kind: Literal["plain"] = "plain"

    def build(self, make: Any, width: int) -> Any: ...


def _register_plain(register: Any) -> None:
    register(PlainConfig)


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A built-in plugin of one norm, no switches from outside, and no module of the test left behind."""
    components = ModuleType("tfkit.components")
    components.tfkit_register = hookimpl(_register_plain)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tfkit.components", components)
    runs = ModuleType("tfkit.run.plugin")
    runs.tfkit_register = hookimpl(lambda register: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tfkit.run.plugin", runs)
    for name in ("TFKIT_DISABLE", "TFKIT_PLUGIN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if name.startswith("tfkit_plugin_") or file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None) -> Callable[..., None]:
    """Put a distribution of one module in a site folder, where alone entry points are then looked for."""
    site = tmp_path / "site"
    site.mkdir()

    def only_site() -> importlib.metadata.EntryPoints:
        actual = importlib.metadata.distributions(path=[str(site)])
        return importlib.metadata.EntryPoints(point for dist in actual for point in dist.entry_points)

    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(discover, "entry_points", only_site)

    def install(name: str, version: str, text: str, points: str = "") -> None:
        module = name.replace("-", "_")
        (site / f"{module}.py").write_text(text)
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(points or f"[tfkit]\n{module} = {module}\n")

    return install
