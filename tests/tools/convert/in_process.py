"""The converter's process, in the process of the test, where torch is imported already."""

from __future__ import annotations

from typing import Any

import pytest

from tfkit.tools.convert import convert, read_pickle


class InProcess:
    """Answers as the process does, without its limits."""

    def __init__(self, program: str) -> None:
        assert program == read_pickle.__file__

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def answer(self, request: tuple[str, str]) -> dict[str, Any]:
        return read_pickle.answer(*request)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "Isolated", InProcess)
