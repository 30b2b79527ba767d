"""The top of every file in the spec language: a model, a run, a sweep."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from tfkit.component import Config
from tfkit.errors import Invalid

VERSION = 1
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""The form of the names of models and runs."""


class Document(Config):
    """A file with the version of the language that it is written in."""

    tfkit: Literal[1]
    """Version of the spec language."""

    @field_validator("tfkit", mode="before")
    @classmethod
    def _version(cls, version: object) -> object:
        if type(version) is int and version != VERSION:
            message = f"this tfkit reads version {VERSION} of the spec language, not {version}"
            raise Invalid("tfkit", message, help=f"write `tfkit: {VERSION}`")
        return version
