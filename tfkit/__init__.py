"""tfkit: transformers as YAML, built to plain PyTorch.

    model = tfkit.build("gpt2")           # an ordinary nn.Module
    graph = tfkit.load("my_model.yaml")   # the checked spec, before any tensor exists

The public names are listed in `__init__.pyi`. Each is imported when it is first used: `import tfkit` is quick, and does
not import torch.
"""

from __future__ import annotations

import os
from functools import cache

_STUB = f"{os.path.splitext(__file__)[0]}.pyi"
if not os.path.isfile(_STUB):
    raise ImportError(f"tfkit needs its files in a folder, not in an archive: there is no {_STUB!r}; pip installs them")


@cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, as the stub gives it to type checkers and editors."""
    import re

    with open(_STUB, encoding="utf-8") as file:
        return {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", file.read(), re.MULTILINE)}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("tfkit")
    if name == "__all__":
        return sorted(_homes())
    if name not in _homes():
        raise AttributeError(_unknown(name))
    from importlib import import_module

    home = _homes()[name]
    return import_module(f"tfkit.{name}") if home == "tfkit" else getattr(import_module(home), name)


def _unknown(name: str) -> str:
    text = f"module 'tfkit' has no attribute {name!r}"
    if name.startswith("_"):
        return text
    from tfkit.errors import closest

    near = closest(name, sorted(_homes()))
    return f"{text}: one with a similar name is {near!r}" if near else text


def __dir__() -> list[str]:
    return sorted(_homes())
