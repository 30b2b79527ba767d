"""The `extra_repr` of modules: the settings that `print(model)` shows of each, as `name=value`."""

from typing import Any

from torch import nn

MAX_LIST = 8
"""The longest list that is shown in full."""


def settings(self: nn.Module) -> str:
    """Return the plain attributes of a module, for `extra_repr = settings` in a class. `named` leaves some out."""
    return named(
        **{
            name: value
            for name, value in vars(self).items()
            if _is_plain(value) and not name.startswith("_") and name != "training"
        }
    )


def named(*values: Any, **by_name: Any) -> str:
    """Format values as the arguments of a call.

    Named values without effect (None, False, 0, a factor of 1) are omitted.
    """
    effective = {name: value for name, value in by_name.items() if not _does_nothing(value)}
    return ", ".join([*map(_text, values), *(f"{name}={_text(value)}" for name, value in effective.items())])


def _does_nothing(value: Any) -> bool:
    return value in (None, 0) or (isinstance(value, float) and value == 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def _text(value: Any) -> str:
    """Format a number with six digits; of a long list, only both ends."""
    if isinstance(value, list | tuple):
        items = [*value[:2], "...", value[-1]] if len(value) > MAX_LIST else value
        return f"[{', '.join(map(_text, items))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_text(item)}' for name, item in value.items())}}}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
