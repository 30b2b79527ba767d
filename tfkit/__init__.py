"""tfkit: transformers as YAML, built to plain PyTorch.

    model = tfkit.build("gpt2")           # an ordinary nn.Module
    graph = tfkit.load("my_model.yaml")   # the checked spec, before any tensor exists

The public names are listed in `__init__.pyi`. Each is imported when it is first used: `import tfkit` is quick, and does
not import torch.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from types import ModuleType

_STUB = f"{os.path.splitext(__file__)[0]}.pyi"
if not os.path.isfile(_STUB):
    raise ImportError(f"tfkit needs its files in a folder, not in an archive: there is no {_STUB!r}; pip installs them")


@cache
def _homes(stub: str) -> dict[str, str]:
    """Return the module of each public name, as a stub gives it to type checkers and editors."""
    import re

    with open(stub, encoding="utf-8") as file:
        return {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", file.read(), re.MULTILINE)}


def _attribute(module: str, stub: str, name: str) -> object:
    """Import a public name of a module from its home."""
    homes = _homes(stub)
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(_unknown(module, name, sorted(homes)))
    from importlib import import_module

    home = homes[name]
    return import_module(f"tfkit.{name}") if home == "tfkit" else getattr(import_module(home), name)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("tfkit")
    return _attribute("tfkit", _STUB, name)


class _Package(ModuleType):
    @property
    def save(self) -> object:
        """The function `save`.

        It is a property because nnsight adds a method of this name to `object`, which Python finds before it calls
        `__getattr__`.
        """
        return _attribute("tfkit", _STUB, "save")


sys.modules[__name__].__class__ = _Package


def _unknown(module: str, name: str, names: list[str]) -> str:
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        return text
    from tfkit.errors import closest_name

    near = closest_name(name, names)
    return f"{text}: one with a similar name is {near!r}" if near else text


def __dir__() -> list[str]:
    return sorted(_homes(_STUB))
