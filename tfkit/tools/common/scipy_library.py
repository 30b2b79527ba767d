"""The library scipy, which comparisons need and no other tool."""

from __future__ import annotations

from typing import Any

from tfkit.errors import Diagnostic, SpecError


def import_scipy() -> Any:
    """Import scipy; raise SpecError if it is not installed. Its `stats` takes half as long to import as torch."""
    try:
        import scipy  # type: ignore[import-untyped]
    except ImportError as missing:
        message = "a comparison needs `scipy`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[train]"; the runs stay')) from missing
    return scipy
