"""The hooks that a plugin may implement, and the two pluggy markers for them."""

from __future__ import annotations

from typing import Protocol

import pluggy

from tfkit.component import Component

PROJECT = "tfkit"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function `tfkit_register` as a hook."""


class Register(Protocol):
    """The argument of `tfkit_register`; it knows the plugin that it was given to."""

    def __call__(self, config: type[Component], /) -> None:
        """Add the component; raises `TypeError` if the class is not a proper config."""


@hookspec
def tfkit_register(register: Register) -> None:
    """Call `register` with the config class of each component in the plugin."""
