"""Fixtures for tests of components."""

from __future__ import annotations

import pytest

from .attentions import run_flex_on_the_cpu


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> None:
    run_flex_on_the_cpu(monkeypatch)
