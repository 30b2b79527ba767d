"""The specs that come with tfkit, by name: what shells complete, and so without any import."""

from __future__ import annotations

from pathlib import Path


def specs_folder() -> Path:
    """The folder of the specs that come with tfkit: inside the package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    shipped = package / "_specs"
    return shipped if shipped.is_dir() else package.parent / "specs"


def shipped_specs() -> list[str]:
    """The bare names of the specs that come with tfkit."""
    return sorted(path.stem for path in specs_folder().glob("*.yaml"))
