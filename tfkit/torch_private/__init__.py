"""All private names of torch that tfkit uses, with a file for each purpose.

torch may change a private name in any version. Each file therefore explains why no public name suffices, and
`tests/torch_private` tests the behaviour on which tfkit relies. With a different version of torch, run these tests
first: `make test TORCH=2.15.0 ARGS=tests/torch_private`. Every file works with all versions that docs/installing.md
lists as tested.

The functions below look names up, so that a torch without a name lacks only one feature. Building, running and training
a model need no private name. Nothing here imports tfkit except its errors.
"""

from __future__ import annotations

import warnings
from functools import cache
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch

from tfkit.errors import Diagnostic, SpecError


class MissingNameError(SpecError):
    """This version of torch lacks a private name. The message contains the name and the feature that needs the name."""


class MissingName:
    """Takes the place of a name that this version of torch lacks: every use of it raises `MissingNameError`."""

    def __init__(self, name: str, feature: str) -> None:
        self.text = f"torch {torch.__version__} has no `{name}`, which tfkit needs for {feature}"

    def fail(self, *_: Any, **__: Any) -> NoReturn:
        raise MissingNameError(Diagnostic(self.text, help="install a tested version of torch: see docs/installing.md"))

    __call__ = __getattr__ = fail

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type]:
        return (type("Missing", (), {"__new__": self.fail}),)


@cache
def private_name(name: str, feature: str) -> Any:
    """Return a private name of torch, by its dotted path, or a `MissingName` in its place."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        return MissingName(name, feature)


@cache
def optional_name(name: str, feature: str) -> Any:
    """Return a private name of torch, by its dotted path; None if torch lacks the name, with one warning."""
    value = private_name(name, feature)
    if isinstance(value, MissingName):
        warnings.warn(value.text, stacklevel=2)
        return None
    return value


def private_attribute(owner: object, name: str, feature: str) -> Any:
    """Return a private attribute of an object of torch; raise `MissingNameError` if it lacks the attribute."""
    try:
        return getattr(owner, name)
    except AttributeError:
        MissingName(f"{type(owner).__name__}.{name}", feature).fail()
