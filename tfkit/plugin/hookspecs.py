"""The hooks that a plugin may implement, and the two pluggy markers that belong to them."""

from __future__ import annotations

from typing import Protocol

import pluggy

from tfkit.component import Component

PROJECT = "tfkit"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function `tfkit_register` as a hook."""


class Register(Protocol):
    """What `tfkit_register` is given; it knows which plugin it was given to."""

    def __call__(self, config: type[Component], /) -> None:
        """Add the component; raises `TypeError` when the class is no proper config."""


@hookspec
def tfkit_register(register: Register) -> None:
    """Call `register` with the config class of each component that the plugin brings."""
